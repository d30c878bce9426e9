"""The server's side of a federated run: agree with the sites, run every seed, save all results.

This module does not depend on a transport: sites are behind a `Fleet`. Another process can continue
a run from its folder: the roster, a checkpoint per seed after every round, and the audit log.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch

from atoll import __version__
from atoll.core.errors import (
    AtollError,
    ClientLost,
    ConfigError,
    DataError,
    ServerDiverged,
    WireError,
)
from atoll.core.federation import Federation
from atoll.core.files import clear_left_over, write_atomically
from atoll.core.losses import parse_class_weights
from atoll.core.method import Method
from atoll.core.task import task_named
from atoll.data.own.agree import MODES
from atoll.deploy.activity import ServerRun
from atoll.deploy.agreement import (
    ENCODER,
    ROSTER,
    SiteSummary,
    check_alike,
    encoded,
    encoder_of,
    read_summaries,
    read_told,
)
from atoll.deploy.audit import Audit, Json
from atoll.deploy.heads import check_name
from atoll.deploy.lock import Busy, FolderLock
from atoll.deploy.site import owners
from atoll.engines import fleet as remote
from atoll.engines.clients import Backend
from atoll.engines.codec import load_checkpoint
from atoll.engines.ledger import Ledger
from atoll.engines.plausible import UPDATE_LIMIT
from atoll.engines.wire import make_probe
from atoll.experiment.build import build_method, check_memory
from atoll.experiment.config import RunConfig, config_text, make_config, parse_config, resolve
from atoll.experiment.folder import RunFolder, read_json
from atoll.experiment.hardware import tuned_process
from atoll.experiment.history import (
    History,
    bins_metric,
    metric_of,
    positive_of,
    select_rule,
    selection_of,
    validation_curve,
)
from atoll.experiment.privacy import keeps_scores, privacy_report, with_privacy
from atoll.experiment.problem import name_configuration
from atoll.experiment.protocols import Protocol
from atoll.experiment.result import Result, SeedResult
from atoll.experiment.rounds import Experiment, Run


class Order(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Everything that `atoll federate run` decides. An older server ignores new fields."""

    run: str  # names the run on the server and at the sites
    config: str  # as TOML
    sites: tuple[str, ...]  # in the order of the clients
    quorum: int  # fewest sites that a round may have
    deadline: float = 600.0  # seconds that a step may take
    join: float = 120.0  # seconds that a site may take to answer at the start
    update_limit: float = UPDATE_LIMIT  # largest norm of an update, in medians of the other norms
    without: tuple[str, ...] = ()  # sites that the administrator excluded


class TooFew(ClientLost):
    """Fewer sites than the quorum answered. The run is saved up to the last complete round."""

    def __init__(self, order: Order, out: Mapping[str, remote.Failure]) -> None:
        answer = f"{len(order.sites) - len(out)} of {len(order.sites)} sites answer"
        why = "; ".join(f"{site}: {failure.reason}" for site, failure in out.items())
        kept = "the run is saved up to the last complete round"
        super().__init__(f"{answer}, but the quorum is {order.quorum} ({why}); {kept}")


class Diverged(AtollError):
    """Training diverged at most sites, so the model that they received was already bad."""

    def __init__(self, round: int, problem: str) -> None:
        cause = "an update that a site sent is the likely cause (audit.jsonl has their norms)"
        hint = "continue without that site: atoll federate run --resume DIR --without SITE"
        super().__init__(f"round {round}: {problem}; {cause}; {hint}")


