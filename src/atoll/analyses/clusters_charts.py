"""The files of `atoll clusters`: tree, norms, heterogeneity, losses, accuracy and gains."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from atoll.analyses.clusters import ClusterStudy, summary, title
from atoll.present import chart as plot
from atoll.present.chart import Axis, Chart, Line, Mark, Panels, Rule, Texts, colour_of, titled
from atoll.present.chart_svg import spread_out

PANELS = 6
"""Panels of the plot of norms: the largest clusters, and all other clients in the last panel."""


def cluster_files(found: ClusterStudy) -> dict[str, object]:
    """Return clusters.json and the pictures, for `write_all`. Gains need a baseline."""
    about = title(found)
    return {
        "clusters.json": summary(found),
        "tree.png": tree_chart(found, about),
        "norms.png": norm_charts(found, about),
        "heterogeneity.png": heterogeneity_charts(found, about),
        "losses.png": loss_chart(found, about),
        "accuracy.png": accuracy_chart(found, about),
        "gains.png": None if found.baseline is None else gain_chart(found, about),
    }


def _largest_first(clusters: list[list[int]]) -> list[list[int]]:
    return sorted(clusters, key=len, reverse=True)


def colours(found: ClusterStudy) -> list[str]:
    """Return each client's colour by its final cluster, largest first. Single clients are grey."""
    colour = [plot.GREY] * len(found.names)
    for place, members in enumerate(_largest_first(found.several)):
        for member in members:
            colour[member] = colour_of(place)
    return colour


def rows(found: ClusterStudy) -> list[int]:
    """Sort the clients so that the clusters of every round are contiguous."""
    order = [list(range(len(found.names)))]
    for split in found.splits:
        place = next(i for i, group in enumerate(order) if split.stay[0] in group)
        order[place : place + 1] = [list(split.stay), list(split.leave)]
    return [client for group in order for client in group]


def boxes(found: ClusterStudy) -> list[tuple[list[int], int, int]]:
    """Return the members of every cluster, its first round, and the round after its last."""
    now, done = {tuple(range(len(found.names))): 0}, []
    for split in found.splits:  # a split takes effect at the end of its round: one round later
        whole = tuple(sorted((*split.stay, *split.leave)))
        done.append((list(whole), now.pop(whole), split.round + 1))
        now |= {tuple(sorted(side)): split.round + 1 for side in (split.stay, split.leave)}
    return done + [(list(members), start, found.rounds) for members, start in now.items()]


def tree_chart(found: ClusterStudy, about: str) -> Panels:
    """Draw a box for every cluster, from its first round to the round of its split."""
    order, colour = rows(found), colours(found)
    row_of = {client: row for row, client in enumerate(order)}
    marks: list[Mark] = []
    for members, start, end in boxes(found):
        where = [row_of[member] for member in members]
        face = colour[members[0]] if members in found.members else plot.SHADE
        low, high = min(where) - 0.42, max(where) + 0.42
        marks.append(plot.Area([start, end], [low, low], [high, high], face, opacity=0.8))
        marks.append(Line([start, end], [float(np.mean(where))] * 2, plot.SOFT, width=1.2))
    for split in found.splits:
        ends = [float(np.mean([row_of[one] for one in side])) for side in (split.stay, split.leave)]
        marks.append(Line([split.round + 1] * 2, ends, plot.SOFT, width=1.2))
    # The rounds of the splits are above the picture, except those without space.
    last, turned = -np.inf, len(found.splits) > 12
    for number in sorted({split.round for split in found.splits}):
        if number - last >= 0.022 * found.rounds:
            marks.append(Rule(number + 1, upright=True, width=0, text=str(number), turned=turned))
            last = number
    words = plot.named("", [found.names[client] for client in order], most=len(order))
    y_name = "client (coloured: final clusters; grey: single client)"
    y = Axis(y_name, len(order) - 0.4, -0.6, ticks=words.ticks)
    chart = Chart("", Axis("round", 0, found.rounds, whole=True), y, tuple(marks))
    return titled(about, chart, (12, min(2.6 + 0.3 * len(order), 16)))


def _split_rules(found: ClusterStudy, members: Sequence[int]) -> list[Mark]:
    """Draw a dotted line for each split of a cluster with some of these clients."""
    rounds = {s.round for s in found.splits if set(members) & {*s.stay, *s.leave}}
    return [Rule(at, upright=True, colour=plot.EDGE, dash=plot.DOTTED, width=0.8) for at in rounds]


