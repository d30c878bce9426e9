"""Draw charts into a page: HTML and SVG that take their colours from CSS.

An SVG with a viewBox scales its text, which is unreadable on a phone. Therefore only lines and
areas are in a stretched inner SVG, because strokes can have a fixed width. All text is HTML or SVG
with positions in percent. Charts work without a script, and include their names and numbers. A
script can add tooltips from the JSON next to a line chart. Small heat maps are tables with numbers,
and large ones are pictures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape

import numpy as np

from atoll.present import chart as plot
from atoll.present.chart import Area, Axis, Bars, Chart, Dots, Heat, Line, Mark, Numbers, Rule
from atoll.present.tables import Table, html, make_table

MAX_POINTS = 120  # maximum number of points of a line
LABEL_GAP = 15  # pixels between two labels of one line
LETTERS = 18  # of a line of a label; longer labels have two lines
TABLE_ROWS, TABLE_COLUMNS = 40, 14
"""Largest matrix that becomes a table with numbers. Larger matrices become pictures."""
MAX_SIDE = 60  # maximum rows and columns of a picture of a matrix
PLAIN = Axis("", 0.0, 1.0, ticks=())
"""The vertical axis of a strip: 0 is its lower edge and 1 is its upper edge."""
OUTLINES = {"box": "M-{r} -{r}H{r}V{r}H-{r}z", "cross": "M-{r} -{r}L{r} {r}M-{r} {r}L{r} -{r}"}
"""Paths of the shapes that are not circles. `r` is half their size."""


def _classes(mark: Line) -> str:
    """Return the CSS classes for colour and dash."""
    return mark.colour + (f" d{mark.dash}" if mark.dash else "")


def figure(title: str, body: str, numbers: Table | None = None) -> str:
    """Make a figure: a caption, the body, and a collapsed table of its numbers."""
    more = f"<details><summary>Numbers</summary>{html(numbers)}</details>" if numbers else ""
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{body}{more}</figure>'


def chart_html(
    chart: Chart, *, height: int = 220, points: int = MAX_POINTS, numbers: Table | None = None
) -> str:
    """Render a chart of this height in pixels, with axes and at most `points` points per line.

    If `legend` is "ends", the names of lines are next to their ends.
    """
    lines = [mark for mark in chart.marks if isinstance(mark, Line) and mark.name]
    key, ends, size = "", "", f"--h:{height}px"
    if chart.legend == "ends" and lines:
        longest = max(len(line.name) for line in lines)
        gaps = [LABEL_GAP * (1 if len(line.name) <= LETTERS else 2) for line in lines]
        height = max(height, sum(gaps) + 20)
        ends, kind = _ends(lines, chart.y, height, gaps), "plot"
        size = f"--h:{height}px;--ends:{min(LETTERS, longest) + 2}ch"
    else:
        lines, key = [], key_html(chart.marks) if chart.legend else ""
        kind = "plot bare square" if chart.square else "plot bare"
    body = (
        f'{key}<div class="y-name">{escape(chart.y.name)}</div><div class="{kind}" style="{size}">'
        f'<div class="ys" aria-hidden="true">{_tick_words(chart.y, "top")}</div>'
        f"{_field(chart, lines, points)}{ends}"
        f'<div class="xs" aria-hidden="true">{_tick_words(chart.x, "left")}</div>'
        f'<div class="x-name">{escape(chart.x.name)}</div></div>'
    )
    return figure(chart.title, body, numbers)


def _tick_words(axis: Axis, side: str, digits: int = 2) -> str:
    """Render the labels of the ticks, with positions from the left or from the top."""
    return "".join(
        f'<span style="{side}:{place:.{digits}f}%">{escape(text)}</span>'
        for place, (_, text) in zip(_tick_places(axis, side), axis.ticks or (), strict=True)
    )


def _tick_places(axis: Axis, side: str) -> list[float]:
    found = [axis.percent(at) for at, _ in axis.ticks or ()]
    return [100 - place for place in found] if side == "top" else found


def _field(chart: Chart, lines: Sequence[Line], points: int) -> str:
    """Render the area between the axes. For lines with tooltips, add their data as JSON."""
    places = _tick_places(chart.y, "top") if chart.grid else []
    grid = "".join(_segment("grid", (0, 100), (place, place)) for place in places)
    alt = escape(chart.alt or chart.title)
    svg = f'<svg role="img" aria-label="{alt}">{grid}{svg_marks(chart, points)}</svg>'
    if not lines:
        return f'<div class="field">{svg}</div>'
    x, y = chart.x, chart.y
    unit = "%" if y.name.endswith("%") else ""
    return (
        f'<div class="area" data-x="{escape(x.name)}" data-unit="{unit}" data-range="'
        f'{x.low:g} {x.high:g} {y.low:g} {y.high:g}">{svg}'
        f'<script type="application/json">{json_text(_readings(lines, points))}</script></div>'
    )


def _readings(lines: Sequence[Line], points: int) -> list[dict[str, object]]:
    """Return the lines' data for a tooltip: name, classes, positions, means, lows and highs."""
    found: list[dict[str, object]] = []
    for line in lines:
        keep = thinned(len(line.x), points)
        low, high = (line.y if edge is None else edge for edge in (line.low, line.high))
        columns = {
            name: [round(float(v), 1) if np.isfinite(v) else None for v in np.asarray(of)[keep]]
            for name, of in (("y", line.y), ("l", low), ("h", high))
        }
        places = [float(f"{v:.4g}") for v in np.asarray(line.x)[keep]]
        found.append({"n": line.name, "c": _classes(line), "x": places, **columns})
    return found


