"""The forms of a method's messages and replies: their structure, shapes and types.

A site plays a few rounds of the method on synthetic clients and records every message and reply.
It accepts no message of another form. Otherwise a server could make replies reveal more, by a
tensor with a row for each node, by more classes, or by a wider network. A message could also name
the parameters of a private network, which a reply might then return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch
from torch import Tensor

from atoll.core.batching import Batching
from atoll.core.errors import ConfigError, WireError
from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.core.method import Method, Step
from atoll.core.tree import Tree, leaves, named_leaves, structure, tree_map
from atoll.deploy.audit import Json
from atoll.deploy.policy import Policy
from atoll.engines.clients import Simulation
from atoll.engines.prepare import EngineInputs
from atoll.engines.serial import Serial
from atoll.engines.wire import make_probe
from atoll.experiment.metrics import Evaluator
from atoll.experiment.rounds import Experiment

Axes = tuple[int | None, ...]  # sizes of a tensor's axes. None: the size depends on the clients
MOST = 100_000  # rounds in which a change of stage is looked for


@dataclass
class Form:
    """The structure of a tree, and the axes and types of its tensors."""

    structure: object
    tensors: list[tuple[Axes, torch.dtype]]

    @classmethod
    def of(cls, tree: Tree) -> Self:
        return cls(structure(tree), [(tuple(leaf.shape), leaf.dtype) for leaf in leaves(tree)])

    def fits(self, other: Form) -> bool:
        """Return whether the other form differs only in axes that depend on the clients."""
        return self.like(other) and all(
            mine in (None, size)
            for (axes, _), (sizes, _) in zip(self.tensors, other.tensors, strict=True)
            for mine, size in zip(axes, sizes, strict=True)
        )

    def like(self, other: Form) -> bool:
        """Return whether both have one structure, and tensors of equal types and dimensions."""
        kinds = [[(len(axes), dtype) for axes, dtype in one.tensors] for one in (self, other)]
        return bool(self.structure == other.structure) and kinds[0] == kinds[1]

    def widen(self, other: Form) -> None:
        """Set to None the axes whose sizes differ in the two forms."""
        self.tensors = [
            (tuple(a if a == b else None for a, b in zip(axes, others, strict=True)), dtype)
            for (axes, dtype), (others, _) in zip(self.tensors, other.tensors, strict=True)
        ]


@dataclass
class Forms:
    """The forms of every step's messages and replies."""

    known: dict[tuple[type, str, str], list[Form]] = field(default_factory=dict)
    sent: dict[tuple[type, str], tuple[Step, set[str]]] = field(default_factory=dict)  # fields

    @classmethod
    def of(
        cls, method: Method, like: Federation, rounds: int, fraction: float, batching: Batching
    ) -> Self:
        """Record the forms on synthetic clients with the features, classes and task of `like`."""
        method = short(method)
        forms, made = cls(), [make_probe(like, {}, torch.zeros(()), more).graphs for more in (0, 4)]
        # Axes that count clients, or their nodes, differ. One client gets nothing of others.
        for graphs in (made[0][:1], made[0], (*made[1], made[0][0])):
            for share in {1.0, fraction}:
                sides = Federation(graphs, like.classes), rounds, share
                forms.play(Experiment(method, *sides, engine=forms.engine, batching=batching))
        return forms

    def play(self, experiment: Experiment) -> None:
        """Play the rounds that show every form. The engine of the experiment records them."""
        run = experiment.begin()
        run.start()
        for number in played(experiment.method, experiment.rounds):
            run.server, _ = run.play(run.server, run.simulation.clients(number), with_train=True)

    def check_disclosure(self, policy: Policy) -> None:
        """Refuse a method that needs a disclosure which the policy does not allow, in any step.

        Otherwise a server could leave out the refused step and still ask for the other steps.
        """
        for step, names in self.sent.values():
            policy.check_reply(step, names)

    def engine(self, inputs: EngineInputs) -> Serial:
        """Make an engine that records every message and reply."""
        return _Recording(inputs.graphs(), self)

    def add(self, step: Step, part: str, tree: Tree) -> None:
        """Record the form of a message or of a reply."""
        found, forms = Form.of(tree), self._of(step, part)
        if step.rows:  # their number can be the same by chance
            found.tensors = [((None, *axes[1:]) if axes else (), t) for axes, t in found.tensors]
        if part == "reply":
            names = {name.split(".")[0] for name, _ in named_leaves(tree)}
            self.sent.setdefault((type(step.owner), step.name), (step, set()))[1].update(names)
        alike = next((form for form in forms if form.like(found)), None)
        if alike is None:
            forms.append(found)
        else:
            alike.widen(found)

    def check(self, step: Step, part: str, tree: Tree) -> None:
        """Refuse a message or a reply whose form the method does not have."""
        found = Form.of(tree)
        if not any(form.fits(found) for form in self._of(step, part)):
            own = "the structure, shapes and types of its method"
            raise WireError(f"a {part} of step '{step.name}' was refused: it does not have {own}")

    def _of(self, step: Step, part: str) -> list[Form]:
        return self.known.setdefault((type(step.owner), step.name, part), [])


class _Recording(Serial):
    """The serial engine, which also records the form of every message and reply."""

    def __init__(self, graphs: Sequence[Graph], forms: Forms) -> None:
        super().__init__(graphs)
        self.forms = forms

    def run_one(self, step: Step, position: int, message: Tree, key: Tensor) -> Tree:
        self.forms.add(step, "message", message)
        reply = super().run_one(step, position, tree_map(torch.clone, message), key)
        # Training on random features may diverge. Only the forms matter here.
        reply, self.states[position] = tree_map(_small, (reply, self.states[position]))
        if not isinstance(step.owner, Evaluator):  # its flags determine its reply
            self.forms.add(step, "reply", reply)
        return reply


def _small(leaf: Tensor) -> Tensor:
    return leaf.nan_to_num(0.0).clamp(-1e3, 1e3) if leaf.is_floating_point() else leaf


def short(method: Method) -> Method:
    """Return the method with at most one repetition (`Method.repeats`): more change no form."""
    changed: Json = {}
    for part in fields(method):
        value = getattr(method, part.name)
        if isinstance(value, Method):
            changed[part.name] = short(value)
        elif type(value) is int and part.name in method.repeats:
            changed[part.name] = min(value, 1)
    try:
        return replace(method, **changed)
    except ConfigError:  # a combination that this method does not allow
        return method


def played(method: Method, rounds: int) -> list[int]:
    """Return the rounds to play: two from round 0, and from the first and last change of stage."""
    stages = [method.stage(number) for number in range(min(rounds, MOST))]
    changes = [at for at in range(1, len(stages)) if stages[at] != stages[at - 1]]
    first = (0, *changes[:1], *changes[-1:])
    return sorted({at + more for at in first for more in (0, 1) if at + more < rounds})


def first_model(method: Method, like: Federation) -> Form:
    """Return the form of the model that the method deploys, found on synthetic clients."""
    probes = make_probe(like, {}, torch.zeros(())).graphs
    made = Simulation(Federation(probes, like.classes), method, engine="serial")
    return Form.of(method.deploy(method.init(made.clients(-1))).tree)
