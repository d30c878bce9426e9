"""What a paper prints beside what came out here: the section of `atoll reproduce`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

import numpy as np

from atoll.present.chart import (
    EDGE,
    SHADE,
    SOFT,
    Area,
    Axis,
    Chart,
    Dots,
    Line,
    Mark,
    Rule,
    nice_ticks,
)
from atoll.present.chart_svg import chart_html, key_html, scale_html, strip_svg
from atoll.present.tables import Cell, Column, Number, ResultTable, html, make_table
from atoll.report.collect import Collection
from atoll.report.results import csv_link
from atoll.studies.reproduce.printed import (
    METRIC_WORDS,
    heading,
    how,
    summary_lines,
    value_text,
    with_runs,
)
from atoll.studies.reproduce.recipes import STRICT
from atoll.studies.reproduce.table import TOLERANCE, ReproducedRow, Reproduction

COLOURS = {"reproduced": "c2", "above": "c0", "below": "c1", "shortened": "c6"}
"""Of a verdict; anything else is a failure."""
COUNTED = "ratio_improved"


def printed(found: Collection) -> str:
    """Every table again, number by number."""
    return "".join(_table(one) for one in found.reproductions)


def _table(found: Reproduction) -> str:
    told = [row for row in found.rows if row.ours or row.errors]
    groups: dict[tuple[str, ...], list[ReproducedRow]] = {}
    for row in told:
        groups.setdefault(_problem(row), []).append(row)
    lines = "".join(f"<p>{escape(line)}</p>" for line in summary_lines(found)[:1])
    notes = "".join(f'<p class="note">{escape(line)}</p>' for line in summary_lines(found)[1:])
    link = csv_link(printed_tables(found), f"{found.paper.name}-table-{found.table}.csv")
    return (
        f"<h3>{escape(heading(found))}</h3><p>{escape(_about(found))}</p>{lines}{notes}{link}"
        + _chart(found, told)
        + "".join(_group(found, rows) for rows in groups.values())
    )


def _about(found: Reproduction) -> str:
    """Whose numbers these are, and how ours were made."""
    words = how(found, with_runs(found))
    return f"{found.paper.recipe.title}. {words[0].upper()}{words[1:]}."


def _problem(row: ReproducedRow) -> tuple[str, ...]:
    one = row.printed
    return one.dataset, one.setting, one.clients, one.metric


def where(found: Reproduction, row: ReproducedRow) -> str:
    """The data and clients of a row, and what is measured where a table has several metrics."""
    one = row.printed
    words = [one.dataset, f"{one.clients} clients"]
    if len({other.printed.setting for other in found.rows}) > 1:
        words.insert(1, one.setting.replace(";", ", "))
    if len({other.printed.metric for other in found.rows}) > 1:
        words.append(METRIC_WORDS[one.metric])
    return ", ".join(word for word in words if word)


def _group(found: Reproduction, rows: Sequence[ReproducedRow]) -> str:
    """The methods on the same clients: marks on one scale, and the numbers."""
    axis = _axis(rows)
    strips = Column("shade: tolerance", below=scale_html(axis))
    heads: list[str | Column] = ["method", strips, "printed", "ours", "difference", "verdict"]
    heads += [STRICT, "difference"] if STRICT in found.rules else []
    unit = "clients" if rows[0].printed.metric == COUNTED else "percent"
    name = where(found, rows[0])
    cells = [_line(found, row, axis) for row in rows]
    table = make_table(heads, cells, title=f"{name}, in {unit}")
    return html(table, label=f"{name}: printed, ours")


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
    mean, _, spread = value_text(value, std, metric).partition(" ± ")
    return Cell(mean.replace("-", "−"), spread)


def _axis(rows: Sequence[ReproducedRow]) -> Axis:
    """An axis that holds all means, spreads and tolerances of some rows."""
    values = [(row.printed.value, row.printed.std) for row in rows]
    values += [(o.mean, o.std) for row in rows for o in row.ours.values()]
    edges = [mean + sign * (std or 0.0) for mean, std in values for sign in (-1, 1)]
    edges += [row.printed.value + sign * row.tolerance for row in rows for sign in (-1, 1)]
    return _linear("", edges, max(0.03 * (max(edges) - min(edges)), 0.3), 4)


def _linear(name: str, values: Sequence[float], room: float, count: int) -> Axis:
    low, high = min(values) - room, max(values) + room
    return Axis(name, low, high, ticks=[(t, f"{t:g}") for t in nice_ticks(low, high, count)])


LANES = (0.78, 0.48, 0.18)
"""Heights of the print, ours and ours under `strict` in a strip."""


def _strip(found: Reproduction, row: ReproducedRow, axis: Axis) -> str:
    """The print as a ring with its tolerance as a shade, ours as a dot, strict as a square."""
    one = row.printed
    near, far = one.value - row.tolerance, one.value + row.tolerance
    marks: list[Mark] = [Rule(near, upright=True, to=far, colour=SHADE)]
    lanes = [(one.value, one.std, *PRINTED, LANES[0])]
    for rules, style, lane in zip(found.rules, (OURS, OURS_STRICT), LANES[1:], strict=False):
        own = row.ours.get(rules)
        if own is not None:
            lanes.append((own.mean, own.std, *style, lane))
    if len(lanes) > 1 and found.rules[0] in row.ours:
        marks.append(Line([lanes[0][0], lanes[1][0]], LANES[:2], EDGE, width=1.5))
    for mean, std, colour, shape, lane in lanes:
        if std:
            marks.append(Line([mean - std, mean + std], [lane, lane], colour))
        marks.append(Dots([mean], [lane], colour, shape=shape, size=9))
    return strip_svg("strip lanes", replace(axis, ticks=()), marks)


def _chart(found: Reproduction, told: Sequence[ReproducedRow]) -> str:
    """All percentages at once: ours against the print."""
    own, key = found.rules[0], _key(found)
    rows = [
        row for row in told if own in row.ours and row.printed.metric not in (COUNTED, "min_gain")
    ]
    if len(rows) < 2:
        return key
    chart = against_print(found, rows)
    return f'<div class="charts">{chart_html(chart, height=320)}</div>{key}'


def against_print(found: Reproduction, rows: Sequence[ReproducedRow]) -> Chart:
    """A dot for each number: ours over the printed one, coloured by the verdict."""
    pairs = [(row.printed.value, row.ours[found.rules[0]].mean) for row in rows]
    values = [v for pair in pairs for v in pair]
    room = max(0.05 * (max(values) - min(values)), TOLERANCE)
    x, y = (_linear(name, values, room, 5) for name in ("printed, %", "ours, %"))
    ends = np.array([x.low, x.high], dtype=float)
    verdicts = [found.verdict(row) for row in rows]
    marks: list[Mark] = [
        Area(ends, ends - TOLERANCE, ends + TOLERANCE),
        Line(ends, ends, EDGE, width=1.5),
    ]
    for word in dict.fromkeys([*COLOURS, *verdicts]):
        own = [i for i, verdict in enumerate(verdicts) if verdict == word]
        if own:
            x_own, y_own = [pairs[i][0] for i in own], [pairs[i][1] for i in own]
            tips = [
                f"{rows[i].printed.method}, {where(found, rows[i])}: printed {pairs[i][0]:.1f}, "
                f"ours {pairs[i][1]:.1f}, {word}"
                for i in own
            ]
            name = f"{word} ({len(own)})" if word in COLOURS else ""
            colour = COLOURS.get(word, "c6")
            marks.append(Dots(x_own, y_own, colour, name, size=9, tips=tips))
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in COLOURS if word in verdicts)
    gaps = np.array([b - a for a, b in pairs])
    alt = (
        f"Dots of {len(rows)} numbers, ours against the print: {counts}; ours lie from "
        f"{gaps.min():+.1f} to {gaps.max():+.1f} points off, in the mean {gaps.mean():+.1f}."
    )
    title = f"Ours against the print; on the line: equal, shade: within {TOLERANCE} points"
    return Chart(title, x, y, tuple(marks), legend="above", grid=True, square=True, alt=alt)


PRINTED, OURS, OURS_STRICT = (SOFT, "ring"), ("c0", "dot"), ("c3", "box")
"""Colour and shape of the marks in a strip."""


def _key(found: Reproduction) -> str:
    words = {PRINTED: "printed", OURS: f"ours, protocol {found.rules[0]}"}
    words |= {OURS_STRICT: f"ours, {STRICT}"} if STRICT in found.rules else {}
    key = key_html(Dots((), (), colour, name, shape) for (colour, shape), name in words.items())
    return key + '<p class="note">Bars: one standard deviation, where there is one.</p>'


def printed_tables(found: Reproduction) -> list[ResultTable]:
    """The same as plain tables, for a paper, a README or a program."""
    tables = []
    told = [row for row in found.rows if row.ours or row.errors]
    for counts in (False, True):
        rows = {
            f"{row.printed.method}, {where(found, row)}": row
            for row in told
            if (row.printed.metric == COUNTED) == counts
        }
        if not rows:
            continue
        scale = 1.0 if counts else 100.0
        cells: dict[tuple[str, str], Number] = {}
        for name, row in rows.items():
            one, std = row.printed, row.printed.std
            cells[name, "printed"] = _cell(one.value, std, (), scale)
            for rules in found.rules:
                own, prefix = row.ours.get(rules), "" if rules == found.rules[0] else f"{rules} "
                if own is not None:
                    gap = own.mean - one.value
                    cells[name, prefix.strip() or "ours"] = _cell(
                        own.mean, own.std, own.values, scale
                    )
                    cells[name, f"{prefix}difference"] = _cell(gap, None, (), scale)
            cells[name, "verdict"] = Number(why=found.verdict(row).partition(":")[0])
        extra = (STRICT, f"{STRICT} difference") if STRICT in found.rules else ()
        tables.append(
            ResultTable(
                f"{heading(found)}, in {'clients' if counts else 'percent'}",
                tuple(rows),
                ("printed", "ours", "difference", "verdict", *extra),
                cells,
                caption=_about(found),
                corner="method and data",
                metric=f"{found.paper.name}_table_{found.table}",
                scale=scale,
                digits=0 if counts else 1,
                higher=None,
                signed=("difference", f"{STRICT} difference"),
            )
        )
    return tables


def _cell(mean: float, std: float | None, values: Sequence[float], scale: float) -> Number:
    spread = None if std is None else std / scale
    return Number(mean / scale, spread, tuple(value / scale for value in values))