def norm_charts(found: ClusterStudy, about: str) -> Panels:
    """Plot the norms of the clients' updates, by final cluster (`PANELS`, Fig. 1)."""
    groups = _panels(found)
    charts = [_norm_chart(found, text, members) for text, members in groups]
    # Only the last panel has space for the names of ε1 and ε2.
    charts[-1] = _norm_chart(found, *groups[-1], named=True)
    arranged = plot.in_rows(charts)
    # A single panel would be narrower than the title.
    size = max(8.0, 4.6 * len(arranged[0]) + 1), 3.2 * len(arranged) + 0.9
    title = f"Norms of the updates (black: mean update of the cluster)\n{about}"
    x, y = "round (dotted: splits of these clients)", "norm of the update"
    return Panels(title, arranged, size, shared="xy", x=x, y=y)


def _norm_chart(found: ClusterStudy, text: str, members: list[int], named: bool = False) -> Chart:
    rounds, colour = np.arange(found.rounds), colours(found)
    marks: list[Mark] = []
    for member in members:
        marks.append(Line(rounds, found.norms[:, member], colour[member], width=0.9))
    single = [member for member in members if colour[member] == plot.GREY]
    if single and len(members) <= PANELS:
        logs = np.log(np.where(found.norms > 0, found.norms, np.nan))
        low, room = np.nanmin(logs), np.ptp(logs[np.isfinite(logs)])
        ends = low + np.array(spread_out(logs[-1, single] - low, 0.05 * room, room))
        names = [f" {found.names[member]}" for member in single]
        right = [rounds[-1]] * len(single)
        marks.append(Texts(right, np.exp(ends), names, place="right", size=7))
    if len({found.label[-1, member] for member in members}) == 1:
        marks.append(Line(rounds, found.together[:, members[0]], plot.BLACK, width=1.4))
    # A threshold far from all norms would leave no space for them.
    low, high = np.nanmin(found.together), np.nanmax(found.norms)
    for name, value in (("ε1", found.eps("eps1")), ("ε2", found.eps("eps2"))):
        if low / 5 < value < 5 * high:
            marks.append(Rule(value, dash=plot.DASHED, text=name if named else ""))
    marks += _split_rules(found, members)
    return Chart(text, Axis("", 0, found.rounds - 1, whole=True), Axis("", log=True), tuple(marks))


def _panels(found: ClusterStudy) -> list[tuple[str, list[int]]]:
    """Return the largest final clusters, and the clients of all others together."""
    ordered, several = _largest_first(found.members), _largest_first(found.several)
    shown = several if len(ordered) == len(several) <= PANELS else several[: PANELS - 1]
    rest = sorted(member for members in ordered[len(shown) :] for member in members)
    panels = [(_short(members, found), members) for members in shown]
    if rest:
        alone = len(ordered) - len(shown) == len(rest)
        kind = "single clients" if alone else "in other clusters"
        panels.append((f"{kind}: {_short(rest, found)}", rest))
    return panels


def _short(members: list[int], found: ClusterStudy) -> str:
    """Format the names of clients, shortened if they are many."""
    text = ", ".join(found.names[member] for member in members)
    return text if len(text) <= 44 else text[:43] + "…"


def heterogeneity_charts(found: ClusterStudy, about: str) -> Panels:
    """Plot the heterogeneity inside clusters: over rounds, and in each final cluster (Fig. 3)."""
    lines, several = np.array(found.within()), _largest_first(found.several)[:12]
    at = np.append(np.maximum(lines[:, 0], 0), found.rounds)
    over, bars = list[Mark](), list[Mark]()
    heights = np.nan_to_num([found.of_cluster(members) for members in several]).reshape(-1, 2)
    for place, (name, colour) in enumerate((("structure", plot.BLUE), ("features", plot.RED))):
        values = lines[:, 1 + place]
        line = plot.steps(at, np.append(values, values[-1]))
        all_clients = Rule(values[0], colour=colour, dash=plot.DASHED)
        over += [Line(*line, colour, name, width=2), all_clients]
        spots = np.arange(len(several)) + 0.4 * place - 0.2
        bars += [all_clients, plot.Bars(spots, heights[:, place], width=0.38, colour=colour)]
    top = 1.05 * float(np.nanmax([*lines[:, 1:].ravel(), *heights.ravel()]))
    room = max(0.6, (5 - len(several)) / 2)  # a single cluster would have very wide bars
    names = [", ".join(found.names[member] for member in members) for members in several]
    ticks = [(float(i), "\n".join(textwrap.wrap(text, 16)[:6])) for i, text in enumerate(names)]
    x = Axis("round", 0, found.rounds, whole=True)
    clusters = Axis("", -room, len(several) - 1 + room, ticks=ticks)
    y = Axis("mean over pairs of clients in one cluster (nats)", 0, top)
    title = "In each final cluster (dashed: all clients)"
    by_round = Chart("Over the rounds", x, y, tuple(over), legend="lower left")
    by_cluster = Chart(title, clusters, Axis("", 0, top), tuple(bars))
    title = f"Heterogeneity of the graphs inside a cluster\n{about}"
    return Panels(title, ((by_round, by_cluster),), (13, 5), widths=(1, 1.3))


