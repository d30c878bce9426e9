"""The runs and their results: overview, tables, curves and clients."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape
from urllib.parse import quote

import numpy as np

from atoll.experiment.baseline import POOLED
from atoll.experiment.metrics import find_metric, label_of, per_class
from atoll.present import chart_svg as svg
from atoll.present.chart import (
    DASHED,
    Axis,
    Bars,
    Chart,
    Dots,
    Line,
    Mark,
    colour_of,
    dash_of,
    plain_axis,
)
from atoll.present.tables import Cell, Column, ResultTable, html, make_table, number_of, result_csv
from atoll.present.terminal import alert_line
from atoll.report.collect import Collection, ReportedRun, main_table

MAX_LINES = 16  # maximum number of lines in one chart
MAX_CLASSES = 10  # classes whose confusion matrix fits on a page
MAX_DOTS = 200  # maximum number of clients with their own dot


ANEW = (
    "If every seed partitions the data again, client 3 of one seed is not client 3 of another; the "
    "spread still shows how much the scores of clients differ."
)


def by_federation(
    found: Collection, write: Callable[[list[ReportedRun]], str], more: str = ""
) -> str:
    """Write a part for the runs of each federation below its name, and skip empty parts."""
    parts = [(column, write(found.group(column))) for column in found.columns]
    return "".join(f"<h3>{escape(column)}{more}</h3>{part}" for column, part in parts if part)


def name_cell(one: ReportedRun) -> Cell:
    """Return a run's name with its colour."""
    chip = f'<span class="chip {colour_of(one.style)}"></span>'
    return Cell(one.row, html=chip + escape(one.row))


def csv_link(tables: Sequence[ResultTable], name: str) -> str:
    """Return a link that saves tables as a file. The page itself contains the data."""
    link = "data:text/csv;charset=utf-8," + quote(result_csv(tables))
    return f'<p><a download="{name}" href="{link}">This table as CSV</a></p>'


def strip_axis(values: Sequence[float] | np.ndarray, share: float) -> Axis:
    """Return the common axis of a column of strips, with a margin."""
    low, high = float(min(values)), float(max(values))
    room = max(share * (high - low), 0.5)
    return plain_axis("", low - room, high + room)


def notes(lines: Iterable[str]) -> str:
    """Render notes, one paragraph each."""
    return "".join(f'<p class="note">{escape(line)}</p>' for line in lines)


def code(text: str) -> str:
    """Render commands or settings verbatim. No line breaks inside of an option."""
    words = re.sub(r"(?<![\w-])--[a-z][\w-]*", r"<span>\g<0></span>", escape(text))
    return f"<pre tabindex=0><code>{words}</code></pre>"


def overview(found: Collection) -> str:
    """Make one row per federation: its partition and its training."""
    if not found.shown:
        return "<p>No run has been tested yet, only trials exist.</p>"
    rows = []
    for column in found.columns:
        group = found.group(column)
        config, numbers = group[0].config, ["rounds", "epochs", "seeds"]
        how = (config.partition, config.split, config.protocol, f"{config.fraction:.0%}")
        known = [{getattr(one.config, name) or 0 for one in group} for name in numbers]
        counts = [", ".join(map(str, sorted(some - {0}))) or "–" for some in known]
        rows.append([column, group[0].run.result.clients, *how, *counts])
    heads = ["federation", "clients", "partition", "split", "protocol", "in a round", *numbers]
    return html(make_table(heads, rows, left=len(heads), title="How the federations were made"))


def results(found: Collection) -> str:
    """Show the main table, the tests, and for each federation the models and classes."""
    table = main_table(found)
    # The best numbers are bold, and the names have the colours of the runs.
    names, plain = {one.row: name_cell(one) for one in found.shown}, table.table()
    rows = tuple((names.get(name.text, name), *rest) for name, *rest in plain.rows)
    page = html(replace(plain, rows=rows, caption=f"{table.caption} Best in bold."))
    details = by_federation(found, _details)
    verdicts = ""
    for name, lines in found.verdicts.items():
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        verdicts += f"<dt>{escape(name)}</dt><dd><ul>{items}</ul></dd>"
    if verdicts:
        verdicts = f'<h3>Significance tests</h3><dl class="said">{verdicts}</dl>'
    return page + csv_link([table], "results.csv") + verdicts + details


def _details(group: Sequence[ReportedRun]) -> str:
    """Show each method's scored model, local score and round, and the best method's classes."""
    rows, name = [], label_of(group[0].metric)
    for one in group:
        names = (f"local_test_{one.metric}", "best_round")
        after, best = (number_of(one.run.summary["metrics"], key) for key in names)
        first = replace(best, mean=best.mean + 1)  # charts count rounds from 1
        rows.append([name_cell(one), one.run.result.scored, after.cell(), first.cell(1.0, 0)])
    heads = ["method", "scored model", "local model", "selected round"]
    title = f"Models and rounds; {name} of the local model in percent"
    table = make_table(heads, rows, left=2, title=title)
    alerts = [f"{one.row}: {line}." for one in group for line in alert_line(one.run.result)]
    return html(table, label=f"{group[0].column}: models") + notes(alerts) + _classes(group)