@dataclass(frozen=True)
class Settled:
    """A run with every choice resolved. The method excludes differential privacy."""

    roster: remote.Roster
    config: RunConfig
    rules: Protocol
    method: Method

    @staticmethod
    def of(wanted: RunConfig, roster: remote.Roster) -> Settled:
        """Fill in missing choices from the protocol and from the data that the sites reported."""
        given = msgspec.structs.replace(wanted, objects=("data",), clients=len(roster))
        config, rules = resolve(given, roster.task.name)
        config = msgspec.structs.replace(config, partition="given", split="given", ratios=None)
        method = build_method(config, roster.features, roster.classes, roster.task.name)
        check_memory(method.net)
        if config.class_weights is not None:
            parse_class_weights(config.class_weights, roster.classes)
        return Settled(roster, config, rules, method)

    @property
    def select(self) -> str:
        """The rule that selects the round. If sites send no scores, it is the last round."""
        kept = keeps_scores(self.config.dp)
        return "last" if kept else select_rule(self.config, self.rules)

    def result(self, seeds: Sequence[SeedResult], setup: float, folder: Path) -> Result:
        """Return the result of all seeds."""
        config, roster = self.config, self.roster
        ledgers = [seed.ledger for seed in seeds]
        return Result(
            config=config,
            seeds=tuple(seeds),
            deployed=self.method.scored_as(),
            weights=self.rules.weights,
            select=self.select,
            engine="flare",
            device="cpu",
            setup_seconds=setup,
            federation={"sites": list(roster.names), roster.task.plural: list(roster.nodes)},
            out=folder,
            metric=metric_of(config, cast(Federation, roster)),
            positive=positive_of(config, cast(Federation, roster)),
            hyperparameters=asdict(self.method),
            privacy=privacy_report(config, ledgers, len(roster), federated=True),
        )


def coordinate(
    order: Order, fleet: remote.Fleet, folder: Path, on_round: Callable[[Json], None]
) -> Result:
    """Start or continue a run. Lock the folder meanwhile and save the result in it."""
    with FolderLock(folder, f"another job of run '{order.run}' is still active on the server"):
        return _coordinate(order, fleet, folder, on_round)


@tuned_process()
def _coordinate(
    order: Order, fleet: remote.Fleet, folder: Path, on_round: Callable[[Json], None]
) -> Result:
    began = time.perf_counter()
    clear_left_over(folder)
    audit, activity = Audit(folder / "audit.jsonl"), ServerRun(folder)
    wanted = make_config(**parse_config(order.config, "the configuration"))
    audit.note("start", run=order.run, config=order.config, sites=order.sites)
    roster, out = agree(order, wanted, fleet, folder, audit)
    settled = Settled.of(wanted, roster)
    config, rules, federation = settled.config, settled.rules, cast(Federation, roster)
    fingerprint, run_folder = name_configuration(config), RunFolder(folder)
    write_atomically(folder / "config.toml", config_text(config).encode())
    setup = time.perf_counter() - began
    seeds: list[SeedResult] = []
    for seed in settled.config.all_seeds:
        experiment = FederatedExperiment(
            with_privacy(settled.method, config.dp),
            federation,
            rounds=config.rounds or rules.rounds,
            fraction=config.fraction,
            seed=seed,
            engine="serial",
            compat=config.compat,
            metric=bins_metric(config, federation, sparing=True),
            positive=positive_of(config, federation),
            keep=replace(selection_of(config, rules, federation), select=settled.select),
            order=order,
            config=config,
            fleet=fleet,
            audit=audit,
            encoder=folder / ENCODER,
            out=out,
            activity=activity,
            earlier=tuple(seed.ledger for seed in seeds),
        )
        done = experiment.run(
            checkpoint=run_folder.checkpoint(seed),
            fingerprint=f"{fingerprint}/{seed}",
            every_seconds=0.0,
            on_round=partial(experiment.report, on_round),
        )
        run_folder.write_seed(done, config, settled.method)
        seeds.append(SeedResult(seed, done.history))
    result = settled.result(seeds, setup, folder)
    result.save(folder)
    audit.note("finished", run=order.run, privacy=result.privacy)
    return result


def read_federated_result(order: Order, folder: Path) -> Result:
    """Read the result of a finished run from the files that the server sent."""
    wanted = make_config(**parse_config(order.config, "the configuration"))
    roster = _roster(order, wanted, read_summaries(folder / ROSTER))
    settled, seeds = Settled.of(wanted, roster), []
    for seed in settled.config.all_seeds:
        tree = load_checkpoint(RunFolder(folder).checkpoint(seed))
        seeds.append(SeedResult.of_checkpoint(seed, tree, _no_history(roster), settled.method))
    try:
        setup = float(read_json(folder / "result.json")["seconds"]["setup"])
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"'{folder / 'result.json'}' was changed; restore it") from error
    return settled.result(seeds, setup, folder)


