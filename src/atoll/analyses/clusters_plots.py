"""The pictures of `atoll clusters`: tree over rounds, norms, heterogeneity, losses, gains."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np

from atoll.analyses.clusters import ClusterStudy
from atoll.analyses.clusters_show import heading
from atoll.present.plots import BLUE, DPI, GREY, RED, empty_figure, log_scale

# Okabe and Ito's colours but the light yellow; clients on their own are grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A5195", "#3D3D3D")
PANELS = 6
"""Panels of the picture of norms: the largest clusters, and everybody else in the last."""


def pictures(found: ClusterStudy) -> dict[str, bytes]:
    """Every picture, as PNG files by name."""
    plots: dict[str, Callable[[ClusterStudy], Any]] = {
        "tree.png": plot_tree,
        "norms.png": plot_norms,
        "heterogeneity.png": plot_heterogeneity,
        "losses.png": plot_losses,
        "accuracy.png": plot_accuracy,
    }
    if found.baseline is not None:
        plots["gains.png"] = plot_gains
    drawn = {}
    for name, plot in plots.items():
        content = io.BytesIO()
        plot(found).savefig(content, dpi=DPI, format="png")
        drawn[name] = content.getvalue()
    return drawn


def colours(found: ClusterStudy) -> list[str]:
    """Each client's colour: that of its final cluster, the largest first; grey for loners."""
    colour = [GREY] * len(found.names)
    several = [members for members in found.members if len(members) > 1]
    for place, members in enumerate(sorted(several, key=len, reverse=True)):
        for member in members:
            colour[member] = COLOURS[place % len(COLOURS)]
    return colour


def rows(found: ClusterStudy) -> list[int]:
    """The clients in an order in which the clusters of every round stand together."""
    order = [list(range(len(found.names)))]
    for split in found.splits:
        place = next(i for i, group in enumerate(order) if split.stay[0] in group)
        order[place : place + 1] = [list(split.stay), list(split.leave)]
    return [client for group in order for client in group]


