"""A site's answer to a packet: check it against the owner's policy, run the step, reply.

This module does not depend on a transport: bytes come in, bytes go out. The private state stays
here, in memory and in the run's folder. A new state is written before its answer leaves.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll import __version__
from atoll.core.batching import batching_of
from atoll.core.dp import Noised
from atoll.core.errors import AtollError, ConfigError, WireError
from atoll.core.federation import Federation
from atoll.core.files import clear_left_over, write_atomically
from atoll.core.losses import with_loss
from atoll.core.method import Method, Step, declared_step
from atoll.core.task import ROLES, Scores
from atoll.core.tree import (
    Tree,
    all_finite,
    leaves,
    named_leaves,
    num_bytes,
    tree_map,
)
from atoll.data.own.agree import MODES, Agreed
from atoll.deploy.account import Account
from atoll.deploy.agreement import ENCODER
from atoll.deploy.audit import Audit, Json
from atoll.deploy.begun import Begun, digest_of, ordered
from atoll.deploy.forms import Forms
from atoll.deploy.heads import Begin, Hello, Question, check_name, read_head, short
from atoll.deploy.lock import Busy, FolderLock
from atoll.deploy.noise import SiteNoise, site_secret
from atoll.deploy.policy import Policy, Refusal, all_seeds, seed_of
from atoll.deploy.site_data import SiteData
from atoll.deploy.states import States
from atoll.deploy.work import BEFORE, OTHERS, SENT, UNDER_WAY, Work, new_mark, note_interrupted
from atoll.engines.codec import decode, encode
from atoll.engines.fleet import (
    BAD,
    DIVERGED,
    LOST,
    PROTOCOL,
    REFUSED,
    Packet,
    owners_of,
)
from atoll.engines.prepare import prepared
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig, check_choices
from atoll.experiment.history import bins_metric, positive_of
from atoll.experiment.metrics import SENT as TOLD
from atoll.experiment.metrics import Evaluator, from_confusion, toward
from atoll.experiment.privacy import (
    epsilon,
    keeps_scores,
    make_privacy,
    release,
    with_privacy,
)
from atoll.experiment.protocols import protocol
from atoll.experiment.threshold import THRESHOLD, parse_rule, write_chosen

EVALUATOR = "evaluator"
SCORES = 16 << 20  # size limit of the file of scores in bytes; 10,000 rounds need 3 MB
LINE = 400  # most characters of a reason in a reply or in the log


class StepFailed(AtollError):
    """A step of a private run failed. Only the owner may read the reason."""


class Diverged(WireError):
    """A value in this site's training is not finite."""


FAILURES = {Refusal: REFUSED, Busy: LOST, Diverged: DIVERGED, WireError: BAD, ConfigError: BAD}
"""Errors whose text the server may read, and the kind of each failure. The first match counts."""


def owners(method: Method) -> dict[str, Any]:
    """Return the objects whose steps a packet may name, by their names in packets."""
    return {**owners_of(method), EVALUATOR: Evaluator(method)}


