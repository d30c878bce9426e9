"""The rounds of a federated run: repeat a round without failed sites, and take them back later.

A divergence marks the run, so that `--without SITE` can continue it one round earlier.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import torch

from atoll.core.errors import AtollError, ClientLost, DataError, ServerDiverged
from atoll.core.files import write_atomically
from atoll.deploy.activity import ServerRun
from atoll.deploy.audit import Audit, Json
from atoll.deploy.site import owners
from atoll.engines import fleet as remote
from atoll.engines.clients import Backend
from atoll.engines.codec import load_checkpoint
from atoll.engines.ledger import Ledger
from atoll.engines.wire import make_probe
from atoll.experiment.config import RunConfig, config_text
from atoll.experiment.history import History, validation_curve
from atoll.experiment.privacy import privacy_report
from atoll.experiment.rounds import Experiment, Run

if TYPE_CHECKING:
    from atoll.deploy.coordinator import Order


class TooFew(ClientLost):
    """Fewer sites than the quorum answered. The run is saved up to the last complete round."""

    def __init__(self, order: Order, out: Mapping[str, remote.Failure]) -> None:
        answer = f"{len(order.sites) - len(out)} of {len(order.sites)} sites answer"
        why = "; ".join(f"{site}: {failure.reason}" for site, failure in out.items())
        kept = "the run is saved up to the last complete round"
        super().__init__(f"{answer}, but the quorum is {order.quorum} ({why}); {kept}")


class Diverged(AtollError):
    """Training diverged on the server or at over half of the sites. A bad update may be why."""

    def __init__(self, round: int, problem: str) -> None:
        cause = "an update that a site sent is the likely cause (audit.jsonl has their norms)"
        hint = "continue without that site: atoll federate run --resume DIR --without SITE"
        super().__init__(f"round {round}: {problem}; {cause}; {hint}")


STEADY = 10  # complete rounds after which the failed returns of a site are forgotten
SOON = 3  # failed returns of a site until it has to wait


class Returns:
    """The first round in which a lost site may return. Repeated failed returns double its wait.

    Otherwise a site that answers each ping and no step would cost one deadline in every round.
    """

    def __init__(self) -> None:
        self.since: dict[str, int] = {}  # the round of the last return
        self.failed: dict[str, int] = {}  # returns that ended early
        self.next: dict[str, int] = {}  # the first round in which the site may return

    def lost(self, site: str, round: int) -> None:
        """Set a lost site's wait. A return of fewer than `STEADY` rounds counts as failed."""
        short = round - self.since.get(site, -STEADY) < STEADY
        self.failed[site] = failed = self.failed.get(site, 0) + 1 if short else 0
        self.next[site] = round + (1 if failed < SOON else 2 ** (failed - SOON + 1))

    def back(self, site: str, round: int) -> None:
        """Note that a site is back."""
        self.since[site] = round


def no_history(roster: remote.Roster) -> History:
    """Return the history of a run before its first round."""
    return History(counts=np.array(roster.counts), nodes=np.array(roster.nodes))


