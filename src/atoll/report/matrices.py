"""Matrices as shades: small ones as tables with their numbers, large ones as pictures."""

from __future__ import annotations

import math
from html import escape

import numpy as np

from atoll.report.charts import json_text

TABLE_ROWS, TABLE_COLUMNS = 40, 14
"""Largest matrix that is written as a table with numbers; larger ones are pictures."""
MAX_SIDE = 60
"""Rows and columns of a picture."""


def heat_map(
    title: str,
    matrix: np.ndarray,
    *,
    rows: str = "client",
    columns: str = "client",
    digits: int = 2,
    low: float | None = None,
    high: float | None = None,
    texts: np.ndarray | None = None,
    note: str = "",
) -> str:
    """A matrix as shades: a table with its numbers if it is small, else a picture."""
    known = matrix[np.isfinite(matrix)]
    low = float(known.min(initial=0.0) if low is None else low) if known.size else 0.0
    high = float(known.max()) if high is None and known.size else float(high or 1.0)
    shade = np.clip((matrix - low) / ((high - low) or 1.0), 0, 1)
    large = matrix.shape[0] > TABLE_ROWS or matrix.shape[1] > TABLE_COLUMNS
    if large:
        body = _picture(shade, matrix, rows, columns, digits, title)
    else:
        body = _heat_table(shade, matrix, texts, rows, columns, digits, title)
    if large:
        note = f"Pale: {low:.{digits}f}, strong: {high:.{digits}f}. {note}"
    note = f"Rows: {rows}; columns: {columns}. {note}"
    small = f'<p class="note">{escape(note)}</p>'
    return f'<figure class="heat"><figcaption>{escape(title)}</figcaption>{body}{small}</figure>'


def _heat_table(
    shade: np.ndarray,
    matrix: np.ndarray,
    texts: np.ndarray | None,
    rows: str,
    columns: str,
    digits: int,
    title: str,
) -> str:
    head = "".join(f'<th scope="col">{c}</th>' for c in range(matrix.shape[1]))
    body = ""
    for r, line in enumerate(matrix):
        cells = ""
        for c, value in enumerate(line):
            if not np.isfinite(value):
                cells += '<td class="none">–</td>'
                continue
            text = texts[r, c] if texts is not None else _short(float(value), digits)
            cells += f'<td style="--v:{shade[r, c]:.2f}">{escape(str(text))}</td>'
        body += f'<tr><th scope="row">{r}</th>{cells}</tr>'
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}"><table '
        f'class="cells"><caption class="hidden">{escape(title)}: {rows}s as rows, {columns} as '
        f'columns</caption><thead><tr><td class="corner"></td>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _short(value: float, digits: int) -> str:
    """`.43` for 0.43: columns of a matrix are narrow."""
    if value == 0:
        return "0"
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 and digits else text


def _picture(
    shade: np.ndarray, matrix: np.ndarray, rows: str, columns: str, digits: int, title: str
) -> str:
    """One path for each of ten shades, which is small; the pointer's tooltip reads the numbers."""
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
    more = ""
    if max(matrix.shape) > MAX_SIDE:
        more = f'<p class="note">The first {MAX_SIDE} of {max(matrix.shape)}.</p>'
    known = cut[np.isfinite(cut)]
    alt = f"{title}: {height} {rows}s by {width}, from {known.min():.2f} to {known.max():.2f}"
    return (
        f'<div class="picture" data-rows="{rows}" data-columns="{columns}" '
        f'style="width:min(100%,{width * side:.0f}px)"><svg role="img" aria-label="{escape(alt)}" '
        f'viewBox="0 0 {width} {height}" shape-rendering="crispEdges">{paths}</svg>'
        f'<script type="application/json">{json_text(values)}</script></div>{more}'
    )