def _classes(group: Sequence[ReportedRun]) -> str:
    """Show scores and predictions of each class for the method with the highest mean."""
    best = best_of(group)
    result = best.run.result
    if (counts := result.confusion()) is None or len(counts) > MAX_CLASSES:
        return ""
    names = result.class_names or tuple(map(str, range(len(counts))))
    numbers = 100 * np.stack(list(per_class(counts).values()), axis=1)
    rows = []
    for name, own, scores in zip(names, counts.tolist(), numbers.tolist(), strict=True):
        shown = ["–" if np.isnan(score) else f"{score:.1f}" for score in scores]
        rows.append([name, f"{sum(own):,}", *shown, *(f"{count:,}" for count in own)])
    heads = ["class", "tested", "precision", "recall", "F1", *(f"as {name}" for name in names)]
    title = f"Classes with {best.row}: scores in percent, and number of predictions of each class"
    return html(make_table(heads, rows, title=title), label=f"{best.column}: classes")


def best_of(group: Sequence[ReportedRun]) -> ReportedRun:
    """Return the run with the highest mean. Pooled data count only if all runs pool them."""
    fair = [one for one in group if one.run.result.scored != POOLED] or group
    return max(fair, key=lambda one: np.mean(percents(one, f"test_{one.metric}") or [-1.0]))


def percents(one: ReportedRun, name: str) -> list[float]:
    """Return the values of a metric for each seed, in percent."""
    return [100 * v for v in one.run.summary["metrics"].get(name, {}).get("per_seed", [])]


def convergence(found: Collection) -> str:
    """Show a chart for each federation: the scores after each round."""
    figures, points = [], points_for(len(found.columns))
    for column in found.columns:
        group = found.group(column)
        alone, name = len(group) == 1, label_of(group[0].metric)
        lines = _one_run_lines(group[0]) if alone else best_lines(group)
        y_name = name if alone else f"test {name}"
        figures.append(line_chart(column, lines, "round", y_name, points))
    several = any(one.config.seeds > 1 for one in found.shown)
    crowded = any(len(found.group(column)) > MAX_LINES for column in found.columns)
    seeds = "; line: mean over seeds, band: lowest to highest seed" if several else ""
    over = " or ".join(dict.fromkeys(find_metric(one.metric).over for one in found.shown))
    text = f"{over.capitalize()}, after each round{seeds}."
    if len(found.shown) > 1:
        text = (
            f"{over.capitalize()}: the scored model on test nodes (or graphs) after each round"
            f"{seeds}. The vertical axis may cut off the first rounds. "
            "Neither training nor the selection of a round uses these numbers."
            + (f" The chart shows the {MAX_LINES} best of many runs." if crowded else "")
        )
    return f'<p>{text}</p><div class="charts">{"".join(figures)}</div>'


