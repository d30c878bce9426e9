"""`atoll inspect`: what makes the clients of a federation differ, as tables, plots and numbers.

`atoll.data.measure.heterogeneity` measures; this file shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.data.measure.heterogeneity import WALK_STEPS, Heterogeneity, describe
from atoll.data.measure.structure import STATISTICS, walk_patterns
from atoll.present.plots import (
    BLUE,
    DPI,
    GREEN,
    GREY,
    MAX_ROWS,
    ORANGE,
    RED,
    empty_figure,
    heat_map,
    name_ticks,
    need_matplotlib,
    number_text,
    plain_json,
)

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

MAX_CLASSES = 12
"""Classes that the table of labels lists; the plot has all."""


def inspect_federation(
    federation: Federation, out: str | Path | None = None, *, seed: int = 0
) -> Group:
    """Measure a federation; with `out`, write plots and numbers there.

    Args:
        federation: The clients.
        out: Folder for `labels.png`, `sizes.png`, `divergence.png`, `homophily.png` and
            `heterogeneity.json`; made if it is not there.
        seed: Seed of everything that is drawn (walks, random graphs).

    Returns:
        Tables for `rich.console.Console.print`.
    """
    from rich.console import Group
    from rich.text import Text

    if out is not None:
        need_matplotlib()  # before the work, not after it
    found = describe(federation, seed=seed)
    parts: list[Any] = [*heterogeneity_tables(found)]
    if out is not None:
        partition = federation.about.get("partition")
        heading = f"{federation.name}, {len(federation)} clients"
        heading += f", partition {partition}" if partition else ""
        paths = [
            write_numbers(found, Path(out), dict(federation.about)),
            *write_plots(found, Path(out), heading),
        ]
        # Text, because a plain string would have its square brackets read as markup.
        parts.append(Text("Written: " + ", ".join(str(path) for path in paths)))
    return Group(*parts)


def heterogeneity_tables(found: Heterogeneity) -> list[Table]:
    """The numbers as rich tables: clients, labels, differences between clients, shape."""
    tables = [_client_table(found), _pair_table(found), _shape_table(found)]
    if found.labels.shape[1] <= MAX_CLASSES:
        tables.insert(1, _label_table(found))
    return tables


def _client_table(found: Heterogeneity) -> Table:
    lost = "edges between clients unknown"
    if np.isfinite(found.edges_lost):
        lost = (
            f"{found.edges_lost:,.0f} of {found.edges_total:,.0f} edges "
            f"({found.edges_lost_share:.1%}) lie between clients and are lost"
        )
    columns = ["nodes", "train", "val", "test", "edges", "degree", "isolated", "homophily"]
    rows = [
        [
            f"{found.nodes[k]:,}",
            *(f"{count:,}" for count in found.roles[k]),
            f"{found.edges[k]:,}",
            f"{found.mean_degree[k]:.2f}",
            f"{found.isolated[k]:,}",
            number_text(found.homophily[k], 3),
        ]
        for k in range(len(found.clients))
    ]
    return _table(f"Clients of {found.name}", columns, rows, found, caption=lost)


def _label_table(found: Heterogeneity) -> Table:
    columns = [f"class {c}" for c in range(found.labels.shape[1])]
    rows = [
        [f"{count:,} ({number_text(phi, 2)})" for count, phi in zip(counts, line, strict=True)]
        for counts, line in zip(found.labels, found.class_homophily, strict=True)
    ]
    caption = (
        "in brackets the class-wise homophily, FedTAD Eq. 2; – where no edge touches the class"
    )
    return _table("Nodes per class", columns, rows, found, caption=caption)


def _pair_table(found: Heterogeneity) -> Table:
    from rich.table import Table

    table = Table(
        title="How different every two clients are (Jensen-Shannon divergence, 0 to 1)",
        caption=(
            f"in the units of GCFL's Table 2: structure {_mean_std(found.gcfl_structure)} "
            f"(distance, nats), features {_mean_std(found.gcfl_feature)} (divergence, nats)"
        ),
    )
    for column in ("", "mean ± std", "most alike", "least alike"):
        table.add_column(column, justify="left" if not column else "right")
    for label, matrix in _divergences(found):
        table.add_row(label, _mean_std(matrix), *_extreme_pairs(matrix, found.clients))
    return table


def _shape_table(found: Heterogeneity) -> Table:
    digits = (1, 2, 3, 3)
    rows = [
        [
            f"{number_text(real, d)} | {number_text(mean, d)} "
            f"(z {number_text(z, 1 if abs(z) < 100 else 0)})"
            for real, mean, z, d in zip(*numbers, digits, strict=True)
        ]
        for numbers in zip(found.shape.real, found.shape.mean, found.shape.z, strict=True)
    ]
    caption = "client | mean of random graphs with as many nodes and edges (z: standard deviations)"
    return _table("Shape of the graphs (GCFL Table 1)", STATISTICS, rows, found, caption=caption)


def _table(
    title: str, columns: Sequence[str], rows: list[list[str]], found: Heterogeneity, *, caption: str
) -> Table:
    """A table with one row per client, cut after `MAX_ROWS`."""
    from rich.table import Table
    from rich.text import Text

    if len(rows) > MAX_ROWS:
        caption += f"; first {MAX_ROWS} of {len(rows)} clients, heterogeneity.json has all"
    table = Table(title=Text(title), caption=caption)
    table.add_column("client", justify="right")
    for column in columns:
        table.add_column(column, justify="right")
    for number, row in list(zip(found.clients, rows, strict=True))[:MAX_ROWS]:
        table.add_row(str(number), *row)
    return table


def _divergences(found: Heterogeneity) -> list[tuple[str, np.ndarray]]:
    return [
        ("labels", found.label_divergence),
        ("features of connected nodes", found.feature_divergence),
        ("structure (anonymous walks)", found.structure_divergence),
    ]


def _pairs(matrix: np.ndarray) -> np.ndarray:
    """The defined entries above the diagonal."""
    upper = matrix[np.triu_indices(len(matrix), 1)]
    return np.asarray(upper[np.isfinite(upper)])


def _mean_std(matrix: np.ndarray) -> str:
    upper = _pairs(matrix)
    return f"{upper.mean():.3f} ± {upper.std():.3f}" if upper.size else "–"


def _extreme_pairs(matrix: np.ndarray, clients: np.ndarray) -> tuple[str, str]:
    """The most and the least similar pair, as text."""
    if not _pairs(matrix).size:
        return "–", "–"
    above = np.where(np.triu(np.ones(matrix.shape, dtype=bool), 1), matrix, np.nan)
    least, most = (np.unravel_index(f(above), above.shape) for f in (np.nanargmin, np.nanargmax))
    first, second = (f"{clients[i]} and {clients[j]}: {matrix[i, j]:.3f}" for i, j in (least, most))
    return first, second


def write_numbers(found: Heterogeneity, out: Path, about: dict[str, Any] | None = None) -> Path:
    """Write `heterogeneity.json`: every number of `found`; null where one is not defined."""
    numbers = {
        "about": about or {},
        "statistics": STATISTICS,
        "walk_patterns": ["".join(map(str, walk)) for walk in walk_patterns(WALK_STEPS)],
        "edges_lost_share": found.edges_lost_share,
        **asdict(found),
    }
    path = _folder(out) / "heterogeneity.json"
    path.write_text(json.dumps(plain_json(numbers), indent=1, allow_nan=False) + "\n")
    return path


def _folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {out} ({error.strerror}); give another") from error
    return out


def write_plots(found: Heterogeneity, out: Path, heading: str) -> list[Path]:
    """Write the four plots as PNG files into `out`; `heading` says what the federation is."""
    need_matplotlib()
    plots: dict[str, Callable[[Heterogeneity, str], Any]] = {
        "labels": _plot_labels,
        "sizes": _plot_sizes,
        "divergence": _plot_divergence,
        "homophily": _plot_homophily,
    }
    paths = []
    for name, plot in plots.items():
        paths.append(_folder(out) / f"{name}.png")
        plot(found, heading).savefig(paths[-1], dpi=DPI)
    return paths


def _plot_labels(found: Heterogeneity, heading: str) -> Any:
    total = found.labels.sum(axis=1, keepdims=True)
    shares = np.divide(found.labels, total, out=np.zeros(found.labels.shape), where=total > 0)
    text = np.array([[f"{count:,}" for count in row] for row in found.labels])
    figure = _class_map(shares, text, found, top=max(float(shares.max()), 1e-9), scale="{x:.0%}")
    figure.suptitle(f"Which classes each client has\n{heading}")
    figure.axes[1].set_ylabel("share of the client's nodes (numbers: nodes)")
    return figure


def _plot_homophily(found: Heterogeneity, heading: str) -> Any:
    text = np.array([[number_text(value, 2) for value in row] for row in found.class_homophily])
    figure = _class_map(found.class_homophily, text, found, top=1.0, scale="{x:.1f}")
    figure.suptitle(f"How often a class is linked to itself (class-wise homophily)\n{heading}")
    figure.axes[1].set_ylabel("edges within the class / edges that touch it (grey: no such edge)")
    return figure


def _class_map(
    values: np.ndarray, text: np.ndarray, found: Heterogeneity, *, top: float, scale: str
) -> Any:
    """A heat map of clients and classes; the second axes are its colour scale."""
    clients, classes = values.shape
    width, height = min(max(6.5, 3 + 0.7 * classes), 18), min(max(5, 2 + 0.36 * clients), 14)
    figure = empty_figure(width, height)
    axes = figure.subplots()
    image = heat_map(axes, values, text, top=top)
    axes.set(xlabel="class", ylabel="client")
    name_ticks(axes.xaxis, np.arange(classes))
    name_ticks(axes.yaxis, found.clients)
    figure.colorbar(image, ax=axes, format=scale, aspect=30)
    return figure


def _plot_divergence(found: Heterogeneity, heading: str) -> Any:
    count = len(found.clients)
    side = min(max(4.8, 1.5 + 0.16 * count), 9)
    figure = empty_figure(3 * side + 0.6, side + 2)
    title = "How different every two clients are (Jensen-Shannon divergence: 0 alike, 1 disjoint)"
    figure.suptitle(f"{title}\n{heading}")
    for axes, (label, matrix) in zip(figure.subplots(1, 3), _divergences(found), strict=True):
        top = max(float(matrix[np.isfinite(matrix)].max(initial=0)), 0.01)
        digits = 2 if top >= 0.2 else 3
        text = np.array(
            [[number_text(value, digits).lstrip("0") for value in row] for row in matrix]
        )
        image = heat_map(axes, matrix, text if count <= 12 else None, top=top)
        axes.set_title(f"{label}\nmean {_mean_std(matrix)}", fontsize=11)
        axes.set(xlabel="client", ylabel="client")
        name_ticks(axes.xaxis, found.clients)
        name_ticks(axes.yaxis, found.clients)
        bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.8)
        bar.set_label(f"own colours in each panel, here 0 to {top:.2f} (grey: not defined)")
    return figure


def _plot_sizes(found: Heterogeneity, heading: str) -> Any:
    count = len(found.clients)
    height = min(3.8 + 0.3 * count, 16)
    figure = empty_figure(13, height)
    figure.suptitle(f"How large each client is, and what the division costs\n{heading}")
    grid = figure.add_gridspec(2, 3, height_ratios=[height - 2.4, 0.5])
    nodes, degree, edges = (figure.add_subplot(grid[0, column]) for column in range(3))
    other = found.nodes - found.roles.sum(axis=1)
    parts = [*found.roles.T, other] if other.any() else [*found.roles.T]
    names, colours = ("training", "validation", "test", "other"), (BLUE, ORANGE, GREEN, GREY)
    start = np.zeros(count)
    for part, name, colour in zip(parts, names, colours, strict=False):
        nodes.barh(np.arange(count), part, left=start, color=colour, label=name)
        start = start + part
    nodes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)
    degree.barh(np.arange(count), found.mean_degree, color=BLUE)
    edges.barh(np.arange(count), found.edges, color=BLUE)
    alone = [f" ({n:,} isolated)" if n else "" for n in found.isolated]
    degrees = [f"{d:.1f}{a}" for d, a in zip(found.mean_degree, alone, strict=True)]
    _finish_bars(nodes, found, found.nodes, [f"{n:,}" for n in found.nodes])
    _finish_bars(degree, found, found.mean_degree, degrees)
    _finish_bars(edges, found, found.edges, [f"{n:,}" for n in found.edges])
    titles = ("Nodes", "Neighbours per node", "Edges inside the client")
    units = ("nodes", "mean degree", "undirected edges")
    for axes, title, unit in zip((nodes, degree, edges), titles, units, strict=True):
        axes.set_title(title, pad=26)
        axes.set(xlabel=unit, ylabel="client")
    _plot_lost(figure.add_subplot(grid[1, :]), found)
    return figure


def _plot_lost(axes: Any, found: Heterogeneity) -> None:
    """One bar for the whole graph: the edges that clients have, and those that none has."""
    axes.set_axis_off()
    share = found.edges_lost_share
    if not np.isfinite(share):
        axes.text(0, 0, "How many edges lie between clients is not known.", va="center")
        return
    axes.barh([0], [1 - share], color=BLUE)
    axes.barh([0], [share], left=[1 - share], color=RED, hatch="//", edgecolor="white")
    axes.set(xlim=(0, 1), ylim=(-0.4, 1.1))
    kept, lost = found.edges_total - found.edges_lost, found.edges_lost
    axes.text(0, 0.5, f"{kept:,.0f} edges inside clients ({1 - share:.1%})", va="bottom")
    text = f"{lost:,.0f} edges between clients, lost ({share:.1%})"
    axes.text(1, 0.5, text, va="bottom", ha="right")


def _finish_bars(axes: Any, found: Heterogeneity, ends: np.ndarray, texts: list[str]) -> None:
    """Client numbers, and texts at the ends of horizontal bars with room for them."""
    room = 1.1 + 0.03 * max(map(len, texts))
    axes.set(xlim=(0, max(float(ends.max()), 1e-9) * room), ylim=(len(texts) - 0.4, -0.6))
    name_ticks(axes.yaxis, found.clients)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,g}")
    if len(texts) > MAX_ROWS:
        return
    for row, (end, text) in enumerate(zip(ends, texts, strict=True)):
        where: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(text, (end, row), fontsize=9, **where)
