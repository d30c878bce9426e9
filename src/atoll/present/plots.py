"""Drawing helpers of pictures that are not yet made from the chart model (`present.chart`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from atoll.experiment.folder import check_folder
from atoll.present.chart import MAX_ROWS, number_text
from atoll.present.chart_png import DPI, SHADES, need_matplotlib

__all__ = ["DPI", "MAX_ROWS", "need_matplotlib", "number_text"]

# Okabe and Ito's colours, which people with any colour vision can tell apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#BBBBBB"


def check_output(out: Path) -> None:
    """Whether files and pictures can be written, asked before the work and not after it."""
    check_folder(out, resuming=True)
    need_matplotlib()


def empty_figure(width: float, height: float) -> Any:
    """An empty figure that matplotlib's Agg draws, whatever the user's screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def heat_map(axes: Any, values: np.ndarray, text: np.ndarray | None, *, top: float) -> Any:
    """A matrix as colours from 0 to `top`, with its numbers where they fit."""
    axes.set_facecolor("#E4E4E4")  # shows where a value is not defined
    image = axes.imshow(np.ma.masked_invalid(values), cmap=SHADES, vmin=0, vmax=top, aspect="auto")
    if text is None or values.shape[1] > 24 or values.shape[0] > MAX_ROWS:
        return image
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value > 0.55 * top else "black"
        axes.text(
            column, row, text[row, column], ha="center", va="center", color=colour, fontsize=9
        )
    return image


def name_ticks(axis: Any, names: np.ndarray) -> None:
    """One tick per name, or every few where there are too many to read."""
    every = -(-len(names) // 25)
    axis.set_ticks(range(0, len(names), every), [str(name) for name in names[::every]])
    axis.set_tick_params(length=0)


def log_scale(axes: Any) -> None:
    """A logarithmic vertical axis with plain numbers: 0.1, 0.2, 0.5, 1, ..."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def plain_json(value: Any) -> Any:
    """Arrays as lists and undefined numbers as None, all the way down."""
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain_json(value.tolist())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, int | str) else str(value)
