"""Laws that every partition keeps, and refusals."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from atoll.core.errors import ConfigError, DataError
from atoll.data.partition import (
    GRAPH_PARTITIONS,
    NODE_PARTITIONS,
    PARTITIONS,
    Partition,
    divide,
)
from atoll.data.public.registry import load_dataset
from atoll.data.source import GraphSet, Source


@pytest.mark.data
@pytest.mark.parametrize("recipe", ["louvain", "metis"])
def test_arxiv_structure_needs_no_dense_matrix(recipe, real_data):
    source = load_dataset("ogbn-arxiv-structure", real_data("ogbn-arxiv-structure"))
    partition = divide(source, recipe, 10)
    assert np.array_equal(np.sort(np.concatenate(partition.parts)), np.arange(169343))
    assert max(partition.sizes) < 1.05 * 16934


def test_sha1_ignores_the_order_inside_a_client():
    text = b"0,2,10;1,3"
    partition = Partition("random", (np.array([10, 0, 2]), np.array([3, 1])))
    assert partition.sha1 == hashlib.sha1(text).hexdigest()[:12]
    assert partition.sizes == (3, 2)


CASES = range(200)


DISJOINT = [name for name in NODE_PARTITIONS if name not in {"metis-overlap", "column"}]


def random_source(rng: np.random.Generator) -> Source:
    """1 to 120 nodes, from no edge to dense, directed, with self-loops, repeats, unknown labels."""
    nodes = int(rng.integers(1, 121))
    edges = rng.integers(0, nodes, size=(2, int(nodes * rng.choice([0, 0.3, 1, 3, 10]))))
    classes = int(rng.integers(1, 6))
    y = rng.integers(-1 if rng.random() < 0.3 else 0, classes, size=nodes)
    return Source("noise", np.ones((nodes, 1), np.float32), edges, y, classes)


def random_graph_set(rng: np.random.Generator) -> GraphSet:
    lengths = rng.integers(1, 9, size=int(rng.integers(1, 200)))
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    offset, size = np.repeat(ptr[:-1], lengths), np.repeat(lengths, lengths)
    edges = np.stack([np.arange(ptr[-1]), offset + rng.integers(0, size)])
    x = rng.normal(size=(ptr[-1], 2)).astype(np.float32)
    return GraphSet("noise", x, edges, ptr, rng.integers(0, 3, size=len(lengths)), 3)


def try_divide(source: Source | GraphSet, recipe: str, clients: int, seed: int) -> Partition | None:
    """None where the recipe refuses with a sentence that says what to use instead."""
    try:
        return divide(source, recipe, clients, seed)
    except DataError as refusal:
        sentence = str(refusal)
    assert "; use " in sentence
    return None


def assert_each_exactly_once(partition: Partition, count: int) -> None:
    assert np.array_equal(np.sort(np.concatenate(partition.parts)), np.arange(count))


@pytest.mark.parametrize("recipe", DISJOINT)
def test_laws_of_disjoint_node_partitions(recipe):
    done = 0
    for case in CASES:
        rng = np.random.default_rng([11, case])
        source = random_source(rng)
        clients = int(rng.integers(1, min(source.num_nodes, 12) + 1))
        partition = try_divide(source, recipe, clients, case)
        if partition is None:
            continue
        done += 1
        assert_each_exactly_once(partition, source.num_nodes)
        assert clients == len(partition.parts)
        assert min(partition.sizes) >= 1
        assert all(ids.dtype == np.int64 for ids in partition.parts)
        if case < 40:
            again = divide(source, recipe, clients, case)
            assert all(map(np.array_equal, partition.parts, again.parts))
    # The recipes with a lower limit on sizes refuse many of these small graphs.
    assert done >= 40


@pytest.mark.parametrize(
    "recipe", ["louvain", "louvain-fedgta", "metis", "metis-recursive", "random"]
)
def test_any_number_of_clients_up_to_the_number_of_nodes(recipe):
    for case in range(60):
        rng = np.random.default_rng([12, case])
        source = random_source(rng)
        clients = int(rng.integers(1, source.num_nodes + 1))
        partition = divide(source, recipe, clients, case)
        assert_each_exactly_once(partition, source.num_nodes)
        assert min(partition.sizes) >= 1
        if recipe == "louvain":
            assert min(partition.sizes) >= source.num_nodes // clients // 2


def test_louvain_of_one_node_per_client():
    source = random_source(np.random.default_rng(0))
    partition = divide(source, "louvain", source.num_nodes)
    assert set(partition.sizes) == {1}


def test_laws_of_overlapping_clients():
    done = 0
    for case in CASES:
        rng = np.random.default_rng([13, case])
        source = random_source(rng)
        per_community = int(rng.integers(1, 6))
        clients = per_community * int(rng.integers(1, 5))
        try:
            partition = divide(source, "metis-overlap", clients, case, per_community=per_community)
        except DataError:
            continue
        done += 1
        assert min(partition.sizes) >= 1
        for ids in partition.parts:
            assert len(np.unique(ids)) == len(ids)
            assert set(ids.tolist()) <= set(range(source.num_nodes))
        if per_community < clients:  # nothing is shared across communities
            assert not np.intersect1d(partition.parts[0], partition.parts[-1]).size
    assert done >= 100


@pytest.mark.parametrize("recipe", list(GRAPH_PARTITIONS))
def test_laws_of_graph_set_partitions(recipe):
    done = 0
    for case in CASES:
        rng = np.random.default_rng([14, case])
        source = random_graph_set(rng)
        clients = int(rng.integers(1, min(source.num_graphs, 12) + 1))
        partition = try_divide(source, recipe, clients, case)
        if partition is None:
            continue
        done += 1
        assert_each_exactly_once(partition, source.num_graphs)
        assert min(partition.sizes) >= 1
        assert partition.sha1 == divide(source, recipe, clients, case).sha1
    assert done >= 100


def global_state() -> tuple[object, ...]:
    name, keys, *rest = np.random.get_state()
    return (random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist())


@pytest.mark.parametrize("recipe", [*DISJOINT, "metis-overlap"])
def test_global_generators_play_no_part(recipe):
    y = np.arange(300) % 3
    ring = np.stack([np.arange(300), np.roll(np.arange(300), -1)])
    source = Source("ring", np.ones((300, 1), np.float32), ring, y, 3)
    clients = 2 if recipe.endswith("plus") else 5
    hashes = set()
    for noise in (1, 2):
        random.seed(noise)
        np.random.seed(noise)
        torch.manual_seed(noise)
        before = global_state()
        hashes.add(divide(source, recipe, clients, 0).sha1)
        assert global_state() == before
    assert len(hashes) == 1


@pytest.mark.parametrize("recipe", list(GRAPH_PARTITIONS))
def test_global_generators_play_no_part_for_graph_sets(recipe):
    source = random_graph_set(np.random.default_rng(3))
    before = global_state()
    divide(source, recipe, 2, 0)
    assert global_state() == before


@pytest.mark.parametrize("recipe", ["louvain", "louvain-fedtad", "dirichlet", "random"])
def test_seeded_recipes_follow_the_seed(recipe):
    rng = np.random.default_rng(5)
    edges = rng.integers(0, 400, size=(2, 1200))
    source = Source("noise", np.ones((400, 1), np.float32), edges, rng.integers(0, 4, 400), 4)
    assert len({divide(source, recipe, 4, seed).sha1 for seed in range(4)}) > 1


def two_cliques() -> Source:
    """Nodes 0..3 and 4..7, all joined inside, one bridge between."""
    inside = [(i, j) for i in range(4) for j in range(4) if i != j]
    edges = [
        *inside,
        *((i + 4, j + 4) for i, j in inside),
        (3, 4),
        (4, 3),
    ]
    y = np.repeat([0, 1], 4)
    return Source("cliques", np.ones((8, 1), np.float32), np.array(edges).T, y, 2)


@pytest.mark.parametrize(
    ("recipe", "clients", "options", "error", "words"),
    [
        ("louvian", 2, {}, ConfigError, "unknown partition 'louvian'; did you mean 'louvain'?"),
        ("metis:5", 2, {}, ConfigError, "options follow the name as metis:key=value"),
        ("feature-skew", 2, {}, ConfigError, "divides sets of graphs, but 'cliques' is one graph"),
        ("louvain", None, {}, ConfigError, "must be a whole number of at least 1, but is None"),
        ("louvain", 0, {}, ConfigError, "at least 1, but is 0"),
        ("louvain", 2.0, {}, ConfigError, "must be a whole number"),
        ("louvain", 9, {}, DataError, "has 8 nodes, too few for 9 clients; use at most 8 clients"),
        ("louvain", 2, {"detla": 3}, ConfigError, "did you mean 'delta'?"),
        ("louvain", 2, {"delta": -1}, ConfigError, "delta must be a whole number of at least 0"),
        ("random", 2, {"alpha": 1}, ConfigError, "takes no options, but got 'alpha'"),
        ("louvain-openfgl", 2, {}, DataError, "use a smaller delta or partition 'louvain'"),
        ("louvain-fedtad", 4, {"delta": 3}, DataError, "use at most 2 clients, or"),
        ("louvain-fedgta", 2, {"compat": "give-up"}, ConfigError, "unknown compat 'give-up'"),
        ("louvain-plus", 7, {}, DataError, "use at most 2 clients"),
        ("metis", 2, {"reseed": "false"}, ConfigError, "reseed must be true or false"),
        ("metis-overlap", 6, {}, ConfigError, "use a multiple of 5"),
        ("metis-overlap", 5, {"per_community": 1}, DataError, "use at most 4 clients"),
        ("dirichlet", 2, {}, DataError, "use at most 1 clients, or a smaller least"),
        ("dirichlet", 2, {"alpha": 0}, ConfigError, "alpha must be a number above 0, but is 0"),
        ("dirichlet", 8, {"least": 1, "alpha": 1e-4}, DataError, "in each of 100 draws"),
        ("column", None, {}, ConfigError, "needs a node column of 'cliques'; its columns are"),
        ("column:bnak", None, {}, ConfigError, "its columns are: bank, gap"),
        ("column:bank", 5, {}, ConfigError, "has 2 values, so it gives 2 clients, not 5"),
        ("column:gap", None, {}, DataError, "no value at node 6 (1 in all)"),
    ],
)
def test_refusals_are_one_clear_sentence(recipe, clients, options, error, words):
    gap = np.array([1, 1, 1, 1, 2, 2, np.nan, 2])
    source = replace(two_cliques(), columns={"bank": np.arange(8) % 2, "gap": gap})
    with pytest.raises(error) as caught:
        divide(source, recipe, clients, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recipe", ["louvain", "metis-overlap", "column:bank"])
def test_recipes_for_one_graph_refuse_a_set_of_graphs(recipe):
    with pytest.raises(ConfigError, match="divides one graph, but 'noise' is a set of graphs"):
        divide(random_graph_set(np.random.default_rng(0)), recipe, 2)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True])
def test_seeds_that_no_generator_takes(seed):
    with pytest.raises(ConfigError, match="seed must be"):
        divide(two_cliques(), "random", 2, seed)


def test_more_clients_than_graphs():
    source = random_graph_set(np.random.default_rng(0))
    with pytest.raises(
        DataError, match=f"graphs, too few for 500 clients; use at most {len(source.y)}"
    ):
        divide(source, "gcfl-oneds", 500)


def test_compat_replacement_needs_overlap():
    with pytest.raises(ConfigError, match="needs overlap"):
        divide(random_graph_set(np.random.default_rng(0)), "gcfl-oneds", 2, compat="replacement")


def test_every_recipe_has_its_own_sentence():
    assert all(function.__doc__ for function in PARTITIONS.values())


def graph_set(graphs: int = 130) -> GraphSet:
    """Graph g is a path of 2 + g % 5 nodes whose features are all -g."""
    lengths = 2 + np.arange(graphs) % 5
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    tails = np.concatenate([np.arange(a, b - 1) for a, b in pairwise(ptr)])
    edges = np.stack([np.r_[tails, tails + 1], np.r_[tails + 1, tails]])
    x = -np.repeat(np.arange(graphs), lengths)[:, None].astype(np.float32)
    return GraphSet("paths", x, edges, ptr, np.arange(graphs) % 2, 2)


@pytest.mark.data
def test_cora_dirichlet_alpha_is_the_skew(real_data):
    cora = load_dataset("cora", real_data("cora"))

    def largest_class(alpha: float) -> float:
        parts = divide(cora, "dirichlet", 10, 0, alpha=alpha).parts
        return float(np.mean([np.bincount(cora.y[i]).max() / len(i) for i in parts]))

    assert largest_class(0.1) > 0.5
    assert largest_class(100.0) < 0.4


def test_column_is_followed_in_ascending_order():
    bank = np.array(["b", "a", "b", "c", "a", "a", "c", "b"])
    source = replace(two_cliques(), columns={"bank": bank})
    partition = divide(source, "column:bank")
    assert [ids.tolist() for ids in partition.parts] == [[1, 4, 5], [0, 2, 7], [3, 6]]
    assert (partition.recipe, len(partition.parts)) == ("column:bank", 3)
    assert divide(source, "column:bank", 3).sha1 == partition.sha1


def test_gcfl_chunks_in_file_order_then_draws_like_the_public_code():
    partition = divide(graph_set(130), "gcfl-oneds", 2, seed=123)
    stream = np.random.RandomState(123)
    drawn = np.array([stream.randint(low=0, high=2, size=1)[0] for _ in range(30)])
    for client, ids in enumerate(partition.parts):
        chunk = np.arange(50 * client, 50 * client + 50)
        assert ids.tolist() == [*chunk, *(100 + np.flatnonzero(drawn == client))]


def test_gcfl_overlap_repeats_a_graph_only_with_compat():
    source = graph_set(200)
    for compat, repeats in ((None, False), ("replacement", True)):
        partition = divide(source, "gcfl-oneds", 4, 123, overlap=True, compat=compat)
        assert all(50 <= size < 150 for size in partition.sizes)
        found = [len(np.unique(ids)) < len(ids) for ids in partition.parts]
        assert all(found) if repeats else not any(found)


def test_feature_and_topology_skew_cut_sorted_runs():
    by_feature = divide(graph_set(13), "feature-skew", 3)
    assert [ids.tolist() for ids in by_feature.parts] == [
        [12, 11, 10, 9],
        [8, 7, 6, 5],
        [4, 3, 2, 1, 0],
    ]
    by_degree = divide(graph_set(12), "topology-skew", 3)
    assert [(ids % 5).tolist() for ids in by_degree.parts] == [
        [0, 0, 0, 1],
        [1, 1, 2, 2],
        [3, 3, 4, 4],
    ]
