"""What was run and what came out: overview, tables, curves, clients."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from urllib.parse import quote

import numpy as np

from atoll.present.tables import ResultTable, result_csv
from atoll.present.terminal import counted
from atoll.report import charts
from atoll.report.charts import Line, Wide, chip
from atoll.report.collect import METRIC_NAMES, Collection, Shown, main_table


def overview(found: Collection) -> str:
    """What was run, in a few sentences, and what is missing."""
    aside = "".join(f'<p class="note">{escape(line)}</p>' for line in found.aside)
    if not found.shown:
        return f"{_gaps(found)}<p>No run has been tested yet: there are trials alone.</p>{aside}"
    seeds = sorted({one.config.seeds for one in found.shown})
    rounds = sorted({one.config.rounds or 0 for one in found.shown})
    methods = {one.config.method for one in found.shown}
    facts = [
        counted(len(methods), "method"),
        counted(len(found.columns), "federation"),
        counted(len(found.shown), "run"),
        _span(seeds, "seed"),
        _span(rounds, "round"),
    ]
    tiles = "".join(
        f"<li><b>{number}</b> {escape(word)}</li>"
        for number, _, word in (fact.partition(" ") for fact in facts)
    )
    lines = "".join(f"<p>{line}</p>" for line in _findings(found))
    return f'<ul class="tiles">{tiles}</ul>{_gaps(found)}{lines}{aside}{_settings(found)}'


def _span(numbers: list[int], thing: str) -> str:
    if len(numbers) == 1:
        return counted(numbers[0], thing)
    return f"{numbers[0]}–{numbers[-1]} {thing}s"


def _findings(found: Collection) -> list[str]:
    """Who is best where, and by how much over Local."""
    table = main_table(found)
    lines = []
    for column, head in zip(found.columns, table.columns, strict=True):
        best = [row for row in table.rows if row in table.best(head)]
        if not best:
            continue
        mean, spread = table.texts(best[0], head)
        names = " and ".join(f"<b>{escape(name)}</b>" for name in best)
        line = f"<b>{escape(head)}</b>: highest mean: {names} with {mean}"
        line += f" ± {spread}" if spread else ""
        alone = [one for one in found.group(column) if one.config.method == "local"]
        if alone and alone[0].row not in best:
            gain = 100 * (table.cell(best[0], head).mean - table.cell(alone[0].row, head).mean)
            line += f", {gain:.1f} points above working alone"
        lines.append(line + ".")
    return lines


def _gaps(found: Collection) -> str:
    """What was asked for and is not on the page, and what folders lack."""
    notes = [
        f"<li><b>{escape(gap.name)}</b>: {escape(gap.kind)}"
        + (f" ({escape(gap.why)})" if gap.why != gap.kind else "")
        + "</li>"
        for gap in found.missing
    ]
    if notes:
        total = len(notes) + len(found.shown)
        head = f"Not here: {len(notes)} of {counted(total, 'run')}"
        notes = [f'<div class="alert" role="note"><h3>{head}</h3><ul>{"".join(notes)}</ul></div>']
    lacking = [(one, note) for one in found.shown for note in one.run.notes]
    if lacking:
        text = "".join(
            f"<li><b>{escape(one.row)}</b>, {escape(one.column)}: {escape(note)}</li>"
            for one, note in lacking
        )
        notes.append(f'<div class="alert" role="note"><h3>Older runs</h3><ul>{text}</ul></div>')
    return "".join(notes)


def _settings(found: Collection) -> str:
    """One line for each federation: how it was made and how it was trained."""
    rows = []
    for column in found.columns:
        group = found.group(column)
        config, result = group[0].config, group[0].run.result
        rows.append(
            [
                column,
                str(result.clients),
                str(config.partition),
                str(config.split),
                config.protocol,
                f"{config.fraction:.0%}",
                ", ".join(sorted({str(one.config.epochs) for one in group})),
            ]
        )
    heads = ["federation", "clients", "partition", "split", "protocol", "in a round", "epochs"]
    return charts.table("How the federations were made", heads, rows, left=9)


def results(found: Collection) -> str:
    """The table, and for each federation every method with its spread."""
    table = main_table(found)
    link = "data:text/csv;charset=utf-8," + quote(result_csv([table]))
    download = f'<p><a download="results.csv" href="{link}">This table as CSV</a></p>'
    parts = [_details(found, column) for column in found.columns]
    return result_table(table, found) + download + _verdicts(found) + "".join(parts)


def _verdicts(found: Collection) -> str:
    """What the comparison's own tests say."""
    if not found.verdicts:
        return ""
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd><ul>"
        + "".join(f"<li>{escape(line)}</li>" for line in said)
        + "</ul></dd>"
        for name, said in found.verdicts.items()
    )
    return f'<h3>What can be told apart</h3><dl class="said">{rows}</dl>'


