"""Mini-batches: whole graphs, each exactly once, independent of the node order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.core.batching import WHOLE, Graphs, batching_of
from atoll.core.errors import ConfigError
from atoll.core.fit import fit
from atoll.core.graph import Distinct, Graph, Matrix, Sparse, with_views
from atoll.core.losses import cross_entropy
from atoll.core.minibatch import minibatches, padded, whole_graphs, with_batching
from atoll.core.optim import Adam
from atoll.core.random import fold, make_key
from atoll.core.tree import Tree, leaves
from atoll.engines.base import ENGINES
from atoll.engines.recording import no_reads
from atoll.experiment.rounds import Experiment
from atoll.methods import FedAvg
from atoll.nn.gin import GraphGIN
from atoll.nn.views import sparse_features, training_nodes
from atoll.testing import (
    CLASSES,
    FEATURES,
    double_precision,
    relabelled,
    small_federation,
    small_graph_federation,
)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


NET = GraphGIN(FEATURES, CLASSES, hidden=5, dropout=0.4)


def client(batch_size: int = 3, *, sparse: bool = False, kinds: bool = False) -> Graph:
    graph = replace(small_graph_federation().graphs[1], batching=batching_of(batch_size))
    if kinds:
        graph = replace(graph, x=torch.ones_like(graph.x))
    if sparse:
        graph = replace(graph, x=sparse_features(graph.x))
    return with_views(graph, NET.views)


def dense(matrix: Matrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.to_dense()


def root_ids(graph: Graph) -> list[int]:
    return graph.at_roots(graph.ids).tolist()


@pytest.mark.parametrize("sparse", [False, True])
@given(st.sets(st.integers(0, 8), min_size=1))
@settings(max_examples=20, deadline=None)
def test_a_batch_is_the_graph_that_its_graphs_would_make_alone(sparse, chosen):
    with double_precision():
        graph = client(sparse=sparse)
        roots = graph.roots[torch.tensor(sorted(chosen))]
        cut = whole_graphs(graph, roots)
        nodes = torch.isin(graph.root, roots).nonzero().squeeze(1)
        assert cut.ids.tolist() == graph.ids[nodes].tolist()
        assert root_ids(cut) == graph.ids[roots].tolist()
        assert torch.equal(cut.ids[cut.root], graph.ids[graph.root[nodes]])
        for name in ("y", "train", "val", "test", "real"):
            assert torch.equal(getattr(cut, name), getattr(graph, name)[nodes])
        # Views of the cut graph equal the cut views of the graph, in every entry and order.
        again = with_views(replace(cut, views={}), NET.views)
        for name, view in cut.views.items():
            torch.testing.assert_close(dense(view), dense(again.views[name]))
            for ours, fresh in zip(leaves(view), leaves(again.views[name]), strict=True):
                torch.testing.assert_close(ours, fresh)
        ends = {(int(graph.ids[u]), int(graph.ids[v])) for u, v in graph.edges.T.tolist()}
        kept = {(int(cut.ids[u]), int(cut.ids[v])) for u, v in cut.edges.T.tolist()}
        assert kept == {(u, v) for u, v in ends if u in cut.ids.tolist()}
        assert cut.edges[0].tolist() == sorted(cut.edges[0].tolist())


def test_a_dense_form_is_cut_with_its_matrix():
    graph = client(sparse=True)
    both = {
        name: replace(view, dense=view.to_dense()) if isinstance(view, Sparse) else view
        for name, view in {**graph.views, "x": graph.x}.items()
    }
    cut = whole_graphs(replace(graph, views=both), graph.roots[torch.tensor([1, 3, 6])])
    found = [view for view in cut.views.values() if isinstance(view, Sparse)]
    assert {view.square for view in found} == {True, False}
    for view in found:
        assert torch.equal(view.dense, replace(view, dense=None).to_dense())


def test_a_list_of_nodes_is_cut_to_those_in_the_batch():
    graph = client()
    views = {"training": training_nodes}
    cut = whole_graphs(with_views(graph, views), graph.roots[torch.tensor([1, 3, 6])])
    assert cut.views["training"].tolist() == with_views(cut, views).views["training"].tolist()
    assert 0 < len(cut.views["training"]) < int(graph.train.sum())


def test_a_list_of_nodes_is_cut_to_those_in_each_batch_of_an_epoch():
    views = {"training": training_nodes}
    batches = [batch for batch, _ in minibatches(with_views(client(2), views), make_key(5))]
    assert len(batches) > 1
    for batch in batches:
        listed = batch.views["training"].tolist()
        assert sorted(listed) == with_views(batch, views).views["training"].tolist()


@given(st.integers(1, 8), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_every_training_graph_is_in_one_batch_and_order_follows_the_key(size, seed):
    with double_precision():
        graph = client(size)
        parts = [root_ids(batch) for batch, _ in minibatches(graph, make_key(seed))]
        training = graph.ids[graph.train > 0].tolist()
        assert sorted(root for part in parts for root in part) == sorted(training)
        full, rest = divmod(len(training), size)
        assert [len(part) for part in parts] == [size] * full + [rest] * (rest > 0)
        again = [root_ids(batch) for batch, _ in minibatches(graph, make_key(seed))]
        assert parts == again


def test_keys_change_the_order_and_node_numbers_do_not():
    graph = client(2)

    def order(graph: Graph, seed: int) -> list[set[int]]:
        return [set(root_ids(batch)) for batch, _ in minibatches(graph, make_key(seed))]

    assert len({str(order(graph, seed)) for seed in range(8)}) > 1
    moved = with_views(relabelled(replace(graph, views={}), 3), NET.views)
    assert [order(moved, seed) for seed in range(8)] == [order(graph, seed) for seed in range(8)]


def test_batches_of_an_epoch_have_keys_of_their_own():
    keys = [int(key) for _, key in minibatches(client(2), make_key(0))]
    assert len(set(keys)) == len(keys) == 3


def on_training_graphs(params: Tree, graph: Graph, key: Tensor) -> Tensor:
    return cross_entropy(NET(params, graph, key), graph)


def trained(graph: Graph, epochs: int = 3) -> tuple[Tree, Tree]:
    return fit(on_training_graphs, NET.init(make_key(4)), Adam(), None, epochs, make_key(9), graph)


def test_only_clients_with_more_training_graphs_than_a_batch_are_cut():
    federation, chosen = small_graph_federation(), Graphs(3)
    cut = [with_batching(graph, chosen) for graph in federation.graphs]
    assert [graph.batching for graph in cut] == [WHOLE, chosen, chosen, WHOLE]
    assert all(graph.held_out is not None and graph.training is not None for graph in cut)
    assert all(not with_batching(graph, WHOLE).batching.cuts for graph in cut)


def test_one_graph_has_no_batches_of_graphs():
    with pytest.raises(ConfigError, match="batch_size is for clients with many graphs"):
        with_batching(small_federation().graphs[0], Graphs(3))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_experiment_chooses_and_else_the_federation(engine):
    federation, method = small_graph_federation(), FedAvg(NET, epochs=1)
    for chosen, used in ((None, Graphs(3)), (Graphs(2), Graphs(2)), (WHOLE, WHOLE)):
        made = Experiment(method, federation, rounds=1, engine=engine, batching=chosen).run()
        assert made.simulation.engine.graphs[1].batching == used
    assert federation.graphs[1].batching == WHOLE


def test_one_batch_that_holds_everything_is_the_full_batch():
    ours, full = trained(client(batch_size=50)), trained(client(batch_size=0))
    for one, other in zip(leaves(ours), leaves(full), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_client_without_batches_trains_on_its_training_graphs_only():
    graph = replace(client(), batching=WHOLE)
    ready = with_batching(graph, WHOLE)
    (batch, _), *others = minibatches(ready, make_key(1))
    assert not others
    assert set(root_ids(batch)) == set(graph.ids[graph.train > 0].tolist())
    assert len(batch.edges[0]) == int((graph.train[graph.root][graph.edges[0]] > 0).sum())
    for ours, full in zip(leaves(trained(ready)), leaves(trained(graph)), strict=True):
        torch.testing.assert_close(ours, full, rtol=1e-10, atol=1e-12)
    seen = list[int]()

    def loss(params: Tree, graph: Graph, key: Tensor) -> Tensor:
        seen.append(graph.num_nodes)
        return on_training_graphs(params, graph, key)

    for why in ("", "it reads all graphs"):
        fit(loss, NET.init(make_key(4)), Adam(), None, 1, make_key(9), ready, needs_whole=why)
    assert seen == [batch.num_nodes, graph.num_nodes]


@pytest.mark.parametrize("role", ["train", "val"])
def test_a_client_without_training_or_other_graphs_stays_whole(role):
    graph = replace(client(), batching=WHOLE)
    empty = torch.zeros_like(graph.train)
    lacking = {"train": empty} if role == "train" else {"val": empty, "test": empty}
    ready = with_batching(replace(graph, **lacking), WHOLE)
    assert ready.training is None
    assert ready.held_out is None


def test_every_batch_has_the_views_that_a_step_has_added():
    graph = with_batching(client(), Graphs(3))
    added = {"number": graph.ids.unsqueeze(1).double(), "listed": training_nodes(graph)}
    for names in (["number"], ["number", "listed"]):  # one by node; also a list of nodes
        views = graph.views | {name: added[name] for name in names}
        for batching in (Graphs(3), WHOLE):
            given = replace(with_batching(client(), batching), views=views)
            for batch, _ in minibatches(given, make_key(2)):
                assert batch.views["number"].squeeze(1).tolist() == batch.ids.tolist()
                if "listed" in names:
                    assert sorted(batch.views["listed"].tolist()) == training_nodes(batch).tolist()
    roomy = padded(graph)
    with no_reads(torch.device("cpu")):
        views = graph.views | {"number": added["number"]}
        batches = list(minibatches(replace(roomy, views=views), make_key(2)))
    for batch, _ in batches:
        rows = batch.views["number"].squeeze(1)[batch.real > 0]
        assert rows.tolist() == batch.ids[batch.real > 0].tolist()


def test_every_batch_is_a_step_on_its_own_graphs():
    graph = client(batch_size=3)
    steps = trained(graph, epochs=2)[1].steps
    assert int(steps) == 2 * 2  # five training graphs, three at a time

    params = NET.init(make_key(4))
    moments = Adam().init(params)
    for epoch in range(2):
        for batch, key in minibatches(graph, fold(make_key(9), epoch)):
            slope = torch.func.grad(on_training_graphs)(params, batch, key)
            params, moments = Adam().update(slope, params, moments)
    for ours, by_hand in zip(leaves(trained(graph, epochs=2)[0]), leaves(params), strict=True):
        torch.testing.assert_close(ours, by_hand, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("of", [{}, {"sparse": True}, {"kinds": True}])
def test_a_batch_of_an_epoch_has_what_its_graphs_would_have_alone(of):
    graph = client(3, **of)
    assert isinstance(graph.views["sum_x1"], Distinct) == ("kinds" in of)
    for batch, _ in minibatches(graph, make_key(3)):
        roots = torch.tensor([graph.ids.tolist().index(i) for i in root_ids(batch)])
        alone = whole_graphs(graph, roots)
        for name in ("y", "train", "real", "ids", "root", "roots"):
            assert torch.equal(getattr(batch, name), getattr(alone, name)), name
        for name, view in alone.views.items():
            for ours, fresh in zip(leaves(batch.views[name]), leaves(view), strict=True):
                torch.testing.assert_close(ours, fresh, rtol=0, atol=0)


def test_what_a_batch_does_not_have_cannot_be_read_by_mistake():
    batch, _ = next(minibatches(client(3), make_key(0)))
    with pytest.raises(ValueError, match="not enough values to unpack"):
        _source, _target = batch.edges
    with pytest.raises(RuntimeError, match=r"size|shape"):
        batch.x @ torch.ones(FEATURES, 2)


def test_what_is_held_out_are_validation_and_test_graphs():
    graph = client(3)
    rest = with_batching(graph, Graphs(1)).held_out
    assert rest is not None
    assert sorted(root_ids(rest)) == sorted(graph.ids[(graph.val + graph.test) > 0].tolist())
    params = NET.init(make_key(1))
    ours = {int(i): row for i, row in zip(rest.ids, NET(params, rest), strict=True)}
    whole = {int(i): row for i, row in zip(graph.ids, NET(params, graph), strict=True)}
    for root in root_ids(rest):
        torch.testing.assert_close(ours[root], whole[root])


@pytest.mark.parametrize("pool", ["sum", "max"])
def test_padded_batches_train_alike_and_wait_for_no_number(pool):
    net = replace(NET, pool=pool)
    graph = with_batching(with_views(replace(client(), views={}), net.views), Graphs(3))
    roomy = padded(graph)
    assert len(roomy.batching.room) == 3  # nodes, and entries of two sparse views
    with no_reads(torch.device("cpu")):
        batches = [batch for batch, _ in minibatches(roomy, make_key(9))]
    shapes = {tuple(leaf.shape for leaf in leaves(batch.views)) for batch in batches}
    assert len(batches) == 2
    assert len(shapes) == 1  # the last batch has fewer graphs

    def loss(params: Tree, graph: Graph, key: Tensor) -> Tensor:
        return cross_entropy(net(params, graph, key), graph)

    both = [
        fit(loss, net.init(make_key(4)), Adam(), None, 3, make_key(9), one)
        for one in (roomy, graph)
    ]
    for ours, plain in zip(*map(leaves, both), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


def test_views_that_have_no_room_stay_as_they_are():
    for graph in (client(kinds=True), with_views(client(), {"training": training_nodes})):
        assert padded(with_batching(graph, Graphs(3))).batching == Graphs(3)
