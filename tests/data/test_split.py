"""Splits: published totals on real Cora, and the laws of each recipe."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.sparse.csgraph import connected_components

from atoll.core.errors import ConfigError, DataError
from atoll.data.divide import federate
from atoll.data.partition import divide
from atoll.data.public.registry import load_dataset
from atoll.data.source import MISSING, TEST, TRAIN, UNSEEN, UNUSED, VAL, GraphSet, Source
from atoll.data.split import SPLITS, growth, split
from tests.data.toys import toy_set


@pytest.fixture(scope="module")
def cora_source(real_data) -> Source:
    return load_dataset("cora", real_data("cora"))


def labelled(y: np.ndarray, roles: np.ndarray | None = None) -> Source:
    """A graph without edges, because splits read only labels."""
    none = np.empty((2, 0), dtype=np.int64)
    return Source(
        "labels",
        np.ones((len(y), 1), np.float32),
        none,
        y,
        int(y.max()) + 1,
        split=roles,
        columns={"when": np.arange(len(y))},
    )


def with_column(recipe: str) -> str:
    """The recipe, with the column that a split in time needs."""
    return "time:when" if recipe == "time" else recipe


def random_case(case: int) -> tuple[Source, tuple[np.ndarray, ...]]:
    rng = np.random.default_rng([21, case])
    y = rng.integers(-1 if case % 3 == 0 else 0, rng.integers(1, 7), size=rng.integers(8, 300))
    y[:2] = 0
    source = labelled(y)
    return source, divide(source, "random", int(rng.integers(1, 6)), case).parts


def totals(roles: list[np.ndarray]) -> list[int]:
    together = np.concatenate(roles)
    return [int((together == role).sum()) for role in (TRAIN, VAL, TEST)]


# Real Cora --------------------------------------------------------------------------------------


@pytest.mark.data
@pytest.mark.parametrize(
    ("partition", "clients", "recipe", "expected"),
    [
        (("louvain-openfgl", 0), 10, "openfgl", [515, 1079, 1114]),
        (("louvain-openfgl", 0), 10, "fedtad", [515, 1058, 1135]),
        (("louvain-openfgl", 0), 20, "openfgl", [494, 1083, 1131]),
        (("louvain-openfgl", 0), 20, "fedtad", [494, 1028, 1186]),
        (("louvain-fedtad", 2024), 10, "fedtad", [512, 1056, 1140]),
    ],
)
def test_cora_published_totals(cora_source, partition, clients, recipe, expected):
    parts = divide(cora_source, partition[0], clients, partition[1]).parts
    for seed in (0, 1):  # the cuts do not depend on the shuffle
        assert totals(split(cora_source, parts, recipe, seed)) == expected


@pytest.mark.data
def test_cora_fedtad_first_client(cora_source):
    parts = divide(cora_source, "louvain-fedtad", 10, 2024).parts
    assert totals(split(cora_source, parts, "fedtad")[:1]) == [53, 108, 115]


@pytest.mark.data
@pytest.mark.parametrize(("clients", "without", "pairs"), [(10, 12, 64), (20, 35, 116)])
def test_cora_classes_without_a_training_node(cora_source, clients, without, pairs):
    parts = divide(cora_source, "louvain-openfgl", clients).parts
    found = [
        (roles[cora_source.y[ids] == label] == TRAIN).any()
        for ids, roles in zip(parts, split(cora_source, parts, "openfgl"), strict=True)
        for label in np.unique(cora_source.y[ids])
    ]
    assert (len(found) - sum(found), len(found)) == (without, pairs)


@pytest.mark.data
@pytest.mark.parametrize("clients", [5, 10, 20])
def test_cora_stratified_does_not_drift(cora_source, clients):
    parts = divide(cora_source, "louvain", clients).parts
    roles = split(cora_source, parts)
    for ids, own in zip(parts, roles, strict=True):
        assert abs((own == TRAIN).sum() - 0.2 * len(ids)) <= 0.5
        assert abs((own == VAL).sum() - 0.4 * len(ids)) <= 1
        assert abs((own == TEST).sum() - 0.4 * len(ids)) <= 1


@pytest.mark.data
@pytest.mark.parametrize(
    ("draw", "first"),
    [
        (0, [2470, 1948, 372, 918, 1431]),
        (1, [178, 1672, 7, 1699, 910]),
        (2, [2466, 684, 2155, 721, 629]),
    ],
)
def test_cora_component_global_split_is_fed_pubs(cora_source, draw, first):
    n, (tail, head) = cora_source.num_nodes, cora_source.edges
    _, part = connected_components(sp.coo_array((np.ones(len(tail)), (tail, head)), shape=(n, n)))
    source = labelled(cora_source.y[part == np.bincount(part).argmax()])
    roles = split(source, [np.arange(2485)], "global", 1234, draw=draw)
    assert totals(roles) == [497, 994, 994]
    assert (roles[0][first] == TRAIN).all()
    stream = torch.Generator().manual_seed(1234)
    order = [torch.randperm(2485, generator=stream) for _ in range(3)][draw].numpy()
    assert order[:5].tolist() == first
    assert (roles[0][order[:497]] == TRAIN).all()
    assert (roles[0][order[497:1491]] == TEST).all()
    assert (roles[0][order[1491:]] == VAL).all()


# Laws -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [name for name in SPLITS if name not in {"given", "gcfl"}])
def test_every_labelled_node_has_a_role_and_no_other(recipe):
    for case in range(60):
        source, parts = random_case(case)
        roles = split(source, parts, with_column(recipe), case)
        again = split(source, parts, with_column(recipe), case)
        for ids, own, same in zip(parts, roles, again, strict=True):
            assert own.dtype == np.int8
            assert own.shape == ids.shape
            assert np.array_equal(own == UNUSED, source.y[ids] < 0)
            assert np.array_equal(own, same)


def test_stratified_keeps_the_ratios_of_client_and_class():
    for case in range(60):
        source, parts = random_case(case)
        for ids, own in zip(parts, split(source, parts, seed=case), strict=True):
            y = source.y[ids]
            count = int((y >= 0).sum())
            train = int(np.floor(0.2 * count + 0.5))
            assert (own == TRAIN).sum() == (train if train else min(count, 1))
            assert abs((own == VAL).sum() - (own == TEST).sum()) <= 1 + (train == 0)
            for label in range(source.classes):
                members = own[y == label]
                assert abs((members == TRAIN).sum() - 0.2 * len(members)) <= 1
                assert abs((members == VAL).sum() - 0.4 * len(members)) <= 1.5


def test_stratified_spares_no_class_on_purpose():
    source = labelled(np.repeat(np.arange(4), 2))
    trained = np.zeros(4)
    for seed in range(400):
        own = split(source, [np.arange(8)], seed=seed)[0]
        trained += np.bincount(source.y[own == TRAIN], minlength=4)
    assert trained.min() > 0.7 * trained.mean()


def test_a_tiny_client_still_trains():
    source = labelled(np.array([0, 1, 0]))
    roles = split(source, [np.array([0]), np.array([1, 2])])
    assert all((own == TRAIN).sum() == 1 for own in roles)


def test_stratified_gives_a_shared_node_one_role():
    source = labelled(np.arange(300) % 3)
    rng = np.random.default_rng(0)
    parts = [rng.choice(300, size=120, replace=False) for _ in range(6)]
    role_of: dict[int, int] = {}
    for ids, own in zip(parts, split(source, parts), strict=True):
        for node, role in zip(ids.tolist(), own.tolist(), strict=True):
            assert role_of.setdefault(node, role) == role
    share = np.mean([role == TRAIN for role in role_of.values()])
    assert 0.17 < share < 0.23


def test_clients_draw_from_streams_of_their_own():
    source = labelled(np.zeros(200, dtype=np.int64))
    halves = [np.arange(100), np.arange(100, 200)]
    for recipe in ("stratified", "openfgl", "fedtad", "random"):
        first, second = split(source, halves, recipe)
        assert not np.array_equal(first, second)
        assert np.array_equal(first, split(source, [halves[0], np.arange(150, 200)], recipe)[0])
        assert not np.array_equal(first, split(source, halves, recipe, seed=1)[0])


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [("openfgl", [6, 2, 3]), ("fedtad", [6, 2, 3]), ("random", [7, 2, 2])],
)
def test_other_ratios(recipe, expected):
    source = labelled(np.zeros(11, dtype=np.int64))
    roles = split(source, [np.arange(11)], recipe, ratios=(0.6, 0.2, 0.2))
    assert totals(roles) == expected


def test_sets_of_graphs_are_split_80_10_10():
    source = small_graph_set(100)
    for recipe in ("stratified", "openfgl", "fedtad", "gcfl", "random", "global"):
        assert totals(split(source, [np.arange(100)], recipe)) == [80, 10, 10]


def test_gcfl_is_scikit_learns_two_stage_draw():
    from sklearn.model_selection import train_test_split

    source = small_graph_set(100)
    ids = np.arange(99, -1, -1)
    own = split(source, [ids], "gcfl", seed=123)[0]
    train, rest = train_test_split(
        ids, train_size=0.8, test_size=0.2, stratify=source.y[ids], random_state=123
    )
    val, test = train_test_split(
        rest, train_size=0.5, test_size=0.5, stratify=source.y[rest], random_state=123
    )
    for role, expected in ((TRAIN, train), (VAL, val), (TEST, test)):
        assert set(ids[own == role]) == set(expected)


def small_graph_set(graphs: int) -> GraphSet:
    ptr = np.arange(graphs + 1)
    none = np.empty((2, 0), dtype=np.int64)
    x = np.ones((graphs, 1), np.float32)
    return GraphSet("dots", x, none, ptr, np.arange(graphs) % 2, 2)


def test_given_roles_follow_the_ids_and_unknown_labels_are_unused():
    source = labelled(np.array([0, 1, -1, 1]), np.array([TRAIN, VAL, TRAIN, UNUSED], np.int8))
    roles = split(source, [np.array([3, 0]), np.array([2, 1])], "given")
    assert [own.tolist() for own in roles] == [[UNUSED, TRAIN], [UNUSED, VAL]]


def test_global_generators_play_no_part():
    source = labelled(np.arange(100) % 3)
    source = replace(source, split=np.zeros(100, np.int8))
    for recipe in SPLITS:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        split(source, [np.arange(60), np.arange(60, 100)], with_column(recipe))
        after = (random.random(), np.random.rand(), torch.rand(1).item())
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        assert after == (random.random(), np.random.rand(), torch.rand(1).item())


@pytest.mark.parametrize(
    ("recipe", "arguments", "error", "words"),
    [
        (
            "80/10/10",
            {},
            ConfigError,
            "split cannot be '80/10/10'; give shares as --ratios 0.8/0.1",
        ),
        ("stratfied", {}, ConfigError, "unknown split 'stratfied'; did you mean 'stratified'?"),
        ("given", {}, DataError, "comes without a split"),
        ("stratified", {"draw": 1}, ConfigError, "split 'stratified' has no option 'draw'"),
        ("global", {"draw": -1}, ConfigError, "draw must be a whole number"),
        ("random", {"ratios": (0.5, 0.5)}, ConfigError, "give three shares"),
        ("random", {"ratios": (0.5, 0.4, 0.3)}, ConfigError, "sum to 1"),
        ("random", {"ratios": (0.0, 0.5, 0.5)}, ConfigError, "the first above 0"),
        ("gcfl", {}, DataError, "cannot stratify client 1 with class counts [1, 3]"),
    ],
)
def test_refusals_are_one_clear_sentence(recipe, arguments, error, words):
    source = labelled(np.array([0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, 1, 1]))
    parts = [np.arange(12), np.arange(12, 16)]
    with pytest.raises(error) as caught:
        split(source, parts, recipe, **arguments)
    assert words in str(caught.value)


def timed(times: np.ndarray, edge_time: np.ndarray | None = None) -> Source:
    """A ring of nodes with times, and labels of two classes."""
    nodes = np.arange(len(times))
    edges = np.stack([nodes, np.roll(nodes, -1)])
    y, x = nodes % 2, np.ones((len(nodes), 1), np.float32)
    return Source("ring", x, edges, y, 2, columns={"joined": times}, edge_time=edge_time)


def test_time_trains_before_it_validates_before_it_tests() -> None:
    times = np.random.default_rng(0).permutation(100)
    source, parts = timed(times), [np.arange(50), np.arange(50, 100)]
    roles = np.concatenate(split(source, parts, "time:joined"))
    assert np.bincount(roles).tolist() == [60, 20, 20]
    assert times[roles == TRAIN].max() < times[roles == VAL].min()
    assert times[roles == VAL].max() < times[roles == TEST].min()
    assert np.array_equal(roles, np.concatenate(split(source, parts, "time:joined", seed=7)))
    other = np.concatenate(split(source, parts, "time:joined,ratios=0.2/0.3/0.5"))
    assert np.bincount(other).tolist() == [20, 30, 50]
    given = np.concatenate(split(source, parts, "time:joined,val=10,test=90"))
    assert np.bincount(given).tolist() == [10, 80, 10]


def test_time_reads_dates_and_texts_of_dates() -> None:
    days = np.datetime64("2024-01-01") + np.arange(100)
    for values in (days, days.astype(str), days.astype(object).astype(str).astype(object)):
        roles = split(timed(values), [np.arange(100)], "time:joined,val=2024-02-01,test=2024-03-01")
        assert np.bincount(roles[0]).tolist() == [31, 29, 40]


def test_edges_appear_with_their_ends_and_with_their_own_time() -> None:
    when = np.zeros(100)
    when[5] = 85  # between two nodes of training, but after the testing began
    source = timed(np.arange(100), when)
    found = growth(source, "time:joined", None)
    assert found is not None
    since = found.of_nodes(source)
    assert since.tolist() == [0] * 60 + [1] * 20 + [2] * 20
    stage = found.of_edges(source, since)
    assert stage[[0, 5, 58, 59, 78, 79, 99]].tolist() == [0, 2, 0, 1, 1, 2, 2]
    clients = federate(source, clients=1, partition="random", split="time:joined")
    assert clients.about["cuts"] == [60.0, 80.0]
    assert clients.graphs[0].since.tolist() == since.tolist()  # type: ignore[union-attr]
    assert clients.graphs[0].edge_since.tolist() == stage.tolist()  # type: ignore[union-attr]


def test_inductive_has_the_roles_of_stratified_and_hides_what_is_not_for_training() -> None:
    source = replace(timed(np.arange(60)), y=np.where(np.arange(60) < 6, -1, np.arange(60) % 2))
    same = [split(source, [np.arange(60)], name, seed=3)[0] for name in ("stratified", "inductive")]
    assert np.array_equal(*same)
    graph = federate(source, clients=1, partition="random", split="inductive", seed=3).graphs[0]
    assert graph.since is not None
    assert graph.since[:6].tolist() == [0] * 6  # nodes without a label are there
    assert torch.equal(graph.since, (graph.val + 2 * graph.test).to(torch.int8))
    plain = federate(source, clients=1, partition="random", split="stratified", seed=3).graphs[0]
    assert plain.since is None


def test_what_a_split_in_time_cannot_use_is_refused() -> None:
    whole = [np.arange(9)]
    for values, recipe, sentence in (
        (np.arange(9), "time:left", "needs a node column of 'ring'; its columns are: joined"),
        (np.arange(9), "time", "split 'time:COLUMN' needs a node column"),
        (np.arange(9), "time:joined,val=3", "give both times, as in time:joined,val=60,test=80"),
        (np.arange(9), "time:joined,val=6,test=3", "leaves 6 of 9 labelled nodes before valida"),
        (np.zeros(9), "time:joined", "leaves 0 of 9 labelled nodes before validation, 0 before"),
        (np.arange(9), "time:joined,when=3", "split 'time' has no option 'when'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            split(timed(values), whole, recipe)
    gaps = np.where(np.arange(9) == 4, np.nan, np.arange(9))
    with pytest.raises(DataError, match=r"column 'joined' has no time at row 4 \(1 in all\)"):
        split(timed(gaps), whole, "time:joined")
    with pytest.raises(DataError, match="column 'joined' is no number and no date like 2024"):
        split(timed(np.array(["soon"] * 9)), whole, "time:joined")
    for recipe in ("inductive", "time:joined", "unseen"):
        with pytest.raises(ConfigError, match="is for one graph, but 'toys' is a set of graphs"):
            split(toy_set(9), whole, recipe)


def test_unseen_takes_classes_and_a_share_of_the_others_out_of_training() -> None:
    y = np.concatenate([np.full(6, -1), np.arange(194) % 4])
    source = replace(timed(np.arange(200)), y=y, classes=4)
    parts = [np.arange(100), np.arange(100, 200)]
    found = split(source, parts, "unseen:share=0.25,classes=1", seed=3)
    for ids, roles in zip(parts, found, strict=True):
        labels = y[ids]
        (gone,) = np.unique(labels[roles == MISSING])
        assert (roles[labels == gone] == MISSING).all()
        known = (labels >= 0) & (labels != gone)
        for label in np.unique(labels[known]):
            here = roles[labels == label]
            assert (here == UNSEEN).sum() == pytest.approx(0.25 * here.size, abs=1)
        rest = roles[known & (roles != UNSEEN)]
        assert (rest == TRAIN).sum() == pytest.approx(0.2 * rest.size, abs=1)
        assert set(rest.tolist()) == {TRAIN, VAL, TEST}
        assert (roles[labels < 0] == UNUSED).all()
    again = split(source, parts, "unseen:share=0.25,classes=1", seed=3)
    assert all(map(np.array_equal, found, again))
    for ids, roles in zip(parts, split(source, parts, "unseen:classes=2", seed=4), strict=True):
        assert np.unique(y[ids][roles == MISSING]).size == 2
    graph = federate(source, clients=1, partition="random", split="unseen", seed=3).graphs[0]
    assert graph.since is not None
    assert graph.since[:6].tolist() == [0] * 6  # nodes without a label are there
    assert set(graph.since.tolist()) == {0, UNSEEN, MISSING}
    assert not graph.since[(graph.train + graph.val + graph.test) > 0].any()


def test_unseen_nodes_of_a_class_that_nobody_trains_on_count_as_missing() -> None:
    y = np.array([0] * 50 + [1] * 49 + [2])
    source = replace(timed(np.arange(100)), y=y, classes=3)
    seeds = [split(source, [np.arange(100)], "unseen:share=0.5,classes=0", s)[0] for s in range(9)]
    roles = {int(one[99]) for one in seeds}
    assert MISSING in roles
    assert UNSEEN not in roles
    for one in seeds:  # at least one class stays
        assert set(split(source, [np.arange(100)], "unseen:classes=9", 0)[0]) >= {TRAIN, TEST}
        assert (one[:99] != MISSING).all()


def test_what_unseen_cannot_use_is_refused() -> None:
    source = timed(np.arange(9))
    for recipe, parts, sentence in (
        ("unseen:share=1", [np.arange(9)], "share is 1; give a number from 0 to below 1"),
        ("unseen:share=much", [np.arange(9)], "share is much; give a number"),
        ("unseen:classes=-1", [np.arange(9)], "classes must be a whole number of at least 0"),
        ("unseen", [np.arange(9), np.arange(5)], "clients that have no node in common"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            split(source, parts, recipe)
