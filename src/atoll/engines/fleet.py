"""Real sites from the server's view: steps leave as packets, and checked replies return.

`Fleet` is the transport (`engines/flare.py` is one), `Remote` the engine on top of it, `Cohort` the
backend of rounds. A round counts only if the same sites complete all its steps. If a site fails
during a round, the round is repeated without it. Each packet names the round whose private state is
valid (`state`), so a site discards the state of a failed attempt by itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from atoll.core.dp import Noised
from atoll.core.errors import AtollError, ServerDiverged, WireError
from atoll.core.federation import known_names
from atoll.core.message import Message, ToAll
from atoll.core.method import Method, Step, declared_steps
from atoll.core.random import make_key
from atoll.core.task import Task
from atoll.core.tree import Tree, all_finite, leaves, num_bytes
from atoll.engines.clients import Backend, Participants
from atoll.engines.codec import LIMIT, check_like, decode, encode
from atoll.engines.plausible import (
    LARGEST,
    UPDATE_LIMIT,
    Declared,
    OutOfRange,
    check_values,
    lengths,
    reach_of,
    tamed,
    too_long,
    usual_size,
    widest,
)
from atoll.engines.serial import stack_replies
from atoll.engines.wire import Probe

PROTOCOL = "0.1.0"
"""The version of the packets: the first version of Atoll that supports it. Parties compare it."""
NEVER = -2
"""The round of a private state that does not exist yet. Round -1 is before the first round."""
LOST, BAD, REFUSED, DIVERGED, DROPPED = "lost", "bad", "refused", "diverged", "dropped"
"""Why a reply is missing: no answer; an unusable answer; the owner refused; training at the site
diverged; the administrator continued without the site."""


INTERVAL, LONGEST = 0.05, 1.0
"""Least and most seconds between two requests of a site for work."""


def pause(waited: float) -> float:
    """Return the seconds between a site's requests for work, after a step has taken `waited` s.

    This delays the next step by at most 5 % of that time, or by `INTERVAL` if that is longer.
    """
    return min(LONGEST, max(INTERVAL, waited / 20))


class Packet(NamedTuple):
    """One message between server and site: plain values, and a tree as bytes (`codec.encode`)."""

    head: dict[str, Any]
    body: bytes


class Failure(NamedTuple):
    """The reason why a site gave no usable reply."""

    kind: str
    reason: str
    too_large: bool = False  # a number or an update of the reply was too large


def failure_in(head: Mapping[str, object]) -> Failure:
    """Return the failure that a site reports in the head of its reply."""
    kind = head.get("failure")
    known = kind if kind in (LOST, REFUSED, DIVERGED) else BAD
    return Failure(str(known), one_line(head.get("reason", "")))


def one_line(words: object, most: int = 1000) -> str:
    """Shorten another party's text, or an error that quotes it, to one printable line."""
    return "".join(c if c.isprintable() else " " for c in str(words)[:most])


Answers = tuple[dict[str, Packet], dict[str, Failure]]


class Fleet(Protocol):
    """Sites that answer packets."""

    def map(self, step: str, packets: Mapping[str, Packet], timeout: float) -> Answers:
        """Send each site its packet and wait. Return replies, and failures of all other sites."""

    def back(self, site: str) -> bool: ...  # whether a lost site answers again


class SitesFailed(AtollError):
    """At least one site gave no usable reply."""

    def __init__(self, failures: Mapping[str, Failure]) -> None:
        super().__init__("; ".join(f"{site}: {why.reason}" for site, why in failures.items()))
        self.failures = dict(failures)


class Aborted(AtollError):
    """An administrator stopped the job. The run is saved up to the last complete round."""