def loss_chart(found: ClusterStudy, about: str) -> Panels:
    """Plot test losses: mean and standard deviation over the clients of all seeds (Fig. 4)."""
    marks: list[Mark] = _split_rules(found, range(len(found.names)))
    tops: list[float] = []
    for place, run in enumerate((found.run, *found.others)):
        seeds = [one.history.array("deployed", "loss", "test") for one in run.result.seeds]
        losses = np.concatenate(seeds, axis=1)
        mean, spread = np.nanmean(losses, axis=1), np.nanstd(losses, axis=1)
        name, at = found.gains[place].name, np.arange(len(mean))
        marks.append(Line(at, mean, colour_of(place), name, mean - spread, mean + spread))
        tops += [mean.max(), np.quantile(mean + spread, 0.95)]  # the start would hide the rest
    x = Axis("round (dotted: splits)", 0, found.rounds - 1, whole=True)
    y = Axis("cross entropy, mean ± std over clients", 0, 1.1 * max(tops))
    chart = Chart("", x, y, tuple(marks), legend="inside")
    return titled(f"Test loss of the deployed model\n{about}", chart, (8, 5))


def accuracy_chart(found: ClusterStudy, about: str) -> Panels:
    """Plot clients' accuracy against the heterogeneity of their cluster (after Fig. 5)."""
    company = found.company()
    accuracy = 100 * found.gains[0].accuracy[found.seed - found.run.config.seed]
    colour = colours(found)
    marks: list[Mark] = []
    for client in np.flatnonzero(np.isfinite(company + accuracy)):
        spot = [company[client]], [accuracy[client]]
        marks.append(plot.Dots(*spot, colour[client], size=8))
        marks.append(Texts(*spot, [found.names[client]], place="corner", size=8))
    loners = int(np.isnan(company).sum())
    note = f" (without {loners} single clients)" if loners else ""
    x = "mean structure heterogeneity to the other clients of its cluster (nats)"
    chart = Chart("", Axis(x, room=0.12), Axis("test accuracy, %", room=0.12), tuple(marks))
    title = f"Accuracy and heterogeneity to the rest of the cluster{note}\n{about}"
    return titled(title, chart, (8, 5.4))


def gain_chart(found: ClusterStudy, about: str) -> Panels:
    """Plot each client's gain, with a violin per run (Figs. 6 to 8)."""
    compared = [(gain, gain.gain) for gain in found.gains if gain.gain is not None]
    marks: list[Mark] = [Rule(0)]
    rng = np.random.default_rng(0)
    for place, (_, points) in enumerate(compared):
        values, colour = 100 * points[np.isfinite(points)], colour_of(place)
        marks += plot.violin(values, place, colour=colour)
        jitter = place + rng.uniform(-0.08, 0.08, values.size)
        marks.append(plot.Dots(jitter, values, colour, opacity=0.8))
        marks.append(Line([place - 0.25, place + 0.25], [values.mean()] * 2, plot.BLACK, width=2))
    labels = [
        f"{gain.name}\nmean {100 * np.nanmean(points):+.1f}, least {100 * np.nanmin(points):+.1f}"
        f"\n{gain.improved(ties=True)} of {len(points)} not worse"
        for gain, points in compared
    ]
    ticks = [(float(place), label) for place, label in enumerate(labels)]
    x = Axis("", -0.6, max(len(compared), 2) - 0.4, ticks=ticks)
    chart = Chart("", x, Axis("points of test accuracy (line: mean)"), tuple(marks))
    size = max(8, 2 + 2.2 * len(compared)), 5.4
    return titled(f"Each client's gain over {found.baseline}\n{about}", chart, size)