@dataclass(frozen=True, kw_only=True)
class FederatedExperiment(Experiment):
    """An experiment whose clients are sites."""

    order: Order
    config: RunConfig
    fleet: remote.Fleet
    audit: Audit
    encoder: Path  # the file of the common encoder, which exists only for tables
    out: dict[str, remote.Failure]  # sites that do not take part now
    activity: ServerRun
    earlier: tuple[Ledger, ...]  # ledgers of the seeds before this one
    returns: Returns  # of all seeds

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
        """Return the sites of the run, in the role of simulated clients."""
        wanted, method = self.experiment, self.experiment.method
        roster = cast(remote.Roster, wanted.federation)
        self.run_name = f"{wanted.order.run}-{wanted.seed}"
        probe = make_probe(wanted.federation, dict(method.views), torch.zeros(()))
        sites, run = (wanted.fleet, roster.declared(), owners(method), probe), self.run_name
        engine = remote.Remote(*sites, run, wanted.order.deadline, wanted.audit.note)
        engine.update_limit = wanted.order.update_limit
        cohort = remote.Cohort(roster, engine, wanted.seed)
        cohort.out = engine.out = wanted.out
        return cohort

    def no_history(self) -> History:
        return no_history(self.simulation.federation)

    def start_from(self, checkpoint: Path | None, fingerprint: str) -> None:
        """Let the sites build the method, and start or continue the run."""
        assert checkpoint is not None
        wanted, out = self.experiment, self.simulation.out
        earlier = checkpoint.parent.parent / "earlier"
        self.checkpoint, self.earlier = checkpoint, earlier / f"{wanted.seed}.atoll"
        self.mark = earlier / f"{wanted.seed}.diverged"
        if wanted.order.without and self.mark.exists():
            self._go_back()
        failures = self._begin_at(
            [name for name in self.simulation.engine.names if name not in out]
        )
        first = wanted.seed == wanted.config.seed and not checkpoint.exists()
        refused = {site: why for site, why in failures.items() if why.kind == remote.REFUSED}
        if refused and first:  # nothing is lost yet, and the administrator can choose again
            for site, why in refused.items():
                wanted.audit.note(why.kind, site=site, reason=why.reason)
            raise remote.SitesFailed(refused)
        self._leave_out(failures, -1)
        super().start_from(checkpoint, fingerprint)

    def _go_back(self) -> None:
        """Continue from the round before the divergence, if its checkpoint is intact."""
        note = self.experiment.audit.note
        try:
            load_checkpoint(self.earlier)
        except DataError as error:
            note("not back before divergence", reason=str(error))
        else:
            os.replace(self.earlier, self.checkpoint)
            note("back before divergence", round=self.mark.read_text(errors="replace")[:20])
        self.mark.unlink()

    def _begin_at(self, sites: list[str]) -> dict[str, remote.Failure]:
        """Let the sites build the method. Return the failed sites."""
        wanted = self.experiment
        head = {"do": "begin", "run": self.run_name, "config": config_text(wanted.config)}
        if wanted.encoder.exists():
            head["encoder"] = json.loads(wanted.encoder.read_bytes())
        packets = dict.fromkeys(sites, remote.Packet(head, b""))
        longest = max(wanted.order.join, wanted.order.deadline)  # a begin also runs steps
        return wanted.fleet.map("begin", packets, longest)[1]

    def start(self) -> None:
        """Create the server's first tree with the sites that answer."""
        self._whole(super().start, -1)

    def one_round(self) -> None:
        """Run a complete round with the sites that answer. Exclude and report failed sites."""
        self._welcome_back()
        self._whole(super().one_round, self.history.rounds)
        # The file still contains the previous round. Keep it in case the next round diverges.
        self.earlier.parent.mkdir(exist_ok=True)
        new = self.earlier.with_suffix(".new")
        new.unlink(missing_ok=True)
        try:
            os.link(self.checkpoint, new)
            os.replace(new, self.earlier)
        except OSError:  # some network disks have no hard links
            write_atomically(self.earlier, self.checkpoint.read_bytes())

    def _whole(self, action: Callable[[], None], round: int) -> None:
        """Repeat an action without the sites that fail in it, until it succeeds as a whole."""
        server, entries = self.server, len(self.ledger.entries)
        while True:
            self.simulation.engine.begin()
            self.server = server
            del self.ledger.entries[entries:]
            try:
                action()
            except remote.SitesFailed as error:
                if error.failures.keys() <= self.simulation.out.keys():  # it would fail forever
                    raise self._diverged(round, str(error)) from error
                self._leave_out(error.failures, round)
            except ServerDiverged as error:
                raise self._diverged(round, error.problem) from error
            else:
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
        """Exclude the failed sites. Raise an error below the quorum, or if most sites diverged."""
        wanted, out = self.experiment, self.simulation.out
        for site, why in failures.items():
            out[site] = why
            wanted.returns.lost(site, self._since_start(round))
            wanted.audit.note("left out", site=site, round=round, kind=why.kind, reason=why.reason)
        sites, kinds = len(self.simulation.federation), Counter(why.kind for why in out.values())
        spoilt = sum(why.kind == remote.DIVERGED or why.too_large for why in out.values())
        if spoilt > sites / 2:  # whatever the quorum: the rest may be the site that spoilt it
            raise self._diverged(round, f"training diverged at {spoilt} of {sites} sites")
        if sites - len(out) >= wanted.order.quorum:
            return
        if sites - kinds[remote.REFUSED] - kinds[remote.DROPPED] < wanted.order.quorum:
            refused = {site: why for site, why in out.items() if why.kind == remote.REFUSED}
            raise remote.SitesFailed(refused)
        raise TooFew(wanted.order, out)

    def _welcome_back(self) -> None:
        """Include lost sites that answer again, starting with this round."""
        out, round, returns = self.simulation.out, self.history.rounds, self.experiment.returns
        now = self._since_start(round)
        for site, why in list(out.items()):
            waits = why.kind != remote.LOST or now < returns.next.get(site, 0)
            if waits or not self.experiment.fleet.back(site):
                continue
            returns.back(site, now)
            out |= self._begin_at([site])
            if out[site] is why:
                del out[site]
                self.experiment.audit.note("back", site=site, round=round)
            else:
                returns.lost(site, now)

    def _since_start(self, round: int) -> int:
        """Return the number of a round, counted over all seeds of the run."""
        wanted = self.experiment
        return (wanted.seed - wanted.config.seed) * wanted.rounds + round
