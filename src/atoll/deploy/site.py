"""A site's answer to a packet: check it against the owner's policy, run the step, reply.

Transport-free: bytes come in, bytes go out. The private state stays here, in memory and in a folder
of the run, written before each answer leaves.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import tomllib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atoll import __version__
from atoll.core.batching import batching_of
from atoll.core.dp import Noised
from atoll.core.errors import ConfigError, WireError
from atoll.core.federation import Federation
from atoll.core.files import write_atomically
from atoll.core.method import Method, Step, declared_step
from atoll.core.task import ROLES, Scores
from atoll.core.tree import Empty, Tree, all_finite, leaves, named_leaves, num_bytes, structure
from atoll.deploy.audit import Audit, Json
from atoll.deploy.heads import check_head
from atoll.deploy.noise import SiteNoise, site_secret
from atoll.deploy.policy import Policy, Refusal
from atoll.deploy.site_data import SiteData
from atoll.engines.clients import Simulation
from atoll.engines.codec import decode, encode, load_checkpoint, save_checkpoint
from atoll.engines.fleet import BAD, NEVER, PROTOCOL, REFUSED, Packet, owners_of
from atoll.engines.prepare import prepared
from atoll.engines.wire import make_probe
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig, make_config
from atoll.experiment.metrics import Evaluator, from_confusion
from atoll.experiment.privacy import PrivacyConfig, epsilon, make_privacy, release, with_privacy

EVALUATOR = "evaluator"
Form = tuple[object, list[tuple[torch.Size, torch.dtype]]]  # structure, shapes and types of a tree
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def owners(method: Method) -> dict[str, Any]:
    """Everything whose steps a packet may name, on the server as on the sites."""
    return {**owners_of(method), EVALUATOR: Evaluator(method)}


class Site:
    """One owner's side of a federation; the folder holds private states and the audit log."""

    def __init__(self, data: SiteData, policy: Policy, folder: Path) -> None:
        self.data, self.policy, self.folder = data, policy, folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # states, scores and the secret of the noise are the owner's
        self.audit = Audit(folder / "audit.jsonl")
        self.account = Account(self.audit)
        self.job: Job | None = None

    def answer(self, packet: Packet) -> Packet:
        """The reply; a failure becomes a reply that reports it, and the site stays up."""
        known = {"hello": self._hello, "begin": self._begin, "step": self._step}
        known["ping"] = lambda packet: Packet({}, b"")
        more = {}
        try:
            check_head(packet.head)
            return known[packet.head["do"]](packet)
        except Refusal as error:
            kind, reason = REFUSED, str(error)
        except (WireError, ConfigError) as error:
            kind, reason = BAD, str(error)
        except Exception as error:  # a step is a method's code, which may fail in any way
            # Its text may quote the owner's data, such as the number of nodes in a shape.
            private = self.job is not None and self.job.privacy is not None
            which = "" if private else f" ({type(error).__name__})"
            kind, reason = BAD, f"it failed{which}; its audit log says more"
            more["detail"] = f"{type(error).__name__}: {error}"[:1000]
        # A packet's values are the server's: a log that holds them whole could be made unreadable.
        step = {k: _short(packet.head[k]) for k in ("run", "step", "round") if k in packet.head}
        self.audit.note(kind, reason=reason[:1000], **more, **step)
        return Packet({"failure": kind, "reason": reason[:1000]}, b"")

    def _hello(self, packet: Packet) -> Packet:
        """Send the summary of the data, if the owner allows the run at all."""
        head = packet.head
        if (version := head.get("version")) != PROTOCOL:
            other = _short(version)
            found = f"it speaks protocol {PROTOCOL} (Atoll {__version__}), the server {other}"
            raise Refusal(f"{found}; upgrade the older of the two")
        self.policy.check_run(head["method"], int(head["rounds"]))
        privacy = None if head["dp"] is None else make_privacy(head["dp"])
        self.policy.check_privacy(privacy)
        summary = self.data.summary(sizes=not keeps_scores(privacy))
        run = check_name(head["run"])
        if "atoll" in head:  # an older server does not name its version, and wants none
            summary["atoll"] = __version__
        server = _short(head.get("atoll", "older"))
        self.audit.note("hello", run=run, method=head["method"], server=server, told=summary)
        return Packet(summary, b"")

    def _begin(self, packet: Packet) -> Packet:
        """Build the method, with the widths that all sites agreed on."""
        head, run = packet.head, check_name(packet.head["run"])
        config = _ordered(head["config"])
        self.policy.check_run(config.method, config.rounds or 0, str(config.set.get("base", "")))
        self.policy.check_privacy(config.dp)
        with self.audit.alone():  # no other job begins or spends between the check and the note
            # One name, one configuration: states and noise of a run are for its method and scale.
            for event in self.audit.events(event="begin", run=run):
                if _ordered(event["config"]) != config:
                    raise Refusal(f"run '{run}' was begun here with another configuration")
            if config.dp is not None:
                # The updates that this site may send, over all seeds, beside those of other runs.
                sent = config.seeds * math.ceil((config.rounds or 1) * config.fraction)
                before = Account(self.audit).precision(but=all_seeds(run))
                self.policy.check_spent(before + sent * release(config.dp.noise), "this run")
            graph = self.data.graph
            method = build_method(config, graph.num_features, self.data.classes, graph.task.name)
            self.job = Job(run, with_privacy(method, config.dp), config, self)
            self.audit.note("begin", run=run, config=head["config"])
        return Packet({}, b"")

    def _step(self, packet: Packet) -> Packet:
        if self.job is None or self.job.run != packet.head["run"]:
            raise WireError(f"run '{packet.head['run']}' was not begun here")
        return self.job.step(packet)