def plot_tree(found: ClusterStudy) -> Any:
    """A box for every cluster, from the round in which it came about to the one that split it."""
    order = rows(found)
    row_of = {client: row for row, client in enumerate(order)}
    figure = empty_figure(12, min(2.6 + 0.3 * len(order), 16))
    axes = figure.subplots()
    figure.suptitle(heading(found))
    colour = colours(found)
    for members, start, end in boxes(found):
        where = [row_of[member] for member in members]
        final = members in found.members
        face, middle = colour[members[0]] if final else "#E8E8E8", np.mean(where)
        low, high = min(where) - 0.42, max(where) + 0.42
        axes.fill_between([start, end], low, high, color=face, alpha=0.8, edgecolor="white")
        axes.plot([start, end], [middle, middle], color="#444444", linewidth=1.2)
    for split in found.splits:
        ends = [np.mean([row_of[one] for one in side]) for side in (split.stay, split.leave)]
        axes.plot([split.round + 1] * 2, ends, color="#444444", linewidth=1.2)
    _name_splits(axes, found)
    axes.set_yticks(range(len(order)), [found.names[client] for client in order])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, found.rounds), ylim=(len(order) - 0.4, -0.6), xlabel="round")
    axes.set_ylabel("client (coloured: final clusters; grey: on its own)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def boxes(found: ClusterStudy) -> list[tuple[list[int], int, int]]:
    """Members of each cluster that ever was, the round it begins with, and the one it ends before.

    A split takes effect at the end of its round: boxes meet one round later.
    """
    now = {tuple(range(len(found.names))): 0}
    done = []
    for split in found.splits:
        whole = tuple(sorted((*split.stay, *split.leave)))
        done.append((list(whole), now.pop(whole), split.round + 1))
        now |= {tuple(sorted(side)): split.round + 1 for side in (split.stay, split.leave)}
    return done + [(list(members), start, found.rounds) for members, start in now.items()]


def _name_splits(axes: Any, found: ClusterStudy) -> None:
    """The rounds of the splits above the picture, leaving out those without room."""
    last = -np.inf
    for number in sorted({split.round for split in found.splits}):
        if number - last < 0.022 * found.rounds:
            continue
        axes.annotate(
            str(number),
            (number + 1, 1),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=8,
            rotation=90 if len(found.splits) > 12 else 0,
        )
        last = number


def plot_norms(found: ClusterStudy) -> Any:
    """Norms of the clients' updates, a panel for each final cluster (Fig. 1)."""
    groups = _panels(found)
    wide = min(len(groups), 3)
    high = -(-len(groups) // wide)
    figure = empty_figure(4.6 * wide + 1, 3.2 * high + 0.9)
    figure.suptitle(f"Norms of the updates (black: mean update of the cluster)\n{heading(found)}")
    panels = figure.subplots(high, wide, sharex=True, sharey=True, squeeze=False).ravel()
    rounds, colour, near = np.arange(found.rounds), colours(found), _near(found)
    for axes, (title, members) in zip(panels, groups, strict=False):
        for member in members:
            axes.plot(rounds, found.norms[:, member], color=colour[member], linewidth=0.9)
            if colour[member] == GREY and len(members) <= PANELS:
                end = (found.rounds - 1, found.norms[-1, member])
                axes.annotate(f" {found.names[member]}", end, va="center", fontsize=7)
        if len({found.label[-1, member] for member in members}) == 1:
            axes.plot(rounds, found.together[:, members[0]], color="black", linewidth=1.4)
        for value in near.values():
            axes.axhline(value, color="#555555", linestyle="--", linewidth=1)
        for number in {split.round for split in found.splits if _touches(split, members)}:
            axes.axvline(number, color="#777777", linewidth=0.8, linestyle=":")
        axes.set_title(title, fontsize=10)
        axes.set(xlim=(0, found.rounds - 1))
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    log_scale(panels[0])
    for name, value in near.items():
        at = ("axes fraction", "data")
        panels[len(groups) - 1].annotate(f" {name}", (1, value), xycoords=at, va="center")
    figure.supxlabel("round (dotted: splits that these clients went through)")
    figure.supylabel("norm of the update")
    return figure


def _near(found: ClusterStudy) -> dict[str, float]:
    """ε1 and ε2, unless they are so far from all norms that a picture with them shows nothing."""
    low, high = np.nanmin(found.together), np.nanmax(found.norms)
    lines = {"ε1": found.eps("eps1"), "ε2": found.eps("eps2")}
    return {name: value for name, value in lines.items() if low / 5 < value < 5 * high}


def _touches(split: Any, members: list[int]) -> bool:
    return bool(set(members) & {*split.stay, *split.leave})


def _panels(found: ClusterStudy) -> list[tuple[str, list[int]]]:
    """The largest final clusters, and the clients of all others together."""
    ordered = sorted(found.members, key=len, reverse=True)
    several = [members for members in ordered if len(members) > 1]
    shown = several if len(ordered) == len(several) <= PANELS else several[: PANELS - 1]
    rest = sorted(member for members in ordered[len(shown) :] for member in members)
    panels = [(_short(members, found), members) for members in shown]
    if rest:
        alone = len(ordered) - len(shown) == len(rest)
        what = "on their own" if alone else "in other clusters"
        panels.append((f"{what}: {_short(rest, found)}", rest))
    return panels


def _short(members: list[int], found: ClusterStudy) -> str:
    """Names of some clients, cut where there are too many."""
    text = ", ".join(found.names[member] for member in members)
    return text if len(text) <= 44 else text[:43] + "…"


def plot_heterogeneity(found: ClusterStudy) -> Any:
    """How different graphs inside clusters are: over rounds, and in each final cluster (Fig. 3)."""
    figure = empty_figure(13, 5)
    figure.suptitle(f"How different the graphs inside a cluster are\n{heading(found)}")
    over, bars = figure.subplots(1, 2, width_ratios=[1, 1.3])
    lines = np.array(found.within())
    at = np.append(np.maximum(lines[:, 0], 0), found.rounds)
    several = sorted((m for m in found.members if len(m) > 1), key=len, reverse=True)[:12]
    for place, (name, colour) in enumerate((("structure", BLUE), ("features", RED))):
        values = lines[:, 1 + place]
        over.step(at, np.append(values, values[-1]), where="post", color=colour, linewidth=2)
        over.plot([], [], color=colour, linewidth=2, label=name)
        over.axhline(values[0], color=colour, linestyle="--", linewidth=1)
        bars.axhline(values[0], color=colour, linestyle="--", linewidth=1)
        heights = [found.of_cluster(members)[place] for members in several]
        spots = np.arange(len(several)) + 0.4 * place - 0.2
        bars.bar(spots, np.nan_to_num(heights), width=0.38, color=colour)
    over.set(xlabel="round", ylabel="mean over pairs of clients in one cluster (nats)")
    over.set(xlim=(0, found.rounds), ylim=(0, None), title="Over the rounds")
    over.legend(loc="lower left", frameon=False)
    bars.set_xticks(range(len(several)), [_wrapped(members, found) for members in several])
    bars.tick_params(axis="x", labelsize=8)
    room = max(0.6, (5 - len(several)) / 2)  # one cluster alone would get bars as wide as a wall
    bars.set_xlim(-room, len(several) - 1 + room)
    bars.set(title="In each final cluster (dashed: all clients)", ylim=over.get_ylim())
    for axes in (over, bars):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _wrapped(members: list[int], found: ClusterStudy) -> str:
    """Names of a cluster's clients under a bar, in several lines."""
    import textwrap

    text = ", ".join(found.names[member] for member in members)
    return "\n".join(textwrap.wrap(text, 16)[:6])


def plot_losses(found: ClusterStudy) -> Any:
    """Test losses, mean and spread over the clients of all seeds (Fig. 4)."""
    figure = empty_figure(8, 5)
    figure.suptitle(f"Test loss of the deployed model\n{heading(found)}")
    axes, tops = figure.subplots(), []
    for place, run in enumerate((found.run, *found.others)):
        losses = np.concatenate(
            [one.history.array("deployed", "loss", "test") for one in run.result.seeds], axis=1
        )
        mean, spread = np.nanmean(losses, axis=1), np.nanstd(losses, axis=1)
        colour, at = COLOURS[place % len(COLOURS)], np.arange(len(mean))
        axes.plot(
            at,
            mean,
            color=colour,
            linewidth=1.8,
            label=found.gains[place].name,
            zorder=3 - 0.1 * place,
        )
        tops += [mean.max(), np.quantile(mean + spread, 0.95)]  # the start would hide the rest
        axes.fill_between(at, mean - spread, mean + spread, color=colour, alpha=0.12, linewidth=0)
    for number in {split.round for split in found.splits}:
        axes.axvline(number, color="#777777", linewidth=0.8, linestyle=":")
    axes.set(xlabel="round (dotted: splits)", ylabel="cross entropy, mean ± std over clients")
    axes.set(xlim=(0, found.rounds - 1), ylim=(0, 1.1 * max(tops)))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_accuracy(found: ClusterStudy) -> Any:
    """What clients get against how different those are whom they trained with (after Fig. 5)."""
    figure = empty_figure(8, 5.4)
    axes = figure.subplots()
    company = found.company()
    accuracy = found.gains[0].accuracy[found.seed - found.run.config.seed]
    colour = colours(found)
    for client in np.flatnonzero(np.isfinite(company + accuracy)):
        spot = (company[client], 100 * accuracy[client])
        axes.plot(*spot, "o", color=colour[client], markersize=8)
        axes.annotate(
            found.names[client], spot, xytext=(6, 4), textcoords="offset points", fontsize=8
        )
    axes.set(xlabel="mean structure heterogeneity to the other clients of its cluster (nats)")
    axes.set_ylabel("test accuracy, %")
    axes.margins(0.12)
    axes.spines[["top", "right"]].set_visible(False)
    loners = int(np.isnan(company).sum())
    note = f" ({loners} on their own are left out)" if loners else ""
    figure.suptitle(
        f"Accuracy, and how different the rest of the cluster is{note}\n{heading(found)}"
    )
    return figure


def plot_gains(found: ClusterStudy) -> Any:
    """What each client gains, a violin for each run (Figs. 6 to 8)."""
    compared = [(gain, gain.gain) for gain in found.gains if gain.gain is not None]
    figure = empty_figure(max(8, 2 + 2.2 * len(compared)), 5.4)
    figure.suptitle(f"What each client gains over {found.baseline}\n{heading(found)}")
    axes = figure.subplots()
    axes.axhline(0, color="#555555", linewidth=1)
    rng = np.random.default_rng(0)
    for place, (_, points) in enumerate(compared):
        values = 100 * points[np.isfinite(points)]
        colour = COLOURS[place % len(COLOURS)]
        if np.ptp(values) > 0:
            (body,) = axes.violinplot(values, [place], widths=0.8, showextrema=False)["bodies"]
            body.set(facecolor=colour, alpha=0.25, edgecolor=colour)
        axes.plot(
            place + rng.uniform(-0.08, 0.08, values.size),
            values,
            "o",
            color=colour,
            markersize=5,
            alpha=0.8,
        )
        axes.plot([place - 0.25, place + 0.25], [values.mean()] * 2, color="black", linewidth=2)
    labels = [
        f"{gain.name}\nmean {100 * np.nanmean(points):+.1f}, least {100 * np.nanmin(points):+.1f}"
        f"\n{gain.improved(ties=True)} of {len(points)} not worse"
        for gain, points in compared
    ]
    axes.set_xticks(range(len(compared)), labels)
    axes.set(
        xlim=(-0.6, max(len(compared), 2) - 0.4), ylabel="points of test accuracy (line: mean)"
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure
