"""The summary page: the answer, a chart in the metric of the study, and each client's gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

import numpy as np

from atoll.core.errors import counted
from atoll.experiment.baseline import BOUND, NOT_FEDERATED, WINS
from atoll.experiment.metrics import COMPARED, guessing, label_of
from atoll.present import chart_svg as svg
from atoll.present.chart import MAX_ROWS, Axis, Dots, Line, Mark, colour_of, dash_of, number_text
from atoll.present.tables import Cell, Column, Number, html, make_table, number_of
from atoll.present.terminal import alert_line, listed
from atoll.report import results
from atoll.report.collect import Collection, ReportedRun, main_table

MAX_FEDERATIONS = 6  # maximum number of federations with a chart here; the table contains all
TECHNICAL = ("With ", "Over ")  # first words of sentences about tests and ranks


def summary(found: Collection) -> str:
    """Show the answer in the study's metric, and with few federations in other common metrics."""
    own = {one.metric for one in found.shown}
    views = {label_of(own.pop()) if len(own) == 1 else "each federation's own": found}
    for name in COMPARED if len(found.columns) <= MAX_FEDERATIONS else ():
        if all(f"test_{name}" in one.run.summary["metrics"] for one in found.shown):
            shown = [replace(one, chosen=name) for one in found.shown]
            views.setdefault(label_of(name), replace(found, shown=shown, verdicts={}))
    switch, text = '<legend class="hidden">Metric</legend>', _gaps(found)
    for place, (name, view) in enumerate(views.items() if found.shown else ()):
        mark = f'name="metric" id="m{place}" autocomplete="off"{"" if place else " checked"}'
        switch += f'<input type="radio" {mark}><label for="m{place}">{escape(name)}</label>'
        text += f'<div class="by-metric m{place}">{_view(view)}</div>'
    switch = f'<fieldset class="switch">{switch}</fieldset>' if len(views) > 1 else ""
    return switch + text + results.notes(found.aside)


def _view(found: Collection) -> str:
    answer = "".join(f'<p class="answer">{line}</p>' for line in _findings(found))
    tests = list[str]()
    for name, told in found.verdicts.items():
        own = [line for line in told if not line.startswith(TECHNICAL) and WINS not in line]
        where = f"{name}: " if len(found.verdicts) > 1 else ""
        tests += [line if line.startswith("On ") else where + line for line in own]
    main = [one.run.result for one in found.shown if one.metric == one.run.result.metric]
    tests += [line for result in main for line in result.after_training()]
    for best in (results.best_of(found.group(column)) for column in found.columns):
        tests += [f"{best.row}: {line}." for line in alert_line(best.run.result)]
    said = [f"<p>{escape(line)}</p>" for line in tests]
    if len(found.columns) > MAX_FEDERATIONS:
        return answer + html(main_table(found).table()) + "".join(said)
    parts = [answer, results.by_federation(found, _ranking), *said]
    return "".join([*parts, results.by_federation(found, _gains, ": clients")])


def _findings(found: Collection) -> list[str]:
    """State the best method of each federation, and its gain over local training."""
    table, lines = main_table(found), []
    for column, head in zip(found.columns, table.columns, strict=True):
        group = found.group(column)
        known = [one.row for one in group if table.cell(one.row, head).known]
        best = [row for row in known if row in table.best(head)] or known[:1]
        if not best:
            continue
        names = listed([f"<b>{escape(name)}</b>" for name in best])
        verb = "reaches a" if len(known) == 1 else f"ha{'ve' if best[1:] else 's'} the highest mean"
        line = f"On {escape(column)}, {names} {verb} test {group[0].label}: "
        line += f"<b>{table.printed(best[0], head).plain} %</b>".replace(" ", "\u00a0")
        if (alone := results.alone_in(group)) and alone.row in known and alone.row not in best:
            gain = 100 * (table.cell(best[0], head).mean - table.cell(alone.row, head).mean)
            line += f", {gain:.1f} points above local training"
        lines.append(f"{line}.{_chance(group[0])}")
        scored = {one.row: one.run.result.scored for one in group}
        lines += [f"{escape(row)} {WINS}." for row in best if scored[row] == NOT_FEDERATED]
        bounds = {row: table.printed(row, head).plain for row in known if row in found.bounds}
        lines += [f"{escape(row)} {BOUND}: {score}." for row, score in bounds.items()]
    return lines