def result_table(table: ResultTable, found: Collection) -> str:
    """A table with the best in bold."""
    styles = {one.row: one.style for one in found.shown}
    rows = []
    for row in table.rows:
        cells = [chip(row, styles[row]) if row in styles else escape(row)]
        for column in table.columns:
            mean, spread = table.texts(row, column)
            text = f"<b>{escape(mean)}</b>" if row in table.best(column) else escape(mean)
            cells.append(text + (f' <span class="pm">± {spread}</span>' if spread else ""))
        rows.append(cells)
    body = charts.table(table.title, [table.corner, *table.columns], rows, raw=True)
    return f'{body}<p class="note">{escape(table.caption)} Best in bold.</p>'


def _details(found: Collection, column: str) -> str:
    group = found.group(column)
    metric = group[0].metric
    values = {one.row: _percents(one, f"test_{metric}") for one in group}
    every = [v for seeds in values.values() for v in seeds]
    if not every:
        return ""
    low, high = min(every), max(every)
    room = max(0.08 * (high - low), 0.5)
    low, high = low - room, high + room
    rows = [
        [
            chip(one.row, one.style),
            charts.whisker(values[one.row], low, high, one.style),
            _text(one, f"test_{metric}"),
            escape(one.run.result.scored),
            _text(one, "local_test_accuracy"),
            _text(one, "test_macro_f1"),
            _text(one, "best_round", 1.0, 0, plus=1.0),  # charts count rounds from one
        ]
        for one in group
        if values[one.row]
    ]
    heads: list[str | Wide] = [
        "method",
        Wide("seeds, mean ± std", charts.scale(low, high)),
        METRIC_NAMES[metric],
        "scored model",
        "after training",
        "macro F1",
        "best round",
    ]
    body = charts.table(
        f"Test {METRIC_NAMES[metric]} and more, in percent",
        heads,
        rows,
        raw=True,
        label=f"{column}: every method",
    )
    return f"<h3>{escape(column)}</h3>{body}"


def _percents(one: Shown, name: str) -> list[float]:
    return [100 * v for v in one.run.summary["metrics"].get(name, {}).get("per_seed", [])]


def _text(
    one: Shown, name: str, scale: float = 100.0, digits: int = 1, *, plus: float = 0.0
) -> str:
    seeds = one.run.summary["metrics"].get(name, {}).get("per_seed", [])
    if not seeds:
        return "–"
    mean = f"{scale * np.mean(seeds) + plus:.{digits}f}"
    if len(seeds) < 2:
        return mean
    return f'{mean} <span class="pm">± {scale * np.std(seeds, ddof=1):.{digits}f}</span>'


def convergence(found: Collection) -> str:
    """A chart for each federation: the mean over clients after each round."""
    figures = []
    for column in found.columns:
        group = found.group(column)
        name = METRIC_NAMES[group[0].metric]
        lines = _one_run_lines(group[0]) if len(group) == 1 else best_lines(group)
        name = name if len(group) == 1 else f"test {name}"
        figures.append(
            charts.line_chart(
                column, lines, x_name="round", y_name=name, points=points_for(len(found.columns))
            )
        )
    several = any(one.config.seeds > 1 for one in found.shown)
    crowded = any(len(found.group(column)) > MAX_LINES for column in found.columns)
    text = (
        "Mean over clients of the scored model on test nodes (or graphs) after each round"
        + ("; line: mean over seeds, band: lowest to highest seed" if several else "")
        + ". The first climb may be cut off below. "
        + "Nobody trains or picks a round with these numbers."
        + (f" Of many runs the {MAX_LINES} best are drawn." if crowded else "")
    )
    if len(found.shown) == 1:
        text = "Mean over clients after each round" + (
            "; line: mean over seeds, band: lowest to highest seed." if several else "."
        )
    return f'<p>{text}</p><div class="charts">{"".join(figures)}</div>'


