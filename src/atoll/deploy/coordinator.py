"""The server's side of a federated run: agree with the sites, run every seed, save all results.

This module does not depend on a transport: sites are behind a `Fleet`. Another process can continue
a run from its folder: the roster, a checkpoint per seed after every round, and the audit log.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import msgspec

from atoll import __version__
from atoll.core.errors import (
    AtollError,
    ConfigError,
    DataError,
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
from atoll.deploy.federated import FederatedExperiment, Returns, TooFew, no_history
from atoll.deploy.heads import check_name
from atoll.deploy.lock import Busy, FolderLock
from atoll.engines import fleet as remote
from atoll.engines.codec import load_checkpoint
from atoll.engines.plausible import UPDATE_LIMIT
from atoll.experiment.build import build_method, check_memory
from atoll.experiment.config import RunConfig, config_text, make_config, parse_config, resolve
from atoll.experiment.folder import RunFolder, read_json
from atoll.experiment.hardware import available_memory, tuned_process
from atoll.experiment.history import (
    bins_metric,
    metric_of,
    positive_of,
    select_rule,
    selection_of,
)
from atoll.experiment.privacy import keeps_scores, privacy_report, with_privacy
from atoll.experiment.problem import name_configuration
from atoll.experiment.protocols import Protocol
from atoll.experiment.result import Result, SeedResult


class Order(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Everything that `atoll federate run` decides.

    An order omits defaults, so an older server can read it unless it sets a newer field.
    """

    run: str  # names the run on the server and at the sites
    config: str  # as TOML
    sites: tuple[str, ...]  # in the order of the clients
    quorum: int  # fewest sites that a round may have
    deadline: float = 600.0  # seconds that a step may take
    join: float = 120.0  # seconds that a site may take to answer at the start
    update_limit: float = UPDATE_LIMIT  # largest norm of an update / median of the other norms
    without: tuple[str, ...] = ()  # sites that the administrator excluded

    @property
    def members(self) -> dict[int, str]:
        """The sites that take part, by their positions."""
        return {i: site for i, site in enumerate(self.sites) if site not in self.without}


@dataclass(frozen=True)
class Settled:
    """A run with every choice resolved. `with_privacy` is not yet applied to its method."""

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
        check_keys(method, roster)
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


def check_keys(method: Method, roster: remote.Roster) -> None:
    """Refuse a run that needs more memory for all nodes (`bytes_per_node`) than the server has."""
    most = max(roster.nodes)
    needs, free = method.bytes_per_node * most * len(roster), available_memory()
    if needs > free:
        site = roster.names[roster.nodes.index(most)]
        room = f"{needs / 2**30:.3g} GiB on the server, but {free / 2**30:.3g} GiB are free"
        hint = "leave it out, or choose another method"
        raise ConfigError(f"{site} counts {most} nodes: their keys need {room}; {hint}")


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
    returns = Returns()
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
            returns=returns,
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
        seeds.append(SeedResult.of_checkpoint(seed, tree, no_history(roster), settled.method))
    try:
        setup = float(read_json(folder / "result.json")["seconds"]["setup"])
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"'{folder / 'result.json'}' was changed; restore it") from error
    return settled.result(seeds, setup, folder)


def agree(
    order: Order, config: RunConfig, fleet: remote.Fleet, folder: Path, audit: Audit
) -> tuple[remote.Roster, dict[str, remote.Failure]]:
    """Ask the sites for their summaries. Return the roster, and the failures by site.

    A new run needs all its sites. A resumed run needs the quorum.
    """
    wanted = {"method": config.method, "rounds": config.rounds or 0}
    privacy = msgspec.to_builtins(config.dp)
    head = {"do": "hello", "run": order.run, **wanted, "dp": privacy}
    head |= {"version": remote.PROTOCOL, "atoll": __version__}
    head["encoder"] = config.encoder or MODES[0]
    if head["encoder"] == "pooled":
        hint = "use federated or local"
        raise ConfigError(f"--encoder pooled is for simulations: no server sees all rows; {hint}")
    asked = [*order.members.values()]
    replies, failures = fleet.map(
        "hello", dict.fromkeys(asked, remote.Packet(head, b"")), order.join
    )
    joined, versions, told = {}, {}, {}
    for site, packet in replies.items():
        versions[site] = remote.one_line(packet.head.pop("atoll", "older"), 40)
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
    if known:
        _need_all(order, known)
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


def _need_all(order: Order, sites: Mapping[str, SiteSummary]) -> None:
    if lacking := [name for name in order.sites if name not in sites]:
        raise DataError(f"{ROSTER} of the run lacks site {lacking[0]}; restore it from a backup")


def _roster(order: Order, config: RunConfig, sites: Mapping[str, SiteSummary]) -> remote.Roster:
    _need_all(order, sites)
    every = [sites[name] for name in order.sites]
    counts, nodes = tuple(site.counts for site in every), tuple(site.nodes for site in every)
    shape = (every[0].features, every[0].classes, task_named(every[0].task))
    known = [word[len("class ") :] for word in every[0].words if word.startswith("class ")]
    about = {"class_names": known} if known else {}
    return remote.Roster(order.sites, *shape, counts, nodes, config.data, every[0].metric, about)


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