def _chance(one: ReportedRun) -> str:
    """State the score of guessing, if it is known."""
    counts, result = one.run.result.confusion(), one.run.result
    score = None if counts is None else guessing(one.metric, counts.sum(1), result.positive)
    how = "Always predicting the most frequent class" if one.metric == "accuracy" else "Guessing"
    return "" if score is None else f" {how} reaches {100 * score:.1f}\u00a0%."


def _ranking(group: Sequence[ReportedRun]) -> str:
    """Show the score of every method, best first. Show several seeds on one scale."""
    key, name = f"test_{group[0].metric}", label_of(group[0].metric)
    seeds = {one: results.percents(one, key) for one in group if results.percents(one, key)}
    if not seeds:
        return ""
    order = sorted(seeds, key=lambda one: -np.mean(seeds[one]))
    axis = results.strip_axis([at for one in seeds.values() for at in (*one, *_ends(one))], 0.08)
    heads: list[str | Column] = ["method", name]
    rows = list[list[Cell]]()
    for one in order:
        mark = '<span class="aside"> no federation</span>' * (one is results.alone_in(group))
        named, score = results.name_cell(one), number_of(one.run.summary["metrics"], key).cell()
        rows.append([replace(named, html=named.html + mark), score])
    if max(map(len, seeds.values())) > 1:
        heads.append(Column("seeds, mean ± std", below=svg.scale_html(axis)))
        for row, one in zip(rows, order, strict=True):
            row.append(Cell(html=seeds_strip(seeds[one], axis, one.style)))
    table = make_table(heads, rows, title=f"Test {group[0].label}, in percent")
    return html(table, label=f"{group[0].column}: {name} of every method")


def _ends(values: Sequence[float]) -> list[float]:
    """Return mean ± standard deviation, which may exceed 100 percent, or [] for one seed."""
    if len(values) < 2:
        return []
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    return [mean - spread, mean + spread]


def seeds_strip(values: Sequence[float], axis: Axis, style: int) -> str:
    """Draw seeds as dots, and mean and standard deviation as a line with a mark."""
    colour, mean = colour_of(style), float(np.mean(values))
    marks: list[Mark] = [Dots([mean], [0.5], colour, size=10)]
    if ends := _ends(values):
        seeds = Dots(values, [0.5] * len(values), colour, size=6, opacity=0.35)
        marks = [Line(ends, [0.5, 0.5], colour, dash=dash_of(style)), seeds, *marks]
    return svg.strip_svg("strip", axis, marks)


def _gains(group: Sequence[ReportedRun]) -> str:
    """Show each client's score with the best method and its gain over local training."""
    alone = results.alone_in(group)
    best = results.best_of([one for one in group if one is not alone] or group)
    own, result = results.by_client(best), best.run.result
    if not np.isfinite(own).any() or len(own) > MAX_ROWS:
        return ""
    heads, sizes = ["client", "size", best.row], result.seeds[0].history.nodes
    rows = list[list[Cell | str]]()
    before = results.by_client(alone) if alone not in (None, best) else np.empty(0)
    for name, size, score in zip(result.client_names, sizes, own, strict=True):
        badge = ' <span class="badge">lowest</span>' if score == np.nanmin(own) else ""
        rows.append([Cell(name, html=escape(name) + badge), f"{size:,}", number_text(score, 1)])
    if len(before) == len(own):
        heads += ["local", "gain"]
        for row, score, gain in zip(rows, before, own - before, strict=True):
            cell = Number(gain / 100).cell(sign="+")
            red = f'<span class="warn">{cell.text}</span>' if gain < 0 else ""
            row += [number_text(score, 1), replace(cell, html=red)]
    title = f"Test {best.label} of every client with {best.row}, in percent"
    note = [] if result.named or len(result.seeds) < 2 else [results.ANEW]
    return html(make_table(heads, rows, title=title, notes=note), label=f"{group[0].column}: gains")


def _gaps(found: Collection) -> str:
    """List the requested runs that are missing on the page."""
    lines = ""
    for gap in found.missing:
        why = f" ({escape(gap.why)})" if gap.why != gap.kind else ""
        lines += f"<li><b>{escape(gap.name)}</b>: {escape(gap.kind)}{why}</li>"
    total = counted(len(found.missing) + len(found.shown), "run")
    head = f"<h3>Missing: {len(found.missing)} of {total}</h3>"
    return f'<div class="alert" role="note">{head}<ul>{lines}</ul></div>' if lines else ""