def points_for(count: int) -> int:
    """Points of each line, where there are so many charts: a page of many stays small."""
    return int(np.clip(charts.MAX_POINTS * 12 // count, 30, charts.MAX_POINTS))


MAX_LINES = 16
"""Lines that one chart can hold."""


def best_lines(group: Sequence[Shown]) -> list[Line]:
    """The runs' lines; of very many those of the best by the reported number."""
    if len(group) > MAX_LINES:
        means = [(_percents(one, f"test_{one.metric}") or [-1.0]) for one in group]
        order = np.argsort([-float(np.mean(seeds)) for seeds in means], kind="stable")
        group = [group[i] for i in sorted(order[:MAX_LINES].tolist())]
    return [seed_line(one) for one in group]


def seed_line(
    one: Shown, name: str = "", scored: str = "", role: str = "test", style: int | None = None
) -> Line:
    """A run's line with its band of seeds."""
    result = one.run.result
    seeds = 100 * result.curve(one.metric, role, scored or None)
    return Line(
        name or one.row,
        one.style if style is None else style,
        np.arange(1, seeds.shape[1] + 1),
        seeds.mean(0),
        seeds.min(0),
        seeds.max(0),
    )


def _one_run_lines(one: Shown) -> list[Line]:
    """For a run alone: what is scored, on three parts of the data, and the local model."""
    scored = one.config.evaluate or "deployed"
    other = "local" if scored == "deployed" else "deployed"
    lines = [
        seed_line(one, name, scored, role, style)
        for style, (name, role) in enumerate(
            (("test", "test"), ("validation", "val"), ("training", "train"))
        )
    ]
    name = "local model, test" if other == "local" else "deployed, test"
    return [
        line
        for line in [*lines, seed_line(one, name, other, "test", 3)]
        if np.isfinite(line.mean).all()
    ]


def clients(found: Collection) -> str:
    """How the clients fare with each method."""
    parts = []
    for column in found.columns:
        group = found.group(column)
        metric = group[0].metric
        each = {one.row: 100 * _of_clients(one) for one in group}
        known = np.concatenate([v[np.isfinite(v)] for v in each.values()])
        if not known.size:
            continue
        low, high = float(known.min()), float(known.max())
        room = max(0.04 * (high - low), 0.5)
        low, high = low - room, high + room
        alone = next((one for one in group if one.config.method == "local"), None)
        rows = []
        for one in group:
            own = each[one.row]
            gain = "–"
            if alone is not None and one is not alone and len(own) == len(each[alone.row]):
                better = int((own > each[alone.row] + 1e-9).sum())
                gain = f"{better} of {int(np.isfinite(own).sum())}"
            least, middle, most = (np.nanquantile(own, q) for q in (0, 0.5, 1))
            rows.append(
                [
                    chip(one.row, one.style),
                    charts.strip(own, low, high, one.style),
                    f"{least:.1f}",
                    f"{middle:.1f}",
                    f"{most:.1f}",
                    f"{np.nanstd(own):.1f}",
                    gain,
                ]
            )
        wide = Wide("clients, quartiles, median", charts.scale(low, high))
        heads: list[str | Wide] = [
            "method",
            wide,
            "worst",
            "median",
            "best",
            "std",
            "gain over local",
        ]
        if alone is None:
            heads, rows = heads[:-1], [row[:-1] for row in rows]
        body = charts.table(
            f"Test {METRIC_NAMES[metric]} of each client, in percent",
            heads,
            rows,
            raw=True,
            label=f"{column}: clients",
        )
        parts.append(f"<h3>{escape(column)}</h3>{body}")
    text = (
        "Each dot is a client: its score at the round that the protocol picks, mean over seeds. "
        "Where every seed divides the data anew, client 3 of one seed is not client 3 of another; "
        "the spread still shows how unequal clients fare."
    )
    return f"<p>{text}</p>{''.join(parts)}"


def _of_clients(one: Shown) -> np.ndarray:
    values = one.run.result.of_clients(one.metric)
    counts = np.isfinite(values).sum(0)
    total = np.where(np.isfinite(values), values, 0.0).sum(0)
    return np.asarray(
        np.divide(total, counts, out=np.full(values.shape[1], np.nan), where=counts > 0)
    )
