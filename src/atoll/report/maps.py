"""Differences between the clients' data, and the similarities that methods compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from atoll.experiment.result import Result
from atoll.present.chart import BLUE, GREY, Axis, Bars, Chart, Heat, named, number_text
from atoll.present.chart_svg import heat_html, strip_svg, swatches
from atoll.present.tables import Cell, Column, html, make_table
from atoll.report.collect import Collection, ReportedRun
from atoll.report.results import by_federation

Names = Sequence[str]
Measured = Mapping[str, np.ndarray]
"""The measures of a federation by name, as stored in its run folder."""
MAX_CLIENT_ROWS = 40
MAX_MAPS = 12  # maximum number of matrices per federation
MAX_FEDERATIONS = 24  # maximum number of federations with all their matrices
DIVERGENCES = {
    "label": "labels",
    "feature": "features of linked nodes",
    "structure": "structure (anonymous walks)",
}
ROLES = (("training", BLUE, 1.0), ("validation", BLUE, 0.6), ("test", BLUE, 0.3))
"""Name, colour and opacity of the parts of a client's nodes."""
REST = ("in no split", GREY, 0.3)
_MEASURES = ("nodes", "roles", "edges", "mean_degree", "isolated", "homophily")


def heat_map(
    title: str, values: np.ndarray, names: Names, columns: str = "client", low: float = 0.0
) -> Chart:
    """Make a heat map with a row and a column for each client."""
    x, y = (named(name, names, most=len(names)) for name in (columns, "client"))
    return Chart(title, x, y, (Heat(values, low=low),))


def without_diagonal(matrix: np.ndarray) -> np.ndarray:
    """Replace the diagonal, which is always the same, by undefined numbers."""
    return np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)


def relations(found: Collection) -> str:
    """Show the client similarities, mixture weights and clusters that methods compute."""

    def write(group: list[ReportedRun]) -> str:
        figures = [figure for one in group for figure in _relation(one)]
        left_out, figures = len(figures) - MAX_MAPS, figures[:MAX_MAPS]
        if left_out > 0:
            figures.append(f"<p>{left_out} more are not shown: atoll similarity draws them.</p>")
        return f'<div class="maps">{"".join(figures)}</div>' if figures else ""

    parts = by_federation(found, write)
    text = (
        "From the server, after the last round of the first seed. A method computes similarities "
        "from the clients' messages; their diagonal is not shown. A row of a mixture shows the "
        "weight of each client's model in the model of one client (row); rows add up to one."
    )
    return f"<p>{text}</p>{parts}" if parts else ""


def _relation(one: ReportedRun) -> list[str]:
    known = one.run.relations[0] if one.run.relations else {}
    figures, names = list[str](), one.run.result.client_names
    for name, columns in (("similarity", "client"), ("mixing", "source client")):
        if name not in known:
            continue
        matrix, note = known[name], ""
        if matrix.ndim > 2:
            matrix, note = np.asarray(matrix.mean(0)), f"Mean of {len(matrix)} factors."
        matrix = without_diagonal(matrix) if name == "similarity" else matrix
        if np.isfinite(matrix).any():
            low = float(np.nanmin(matrix)) if name == "similarity" else 0.0
            title = f"{one.row}: {'mixture' if name == 'mixing' else name}"
            figures.append(heat_html(heat_map(title, matrix, names, columns, low), note=note))
    if "cluster" in known:
        label = known["cluster"].astype(int)
        clusters = (np.flatnonzero(label == number) for number in range(label.max() + 1))
        called = (", ".join(names[place] for place in members) for members in clusters)
        lines = "".join(f"<li>{escape(members)}</li>" for members in called)
        figures.append(
            f'<figure class="heat"><figcaption>{escape(one.row)}: clusters of clients</figcaption>'
            f'<ul class="clusters">{lines}</ul><p class="note">Clients in one box share a model.'
            "</p></figure>"
        )
    return figures