def json_text(data: object) -> str:
    """Return JSON that cannot close the script element around it."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def thinned(count: int, most: int = MAX_POINTS) -> np.ndarray:
    """Return the indices of the points to draw: first, last, and evenly spaced between them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def svg_marks(chart: Chart, points: int = MAX_POINTS) -> str:
    """Render the marks of a chart. Only lines and areas are stretched."""
    stretched, placed = [], []
    for mark in chart.marks:
        match mark:
            case Area():
                stretched.append(_surface(mark, chart))
            case Line() if chart.bare and len(mark.x) == 2:
                ends = _percents(chart, mark.x, mark.y)
                placed.append(_segment(f"bar {_classes(mark)}", *ends, mark.width))
            case Line():
                stretched.append(_curve(mark, chart, points))
            case Bars():
                placed += _columns(mark, chart)
            case Dots():
                placed += _points(mark, chart)
            case Rule(upright=True, to=float(to)) if chart.bare:  # also into neighbouring rows
                edges, _ = _percents(chart, (mark.at, to), ())
                placed.append(_rectangle(mark.colour, edges, (-20, 120)))
            case _:
                raise TypeError(f"no page draws {mark}; heat_html draws a heat map")
    inner = ""
    if stretched:
        size = 'viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%"'
        inner = f"<svg {size}>{''.join(stretched)}</svg>"
    return inner + "".join(placed)


def _percents(chart: Chart, xs: Numbers, ys: Numbers) -> tuple[list[float], list[float]]:
    """Return positions in percent, from the left and from the top."""
    return [chart.x.percent(v) for v in xs], [100 - chart.y.percent(v) for v in ys]


def _curve(line: Line, chart: Chart, points: int) -> str:
    """Render a line and, behind it, its band."""
    keep = thinned(len(line.x), points)
    xs, ys = np.asarray(line.x, dtype=float)[keep], np.asarray(line.y, dtype=float)[keep]
    known = np.isfinite(ys)
    kind, xs = _classes(line), xs[known]
    band = ""
    if line.low is not None and line.high is not None:
        low, high = (np.asarray(edge, dtype=float)[keep][known] for edge in (line.low, line.high))
        if (high > low).any():
            band = _surface(Area(xs, low, high, f"band {kind}"), chart)
    path = _path(xs, ys[known], chart)
    path += "h0" if known.sum() == 1 else ""  # a round line cap draws a single point
    return f'{band}<path class="line {kind}"{_stroke(line.width)} d="{path}"/>'


