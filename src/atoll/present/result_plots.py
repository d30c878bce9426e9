"""`result.plot()`: one result as a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from atoll.core.errors import unknown
from atoll.experiment.result import Result
from atoll.present.plots import BLUE, GREEN, GREY, ORANGE, RED, empty_figure, need_matplotlib

MAX_DOTS = 500
"""Clients that are drawn one by one."""


def plot_result(result: Result, kind: str) -> Any:
    """A figure of one kind."""
    if kind not in PLOTS:
        raise unknown("plot", kind, PLOTS)
    need_matplotlib()
    figure = empty_figure(7.2, 4.2)
    axes = figure.subplots()
    PLOTS[kind](result, axes)
    config = result.config
    axes.set_title(f"{config.method} on {config.data}, {result.clients} clients", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure


def _convergence(result: Result, axes: Any) -> None:
    """Test, validation and local curves; bands from the lowest to the highest seed."""
    other = "local" if (result.config.evaluate or "deployed") == "deployed" else "deployed"
    beside = "local model, test" if other == "local" else "deployed model, test"
    lines = (
        (f"{result.scored} model, test", "test", None, BLUE),
        (f"{result.scored} model, validation", "val", None, ORANGE),
        (beside, "test", other, GREEN),
    )
    for name, role, scored, colour in lines:
        seeds = 100 * result.curve(None, role, scored)
        if np.isnan(seeds).all():
            continue
        rounds = np.arange(1, seeds.shape[1] + 1)
        axes.plot(rounds, seeds.mean(0), color=colour, linewidth=1.8, label=name)
        if len(seeds) > 1:
            axes.fill_between(rounds, seeds.min(0), seeds.max(0), color=colour, alpha=0.15, lw=0)
    band = ", band: lowest to highest seed" if len(result.seeds) > 1 else ""
    axes.set(xlabel=f"round{band}", ylabel=f"{result.metric}, mean over clients, %")
    axes.legend(frameon=False, loc="lower right")


def _clients(result: Result, axes: Any) -> None:
    """Each client's test score at the picked round, one column of dots for each seed."""
    values = 100 * result.of_clients(result.metric)
    names = [f"seed {seed.seed}" for seed in result.seeds]
    for place, own in enumerate(values):
        known = own[np.isfinite(own)]
        if not known.size:
            continue
        axes.boxplot(
            known,
            positions=[place],
            widths=0.5,
            showfliers=known.size > MAX_DOTS,
            medianprops={"color": RED, "linewidth": 2},
            boxprops={"color": GREY},
            whiskerprops={"color": GREY},
            capprops={"color": GREY},
            manage_ticks=False,
        )
        if known.size <= MAX_DOTS:
            # Sideways by rank, so that equal clients do not hide each other.
            aside = 0.18 * np.sin(2.4 * np.arange(known.size))
            axes.scatter(place + aside, known, s=18, color=BLUE, alpha=0.7, lw=0, zorder=3)
    axes.set_xticks(range(len(names)), names)
    axes.set(xlim=(-0.6, len(names) - 0.4), ylabel=f"test {result.metric} of each client, %")


def _traffic(result: Result, axes: Any) -> None:
    """Bytes of training in each round, mean over seeds, down and up."""
    rounds = result.config.rounds or 1
    amounts = np.mean([seed.ledger.by_round(rounds) for seed in result.seeds], axis=0) / 1e6
    down, up = amounts
    number = np.arange(1, rounds + 1)
    axes.fill_between(number, 0, down, step="mid", color=BLUE, alpha=0.75, lw=0, label="down")
    axes.fill_between(
        number, down, down + up, step="mid", color=ORANGE, alpha=0.75, lw=0, label="up"
    )
    axes.set(
        xlabel="round",
        ylabel="MB in a round, all clients",
        ylim=(0, 1.2 * float((down + up).max()) or 1.0),
        xlim=(0.5, rounds + 0.5),
    )
    axes.legend(frameon=False, loc="upper right", ncols=2)


PLOTS: dict[str, Callable[[Result, Any], None]] = {
    "convergence": _convergence,
    "clients": _clients,
    "traffic": _traffic,
}
