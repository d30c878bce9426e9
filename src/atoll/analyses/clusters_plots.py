"""The pictures of `atoll clusters`: tree over rounds, norms, heterogeneity, losses, gains."""

from __future__ import annotations

import textwrap

import numpy as np

from atoll.analyses.clusters import ClusterStudy
from atoll.analyses.clusters_show import heading
from atoll.methods.gcfl import Split
from atoll.present.chart import (
    BLACK,
    BLUE,
    DASHED,
    DOTTED,
    EDGE,
    GREY,
    RED,
    SHADE,
    SOFT,
    Area,
    Axis,
    Bars,
    Chart,
    Dots,
    Line,
    Mark,
    Panels,
    Rule,
    Texts,
    colour_of,
    in_rows,
    steps,
    violin,
)

PANELS = 6
"""Panels of the picture of norms: the largest clusters, and all other clients in the last."""


def pictures(found: ClusterStudy) -> dict[str, Chart | Panels]:
    """Every picture by the name of its file."""
    drawn: dict[str, Chart | Panels] = {
        "tree.png": plot_tree(found),
        "norms.png": plot_norms(found),
        "heterogeneity.png": plot_heterogeneity(found),
        "losses.png": plot_losses(found),
        "accuracy.png": plot_accuracy(found),
    }
    if found.baseline is not None:
        drawn["gains.png"] = plot_gains(found)
    return drawn


def colours(found: ClusterStudy) -> list[str]:
    """Each client's colour: that of its final cluster, the largest first; grey for loners."""
    colour = [GREY] * len(found.names)
    several = [members for members in found.members if len(members) > 1]
    for place, members in enumerate(sorted(several, key=len, reverse=True)):
        for member in members:
            colour[member] = colour_of(place)
    return colour


def rows(found: ClusterStudy) -> list[int]:
    """The clients in an order in which the clusters of every round stand together."""
    order = [list(range(len(found.names)))]
    for split in found.splits:
        place = next(i for i, group in enumerate(order) if split.stay[0] in group)
        order[place : place + 1] = [list(split.stay), list(split.leave)]
    return [client for group in order for client in group]


def plot_tree(found: ClusterStudy) -> Panels:
    """A box for every cluster, from the round in which it came about to the one that split it."""
    order = rows(found)
    row_of = {client: row for row, client in enumerate(order)}
    colour = colours(found)
    marks: list[Mark] = []
    for members, start, end in boxes(found):
        where = [row_of[member] for member in members]
        low, high, middle = min(where) - 0.42, max(where) + 0.42, float(np.mean(where))
        face = colour[members[0]] if members in found.members else SHADE
        marks.append(Area([start, end], [low, low], [high, high], face, opacity=0.8))
        marks.append(Line([start, end], [middle, middle], SOFT, width=1.2))
    for split in found.splits:
        ends = [float(np.mean([row_of[one] for one in side])) for side in (split.stay, split.leave)]
        marks.append(Line([split.round + 1] * 2, ends, SOFT, width=1.2))
    ticks = [(float(row), found.names[client]) for client, row in row_of.items()]
    name = "client (coloured: final clusters; grey: on its own)"
    y = Axis(name, len(order) - 0.4, -0.6, ticks=ticks)
    x = Axis("round", 0.0, float(found.rounds))
    chart = Chart("", x, y, (*marks, *_split_names(found)))
    return _alone(heading(found), chart, (12, min(2.6 + 0.3 * len(order), 16)))


def _alone(title: str, chart: Chart, size: tuple[float, float]) -> Panels:
    """One chart below a centred title."""
    return Panels(title, ((chart,),), size)


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


def _split_names(found: ClusterStudy) -> list[Rule]:
    """The rounds of the splits above the picture, leaving out those without room."""
    last, marks, turned = -np.inf, [], len(found.splits) > 12
    for number in sorted({split.round for split in found.splits}):
        if number - last >= 0.022 * found.rounds:
            marks.append(Rule(number + 1, upright=True, width=0, text=str(number), turned=turned))
            last = number
    return marks


