"""The serial engine, but messages, replies and states are encoded as bytes and replies checked.

Each step runs on two probe clients of different size. A field whose size differs between them may
be sent only if the step discloses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.core.batching import WHOLE
from atoll.core.errors import WireError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, View, make_graph, with_views
from atoll.core.method import Step
from atoll.core.minibatch import with_batching
from atoll.core.random import fold, make_key, uniform
from atoll.core.tree import Tree, leaves, named_leaves, structure, tree_map
from atoll.engines.codec import check_like, decode, encode
from atoll.engines.serial import Serial


class Wire(Serial):
    """The serial engine, but messages, replies and states are encoded as bytes and decoded."""

    name = "wire"

    def __init__(self, graphs: Sequence[Graph], probe: Probe) -> None:
        super().__init__(graphs)
        self.states = [encode(None) for _ in graphs]
        self.probe = probe

    def run_one(self, step: Step, position: int, message: Tree, key: Tensor) -> Tree:
        template = self.probe.template(step, message)
        with torch.no_grad():
            reply, state = step(
                self.graphs[position],
                self._arrive(encode(message), finite=True),
                self._arrive(self.states[position]),
                self._arrive(encode(key)),
            )
        self.states[position] = encode(state)
        arrived = self._arrive(encode(reply))
        check_like(arrived, template, step.discloses)
        return arrived

    def _arrive(self, data: bytes, *, finite: bool = False) -> Tree:
        """Decode bytes to tensors on the device of the graphs."""
        device = self.graphs[0].real.device
        return tree_map(lambda leaf: leaf.to(device), decode(data, finite=finite))

    def export_states(self) -> list[Tree]:
        return [decode(state, finite=False) for state in self.states]

    def import_states(self, states: Sequence[Tree]) -> None:
        self.states = [encode(state) for state in states]


@dataclass
class Probe:
    """Two synthetic clients of different size. Steps run on them to find the form of replies."""

    graphs: tuple[Graph, Graph]
    # By step and structure of the message, because replies may differ between a method's phases.
    templates: dict[tuple[str, str], Tree] = field(default_factory=dict)
    forms: dict[tuple[str, str], str] = field(default_factory=dict)  # shapes of their messages
    states: list[Tree] = field(default_factory=lambda: [None, None])  # for the next step

    def template(self, step: Step, message: Tree) -> Tree:
        """Return a probe's reply to a message. Refuse an undeclared node or edge axis in it."""
        case = (step.name, str(structure(message)))
        form = str([tuple(leaf.shape) for leaf in leaves(message)])
        if self.forms.get(case) != form:  # the message may determine the reply's length
            replies = []
            for i, graph in enumerate(self.graphs):
                copy, key = tree_map(torch.clone, message), make_key(i, graph.real.device)
                with torch.no_grad():
                    reply, self.states[i] = step(graph, copy, self.states[i], key)
                replies.append(reply)
            _refuse_hidden_axes(step, *replies)
            self.templates[case], self.forms[case] = replies[0], form
        return self.templates[case]


def _refuse_hidden_axes(step: Step, small: Tree, large: Tree) -> None:
    names = [[name for name, _ in named_leaves(reply)] for reply in (small, large)]
    if names[0] != names[1]:
        raise WireError(
            f"step '{step.name}' replies with {names[0]} or {names[1]}, depending on the client's "
            "graph; a reply must always hold the same tensors"
        )
    for (name, a), (_, b) in zip(named_leaves(small), named_leaves(large), strict=True):
        if a.shape != b.shape and name.split(".")[0] not in step.discloses:
            raise WireError(
                f"step '{step.name}' would send '{name}', whose size depends on the client's graph "
                f"({tuple(a.shape)} or {tuple(b.shape)} on two probes); declare it with its "
                f"reason: client_step(discloses={{'{name.split('.')[0]}': '...'}})"
            )


def make_probe(
    federation: Federation, views: dict[str, View], like: Tensor, more: int = 0
) -> Probe:
    """Make two probe clients with a federation's task, features and classes.

    They have the dtype and device of `like`, and the parts of a real client (`with_batching`), so
    that a step cannot tell them apart. `more` is a number of additional nodes for each.
    """
    sizes = federation.classes + 5 + more, federation.classes + 8 + more
    graphs = (with_views(_probe_graph(size, federation, like), views) for size in sizes)
    small, large = (with_batching(graph, WHOLE) for graph in graphs)
    return Probe((small, large))


def _probe_graph(size: int, federation: Federation, like: Tensor) -> Graph:
    """Make a ring with chords, or `size` triangles for graph classification, with every class."""
    many, features, classes = federation.task.many_graphs, federation.features, federation.classes
    nodes = torch.arange(3 * size if many else size, device=like.device)
    if many:
        item, labelled = nodes // 3, nodes % 3 == 0
        one_way = torch.stack([nodes, 3 * item + (nodes + 1) % 3])
    else:
        item, labelled = nodes, nodes >= 0
        one_way = torch.stack([nodes.repeat(2), torch.cat([nodes + 1, nodes + 2]) % size])
    return make_graph(
        uniform(fold(make_key(size, like.device), "probe"), (len(nodes), features), like.dtype),
        torch.cat([one_way, one_way.flip(0)], dim=1),
        item % classes,
        train=labelled & ((item % 3 == 0) | (item < classes)),
        val=labelled & (item % 3 == 1),
        test=labelled & (item % 3 == 2),
        root=3 * item if many else None,
        has_features=like.new_ones(features) if many else None,
        has_classes=like.new_ones(classes) if many else None,
    )
