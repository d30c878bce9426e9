"""The section of `atoll reproduce`: published numbers compared with reproduced numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

import numpy as np

from atoll.present import chart as plot
from atoll.present.chart import EDGE, Axis, Chart, Dots, Line, plain_axis
from atoll.present.chart_svg import chart_html, key_html, scale_html, strip_svg
from atoll.present.tables import Cell, Column, Number, ResultTable, html, make_table
from atoll.report.collect import Collection
from atoll.report.results import csv_link, notes
from atoll.studies.reproduce import printed as text
from atoll.studies.reproduce.recipes import STRICT
from atoll.studies.reproduce.table import TOLERANCE, ReproducedRow, Reproduction

COLOURS = {"reproduced": "c2", "above": "c0", "below": "c1", "shortened": "c6"}
"""Colours of the verdicts. Any other verdict is a failure."""
COUNTED = "ratio_improved"
LANES = (0.78, 0.48, 0.18)  # heights of the published value, ours and `strict` in a strip
PRINTED, OURS, OURS_STRICT = (plot.SOFT, "ring"), ("c0", "dot"), ("c3", "box")
"""Colour and shape of the marks in a strip."""


def printed(found: Collection) -> str:
    """Show every reproduced table, number by number."""
    return "".join(_table(one) for one in found.reproductions)


def _table(found: Reproduction) -> str:
    rows = _reproduced(found)
    groups: dict[tuple[str, ...], list[ReproducedRow]] = {}
    for row in rows:
        groups.setdefault((*row.printed.problem, row.printed.metric), []).append(row)
    first, *more = text.summary_lines(found)
    link = csv_link(printed_tables(found), f"{found.paper.name}-table-{found.table}.csv")
    return (
        f"<h3>{escape(text.heading(found))}</h3><p>{escape(_about(found))}</p>"
        f"<p>{escape(first)}</p>{notes(more)}{link}{_chart(found, rows)}"
        + "".join(_group(found, own) for own in groups.values())
    )


def _reproduced(found: Reproduction) -> list[ReproducedRow]:
    """Return the rows that ran or failed."""
    return [row for row in found.rows if row.ours or row.errors]


def _about(found: Reproduction) -> str:
    """Describe the paper, and how our numbers were computed."""
    words = text.how(found, text.with_runs(found))
    return f"{found.paper.recipe.title}. {words[0].upper()}{words[1:]}."


def where(found: Reproduction, row: ReproducedRow) -> str:
    """Describe the data and clients of a row, and its metric if the table has several."""
    one = row.printed
    words = [one.dataset, f"{one.clients} clients"]
    if len({other.printed.setting for other in found.rows}) > 1:
        words.insert(1, one.setting.replace(";", ", "))
    if len({other.printed.metric for other in found.rows}) > 1:
        words.append(text.METRIC_WORDS[one.metric])
    return ", ".join(word for word in words if word)


def _group(found: Reproduction, rows: Sequence[ReproducedRow]) -> str:
    """Show the methods on the same clients: marks on one scale, and the numbers."""
    values = [(row.printed.value, row.printed.std) for row in rows]
    values += [(own.mean, own.std) for row in rows for own in row.ours.values()]
    values += [(row.printed.value, row.tolerance) for row in rows]
    edges = [mean + sign * (std or 0.0) for mean, std in values for sign in (-1, 1)]
    room = max(0.03 * (max(edges) - min(edges)), 0.3)
    axis = plain_axis("", min(edges) - room, max(edges) + room)
    strips = Column("shade: tolerance", below=scale_html(axis))
    heads: list[str | Column] = ["method", strips, "printed", "ours", "difference", "verdict"]
    heads += [STRICT, "difference"] if STRICT in found.rules else []
    unit = "clients" if rows[0].printed.metric == COUNTED else "percent"
    name = where(found, rows[0])
    cells = [_line(found, row, axis) for row in rows]
    title, label = f"{name}, in {unit}", f"{name}: printed, ours"
    return html(make_table(heads, cells, title=title), label=label)


def _line(found: Reproduction, row: ReproducedRow, axis: Axis) -> list[Cell]:
    one = row.printed
    cells = [Cell(one.method), Cell(html=_strip(found, row, axis))]
    cells.append(_number(one.value, one.std, one.metric))
    word, _, why = found.verdict(row).partition(": ")
    more = f' <span class="quiet">({escape(why)})</span>' if why else ""
    verdict = f'<span class="{COLOURS.get(word, "warn")}">{escape(word)}</span>{more}'
    for rules in found.rules:
        own, gap = row.ours.get(rules), found.difference(row, rules)
        cells.append(Cell("–") if own is None else _number(own.mean, own.std, one.metric))
        cells.append(Cell("–" if gap is None else f"{gap:+.1f}".replace("-", "−")))
        cells += [Cell(html=verdict)] if rules == found.rules[0] else []
    return cells


def _number(value: float, std: float | None, metric: str) -> Cell:
    mean, _, spread = text.value_text(value, std, metric).partition(" ± ")
    return Cell(mean.replace("-", "−"), spread)


def _strip(found: Reproduction, row: ReproducedRow, axis: Axis) -> str:
    """Draw the published value as a ring in its tolerance, ours as a dot, strict as a square."""
    one = row.printed
    near, far = one.value - row.tolerance, one.value + row.tolerance
    marks: list[plot.Mark] = [plot.Rule(near, upright=True, to=far, colour=plot.SHADE)]
    lanes = [(one.value, one.std, *PRINTED, LANES[0])]
    for rules, style, lane in zip(found.rules, (OURS, OURS_STRICT), LANES[1:], strict=False):
        if (own := row.ours.get(rules)) is not None:
            lanes.append((own.mean, own.std, *style, lane))
    if len(lanes) > 1 and found.rules[0] in row.ours:
        marks.append(Line([lanes[0][0], lanes[1][0]], LANES[:2], EDGE, width=1.5))
    for mean, std, colour, shape, lane in lanes:
        if std:
            marks.append(Line([mean - std, mean + std], [lane, lane], colour))
        marks.append(Dots([mean], [lane], colour, shape=shape, size=9))
    return strip_svg("strip lanes", replace(axis, ticks=()), marks)


def _chart(found: Reproduction, every: Sequence[ReproducedRow]) -> str:
    """Return our percentages against the published ones as a chart, and the key of all marks."""
    percents = [row for row in every if row.printed.metric not in (COUNTED, "min_gain")]
    rows = [row for row in percents if found.rules[0] in row.ours]
    chart = chart_html(against_print(found, rows), height=320) if len(rows) > 1 else ""
    words = {PRINTED: "printed", OURS: f"ours, protocol {found.rules[0]}"}
    words |= {OURS_STRICT: f"ours, {STRICT}"} if STRICT in found.rules else {}
    key = key_html(Dots((), (), colour, name, shape) for (colour, shape), name in words.items())
    key += notes(["Bars show one standard deviation if it is known."])
    return f'<div class="charts">{chart}</div>{key}' if chart else key


def against_print(found: Reproduction, rows: Sequence[ReproducedRow]) -> Chart:
    """Make a dot for each number: ours against the published value, coloured by the verdict."""
    pairs = [(row.printed.value, row.ours[found.rules[0]].mean) for row in rows]
    values = [v for pair in pairs for v in pair]
    room = max(0.05 * (max(values) - min(values)), TOLERANCE)
    low, high = min(values) - room, max(values) + room
    x, y = (plain_axis(name, low, high, 5) for name in ("printed, %", "ours, %"))
    ends = np.array([low, high], dtype=float)
    verdicts = [found.verdict(row) for row in rows]
    marks: list[plot.Mark] = [
        plot.Area(ends, ends - TOLERANCE, ends + TOLERANCE),
        Line(ends, ends, EDGE, width=1.5),
    ]
    for word in dict.fromkeys([*COLOURS, *verdicts]):
        if own := [i for i, verdict in enumerate(verdicts) if verdict == word]:
            tips = [
                f"{rows[i].printed.method}, {where(found, rows[i])}: printed {pairs[i][0]:.1f}, "
                f"ours {pairs[i][1]:.1f}, {word}"
                for i in own
            ]
            name = f"{word} ({len(own)})" if word in COLOURS else ""
            spots = [pairs[i][0] for i in own], [pairs[i][1] for i in own]
            marks.append(Dots(*spots, COLOURS.get(word, "c6"), name, size=9, tips=tips))
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in COLOURS if word in verdicts)
    gaps = np.array([b - a for a, b in pairs])
    alt = (
        f"Dots of {len(rows)} numbers, ours against the published values: {counts}; ours differ by "
        f"{gaps.min():+.1f} to {gaps.max():+.1f} points, on average {gaps.mean():+.1f}."
    )
    title = f"Ours against the published values; line: equal, shade: within {TOLERANCE} points"
    return Chart(title, x, y, tuple(marks), legend="above", grid=True, square=True, alt=alt)


def printed_tables(found: Reproduction) -> list[ResultTable]:
    """Return the reproduced tables as plain tables, for files."""
    tables = []
    extra = (STRICT, f"{STRICT} difference") if STRICT in found.rules else ()
    columns = ("printed", "ours", "difference", "verdict", *extra)
    for counts in (False, True):
        some = [row for row in _reproduced(found) if (row.printed.metric == COUNTED) == counts]
        if not some:
            continue
        rows = {f"{row.printed.method}, {where(found, row)}": row for row in some}
        scale, unit = (1.0, "clients") if counts else (100.0, "percent")
        numbers = {name: _numbers(found, row, scale) for name, row in rows.items()}
        cells = {(name, column): n for name, own in numbers.items() for column, n in own.items()}
        title = f"{text.heading(found)}, in {unit}"
        metric = f"{found.paper.name}_table_{found.table}"
        table = ResultTable(title, tuple(rows), columns, cells, _about(found), "method and data")
        table = replace(table, metric=metric, scale=scale, digits=0 if counts else 1, higher=None)
        tables.append(replace(table, signed=("difference", f"{STRICT} difference")))
    return tables


def _numbers(found: Reproduction, row: ReproducedRow, scale: float) -> dict[str, Number]:
    """Return one line of a plain table, by column."""

    def number(mean: float, std: float | None = None, values: Sequence[float] = ()) -> Number:
        spread = None if std is None else std / scale
        return Number(mean / scale, spread, tuple(value / scale for value in values))

    one = row.printed
    cells = {"printed": number(one.value, one.std)}
    for rules, own in row.ours.items():
        if rules in found.rules:
            first = rules == found.rules[0]
            cells["ours" if first else rules] = number(own.mean, own.std, own.values)
            cells["difference" if first else f"{rules} difference"] = number(own.mean - one.value)
    return cells | {"verdict": Number(why=found.verdict(row).partition(":")[0])}
