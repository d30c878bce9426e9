"""The plots of one result: curves, clients and traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.errors import check_name, counted
from atoll.experiment.metrics import find_metric
from atoll.experiment.result import Result
from atoll.present import chart as plot
from atoll.present.chart import Axis, Chart
from atoll.present.chart_png import figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NAMED = 25  # maximum number of clients with a name on the axis
MAX_DOTS = 500  # maximum number of clients with their own dot


def plot_result(result: Result, kind: str) -> Figure:
    """Make the matplotlib figure of `result.plot(kind)`."""
    check_name("plot", kind, PLOTS)
    return figure(PLOTS[kind](result))


def _title(result: Result) -> str:
    return f"{result.config.method} on {result.config.data}, {counted(result.clients, 'client')}"


def convergence_chart(result: Result) -> Chart:
    """Plot test and validation scores of the scored model, and test scores of the other model."""
    other = "local" if (result.config.evaluate or "deployed") == "deployed" else "deployed"
    lines = (
        (f"{result.scored} model, test", "test", None, plot.BLUE),
        (f"{result.scored} model, validation", "val", None, plot.ORANGE),
        (f"{other} model, test", "test", other, plot.GREEN),
    )
    several, marks = len(result.seeds) > 1, []
    for name, role, scored, colour in lines:
        seeds = 100 * result.curve(None, role, scored)
        if np.isnan(seeds).all():
            continue
        band = (seeds.min(0), seeds.max(0)) if several else (None, None)
        rounds = np.arange(1, seeds.shape[1] + 1)
        marks.append(plot.Line(rounds, seeds.mean(0), colour, name, *band))
    x = Axis("round" + (", band: lowest to highest seed" if several else ""), whole=True)
    y = Axis(f"{result.metric}, {find_metric(result.metric).over}, %")
    return Chart(_title(result), x, y, tuple(marks), legend="lower right", grid=True)


def clients_chart(result: Result) -> Chart:
    """Plot clients' test scores at the selected round: by client if named and few, or by seed."""
    marks: list[plot.Mark] = []
    by_name = result.named and result.clients <= MAX_NAMED
    scores = 100 * result.of_clients(result.metric)
    for place, own in enumerate(scores.T if by_name else scores):
        known = own[np.isfinite(own)]
        if not known.size:
            continue
        marks += plot.box(known, place, middle=plot.RED)
        if known.size <= MAX_DOTS:
            spots = place + plot.aside(known.size)
            marks.append(plot.Dots(spots, known, size=3.2, opacity=0.7))
    seeds = [f"seed {seed.seed}" for seed in result.seeds]
    x = plot.named("client", result.client_names) if by_name else plot.named("", seeds)
    y = Axis(f"test {result.metric} of each client, %")
    return Chart(_title(result), x, y, tuple(marks), grid=True)


def traffic_by_round(result: Result) -> np.ndarray:
    """Return the training bytes of each round, down and up, as a mean over seeds, (2, rounds)."""
    rounds = result.config.rounds or 1
    return np.asarray(np.mean([seed.ledger.by_round(rounds) for seed in result.seeds], axis=0))


def traffic_chart(result: Result) -> Chart:
    """Plot the training bytes of each round, down and up, as a mean over seeds."""
    amounts = traffic_by_round(result) / 1e6
    rounds = amounts.shape[1]
    down, up = np.repeat(amounts, 2, axis=1)
    edges = np.repeat(np.arange(rounds + 1) + 0.5, 2)[1:-1]
    marks = (
        plot.Area(edges, 0 * down, down, plot.BLUE, "down", opacity=0.75),
        plot.Area(edges, down, down + up, plot.ORANGE, "up", opacity=0.75),
    )
    top = 1.2 * float((down + up).max()) or 1.0
    x = Axis("round", 0.5, rounds + 0.5, whole=True)
    y = Axis("MB in a round, all clients", 0.0, top)
    return Chart(_title(result), x, y, marks, legend="upper right", grid=True)


PLOTS: dict[str, Callable[[Result], Chart]] = {
    "convergence": convergence_chart,
    "clients": clients_chart,
    "traffic": traffic_chart,
}