def _surface(area: Area, chart: Chart) -> str:
    along, low, high = (np.asarray(v, dtype=float) for v in (area.x, area.low, area.high))
    around, edge = np.concatenate([along, along[::-1]]), np.concatenate([high, low[::-1]])
    path = _path(edge, around, chart) if area.across else _path(around, edge, chart)
    return f'<path class="surface {area.colour}"{_faint(area.opacity)} d="{path}z"/>'


def _path(xs: Numbers, ys: Numbers, chart: Chart) -> str:
    """Return a path through points in thousandths of the chart. The inner SVG clips it."""
    return "M" + "L".join(
        f"{10 * chart.x.part(a):.0f} {1000 - 10 * chart.y.part(b):.0f}"
        for a, b in zip(xs, ys, strict=True)
    )


def _stroke(width: float) -> str:
    return f' style="stroke-width:{width:g}"' if width != 1.8 else ""


def _faint(opacity: float) -> str:
    return f' opacity="{opacity:g}"' if opacity < 1 else ""


def _segment(kind: str, xs: Sequence[float], ys: Sequence[float], width: float = 1.8) -> str:
    """Render a straight line between two positions in percent."""
    places = f'x1="{xs[0]:.2f}%" x2="{xs[1]:.2f}%" y1="{ys[0]:.2f}%" y2="{ys[1]:.2f}%"'
    return f'<line class="{kind}"{_stroke(width)} {places}/>'


def _rectangle(kind: str, xs: Sequence[float], ys: Sequence[float], opacity: float = 1.0) -> str:
    """Render a rectangle between two positions on each axis, in percent."""
    place = f'x="{min(xs):.2f}%" y="{min(ys):.2f}%"'
    size = f'width="{abs(xs[1] - xs[0]):.2f}%" height="{abs(ys[1] - ys[0]):.2f}%"'
    return f'<rect class="surface {kind}"{_faint(opacity)} {place} {size}/>'


def _columns(bars: Bars, chart: Chart) -> list[str]:
    found = []
    for at, *ends in zip(bars.at, bars.starts, bars.ends, strict=True):
        sides = (at - bars.width / 2, at + bars.width / 2), ends
        places = _percents(chart, *(sides[::-1] if bars.across else sides))
        found.append(_rectangle(bars.colour, *places, bars.opacity))
    return found


def _points(dots: Dots, chart: Chart) -> list[str]:
    """Render marks at positions in percent that keep their size."""
    tips = list(dots.tips) or [""] * len(dots.x)
    places = zip(*_percents(chart, dots.x, dots.y), tips, strict=True)
    return [_mark(dots, *place) for place in places]


def _mark(dots: Dots, x: float, y: float, tip: str = "") -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    kinds = f'class="mark as-{dots.shape} {dots.colour}"{_faint(dots.opacity)}'
    radius = f"{dots.size / 2:g}"
    if dots.shape in ("dot", "ring"):
        return f'<circle {kinds} cx="{x:.2f}%" cy="{y:.2f}%" r="{radius}">{title}</circle>'
    outline = f'<path d="{OUTLINES[dots.shape].format(r=radius)}"/>'
    return f'<svg {kinds} x="{x:.2f}%" y="{y:.2f}%">{title}{outline}</svg>'


def _ends(lines: Sequence[Line], y: Axis, height: int, gaps: Sequence[int]) -> str:
    """Render a label next to the end of each line, and separate labels that would overlap."""
    wanted = [(100 - y.percent(last_value(line))) / 100 * height for line in lines]
    labels = ""
    for line, place in zip(lines, spread_out(wanted, gaps, height), strict=True):
        name, style = escape(line.name), f'class="{_classes(line)}" style="top:{place:.0f}px"'
        labels += f'<span {style} title="{name}">{name}</span>'
    return f'<div class="ends" aria-hidden="true">{labels}</div>'


