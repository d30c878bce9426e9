"""Draws charts into files: the only module that imports matplotlib, and only when it draws.

Figures are made without pyplot, so that nothing global changes and no screen is needed.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.errors import ConfigError
from atoll.present.chart import (
    MAX_ROWS,
    Area,
    Axis,
    Bars,
    Chart,
    Dots,
    Heat,
    Line,
    Mark,
    Panels,
    Rule,
    Texts,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as DrawnAxis
    from matplotlib.figure import Figure

# Okabe and Ito's colours except the light yellow, then greys.
COLOURS = {
    "c0": "#0072B2",
    "c1": "#E69F00",
    "c2": "#009E73",
    "c3": "#CC79A7",
    "c4": "#56B4E9",
    "c5": "#D55E00",
    "c6": "#7A5195",
    "c7": "#3D3D3D",
    "black": "#000000",
    "soft": "#555555",
    "edge": "#777777",
    "grey": "#BBBBBB",
    "shade": "#EEEEEE",
}
SHADES = "YlGnBu"  # light to dark in one direction: readable without colour, too
UNKNOWN = "#E4E4E4"
"""Cells of a heat map without a value, and the lines of a grid."""
DASHES = ("-", "--", ":", "-.")
MARKERS = {
    "": "",
    "dot": "o",
    "ring": "o",
    "box": "s",
    "diamond": "D",
    "up": "^",
    "down": "v",
    "plus": "P",
    "star": "*",
    "cross": "x",
    "left": "<",
    "right": ">",
}
LEGENDS: dict[str, dict[str, object]] = {
    "inside": {"loc": "best"},
    "ends": {"loc": "best"},
    "lower right": {"loc": "lower right"},
    "lower left": {"loc": "lower left"},
    "upper right": {"loc": "upper right", "ncols": 2},
    "above": {"loc": "lower center", "bbox_to_anchor": (0.5, 0.98), "ncols": 4},
    "below": {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 3},
}
DPI = 150


def need_matplotlib() -> None:
    """Refuse before the work where pictures cannot be drawn."""
    try:
        import matplotlib.figure  # noqa: F401  # tests only whether it is installed
    except ImportError as error:
        raise ConfigError(
            "plots need the package matplotlib, which is not installed; "
            "install it with: pip install 'atoll-fgl[report]'"
        ) from error


def png(picture: Chart | Panels) -> bytes:
    """The picture as a PNG file."""
    return image(picture, "png")


def image(picture: Chart | Panels, form: str) -> bytes:
    """The picture as a file: "png", or "svg" for a paper."""
    made, content = figure(picture), io.BytesIO()
    from matplotlib import rc_context

    # Without a date and with fixed ids the same numbers give the same file.
    metadata = {"Date": None} if form == "svg" else None
    with rc_context({"svg.hashsalt": "atoll"}):
        made.savefig(content, dpi=DPI, format=form, metadata=metadata)
    return content.getvalue()


def figure(picture: Chart | Panels) -> Figure:
    """The picture as a matplotlib figure, which a notebook shows."""
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
    # Eleven letters of the usual size fit into an inch.
    long = max(map(len, panels.title.splitlines() or [""])) > 11 * panels.size[0]
    made.suptitle(panels.title, fontsize=11 if long else 12)
    across = math.lcm(*map(len, panels.rows))
    grid = made.add_gridspec(
        len(panels.rows),
        across,
        width_ratios=panels.widths or None,
        height_ratios=panels.heights or None,
    )
    first: Axes | None = None
    for number, row in enumerate(panels.rows):
        wide = across // len(row)
        for place, chart in enumerate(row):
            if chart is None:
                continue
            spot = grid[number, place * wide : (place + 1) * wide]
            axes = made.add_subplot(
                spot,
                sharex=first if panels.shared == "xy" else None,
                sharey=first if panels.shared else None,
            )
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
    """One chart with everything but its title."""
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
    """Name, ends, scale and ticks of one axis."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    drawn: DrawnAxis = getattr(axes, f"{which}axis")
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
    elif axis.log:
        _plain_decades(drawn)
    elif axis.whole:
        drawn.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    if axis.form:
        drawn.set_major_formatter(axis.form)


def _plain_decades(drawn: DrawnAxis) -> None:
    """Plain numbers on a logarithmic axis: 0.1, 0.2, 0.5, 1, ..."""
    from matplotlib.ticker import LogLocator

    drawn.set_major_locator(LogLocator(subs=(1, 2, 5)))
    drawn.set_major_formatter("{x:g}")
    drawn.set_minor_formatter("")


def _draw(axes: Axes, mark: Mark) -> None:
    """One mark."""
    match mark:
        case Line():
            _line(axes, mark)
        case Area():
            fill = axes.fill_betweenx if mark.across else axes.fill_between
            colour = COLOURS[mark.colour]
            fill(
                mark.x,
                mark.low,
                mark.high,
                color=colour,
                alpha=mark.opacity,
                lw=0,
                label=_label(mark.name),
            )
        case Bars():
            _bars(axes, mark)
        case Dots():
            _dots(axes, mark)
        case Rule():
            _rule(axes, mark)
        case Texts():
            _texts(axes, mark)
        case Heat():
            _heat(axes, mark)


