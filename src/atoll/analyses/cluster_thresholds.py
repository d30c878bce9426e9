"""When should a cluster split? GCFL's ε1 and ε2, read off a short run: `atoll tune-clusters`.

GCFL splits a cluster once the norm of its mean update is below ε1 (together nothing moves any more)
while the largest update of a member is above ε2 (somebody still wants to move). Both are in units
of ‖Δ‖, which change with data, rate, width, batch size and epochs: no number fits everybody. The
paper sets them "through offline training for about 50 rounds" and says no more. Here:

- The method runs with one cluster that never splits; all norms are written down.
- ε1 is what the norm of the mean update is below in one round of ten, in the second half of the
  rounds: "as small as possible", as the paper wants it, but within reach.
- ε2 is just below what the largest update was in those rounds. Lower, and a cluster goes on to fall
  apart until every client is on its own.

From the norms alone one can also tell, for any other pair, in which round the first split would
come (`first_split`); what splits are worth is for validation scores to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.method import Method
from atoll.engines.base import choose_engine
from atoll.engines.simulation import Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig
from atoll.experiment.hardware import choose_device, tuned_process
from atoll.experiment.problem import Problem
from atoll.experiment.rounds import check_task
from atoll.methods.gcfl import GCFL

ROUNDS = 50
"""How long the paper trained to set the two numbers."""
LEAST_ROUNDS = 8
STEPS = (-3, -2, -1, 0, 1, 2, 3, 4)
"""Places of a grid, in steps from the proposal, which is the place 0."""


@dataclass(frozen=True, eq=False)
class ThresholdProposal:
    """What `tune_clusters` finds. R rounds, K clients.

    Attributes:
        config: Resolved, with the method's own ε still in it.
        asked: As the user gave it.
        norms: Norm of each client's update, (R, K).
        together: Norm of the mean update, (R,).
        may_split: The first round, counted from 0, in which the method would split at all.
        clients: What each client is called.
        notes: What the loader of the user's own data has to say.
    """

    config: RunConfig
    asked: RunConfig
    norms: np.ndarray
    together: np.ndarray
    may_split: int
    clients: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def largest(self) -> np.ndarray:
        """Norm of the largest update, (R,)."""
        return np.asarray(self.norms.max(1))

    @property
    def tail(self) -> int:
        """Where the second half of the rounds begins."""
        return len(self.together) // 2

    @property
    def calm(self) -> float:
        """The median norm of the mean update in the second half."""
        return float(np.median(self.together[self.tail :]))

    @property
    def restless(self) -> float:
        """The median norm of the largest update in the second half."""
        return float(np.median(self.largest[self.tail :]))

    @property
    def eps1(self) -> float:
        low = float(np.quantile(self.together[self.tail :], 0.1))
        return two_digits(1.001 * low, up=True)  # above it, even where norms repeat

    @property
    def eps2(self) -> float:
        quiet = self.together[self.tail :] < self.eps1
        least = self.largest[self.tail :][quiet].min(initial=np.inf)
        return two_digits(0.99 * min(float(least), self.restless))

    @property
    def falling(self) -> float:
        """By how much the mean's norm fell from the third to the last quarter, as a share."""
        third, last = np.array_split(self.together[self.tail :], 2)
        return float(1 - np.median(last) / np.median(third))

    def first_split(self, eps1: float, eps2: float) -> float:
        """The round in which these two would first split the cluster, from 0; NaN if in none."""
        meets = (self.together < eps1) & (self.largest > eps2)
        meets[: self.may_split] = False
        return float(meets.argmax()) if meets.any() else float("nan")

    def grid(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values of ε1, (A,), and ε2, (B,), around the proposal; rounds of first splits, (A, B).

        ε1 goes from half the proposal beyond its double, ε2 from ε1 beyond restless.
        """
        down = self.eps2 / min(self.eps1, self.eps2 / 2)
        first = _rounded([self.eps1 * 2.0 ** (step / 3) for step in STEPS])
        second = _rounded([self.eps2 * (down if step < 0 else 1.6) ** (step / 3) for step in STEPS])
        rounds = [[self.first_split(one, other) for other in second] for one in first]
        return first, second, np.array(rounds)

    def warnings(self) -> list[str]:
        """What makes the proposal doubtful."""
        found = []
        if self.falling > 0.2:
            found.append(
                f"the mean update still fell by {self.falling:.0%} from the third to the last "
                "quarter of the rounds; give more --rounds"
            )
        if self.calm > 0.7 * self.restless:
            found.append(
                "the mean update is nearly as long as the largest one: the clients go the same "
                "way, and a split has little to gain"
            )
        if np.isnan(self.first_split(self.eps1, self.eps2)):
            found.append("within these rounds the proposal splits nothing; give more --rounds")
        return found


def two_digits(value: float, *, up: bool = False) -> float:
    """Cut to two significant digits, or raised to them: more would pretend to be exact."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (np.floor(np.log10(value)) - 1)
    steps = value / unit
    # A number that has two digits already must not move for the sake of its last bit.
    whole = np.ceil(steps - 1e-9) if up else np.floor(steps + 1e-9)
    return float(f"{whole * unit:.2g}")


def _rounded(values: list[float]) -> np.ndarray:
    return np.array([two_digits(value) for value in values])


@tuned_process()
def tune_clusters(
    asked: RunConfig, *, on_round: Callable[[int], None] | None = None
) -> ThresholdProposal:
    """Run a method of GCFL's kind without splits and write all norms down.

    Args:
        asked: The configuration, as for a run; `rounds` is `ROUNDS` unless given. All clients take
            part, as they must in a round that splits.
        on_round: Called after each round with the number of rounds done.
    """
    rounds = asked.rounds or ROUNDS
    if rounds < LEAST_ROUNDS:
        raise ConfigError(f"rounds is {rounds}; give at least {LEAST_ROUNDS} to see where it ends")
    made = Problem.of(msgspec.structs.replace(asked, rounds=rounds)).divide(asked.seed)
    federation, config = made.federation, made.config
    method = clustered(
        build_method(config, federation.features, federation.classes, federation.task.name), config
    )
    if len(federation) <= method.min_size:
        raise ConfigError(
            f"a cluster of {method.min_size} clients or fewer is never split, and there are only "
            f"{len(federation)} clients; nothing is to be tuned"
        )
    check_task(method, federation)
    norms, together = _norms(method, federation, config, rounds, on_round)
    waits = method.seq_length if method.similarity != "cosine" else 1
    return ThresholdProposal(
        config,
        asked,
        norms,
        together,
        max(method.min_round, waits - 1),
        client_names(federation),
        tuple(made.notes),
    )


def clustered(method: Method, config: RunConfig) -> GCFL:
    """The method, if it is of the kind whose clusters split."""
    if not isinstance(method, GCFL):
        raise ConfigError(f"{config.method} does not split clusters; this command needs gcfl")
    return method


def client_names(federation: Federation) -> tuple[str, ...]:
    """Each client's number, with its data set where clients have different ones."""
    sets: Any = federation.about.get("sets", ())
    if len(set(sets)) < 2:
        return tuple(str(number) for number in federation.numbers)
    return tuple(f"{number} {name}" for number, name in zip(federation.numbers, sets, strict=True))


def _norms(
    method: GCFL,
    federation: Federation,
    config: RunConfig,
    rounds: int,
    on_round: Callable[[int], None] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Norms of the updates, (R, K), and of their mean, (R,), while nothing is split or scored."""
    method = replace(method, eps1=0.0)  # no norm is below zero
    simulation = Simulation(
        federation,
        method,
        engine=choose_engine(config.engine)[0],
        seed=config.seed,
        device=choose_device(config.device),
        chunk=config.chunk,
    )
    server = method.init(simulation.clients(-1))
    for number in range(rounds):
        server = method.round(server, simulation.clients(number))
        if on_round is not None:
            on_round(number + 1)
    trace = server.trace.double().cpu().numpy()
    return trace[:, 0], trace[:, 1, 0]
