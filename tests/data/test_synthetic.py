"""The built-in data: deterministic, and every option has its effect."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import ConfigError
from atoll.data.source import Source
from atoll.data.synthetic import Archipelago, Lagoon, built_in, make_lagoon, parse_lagoon


def make(owners: int = 4, seed: int = 0, **knobs: float) -> Source:
    return make_lagoon(Lagoon(**{"nodes": 1500, **knobs}), owners, seed)


def homophily(source: Source, nodes: np.ndarray | None = None) -> float:
    a, b = source.edges
    kept = np.ones(a.size, bool) if nodes is None else nodes[a]
    return float((source.y[a] == source.y[b])[kept].mean())


def label_spread(source: Source) -> float:
    """Mean distance of the owners' label distributions from the common one."""
    owner = source.columns["owner"]
    counts = np.stack(
        [np.bincount(source.y[owner == k], minlength=source.classes) for k in np.unique(owner)]
    )
    shares = counts / counts.sum(1, keepdims=True)
    return float(np.abs(shares - counts.sum(0) / counts.sum()).sum(1).mean())


def nearest_mean_accuracy(source: Source) -> float:
    """The accuracy of predicting the field from words only."""
    x = source.x.toarray()
    means = np.stack([x[source.y == c].mean(0) for c in range(source.classes)])
    return float(((x @ means.T - (means**2).sum(1) / 2).argmax(1) == source.y).mean())


def same_source(a: Source, b: Source) -> bool:
    return (
        np.array_equal(a.edges, b.edges)
        and np.array_equal(a.y, b.y)
        and (a.x != b.x).nnz == 0
        and np.array_equal(a.columns["owner"], b.columns["owner"])
    )


def test_the_seed_decides_everything() -> None:
    assert same_source(make(seed=3), make(seed=3))
    assert not np.array_equal(make(seed=3).y, make(seed=4).y)


def test_global_generators_are_left_alone() -> None:
    state = np.random.get_state()[1].copy()
    make()
    assert np.array_equal(np.random.get_state()[1], state)


@pytest.mark.parametrize(
    ("knob", "values", "measure"),
    [
        ("homophily", (0.1, 0.4, 0.7, 1.0), homophily),
        ("label_skew", (0.0, 0.3, 0.6, 0.9), label_spread),
        ("feature_noise", (1.0, 0.8, 0.5, 0.0), nearest_mean_accuracy),
        (
            "own_library",
            (0.0, 0.4, 0.8, 1.0),
            lambda s: float(np.equal(*s.columns["owner"][s.edges]).mean()),
        ),
        ("degree", (2.0, 4.0, 8.0), lambda s: s.edges.shape[1] / s.num_nodes),
    ],
)
def test_knob_moves_what_it_names(knob: str, values: tuple[float, ...], measure) -> None:
    # Averaged over seeds, because one draw of a skew may be mild by chance.
    found = [np.mean([measure(make(seed=s, **{knob: v})) for s in range(3)]) for v in values]
    assert all(a < b for a, b in pairwise(found)), found


def test_topology_skew_spreads_the_owners_homophily() -> None:
    def spread(skew: float) -> float:
        source = make(label_skew=0.0, topology_skew=skew, own_library=1.0, homophily=0.5)
        owner = source.columns["owner"]
        return float(np.ptp([homophily(source, owner == k) for k in range(4)]))

    assert spread(0.0) < spread(0.2) < spread(0.45)


def test_degree_and_extreme_homophily_are_met() -> None:
    source = make(degree=4.0, homophily=1.0, topology_skew=0.0, label_skew=0.0)
    assert source.edges.shape[1] / source.num_nodes == pytest.approx(4.0, rel=0.1)
    assert homophily(source) == 1.0


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(10, 400),
    classes=st.integers(1, 9),
    share=st.floats(0, 1),
    owners=st.integers(1, 40),
    seed=st.integers(0, 2**31 - 1),
)
def test_every_possible_lagoon_is_a_usable_graph(nodes, classes, share, owners, seed) -> None:
    knobs = Lagoon(
        nodes=nodes, classes=classes, words=30, homophily=share, label_skew=share,
        topology_skew=share, feature_noise=share, own_library=share,
    )  # fmt: skip
    if nodes < 10 * owners:
        with pytest.raises(ConfigError, match=f"cannot have {owners} clients"):
            make_lagoon(knobs, owners, seed)
        return
    source = make_lagoon(knobs, owners, seed).checked()
    assert source.x.shape == (nodes, 30)
    assert source.classes == classes
    assert set(np.unique(source.x.data)) <= {1.0}
    a, b = source.edges
    assert (a != b).all()
    pairs = set(zip(a.tolist(), b.tolist(), strict=True))
    assert len(pairs) == a.size
    assert {(v, u) for u, v in pairs} == pairs


def test_knobs_are_read_from_the_name() -> None:
    assert parse_lagoon("lagoon") == parse_lagoon("lagoon:") == Lagoon()
    assert parse_lagoon("lagoon:nodes=50, homophily=0.3") == Lagoon(nodes=50, homophily=0.3)
    assert {type(f.default) for f in fields(Lagoon)} == {int, float}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lagoon:nodez=3", "unknown lagoon knob 'nodez'; did you mean 'nodes'?"),
        ("lagoon:nodes=many", "lagoon: nodes cannot be 'many'; it takes a whole number"),
        ("lagoon:degree", "lagoon: degree cannot be ''; it takes a number"),
        ("lagoon:homophily=1.2", "lagoon: homophily is 1.2; give a number from 0 to 1"),
        ("lagoon:label_skew=nan", "lagoon: label_skew is nan; give a number from 0 to 1"),
        ("lagoon:classes=0", "lagoon: classes is 0; give at least 1"),
        (
            "lagoon:degree=inf",
            "lagoon: degree is inf; give a number above 0 and below the 3000 nodes",
        ),
    ],
)
def test_impossible_knobs_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lagoon(text)
    assert str(caught.value) == sentence


def test_an_archipelago_has_owners_of_the_wished_sizes_and_no_edge_between_them() -> None:
    source = make_lagoon(parse_lagoon("archipelago:least=20,most=30"), 200, 3)
    owner = source.columns["owner"]
    sizes = np.bincount(owner)
    assert (len(sizes), sizes.min(), sizes.max()) == (200, 20, 30)
    assert (owner[source.edges[0]] == owner[source.edges[1]]).all()
    assert isinstance(source.x, np.ndarray)
    assert source.checked().name == "archipelago"
    assert built_in("archipelago:least=20") is Archipelago
    assert built_in("cora") is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("archipelago:nodes=50", "unknown archipelago knob 'nodes'"),
        ("archipelago:least=5", "archipelago: owners of 5 to 200 nodes are not possible; give"),
        ("archipelago:least=60,most=50", "archipelago: owners of 60 to 50 nodes are not possible"),
        ("archipelago:least=many", "archipelago: least cannot be 'many'; it takes a whole number"),
        ("archipelago:degree=60", "archipelago: degree is 60.0; give a number above 0 and below"),
        ("archipelago:homophily=2", "archipelago: homophily is 2.0; give a number from 0 to 1"),
    ],
)
def test_knobs_of_an_archipelago_that_cannot_be(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_lagoon(text)


def test_an_archipelago_needs_an_owner() -> None:
    with pytest.raises(ConfigError, match="archipelago cannot have 0 clients; give at least 1"):
        make_lagoon(Archipelago(), 0, 0)
