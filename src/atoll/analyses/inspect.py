"""`atoll inspect`: what makes the clients of a federation differ, as tables, plots and numbers.

`atoll.data.measure.heterogeneity` measures; this file shows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.data.measure.heterogeneity import WALK_STEPS, Heterogeneity, describe
from atoll.data.measure.structure import STATISTICS, walk_patterns
from atoll.present.chart import (
    BLUE,
    GREEN,
    GREY,
    MAX_ROWS,
    ORANGE,
    RED,
    Axis,
    Bars,
    Chart,
    Heat,
    Mark,
    Panels,
    Texts,
    named,
    number_text,
    number_words,
)
from atoll.present.chart_png import need_matplotlib, png
from atoll.present.plots import plain_json

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
    pictures = {
        "labels": labels_picture(found, heading),
        "sizes": sizes_picture(found, heading),
        "divergence": divergence_picture(found, heading),
        "homophily": homophily_picture(found, heading),
    }
    paths = []
    for name, picture in pictures.items():
        paths.append(_folder(out) / f"{name}.png")
        paths[-1].write_bytes(png(picture))
    return paths


def labels_picture(found: Heterogeneity, heading: str) -> Panels:
    """Which classes each client has."""
    total = found.labels.sum(axis=1, keepdims=True)
    shares = np.divide(found.labels, total, out=np.zeros(found.labels.shape), where=total > 0)
    words = np.array([[f"{count:,}" for count in row] for row in found.labels])
    scale = "share of the client's nodes (numbers: nodes)"
    top = max(float(shares.max()), 1e-9)
    heat = Heat(shares, words, high=top, scale=scale, scale_form="{x:.0%}")
    return _class_map(f"Which classes each client has\n{heading}", heat, found)


def homophily_picture(found: Heterogeneity, heading: str) -> Panels:
    """How often a class is linked to itself, at each client."""
    values = found.class_homophily
    scale = "edges within the class / edges that touch it (grey: no such edge)"
    heat = Heat(values, number_words(values, 2), high=1.0, scale=scale, scale_form="{x:.1f}")
    title = "How often a class is linked to itself (class-wise homophily)"
    return _class_map(f"{title}\n{heading}", heat, found)


def _class_map(title: str, heat: Heat, found: Heterogeneity) -> Panels:
    """A heat map of clients and classes."""
    clients, classes = heat.values.shape
    size = (min(max(6.5, 3 + 0.7 * classes), 18), min(max(5, 2 + 0.36 * clients), 14))
    x, y = named("class", range(classes)), named("client", found.clients, down=True)
    return Panels(title, ((Chart("", x, y, (heat,)),),), size)


def divergence_picture(found: Heterogeneity, heading: str) -> Panels:
    """How different every two clients are, by three kinds of divergence."""
    charts = [_divergence_map(label, matrix, found) for label, matrix in _divergences(found)]
    side = min(max(4.8, 1.5 + 0.16 * len(found.clients)), 9)
    title = "How different every two clients are (Jensen-Shannon divergence: 0 alike, 1 disjoint)"
    return Panels(f"{title}\n{heading}", (tuple(charts),), (3 * side + 0.6, side + 2))


def _divergence_map(label: str, matrix: np.ndarray, found: Heterogeneity) -> Chart:
    top = max(float(matrix[np.isfinite(matrix)].max(initial=0)), 0.01)
    words = None
    if len(found.clients) <= 12:
        words = np.char.lstrip(number_words(matrix, 2 if top >= 0.2 else 3), "0")
    scale = f"own colours in each panel, here 0 to {top:.2f} (grey: not defined)"
    heat = Heat(matrix, words, high=top, scale=scale, scale_below=True)
    x, y = (named("client", found.clients, down=down) for down in (False, True))
    return Chart(f"{label}\nmean {_mean_std(matrix)}", x, y, (heat,))


def sizes_picture(found: Heterogeneity, heading: str) -> Panels:
    """How large each client is, and what the division costs."""
    count = len(found.clients)
    height = min(3.8 + 0.3 * count, 16)
    other = found.nodes - found.roles.sum(axis=1)
    parts = [*found.roles.T, other] if other.any() else [*found.roles.T]
    roles = zip(
        parts,
        ("training", "validation", "test", "other"),
        (BLUE, ORANGE, GREEN, GREY),
        strict=False,
    )
    start, bars = np.zeros(count), []
    for part, name, colour in roles:
        bars.append(Bars(np.arange(count), part, start, 0.8, colour, name, across=True))
        start = start + part
    alone = [f" ({n:,} isolated)" if n else "" for n in found.isolated]
    degrees = [f"{d:.1f}{a}" for d, a in zip(found.mean_degree, alone, strict=True)]
    nodes, edges = ([f"{n:,}" for n in values] for values in (found.nodes, found.edges))
    charts = (
        _client_bars("Nodes", "nodes", found, found.nodes, nodes, bars),
        _client_bars("Neighbours per node", "mean degree", found, found.mean_degree, degrees),
        _client_bars("Edges inside the client", "undirected edges", found, found.edges, edges),
    )
    title = f"How large each client is, and what the division costs\n{heading}"
    heights = (height - 2.4, 0.5)
    return Panels(title, (charts, (_lost_chart(found),)), (13, height), heights=heights)


def _client_bars(
    title: str,
    unit: str,
    found: Heterogeneity,
    ends: np.ndarray,
    texts: list[str],
    bars: Sequence[Bars] = (),
) -> Chart:
    """A horizontal bar for each client, with a text at its end and room for it."""
    rows = np.arange(len(texts))
    marks: list[Mark] = [*(bars or (Bars(rows, ends, across=True),))]
    if len(texts) <= MAX_ROWS:
        marks.append(Texts(ends, rows, texts, "right"))
    room = 1.1 + 0.03 * max(map(len, texts))
    x = Axis(unit, 0.0, max(float(ends.max()), 1e-9) * room, form="{x:,g}")
    y = named("client", found.clients, down=True)
    return Chart(title, x, y, tuple(marks), legend="above")


def _lost_chart(found: Heterogeneity) -> Chart:
    """One bar for the whole graph: the edges that clients have, and those that none has."""
    share = found.edges_lost_share
    x, y = Axis("", 0.0, 1.0), Axis("", -0.4, 1.1)
    if not np.isfinite(share):
        text = "How many edges lie between clients is not known."
        return Chart("", x, y, (Texts([0], [0], [text], "right", size=10),), bare=True)
    kept, lost = found.edges_total - found.edges_lost, found.edges_lost
    marks = (
        Bars([0], [1 - share], across=True),
        Bars([0], [share], 1 - share, colour=RED, across=True, hatched=True),
        Texts(
            [0], [0.75], [f"{kept:,.0f} edges inside clients ({1 - share:.1%})"], "right", size=10
        ),
        Texts(
            [1], [0.75], [f"{lost:,.0f} edges between clients, lost ({share:.1%})"], "left", size=10
        ),
    )
    return Chart("", x, y, marks, bare=True)
