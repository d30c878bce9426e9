"""All clients at once: padding never shows, states follow clients, and memory is bounded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.core.errors import StepError, WireError
from atoll.core.graph import Graph, make_graph, with_views
from atoll.core.message import Message, ToAll, ToEach
from atoll.core.method import Step, client_step
from atoll.core.random import dropout, fold, make_key
from atoll.core.tree import Empty, Tree, inside_transform, leaves, record, structure, take, tree_map
from atoll.engines.fused import Fused
from atoll.engines.serial import Serial
from atoll.methods import FedAvg, Local
from atoll.nn.nets import GCN
from atoll.nn.views import sparse_features
from atoll.testing import (
    CLASSES,
    FEATURES,
    double_precision,
    small_federation,
)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def keys(positions: Sequence[int], round: int = 0) -> Tensor:
    return fold(fold(make_key(1), round), torch.tensor(positions))


def assert_same(a: Tree, b: Tree, tolerance: float = 1e-10) -> None:
    assert structure(a) == structure(b)
    assert len(leaves(a)) == len(leaves(b))
    for one, other in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# Padding and chunks change nothing


NET = GCN(FEATURES, CLASSES, hidden=5, dropout=0.4)
METHODS = {"fedavg": FedAvg(NET, epochs=2), "local": Local(NET, epochs=2)}
with double_precision():
    MODEL = NET.init(make_key(5))
    GRAPHS = small_federation().graphs


def ready(sizes: tuple[int, ...]) -> list[Graph]:
    return [with_views(graph, NET.views) for graph in small_federation(sizes).graphs]


def start(name: str) -> Message:
    return ToAll(MODEL if name == "fedavg" else make_key(5))


@pytest.mark.parametrize("name", list(METHODS))
@given(
    st.lists(st.integers(4, 60), min_size=1, max_size=5).map(tuple),
    st.integers(1, 6),
)
@example((4, 60), 2)
@settings(max_examples=12, deadline=None)
def test_any_padding_and_any_chunk_give_what_the_loop_gives(name, sizes, chunk):
    graphs, step = ready(sizes), METHODS[name].train
    everyone = list(range(len(sizes)))
    fused, serial = Fused(graphs, chunk), Serial(graphs)
    for number in range(2):
        given_keys = keys(everyone, number)
        out = [e.run(step, everyone, start(name), given_keys, number) for e in (fused, serial)]
        assert_same(*out)
    assert_same(fused.export_states(), serial.export_states())


@pytest.mark.parametrize("more", [0, 1, 500])
def test_a_larger_neighbour_changes_nothing_for_a_client(more):
    (small,) = ready((9,))
    (large,) = ready((9 + more,))
    step = METHODS["fedavg"].train
    alone = Fused([small]).run(step, [0], ToAll(MODEL), keys([0]), 0)
    beside = Fused([small, large]).run(step, [0, 1], ToAll(MODEL), keys([0, 1]), 0)
    assert_same(take(beside, 0), take(alone, 0), 1e-12)


# Programs


def test_a_program_of_one_runs_without_vmap():
    seen = []

    @dataclass(frozen=True)
    class Spy:
        @client_step
        def look(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
            seen.append(inside_transform())
            return Reply(graph.real.sum() + message), {"seen": graph.real.sum()}

    graphs = ready((9, 13))
    fused, message = Fused(graphs), ToEach(torch.arange(2.0))
    together = fused.run(Spy().look, [0, 1], message, keys([0, 1]), 0)
    alone = fused.run(Spy().look, [1], message, keys([1]), 0)
    assert seen == [True, False]
    assert together.value.tolist() == [9, 14]
    assert alone.value.tolist() == [14]
    assert [float(state["seen"]) for state in fused.export_states()] == [9, 13]


def test_clients_with_sparse_and_dense_features_train_together():
    mixed = [
        replace(graph, x=sparse_features(graph.x)) if k % 2 else graph
        for k, graph in enumerate(small_federation().graphs)
    ]
    graphs = [with_views(graph, NET.views) for graph in mixed]
    step, everyone = METHODS["fedavg"].train, [0, 1, 2, 3]
    fused = Fused(graphs).run(step, everyone, ToAll(MODEL), keys(everyone), 0)
    assert_same(fused, Serial(graphs).run(step, everyone, ToAll(MODEL), keys(everyone), 0))


# States


@record
class Reply:
    value: Tree


@record
class Memory:
    before: Tree
    total: Tensor
    after: Tree


@dataclass(frozen=True)
class Toy:
    """Steps whose states are awkward."""

    @client_step
    def count(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        """A state with nothing before and after the tensor."""
        total = graph.real.sum() + (0 if state is None else state.total)
        return Reply(total + message), Memory(None, total, [None, {"name": "x"}])

    @client_step(vectorize=False)
    def count_alone(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        if bool(graph.real.sum() > 15):  # what no program of many clients may do
            message = message * 1
        return Toy.count.function(self, graph, message, state, key)

    @client_step(keeps_state=True)
    def peek(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply(graph.real.sum() * 0 - 1 if state is None else state.total + 0 * message)

    @client_step
    def nothing(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply(message + graph.real.sum() * 0), None

    @client_step
    def visits(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        """A plain number that differs between clients which came more or less often."""
        seen = 0 if state is None else state["seen"]
        return Reply(message * 0 + seen + graph.real.sum()), {"seen": seen + 1}

    @client_step
    def later(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        """Nothing on the first visit, a tensor from the second on."""
        old = graph.real.sum() * 0 if state is None or state["sum"] is None else state["sum"]
        new = None if state is None else old + graph.real.sum()
        return Reply(old + message), {"sum": new}

    @client_step
    def noisy(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        h = dropout(graph.x, key, graph.ids, 0.5)
        return Reply((h * graph.real.unsqueeze(1)).sum(0) + message), None

    @client_step
    def chance(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply(torch.rand(2) + message), None

    @client_step
    def broken(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        raise KeyError("lost")

    @client_step
    def refusing(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        raise WireError("no")


TOY = Toy()
ROSTERS = [[0, 1, 2, 3], [1, 3], [0, 1, 2], [2], [0, 3], [0, 1, 2, 3]]
ZERO = ToAll(torch.zeros(()))


def play(engine: Fused | Serial, step: Step, message: Message = ZERO) -> list[Tree]:
    return [
        engine.run(step, roster, message, keys(roster, number), number)
        for number, roster in enumerate(ROSTERS)
    ]


@pytest.mark.parametrize("chunk", [1, 2, 0])
@pytest.mark.parametrize(
    "step", [TOY.count, TOY.count_alone, TOY.nothing, TOY.visits, TOY.later, TOY.noisy],
    ids=lambda step: step.name,
)  # fmt: skip
def test_states_follow_their_clients_through_changing_rosters(step, chunk):
    fused, serial = Fused(GRAPHS, chunk), Serial(GRAPHS)
    assert_same(play(fused, step), play(serial, step))
    mine, reference = fused.export_states(), serial.export_states()
    assert [str(state) for state in mine] == [str(state) for state in reference]
    assert_same(mine, reference)


def test_a_state_may_hold_nothing_before_and_after_its_tensors():
    fused = Fused(GRAPHS)
    play(fused, TOY.count)
    state = fused.export_states()[0]
    assert state.before is None
    assert state.after == [None, {"name": "x"}]
    assert float(state.total) == 4 * 13  # client 0 is on four rosters


def test_states_that_are_stored_and_loaded_continue():
    whole, first = Fused(GRAPHS), Fused(GRAPHS, 2)
    play(whole, TOY.count)
    play(first, TOY.count)
    second = Fused(GRAPHS, 3)
    second.import_states(first.export_states())
    assert_same(play(second, TOY.count), play(whole, TOY.count))


def test_a_step_that_keeps_the_state_cannot_change_it():
    fused = Fused(GRAPHS)
    everyone = [0, 1, 2, 3]
    fresh = fused.run(TOY.peek, everyone, ZERO, keys(everyone), 0)
    assert fresh.value.tolist() == [-1] * 4
    assert fused.export_states() == [None] * 4
    fused.run(TOY.count, [0, 2], ZERO, keys([0, 2]), 0)
    mixed = fused.run(TOY.peek, everyone, ZERO, keys(everyone), 1)
    assert mixed.value.tolist() == [13, -1, 22, -1]
    assert fused.export_states()[1] is None


def test_a_steady_roster_reuses_its_graphs_and_states():
    fused, everyone = Fused(GRAPHS), [0, 1, 2, 3]
    for number in range(3):
        fused.run(TOY.count, everyone, ZERO, keys(everyone), number)
        graph = fused._graph((0, 1, 2, 3))
        assert list(fused.states.stacks) == [(0, 1, 2, 3)]
        assert fused.stacked == {(0, 1, 2, 3): graph}


def test_changing_rosters_leave_no_old_stacks_behind():
    fused = Fused(GRAPHS)
    dice = torch.Generator().manual_seed(0)
    for number in range(30):
        roster = sorted(torch.randperm(4, generator=dice)[: 1 + number % 4].tolist())
        fused.run(TOY.count, roster, ZERO, keys(roster, number), number)
    assert len(fused.states.stacks) <= 4
    assert len(fused.stacked) <= 4


def test_replies_come_back_in_the_order_of_the_positions():
    fused = Fused(GRAPHS, 2)
    message = ToEach(torch.tensor([0.0, 100.0, 200.0, 300.0]))
    reply = fused.run(TOY.count, [0, 1, 2, 3], message, keys(range(4)), 0)
    assert reply.value.tolist() == [13, 117, 222, 309]
    assert fused.run(TOY.nothing, [1, 3], message, keys([1, 3]), 0).value.tolist() == [100, 300]


def test_a_message_without_tensors_is_fine():
    @dataclass(frozen=True)
    class Quiet:
        @client_step
        def train(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
            return Empty(), state

    assert Fused(GRAPHS).run(Quiet().train, [0, 1], ToAll(Empty()), keys([0, 1]), 0) is not None


def test_steps_that_run_one_by_one_say_so(caplog):
    with caplog.at_level(logging.INFO, logger="atoll"):
        Fused(GRAPHS).run(TOY.count_alone, [0, 1], ZERO, keys([0, 1]), 0)
    assert "count_alone declares vectorize=False" in caplog.text


def test_an_error_in_a_program_names_step_and_round():
    where = r"KeyError in test_fused.py line \d+: .* \(in a program of 4 clients\)"
    with pytest.raises(StepError, match=f"step broken, round 7: {where}"):
        Fused(GRAPHS).run(TOY.broken, [0, 1, 2, 3], ZERO, keys(range(4)), 7)


@record
class PerNode:
    mark: Tensor


@dataclass(frozen=True)
class Marking:
    @client_step
    def train(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply(graph.real.sum()), PerNode(graph.real * 2)


def test_states_whose_size_depends_on_the_bucket_stop_with_step_and_round():
    fused = Fused(GRAPHS)
    fused.run(Marking().train, [0, 1], ZERO, keys([0, 1]), 0)
    fused.run(Marking().train, [2, 3], ZERO, keys([2, 3]), 0)
    with pytest.raises(StepError, match=r"step train, round 1: .*equal size"):
        fused.run(Marking().train, [0, 1, 2, 3], ZERO, keys(range(4)), 1)


def test_our_own_errors_pass_as_they_are():
    for engine in (Fused(GRAPHS), Serial(GRAPHS)):
        with pytest.raises(WireError, match=r"^no$"):
            engine.run(TOY.refusing, [0], ZERO, keys([0]), 7)


def test_a_global_random_call_is_refused():
    with pytest.raises(StepError, match=r"step chance.*random"):
        Fused(GRAPHS).run(TOY.chance, [0, 1], ZERO, keys([0, 1]), 0)


def test_ids_decide_noise_not_places():
    graph = make_graph(
        torch.ones(5, 2), torch.zeros(2, 0, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    )
    moved = replace(graph, ids=graph.ids.flip(0))
    both = Fused([graph, moved]).run(TOY.noisy, [0, 1], ZERO, keys([0, 0]), 0)
    assert_same(both.value[0], both.value[1])


# Several cores


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Threads:
    """Reports its thread and its number of torch threads. One client can fail on request."""

    fails: bool = False

    @client_step
    def where(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> tuple[Tree, Tree]:
        if self.fails and graph.num_nodes == 9:
            raise ValueError("no luck")
        here = [threading.get_ident() % 2**31, torch.get_num_threads()]
        return {"seen": torch.tensor(here) + 0 * graph.y.sum()}, None


@pytest.mark.usefixtures("two_threads")
def test_buckets_run_side_by_side_on_several_cores_with_the_same_numbers():
    method = FedAvg(GCN(FEATURES, CLASSES, hidden=5, dropout=0.4))
    graphs = small_federation().prepared(method.views).graphs
    model, everyone = method.net.init(make_key(2)), range(len(graphs))
    engines = [Fused(graphs, chunk=1), Serial(graphs)]
    for round in range(2):
        replies = [
            engine.run(method.train, everyone, ToAll(model), keys(everyone, round), round)
            for engine in engines
        ]
        assert_same(*replies)
    assert_same(*[engine.export_states() for engine in engines])
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_threads_have_one_core_each_and_errors_name_the_client():
    graphs = small_federation().graphs
    everyone = range(len(graphs))
    found = Fused(graphs, chunk=1).run(
        Threads().where, everyone, ToAll(Empty()), keys(everyone), 0
    )["seen"]
    assert set(found[:, 1].tolist()) == {1}
    assert threading.get_ident() % 2**31 not in found[:, 0].tolist()
    with pytest.raises(StepError, match="client 3, step where, round 0: ValueError"):
        Fused(graphs, chunk=1).run(
            Threads(fails=True).where, everyone, ToAll(Empty()), keys(everyone), 0
        )
    assert torch.get_num_threads() == 2


# Standing in for a recording


def test_other_states_and_graphs_stand_in_and_leave_no_trace():
    fused = Fused(GRAPHS)
    fused.run(TOY.count, range(4), ZERO, keys(range(4)), 0)
    assert fused.regroup()
    before, own = fused.export_states(), fused.program_states()
    zeros = tree_map(torch.zeros_like, own)
    with fused.substituted(zeros):
        assert_same(list(fused.program_states().values()), list(zeros.values()))
        fused.run(TOY.count, range(4), ZERO, keys(range(4)), 1)
    assert_same(fused.export_states(), before)
    with pytest.raises(StepError, match="KeyError"), fused.substituted(zeros):
        fused.run(TOY.broken, range(4), ZERO, keys(range(4)), 1)
    assert_same(fused.export_states(), before)
    fused.put_states(zeros)
    assert_same(list(fused.program_states().values()), list(zeros.values()))


def test_states_that_only_some_clients_have_are_not_ready_to_be_recorded():
    fused = Fused(GRAPHS)
    assert fused.regroup()
    assert set(fused.program_states().values()) == {None}
    fused.run(TOY.count, [1, 2], ZERO, keys([1, 2]), 0)
    assert not fused.regroup()
    fused.run(TOY.count, [0, 3], ZERO, keys([0, 3]), 0)
    assert fused.regroup()
