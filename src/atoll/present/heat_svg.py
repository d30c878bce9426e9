"""Draws heat maps into a page: small ones as tables with their numbers, large ones as pictures."""

from __future__ import annotations

import math
from html import escape

import numpy as np

from atoll.present.chart import Chart, Heat
from atoll.present.chart_svg import json_text

TABLE_ROWS, TABLE_COLUMNS = 40, 14
"""Largest matrix that is written as a table with numbers; larger ones are pictures."""
MAX_SIDE = 60
"""Rows and columns of a picture."""


def heat_html(chart: Chart, *, digits: int = 2, note: str = "") -> str:
    """A chart of one heat map, with a note below; `digits` are for a map without words."""
    (heat,) = chart.marks
    assert isinstance(heat, Heat)
    matrix, high = heat.values, heat.top
    shade = np.clip((matrix - heat.low) / ((high - heat.low) or 1.0), 0, 1)
    if matrix.shape[0] > TABLE_ROWS or matrix.shape[1] > TABLE_COLUMNS:
        body = _picture(chart, heat, shade, digits)
        note = f"Pale: {heat.low:.{digits}f}, strong: {high:.{digits}f}. {note}"
    else:
        body = _table(chart, heat, shade, digits)
    head = f"<figcaption>{escape(chart.title)}</figcaption>"
    note = escape(f"Rows: {chart.y.name}; columns: {chart.x.name}. {note}")
    return f'<figure class="heat">{head}{body}<p class="note">{note}</p></figure>'


def _table(chart: Chart, heat: Heat, shade: np.ndarray, digits: int) -> str:
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
                # Columns are narrow: ".43" for 0.43.
                text = text.replace("0.", ".", 1) if value else "0"
            cells += f'<td style="--v:{shade[r, c]:.2f}">{escape(text)}</td>'
        body += f'<tr><th scope="row">{rows[r]}</th>{cells}</tr>'
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{title}"><table '
        f'class="cells"><caption class="hidden">{title}: {chart.y.name}s as rows, {chart.x.name} '
        f'as columns</caption><thead><tr><td class="corner"></td>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _picture(chart: Chart, heat: Heat, shade: np.ndarray, digits: int) -> str:
    """One path for each of ten shades, which is small; the pointer's tooltip reads the numbers."""
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
