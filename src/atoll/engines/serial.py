"""The serial engine, a readable reference: one client after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.core.errors import AtollError, StepError, described
from atoll.core.graph import Graph
from atoll.core.message import Message
from atoll.core.method import Step
from atoll.core.tree import Tree, named_leaves, stack, structure


class Serial:
    """Run a step on each client in turn and keep the private states."""

    name = "serial"

    def __init__(self, graphs: Sequence[Graph]) -> None:
        self.graphs = graphs
        self.states: list[Tree] = [None] * len(graphs)

    def run(
        self, step: Step, positions: Sequence[int], message: Message, keys: Tensor, round: int
    ) -> Tree:
        replies = []
        for key, position in zip(keys, positions, strict=True):
            try:
                replies.append(self.run_one(step, position, message.for_one(position), key))
            except AtollError:
                raise
            except Exception as error:
                raise StepError(position, step.name, round, described(error)) from error
        return stack_replies(replies, positions, step, round)

    def run_one(self, step: Step, position: int, message: Tree, key: Tensor) -> Tree:
        """Return one client's reply, and store its new private state."""
        graph, state = self.graphs[position], self.states[position]
        with torch.no_grad():
            reply, self.states[position] = step(graph, message, state, key)
        return reply

    def export_states(self) -> list[Tree]:
        return list(self.states)

    def import_states(self, states: Sequence[Tree]) -> None:
        self.states = list(states)


def stack_replies(
    replies: Sequence[Tree], positions: Sequence[int], step: Step, round: int
) -> Tree:
    """Stack replies. Raise an error if shapes differ, because that reveals a node or edge axis."""
    first = dict(named_leaves(replies[0]))
    for position, reply in zip(positions, replies, strict=True):
        own = dict(named_leaves(reply))
        if structure(reply) != structure(replies[0]) or len(own) != len(first):
            problem = (
                f"the reply holds {sorted(own)} here and {sorted(first)} on "
                f"client {positions[0]}; a reply must always hold the same tensors"
            )
            raise StepError(position, step.name, round, problem)
        for name, leaf in own.items():
            if name in first and leaf.shape != first[name].shape:
                problem = (
                    f"reply '{name}' has shape {tuple(leaf.shape)} here and "
                    f"{tuple(first[name].shape)} on client {positions[0]}; a reply must not have a "
                    "node or edge axis"
                )
                raise StepError(position, step.name, round, problem)
    return stack(replies)
