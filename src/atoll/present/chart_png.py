"""Draw charts into files with matplotlib, which only this module imports, and only when it draws.

Figures do not use pyplot, so they change no global state and need no display.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.errors import not_installed
from atoll.present import chart as plot
from atoll.present.chart import Axis, Bars, Chart, Heat, Mark, Panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as MatplotlibAxis
    from matplotlib.figure import Figure

# Six of Okabe and Ito's colours, a purple and a dark grey. Then greys.
_HUES = "0072B2", "E69F00", "009E73", "CC79A7", "56B4E9", "D55E00", "7A5195", "3D3D3D"
_GREYS = "000000", "555555", "777777", "BBBBBB", "EEEEEE"
_NAMES = *plot.PALETTE, plot.BLACK, plot.SOFT, plot.EDGE, plot.GREY, plot.SHADE
COLOURS = {name: f"#{code}" for name, code in zip(_NAMES, (*_HUES, *_GREYS), strict=True)}
SHADES = "YlGnBu"  # light to dark: also readable without colour
UNKNOWN = "#E4E4E4"
"""The colour of heat-map cells without a value, and of grid lines."""
DASHES = ("-", "--", ":", "-.")
MARKERS = {"": "", **dict(zip(plot.SHAPES, "osD^vP*x<>o", strict=True))}
LEGENDS: dict[str, dict[str, object]] = {
    "inside": {"loc": "best"},
    "ends": {"loc": "best"},
    "lower right": {"loc": "lower right"},
    "lower left": {"loc": "lower left"},
    "upper right": {"loc": "upper right", "ncols": 2},
    "above": {"loc": "lower center", "bbox_to_anchor": (0.5, 0.98), "ncols": 4},
    "below": {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 3},
}
PLACES: dict[str, tuple[tuple[float, float], str, str]] = {
    "above": ((0, 4), "center", "bottom"),
    "right": ((4, 0), "left", "center"),
    "corner": ((6, 4), "left", "bottom"),
    "centre": ((0, 0), "center", "center"),
    "left": ((-4, 0), "right", "center"),
}
"""Offset of a text in points, and its horizontal and vertical alignment."""
DPI = 150


def need_matplotlib() -> None:
    """Raise an error before the work if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401  # checks only whether it is installed
    except ImportError as error:
        raise not_installed("a plot", "matplotlib", "report") from error


def image(picture: Chart | Panels, form: str) -> bytes:
    """Render the figure as a file: "png", or "svg" for a paper."""
    made, content = figure(picture), io.BytesIO()
    from matplotlib import rc_context

    # Without a date and with fixed ids, the same numbers give the same file.
    metadata = {"Date": None} if form == "svg" else None
    with rc_context({"svg.hashsalt": "atoll"}):
        made.savefig(content, dpi=DPI, format=form, metadata=metadata)
    return content.getvalue()