class Site:
    """One owner's side of a federation. The folder holds private states and the audit log."""

    def __init__(
        self,
        data: SiteData,
        policy: Policy,
        folder: Path,
        device: torch.device | str = "cpu",
        kit: Path | None = None,  # by default the parent of `folder`
    ) -> None:
        self.kit = folder.parent if kit is None else kit
        self.own, self.policy, self.folder = data, policy, folder
        # The current job's data, and the digest of its common encoder or "" (`begun.digest_of`).
        self.data, self.encoder = data, ""
        self.device = torch.device(device)  # for steps; packets cannot choose it
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # only the owner may read states, scores and the noise secret
        clear_left_over(folder)
        self.audit = Audit(folder / "audit.jsonl")
        self.account = Account(self.audit)
        self.job: Job | None = None
        self.began = time.monotonic()  # start of the current answer
        # Whether errors must not name their type, because it may depend on the owner's data.
        self.private = policy.noise is not None or policy.epsilon is not None
        self.lock: FolderLock | None = None
        self.played: tuple[object, Forms] | None = None  # forms, and what determines them
        self.under_way: Work | None = None  # of the last packet
        for mark in self.folder.glob(f"{UNDER_WAY}-*"):
            note_interrupted(self.audit, mark, policy.seconds)

    def answer(self, packet: Packet) -> Packet:
        """Return the reply. A failure becomes a reply that reports it, and the site stays up."""
        known = {"hello": self._hello, "begin": self._begin, "step": self._step}
        known["deliver"] = self._deliver
        known["ping"] = lambda packet: Packet({}, b"")
        what, more, began = packet.head.get("do"), {}, time.monotonic()
        self.began = began
        try:
            if not isinstance(what, str) or what not in known:
                raise WireError(f"'{short(what)}' is nothing that a site does")
            with self._counted(packet) if what in OTHERS else nullcontext():
                return known[what](packet)
        except tuple(FAILURES) as error:
            kind = next(FAILURES[known] for known in FAILURES if isinstance(error, known))
            reason = str(error)
        except Exception as error:  # a method's step may raise any error
            # Its text may quote the owner's data, such as the number of nodes in a shape.
            cause = error.__cause__ if isinstance(error, StepFailed) else error
            which = "" if self.private else f" ({type(cause).__name__})"
            kind, reason = BAD, f"it failed{which}; its audit log says more"
            more["detail"] = short(f"{type(cause).__name__}: {cause}", LINE)
        more["seconds"] = round(time.monotonic() - began, 3)
        return self.refuse(packet, kind, reason, self.audit, **more)

    def refuse(
        self, packet: Packet, kind: str, reason: str, audit: Audit, **more: object
    ) -> Packet:
        """Log a failure and return the reply that reports it. Long values are cut."""
        reason = str(short(reason, LINE))
        step = {k: short(packet.head[k]) for k in ("run", "step", "round") if k in packet.head}
        if isinstance(what := packet.head.get("do"), str) and what in OTHERS:
            step["round"] = BEFORE
        audit.note(kind, reason=reason, **more, **step)
        return Packet({"failure": kind, "reason": reason}, b"")

    @contextmanager
    def _counted(self, packet: Packet) -> Iterator[None]:
        """Refuse a packet that is not a step if no time is left for the round `BEFORE`."""
        check_name(run := str(packet.head.get("run")))
        work = Work(self.audit, run, self.folder, self.policy.seconds, new_mark())
        self.policy.check_work(0, work.seconds[BEFORE])
        self.under_way = work
        with work.running(BEFORE):
            yield

    def cost(self) -> Json:
        """Return the work of a packet that is not a step, for the audit log."""
        return {"round": BEFORE, "seconds": round(time.monotonic() - self.began, 3)}

    def _hello(self, packet: Packet) -> Packet:
        """Return the summary of the data and of their columns, if the owner allows the run."""
        theirs = packet.head.get("version")
        if theirs != PROTOCOL:  # a head of another version may have other fields
            found = f"it speaks protocol {PROTOCOL} (Atoll {__version__})"
            raise Refusal(f"{found}, the server {short(theirs)}; upgrade the older of the two")
        head = read_head(Hello, packet.head)
        self.policy.check_run(head.method, head.rounds)
        privacy = None if head.dp is None else make_privacy(head.dp)
        self.policy.check_privacy(privacy)
        summary, columns = self.own.tell(self.policy, head.encoder, privacy)
        told = {**summary, "words": len(self.own.words), **self._named([c.name for c in columns])}
        if head.atoll:  # an older server does not send its version, and does not expect one
            summary["atoll"] = __version__
        body = msgspec.json.encode(columns) if columns else b""
        self.policy.check_bytes(len(body), 0)
        size = len(msgspec.json.encode(summary)) + len(body)
        known = {"method": head.method, "server": head.atoll or "older", "told": told}
        self.audit.note("hello", run=head.run, **known, bytes=size, **self.cost())
        return Packet(summary, body)

    def _named(self, columns: list[str]) -> Json:
        """Describe the columns for the audit log: names the first time, later number and digest."""
        with self.audit.readable():
            known = [e.get("told", {}).get("columns") for e in self.audit.events(event="hello")]
        if not columns or columns not in known:
            return {"columns": columns}
        digest = hashlib.sha256(json.dumps(columns).encode()).hexdigest()
        return {"columns": len(columns), "sha256": digest}

    def _begin(self, packet: Packet) -> Packet:
        """Check a run, build its method for the data in the run's encoding, and lock its folder."""
        head = read_head(Begin, packet.head)
        run, config = head.run, ordered(head.config)
        self.policy.check_run(config.method, config.rounds or 0, str(config.set.get("base", "")))
        seed = seed_of(run)
        if seed and (seed[:-1].startswith("0") or int(seed) not in config.all_seeds):
            raise WireError(f"run '{run}' is of seed {seed}, which is none of its configuration's")
        self.policy.check_privacy(config.dp)
        check_choices(config, protocol(config.protocol))  # a model card repeats these values
        self.private = self.private or config.dp is not None
        # Whether rows fit an encoder is information, so refuse here what `hello` refuses.
        self.own.tell(self.policy, MODES[0] if head.encoder else MODES[1], config.dp)
        encoder = digest_of(head.encoder)
        self._check_begin(run, config, head.config, encoder)  # before it costs time or a folder
        data = self.data if encoder == self.encoder else self._encoded(head.encoder)
        Begun(self.audit, run).check_data(data.fingerprint)
        method = build_method(config, data.graph.num_features, data.classes, data.graph.task.name)
        self.policy.check_size(method)
        method = with_privacy(method, config.dp)
        content, folder = msgspec.json.encode(head.encoder), self.folder / "runs" / run
        self.policy.check_disk(self.folder, run, len(content))
        job = Job(run, method, config, self, data)  # may still refuse, before a folder exists
        lock = self._hold(folder)
        try:
            job.count_earlier_work()
            with self.audit.alone():  # no other job may begin or spend between check and log entry
                news = self._check_begin(run, config, head.config, encoder, data.fingerprint)
                if encoder:
                    write_atomically(folder / ENCODER, content, 0o600)
                self.audit.note("begin", run=run, **news, **self.cost())
        except BaseException:
            if lock is not self.lock:
                lock.close()
            raise
        if lock is not self.lock:
            self.close()
        self.job, self.lock, self.data, self.encoder = job, lock, data, encoder
        return Packet({}, b"")

    def _check_begin(self, run: str, config: RunConfig, *noted: str) -> Json:
        """Refuse changed values of a run, or an overspent budget. Return the values to log."""
        news = Begun(self.audit, run).news(config, *noted)
        if config.dp is not None:
            # The updates that this site may send, over all seeds, in addition to other runs.
            sent = config.seeds * math.ceil((config.rounds or 1) * config.fraction)
            before = Account(self.audit).precision(but=all_seeds(run))
            self.policy.check_spent(before + sent * release(config.dp.noise), "this run")
        return news

    def _encoded(self, encoder: list[Agreed]) -> SiteData:
        """Return the data with the common encoder, or with the site's own if `encoder` is empty."""
        return self.own.with_encoder(encoder) if encoder else self.own

    def data_of(self, run: str) -> SiteData:
        """Return the site's data with the encoder of a run. Refuse data that have changed since."""
        begun, data = Begun(self.audit, run), self.own
        if data.read is not None and self.encoder in begun.encoders[:1]:
            data = self.data
        elif data.read is not None:  # tables
            data = self._encoded(begun.encoder(self.folder / "runs" / run))
        begun.check_data(data.fingerprint)
        return data

    def _deliver(self, packet: Packet) -> Packet:
        """Store the model of a finished run."""
        from atoll.deploy.delivery import receive  # late, because it needs cryptography

        return receive(self, packet)

    def _hold(self, folder: Path) -> FolderLock:
        """Return the lock of a run's folder. Wait a while if FLARE is still ending an old job."""
        if self.lock is not None and self.lock.folder == folder:
            return self.lock
        return FolderLock(folder, "another job of this run is still active at the site")

    def close(self) -> None:
        """Release the run's folder for other jobs."""
        self.job = None
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def _step(self, packet: Packet) -> Packet:
        head = read_head(Question, packet.head)
        if self.job is None or self.job.run != head.run:
            raise WireError(f"run '{head.run}' was not begun here")
        return self.job.step(head, packet.body)

    def seconds(self, packet: Packet) -> float:
        """Return the time limit of an answer, from the policy and the round's work so far."""
        job, policy = self.job, self.policy
        if packet.head.get("do") != "step":
            return policy.round_seconds
        number = packet.head.get("round")
        spent = {} if job is None else job.work.seconds
        used = spent.get(number, 0.0) if isinstance(number, int) else 0.0
        left = policy.round_seconds - used
        return min(policy.seconds, left) if left > 0 else policy.seconds  # `check_work` refuses it