def heterogeneity(found: Collection) -> str:
    """Show how the clients of each federation differ."""

    def write(group: list[ReportedRun]) -> str:
        measured = next((one.run.measures for one in group if one.run.measures), None)
        if measured is None:
            return ""
        result, drawn = group[0].run.result, group[0].column in found.columns[:MAX_FEDERATIONS]
        maps = _maps(measured, result) if drawn else ""
        return _lost(measured) + _sizes(measured, result.client_names) + maps

    text = (
        "These are the clients of the first seed. Divergences are Jensen-Shannon divergences, "
        "from 0 (equal) to 1 (disjoint). A simulation can measure them because it has all data; "
        "no method sees them."
    )
    parts = by_federation(found, write)
    return f"<p>{text}</p>{parts}" if parts else ""


def _maps(measured: Measured, result: Result) -> str:
    """Show the classes of each client, and the divergence of their data."""
    labels, names = measured["labels"], result.client_names
    total = labels.sum(1, keepdims=True)
    shares = np.divide(labels, total, out=np.zeros(labels.shape), where=total > 0)
    words = np.array([[f"{100 * v:.0f}" for v in row] for row in shares])
    classes = result.class_names or [*map(str, range(labels.shape[1]))]
    x, y = (named(k, w, most=len(w)) for k, w in (("class", classes), ("client", names)))
    chart = Chart("Share of each class among a client's nodes", x, y, (Heat(shares, words),))
    figures = [heat_html(chart, note="In percent.")]
    for name, thing in DIVERGENCES.items():
        matrix = measured[f"{name}_divergence"]
        upper = matrix[np.triu_indices(len(matrix), 1)]
        upper = upper[np.isfinite(upper)]
        if upper.size:
            note = f"Mean {upper.mean():.3f}, largest {upper.max():.3f}. Maps differ in scale."
            chart = heat_map(f"Divergence of {thing}", without_diagonal(matrix), names)
            figures.append(heat_html(chart, digits=2 if upper.max() >= 0.1 else 3, note=note))
    return f'<div class="maps">{"".join(figures)}</div>'


def _lost(measured: Measured) -> str:
    lost, total = (float(measured[name]) for name in ("edges_lost", "edges_total"))
    if not np.isfinite(lost) or not total:
        return ""
    return (
        f"<p>{lost:,.0f} of {total:,.0f} edges ({lost / total:.1%}) connect two clients, so no "
        "client has them.</p>"
    )


def _sizes(measured: Measured, names: Names) -> str:
    """Make a row for each client: its nodes as a bar, and its sizes."""
    nodes, rows = measured["nodes"], []
    styles = ROLES if np.array_equal(nodes, measured["roles"].sum(1)) else (*ROLES, REST)
    axis = Axis("", 0.0, float(nodes.max()), ticks=())
    for k in range(min(len(nodes), MAX_CLIENT_ROWS)):
        own = {name: measured[name][k] for name in _MEASURES}
        parts = [*own["roles"], own["nodes"] - own["roles"].sum()]
        bar = Cell(html=strip_svg("strip", axis, stacked(list(map(float, parts)), styles)))
        roles = " / ".join(f"{n:,}" for n in own["roles"])
        shape = f"{own['edges']:,}", f"{own['mean_degree']:.1f}", f"{own['isolated']:,}"
        homophily = number_text(own["homophily"], 2)
        rows.append([names[k], bar, f"{own['nodes']:,}", roles, *shape, homophily])
    size = Column("size", below=swatches(stacked([0.0] * 4, styles)))
    numbers = ["nodes", "train / val / test", "edges", "degree", "isolated", "homophily"]
    cut = f" (the first {MAX_CLIENT_ROWS} of {len(nodes)})" if len(nodes) > MAX_CLIENT_ROWS else ""
    return html(make_table(["client", size, *numbers], rows, title=f"Clients{cut}"))


def stacked(lengths: list[float], styles: tuple[tuple[str, str, float], ...]) -> list[Bars]:
    """Stack bars end to end, with the name, colour and opacity of each."""
    starts = np.cumsum([0.0, *lengths])
    return [
        Bars([0.5], [length], start, 0.5, colour, name, across=True, opacity=opacity)
        for length, start, (name, colour, opacity) in zip(lengths, starts, styles, strict=False)
    ]