def agree(
    order: Order, config: RunConfig, fleet: remote.Fleet, folder: Path, audit: Audit
) -> tuple[remote.Roster, dict[str, remote.Failure]]:
    """Greet the sites. Return the roster and the failed sites.

    A new run needs all its sites. A resumed run continues without them if the quorum is met.
    """
    wanted = {"method": config.method, "rounds": config.rounds or 0}
    privacy = msgspec.to_builtins(config.dp)
    head = {"do": "hello", "run": order.run, **wanted, "dp": privacy}
    head |= {"version": remote.PROTOCOL, "atoll": __version__}
    head["encoder"] = config.encoder or MODES[0]
    if head["encoder"] == "pooled":
        hint = "use federated or local"
        raise ConfigError(f"--encoder pooled is for simulations: no server sees all rows; {hint}")
    asked = [site for site in order.sites if site not in order.without]
    replies, failures = fleet.map(
        "hello", dict.fromkeys(asked, remote.Packet(head, b"")), order.join
    )
    joined, versions, told = {}, {}, {}
    for site, packet in replies.items():
        versions[site] = str(packet.head.pop("atoll", "older"))[:40]
        try:
            summary = msgspec.convert(packet.head, SiteSummary)
            if keeps_scores(config.dp):  # sizes stay at the sites, so ignore any that a site sends
                summary = msgspec.structs.replace(summary, counts=(0, 0, 0), nodes=0)
            told[site] = read_told(packet.body, summary)
            joined[site] = summary
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            reason = remote.one_line(f"its summary of the data cannot be used: {error}")
            failures[site] = remote.Failure(remote.BAD, reason)
    audit.note("versions", server=__version__, sites=versions)
    known = read_summaries(folder / ROSTER) if (folder / ROSTER).exists() else None
    told = {site: told[site] for site in joined}
    encoder = encoder_of(folder, told, is_new=known is None)
    if encoder:
        joined = {site: encoded(joined[site], told[site], encoder) for site in joined}
    sites = known or joined
    for site, now in joined.items():
        if sites[site] != now:
            reason = "its data are not those that the run began with"
            failures[site] = remote.Failure(remote.BAD, reason)
    for site, why in failures.items():
        audit.note(why.kind, site=site, reason=why.reason)
    short = len(asked) - len(failures) < order.quorum
    if failures and (known is None or short):
        refused = {site: why for site, why in failures.items() if why.kind != remote.LOST}
        if refused or known is None:
            raise remote.SitesFailed(refused or failures)
        raise TooFew(order, failures)
    check_alike(sites)
    for site in order.without:
        why = remote.Failure(remote.DROPPED, "the administrator continued without it")
        failures[site] = why
    write_atomically(folder / ROSTER, msgspec.json.encode(sites))
    return _roster(order, config, sites), dict(failures)


def _roster(order: Order, config: RunConfig, sites: Mapping[str, SiteSummary]) -> remote.Roster:
    if lacking := [name for name in order.sites if name not in sites]:
        raise DataError(f"{ROSTER} of the run lacks site {lacking[0]}; restore it from a backup")
    every = [sites[name] for name in order.sites]
    counts, nodes = tuple(site.counts for site in every), tuple(site.nodes for site in every)
    shape = (every[0].features, every[0].classes, task_named(every[0].task))
    known = [word[len("class ") :] for word in every[0].words if word.startswith("class ")]
    about = {"class_names": known} if known else {}
    return remote.Roster(order.sites, *shape, counts, nodes, config.data, every[0].metric, about)


def _no_history(roster: remote.Roster) -> History:
    return History(counts=np.array(roster.counts), nodes=np.array(roster.nodes))