def last_value(line: Line) -> float:
    """Return the last finite value of a line."""
    values = np.asarray(line.y, dtype=float)
    return float(values[np.isfinite(values)][-1])


def spread_out(wanted: Numbers, gaps: float | Sequence[float], height: float) -> list[float]:
    """Return positions of labels near the wanted ones, inside 0 to `height`.

    `gaps` are the heights of the labels, or of every label.
    """
    order = np.argsort(wanted, kind="stable")
    half = np.broadcast_to(np.asarray(gaps) / 2, len(order))[order]
    placed = np.clip(np.asarray(wanted, dtype=float)[order], half, height - half)
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + half[i - 1] + half[i])
    limit = height
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], limit - half[i])
        limit = placed[i] - half[i]
    found = np.empty(len(placed))
    found[order] = placed
    return [float(place) for place in found]


def line_numbers(title: str, lines: Sequence[Line], x_name: str) -> Table:
    """Make a table of the lines' values at up to eight positions."""
    longest = np.asarray(max((line.x for line in lines), key=len))
    marks = longest[thinned(len(longest), 8)]
    rows = []
    for line in lines:
        values = [line.name]
        for mark in marks:
            place = int(np.searchsorted(line.x, mark))
            inside = place < len(line.x) and abs(line.x[place] - mark) <= 1e-9 * max(1.0, mark)
            at = line.y[place] if inside else np.interp(mark, line.x, line.y, right=np.nan)
            values.append(plot.number_text(float(at), 1))
        rows.append(values)
    heads = [f"{mark:.4g}" for mark in marks]
    return make_table(["", *heads], rows, title=f"{title}: means at some of the {x_name}s")


def strip_svg(kind: str, x: Axis, marks: Iterable[Mark]) -> str:
    """Render a chart without axes for a table cell, with lines at the ticks."""
    chart = Chart("", x, PLAIN, tuple(marks), bare=True)
    rules = (_segment("grid", (place, place), (-40, 140)) for place in _tick_places(x, "left"))
    return f'<svg class="{kind}" aria-hidden="true">{"".join(rules)}{svg_marks(chart)}</svg>'


def scale_html(axis: Axis) -> str:
    """Render the ticks of a column of strips, for its heading."""
    return f'<span class="scale" aria-hidden="true">{_tick_words(axis, "left", 1)}</span>'


def key_html(marks: Iterable[Mark]) -> str:
    """Render the legend of shapes and colours: every dot with a name."""
    parts = []
    for mark in marks:
        if isinstance(mark, Dots) and mark.name:
            sample = _mark(replace(mark, size=9, opacity=1.0), 50, 50)
            parts.append(f'<span><svg aria-hidden="true">{sample}</svg>{escape(mark.name)}</span>')
    return f'<p class="marks">{" ".join(parts)}</p>' if parts else ""


def swatches(bars: Iterable[Bars]) -> str:
    """Render the legend of the bars' colours, for the heading of a column."""
    named = (one for one in bars if one.name)
    styles = ((f'class="{one.colour}" style="opacity:{one.opacity:g}"', one.name) for one in named)
    parts = " ".join(f"<span><i {style}></i>{escape(name)}</span>" for style, name in styles)
    return f'<span class="key">{parts}</span>'


def spark_svg(values: np.ndarray, alt: str) -> str:
    """Render a small line without axes."""
    top = float(values.max()) or 1.0
    x, y = Axis("", 0.0, max(1.0, len(values) - 1.0)), Axis("", -0.05 * top, 1.05 * top)
    path = _curve(Line(np.arange(len(values)), values, "soft"), Chart("", x, y, ()), MAX_POINTS)
    about = f'class="spark" role="img" aria-label="{escape(alt)}"'
    return f'<svg {about} viewBox="0 0 1000 1000" preserveAspectRatio="none">{path}</svg>'


