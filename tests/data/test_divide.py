"""From a graph to a federation: induced edges only, every node's things follow it, bad clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atoll.core.errors import ConfigError, DataError
from atoll.core.graph import Graph, Sparse
from atoll.data.client_graph import InducedSubgraphs
from atoll.data.divide import federate
from atoll.data.source import TEST, TRAIN, UNUSED, VAL, Source
from atoll.data.synthetic import Lagoon, make_lagoon

EVERYTHING = ("no-edge", "single-class")


def lagoon(**knobs: float) -> Source:
    return make_lagoon(Lagoon(**{"nodes": 240, "words": 40, **knobs}), 4, 0)


def dense(x: torch.Tensor | Sparse) -> torch.Tensor:
    return x.to_dense() if isinstance(x, Sparse) else x


def toy(owners: list[str], edges: list[tuple[int, int]], y: list[int], **more) -> Source:
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    x = np.arange(len(y) * 2, dtype=np.float32).reshape(-1, 2)
    more = {"columns": {"bank": np.array(owners)}, **more}
    return Source("toy", x, ends, np.array(y), 2, **more)


def check_against_source(graph: Graph, source: Source, ids: np.ndarray) -> None:
    """Features, labels and edges are the source's own, restricted to the client's nodes."""
    ids = ids.astype(int)
    x = source.x.toarray() if sp.issparse(source.x) else source.x
    assert np.array_equal(dense(graph.x).numpy(), x[ids].astype(np.float32))
    assert np.array_equal(graph.y.numpy(), np.maximum(source.y[ids], 0))
    inside = np.isin(source.edges, ids).all(0)
    there = {(int(ids[u]), int(ids[v])) for u, v in graph.edges.T.tolist()}
    assert there == set(map(tuple, source.edges[:, inside].T.tolist()))
    assert graph.edges.shape[1] == inside.sum()


@settings(max_examples=25, deadline=None)
@given(
    recipe=st.sampled_from(["louvain", "metis", "random", "dirichlet", "column:owner"]),
    split=st.sampled_from(["stratified", "random", "openfgl", "fedtad"]),
    seed=st.integers(0, 10_000),
)
def test_clients_hold_their_own_nodes_and_no_others(recipe: str, split: str, seed: int) -> None:
    source = lagoon()
    try:
        found = federate(
            source, clients=4, partition=recipe, split=split, seed=seed, allow=EVERYTHING
        )
    except DataError as error:
        assume("has no training node" not in str(error))
        raise
    owned = np.concatenate([graph.ids.numpy() for graph in found.graphs])
    assert sorted(owned.tolist()) == list(range(source.num_nodes))
    for graph in found.graphs:
        check_against_source(graph, source, graph.ids.numpy())
        roles = torch.stack([graph.train, graph.val, graph.test])
        assert set(roles.unique().tolist()) <= {0.0, 1.0}
        assert (roles.sum(0) == 1).all()  # disjoint, and everybody has a label
        assert graph.train.sum() > 0
    assert found.about["nodes"] == [g.num_nodes for g in found.graphs]
    again = federate(source, clients=4, partition=recipe, split=split, seed=seed, allow=EVERYTHING)
    assert again.about == found.about


def test_sparse_and_dense_features_give_the_same_federation() -> None:
    source = lagoon()
    full = replace(source, x=source.x.toarray())
    pairs = zip(federate(source, clients=3).graphs, federate(full, clients=3).graphs, strict=True)
    for sparse, plain in pairs:
        assert isinstance(sparse.x, Sparse)
        assert isinstance(plain.x, torch.Tensor)
        assert torch.equal(sparse.x.to_dense(), plain.x)
        assert torch.equal(sparse.edges, plain.edges)


def test_edge_weights_and_unknown_labels_follow_their_nodes() -> None:
    source = toy(
        list("aabb"), [(0, 1), (1, 0), (1, 2), (3, 2)], [0, 1, -1, 1],
        weight=np.float32([1, 2, 3, 4]), split=np.int8([TRAIN, TEST, TRAIN, VAL]),
    )  # fmt: skip
    first = InducedSubgraphs(source).graph(np.array([1, 0]), np.int8([TEST, TRAIN]))
    assert first.edges.tolist() == [[1, 0], [0, 1]]
    assert first.edge_weight.tolist() == [1, 2]
    assert first.test.tolist() == [1, 0]
    second = InducedSubgraphs(source).graph(np.array([2, 3]), np.int8([TRAIN, VAL]))
    assert second.train.tolist() == [0, 0]  # its label is unknown, so it cannot teach
    assert second.val.tolist() == [0, 1]
    assert second.y.tolist() == [0, 1]


def test_split_seed_and_partition_seed_are_independent() -> None:
    source = lagoon()
    a, b = (
        federate(source, clients=3, partition="random", seed=s, partition_seed=7) for s in (1, 2)
    )
    assert a.about["sha1"] == b.about["sha1"]
    assert not torch.equal(a.graphs[0].train, b.graphs[0].train)


def refusal(source: Source, **options) -> str:
    options = {"clients": None, "partition": "column:bank", "split": "given", **options}
    with pytest.raises((DataError, ConfigError)) as caught:
        federate(source, **options)
    return str(caught.value)


def roles(text: str) -> np.ndarray:
    return np.int8([{"t": TRAIN, "v": VAL, "e": TEST, "-": UNUSED}[c] for c in text])


RING = [(0, 1), (1, 0), (2, 3), (3, 2)]


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (
            toy(list("aabb"), RING, [0, 1, 0, 1], split=roles("tvee")),
            ("client 1 of 2 (2 nodes of 'toy')", "no training node", "fewer clients"),
        ),
        (
            toy(list("aabb"), [(0, 1), (1, 0)], [0, 1, 0, 1], split=roles("tvtv")),
            ("client 1 of 2", "has no edge", "--allow no-edge"),
        ),
        (
            toy(list("aabb"), RING, [0, 1, 1, 1], split=roles("tvtv")),
            ("client 1 of 2", "a single class", "--allow single-class"),
        ),
        (
            replace(toy(list("aabb"), RING, [0, 1, 0, 1]), x=np.float32([[1], [2], [np.nan], [4]])),
            ("'toy'", "NaN or infinite feature at node 2, column 0", "1 in all", "replace"),
        ),
        (
            replace(
                toy(list("aabb"), RING, [0, 1, 0, 1]),
                x=sp.csr_array(np.float32([[1, 0], [0, np.inf], [0, 0], [0, 4]])),
            ),
            ("NaN or infinite feature at node 1, column 1", "1 in all"),
        ),
        (
            toy(list("aabb"), RING, [0, 1, 2, 1]),
            ("node 2 has label 2", "labels are 0 to 1", "-1 where unknown"),
        ),
        (
            toy(list("aabb"), RING, [0, 1, -2, 1]),
            ("node 2 has label -2", "labels are 0 to 1"),
        ),
        (toy([], [], []), ("'toy' has no nodes", "at least one node")),
        (
            toy(list("aabb"), [(0, 9)], [0, 1, 0, 1]),
            ("an edge to node 9", "numbered 0 to 3"),
        ),
    ],
)  # fmt: skip
def test_unusable_graphs_and_clients_are_refused_in_one_sentence(source, parts) -> None:
    sentence = refusal(source)
    for part in parts:
        assert part in sentence
    assert "\n" not in sentence


def test_clients_without_edges_or_with_one_class_can_be_allowed() -> None:
    source = toy(list("aabb"), [(0, 1), (1, 0)], [0, 1, 1, 1], split=roles("tvtv"))
    found = federate(source, clients=None, partition="column:bank", split="given", allow=EVERYTHING)
    assert found.about["edges"] == [2, 0]


def test_more_clients_than_nodes() -> None:
    sentence = refusal(lagoon(), clients=999, partition="random", split="stratified")
    assert sentence == (
        "data 'lagoon' has 240 nodes, too few for 999 clients; use at most 240 clients"
    )