def figure(picture: Chart | Panels) -> Figure:
    """Make a matplotlib figure, which a notebook can show."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=picture.size, layout="constrained")
    FigureCanvasAgg(made)
    if isinstance(picture, Chart):
        axes = made.subplots()
        _chart(axes, picture)
        axes.set_title(picture.title, loc="left", fontsize=12)
    else:
        _panels(made, picture)
    return made


def _panels(made: Figure, panels: Panels) -> None:
    # Eleven letters of the default size fit into one inch.
    long = max(map(len, panels.title.splitlines() or [""])) > 11 * panels.size[0]
    made.suptitle(panels.title, fontsize=11 if long else 12)
    across = math.lcm(*map(len, panels.rows))
    widths, heights = panels.widths or None, panels.heights or None
    grid = made.add_gridspec(len(panels.rows), across, width_ratios=widths, height_ratios=heights)
    first: Axes | None = None
    for number, row in enumerate(panels.rows):
        wide = across // len(row)
        for place, chart in enumerate(row):
            if chart is None:
                continue
            spot = grid[number, place * wide : (place + 1) * wide]
            share_x = first if panels.shared == "xy" else None
            share_y = first if panels.shared else None
            axes = made.add_subplot(spot, sharex=share_x, sharey=share_y)
            first = first or axes
            _chart(axes, chart)
            axes.set_title(chart.title, fontsize=11, pad=26 if chart.legend == "above" else None)
            if panels.shared:
                axes.label_outer()
    made.supxlabel(panels.x)
    made.supylabel(panels.y)
    if panels.legend and first is not None:
        handles, names = first.get_legend_handles_labels()
        fitting = max(1, min(len(names), 6, int(panels.size[0] / 1.3)))
        made.legend(handles, names, loc="outside lower center", ncols=fitting, frameon=False)


def _chart(axes: Axes, chart: Chart) -> None:
    """Draw one chart without its title."""
    for mark in chart.marks:
        _draw(axes, mark)
    _axis(axes, "x", chart.x)
    _axis(axes, "y", chart.y)
    if any(isinstance(mark, Heat) for mark in chart.marks):
        axes.tick_params(length=0)
    else:
        axes.spines[["top", "right"]].set_visible(False)
    if chart.square:
        axes.set_aspect("equal")
    if chart.grid:
        axes.grid(axis="y", color=UNKNOWN, linewidth=0.8)
        axes.set_axisbelow(True)
    if chart.bare:
        axes.set_axis_off()
    if chart.legend and axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, **LEGENDS[chart.legend])


def _axis(axes: Axes, which: str, axis: Axis) -> None:
    """Set name, ends, scale and ticks of one axis."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    drawn: MatplotlibAxis = getattr(axes, f"{which}axis")
    drawn.set_label_text(axis.name)
    if axis.room is not None:
        axes.margins(**{which: axis.room})  # type: ignore[arg-type]  # x= or y=
    if axis.log:
        getattr(axes, f"set_{which}scale")("log")
    if axis.low is not None or axis.high is not None:
        set_ends = axes.set_xlim if which == "x" else axes.set_ylim
        set_ends(axis.low, axis.high)
    if axis.ticks is not None:
        drawn.set_ticks([at for at, _ in axis.ticks], [words for _, words in axis.ticks])
        drawn.set_minor_locator(NullLocator())
        if any("\n" in words for _, words in axis.ticks):
            drawn.set_tick_params(labelsize=9)
    elif axis.log:  # plain numbers: 0.1, 0.2, 0.5, 1, ...
        drawn.set_major_locator(LogLocator(subs=(1, 2, 5)))
        drawn.set_major_formatter("{x:g}")
        drawn.set_minor_formatter("")
    elif axis.whole:
        drawn.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    if axis.form:
        drawn.set_major_formatter(axis.form)


def _draw(axes: Axes, mark: Mark) -> None:
    """Draw one mark. The legend omits a mark whose label is None."""
    match mark:
        case plot.Line(colour=name):
            line = axes.plot(mark.x, mark.y, DASHES[mark.dash], color=COLOURS[name])[0]
            line.set(linewidth=mark.width, marker=MARKERS[mark.shape], markersize=5)
            line.set(alpha=mark.opacity, label=mark.name or None)
            if mark.low is not None and mark.high is not None:
                band = axes.fill_between(mark.x, mark.low, mark.high, color=COLOURS[name], lw=0)
                band.set_alpha(0.15)
        case plot.Area():
            fill = axes.fill_betweenx if mark.across else axes.fill_between
            surface = fill(mark.x, mark.low, mark.high, color=COLOURS[mark.colour], lw=0)
            surface.set(alpha=mark.opacity, label=mark.name or None)
        case Bars():
            _bars(axes, mark)
        case plot.Dots():
            _dots(axes, mark)
        case plot.Rule():
            _rule(axes, mark)
        case plot.Texts():
            offset, across, upright = PLACES[mark.place]
            style = {"color": COLOURS[mark.colour], "weight": "bold" if mark.bold else "normal"}
            for x, y, words in zip(mark.x, mark.y, mark.words, strict=True):
                text = axes.annotate(words, (x, y), xytext=offset, textcoords="offset points")
                text.set(ha=across, va=upright, fontsize=mark.size, **style)
        case Heat():
            _heat(axes, mark)