def line_chart(title: str, lines: Sequence[Line], x_name: str, y_name: str, points: int) -> str:
    """Make a chart of lines in percent with bands, a label at each end, and a collapsed table."""
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return svg.figure(title, "<p>This number was not measured.</p>")
    right = max(float(line.x[-1]) for line in lines) or 1.0
    left = min(float(line.x[0]) for line in lines)
    left = 0.0 if left < 0.05 * right else left
    ends = ", ".join(f"{line.name} {svg.last_value(line):.1f}%" for line in lines)
    alt = f"Line chart: {title}. At the end: {ends}."
    # The axis may cut off the first tenth of the rounds.
    lows, highs = ([np.asarray(getattr(line, edge)) for line in lines] for edge in ("low", "high"))
    low = float(np.nanmin(np.concatenate([edge[len(edge) // 10 :] for edge in lows])))
    high = max(float(np.nanmax(edge)) for edge in highs)
    room = max(0.04 * (high - low), 0.5)
    x = plain_axis(x_name, left, right, whole=x_name == "round")
    y = plain_axis(f"{y_name}, %", low - room, high + room, 5)
    chart = Chart(title, x, y, tuple(lines), legend="ends", grid=True, alt=alt)
    numbers = svg.line_numbers(title, lines, x_name)
    return svg.chart_html(chart, height=250, points=points, numbers=numbers)


def points_for(count: int) -> int:
    """Return the number of points per line, which is smaller on a page with many charts."""
    return int(np.clip(svg.MAX_POINTS * 12 // count, 30, svg.MAX_POINTS))


def best_lines(group: Sequence[ReportedRun]) -> list[Line]:
    """Return the runs' lines, or only those with the best reported numbers if they are too many."""
    if len(group) > MAX_LINES:
        means = [(percents(one, f"test_{one.metric}") or [-1.0]) for one in group]
        order = np.argsort([-float(np.mean(seeds)) for seeds in means], kind="stable")
        group = [group[i] for i in sorted(order[:MAX_LINES].tolist())]
    lines = [seed_line(one) for one in group]
    end = max(float(line.x[-1]) for line in lines)
    return [_across(line, end) for line in lines]


def _across(line: Line, end: float) -> Line:
    """Draw the only score of a baseline as a dashed line up to the last round."""
    if len(line.x) > 1 or end == line.x[0]:
        return line
    y, low, high = (np.repeat(np.asarray(of), 2) for of in (line.y, line.low, line.high))
    return replace(line, x=np.array([line.x[0], end]), y=y, low=low, high=high, dash=DASHED)


def seed_line(
    one: ReportedRun, name: str = "", scored: str = "", role: str = "test", style: int | None = None
) -> Line:
    """Make a run's line with its band over seeds."""
    seeds = 100 * one.run.result.curve(one.metric, role, scored or None)
    style = one.style if style is None else style
    rounds, band = np.arange(1, seeds.shape[1] + 1), (seeds.min(0), seeds.max(0))
    name, colour = name or one.row, colour_of(style)
    return Line(rounds, seeds.mean(0), colour, name, *band, dash=dash_of(style))


def _one_run_lines(one: ReportedRun) -> list[Line]:
    """Return the lines of a single run: the evaluated model by split, and the other model."""
    scored = one.config.evaluate or "deployed"
    roles = (("test", "test"), ("validation", "val"), ("training", "train"))
    other = ("local model", "local") if scored == "deployed" else ("deployed", "deployed")
    wanted = [(name, scored, role) for name, role in roles]
    wanted.append((f"{other[0]}, test", other[1], "test"))
    lines = [seed_line(one, *which, style) for style, which in enumerate(wanted)]
    return [line for line in lines if np.isfinite(line.y).all()]


def alone_in(group: Sequence[ReportedRun]) -> ReportedRun | None:
    """Return the first run of local training whose network is not set to `mlp`, or None."""
    local = [one for one in group if one.config.method == "local"]
    return next((one for one in local if one.config.set.get("net") != "mlp"), None)


def by_client(one: ReportedRun) -> np.ndarray:
    """Return each client's score in percent, as a mean over the seeds that have a score."""
    seeds = np.ma.masked_invalid(100 * one.run.result.of_clients(one.metric))
    return np.asarray(seeds.mean(0).filled(np.nan))


def clients(found: Collection) -> str:
    """Show the clients' scores with each method."""
    parts = by_federation(found, _clients)
    dots = "Each dot is a client: its score at the selected round, as a mean over seeds."
    return f"<p>{dots} {ANEW}</p>{parts}" if parts else ""


def _clients(group: Sequence[ReportedRun]) -> str:
    each = {one.row: by_client(one) for one in group}
    known = np.concatenate([v[np.isfinite(v)] for v in each.values()])
    if not known.size:
        return ""
    axis = strip_axis(known, 0.04)
    alone = alone_in(group)
    rows: list[list[Cell | str]] = []
    for one in group:
        own = each[one.row]
        quantiles = [f"{np.nanquantile(own, q):.1f}" for q in (0, 0.5, 1)]
        names = one.run.result.client_names
        strip = Cell(html=clients_strip(own, axis, one.style, names))
        if one.run.result.named:
            quantiles[0] += f" ({names[int(np.nanargmin(own))]})"
            quantiles[2] += f" ({names[int(np.nanargmax(own))]})"
        rows.append([name_cell(one), strip, *quantiles, f"{np.nanstd(own):.1f}"])
        if alone is not None:
            gain = "–"
            if one is not alone and len(own) == len(each[alone.row]):
                better = int((own > each[alone.row] + 1e-9).sum())
                gain = f"{better} of {int(np.isfinite(own).sum())}"
            rows[-1].append(gain)
    strips = Column("clients, quartiles, median", below=svg.scale_html(axis))
    heads: list[str | Column] = ["method", strips, "worst", "median", "best", "std"]
    heads += [] if alone is None else ["gain over local"]
    title = f"Test {label_of(group[0].metric)} of each client, in percent"
    return html(make_table(heads, rows, title=title), label=f"{group[0].column}: clients")


def clients_strip(values: np.ndarray, axis: Axis, style: int, names: Sequence[str]) -> str:
    """Draw clients as dots, or the central 90 % if they are many, with quartiles and median."""
    known = values[np.isfinite(values)]
    if not known.size:
        return ""
    colour = colour_of(style)
    least, low, middle, high, most = np.quantile(known, [0.05, 0.25, 0.5, 0.75, 0.95])
    marks: list[Mark] = [Bars([0.5], [high - low], [low], 0.6, colour, across=True, opacity=0.16)]
    if known.size <= MAX_DOTS:
        scores = zip(names, values.tolist(), strict=True)
        tips = [f"client {name}: {score:.1f}" for name, score in scores if np.isfinite(score)]
        half = [0.5] * known.size
        marks.append(Dots(known, half, colour, size=6.4, opacity=0.55, tips=tips))
    else:
        marks.append(Line([least, most], [0.5, 0.5], colour))
    median = Line([middle, middle], [0.12, 0.88], colour, width=2.5)
    return svg.strip_svg("strip tall", axis, [*marks, median])