class Job:
    """One run at one site."""

    def __init__(self, run: str, method: Method, config: RunConfig, site: Site) -> None:
        self.run, self.site, self.privacy = run, site, config.dp
        self.owners = owners(method)
        self.model = None if config.dp is None else _first_model(method, site.data)
        batching = batching_of(config.batch_size or 0)
        (self.graph,) = prepared([site.data.graph], dict(method.views), batching=batching)
        self.states = States(site.folder / "runs" / run)
        # Counted over every process that took part in the run, so that no restart renews it.
        self.sent = site.audit.total("bytes", event="sent", run=run)
        self.attempt: tuple[int, object] | None = None
        self.state: Tree = None
        self.lineage, self.scored = "", 0

    def step(self, packet: Packet) -> Packet:
        """Run a step on the site's own graph."""
        head, policy = packet.head, self.site.policy
        step, round = self._named(head), int(head["round"])
        policy.check_step(step, round)
        message = self._message(packet.body)
        if (round, head["attempt"]) != self.attempt:
            self.state, self.lineage = self.states.load(int(head["state"]))
            self.attempt, self.scored = (round, head["attempt"]), 0
        question = self._question(step, head, packet.body)
        noise = self._noise(step, question)
        if noise is not None:
            owner = replace(step.owner, source=noise, hides_divergence=True)
            step = replace(step, owner=owner)
        with torch.no_grad():
            reply, state = step(self.graph, message, self.state, torch.tensor(int(head["key"])))
        policy.check_reply(step, {name.split(".")[0] for name, _ in named_leaves(reply)})
        kept = isinstance(reply, Scores) and keeps_scores(self.privacy)
        if self._diverged(step, reply, state, noise):
            if noise is None and not kept:
                hint = "lower the learning rate or check the features"
                raise WireError(f"training diverged (the loss is nan); {hint}")
            self.site.audit.note("diverged", run=self.run, step=step.name, round=round)
        if kept:
            reply = self._keep(reply, round)
        body = encode(reply)
        audit = self.site.audit
        with audit.alone():
            if audit.unseen:  # another job at this site has written: its releases count here too
                self.site.account, audit.unseen = Account(audit), False
                self.sent = self.site.audit.total("bytes", event="sent", run=self.run)
            charged = self._charge(noise)
            policy.check_bytes(len(body), self.sent)
            if not step.keeps_state:
                self.state, self.lineage = state, hashlib.sha256(question).hexdigest()
                self.states.save(round, state, self.lineage, int(head["state"]))
            self.sent += len(body)
            sizes = {"bytes": len(body), "array_bytes": num_bytes(reply)}
            place = {"run": self.run, "step": step.name, "round": round}
            self.site.audit.note("sent", **place, **sizes, **charged)
        return Packet({}, body)

    def _message(self, body: bytes) -> Tree:
        """The server's message, which in a private run must not depend on this site's data."""
        message = decode(body)
        # A row for each node would pass only where there are as many, and so reveal their number.
        # The model's tensors in other places of the tree would do the same.
        named = is_dataclass(message) and [field.name for field in fields(message)]
        model = message.model if named == ["model"] else message
        if self.model is not None and type(message) is not Empty and _form(model) != self.model:
            raise WireError("a private run has messages of its model's own shapes and types alone")
        return message

    def _diverged(self, step: Step, reply: Tree, state: Tree, noise: SiteNoise | None) -> bool:
        """Whether training diverged, by the private state if nothing leaves or noise is added."""
        if noise is not None:
            return noise.alone or not all_finite(state)
        return not all_finite(reply if leaves(reply) or step.keeps_state else state)

    def _question(self, step: Step, head: Json, body: bytes) -> bytes:
        """Everything that decides an answer beside the owner's data.

        The lineage stands for the private state: all questions that led to it. Without it a server
        could ask one question on two states, and equal answers would show equal updates.
        """
        scale = [step.owner.clip, step.owner.noise] if isinstance(step.owner, Noised) else []
        parts = [self.run, self.lineage, scale, step.name, int(head["round"]), int(head["key"])]
        return json.dumps([*parts, hashlib.sha256(body).hexdigest()]).encode()

    def _noise(self, step: Step, question: bytes) -> SiteNoise | None:
        """This site's own noise, for a step that is to be noised with it."""
        private = self.privacy is not None and self.privacy.randomness == "site"
        if not private or not isinstance(step.owner, Noised):
            return None
        return SiteNoise(site_secret(self.states.folder), question)

    def _charge(self, noise: SiteNoise | None) -> Json:
        """Put an answer on the account, if it is not there yet; the charge, for the audit log."""
        if noise is None or not noise.release:
            return {}
        assert self.privacy is not None
        privacy, account = self.privacy, self.site.account
        after = account.precision()
        if noise.release not in account.releases:
            after += release(privacy.noise)
        self.site.policy.check_spent(after, "this update")
        account.releases[noise.release] = (self.run, privacy.noise)
        spent = epsilon(after, privacy.delta)
        charge = {"release": noise.release, "clip": privacy.clip, "noise": privacy.noise}
        finite = spent if math.isfinite(spent) else None
        return {**charge, "delta": privacy.delta, "epsilon": finite}

    def _keep(self, scores: Scores, round: int) -> Scores:
        """Write scores down for the owner; the reply in their place is the same for every site."""
        which = "deployed" if self.scored == 0 else "local"
        self.scored += 1
        accuracy = from_confusion(scores.confusion.numpy())["accuracy"]
        path = self.states.folder / "scores.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            if file.tell() == 0:
                table.writerow(["round", "model", "part", "accuracy", "loss"])
            for part, right, loss in zip(ROLES, accuracy, scores.loss.tolist(), strict=True):
                table.writerow([round, which, part, f"{right:.6g}", f"{loss:.6g}"])
        confusion, loss = torch.zeros_like(scores.confusion), torch.zeros_like(scores.loss)
        return Scores(confusion, loss, torch.full_like(scores.auc, -1.0))

    def _named(self, head: Json) -> Step:
        """The step that a packet names; only the evaluator has flags that a packet may set."""
        name, flags = head["owner"], head["flags"]
        owner = self.owners.get(name)
        if owner is not None and flags:
            known = {"with_auc", "with_dropout", "with_train"}
            if name != EVALUATOR or not known.issuperset(flags):
                raise WireError(f"'{name}' takes no flags {sorted(flags)} from a packet")
            owner = replace(owner, **{key: bool(value) for key, value in flags.items()})
        step = None if owner is None else declared_step(owner, str(head["step"]))
        if step is None:
            raise WireError(f"there is no step '{head['step']}' of '{name}'")
        return step


