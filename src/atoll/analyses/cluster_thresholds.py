"""Propose GCFL's thresholds ε1 and ε2 after a short run: `atoll tune-clusters`.

GCFL splits a cluster if the norm of its mean update is below ε1 and the largest update of a member
is above ε2. Then the shared model has converged, but one client has not. The norm of an update
changes with data, learning rate, width, batch size and epochs, so no threshold fits all. The paper
sets them "through offline training for about 50 rounds" and gives no details. Here:

- The method runs with one cluster that never splits, and we record all norms.
- ε1 is the 10th percentile of the mean update's norm in the second half of the rounds: "as small as
  possible", as the paper requires, but within reach.
- ε2 is 1 % below the smaller of two numbers: the median norm of the largest update in those rounds,
  and its minimum over those of them with a mean update below ε1. With a lower value, clusters split
  until each has one or two clients. Only validation scores can show whether splits help.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from atoll.core.errors import ConfigError
from atoll.engines.base import choose_engine
from atoll.engines.clients import Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig, run_command
from atoll.experiment.hardware import choose_device, tuned_process
from atoll.experiment.problem import Problem
from atoll.experiment.rounds import check_task
from atoll.methods.gcfl import GCFL
from atoll.present import chart as plot
from atoll.present.chart import BLUE, RED, Axis, Chart, Line, Panels, Rule
from atoll.present.tables import Column, Part, Table, Words, heading, make_table, quiet

ROUNDS = 50  # the paper's number of rounds for these two numbers
LEAST_ROUNDS = 8
STEPS = (-3, -2, -1, 0, 1, 2, 3, 4)
"""Positions of a grid, in steps from the proposal, which is position 0."""


@dataclass(frozen=True, eq=False)
class ThresholdProposal:
    """The proposed thresholds, and the norms that determine them. R rounds, K clients."""

    config: RunConfig  # resolved, with the method's default ε
    request: RunConfig  # the user's options
    norms: np.ndarray  # of each client's update, (R, K)
    together: np.ndarray  # norm of the mean update, (R,)
    may_split: int  # the first round, counted from 0, in which the method may split
    clients: tuple[str, ...]  # their names
    notes: tuple[str, ...] = ()  # notes of the loader about the user's own data

    @property
    def largest(self) -> np.ndarray:
        """Norm of the largest update, (R,)."""
        return np.asarray(self.norms.max(1))

    @property
    def tail(self) -> int:
        """The start of the second half of the rounds."""
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
        return two_digits(1.001 * low, up=True)  # above the percentile, even if norms repeat

    @property
    def eps2(self) -> float:
        below = self.together[self.tail :] < self.eps1
        least = self.largest[self.tail :][below].min(initial=np.inf)
        return two_digits(0.99 * min(float(least), self.restless))

    @property
    def falling(self) -> float:
        """Relative decrease of the mean update's median norm from the third to the last quarter."""
        third, last = np.array_split(self.together[self.tail :], 2)
        return float(1 - np.median(last) / np.median(third))

    def first_split(self, eps1: float, eps2: float) -> float:
        """Return the first round, counted from 0, that splits with these thresholds, or NaN."""
        meets = (self.together < eps1) & (self.largest > eps2)
        meets[: self.may_split] = False
        return float(meets.argmax()) if meets.any() else float("nan")

    def grid(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return values of ε1 and of ε2 near the proposal, and the first split for every pair."""
        # ε1 ranges from half the proposal to more than its double, ε2 from ε1 to above restless.
        down = self.eps2 / min(self.eps1, self.eps2 / 2)
        first = [two_digits(self.eps1 * 2.0 ** (step / 3)) for step in STEPS]
        factors = [(down if step < 0 else 1.6) ** (step / 3) for step in STEPS]
        second = [two_digits(self.eps2 * factor) for factor in factors]
        rounds = [[self.first_split(one, other) for other in second] for one in first]
        return np.array(first), np.array(second), np.array(rounds)

    def warnings(self) -> list[str]:
        """Reasons to doubt the proposal."""
        found = []
        if self.falling > 0.2:
            found.append(
                f"the mean update still decreased by {self.falling:.0%} from the third to the last "
                "quarter of the rounds; give more --rounds"
            )
        if self.calm > 0.7 * self.restless:
            found.append(
                "the mean update is nearly as long as the largest update: the clients move in "
                "the same direction, and a split can gain little"
            )
        if np.isnan(self.first_split(self.eps1, self.eps2)):
            found.append("the proposal causes no split in these rounds; give more --rounds")
        return found

    @property
    def title(self) -> str:
        """A description of the run."""
        config = self.config
        return (
            f"{config.method} without splits: {config.data}, {len(self.clients)} clients, "
            f"{config.partition}, {len(self.together)} rounds, protocol {config.protocol}"
        )


def two_digits(value: float, *, up: bool = False) -> float:
    """Round down, or up, to two significant digits, because more digits would suggest precision."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (np.floor(np.log10(value)) - 1)
    steps = value / unit
    # A number with two digits must not change because of its last bit.
    whole = np.ceil(steps - 1e-9) if up else np.floor(steps + 1e-9)
    return float(f"{whole * unit:.2g}")


@tuned_process()
def tune_clusters(
    request: RunConfig, *, on_round: Callable[[int], None] | None = None
) -> ThresholdProposal:
    """Run a method of the GCFL family without splits, and record all norms.

    All clients train, as in every round that splits. The default of `rounds` is `ROUNDS`.
    `on_round` is called after each round with the number of finished rounds.
    """
    rounds = request.rounds or ROUNDS
    if rounds < LEAST_ROUNDS:
        raise ConfigError(f"rounds is {rounds}; give at least {LEAST_ROUNDS} to see the trend")
    made = Problem.of(msgspec.structs.replace(request, rounds=rounds)).divide(request.seed)
    federation, config = made.federation, made.config
    task = federation.task.name
    method = build_method(config, federation.features, federation.classes, task)
    if not isinstance(method, GCFL):
        raise ConfigError(f"{config.method} does not split clusters; this command needs gcfl")
    if len(federation) <= method.min_size:
        never = f"a cluster of {method.min_size} clients or fewer is never split"
        only = f"there are only {len(federation)} clients"
        raise ConfigError(f"{never}, and {only}, so it has no thresholds")
    check_task(method, federation)
    device, engine = choose_device(config.device), choose_engine(config.engine)[0]
    whole = replace(method, eps1=0.0)  # no norm is below zero, so there are no splits
    simulation = Simulation(
        federation, whole, engine=engine, seed=config.seed, device=device, chunk=config.chunk
    )
    server = whole.init(simulation.clients(-1))
    for number in range(rounds):
        server = whole.round(server, simulation.clients(number))
        if on_round is not None:
            on_round(number + 1)
    trace = server.trace.double().cpu().numpy()
    norms, waits = (trace[:, 0], trace[:, 1, 0]), method.seq_length
    may_split = max(method.min_round, waits - 1 if method.similarity != "cosine" else 0)
    about = federation.client_names, tuple(made.notes)
    return ThresholdProposal(config, request, *norms, may_split, *about)


def threshold_parts(found: ThresholdProposal, *, grid: bool) -> list[Part]:
    """Return norms, proposal and warnings. The caller prints the command below, unwrapped."""
    parts: list[Part] = [heading(found.title), "", _norm_table(found), "", *reasons(found)]
    parts += [Words(f"But {line}.", "yellow") for line in found.warnings()]
    if grid:
        caption = (
            "Round of the first split, counted from 0; –: no split in these rounds. The "
            "proposal is the fourth row and column."
        )
        first, second, rounds = found.grid()
        values = zip(first, plot.number_words(rounds, 0), strict=True)
        lines = [[f"{value:g}", *words] for value, words in values]
        names = ["eps1 | eps2", *(f"{value:g}" for value in second)]
        parts += ["", make_table(names, lines, left=0), quiet(caption)]
    return parts


def reasons(found: ThresholdProposal) -> list[str]:
    """Return one line for each threshold, and one for the first split."""
    first = found.first_split(found.eps1, found.eps2)
    when = f"in round {first:.0f}" if np.isfinite(first) else "in none of these rounds"
    return [
        f"eps1 = {found.eps1:g}: the 10th percentile of the mean update's norm in the second "
        f"half (median {found.calm:.3g})",
        f"eps2 = {found.eps2:g}: just below the largest update in those rounds (median of the "
        f"second half {found.restless:.3g})",
        f"The first split would be {when} (earliest: {found.may_split}).",
    ]


def command(found: ThresholdProposal) -> str:
    """Return the command that runs the method with the proposal and the user's other options."""
    settings = {**found.request.set, "eps1": found.eps1, "eps2": found.eps2}
    # The rounds were for tuning; a run uses the rounds of the protocol.
    return run_command(msgspec.structs.replace(found.request, rounds=None, set=settings))


def _norm_table(found: ThresholdProposal) -> Table:
    rows = [("mean of all", found.together), ("largest", found.largest)]
    clients = zip((f"client {name}" for name in found.clients), found.norms.T, strict=True)
    lines = []
    for name, values in [*rows, *clients][: plot.MAX_ROWS + len(rows)]:
        tail = values[found.tail :]
        numbers = (values[0], np.median(tail), tail.min(), tail.max())
        lines.append([name, *(f"{number:.3g}" for number in numbers)])
    names = ("first round", "median, second half", "lowest", "highest")
    columns = [Column("norm of the update", "left"), *(Column(n, wrap=True) for n in names)]
    return make_table(columns, lines, sections=[len(rows)])


def threshold_files(found: ThresholdProposal) -> dict[str, object]:
    """Return norms.csv, tune-clusters.json and tune-clusters.png, for `write_all`."""
    names = ["round", "mean", "largest", *(f"client {name}" for name in found.clients)]
    norms = np.column_stack([found.together, found.largest, found.norms])
    lines = [[n, *(f"{value:.6g}" for value in line)] for n, line in enumerate(norms)]
    first, second, rounds = found.grid()
    high, place = max(len(found.together) - 1.0, 1.0), STEPS.index(0)
    heat = plot.Heat(rounds, plot.number_words(rounds, 0), high=high, frame=(place, place, 1, 1))
    title = "Round of the first split (grey: none; frame: the proposal)"
    x, y = (plot.named(n, [f"{v:g}" for v in of]) for n, of in (("ε2", second), ("ε1", first)))
    charts = (_norm_chart(found), Chart(title, x, y, (heat,)))
    return {
        "norms.csv": make_table(names, lines),
        "tune-clusters.json": summary(found),
        "tune-clusters.png": Panels(found.title, (charts,), (14, 5.6), widths=(1.25, 1)),
    }


def summary(found: ThresholdProposal) -> dict[str, object]:
    """Return the object that `--json` prints. Rounds count from 0, and null means never."""
    config = found.config
    first, second, rounds = found.grid()
    return {
        "method": config.method,
        "data": config.data,
        "clients": list(found.clients),
        **{name: getattr(config, name) for name in ("partition", "protocol", "seed")},
        "rounds": len(found.together),
        **{name: getattr(found, name) for name in ("eps1", "eps2", "calm", "restless", "falling")},
        "first_split": found.first_split(found.eps1, found.eps2),
        "may_split": found.may_split,
        "warnings": found.warnings(),
        "command": command(found),
        "grid": {"eps1": first, "eps2": second, "first_split": rounds},
    }


def _norm_chart(found: ThresholdProposal) -> Chart:
    """Plot the norms and the two thresholds."""
    rounds = np.arange(len(found.together))
    clients = [Line(rounds, norms, plot.GREY, width=0.8, opacity=0.7) for norms in found.norms.T]
    marks: list[plot.Mark] = [
        Rule(found.tail, upright=True, to=rounds[-1], colour=plot.SHADE),
        replace(clients[0], name="each client"),
        *clients[1:],
        Line(rounds, found.largest, RED, "largest", width=1.6),
        Line(rounds, found.together, BLUE, "mean update", width=2.2),
    ]
    for name, value, colour in (("ε1", found.eps1, BLUE), ("ε2", found.eps2, RED)):
        words = f"{name} = {value:g}"
        marks.append(Rule(value, colour=colour, dash=plot.DASHED, width=1.2, text=words))
    title = "Norms without splits (shaded: rounds that determine the proposal)"
    x, y = Axis("round", 0, rounds[-1], whole=True), Axis("norm of the update", log=True)
    return Chart(title, x, y, tuple(marks), legend="below")