def plot_norms(found: ClusterStudy) -> Panels:
    """Norms of the clients' updates, a panel for each final cluster (Fig. 1)."""
    groups = _panels(found)
    charts = [
        _norms_panel(found, title, members, last=place == len(groups) - 1)
        for place, (title, members) in enumerate(groups)
    ]
    placed = in_rows(charts)
    title = f"Norms of the updates (black: mean update of the cluster)\n{heading(found)}"
    size = (4.6 * len(placed[0]) + 1, 3.2 * len(placed) + 0.9)
    x = "round (dotted: splits that these clients went through)"
    return Panels(title, placed, size, shared="xy", x=x, y="norm of the update")


def _norms_panel(found: ClusterStudy, title: str, members: list[int], *, last: bool) -> Chart:
    """The clients of one cluster; the last panel names the thresholds."""
    rounds, colour = np.arange(found.rounds), colours(found)
    marks: list[Mark] = []
    for member in members:
        norms = found.norms[:, member]
        marks.append(Line(rounds, norms, colour[member], width=0.9))
        if colour[member] == GREY and len(members) <= PANELS:
            name = f" {found.names[member]}"
            marks.append(Texts([rounds[-1]], [norms[-1]], [name], "right", size=7))
    if len({found.label[-1, member] for member in members}) == 1:
        marks.append(Line(rounds, found.together[:, members[0]], BLACK, width=1.4))
    for name, value in _near(found).items():
        marks.append(Rule(value, dash=DASHED, text=name if last else ""))
    splits = sorted({split.round for split in found.splits if _touches(split, members)})
    marks += [_split_rule(number) for number in splits]
    return Chart(title, Axis("", 0.0, found.rounds - 1.0), Axis(log=True), tuple(marks))


def _split_rule(number: int) -> Rule:
    return Rule(number, upright=True, colour=EDGE, dash=DOTTED, width=0.8)


def _near(found: ClusterStudy) -> dict[str, float]:
    """ε1 and ε2, unless they are so far from all norms that a picture with them shows nothing."""
    low, high = np.nanmin(found.together), np.nanmax(found.norms)
    lines = {"ε1": found.eps("eps1"), "ε2": found.eps("eps2")}
    return {name: value for name, value in lines.items() if low / 5 < value < 5 * high}


def _touches(split: Split, members: list[int]) -> bool:
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


def plot_heterogeneity(found: ClusterStudy) -> Panels:
    """How different graphs inside clusters are: over rounds, and in each final cluster (Fig. 3)."""
    lines = np.array(found.within())
    at = np.append(np.maximum(lines[:, 0], 0), found.rounds)
    several = sorted((m for m in found.members if len(m) > 1), key=len, reverse=True)[:12]
    over: list[Mark] = []
    bars: list[Mark] = []
    top = 0.0
    for place, (name, colour) in enumerate((("structure", BLUE), ("features", RED))):
        values = lines[:, 1 + place]
        course = steps(at, np.append(values, values[-1]))
        before = Rule(values[0], colour=colour, dash=DASHED)
        over += [Line(*course, colour, name, width=2), before]
        heights = np.nan_to_num([found.of_cluster(members)[place] for members in several])
        spots = np.arange(len(several)) + 0.4 * place - 0.2
        bars += [
            Rule(values[0], colour=colour, dash=DASHED),
            Bars(spots, heights, 0.0, 0.38, colour),
        ]
        top = max(top, float(values.max()))
    y = Axis("mean over pairs of clients in one cluster (nats)", 0.0, 1.05 * top)
    x = Axis("round", 0.0, float(found.rounds))
    names = [(float(i), _wrapped(members, found)) for i, members in enumerate(several)]
    room = max(0.6, (5 - len(several)) / 2)  # one cluster alone would get bars as wide as a wall
    clusters = Axis("", -room, len(several) - 1 + room, ticks=names)
    final = "In each final cluster (dashed: all clients)"
    charts = (
        Chart("Over the rounds", x, y, tuple(over), legend="lower left"),
        Chart(final, clusters, Axis("", 0.0, 1.05 * top), tuple(bars)),
    )
    title = f"How different the graphs inside a cluster are\n{heading(found)}"
    return Panels(title, (charts,), (13, 5), widths=(1, 1.3))


