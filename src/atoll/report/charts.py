"""Charts as HTML and SVG that keep their text size at any width and take their colours from CSS.

An SVG with a viewBox scales its text with it, which is unreadable on a phone. Here lines live in a
stretched inner SVG (strokes do not scale), and everything that is read is HTML placed by percent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

STYLES = 8
"""Colours; further lines repeat them with other dashes."""
MAX_POINTS = 120
"""Points that a line is drawn with."""
LABEL_GAP = 15
"""Pixels between two labels."""


def style_class(style: int) -> str:
    """The class that gives colour and dash."""
    dash = style // STYLES % 3
    return f"c{style % STYLES}" + (f" d{dash}" if dash else "")


def chip(name: str, style: int) -> str:
    """A row's name with its colour beside it."""
    return f'<span class="chip {style_class(style)}"></span>{escape(name)}'


@dataclass(frozen=True, eq=False)
class Line:
    """One line: x and mean, (P,), and the lowest and highest seed."""

    name: str
    style: int
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers inside an interval, about so many."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(n * step, 10) for n in range(first, last + 1)]


def thinned(count: int, most: int = MAX_POINTS) -> np.ndarray:
    """Which of many points to draw: the first, the last, and evenly between."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_name: str,
    y_name: str,
    unit: str = "%",
    points: int = MAX_POINTS,
) -> str:
    """Lines with bands, a label at each end, and the data for the pointer's tooltip."""
    lines = [line for line in lines if np.isfinite(line.mean).any()]
    if not lines:
        return figure(title, "<p>No such number was measured.</p>")
    low, high = _vertical(lines)
    right = max(float(line.x[-1]) for line in lines) or 1.0
    left = min(float(line.x[0]) for line in lines)
    left = 0.0 if left < 0.05 * right else left
    wide = (right - left) or 1.0

    def px(x: np.ndarray) -> np.ndarray:
        return np.asarray(1000 * (x - left) / wide)

    def py(y: np.ndarray | float) -> np.ndarray:
        return np.asarray(1000 * (1 - (np.asarray(y) - low) / (high - low)))

    height = max(250, LABEL_GAP * len(lines) + 20)
    bands, paths, data = [], [], []
    for line in lines:
        keep = thinned(len(line.x), points)
        x, mean = px(line.x[keep]), py(line.mean[keep])
        known = np.isfinite(mean)
        kind = style_class(line.style)
        if (line.high > line.low).any():
            there, back = py(line.high[keep])[known], py(line.low[keep])[known][::-1]
            around = np.concatenate([x[known], x[known][::-1]])
            edge = _path(around, np.concatenate([there, back]))
            bands.append(f'<path class="band {kind}" d="{edge}z"/>')
        drawn = _path(x[known], mean[known])
        if known.sum() == 1:
            drawn += "h0"  # a round cap makes a point of it
        paths.append(f'<path class="line {kind}" d="{drawn}"/>')
        data.append(
            {
                "n": line.name,
                "c": kind,
                "x": [float(f"{v:.4g}") for v in line.x[keep]],
                "y": [round(float(v), 1) if np.isfinite(v) else None for v in line.mean[keep]],
                "l": [round(float(v), 1) if np.isfinite(v) else None for v in line.low[keep]],
                "h": [round(float(v), 1) if np.isfinite(v) else None for v in line.high[keep]],
            }
        )
    y_ticks, x_ticks = nice_ticks(low, high), nice_ticks(left, right, 4)
    grid = "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{float(py(t)) / 10:.2f}%" '
        f'y2="{float(py(t)) / 10:.2f}%"/>'
        for t in y_ticks
    )
    y_labels = "".join(f'<span style="top:{float(py(t)) / 10:.2f}%">{t:g}</span>' for t in y_ticks)
    x_labels = "".join(
        f'<span style="left:{100 * (t - left) / wide:.2f}%">{t:g}</span>' for t in x_ticks
    )
    body = (
        f'<div class="y-name">{escape(y_name)}{f", {unit}" if unit else ""}</div>'
        f'<div class="plot" style="--h:{height}px;--ends:{_ends_width(lines)}ch">'
        f'<div class="ys" aria-hidden="true">{y_labels}</div>'
        f'<div class="area" data-x="{escape(x_name)}" data-unit="{unit}" data-range="'
        f'{left:g} {right:g} {low:g} {high:g}">'
        f'<svg role="img" aria-label="{escape(_alt(title, lines, unit))}">{grid}'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">'
        f"{''.join(bands)}{''.join(paths)}</svg></svg>"
        f'<script type="application/json">{json_text(data)}</script></div>'
        f'<div class="ends" aria-hidden="true">{_ends(lines, py, height)}</div>'
        f'<div class="xs" aria-hidden="true">{x_labels}</div>'
        f'<div class="x-name">{escape(x_name)}</div></div>'
    )
    return figure(title, body, numbers=_line_numbers(title, lines, x_name))


