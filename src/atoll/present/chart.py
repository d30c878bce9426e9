"""The data classes of charts: axes and marks. Two renderers draw them.

`chart_png` draws them into files (matplotlib), `chart_svg` into the page of `atoll report` (colours
from CSS, text that keeps its size on a narrow screen). Among marks of one kind, later ones cover
earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Numbers = Sequence[float] | np.ndarray

PALETTE = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7")
"""Eight colours that readers with any colour vision can distinguish. Each renderer defines them."""
BLUE, ORANGE, GREEN, RED = "c0", "c1", "c2", "c5"
BLACK, SOFT, EDGE, GREY, SHADE = "black", "soft", "edge", "grey", "shade"
"""Text, secondary text, guide lines, marks without a colour, and backgrounds."""
SOLID, DASHED, DOTTED, DASH_DOT = range(4)
SHAPES = ("dot", "box", "diamond", "up", "down", "plus", "star", "cross", "left", "right", "ring")
MAX_ROWS = 40
"""Maximum rows of a heat map with numbers, and of a table. JSON files contain all rows."""
LOG_FROM = 30.0  # ratio of the largest to the smallest number that needs a logarithmic axis


@dataclass(frozen=True)
class Axis:
    """A range of numbers. The renderer chooses the fields that are None."""

    name: str = ""  # with the unit
    low: float | None = None  # the left or lower end; if it exceeds `high`, the axis is reversed
    high: float | None = None
    log: bool = False
    ticks: Sequence[tuple[float, str]] | None = None  # positions and their labels
    whole: bool = False  # automatic ticks are whole numbers
    form: str = ""  # format of automatic ticks, as for `str.format`: "{x:,g}"
    room: float | None = None  # free space next to the marks, as a fraction of their range

    def percent(self, value: float) -> float:
        """Return the position between `low` and `high` in percent, clipped to the edges."""
        return float(np.clip(self.part(value), 0, 100))

    def part(self, value: float) -> float:
        """Return the position of a number in percent, also beyond the edges."""
        assert self.low is not None
        assert self.high is not None
        ends = (self.low, self.high, value)
        low, high, at = (math.log10(v) for v in ends) if self.log else ends
        return 100 * (at - low) / ((high - low) or 1.0)


@dataclass(frozen=True, eq=False)
class Line:
    """A line through points. `low` and `high` add a band around it."""

    x: Numbers
    y: Numbers  # a value that is not finite makes a gap
    colour: str = BLUE  # one of `PALETTE` or of the greys
    name: str = ""  # in the legend
    low: Numbers | None = None
    high: Numbers | None = None
    dash: int = SOLID
    width: float = 1.8  # in points
    shape: str = ""  # the mark at each point, one of `SHAPES`
    opacity: float = 1.0


@dataclass(frozen=True, eq=False)
class Area:
    """The area between two lines. With `across`, `x` is on the vertical axis."""

    x: Numbers
    low: Numbers
    high: Numbers
    colour: str = SHADE
    name: str = ""
    opacity: float = 1.0
    across: bool = False


@dataclass(frozen=True, eq=False)
class Bars:
    """Vertical bars, or horizontal bars with `across`."""

    at: Numbers  # positions on the axis with labels
    length: Numbers
    start: Numbers | float = 0.0  # 0, or the ends of the bars below, for stacked bars
    width: float = 0.8
    colour: str = BLUE
    name: str = ""
    spread: Numbers | None = None  # half the length of the whiskers at the ends of the bars
    across: bool = False
    opacity: float = 1.0
    hatched: bool = False

    @property
    def starts(self) -> np.ndarray:
        """The start of each bar."""
        return np.broadcast_to(np.asarray(self.start, dtype=float), np.shape(self.at))

    @property
    def ends(self) -> np.ndarray:
        """The end of each bar."""
        return np.asarray(self.starts + np.asarray(self.length))


@dataclass(frozen=True, eq=False)
class Dots:
    """Marks at points. `spread` adds vertical whiskers, and `tips` are tooltips."""

    x: Numbers
    y: Numbers
    colour: str = BLUE
    name: str = ""
    shape: str = "dot"  # one of `SHAPES`
    size: float = 5.0
    opacity: float = 1.0
    spread: Numbers | None = None
    tips: Sequence[str] = ()


@dataclass(frozen=True)
class Rule:
    """A straight line through the whole chart at one position, or a stripe up to `to`."""

    at: float
    upright: bool = False  # vertical: `at` is on the horizontal axis
    to: float | None = None
    colour: str = SOFT
    dash: int = SOLID
    width: float = 1.0  # in points; 0 draws only the text
    text: str = ""  # at its end, outside of the chart: above it, or to its right
    name: str = ""
    turned: bool = False  # rotate the text above the chart to save space


@dataclass(frozen=True, eq=False)
class Texts:
    """Text at points: "above", "right", "left", "corner" (above and right), or "centre"."""

    x: Numbers
    y: Numbers
    words: Sequence[str]
    place: str = "above"
    colour: str = BLACK
    size: float = 9.0
    bold: bool = False


@dataclass(frozen=True, eq=False)
class Heat:
    """A matrix as shades. Row 0 is at the top unless the vertical axis points upwards."""

    values: np.ndarray  # (rows, columns); a value that is not finite is grey
    words: np.ndarray | None = None  # text of the cells, if they are large enough
    low: float = 0.0  # the palest shade
    high: float | None = None  # the darkest shade; None is the largest value
    frame: tuple[int, int, int, int] | None = None  # row, column, height and width
    scale: str | None = None  # name of the colour scale next to the map; None hides the scale
    scale_form: str = ""  # format of its ticks, as for `str.format`
    scale_below: bool = False

    @property
    def top(self) -> float:
        """The value of the darkest shade."""
        known = self.values[np.isfinite(self.values)]
        return float(known.max(initial=self.low)) if self.high is None else self.high


Mark = Line | Area | Bars | Dots | Rule | Texts | Heat


@dataclass(frozen=True, eq=False)
class Chart:
    """Two axes and their marks."""

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]  # of each kind from the back to the front
    # Position of the legend: "" (no legend), "inside", "lower right", "upper right", "lower left",
    # "above", "below", or "ends" (next to the ends of lines).
    legend: str = ""
    grid: bool = False  # pale lines at the ticks of the vertical axis
    size: tuple[float, float] = (7.2, 4.2)  # of a file in inches, if it is not in `Panels`
    square: bool = False  # both axes have the same scale
    bare: bool = False  # no axes, only marks
    alt: str = ""  # the content as a sentence, for screen readers


@dataclass(frozen=True, eq=False)
class Panels:
    """Several charts in one figure."""

    title: str
    rows: tuple[
        tuple[Chart | None, ...], ...
    ]  # None is an empty panel; a shorter row uses the whole width
    size: tuple[float, float]  # of a file in inches
    widths: tuple[float, ...] = ()  # relative widths of the columns; equal if empty
    heights: tuple[float, ...] = ()
    shared: str = ""  # the axes that all charts share: "", "y" or "xy"
    legend: bool = False  # one legend below, with the names of the first chart's marks
    x: str = ""  # one label for all horizontal axes
    y: str = ""


def titled(title: str, chart: Chart, size: tuple[float, float]) -> Panels:
    """Put one chart below a title of several lines, which may be wider than the chart."""
    return Panels(title, ((chart,),), size)


def in_rows(charts: Sequence[Chart]) -> tuple[tuple[Chart | None, ...], ...]:
    """Arrange charts in rows of at most three, and fill the last row with empty panels."""
    wide = max(1, min(len(charts), 3))
    padded: list[Chart | None] = [*charts, *[None] * (-len(charts) % wide)]
    return tuple(tuple(padded[i : i + wide]) for i in range(0, len(padded), wide))


def colour_of(number: int) -> str:
    """Return the colour of the mark with this number. Colours repeat."""
    return PALETTE[number % len(PALETTE)]


def dash_of(number: int) -> int:
    """Return the dash of the line with this number, which differs for lines of one colour."""
    return number // len(PALETTE) % 3


def named(
    name: str, words: Sequence[object] | np.ndarray, *, most: int = 25, down: bool = False
) -> Axis:
    """Make an axis of labels, at most `most`, from 0 upwards, or from the top with `down`."""
    every = max(1, -(-len(words) // most))
    ticks = [(float(i), str(word)) for i, word in enumerate(words) if i % every == 0]
    ends = (-0.5, len(words) - 0.5)
    return Axis(name, *(ends[::-1] if down else ends), ticks=ticks)


def plain_axis(name: str, low: float, high: float, count: int = 4, *, whole: bool = False) -> Axis:
    """Make an axis from `low` to `high` with about `count` round ticks, or only whole ones."""
    ticks = [t for t in nice_ticks(low, high, count) if not whole or t == int(t)]
    return Axis(name, low, high, ticks=[(t, f"{t:g}") for t in ticks])


def numbers_axis(
    name: str, values: Sequence[float], *, room: float = 0.06, whole: bool = False
) -> Axis:
    """Make an axis that contains these numbers. It is logarithmic if their ratio is large."""
    low, high = float(min(values)), float(max(values))
    if low > 0 and high / low >= LOG_FROM:
        wide = (high / low) ** room
        low, high = low / wide, high * wide
        return Axis(name, low, high, log=True, ticks=_decades(low, high))
    wide = (room * (high - low)) or abs(high) * room or 1.0
    low, high = low - wide, high + wide
    ticks = [(t, short(t)) for t in nice_ticks(low, high, 4) if not whole or t == int(t)]
    return Axis(name, low, high, ticks=ticks)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers inside an interval, and at least two.

    An interval of one number gives this number.
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    found = [round(n * step, 10) for n in range(first, last + 1)]
    return found if len(found) > 1 else nice_ticks(low, high, 2 * count)


def _decades(low: float, high: float) -> list[tuple[float, str]]:
    """Return powers of ten as ticks. If they are few, add 3 times the powers, or 2 and 5 times."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) >= 3:
            break
    every = -(-len(found) // 5)
    return [(value, short(value)) for value in found[::every]]


def short(value: float) -> str:
    """Format a number briefly: `1e-5`, `0.01`, `64`."""
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")


def number_text(value: float, digits: int) -> str:
    """Format a number, or return a dash if it is not finite."""
    return f"{value:.{digits}f}" if np.isfinite(value) else "–"


def number_words(values: np.ndarray, digits: int) -> np.ndarray:
    """Format the numbers of a heat map."""
    return np.array([[number_text(value, digits) for value in row] for row in values])


def steps(x: Numbers, y: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Return a step line: each value holds until the next position."""
    return np.repeat(np.asarray(x), 2)[1:], np.repeat(np.asarray(y), 2)[:-1]


def aside(count: int) -> np.ndarray:
    """Return a small shift for each dot, so that equal dots do not hide each other."""
    return np.asarray(0.18 * np.sin(2.4 * np.arange(count)))


def box(values: np.ndarray, at: float = 0.0, *, middle: str = GREY) -> tuple[Mark, ...]:
    """Make a box plot of finite values: quartiles, median, and whiskers up to 1.5 box lengths."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    reach = 1.5 * (high - low)
    ends = values[values >= low - reach].min(), values[values <= high + reach].max()
    pairs = zip(ends, (low, high), strict=True)
    whiskers = (Line([at, at], pair, GREY, width=1.0) for pair in pairs)
    line = Line([at - 0.25, at + 0.25], [median, median], middle, width=2.0)
    return (Bars([at], [high - low], [low], 0.5, GREY, opacity=0.3), *whiskers, line)


def violin(
    values: np.ndarray, at: float, *, colour: str, side: int = 0, width: float = 0.8
) -> tuple[Mark, ...]:
    """Draw the density of values, or its left (-1) or right (1) half. Equal values have none."""
    if not np.ptp(values) > 0:
        return ()
    places = np.linspace(values.min(), values.max(), 100)
    # Scott's rule for the bandwidth of the Gaussian kernel.
    spread = values.std(ddof=1) * len(values) ** -0.2
    density = np.exp(-0.5 * ((places[:, None] - values) / spread) ** 2).sum(1)
    half = width / 2 * density / density.max()
    left, right = (at - half * (side <= 0), at + half * (side >= 0))
    return (Area(places, left, right, colour, opacity=0.3, across=True),)
