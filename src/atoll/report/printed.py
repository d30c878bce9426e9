"""What a paper prints beside what came out here: the section of `atoll reproduce`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from urllib.parse import quote

import numpy as np

from atoll.present.tables import Number, ResultTable, result_csv
from atoll.report import charts
from atoll.report.charts import Wide
from atoll.report.collect import Collection
from atoll.report.dots import Axis, Dot, dot_chart, mark, mark_key, path
from atoll.studies.reproduce.recipes import STRICT
from atoll.studies.reproduce.show import (
    METRIC_WORDS,
    heading,
    how,
    summary_lines,
    value_text,
    with_runs,
)
from atoll.studies.reproduce.table import TOLERANCE, Reproduction, Row

COLOURS = {"reproduced": "c2", "above": "c0", "below": "c1", "shortened": "c6"}
"""Of a verdict; anything else is a failure."""
COUNTED = "ratio_improved"


def printed(found: Collection) -> str:
    """Every table again, number by number."""
    return "".join(_table(one) for one in found.reproductions)


def _table(found: Reproduction) -> str:
    told = [row for row in found.rows if row.ours or row.errors]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in told:
        groups.setdefault(_problem(row), []).append(row)
    lines = "".join(f"<p>{escape(line)}</p>" for line in summary_lines(found)[:1])
    notes = "".join(f'<p class="note">{escape(line)}</p>' for line in summary_lines(found)[1:])
    link = "data:text/csv;charset=utf-8," + quote(result_csv(printed_tables(found)))
    name = f"{found.paper.name}-table-{found.table}.csv"
    return (
        f"<h3>{escape(heading(found))}</h3><p>{escape(_about(found))}</p>{lines}{notes}"
        f'<p><a download="{name}" href="{link}">This table as CSV</a></p>{_chart(found, told)}'
        + "".join(_group(found, rows) for rows in groups.values())
    )


def _about(found: Reproduction) -> str:
    """Whose numbers these are, and how ours were made."""
    words = how(found, with_runs(found))
    return f"{found.paper.recipe.title}. {words[0].upper()}{words[1:]}."


def _problem(row: Row) -> tuple[str, ...]:
    one = row.printed
    return one.dataset, one.setting, one.clients, one.metric


def where(found: Reproduction, row: Row) -> str:
    """The data and clients of a row, and what is measured where a table has several metrics."""
    one = row.printed
    words = [one.dataset, f"{one.clients} clients"]
    if len({other.printed.setting for other in found.rows}) > 1:
        words.insert(1, one.setting.replace(";", ", "))
    if len({other.printed.metric for other in found.rows}) > 1:
        words.append(METRIC_WORDS[one.metric])
    return ", ".join(word for word in words if word)


def _group(found: Reproduction, rows: Sequence[Row]) -> str:
    """The methods on the same clients: marks on one scale, and the numbers."""
    low, high = _ends(found, rows)
    strict = STRICT in found.rules
    heads: list[str | Wide] = [
        "method",
        Wide("shade: tolerance", charts.scale(low, high)),
        "printed",
        "ours",
        "difference",
        "verdict",
        *([STRICT, "difference"] if strict else []),
    ]
    body = [_line(found, row, low, high) for row in rows]
    unit = "clients" if rows[0].printed.metric == COUNTED else "percent"
    name = where(found, rows[0])
    table = charts.table(
        f"{name}, in {unit}", heads, body, raw=True, label=f"{name}: printed, ours"
    )
    return table


def _line(found: Reproduction, row: Row, low: float, high: float) -> list[str]:
    one = row.printed
    cells = [escape(one.method), _strip(found, row, low, high)]
    cells.append(_number(one.value, one.std, one.metric))
    word, _, why = found.verdict(row).partition(": ")
    more = f' <span class="quiet">({escape(why)})</span>' if why else ""
    told = f'<span class="{COLOURS.get(word, "warn")}">{escape(word)}</span>{more}'
    for rules in found.rules:
        own, gap = row.ours.get(rules), found.difference(row, rules)
        cells.append("–" if own is None else _number(own.mean, own.std, one.metric))
        cells.append("–" if gap is None else f"{gap:+.1f}".replace("-", "−"))
        cells += [told] if rules == found.rules[0] else []
    return cells


def _number(value: float, std: float | None, metric: str) -> str:
    mean, _, spread = value_text(value, std, metric).partition(" ± ")
    mean = mean.replace("-", "−")
    return mean + (f' <span class="pm">± {spread}</span>' if spread else "")


def _ends(found: Reproduction, rows: Sequence[Row]) -> tuple[float, float]:
    """What all means and spreads of some rows lie in."""
    values = [(row.printed.value, row.printed.std) for row in rows]
    values += [(o.mean, o.std) for row in rows for o in row.ours.values()]
    edges = [mean + sign * (std or 0.0) for mean, std in values for sign in (-1, 1)]
    edges += [row.printed.value + sign * row.tolerance for row in rows for sign in (-1, 1)]
    room = max(0.03 * (max(edges) - min(edges)), 0.3)
    return min(edges) - room, max(edges) + room


def _strip(found: Reproduction, row: Row, low: float, high: float) -> str:
    """The print as a ring with its tolerance as a shade, ours as a dot, strict as a square."""
    wide = (high - low) or 1.0

    def at(value: float) -> float:
        return 100 * (value - low) / wide

    one = row.printed
    left, right = at(one.value - row.tolerance), at(one.value + row.tolerance)
    parts = [
        f'<rect class="shade" x="{left:.1f}%" width="{right - left:.1f}%" y="-20%" height="140%"/>'
    ]
    lanes = [(one.value, one.std, "soft", "ring", 22)]
    for rules, lane in zip(found.rules, (52, 82), strict=False):
        own = row.ours.get(rules)
        if own is not None:
            first = rules == found.rules[0]
            lanes.append(
                (own.mean, own.std, "c0" if first else "c3", "dot" if first else "box", lane)
            )
    if len(lanes) > 1 and found.rules[0] in row.ours:
        parts.append(_rule("link", at(lanes[0][0]), at(lanes[1][0]), 22, 52))
    for mean, std, kind, shape, lane in lanes:
        if std:
            parts.append(_rule(f"bar {kind}", at(mean - std), at(mean + std), lane, lane))
        parts.append(mark(shape, kind, at(mean), lane))
    return f'<svg class="strip lanes" aria-hidden="true">{"".join(parts)}</svg>'


def _rule(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}%" x2="{x2:.1f}%" y1="{y1}%" y2="{y2}%"/>'


def _chart(found: Reproduction, told: Sequence[Row]) -> str:
    """All percentages at once: ours against the print."""
    own = found.rules[0]
    rows = [
        row for row in told if own in row.ours and row.printed.metric not in (COUNTED, "min_gain")
    ]
    key = _key(found)
    if len(rows) < 2:
        return key
    pairs = [(row.printed.value, row.ours[own].mean) for row in rows]
    x, y = (Axis(name, *_linear(pairs)) for name in ("printed, %", "ours, %"))
    low, high = x.low, x.high
    near, far = low + TOLERANCE, high - TOLERANCE
    band = path((low, far, high, high, near, low), (near, high, high, far, low, low), x, y) + "z"
    dots = []
    for row, (a, b) in zip(rows, pairs, strict=True):
        word = found.verdict(row)
        text = f"{row.printed.method}, {where(found, row)}: printed {a:.1f}, ours {b:.1f}, {word}"
        dots.append(Dot(a, b, COLOURS.get(word, "c6"), "dot", text))
    words = [word for word in COLOURS if any(found.verdict(row) == word for row in rows)]
    counts = {word: sum(found.verdict(row) == word for row in rows) for word in words}
    gaps = np.array([b - a for a, b in pairs])
    alt = (
        f"Dots of {len(rows)} numbers, ours against the print: "
        + ", ".join(f"{count} {word}" for word, count in counts.items())
        + f"; ours lie from {gaps.min():+.1f} to {gaps.max():+.1f} points off, in the mean "
        f"{gaps.mean():+.1f}."
    )
    colours = mark_key(*(("dot", COLOURS[word], f"{word} ({counts[word]})") for word in words))
    chart = dot_chart(
        f"Ours against the print; on the line: equal, shade: within {TOLERANCE} points",
        dots,
        x,
        y,
        alt=alt,
        key=colours,
        lines=[("edge", (low, high), (low, high))],
        band=band,
        height=320,
        square=True,
    )
    return f'<div class="charts">{chart}</div>{key}'


def _linear(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, list[tuple[float, str]]]:
    values = [v for pair in pairs for v in pair]
    room = max(0.05 * (max(values) - min(values)), TOLERANCE)
    low, high = min(values) - room, max(values) + room
    return low, high, [(t, f"{t:g}") for t in charts.nice_ticks(low, high, 5)]


def _key(found: Reproduction) -> str:
    words = [("ring", "soft", "printed"), ("dot", "c0", f"ours, protocol {found.rules[0]}")]
    words += [("box", "c3", f"ours, {STRICT}")] if STRICT in found.rules else []
    return (
        mark_key(*words) + '<p class="note">Bars: one standard deviation, where there is one.</p>'
    )


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
    return Number(
        mean / scale,
        None if std is None else std / scale,
        tuple(value / scale for value in values),
    )