def _wrapped(members: list[int], found: ClusterStudy) -> str:
    """Names of a cluster's clients under a bar, in several lines."""
    text = ", ".join(found.names[member] for member in members)
    return "\n".join(textwrap.wrap(text, 16)[:6])


def plot_losses(found: ClusterStudy) -> Panels:
    """Test losses, mean and spread over the clients of all seeds (Fig. 4)."""
    lines, tops = [], []
    for place, run in enumerate((found.run, *found.others)):
        losses = np.concatenate(
            [one.history.array("deployed", "loss", "test") for one in run.result.seeds], axis=1
        )
        mean, spread = np.nanmean(losses, axis=1), np.nanstd(losses, axis=1)
        name, at = found.gains[place].name, np.arange(len(mean))
        lines.append(Line(at, mean, colour_of(place), name, mean - spread, mean + spread))
        tops += [mean.max(), np.quantile(mean + spread, 0.95)]  # the start would hide the rest
    splits = [_split_rule(number) for number in sorted({split.round for split in found.splits})]
    x = Axis("round (dotted: splits)", 0.0, found.rounds - 1.0)
    y = Axis("cross entropy, mean ± std over clients", 0.0, 1.1 * max(tops))
    chart = Chart("", x, y, (*lines, *splits), legend="inside")
    return _alone(f"Test loss of the deployed model\n{heading(found)}", chart, (8, 5))


def plot_accuracy(found: ClusterStudy) -> Panels:
    """Each client's accuracy against how different the rest of its cluster is (after Fig. 5)."""
    company = found.company()
    accuracy = found.gains[0].accuracy[found.seed - found.run.config.seed]
    colour = colours(found)
    marks: list[Mark] = []
    for client in np.flatnonzero(np.isfinite(company + accuracy)).tolist():
        spot = [company[client]], [100 * accuracy[client]]
        marks.append(Dots(*spot, colour[client], size=8))
        marks.append(Texts(*spot, [found.names[client]], "corner", size=8))
    x = "mean structure heterogeneity to the other clients of its cluster (nats)"
    chart = Chart("", Axis(x, room=0.12), Axis("test accuracy, %", room=0.12), tuple(marks))
    loners = int(np.isnan(company).sum())
    note = f" ({loners} on their own are left out)" if loners else ""
    title = f"Accuracy, and how different the rest of the cluster is{note}\n{heading(found)}"
    return _alone(title, chart, (8, 5.4))


def plot_gains(found: ClusterStudy) -> Panels:
    """Each client's gain, a violin for each run (Figs. 6 to 8)."""
    compared = [(gain, gain.gain) for gain in found.gains if gain.gain is not None]
    marks: list[Mark] = [Rule(0)]
    rng = np.random.default_rng(0)
    for place, (_, points) in enumerate(compared):
        values, colour = 100 * points[np.isfinite(points)], colour_of(place)
        marks += violin(values, place, colour=colour)
        at = place + rng.uniform(-0.08, 0.08, values.size)
        marks.append(Dots(at, values, colour, opacity=0.8))
        mean = float(values.mean())
        marks.append(Line([place - 0.25, place + 0.25], [mean, mean], BLACK, width=2))
    ticks = [
        (
            float(place),
            f"{gain.name}\nmean {100 * np.nanmean(points):+.1f}, "
            f"least {100 * np.nanmin(points):+.1f}"
            f"\n{gain.improved(ties=True)} of {len(points)} not worse",
        )
        for place, (gain, points) in enumerate(compared)
    ]
    x = Axis("", -0.6, max(len(compared), 2) - 0.4, ticks=ticks)
    chart = Chart("", x, Axis("points of test accuracy (line: mean)"), tuple(marks))
    title = f"What each client gains over {found.baseline}\n{heading(found)}"
    return _alone(title, chart, (max(8, 2 + 2.2 * len(compared)), 5.4))