@dataclass(frozen=True, eq=False)
class Roster:
    """The server's knowledge of the sites' data, in the role of a `Federation`."""

    names: tuple[str, ...]  # in the order of the clients
    features: int  # features, classes and task are common to all sites
    classes: int
    task: Task
    counts: tuple[tuple[int, ...], ...]  # each site's training, validation and test nodes or graphs
    nodes: tuple[int, ...]  # each site's nodes or graphs
    name: str = "federation"  # for tables
    metric: str = "accuracy"  # or "auc"
    about: Mapping[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers."""
        return known_names(self.about, "class") or tuple(map(str, range(self.classes)))

    def declared(self) -> dict[str, Declared]:
        """Return the sizes that each site declared."""
        sizes = map(Declared, self.counts, self.nodes)
        return dict(zip(self.names, sizes, strict=True))


def owners_of(method: Method, name: str = "method") -> dict[str, object]:
    """Return the objects whose steps a packet may call, by their names in packets.

    They are the method and the methods that it wraps, but not those that `Noised` wraps.
    """
    found: dict[str, object] = {name: method}
    if isinstance(method, Noised):
        return found  # the wrapped steps answer without noise, so no packet may call them
    for part in fields(method):
        value = getattr(method, part.name)
        if isinstance(value, Method):
            found |= owners_of(value, f"{name}.{part.name}")
    return found


def steps_of(method: Method) -> Iterator[Step]:
    """Yield every step that a packet may call (`owners_of`)."""
    for owner in owners_of(method).values():
        yield from declared_steps(owner)


def name_step(step: Step, owners: Mapping[str, object]) -> dict[str, object]:
    """Describe a step as plain values: its owner's name, its own name, and flags.

    The flags are boolean fields of the step's owner that differ from the sites' copy of it.
    """
    for name, owner in owners.items():
        if type(owner) is type(step.owner) and is_dataclass(owner):
            own = {part.name: getattr(step.owner, part.name) for part in fields(owner)}
            other = {key: value for key, value in own.items() if value != getattr(owner, key)}
            if all(isinstance(value, bool) for value in other.values()):
                return {"owner": name, "step": step.name, "flags": other}
    raise WireError(f"step '{step.name}' belongs to nothing that the sites know; it cannot be sent")


@dataclass(eq=False, repr=False)
class Remote:
    """The engine whose clients are sites of a fleet (`engines.base.Engine`)."""

    name = "flare"

    fleet: Fleet
    sites: Mapping[str, Declared]  # in the order of the clients
    owners: Mapping[str, object]  # the objects with steps, by the names that packets use
    probe: Probe  # finds the form of a step's reply
    run_name: str  # names the folder of private states at a site
    deadline: float  # seconds that a step may take
    note: Callable[..., None]  # writes an event to the audit log
    limit: int = LIMIT
    update_limit: float = UPDATE_LIMIT  # largest norm of an update, in medians of the other norms

    def __post_init__(self) -> None:
        self.names = list(self.sites)
        self.committed = [NEVER] * len(self.names)
        self.kept = [NEVER] * len(self.names)  # rounds of the states of the selected models
        self.touched: set[int] = set()
        self.attempt = ""
        self.lengths: dict[tuple[str, str], dict[str, float]] = {}  # last ones by step and field
        self.heard: list[str] = []  # sites that replied to this attempt's last step
        self.out: Mapping[str, Failure] = {}  # sites that do not take part now

    def begin(self) -> None:
        """Begin a new attempt at a round. States of an unfinished attempt become invalid."""
        self.attempt, self.touched, self.heard = secrets.token_hex(4), set(), []

    def commit(self, round: int) -> None:
        """Complete the round. The private states of its sites are valid from now on."""
        for position in self.touched:
            self.committed[position] = round

    def run(
        self, step: Step, positions: Sequence[int], message: Message, keys: Tensor, round: int
    ) -> Tree:
        """Return the stacked replies of the clients at `positions`, or raise `SitesFailed`."""
        self._check_message(message, positions, round)
        named = name_step(step, self.owners)
        template = self.probe.template(step, message.for_one(positions[0]))
        body = encode(message.tree) if isinstance(message, ToAll) else b""
        common = {"do": "step", "run": self.run_name, **named}
        common |= {"round": round, "attempt": self.attempt}
        packets = {}
        for key, position in zip(keys.tolist(), positions, strict=True):
            head = {**common, "key": key, "state": self.committed[position]}
            head["keep"] = self.kept[position]
            own = body or encode(message.for_one(position))
            packets[self.names[position]] = Packet(head, own)
        self.touched |= set() if step.keeps_state else set(positions)
        replies, failures = self.fleet.map(step.name, packets, self.deadline)
        received = {site: message.for_one(self.names.index(site)) for site in replies}
        arrived = self._read(replies, received, step, template, failures)
        usual = usual_size(self.sites.values())
        reach = reach_of(step.owner, arrived.values())
        norms = {
            site: lengths(reply, received[site], usual, reach, self.sites[site].nodes)
            for site, reply in arrived.items()
        }
        failures |= self._too_long(step.name, norms)
        sent = {site: len(packet.body) for site, packet in packets.items()}
        answers = {site: len(packet.body) for site, packet in replies.items()}
        sizes = {site: (size, answers.get(site, 0)) for site, size in sent.items()}
        parts = sorted({part for own in norms.values() for part in own})
        known = {
            part: {s: float(f"{own[part][0]:.4g}") for s, own in norms.items() if part in own}
            for part in parts
        }
        more = {"norms": known} if known else {}
        self.note("step", step=step.name, round=round, bytes=sizes, **more)
        if failures:
            raise SitesFailed(failures)
        self.heard = list(arrived)
        ordered = [arrived[self.names[position]] for position in positions]
        return stack_replies(ordered, positions, step, round)

    def _too_long(
        self, step: str, norms: Mapping[str, Mapping[str, tuple[float, float]]]
    ) -> dict[str, Failure]:
        """Return failures of sites with a field whose norm is far above the other sites' norms."""
        found: dict[str, Failure] = {}
        for part in {name for own in norms.values() for name in own}:
            now = {site: own[part] for site, own in norms.items() if part in own}
            before = self.lengths.setdefault((step, part), {})
            bad = too_long(now, self.update_limit, before)
            found |= {site: Failure(BAD, reason, too_large=True) for site, reason in bad.items()}
            before |= {site: length for site, (length, _) in now.items() if site not in bad}
        return found

    def _check_message(self, message: Message, positions: Sequence[int], round: int) -> None:
        """Raise an error if a message is not finite: a site would refuse it, and be blamed.

        If only a minority of the sites' rows is bad, their sites have failed.
        Else, if only one site replied to the last step, it has failed. Else the server diverged.
        """
        asked = positions[:1] if isinstance(message, ToAll) else positions
        bad = [i for i in asked if not all_finite(message.for_one(i))]
        if not bad:
            return
        problem = "the server's model is not finite after the replies of"
        rows = () if isinstance(message, ToAll) else enumerate(self.names)
        there = [i for i, name in rows if name not in self.out]
        if 2 * sum(not all_finite(message.for_one(i)) for i in there) < len(there):
            why = Failure(BAD, "only the server's model for this site is not finite")
            raise SitesFailed({self.names[i]: why for i in bad})
        if len(self.heard) == 1:
            raise SitesFailed({self.heard[0]: Failure(BAD, f"{problem} only this site")})
        raise ServerDiverged(round, f"{problem} {', '.join(self.heard) or 'an earlier round'}")

    def _read(
        self,
        replies: Mapping[str, Packet],
        received: Mapping[str, Tree],
        step: Step,
        template: Tree,
        failures: dict[str, Failure],
    ) -> dict[str, Tree]:
        """Return the decoded replies that fit the step. Add the other replies to `failures`."""
        # Bytes that a reply like the template can need, names and structure included.
        most = min(self.limit, num_bytes(template) + 4096 * (len(leaves(template)) + 4))
        largest = max(LARGEST, usual_size(self.sites.values()))
        epochs, arrived = getattr(step.owner, "epochs", 1), dict[str, Tree]()
        for site, packet in replies.items():
            try:
                reply = decode(packet.body, limit=most)
                # A disclosed field must have the template's shape, too: replies are stacked.
                check_like(reply, template, free={})
                check_values(reply, self.sites[site], epochs, largest * widest(received[site]))
                arrived[site] = tamed(reply)
            except WireError as error:
                failures[site] = Failure(BAD, one_line(error), isinstance(error, OutOfRange))
            except Exception as error:  # whatever one site sends, the others continue
                reason = f"a reply was refused: it cannot be read ({type(error).__name__})"
                failures[site] = Failure(BAD, reason)
        return arrived

    def export_states(self) -> Tree:
        """Return the server's record of the sites. Private states stay at the sites."""
        forms = self.probe.forms
        templates = [[*case, tree, forms[case]] for case, tree in self.probe.templates.items()]
        rounds = {"committed": self.committed, "kept": self.kept}
        return {**rounds, "templates": templates, "probe": self.probe.states}

    def import_states(self, states: Tree) -> None:
        self.committed = list(states["committed"])
        self.kept = list(states.get("kept", self.kept))  # earlier versions did not store it
        self.probe.states = list(states["probe"])
        for step, case, tree, *form in states["templates"]:  # an earlier version kept no form
            if form:
                self.probe.templates[step, case], self.probe.forms[step, case] = tree, form[0]


class Cohort(Backend):
    """The remote sites of a run. It replaces `Simulation`, whose clients are on this machine."""

    federation: Roster
    engine: Remote

    def __init__(self, roster: Roster, engine: Remote, seed: int) -> None:
        super().__init__(roster, torch.arange(len(roster)), make_key(seed), engine)
        self.out: dict[str, Failure] = {}

    def private_states(self) -> list[Tree]:
        """Return an empty list: the states never leave the sites, which check them."""
        return []

    def clients(self, round: int) -> Participants:
        there = [i for i, name in enumerate(self.federation.names) if name not in self.out]
        return Participants(self, round, torch.tensor(there, dtype=torch.int64))
