"""`atoll inspect`: measure how clients differ, in tables, charts and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from atoll.core.errors import counted
from atoll.core.federation import Federation
from atoll.data.measure.heterogeneity import WALK_STEPS, Heterogeneity
from atoll.data.measure.structure import STATISTICS, walk_patterns
from atoll.present import chart as plot
from atoll.present.chart import Axis, Bars, Chart, Heat, Mark, Panels, Texts, named, number_text
from atoll.present.tables import Column, Table, make_table

MAX_CLASSES = 12  # maximum classes in the table of labels; the plot shows all


def inspection_tables(found: Heterogeneity) -> list[Table]:
    """Make tables of the clients, their labels, their differences, and their shapes."""
    tables = [_client_table(found), _pair_table(found), _shape_table(found)]
    if found.labels.shape[1] <= MAX_CLASSES:
        tables.insert(1, _label_table(found))
    return tables


def _client_table(found: Heterogeneity) -> Table:
    lost = "edges between clients unknown"
    if np.isfinite(found.edges_lost):
        lost = (
            f"{found.edges_lost:,.0f} of {found.edges_total:,.0f} edges "
            f"({found.edges_lost_share:.1%}) connect two clients and are lost"
        )
    columns = ["nodes", "train", "val", "test", "edges", "degree", "isolated", "homophily"]
    rows = []
    for k in range(len(found.clients)):
        counts = [f"{count:,}" for count in (found.nodes[k], *found.roles[k], found.edges[k])]
        shape = f"{found.mean_degree[k]:.2f}", f"{found.isolated[k]:,}"
        rows.append([*counts, *shape, number_text(found.homophily[k], 3)])
    return _table(f"Clients of {found.name}", columns, rows, found, caption=lost)


def _label_table(found: Heterogeneity) -> Table:
    columns = [f"class {name}" for name in found.class_names]
    rows = [
        [f"{count:,} ({number_text(phi, 2)})" for count, phi in zip(counts, line, strict=True)]
        for counts, line in zip(found.labels, found.class_homophily, strict=True)
    ]
    note = "in brackets the class-wise homophily, FedTAD Eq. 2; –: no edge touches the class"
    return _table("Nodes per class", columns, rows, found, caption=note)


def _pair_table(found: Heterogeneity) -> Table:
    kinds = _divergences(found)
    lines = [(name, _mean_std(of), *_extreme_pairs(of, found.names)) for name, of in kinds]
    names = (Column("", "left", wrap=True), "mean ± std", "most similar", "least similar")
    title = "Differences between clients (Jensen-Shannon divergence, 0 to 1)"
    return make_table(names, lines, title=title)


def _shape_table(found: Heterogeneity) -> Table:
    digits = (1, 2, 3, 3)
    rows = [
        [
            f"{number_text(real, d)} | {number_text(mean, d)} "
            f"(z={number_text(z, 1 if abs(z) < 100 else 0)})"
            for real, mean, z, d in zip(*numbers, digits, strict=True)
        ]
        for numbers in zip(found.shape.real, found.shape.mean, found.shape.z, strict=True)
    ]
    caption = "client | mean of random graphs with equal nodes and edges (z: standard deviations)"
    return _table("Shape of the graphs (GCFL Table 1)", STATISTICS, rows, found, caption=caption)


def _table(
    title: str, columns: Sequence[str], rows: list[list[str]], found: Heterogeneity, *, caption: str
) -> Table:
    """Make a table with one row per client, cut after `MAX_ROWS`."""
    if len(rows) > plot.MAX_ROWS:
        caption += f"; first {plot.MAX_ROWS} of {len(rows)} clients (all: heterogeneity.json)"
    lines = [[number, *row] for number, row in zip(found.names, rows, strict=True)]
    names, lines = ("client", *columns), lines[: plot.MAX_ROWS]
    return make_table(names, lines, left=0, wrap=True, title=title, caption=caption)


def _divergences(found: Heterogeneity) -> list[tuple[str, np.ndarray]]:
    names = "labels", "features of connected nodes", "structure (anonymous walks)"
    kinds = found.label_divergence, found.feature_divergence, found.structure_divergence
    return list(zip(names, kinds, strict=True))


def _mean_std(matrix: np.ndarray) -> str:
    """Format mean and standard deviation over the defined entries above the diagonal."""
    upper = matrix[np.triu_indices(len(matrix), 1)]
    upper = upper[np.isfinite(upper)]
    return f"{upper.mean():.3f} ± {upper.std():.3f}" if upper.size else "–"


def _extreme_pairs(matrix: np.ndarray, clients: np.ndarray) -> tuple[str, str]:
    """Format the most and the least similar pair."""
    above = np.where(np.triu(np.ones(matrix.shape, dtype=bool), 1), matrix, np.nan)
    if not np.isfinite(above).any():
        return "–", "–"
    least, most = (np.unravel_index(f(above), above.shape) for f in (np.nanargmin, np.nanargmax))
    first, second = (f"{clients[i]} and {clients[j]}: {matrix[i, j]:.3f}" for i, j in (least, most))
    return first, second


def inspection_files(found: Heterogeneity, federation: Federation) -> dict[str, object]:
    """Return `heterogeneity.json` with every number, and four pictures, for `write_all`."""
    partition = federation.about.get("partition")
    about = f"{federation.name}, {counted(len(federation), 'client')}"
    about += f", partition {partition}" if partition else ""
    return {
        "heterogeneity.json": inspection_numbers(found, federation.about),
        "labels.png": label_chart(found, about),
        "sizes.png": size_charts(found, about),
        "divergence.png": divergence_charts(found, about),
        "homophily.png": homophily_chart(found, about),
    }


def inspection_numbers(found: Heterogeneity, about: Mapping[str, object]) -> dict[str, object]:
    """Return every number of `found`, for JSON."""
    return {
        "about": dict(about),
        "statistics": STATISTICS,
        "walk_patterns": ["".join(map(str, walk)) for walk in walk_patterns(WALK_STEPS)],
        "edges_lost_share": found.edges_lost_share,
        **asdict(found),
    }


def label_chart(found: Heterogeneity, about: str) -> Panels:
    """Plot the classes of each client, as fractions of its nodes."""
    total = found.labels.sum(axis=1, keepdims=True)
    shares = np.divide(found.labels, total, out=np.zeros(found.labels.shape), where=total > 0)
    words = np.array([[f"{count:,}" for count in row] for row in found.labels])
    high, scale = max(float(shares.max()), 1e-9), "share of the client's nodes (numbers: nodes)"
    heat = Heat(shares, words, high=high, scale=scale, scale_form="{x:.0%}")
    return _class_map(f"Classes of each client\n{about}", heat, found)


def homophily_chart(found: Heterogeneity, about: str) -> Panels:
    """Plot the class-wise homophily of each client."""
    words = plot.number_words(found.class_homophily, 2)
    scale = "edges within the class / edges that touch it (grey: no such edge)"
    heat = Heat(found.class_homophily, words, high=1.0, scale=scale, scale_form="{x:.1f}")
    title = "Class-wise homophily: edges inside a class"
    return _class_map(f"{title}\n{about}", heat, found)


def _class_map(title: str, heat: Heat, found: Heterogeneity) -> Panels:
    """Make a heat map of clients and classes."""
    clients, classes = heat.values.shape
    x, y = named("class", found.class_names), named("client", found.names, down=True)
    size = min(max(6.5, 3 + 0.7 * classes), 18), min(max(5, 2 + 0.36 * clients), 14)
    return plot.titled(title, Chart("", x, y, (heat,)), size)


def divergence_charts(found: Heterogeneity, about: str) -> Panels:
    """Plot the divergence of every two clients: labels, features, structure."""
    count = len(found.clients)
    charts = []
    for label, matrix in _divergences(found):
        top = max(float(matrix[np.isfinite(matrix)].max(initial=0)), 0.01)
        words = np.char.lstrip(plot.number_words(matrix, 2 if top >= 0.2 else 3), "0")
        scale = f"each panel has its own scale, here 0 to {top:.2f} (grey: not defined)"
        heat = Heat(matrix, words if count <= 12 else None, high=top, scale=scale, scale_below=True)
        x, y = named("client", found.names), named("client", found.names, down=True)
        charts.append(Chart(f"{label}\nmean {_mean_std(matrix)}", x, y, (heat,)))
    side = min(max(4.8, 1.5 + 0.16 * count), 9)
    title = "Differences between clients (Jensen-Shannon divergence: 0 equal, 1 disjoint)"
    return Panels(f"{title}\n{about}", (tuple(charts),), (3 * side + 0.6, side + 2))


def size_charts(found: Heterogeneity, about: str) -> Panels:
    """Plot nodes, neighbours and edges of each client, and the edges that the partition drops."""
    at = np.arange(len(found.clients))
    other = found.nodes - found.roles.sum(axis=1)
    parts = [*found.roles.T, other] if other.any() else [*found.roles.T]
    names = ("training", "validation", "test", "other")
    colours = (plot.BLUE, plot.ORANGE, plot.GREEN, plot.GREY)
    bars, start = list[Mark](), np.zeros(len(at))
    for part, name, colour in zip(parts, names, colours, strict=False):
        bars.append(Bars(at, part, start, colour=colour, name=name, across=True))
        start = start + part
    alone = [f" ({n:,} isolated)" if n else "" for n in found.isolated]
    degrees = [f"{d:.1f}{a}" for d, a in zip(found.mean_degree, alone, strict=True)]
    nodes, edges = ([f"{n:,}" for n in counts] for counts in (found.nodes, found.edges))
    y = Axis("client", len(at) - 0.4, -0.6, ticks=named("", found.names).ticks)
    charts: list[Chart] = []
    for title, unit, ends, texts in (
        ("Nodes", "nodes", found.nodes, nodes),
        ("Neighbours per node", "mean degree", found.mean_degree, degrees),
        ("Edges inside the client", "undirected edges", found.edges, edges),
    ):  # horizontal bars with their numbers at the ends, and room for them
        marks = [Bars(at, ends, across=True)] if charts else bars
        if len(at) <= plot.MAX_ROWS:
            marks = [*marks, Texts(ends, at, texts, place="right")]
        room = 1.1 + 0.03 * max(map(len, texts))
        x = Axis(unit, 0, max(float(ends.max()), 1e-9) * room, form="{x:,g}")
        charts.append(Chart(title, x, y, tuple(marks), legend="above"))
    height = min(3.8 + 0.3 * len(at), 16)
    title = f"Sizes of the clients, and lost edges\n{about}"
    rows, heights = (tuple(charts), (_lost_chart(found),)), (height - 2.4, 0.5)
    return Panels(title, rows, (13, height), heights=heights)


def _lost_chart(found: Heterogeneity) -> Chart:
    """Make one bar for the whole graph: the edges inside clients, and the lost edges."""
    share = found.edges_lost_share
    unknown = "The number of edges between clients is unknown."
    marks: tuple[Mark, ...] = (Texts([0], [0], [unknown], place="right"),)
    if np.isfinite(share):
        kept = f"{found.edges_total - found.edges_lost:,.0f} edges inside clients ({1 - share:.1%})"
        lost = f"{found.edges_lost:,.0f} edges between clients, lost ({share:.1%})"
        marks = (
            Bars([0], [1 - share], across=True),
            Bars([0], [share], 1 - share, colour=plot.RED, across=True, hatched=True),
            Texts([0], [0.7], [kept], place="right"),
            Texts([1], [0.7], [lost], place="left"),
        )
    return Chart("", Axis("", 0, 1), Axis("", -0.4, 1.1), marks, bare=True)