@dataclass(frozen=True, kw_only=True)
class FederatedExperiment(Experiment):
    """An experiment whose clients are sites."""

    order: Order
    config: RunConfig
    fleet: remote.Fleet
    audit: Audit
    encoder: Path  # the file of the common encoder, which exists only for tables
    out: dict[str, remote.Failure]
    activity: ServerRun
    earlier: tuple[Ledger, ...]  # ledgers of the seeds before this one

    def begin(self) -> Run:
        return FederatedRun(self)

    def report(self, on_round: Callable[[Json], None], history: History) -> None:
        """Log a complete round, and report the progress of the run as plain values."""
        score = float(validation_curve(history, self.config, history.rounds - 1)[-1])
        validation = None if np.isnan(score) else score
        out = {site: why.reason for site, why in self.out.items()}
        place: Json = {"seed": self.seed, "round": history.rounds, "rounds": self.rounds}
        ledgers = (*self.earlier, history.ledger)
        privacy = privacy_report(self.config, ledgers, len(self.federation), federated=True)
        place |= {"epsilon": privacy["epsilon_server"]} if privacy else {}
        self.audit.note("round", **place)
        sites = msgspec.to_builtins(self.activity.read().peers)
        on_round({**place, "validation": validation, "out": out, "sites": sites})


