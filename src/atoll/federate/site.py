"""What a site does with a packet: check it against the owner's policy, run the step, answer.

Transport-free: bytes come in, bytes go out. The private state stays here, in memory and in a folder
of the run, written before each answer leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from atoll import __version__
from atoll.core.errors import AtollError, WireError
from atoll.core.method import Method, Step
from atoll.core.tree import Tree, all_finite, leaves, named_leaves, num_bytes
from atoll.engines.checkpoint import load_checkpoint, save_checkpoint
from atoll.engines.codec import decode, encode
from atoll.engines.fleet import BAD, NEVER, REFUSED, Packet, owners_of
from atoll.engines.simulation import prepared
from atoll.federate.audit import Audit
from atoll.federate.data import SiteData
from atoll.federate.policy import Policy, Refusal
from atoll.study.config import build_method, make_config, parse_config
from atoll.study.evaluate import Evaluator

EVALUATOR = "evaluator"


def owners(method: Method) -> dict[str, Any]:
    """Everything whose steps a packet may name, on the server as on the sites."""
    return {**owners_of(method), EVALUATOR: Evaluator(method)}


class Site:
    """One owner's side of a federation.

    Args:
        data: What the owner has.
        policy: What the owner allows.
        folder: For private states and the audit log.
    """

    def __init__(self, data: SiteData, policy: Policy, folder: Path) -> None:
        self.data, self.policy, self.folder = data, policy, folder
        self.audit = Audit(folder / "audit.jsonl")
        self.job: Job | None = None

    def answer(self, packet: Packet) -> Packet:
        """The reply; whatever goes wrong becomes one that says so, and the site lives on."""
        try:
            return self._doing(packet.head.get("do"))(packet)
        except Refusal as error:
            kind, reason = REFUSED, str(error)
        except AtollError as error:
            kind, reason = BAD, str(error)
        except Exception as error:  # a step is a method's code, which may fail in any way
            kind, reason = BAD, f"{type(error).__name__}: {error}"
        step = {k: packet.head.get(k) for k in ("run", "step", "round") if k in packet.head}
        self.audit.note(kind, reason=reason, **step)
        return Packet({"failure": kind, "reason": reason}, b"")

    def _doing(self, what: Any) -> Callable[[Packet], Packet]:
        known: dict[Any, Callable[[Packet], Packet]] = {
            "hello": self._hello, "begin": self._begin, "step": self._step, "ping": self._ping,
        }  # fmt: skip
        if what not in known:
            raise WireError(f"'{what}' is nothing that a site does")
        return known[what]

    def _ping(self, packet: Packet) -> Packet:
        return Packet({}, b"")

    def _hello(self, packet: Packet) -> Packet:
        """Tell what must agree, if the owner allows the run at all."""
        head = packet.head
        if head["version"] != __version__:
            raise Refusal(f"it has Atoll {__version__}, the server {head['version']}")
        self.policy.check_run(head["method"], int(head["rounds"]))
        facts = self.data.facts()
        self.audit.note("hello", run=head["run"], method=head["method"], told=facts)
        return Packet(facts, b"")

    def _begin(self, packet: Packet) -> Packet:
        """Build the method, with the widths that all sites agreed on."""
        head = packet.head
        config = make_config(**parse_config(head["config"], "the server's configuration"))
        self.policy.check_run(config.method, config.rounds or 0)
        data = self.data
        method = build_method(config, data.graph.num_features, data.classes, data.graph.task)
        self.job = Job(str(head["run"]), method, self)
        self.audit.note("begin", run=head["run"], config=head["config"])
        return Packet({}, b"")

    def _step(self, packet: Packet) -> Packet:
        if self.job is None or self.job.run != packet.head["run"]:
            raise WireError(f"run '{packet.head['run']}' was not begun here")
        return self.job.step(packet)


class Job:
    """One run at one site."""

    def __init__(self, run: str, method: Method, site: Site) -> None:
        self.run, self.site = run, site
        self.owners = owners(method)
        (self.graph,) = prepared([site.data.graph], dict(method.views))
        safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in run)
        self.states = States(site.folder / "runs" / safe)
        # Counted over every process that took part in the run, so that no restart renews it.
        self.sent = site.audit.total("bytes", event="sent", run=run)
        self.attempt: Any = None
        self.state: Tree = None

    def step(self, packet: Packet) -> Packet:
        """Run a step on the site's own graph."""
        head, policy = packet.head, self.site.policy
        step, round = self._named(head), int(head["round"])
        policy.check_step(step, round)
        message = decode(packet.body)
        if (round, head["attempt"]) != self.attempt:
            self.state = self.states.load(int(head["state"]))
            self.attempt = (round, head["attempt"])
        with torch.no_grad():
            reply, state = step(self.graph, message, self.state, torch.tensor(int(head["key"])))
        # Where nothing leaves (Local), the private state must tell.
        if not all_finite(reply if leaves(reply) or step.keeps_state else state):
            raise WireError(
                "training diverged (the loss is nan); lower the learning rate or check the features"
            )
        policy.check_reply(step, {name.split(".")[0] for name, _ in named_leaves(reply)})
        body = encode(reply)
        policy.check_bytes(len(body), self.sent)
        if not step.keeps_state:
            self.state = state
            self.states.save(round, state, int(head["state"]))
        self.sent += len(body)
        self.site.audit.note(
            "sent", run=self.run, step=step.name, round=round, bytes=len(body),
            array_bytes=num_bytes(reply),
        )  # fmt: skip
        return Packet({}, body)

    def _named(self, head: dict[str, Any]) -> Step:
        """The step that a packet names; only the evaluator has flags that a packet may set."""
        name, flags = head["owner"], head["flags"]
        owner = self.owners.get(name)
        if owner is not None and flags:
            known = {"with_auc", "with_dropout", "with_train"}
            if name != EVALUATOR or not known.issuperset(flags):
                raise WireError(f"'{name}' takes no flags {sorted(flags)} from a packet")
            owner = replace(owner, **{key: bool(value) for key, value in flags.items()})
        # `getattr` alone would let a packet read anything that is called a name.
        step = getattr(owner, head["step"], None) if str(head["step"]).isidentifier() else None
        if not isinstance(step, Step):
            raise WireError(f"there is no step '{head['step']}' of '{name}'")
        return step


class States:
    """The private states of one run on the disk, by the round after which they were left.

    A round that the server did not complete may be asked for again, so the state before it is
    kept until the server says that a later one counts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rounds(self) -> list[int]:
        """Rounds that there is a state of, ascending."""
        return sorted(int(path.stem[6:]) for path in self.folder.glob("state_*.atoll"))

    def load(self, counts: int) -> Tree:
        """The state after the last round up to `counts`; None before the first."""
        if counts == NEVER:
            return None
        there = [number for number in self.rounds() if number <= counts]
        if not there or there[-1] != counts:
            raise WireError(
                f"the private state after round {counts} is not in {self.folder}; this site cannot "
                "continue the run"
            )
        return load_checkpoint(self._path(counts))

    def save(self, round: int, state: Tree, counts: int) -> None:
        """Write the state after a round; what is older than the one that counts is forgotten."""
        save_checkpoint(self._path(round), state)
        for number in self.rounds():
            if number < counts:
                self._path(number).unlink()

    def _path(self, round: int) -> Path:
        return self.folder / f"state_{round}.atoll"
