"""The cache of the fused engine: stacked private states, recorded steps, derived trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.core.method import client_step
from atoll.core.random import fold, make_key
from atoll.core.tree import Tree
from atoll.engines.programs import Derived, PrivateStates, RecordedSteps, at_once
from atoll.engines.stacking import stack_graphs
from atoll.testing import small_federation


def values(states: PrivateStates) -> list[Any]:
    return [None if state is None else state.tolist() for state in states.export()]


def test_states_follow_their_clients_from_stack_to_stack() -> None:
    states = PrivateStates(4)
    assert states.begun
    assert states.get((0, 1)) is None
    states.put((0, 1), torch.tensor([10.0, 11.0]))
    assert not states.begun
    states.put((2, 3), torch.tensor([12.0, 13.0]))
    assert states.get((1, 2)).tolist() == [11.0, 12.0]
    states.put((1, 2), torch.tensor([21.0, 22.0]))
    assert values(states) == [10.0, 21.0, 22.0, 13.0]
    assert len(states.stacks) == 3
    states.put((0, 3), torch.tensor([20.0, 23.0]))  # no newest state is left in the first two
    assert set(states.stacks) == {(1, 2), (0, 3)}
    assert values(states) == [20.0, 21.0, 22.0, 23.0]


def test_a_stack_of_a_steady_program_is_not_copied() -> None:
    states, members = PrivateStates(2), (0, 1)
    stacked = torch.tensor([1.0, 2.0])
    states.put(members, stacked)
    assert states.get(members) is stacked


def test_clients_with_states_of_different_kinds_are_parted() -> None:
    states = PrivateStates(3)
    states.put((0,), {"a": torch.ones(1)})
    states.put((1,), {"b": torch.ones(1)})
    assert states.same_structure((0, 1, 2)) == [(0,), (1,), (2,)]
    states.replace([{"a": torch.ones(())}] * 3)
    assert states.same_structure((0, 1, 2)) == [(0, 1, 2)]


@dataclass(frozen=True)
class Adder:
    @client_step
    def add(self, graph: Any, message: Tree, state: Tree, key: Tensor) -> Any:
        return graph.real.sum() + message, state + 1


def inputs(count: int) -> tuple[Tree, Tree, Tensor]:
    return torch.tensor(5.0), torch.zeros(count), fold(make_key(0), torch.arange(count))


def test_a_step_for_all_clients_at_once_shares_a_message_or_has_one_each() -> None:
    graphs = stack_graphs(small_federation((9, 12)).graphs)
    message, states, keys = inputs(2)
    reply, after = at_once(Adder().add, graphs, message, states, keys, shared=True)
    assert (reply.tolist(), after.tolist()) == ([14.0, 17.0], [1.0, 1.0])
    own = torch.tensor([1.0, 2.0])
    assert at_once(Adder().add, graphs, own, states, keys, False)[0].tolist() == [10.0, 14.0]


def test_a_program_is_recorded_when_it_comes_again_and_replays_with_new_inputs() -> None:
    steps, calls = RecordedSteps(1), []

    def program(message: Tree, states: Tree, keys: Tensor) -> tuple[Tree, Tree]:
        calls.append(1)
        return message + states, states + 1

    for number in range(4):
        message, states, keys = inputs(2)
        reply, _ = steps.run(Adder().add, (0, 1), True, program, message + number, states, keys)
        assert reply.tolist() == [5.0 + number] * 2
    assert [recording is not None for recording in steps.recordings.values()] == [True]


def test_a_program_that_reads_a_number_runs_without_a_recording() -> None:
    steps = RecordedSteps(1)

    def program(message: Tree, states: Tree, keys: Tensor) -> tuple[Tree, Tree]:
        return torch.full((2,), float(message)), states

    for _ in range(3):
        reply, _ = steps.run(Adder().add, (0, 1), True, program, *inputs(2))
        assert reply.tolist() == [5.0, 5.0]
    assert [*steps.recordings.values()] == [None]


class Doubles:
    """Derives twice the state."""

    made = 0

    def derived_from(self, state: Tree) -> Tree:
        return state

    def derive(self, graph: Any, part: Tree) -> Tree:
        self.made += 1
        return 2 * part


def test_derived_trees_are_kept_until_their_source_changes() -> None:
    derived, owner = Derived(), Doubles()
    graph, states = small_federation().graphs[0], torch.tensor([3.0])
    assert derived.added(object(), (0,), graph, states) is graph
    for _ in range(2):
        assert float(derived.added(owner, (0,), graph, states).derived) == 6.0
    assert owner.made == 1
    states.add_(1)
    assert float(derived.added(owner, (0,), graph, states).derived) == 8.0
    assert owner.made == 2