def heat_html(chart: Chart, *, digits: int = 2, note: str = "") -> str:
    """Render a heat map and a note, with `digits` decimals. A small map may show `words`."""
    (heat,) = chart.marks
    assert isinstance(heat, Heat)
    matrix, high = heat.values, heat.top
    shade = np.clip((matrix - heat.low) / ((high - heat.low) or 1.0), 0, 1)
    if matrix.shape[0] > TABLE_ROWS or matrix.shape[1] > TABLE_COLUMNS:
        body = _heat_picture(chart, heat, shade, digits)
        note = f"Pale: {heat.low:.{digits}f}, strong: {high:.{digits}f}. {note}"
    else:
        body = _heat_table(chart, heat, shade, digits)
    head = f"<figcaption>{escape(chart.title)}</figcaption>"
    note = escape(f"Rows: {chart.y.name}; columns: {chart.x.name}. {note}")
    return f'<figure class="heat">{head}{body}<p class="note">{note}</p></figure>'


def _heat_table(chart: Chart, heat: Heat, shade: np.ndarray, digits: int) -> str:
    title, body = escape(chart.title), ""
    rows, columns = (
        [escape(word) for _, word in axis.ticks] if axis.ticks else [*map(str, range(size))]
        for axis, size in zip((chart.y, chart.x), heat.values.shape, strict=True)
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    for r, line in enumerate(heat.values):
        cells = ""
        for c, value in enumerate(line):
            if not np.isfinite(value):
                cells += '<td class="none">–</td>'
                continue
            text = f"{value:.{digits}f}" if heat.words is None else str(heat.words[r, c])
            if heat.words is None and abs(value) < 1 and digits:
                # Columns are narrow, so 0.43 becomes ".43".
                text = text.replace("0.", ".", 1) if value else "0"
            cells += f'<td style="--v:{shade[r, c]:.2f}">{escape(text)}</td>'
        body += f'<tr><th scope="row">{rows[r]}</th>{cells}</tr>'
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{title}"><table '
        f'class="cells"><caption class="hidden">{title}: {chart.y.name}s as rows, {chart.x.name} '
        f'as columns</caption><thead><tr><td class="corner"></td>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _heat_picture(chart: Chart, heat: Heat, shade: np.ndarray, digits: int) -> str:
    """Draw one path for each of ten shades, which keeps the file small. Tooltips show numbers."""
    matrix, rows, columns = heat.values, chart.y.name, chart.x.name
    cut = matrix[:MAX_SIDE, :MAX_SIDE]
    levels = np.where(np.isfinite(cut), np.round(9 * shade[:MAX_SIDE, :MAX_SIDE]), -1)
    paths = ""
    for level in range(10):
        places = np.argwhere(levels == level)
        if len(places):
            d = "".join(f"M{c} {r}h1v1h-1z" for r, c in places.tolist())
            paths += f'<path fill-opacity="{0.06 + 0.94 * level / 9:.2f}" d="{d}"/>'
    height, width = cut.shape
    side = min(18.0, 480 / max(width, height))
    values = [[round(v, digits + 1) if math.isfinite(v) else None for v in r] for r in cut.tolist()]
    cut_off = f'<p class="note">The first {MAX_SIDE} of {max(matrix.shape)}.</p>'
    more = cut_off if max(matrix.shape) > MAX_SIDE else ""
    known = cut[np.isfinite(cut)]
    alt = f"{chart.title}: {height} {rows}s by {width}, from {known.min():.2f} to {known.max():.2f}"
    return (
        f'<div class="picture" data-rows="{rows}" data-columns="{columns}" '
        f'style="width:min(100%,{width * side:.0f}px)"><svg role="img" aria-label="{escape(alt)}" '
        f'viewBox="0 0 {width} {height}" shape-rendering="crispEdges">{paths}</svg>'
        f'<script type="application/json">{json_text(values)}</script></div>{more}'
    )