class FederatedRun(Run):
    """A running experiment on real sites."""

    experiment: FederatedExperiment
    simulation: remote.Cohort

    def backend(self) -> Backend:
        """Return the sites after they have built the method."""
        wanted, method = self.experiment, self.experiment.method
        roster = cast(remote.Roster, wanted.federation)
        self.run_name = f"{wanted.order.run}-{wanted.seed}"
        probe = make_probe(wanted.federation, dict(method.views), torch.zeros(()))
        sites, run = (wanted.fleet, roster.declared(), owners(method), probe), self.run_name
        engine = remote.Remote(*sites, run, wanted.order.deadline, wanted.audit.note)
        engine.update_limit = wanted.order.update_limit
        cohort = remote.Cohort(roster, engine, wanted.seed)
        cohort.out = wanted.out
        return cohort

    def no_history(self) -> History:
        return _no_history(self.simulation.federation)

    def start_from(self, checkpoint: Path | None, fingerprint: str) -> None:
        """Let the sites build the method, and start or continue the run."""
        assert checkpoint is not None
        wanted, out = self.experiment, self.simulation.out
        earlier = checkpoint.parent.parent / "earlier"
        self.checkpoint, self.earlier = checkpoint, earlier / f"{wanted.seed}.atoll"
        self.mark = earlier / f"{wanted.seed}.diverged"
        if wanted.order.without and self.mark.exists():
            if self.earlier.exists():
                os.replace(self.earlier, checkpoint)
            wanted.audit.note("back before divergence", round=self.mark.read_text())
            self.mark.unlink()
        failures = self._begin_at(
            [name for name in self.simulation.engine.names if name not in out]
        )
        first = wanted.seed == wanted.config.seed and not checkpoint.exists()
        refused = {site: why for site, why in failures.items() if why.kind == remote.REFUSED}
        if refused and first:  # nothing is lost yet, and the administrator can choose again
            raise remote.SitesFailed(refused)
        self._leave_out(failures, -1)
        super().start_from(checkpoint, fingerprint)

    def _begin_at(self, sites: list[str]) -> dict[str, remote.Failure]:
        """Let the sites build the method. Return the failed sites."""
        wanted = self.experiment
        head = {"do": "begin", "run": self.run_name, "config": config_text(wanted.config)}
        if wanted.encoder.exists():
            head["encoder"] = json.loads(wanted.encoder.read_bytes())
        packets = dict.fromkeys(sites, remote.Packet(head, b""))
        return wanted.fleet.map("begin", packets, wanted.order.join)[1]

    def start(self) -> None:
        """Create the server's first tree with the sites that answer."""
        self._whole(super().start, -1)

    def one_round(self) -> None:
        """Run a complete round with the sites that answer. Exclude and report failed sites."""
        self._welcome_back()
        self._whole(super().one_round, self.history.rounds)
        # The file still contains the previous round. Keep it in case the next round diverges.
        self.earlier.parent.mkdir(exist_ok=True)
        self.earlier.unlink(missing_ok=True)
        try:
            os.link(self.checkpoint, self.earlier)
        except OSError:  # some network disks have no hard links
            write_atomically(self.earlier, self.checkpoint.read_bytes())

    def _whole(self, action: Callable[[], None], round: int) -> None:
        """Repeat an action without the sites that fail in it, until it succeeds as a whole."""
        while True:
            self.simulation.engine.begin()
            server, entries = self.server, len(self.ledger.entries)
            try:
                action()
            except remote.SitesFailed as error:
                if error.failures.keys() <= self.simulation.out.keys():  # it would fail forever
                    raise self._diverged(round, str(error)) from error
                self.server = server
                del self.ledger.entries[entries:]
                self._leave_out(error.failures, round)
                continue
            except ServerDiverged as error:
                raise self._diverged(round, error.problem) from error
            self._commit(round)
            return

    def _diverged(self, round: int, problem: str) -> Diverged:
        """Return the error, and mark the run: `--without` continues one round earlier."""
        self.mark.parent.mkdir(exist_ok=True)
        self.mark.write_text(str(round))
        return Diverged(round, problem)

    def _commit(self, round: int) -> None:
        """Commit a round. Sites keep the private state that belongs to the selected model."""
        engine = self.simulation.engine
        engine.commit(round)
        if self.keeper is not None and self.keeper.model is not None:
            for position in np.flatnonzero(self.keeper.model.rounds == round):
                engine.kept[position] = engine.committed[position]

    def _leave_out(self, failures: Mapping[str, remote.Failure], round: int) -> None:
        """Continue without the sites that failed, as long as the quorum is met."""
        wanted, out = self.experiment, self.simulation.out
        for site, why in failures.items():
            out[site] = why
            wanted.audit.note("left out", site=site, round=round, kind=why.kind, reason=why.reason)
        sites, kinds = len(self.simulation.federation), Counter(why.kind for why in out.values())
        if sites - len(out) >= wanted.order.quorum:
            return
        if kinds[remote.DIVERGED] > sites / 2:
            where = f"{kinds[remote.DIVERGED]} of {sites} sites"
            raise self._diverged(round, f"training diverged at {where}")
        if sites - kinds[remote.REFUSED] - kinds[remote.DROPPED] < wanted.order.quorum:
            refused = {site: why for site, why in out.items() if why.kind == remote.REFUSED}
            raise remote.SitesFailed(refused)
        raise TooFew(wanted.order, out)

    def _welcome_back(self) -> None:
        """Include lost sites that answer again, starting with this round."""
        out, note = self.simulation.out, self.experiment.audit.note
        for site, why in list(out.items()):
            if why.kind == remote.LOST and self.experiment.fleet.back(site):
                out |= self._begin_at([site])
                if out[site] is why:
                    del out[site]
                    note("back", site=site, round=self.history.rounds)


def outcome(action: Callable[[], Result]) -> Json:
    """Run the action. Return the final status of the run and a reason, as plain values."""
    try:
        action()
    except AtollError as error:
        kinds = {TooFew: "short", remote.Aborted: "stopped", Busy: "busy", AtollError: "failed"}
        status = next(kinds[kind] for kind in kinds if isinstance(error, kind))
        return {"status": status, "reason": str(error)}
    except Exception as error:  # an unknown error would end the job, and FLARE would retry it
        logging.getLogger(__name__).exception("the run failed")
        problem = f"{type(error).__name__}: {error}"[:1000]
        return {"status": "failed", "reason": f"the server failed ({problem}); its log has more"}
    return {"status": "finished", "reason": ""}


def order_text(order: Order) -> str:
    """Encode an order as URL-safe base64, because FLARE interprets braces in job arguments."""
    return base64.urlsafe_b64encode(msgspec.json.encode(order)).decode()


def read_order(text: str) -> Order:
    """Decode an order that `order_text` encoded."""
    try:
        order = msgspec.json.decode(base64.urlsafe_b64decode(text), type=Order)
        check_name(order.run)  # it names a folder
        return order
    except (WireError, msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"the order cannot be read: {error}") from error