def json_text(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _vertical(lines: Sequence[Line]) -> tuple[float, float]:
    """The vertical range: the climb of the first tenth of the rounds may be cut off."""
    later = [line.low[len(line.low) // 10 :] for line in lines]
    values = np.concatenate(later)
    low, high = float(np.nanmin(values)), max(float(np.nanmax(line.high)) for line in lines)
    room = max(0.04 * (high - low), 0.5)
    return low - room, high + room


def _path(x: np.ndarray, y: np.ndarray) -> str:
    points = [f"{a:.0f} {b:.0f}" for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    return "M" + "L".join(points)


def _ends_width(lines: Sequence[Line]) -> int:
    return min(18, max(len(line.name) for line in lines)) + 2


def _ends(lines: Sequence[Line], py: object, height: int) -> str:
    """A label beside the end of each line, moved apart where they would touch."""
    assert callable(py)
    last = [float(line.mean[np.isfinite(line.mean)][-1]) for line in lines]
    wanted = [float(py(value)) / 1000 * height for value in last]
    placed = spread_out(wanted, LABEL_GAP, height)
    return "".join(
        f'<span class="{style_class(line.style)}" style="top:{place:.0f}px" '
        f'title="{escape(line.name)}">{escape(line.name)}</span>'
        for line, place in zip(lines, placed, strict=True)
    )


def spread_out(wanted: Sequence[float], gap: float, height: float) -> list[float]:
    """Places near the wanted ones, at least `gap` apart, inside 0 to `height`."""
    order = np.argsort(wanted, kind="stable")
    placed = np.clip(np.asarray(wanted, dtype=float)[order], gap / 2, height - gap / 2)
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    for i in range(len(placed) - 1, -1, -1):
        limit = height - gap / 2 if i == len(placed) - 1 else placed[i + 1] - gap
        placed[i] = min(placed[i], limit)
    found = np.empty(len(placed))
    found[order] = placed
    return [float(place) for place in found]


def _alt(title: str, lines: Sequence[Line], unit: str) -> str:
    ends = ", ".join(
        f"{line.name} {line.mean[np.isfinite(line.mean)][-1]:.1f}{unit}" for line in lines
    )
    return f"Line chart: {title}. At the end: {ends}."


def _line_numbers(title: str, lines: Sequence[Line], x_name: str) -> str:
    """The lines as a table, for whoever cannot see them or wants numbers."""
    longest = max(lines, key=lambda line: len(line.x))
    marks = longest.x[np.unique(np.linspace(0, len(longest.x) - 1, 8).round().astype(int))]
    rows = []
    for line in lines:
        cells = []
        for mark in marks:
            place = int(np.searchsorted(line.x, mark))
            inside = place < len(line.x) and abs(line.x[place] - mark) <= 1e-9 * max(1.0, mark)
            at = line.mean[place] if inside else np.interp(mark, line.x, line.mean, right=np.nan)
            cells.append(f"{at:.1f}" if np.isfinite(at) else "–")
        rows.append([line.name, *cells])
    heads = [f"{mark:.4g}" for mark in marks]
    return table(f"{title}: means at some of the {x_name}s", ["", *heads], rows)


@dataclass(frozen=True)
class Wide:
    """The head of a column of strips or bars; `below` is HTML: a scale, or a key of colours."""

    text: str
    below: str


def key(**kinds: str) -> str:
    """What the colours of bars mean: class and name of each."""
    parts = [f'<i class="{kind}"></i>{escape(name)} ' for kind, name in kinds.items()]
    return f'<span class="key">{"".join(parts)}</span>'


def _head(head: str | Wide, number: bool) -> str:
    if isinstance(head, Wide):
        return f'<th scope="col" class="wide">{escape(head.text)}{head.below}</th>'
    return f'<th scope="col"{" class=n" if number else ""}>{escape(head)}</th>'


def table(
    caption: str,
    heads: Sequence[str | Wide],
    rows: Sequence[Sequence[str]],
    *,
    raw: bool = False,
    left: int = 1,
    label: str = "",
) -> str:
    """A table in a region that scrolls on its own; cells are text, or HTML if `raw`."""
    put = str if raw else escape
    head = "".join(_head(text, i >= left) for i, text in enumerate(heads))
    body = "".join(
        f'<tr><th scope="row">{put(row[0])}</th>'
        + "".join(
            f"<td{'' if i < left else ' class=n'}>{put(cell)}</td>"
            for i, cell in enumerate(row[1:], start=1)
        )
        + "</tr>"
        for row in rows
    )
    name = escape(label or caption)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(title: str, body: str, numbers: str = "") -> str:
    """A caption, what it is of, and the numbers behind it, folded."""
    more = f"<details><summary>Numbers</summary>{numbers}</details>" if numbers else ""
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{body}{more}</figure>'


def whisker(values: Sequence[float], low: float, high: float, style: int) -> str:
    """Seeds as dots, mean and standard deviation as a line with a mark, on a common scale."""
    wide = (high - low) or 1.0
    at = [100 * (v - low) / wide for v in values]
    mean = float(np.mean(at))
    kind = style_class(style)
    std = float(np.std(at, ddof=1)) if len(at) > 1 else 0.0
    bar = (
        f'<line class="bar {kind}" x1="{max(mean - std, 0):.1f}%" x2="{min(mean + std, 100):.1f}%" '
        'y1="50%" y2="50%"/>'
        if std
        else ""
    )
    dots = "".join(f'<circle class="seed {kind}" cx="{x:.1f}%" cy="50%" r="3"/>' for x in at)
    mark = f'<circle class="mean {kind}" cx="{mean:.1f}%" cy="50%" r="5"/>'
    seeds = dots if len(at) > 1 else ""
    return f'<svg class="strip" aria-hidden="true">{_rules(low, high)}{bar}{seeds}{mark}</svg>'


def strip(values: np.ndarray, low: float, high: float, style: int) -> str:
    """Clients as dots (up to 200), quartiles as a box, the median as a line."""
    known = values[np.isfinite(values)]
    if not known.size:
        return ""
    wide = (high - low) or 1.0
    quarter = 100 * (np.quantile(known, [0.05, 0.25, 0.5, 0.75, 0.95]) - low) / wide
    kind = style_class(style)
    box = (
        f'<rect class="box {kind}" x="{quarter[1]:.1f}%" width="{quarter[3] - quarter[1]:.1f}%" '
        f'y="20%" height="60%" rx="3"/>'
    )
    if known.size <= 200:
        marks = "".join(
            f'<circle class="dot {kind}" cx="{100 * (v - low) / wide:.1f}%" cy="50%" r="3.2">'
            f"<title>client {client}: {v:.1f}</title></circle>"
            for client, v in enumerate(values.tolist())
            if np.isfinite(v)
        )
    else:
        marks = _rule(f"bar {kind}", quarter[[0, 4]], (50, 50))
    middle = _rule(f"median {kind}", quarter[[2, 2]], (12, 88))
    rules = _rules(low, high)
    return f'<svg class="strip tall" aria-hidden="true">{rules}{box}{marks}{middle}</svg>'


def _rule(kind: str, x: np.ndarray, y: tuple[int, int]) -> str:
    """A line from one place to another, in percent."""
    return f'<line class="{kind}" x1="{x[0]:.1f}%" x2="{x[1]:.1f}%" y1="{y[0]}%" y2="{y[1]}%"/>'


def _rules(low: float, high: float) -> str:
    """Lines at the marks of `scale`, from one row of a table to the next."""
    places = [100 * (t - low) / ((high - low) or 1.0) for t in nice_ticks(low, high, 4)]
    return "".join(_rule("grid", np.array([x, x]), (-40, 140)) for x in places)


def scale(low: float, high: float) -> str:
    """The head of a column of strips: what its left and right end are."""
    ticks = nice_ticks(low, high, 4)
    wide = (high - low) or 1.0
    marks = "".join(f'<span style="left:{100 * (t - low) / wide:.1f}%">{t:g}</span>' for t in ticks)
    return f'<span class="scale" aria-hidden="true">{marks}</span>'


def bars(parts: Sequence[tuple[float, str]], top: float) -> str:
    """Bars end to end: (amount, class) each, as shares of `top`."""
    start, out = 0.0, []
    for amount, kind in parts:
        width = 100 * amount / top if top else 0.0
        out.append(
            f'<rect class="{kind}" x="{start:.2f}%" width="{width:.2f}%" y="25%" height="50%"/>'
        )
        start += width
    return f'<svg class="strip" aria-hidden="true">{"".join(out)}</svg>'


def spark(values: np.ndarray, alt: str) -> str:
    """A small line without axes."""
    keep = thinned(len(values))
    top = float(values.max()) or 1.0
    x = 1000 * keep / max(1, len(values) - 1)
    path = _path(x, 950 - 900 * values[keep] / top)
    return (
        f'<svg class="spark" role="img" aria-label="{escape(alt)}" viewBox="0 0 1000 1000" '
        f'preserveAspectRatio="none"><path class="line" d="{path}h1"/></svg>'
    )
