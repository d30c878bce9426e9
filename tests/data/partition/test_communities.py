"""Louvain and METIS: the published partitions of Cora, and small graphs by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from atoll.data.partition import Partition, divide
from atoll.data.partition.communities import (
    PackingRule,
    cut,
    groups_of,
    mistaken_smallest,
    networkx_louvain,
    pack,
    scikit_louvain,
    smallest,
    stay,
    top_up,
)
from atoll.data.source import Source


def two_cliques(size: int = 4) -> Source:
    """Nodes 0..size-1 and size..2·size-1, all joined inside, one bridge between."""
    inside = [(i, j) for i in range(size) for j in range(size) if i != j]
    edges = [
        *inside,
        *((i + size, j + size) for i, j in inside),
        (size - 1, size),
        (size, size - 1),
    ]
    n = 2 * size
    y = np.repeat([0, 1], size)
    return Source("cliques", np.ones((n, 1), np.float32), np.array(edges).T, y, 2)


def kept_edges(source: Source, partition: Partition) -> list[int]:
    """Undirected edges inside each client of a disjoint partition."""
    owner = np.empty(source.num_nodes, dtype=np.int64)
    for client, ids in enumerate(partition.parts):
        owner[ids] = client
    inside = owner[source.edges[0]] == owner[source.edges[1]]
    sizes = np.bincount(owner[source.edges[0, inside]], minlength=len(partition.parts))
    return (sizes // 2).tolist()


LOUVAIN_FACTS = [
    ("louvain-openfgl", 0, 5, "546,542,524,540,556", 4728, "6972db79a6b7"),
    ("louvain-openfgl", 7, 10, "250,266,289,281,271,274,271,271,271,264", 4372, "0105b9a12e89"),
    ("louvain-openfgl", 0, 15, None, 4005, "98713223428d"),
    ("louvain-openfgl", 0, 20, None, 3424, "766ce2ed7099"),
    ("louvain-fedtad", 2024, 5, "541,541,525,558,543", 4737, "9b754e5406f3"),
    ("louvain-fedtad", 2024, 10, "276,273,277,272,271,273,270,232,278,286", 4333, "7a7bf8ee9370"),
    ("louvain-fedtad", 2024, 20, None, 3318, "27671536c59a"),
    ("louvain-fedtad", 2022, 10, "270,271,270,267,267,272,280,271,270,270", 4405, "9b57a5c95563"),
    ("louvain-fedtad", 2022, 15, None, 3845, "cdcc2e2609b3"),
    ("louvain-fedtad", 2022, 20, None, 3229, "3cef54806165"),
]


@pytest.mark.data
@pytest.mark.parametrize("facts", LOUVAIN_FACTS, ids=lambda facts: "-".join(map(str, facts[:3])))
@pytest.mark.parametrize("compat", [None, "give-up"])
def test_cora_louvain_is_the_published_one(cora_source, facts, compat):
    recipe, seed, clients, sizes, edges, sha1 = facts
    partition = divide(cora_source, recipe, clients, seed, compat=compat)
    assert partition.sha1 == sha1
    assert sum(kept_edges(cora_source, partition)) == edges
    if sizes:
        assert ",".join(map(str, partition.sizes)) == sizes


@pytest.mark.data
def test_cora_number_of_communities(cora_source):
    assert len(groups_of(scikit_louvain(cora_source, None))) == 106
    assert len(groups_of(networkx_louvain(cora_source, 2024))) == 103


@pytest.mark.data
def test_cora_fedtad_ten_clients_in_detail(cora_source):
    partition = divide(cora_source, "louvain-fedtad", 10, 2024)
    kept = [394, 465, 464, 545, 331, 320, 476, 356, 446, 536]
    assert kept_edges(cora_source, partition) == kept
    assert np.bincount(cora_source.y[partition.parts[0]]).tolist() == [1, 6, 227, 13, 0, 3, 26]


@pytest.mark.data
def test_cora_fedgta_duplicates_come_back_with_compat_alone(cora_source):
    for clients, duplicates in ((5, 2), (10, 4), (20, 4)):
        faulty = divide(cora_source, "louvain-fedgta", clients, 2023, compat="duplicates")
        ids = np.concatenate(faulty.parts)
        assert len(ids) - len(np.unique(ids)) == duplicates
        fixed = divide(cora_source, "louvain-fedgta", clients, 2023)
        assert np.array_equal(np.sort(np.concatenate(fixed.parts)), np.arange(2708))


@pytest.mark.data
def test_cora_fedgta_duplicates_in_34_of_60_runs(cora_source):
    faulty = 0
    for seed in range(20):
        groups = groups_of(networkx_louvain(cora_source, seed))
        for clients in (5, 10, 20):
            size = 2708 // clients
            rule = PackingRule(size, size + 1, size + 1, no_room=stay, duplicates=True)
            faulty += sum(map(len, pack(groups, clients, rule))) > 2708
    assert faulty == 34


@pytest.mark.data
@pytest.mark.parametrize("clients", [5, 10, 20])
def test_cora_strict_louvain_is_even_and_follows_the_seed(cora_source, clients):
    partitions = [divide(cora_source, "louvain", clients, seed) for seed in (0, 0, 1)]
    assert partitions[0].sha1 == partitions[1].sha1 != partitions[2].sha1
    for partition in partitions:
        assert np.array_equal(np.sort(np.concatenate(partition.parts)), np.arange(2708))
        assert min(partition.sizes) >= 2708 // clients // 2
        assert max(partition.sizes) < 2708 // clients + 20
        assert sum(kept_edges(cora_source, partition)) > 0.55 * 5278


@pytest.mark.data
@pytest.mark.parametrize(
    ("clients", "sizes", "lost"),
    [
        (2, None, 223),
        (5, "497,483,511,485,509", 391),
        (6, None, 503),
        (10, "250,244,245,253,247,255,242,250,254,245", 613),
        (20, None, 826),
    ],
)
def test_cora_component_metis(cora_component, clients, sizes, lost):
    assert (cora_component.num_nodes, cora_component.edges.shape[1]) == (2485, 2 * 5069)
    partition = divide(cora_component, "metis", clients, seed=3)
    assert 5069 - sum(kept_edges(cora_component, partition)) == lost
    if sizes:
        assert ",".join(map(str, partition.sizes)) == sizes


@pytest.mark.data
def test_cora_component_metis_recursive_up_to_eight_clients(cora_component):
    five = divide(cora_component, "metis-recursive", 5)
    assert 5069 - sum(kept_edges(cora_component, five)) == 407
    ten = divide(cora_component, "metis-recursive", 10)
    assert ten.sha1 == divide(cora_component, "metis", 10).sha1


@pytest.mark.data
@pytest.mark.parametrize("clients", [10, 30, 50])
def test_cora_component_overlapping_halves(cora_component, clients):
    communities = divide(cora_component, "metis", clients // 5).parts
    partition = divide(cora_component, "metis-overlap", clients, seed=1234)
    for client, ids in enumerate(partition.parts):
        community = communities[client // 5]
        assert len(ids) == len(np.unique(ids)) == len(community) // 2
        assert np.isin(ids, community).all()
    shared = len(np.intersect1d(partition.parts[0], partition.parts[1]))
    assert 0.3 < shared / len(partition.parts[0]) < 0.7
    assert not np.intersect1d(partition.parts[0], partition.parts[5]).size


@pytest.mark.data
def test_cora_component_overlap_draws_in_order_from_one_stream(cora_component):
    stream = random.Random(1234)
    drawn = [
        [
            stream.sample(ids.tolist(), len(ids) // 2)
            for ids in divide(cora_component, "metis", count // 5).parts
            for _ in range(5)
        ]
        for count in (10, 30)
    ]
    first = divide(cora_component, "metis-overlap", 10, 1234)
    second = divide(cora_component, "metis-overlap", 30, 1234, after=(10,))
    assert [ids.tolist() for ids in first.parts] == drawn[0]
    assert [ids.tolist() for ids in second.parts] == drawn[1]


@pytest.mark.data
@pytest.mark.parametrize("recipe", ["louvain-plus", "metis-plus"])
@pytest.mark.parametrize("clients", [5, 10, 20])
def test_cora_plus_keeps_communities_whole_and_groups_labels(cora_source, recipe, clients):
    partition = divide(cora_source, recipe, clients, seed=1)
    assert np.array_equal(np.sort(np.concatenate(partition.parts)), np.arange(2708))
    assert partition.sha1 == divide(cora_source, recipe, clients, seed=1).sha1
    purity = sum(np.bincount(cora_source.y[ids]).max() for ids in partition.parts) / 2708
    assert purity > 0.5  # 0.30 when the labels play no part
    if recipe == "louvain-plus":
        for group in groups_of(scikit_louvain(cora_source, None)):
            assert sum(np.isin(group[0], ids) for ids in partition.parts) == 1
            assert any(np.isin(group, ids).all() for ids in partition.parts)


def test_groups_come_in_the_order_of_their_first_member():
    groups = groups_of(np.array([7, 2, 7, 5, 2]))
    assert [group.tolist() for group in groups] == [[0, 2], [1, 4], [3]]


@pytest.mark.parametrize("recipe", ["louvain-fedgta", "metis", "metis-recursive"])
def test_two_cliques_are_two_clients(recipe):
    partition = divide(two_cliques(), recipe, 2)
    assert sorted(np.sort(ids).tolist() for ids in partition.parts) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_louvain_keeps_small_communities_whole():
    cliques = [(c + i, c + j) for c in range(0, 80, 10) for i in range(10) for j in range(i)]
    bridges = [(c, (c + 11) % 80) for c in range(0, 80, 10)]
    edges = np.array([*cliques, *bridges]).T
    source = Source("ring", np.ones((80, 1), np.float32), edges, np.zeros(80, np.int64), 1)
    partition = divide(source, "louvain", 4, seed=3)
    assert partition.sizes == (20, 20, 20, 20)
    for ids in partition.parts:
        assert np.unique(ids // 10, return_counts=True)[1].tolist() == [10, 10]


def test_reseed_hands_the_seed_to_metis():
    edges = np.random.default_rng(0).integers(0, 3000, size=(2, 9000))
    source = replace(two_cliques(4), x=np.ones((3000, 1)), edges=edges)
    hashes = {divide(source, "metis", 7, seed, reseed=True).sha1 for seed in range(3)}
    assert len(hashes) == 3
    assert len({divide(source, "metis", 7, seed).sha1 for seed in range(3)}) == 1


def test_cut_keeps_the_first_and_appends_the_rest():
    pieces = cut([np.arange(5), np.arange(5, 7)], 2)
    assert [piece.tolist() for piece in pieces] == [[0, 1], [5, 6], [2, 3], [4]]


def test_who_takes_a_group_that_fits_nowhere():
    sizes, everyone = np.array([5, 3, 9]), np.arange(3)
    assert smallest(sizes, everyone, 2) == 1
    assert stay(sizes, everyone, 2) == 2
    assert mistaken_smallest(sizes, everyone, 0) == 2  # 1001 steps on, the cursor is on the 9


def test_pack_stays_on_the_client_until_it_is_full():
    groups = [np.arange(3), np.arange(3, 5), np.arange(5, 7), np.arange(7, 8)]
    rule = PackingRule(piece=4, room=5, full=4, no_room=smallest)
    assert [ids.tolist() for ids in pack(groups, 2, rule)] == [[0, 1, 2, 3, 4], [5, 6, 7]]


def test_top_up_shares_the_largest_and_leaves_the_others():
    parts = top_up([np.arange(5), np.empty(0, int), np.arange(5, 8)])
    assert [ids.tolist() for ids in parts] == [[0, 1, 2], [3, 4], [5, 6, 7]]
