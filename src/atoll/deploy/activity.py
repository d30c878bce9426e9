"""The activity of a party, from its audit logs: runs, rounds, bytes, epsilon, refusals.

`atoll federate status` and the metrics read it. Audit logs grow, so each call reads only the new
lines. This module contacts no other party and loads no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from atoll.core.errors import DataError
from atoll.deploy.audit import Json
from atoll.deploy.kits import read_settings, state_folder

SERVER = "server"


@dataclass
class Peer:
    """The traffic with one other party. A site's only peer is the server."""

    sent: int = 0  # bytes of packet bodies
    received: int = 0
    refusals: int = 0  # requests that the site's owner did not allow
    failures: int = 0  # requests without a usable answer
    last: float | None = None  # time of its last answer (at a site: of the last reply to it)
    out: str = ""  # why the current run excludes this site


@dataclass
class RunActivity:
    """One run in an audit log."""

    name: str
    done: dict[int, int] = field(default_factory=dict)  # complete rounds by seed; a site uses 0
    rounds: int | None = None  # the rounds of one seed, if the log contains them
    ended: bool = False
    epsilon: float | None = None  # of a private run, against the server
    last: float = 0.0  # time of the last event
    peers: dict[str, Peer] = field(default_factory=dict)

    @property
    def round(self) -> int:
        """Return the number of complete rounds over all seeds."""
        return sum(self.done.values())

    def peer(self, name: str) -> Peer:
        return self.peers.setdefault(name, Peer())


class Log:
    """An audit log that is read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0
        self.problem = ""  # the first event that cannot be used

    def events(self) -> Iterator[tuple[float, str, Json]]:
        """Yield time, kind and values of each new event, but no unfinished or unreadable line."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                with suppress(ValueError, KeyError, TypeError, RecursionError, OverflowError):
                    event = json.loads(line)
                    at, kind = datetime.fromisoformat(event["time"]), event["event"]
                    yield at.timestamp(), kind, event

    def add_events(self, add: Callable[[str, Json, float], None]) -> None:
        """Call `add` with each new event. Raise an error, now and later, if one cannot be used."""
        for at, kind, event in self.events():
            try:
                add(kind, event, at)
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
                where = f"audit log {self.path} holds an event '{kind}' that cannot be used"
                hint = "the file was changed; compare it with a backup"
                found = f"{where} ({type(error).__name__}: {error}); {hint}"
                self.problem = self.problem or found
        if self.problem:
            raise DataError(self.problem)