def _first_model(method: Method, data: SiteData) -> Form:
    """The form of the model that the method sends around, found on made-up clients."""
    own = Federation((data.graph,), data.classes)
    probes = make_probe(own, {}, torch.zeros(())).graphs
    made = Simulation(Federation(probes, data.classes), method, engine="serial")
    return _form(method.deploy(method.init(made.clients(-1))).tree)


def _form(tree: Tree) -> Form:
    return structure(tree), [(leaf.shape, leaf.dtype) for leaf in leaves(tree)]


def _short(value: object) -> object:
    """A value of a packet as a log keeps it: a number or a short text, never nested."""
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    return value[:100] if isinstance(value, str) else type(value).__name__


def check_name(run: object) -> str:
    """The name of a run, which is the name of a folder too."""
    if not isinstance(run, str) or not NAME.fullmatch(run):
        raise WireError("a run's name is up to 100 letters, digits, '-' and '_'")
    return run


def all_seeds(run: str) -> str:
    """The run without the number of its seed: `RUN-SEED` is the name of one seed."""
    name, dash, seed = run.rpartition("-")
    return name if dash and seed.isdigit() else run


def _ordered(text: str) -> RunConfig:
    """The server's configuration; its data are a name for tables, never a file of this machine."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the server's configuration is not valid TOML: {error}") from error
    return make_config(**{**given, "objects": ("data",)})


def keeps_scores(privacy: PrivacyConfig | None) -> bool:
    """Whether scores and sizes stay at the sites."""
    return privacy is not None and privacy.scores == "kept"


class Account:
    """The releases of a site in all its runs, by its audit log: no restart renews it."""

    def __init__(self, audit: Audit) -> None:
        self.releases: dict[str, tuple[str, float]] = {
            event["release"]: (event["run"], event["noise"])
            for event in audit.events(event="sent")
            if "release" in event
        }

    def precision(self, but: str | None = None) -> float:
        """The sum of 1/z² over all releases, without those of one run if it is given."""
        every = self.releases.values()
        return sum(release(noise) for run, noise in every if but is None or all_seeds(run) != but)


class States:
    """A run's private states by round; the last that counts stays, as a round may be repeated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rounds(self) -> list[int]:
        """Rounds with a state, ascending."""
        return sorted(int(path.stem[6:]) for path in self.folder.glob("state_*.atoll"))

    def load(self, counts: int) -> tuple[Tree, str]:
        """State and lineage after the last round up to `counts`; none before the first."""
        if counts == NEVER:
            return None, ""
        if counts not in self.rounds():
            lost = f"the private state after round {counts} is not in its runs/{self.folder.name}"
            raise WireError(f"{lost}; this site cannot continue the run")
        path = self._path(counts).with_suffix(".lineage")
        # Runs of earlier versions have no lineage; their states differ by the round.
        lineage = path.read_text(encoding="utf-8") if path.exists() else f"after {counts}"
        return load_checkpoint(self._path(counts)), lineage

    def save(self, round: int, state: Tree, lineage: str, counts: int) -> None:
        """Write the state after a round; states older than the one that counts are deleted."""
        write_atomically(self._path(round).with_suffix(".lineage"), lineage.encode())
        save_checkpoint(self._path(round), state)
        for number in self.rounds():
            if number < counts:
                self._path(number).unlink()
                self._path(number).with_suffix(".lineage").unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"state_{round}.atoll"
