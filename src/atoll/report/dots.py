"""Charts of dots: what was tried against what came of it, ours against the print.

As in `charts`, lines live in a stretched inner SVG and everything that is read is HTML placed by
percent, so that text and marks keep their size at any width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from atoll.report.charts import figure, nice_ticks

LOG_FROM = 30.0
"""Positive numbers that differ by this factor are shown on a logarithmic axis."""


@dataclass(frozen=True)
class Dot:
    """One mark: where, in which colour, one of `SHAPES`, and what its tooltip says."""

    x: float
    y: float
    kind: str
    shape: str
    text: str


@dataclass(frozen=True)
class Axis:
    """A range of numbers and the marks on it, each a place and what stands there."""

    name: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def percent(self, value: float) -> float:
        """Where a number lies; what is outside lies on the edge."""
        ends = (self.low, self.high, value)
        low, high, at = (math.log10(v) for v in ends) if self.log else ends
        return float(np.clip(100 * (at - low) / ((high - low) or 1.0), 0, 100))


def axis(name: str, values: Sequence[float], *, room: float = 0.06, marks: int = 4) -> Axis:
    """An axis that holds these numbers, logarithmic where they are far apart."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= LOG_FROM:
        wide = (high / low) ** room
        low, high = low / wide, high * wide
        return Axis(name, low, high, _decades(low, high, marks), log=True)
    wide = (room * (high - low)) or abs(high) * room or 1.0
    low, high = low - wide, high + wide
    return Axis(name, low, high, [(t, short(t)) for t in nice_ticks(low, high, marks)])


def words_axis(name: str, words: Sequence[str]) -> Axis:
    """An axis of words, each at its number."""
    return Axis(name, -0.5, len(words) - 0.5, list(enumerate(words)))


def _decades(low: float, high: float, marks: int) -> list[tuple[float, str]]:
    """Powers of ten, or with few of them their halves and doubles as well; not too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5)):
        found = [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]
        if len(found) >= 3:
            break
    every = -(-len(found) // (marks + 1))
    return [(value, short(value)) for value in found[::every]]


def short(value: float) -> str:
    """`1e-5`, `0.01`, `64`."""
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")


def dot_chart(
    title: str,
    dots: Sequence[Dot],
    x: Axis,
    y: Axis,
    *,
    alt: str,
    key: str = "",
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]] = (),
    band: str = "",
    height: int = 220,
    numbers: str = "",
    square: bool = False,
) -> str:
    """Dots over two axes, with lines (class, x, y) below them.

    Args:
        title: Its caption.
        dots: The last one is on top.
        x: Below.
        y: On the left.
        alt: What it shows, for whoever cannot see it.
        key: HTML that says what colours and marks mean.
        lines: A class, and where the line goes.
        band: The path of a shade below everything, in thousandths of the chart.
        height: In pixels.
        numbers: A table of what is drawn, folded.
        square: Whether both axes are the same, so that it should not be wide.
    """
    rules = "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{100 - y.percent(at):.2f}%" '
        f'y2="{100 - y.percent(at):.2f}%"/>'
        for at, _ in y.ticks
    )
    shade = f'<path class="shade" d="{band}"/>' if band else ""
    drawn = "".join(
        f'<path class="line {kind}" d="{path(xs, ys, x, y)}"/>' for kind, xs, ys in lines
    )
    marks = "".join(
        mark(dot.shape, dot.kind, x.percent(dot.x), 100 - y.percent(dot.y), dot.text)
        for dot in dots
    )
    x_labels = "".join(
        f'<span style="left:{x.percent(at):.2f}%">{escape(text)}</span>' for at, text in x.ticks
    )
    y_labels = "".join(
        f'<span style="top:{100 - y.percent(at):.2f}%">{escape(text)}</span>'
        for at, text in y.ticks
    )
    body = (
        f'{key}<div class="y-name">{escape(y.name)}</div>'
        f'<div class="plot bare{" square" if square else ""}" style="--h:{height}px">'
        f'<div class="ys" aria-hidden="true">{y_labels}</div>'
        f'<div class="field"><svg role="img" aria-label="{escape(alt)}">{rules}'
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">'
        f"{shade}{drawn}</svg>{marks}</svg></div>"
        f'<div class="xs" aria-hidden="true">{x_labels}</div>'
        f'<div class="x-name">{escape(x.name)}</div></div>'
    )
    return figure(title, body, numbers)


def path(xs: Sequence[float], ys: Sequence[float], x: Axis, y: Axis) -> str:
    """A line through points, in thousandths of the chart."""
    places = [
        f"{10 * x.percent(a):.0f} {1000 - 10 * y.percent(b):.0f}"
        for a, b in zip(xs, ys, strict=True)
    ]
    return "M" + "L".join(places)


SHAPES = {
    "dot": '<circle r="4.5"/>',
    "ring": '<circle r="4.5"/>',
    "box": '<rect x="-4" y="-4" width="8" height="8"/>',
    "cross": '<path d="M-3.5 -3.5L3.5 3.5M-3.5 3.5L3.5 -3.5"/>',
}


def mark(shape: str, kind: str, x: float, y: float, text: str = "") -> str:
    """A mark that is placed by percent and keeps its size."""
    title = f"<title>{escape(text)}</title>" if text else ""
    place = f'x="{x:.2f}%" y="{y:.2f}%"'
    return f'<svg class="mark as-{shape} {kind}" {place}>{title}{SHAPES[shape]}</svg>'


def mark_key(*kinds: tuple[str, str, str]) -> str:
    """What marks mean: shape, class and words of each."""
    parts = [
        f'<span><svg aria-hidden="true">{mark(shape, kind, 50, 50)}</svg>{escape(words)}</span>'
        for shape, kind, words in kinds
    ]
    return f'<p class="marks">{" ".join(parts)}</p>'