class ServerRun(Log):
    """One run on the server, from the audit log in its folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "audit.jsonl")
        self.run = RunActivity(folder.name)

    def read(self) -> RunActivity:
        """Return the run up to now."""
        self.add_events(self._add)
        return self.run

    def _add(self, kind: str, event: Json, at: float) -> None:
        run = self.run
        run.last = at
        if kind == "start":
            run.ended = False
            for site in event["sites"]:
                run.peer(site).out = ""
        elif kind == "step":
            for site, (down, up) in event["bytes"].items():
                peer = run.peer(site)
                peer.sent, peer.received = peer.sent + down, peer.received + up
                peer.last = at if up else peer.last
        elif kind == "round":
            run.done[event["seed"]], run.rounds = int(event["round"]), int(event["rounds"])
            spent = event.get("epsilon", run.epsilon)
            run.epsilon = None if spent is None else float(spent)
        elif kind == "finished":
            run.ended = True
        elif kind == "back":
            run.peer(event["site"]).out = ""
        elif "site" in event and "reason" in event:  # excluded later, or from the start
            peer = run.peer(event["site"])
            peer.out = str(event["reason"])
            if "refused" in (kind, event.get("kind")):
                peer.refusals += 1
            else:
                peer.failures += 1


class ServerActivity:
    """All runs on a server, by the time of the last event."""

    def __init__(self, kit: Path) -> None:
        self.folder, self.logs = state_folder(kit) / "runs", dict[str, ServerRun]()

    def read(self) -> list[RunActivity]:
        """Return all runs. Raise an error if a log cannot be used."""
        runs, problem = self.look()
        if problem:
            raise DataError(problem)
        return runs

    def look(self) -> tuple[list[RunActivity], str]:
        """Return all runs, as far as their logs can be used, and the first problem or ""."""
        for folder in sorted(self.folder.glob("*/")):
            self.logs.setdefault(folder.name, ServerRun(folder))
        found = [log.run for log in self.logs.values()]
        problems = [why for log in self.logs.values() if (why := _problem(log))]
        return sorted(found, key=lambda run: run.last), next(iter(problems), "")


def _problem(log: ServerRun | SiteActivity) -> str:
    try:
        log.read()
    except (DataError, OSError) as error:
        return str(error)
    return ""


class SiteActivity(Log):
    """All runs at a site, by the time of the last event, from its one audit log."""

    def __init__(self, kit: Path) -> None:
        super().__init__(state_folder(kit) / "audit.jsonl")
        self.kit, self.runs = kit, dict[str, RunActivity]()
        self.releases: dict[str, float] = {}  # noise by release, so that no answer counts twice
        self.private = set[str]()  # runs that sent private updates
        self.clear = set[str]()  # runs in which a reply left without privacy, as in `Account`
        self.refusals, self.failures, self.last_refusal = 0, 0, ""

    def read(self) -> list[RunActivity]:
        self.add_events(self._add)
        return sorted(self.runs.values(), key=lambda run: run.last)

    def look(self) -> tuple[list[RunActivity], str]:
        """Return all runs, as far as the log can be used, and its problem or ""."""
        problem = _problem(self)
        return sorted(self.runs.values(), key=lambda run: run.last), problem

    def _add(self, kind: str, event: Json, at: float) -> None:
        name = event.get("run")
        if kind in ("begin", "sent") and isinstance(name, str):
            run = self.runs.setdefault(name, RunActivity(name))
            run.last = run.peer(SERVER).last = at
            if kind == "sent":
                run.peer(SERVER).sent += event["bytes"]
                run.done[0] = max(run.done.get(0, 0), event["round"] + 1)
            if "release" in event:
                self.releases[event["release"]] = float(event["noise"])
                self.private.add(name)
            elif kind == "sent" and not event.get("kept") and event.get("array_bytes", 1):
                self.clear.add(name)
        elif kind == "refused":
            self.refusals, self.last_refusal = self.refusals + 1, str(event["reason"])
        elif kind == "bad":
            self.failures += 1

    def budget(self) -> Budget:
        """Return the epsilon of all noised updates so far, and the limit of the site's policy."""
        from atoll.deploy.policy import read_policy  # late, because it imports torch
        from atoll.experiment.privacy import epsilon, release

        policy = read_settings(self.kit).get("policy")
        rules = read_policy(None if policy is None else Path(policy))
        spent = sum(map(release, self.releases.values()))
        return Budget(epsilon(spent, rules.delta), rules.epsilon, rules.delta)


class News:
    """Sentences for a party's console about new events in its audit logs."""

    def __init__(self, kit: Path) -> None:
        self.folder, self.logs, self.last = state_folder(kit), dict[Path, Log](), ""
        self.read()  # skip the events so far

    def read(self) -> list[str]:
        """Return a sentence on each run that began, ended or was refused since the last call."""
        found = []
        for path in (self.folder / "audit.jsonl", *self.folder.glob("runs/*/audit.jsonl")):
            own = path.parent.name if path.parent != self.folder else ""
            for _, kind, event in self.logs.setdefault(path, Log(path)).events():
                sentence = _sentence(kind, event, str(event.get("run", own)))
                if sentence not in ("", self.last):  # a server may repeat a refused request
                    found.append(sentence)
                    self.last = sentence
        return found


def _sentence(kind: str, event: Json, run: str) -> str:
    """Return a sentence on an event for the console, or "" for the other events."""
    ends, what = {"start": "begins", "begin": "begins"}, f"run {run}" if run else "a request"
    ends |= {"finished": "has ended", "delivered": "has ended, and its model is here"}
    if "site" in event:  # at the server
        return f"{what}: {event['site']}: {event['reason']}" if "reason" in event else ""
    if kind == "refused":
        return f"{what} was refused: {event.get('reason')}"
    return f"{what} {ends[kind]}" if kind in ends else ""


class Budget(NamedTuple):
    """The epsilon of a site's noised updates against the server, its limit, and its delta."""

    spent: float
    limit: float | None
    delta: float