def _bars(axes: Axes, bars: Bars) -> None:
    draw = axes.barh if bars.across else axes.bar
    # The fourth argument is the start of the bars: `left` of barh, `bottom` of bar.
    drawn = draw(bars.at, bars.length, bars.width, bars.starts, label=bars.name or None)
    for patch in drawn:
        patch.set(facecolor=COLOURS[bars.colour], alpha=bars.opacity)
        if bars.hatched:
            patch.set(hatch="//", edgecolor="white")
    if bars.spread is not None:
        x, y = (bars.ends, bars.at) if bars.across else (bars.at, bars.ends)
        spread = np.asarray(bars.spread)
        tall, wide = (None, spread) if bars.across else (spread, None)
        axes.errorbar(x, y, tall, wide, "none", ecolor="#333333", capsize=3)


def _dots(axes: Axes, dots: plot.Dots) -> None:
    colour, hollow = COLOURS[dots.colour], dots.shape == "ring"
    marker = MARKERS[dots.shape]
    drawn = axes.scatter(dots.x, dots.y, dots.size**2, colour, marker=marker, zorder=3)
    drawn.set(alpha=dots.opacity, label=dots.name or None, linewidths=1.5 if hollow else 1)
    if hollow:
        drawn.set(facecolor="white", edgecolor=colour)
    if dots.spread is not None:
        axes.errorbar(dots.x, dots.y, dots.spread, fmt="none", ecolor=colour, capsize=3)


def _rule(axes: Axes, rule: plot.Rule) -> None:
    colour = COLOURS[rule.colour]
    if rule.to is not None:
        span = axes.axvspan if rule.upright else axes.axhspan
        span(rule.at, rule.to, color=colour, lw=0, zorder=0)
    elif rule.width:
        draw = axes.axvline if rule.upright else axes.axhline
        line = draw(rule.at, color=colour, linestyle=DASHES[rule.dash], linewidth=rule.width)
        line.set_label(rule.name or None)
    if not rule.text:
        return
    if rule.upright:
        above = axes.annotate(rule.text, (rule.at, 1), xycoords=("data", "axes fraction"))
        above.set(ha="center", va="bottom", fontsize=8, rotation=90 if rule.turned else 0)
    else:
        beside = axes.annotate(f" {rule.text}", (1, rule.at), xycoords=("axes fraction", "data"))
        beside.set(va="center", color=colour, annotation_clip=False)


def _heat(axes: Axes, heat: Heat) -> None:
    from matplotlib.patches import Rectangle

    values, wide = heat.values, max(heat.top - heat.low, 1e-9)
    axes.set_facecolor(UNKNOWN)  # marks undefined values
    shown = axes.imshow(np.ma.masked_invalid(values), cmap=SHADES, aspect="auto")
    shown.set_clim(heat.low, heat.low + wide)
    if heat.words is not None and values.shape[1] <= 24 and values.shape[0] <= plot.MAX_ROWS:
        for (row, column), value in np.ndenumerate(values):
            colour = "white" if value - heat.low > 0.55 * wide else "black"
            words = str(heat.words[row, column])
            axes.text(column, row, words, color=colour, fontsize=9, ha="center", va="center")
    if heat.frame is not None:
        row, column, height, width = heat.frame
        frame = Rectangle((column - 0.5, row - 0.5), width, height, fill=False, linewidth=3)
        frame.set(edgecolor=COLOURS["c5"], clip_on=False, zorder=5)  # above the lines of the axes
        axes.add_patch(frame)
    if heat.scale is not None:
        shrink, aspect = (0.8, 20) if heat.scale_below or not heat.scale else (1, 30)
        where, form = "bottom" if heat.scale_below else "right", heat.scale_form or None
        bar = axes.figure.colorbar(
            shown, ax=axes, location=where, shrink=shrink, aspect=aspect, format=form
        )
        bar.set_label(heat.scale)