class Job:
    """The site's side of one seed of a run. It is not FLARE's job."""

    def __init__(
        self, run: str, method: Method, config: RunConfig, site: Site, data: SiteData
    ) -> None:
        self.run, self.site, self.privacy, self.rounds = run, site, config.dp, config.rounds
        self.owners = owners(method)
        views, batching = dict(method.views), batching_of(config.batch_size or 0)
        like, rounds = Federation((data.graph,), data.classes), config.rounds or 1
        known = config, data.graph.num_features, data.classes
        if site.played is None or site.played[0] != known:  # the next seeds have the same forms
            site.played = known, Forms.of(method, like, rounds, config.fraction, batching)
        self.forms = site.played[1]
        graph = with_loss(data.graph, data.classes, config.class_weights, config.loss)
        (self.graph,) = prepared([graph], views, site.device, batching=batching)
        self.states = States(site.folder / "runs" / run)
        self.rule = None if config.threshold is None else parse_rule(config.threshold)
        own = replace(data, name="its data")
        self.positive, bins = positive_of(config, own), bins_metric(config, own, sparing=True)
        if bins is not None and not keeps_scores(config.dp):  # refuse before an update is sent
            site.policy.check_reply(self.owners[EVALUATOR].score, {"bins"})
        # Evaluator flags that the configuration needs. The card lists the fields that they send.
        needed = {"with_train": True, "with_auc": data.classes == 2, "with_bins": bins is not None}
        needed["with_dropout"] = "dropout-at-eval" in config.compat
        self.flags = {name for name, is_needed in needed.items() if is_needed}
        self.attempt: tuple[int, str] | None = None
        self.state: Tree = None
        self.lineage, self.scored = "", 0

    def count_earlier_work(self) -> None:
        """Count the bytes of all seeds and this seed's work so far. The caller has the lock."""
        site = self.site
        self.sent = Account(site.audit).sent(self.run)
        self.work = Work(site.audit, self.run, self.states.folder, site.policy.seconds)

    def step(self, head: Question, body: bytes) -> Packet:
        """Run a step on the site's own graph, if the policy allows it, and return the reply."""
        policy, work, number, began = self.site.policy, self.work, head.round, time.monotonic()
        step = self._named(head)
        policy.check_step(step, number)
        if not isinstance(step.owner, Evaluator):
            self.forms.check_disclosure(policy)
        if self.rounds is not None and number >= self.rounds:
            raise WireError(f"run '{self.run}' has {self.rounds} rounds, not round {number + 1}")
        policy.check_work(work.questions[number], work.seconds[number])
        self.site.under_way = work
        with work.running(number):
            return self._answer(step, head, body, began)

    def _answer(self, step: Step, head: Question, body: bytes, began: float) -> Packet:
        policy, round = self.site.policy, head.round
        message = decode(body, limit=policy.message_bytes)
        self.forms.check(step, "message", message)  # before it meets the owner's data
        if (round, head.attempt) != self.attempt:
            self.state, self.lineage = self.states.load(head.state)
            self.attempt, self.scored = (round, head.attempt), 0
        question = self._question(step, head, body)
        noise = self._noise(step, question)
        if noise is not None:
            owner = replace(step.owner, source=noise, hides_divergence=True)
            step = replace(step, owner=owner)
        try:
            with torch.no_grad():
                reply, state = self._run(step, message, torch.tensor(head.key))
        except AtollError as error:
            if self.privacy is None:
                raise
            raise StepFailed from error
        kept = isinstance(reply, Scores) and keeps_scores(self.privacy)
        if not isinstance(reply, Scores):
            self.forms.check(step, "reply", reply)
        if not kept:  # a kept reply is the same for every site
            policy.check_reply(step, {name.split(".")[0] for name, _ in named_leaves(reply)})
        diverged = self._diverged(step, reply, state, noise)
        if diverged and noise is None and not kept:
            hint = "lower the learning rate or check the features"
            raise Diverged(f"training diverged (the loss is nan); {hint}")
        if kept:
            reply = self._keep(reply, round)
        answer = encode(reply)
        audit = self.site.audit
        with audit.alone():
            if audit.unseen:  # another job at this site has written; its releases count too
                self.site.account, audit.unseen = Account(audit), False
                self.sent = self.site.account.sent(self.run)
            charged = self._charge(noise) | ({"kept": True} if kept else {})
            if noise is not None or kept:
                # Of equal length: the server could notice a longer log by the limit of the disk.
                charged["diverged"] = int(diverged)
            if isinstance(reply, Scores) and not kept:
                charged["scores"] = [n for n in TOLD if getattr(step.owner, f"with_{n}", True)]
            policy.check_bytes(len(answer), self.sent)
            if not step.keeps_state:
                policy.check_disk(self.site.folder, self.run, num_bytes(state))
                self.state, self.lineage = state, hashlib.sha256(question).hexdigest()
                self.states.save(round, state, self.lineage, head.state, head.keep)
            self.sent += len(answer)
            sizes = {"bytes": len(answer), "array_bytes": num_bytes(reply)}
            place = {"run": self.run, "step": step.name, "round": round}
            seconds = time.monotonic() - began
            self.site.audit.note(SENT, **place, **sizes, seconds=seconds, **charged)
        return Packet({}, answer)

    def _run(self, step: Step, message: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """Run a step on the site's device. Return its reply and the new state, both on the CPU."""
        given: Tree = tree_map(lambda leaf: leaf.to(self.site.device), (message, self.state, key))
        answer: tuple[Tree, Tree] = tree_map(torch.Tensor.cpu, step(self.graph, *given))
        return answer

    def _diverged(self, step: Step, reply: Tree, state: Tree, noise: SiteNoise | None) -> bool:
        """Return whether training diverged. If the reply is empty, the new state decides.

        A noised reply counts as diverged if the new state is not finite, or if the update is zero:
        a non-finite update becomes zero.
        """
        if noise is not None:
            return noise.alone or not all_finite(state)
        return not all_finite(reply if leaves(reply) or step.keeps_state else state)

    def _question(self, step: Step, head: Question, body: bytes) -> bytes:
        """Return everything that determines an answer, except the owner's data.

        The site derives its noise from these bytes, so an equal question gets equal noise. The
        lineage is a hash of the questions that led to the private state. Without it, one question
        on two states would get the same noise, and the answers would show how the updates differ.
        """
        scale = [step.owner.clip, step.owner.noise] if isinstance(step.owner, Noised) else []
        parts = [self.run, self.lineage, scale, step.name, head.round, head.key]
        return json.dumps([*parts, hashlib.sha256(body).hexdigest()]).encode()

    def _noise(self, step: Step, question: bytes) -> SiteNoise | None:
        """Return this site's noise for a step that needs it, or None for any other step."""
        private = self.privacy is not None and self.privacy.randomness == "site"
        if not private or not isinstance(step.owner, Noised):
            return None
        return SiteNoise(site_secret(self.states.folder), question)

    def _charge(self, noise: SiteNoise | None) -> Json:
        """Charge the account for an answer, once if it repeats. Return the charge for the log."""
        if noise is None or not noise.release:
            return {}
        assert self.privacy is not None
        privacy, account = self.privacy, self.site.account
        after = account.precision()
        if noise.release not in account.releases:
            after += release(privacy.noise)
        self.site.policy.check_spent(after, "this update")
        account.releases[noise.release] = (self.run, privacy.noise)
        delta = min(privacy.delta, self.site.policy.delta)  # a server cannot loosen the owner's
        spent = epsilon(after, delta)
        charge = {"release": noise.release, "clip": privacy.clip, "noise": privacy.noise}
        finite = spent if math.isfinite(spent) else None
        return {**charge, "delta": delta, "epsilon": finite}

    def _keep(self, scores: Scores, round: int) -> Scores:
        """Write scores to the owner's files. Return placeholders, the same for every site."""
        which = "deployed" if self.scored == 0 else "local"
        self.scored += 1
        accuracy = from_confusion(scores.confusion.numpy())["accuracy"]
        path = self.states.folder / "scores.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            if file.tell() == 0:
                table.writerow(["round", "model", "part", "accuracy", "loss"])
            rows = zip(ROLES, accuracy, scores.loss.tolist(), strict=True)
            for part, right, loss in rows if file.tell() < SCORES else ():
                table.writerow([round, which, part, f"{right:.6g}", f"{loss:.6g}"])
        bins = toward(scores, self.positive).bins
        if which == "deployed" and self.rule is not None and bins is not None:
            counts = bins[ROLES.index("val")].numpy()
            write_chosen(self.states.folder / THRESHOLD, self.rule, counts, self.positive)
        nothing: Scores = tree_map(torch.zeros_like, scores)
        return replace(nothing, auc=torch.full_like(scores.auc, -1.0))

    def _named(self, head: Question) -> Step:
        """Return the step that a packet names. Packets may set only flags of the evaluator."""
        name, flags = head.owner, head.flags
        owner = self.owners.get(name)
        if owner is not None and flags:
            if name != EVALUATOR or not self.flags.issuperset(flags):
                raise WireError(f"'{name}' takes no flags {sorted(flags)} in this run")
            owner = replace(owner, **flags)
        step = None if owner is None else declared_step(owner, head.step)
        if step is None:
            raise WireError(f"there is no step '{head.step}' of '{name}'")
        return step