def _label(name: str) -> str | None:
    """Give matplotlib no label for a mark without a name: the legend leaves it out."""
    return name or None


def _line(axes: Axes, line: Line) -> None:
    colour = COLOURS[line.colour]
    axes.plot(
        line.x,
        line.y,
        color=colour,
        linewidth=line.width,
        linestyle=DASHES[line.dash],
        marker=MARKERS[line.shape],
        markersize=5,
        alpha=line.opacity,
        label=_label(line.name),
    )
    if line.low is not None and line.high is not None:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, lw=0)


def _bars(axes: Axes, bars: Bars) -> None:
    start = np.broadcast_to(np.asarray(bars.start, dtype=float), np.shape(bars.at))
    draw = axes.barh if bars.across else axes.bar
    drawn = draw(
        bars.at,
        bars.length,
        bars.width,
        start,  # where they begin: `left` of barh, `bottom` of bar
        color=COLOURS[bars.colour],
        alpha=bars.opacity,
        label=_label(bars.name),
    )
    if bars.hatched:
        for patch in drawn:
            patch.set(hatch="//", edgecolor="white")
    if bars.spread is not None:
        ends, spread = start + np.asarray(bars.length), np.asarray(bars.spread)
        if bars.across:
            axes.errorbar(ends, bars.at, xerr=spread, fmt="none", ecolor="#333333", capsize=3)
        else:
            axes.errorbar(bars.at, ends, spread, fmt="none", ecolor="#333333", capsize=3)


def _dots(axes: Axes, dots: Dots) -> None:
    colour = COLOURS[dots.colour]
    hollow = dots.shape == "ring"
    axes.scatter(
        dots.x,
        dots.y,
        s=dots.size**2,
        marker=MARKERS[dots.shape],
        color=None if hollow else colour,
        facecolor="white" if hollow else None,
        edgecolor=colour if hollow else None,
        linewidths=1.5 if hollow else 1,
        alpha=dots.opacity,
        label=_label(dots.name),
        zorder=3,
    )
    if dots.spread is not None:
        axes.errorbar(dots.x, dots.y, dots.spread, fmt="none", ecolor=colour, capsize=3)


def _rule(axes: Axes, rule: Rule) -> None:
    colour = COLOURS[rule.colour]
    if rule.to is not None:
        span = axes.axvspan if rule.upright else axes.axhspan
        span(rule.at, rule.to, color=colour, lw=0, zorder=0)
    elif rule.width:
        draw = axes.axvline if rule.upright else axes.axhline
        draw(
            rule.at,
            color=colour,
            linestyle=DASHES[rule.dash],
            linewidth=rule.width,
            label=_label(rule.name),
        )
    if not rule.text:
        return
    if rule.upright:
        axes.annotate(
            rule.text,
            (rule.at, 1),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=8,
            rotation=90 if rule.turned else 0,
        )
    else:
        axes.annotate(
            f" {rule.text}",
            (1, rule.at),
            xycoords=("axes fraction", "data"),
            va="center",
            color=colour,
            annotation_clip=False,
        )


PLACES: dict[str, tuple[tuple[float, float], str, str]] = {
    "above": ((0, 4), "center", "bottom"),
    "right": ((4, 0), "left", "center"),
    "corner": ((6, 4), "left", "bottom"),
    "centre": ((0, 0), "center", "center"),
    "left": ((-4, 0), "right", "center"),
}
"""Offset in points, and horizontal and vertical alignment."""


def _texts(axes: Axes, texts: Texts) -> None:
    offset, horizontal, vertical = PLACES[texts.place]
    for x, y, words in zip(texts.x, texts.y, texts.words, strict=True):
        axes.annotate(
            words,
            (x, y),
            xytext=offset,
            textcoords="offset points",
            ha=horizontal,
            va=vertical,
            color=COLOURS[texts.colour],
            fontsize=texts.size,
            weight="bold" if texts.bold else "normal",
        )


def _heat(axes: Axes, heat: Heat) -> None:
    from matplotlib.patches import Rectangle

    values = heat.values
    high = heat.high
    if high is None:
        high = float(values[np.isfinite(values)].max(initial=heat.low))
    wide = max(high - heat.low, 1e-9)
    axes.set_facecolor(UNKNOWN)  # shows where a value is not defined
    shown = axes.imshow(
        np.ma.masked_invalid(values),
        cmap=SHADES,
        vmin=heat.low,
        vmax=heat.low + wide,
        aspect="auto",
    )
    if heat.words is not None and values.shape[1] <= 24 and values.shape[0] <= MAX_ROWS:
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
        where = "bottom" if heat.scale_below else "right"
        small = heat.scale_below or not heat.scale
        bar = axes.figure.colorbar(
            shown,
            ax=axes,
            location=where,
            shrink=0.8 if small else 1,
            aspect=20 if small else 30,
            format=heat.scale_form or None,
        )
        bar.set_label(heat.scale)
