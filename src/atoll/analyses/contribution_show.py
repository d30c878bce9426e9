"""`atoll contribution` for people: progress, the table and its reading, files and the picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from atoll.analyses.contribution import Contribution, OnRound, Row, mean, std
from atoll.core.files import write_atomically
from atoll.experiment.config import RunConfig, resolve
from atoll.present.plots import (
    BLUE,
    DPI,
    GREEN,
    MAX_ROWS,
    ORANGE,
    RED,
    check_output,
    empty_figure,
    heat_map,
    name_ticks,
    number_text,
    plain_json,
)

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

_VARIED = {"nodes": "node", "topology": "topology", "class-topology": "class-wise topology"}


@contextmanager
def progress(console: Console, config: RunConfig) -> Iterator[OnRound]:
    """Draws how far the trainings are; a line for each where no bar can be drawn."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    rounds = resolve(config)[0].rounds or 1
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    terminal = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not terminal) as bar:
        task = bar.add_task("", total=2 * config.seeds * rounds)

        def on_round(seed: int, takes_part: bool, done: int) -> None:
            which = f"seed {seed}, {'with' if takes_part else 'without'} the client"
            bar.update(task, advance=1, description=which)
            if not terminal and done == rounds:
                console.print(f"{which}: {done} rounds")

        yield on_round


def contribution_tables(found: Contribution) -> Group:
    """The table and its reading, for `rich.console.Console.print`."""
    from rich.console import Group
    from rich.text import Text

    several = "; mean ± standard deviation over seeds, differences by seed"
    caption = (
        "Test nodes of all clients that the global model labels right, in percent (a class: its "
        "recall), at the best validation round of those who took part"
        + (several if found.config.seeds > 1 else "")
        + f". train: training nodes of client {found.client} | of all clients; φ: homophily of the "
        f"class (row all: of all edges) at client {found.client} | mean of the others."
    )
    title = Text(heading(found), style="bold")
    reading = Text(reading_of(found))
    return Group(title, Text(), _table(found), Text(), reading, Text(caption, style="dim"))


def heading(found: Contribution) -> str:
    """What was asked."""
    config = found.config
    extra = f", {_VARIED[found.vary]} variation alone" if found.vary != "none" else ""
    return (
        f"What client {found.client} of {found.clients} does to each class: {config.data}, "
        f"{config.partition}{extra}, {config.method}, rounds {config.rounds}, seeds {config.seeds}"
    )


def reading_of(found: Contribution) -> str:
    """One sentence: do the gains follow labels, or homophily?"""
    names = {
        "labels": "its share of the labels",
        "homophily": "its homophily",
        "homophily_advantage": "its homophily less the others'",
    }
    parts = []
    for key, values in found.correlations().items():
        rho, p = values["rho"], values["p"]
        chance = f"p = {p:.2f}" if p >= 0.01 else "p < 0.01"
        value = f"{rho:+.2f} ({chance})" if np.isfinite(rho) else "– (not defined)"
        parts.append(f"{names[key]} {value}")
    who = f"Do classes gain where client {found.client} is strong? Spearman's ρ of the gain with "
    return who + ", ".join(parts) + "."


def _table(found: Contribution) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    edges = np.isfinite(found.class_homophily).any()
    phi = ["φ\nown | others"] if edges else []
    for column in ("class", "train\nown | all", "test", *phi, "with", "without", "difference"):
        table.add_column(column, justify="right", no_wrap=True)
    for place, rows in enumerate((found.classes(), found.groups())):
        if place:
            table.add_section()
        for row in rows:
            several = found.config.seeds > 1
            both = f"{number_text(row.homophily, 2)} | {number_text(row.homophily_others, 2)}"
            table.add_row(
                row.name,
                f"{row.train:.0f} | {row.train_all:.0f}",
                f"{row.test:.0f}",
                *([both.replace("– | –", "")] if edges else []),
                _percent(row.present, several),
                _percent(row.absent, several),
                _percent(row.gain, several, sign="+"),
            )
    return table


def _percent(values: np.ndarray, several: bool, sign: str = "") -> str:
    value = 100 * mean(values)
    if not np.isfinite(value):
        return "–"
    # Rounded first: a loss of a thousandth is not "-0.0".
    text = f"{round(value, 1) + 0.0:{sign}.1f}"
    return f"{text} ± {100 * std(values):.1f}" if several else text


def write_contribution(found: Contribution, out: str | Path) -> list[Path]:
    """Write contribution.csv (by seed), contribution.json and contribution.png into a folder."""
    out = Path(out)
    check_output(out)
    whole = {
        **summary(found),
        "about": plain_json(found.about),
        "config": msgspec.to_builtins(found.config),
    }
    picture = io.BytesIO()
    plot(found).savefig(picture, dpi=DPI, format="png")
    files = {
        "contribution.csv": _csv(found).encode(),
        "contribution.json": (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode(),
        "contribution.png": picture.getvalue(),
    }
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]


def summary(found: Contribution) -> dict[str, Any]:
    """The object that `--json` prints and `contribution.json` holds; null for undefined."""
    config = found.config
    whole = {
        "method": config.method,
        "data": config.data,
        "clients": found.clients,
        "partition": config.partition,
        "split": config.split,
        "protocol": config.protocol,
        "rounds": config.rounds,
        "seeds": config.seeds,
        "seed": config.seed,
        "client": found.client,
        "vary": found.vary,
        "ratio": found.ratio,
        "classes": [_row_summary(row) for row in found.classes()],
        "groups": [_row_summary(row) for row in found.groups()],
        "correlations": found.correlations(),
        "best_round": found.best,
    }
    plain: dict[str, Any] = plain_json(whole)
    return plain


def _row_summary(row: Row) -> dict[str, Any]:
    arms = {"with": row.present, "without": row.absent, "difference": row.gain}
    return {
        "name": row.name,
        "train": row.train,
        "train_all": row.train_all,
        "test": row.test,
        "homophily": row.homophily,
        "homophily_others": row.homophily_others,
        **{k: {"mean": mean(v), "std": std(v), "per_seed": v} for k, v in arms.items()},
    }


def _csv(found: Contribution) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    names = ["train", "train_all", "test", "homophily", "homophily_others"]
    writer.writerow(["seed", "class", *names, "with", "without", "difference"])
    for place in range(found.config.seeds):
        for row in (*found.classes(), *found.groups()):
            scores = [row.present[place], row.absent[place], row.gain[place]]
            numbers = [getattr(row, name) for name in names] + scores
            cells = [f"{value:.6g}" if np.isfinite(value) else "" for value in numbers]
            writer.writerow([found.config.seed + place, row.name, *cells])
    return text.getvalue()


def plot(found: Contribution) -> Any:
    """Who has which labels, who links a class to itself, and what the client does to each class."""
    classes = found.train.shape[2]
    maps = 1.4 + 0.36 * min(max(found.clients, 3), MAX_ROWS)
    figure = empty_figure(min(max(11, 5 + 0.9 * classes), 20), maps + 4.6)
    figure.suptitle(heading(found).replace(": ", "\n", 1))
    edges = bool(np.isfinite(found.class_homophily).any())
    grid = figure.add_gridspec(2, 2, height_ratios=[maps, 4])
    _plot_labels(figure.add_subplot(grid[0, 0] if edges else grid[0, :]), found)
    if edges:
        _plot_homophily(figure.add_subplot(grid[0, 1]), found)
    _plot_bars(figure.add_subplot(grid[1, :]), found)
    return figure


def _plot_labels(axes: Any, found: Contribution) -> None:
    counts = found.train.mean(0)
    text = np.array([[f"{count:.0f}" for count in row] for row in counts])
    heat_map(axes, counts, text, top=max(float(counts.max()), 1e-9))
    axes.set_title("Training nodes", fontsize=11)
    _finish_map(axes, found)


def _plot_homophily(axes: Any, found: Contribution) -> None:
    values = found.class_homophily
    text = np.array([[number_text(value, 2) for value in row] for row in values])
    heat_map(axes, values, text, top=1.0)
    axes.set_title("Class-wise homophily (grey: no edge touches the class)", fontsize=11)
    _finish_map(axes, found)


def _finish_map(axes: Any, found: Contribution) -> None:
    """Ticks, and a frame around the client in question."""
    from matplotlib.patches import Rectangle

    axes.set(xlabel="class", ylabel="client")
    name_ticks(axes.xaxis, np.arange(found.train.shape[2]))
    name_ticks(axes.yaxis, np.arange(found.clients))
    corner = (-0.5, found.client - 0.5)
    frame = Rectangle(corner, found.train.shape[2], 1, fill=False, color=RED, linewidth=3)
    frame.set(clip_on=False, zorder=5)  # above the axes' own lines
    axes.add_patch(frame)


def _plot_bars(axes: Any, found: Contribution) -> None:
    rows = [*found.classes(), found.groups()[0]]
    at = np.arange(len(rows), dtype=float)
    at[-1] += 0.4  # the last pair is no class
    several = found.config.seeds > 1
    top = np.zeros(len(rows))
    for side, (name, colour) in {-0.2: ("present", BLUE), 0.2: ("absent", ORANGE)}.items():
        scores = [getattr(row, name) for row in rows]
        height = np.nan_to_num([100 * mean(values) for values in scores])
        spread = np.array([100 * std(values) for values in scores])
        label = f"{'with' if name == 'present' else 'without'} client {found.client}"
        axes.bar(at + side, height, width=0.38, color=colour, label=label)
        if several:
            axes.errorbar(at + side, height, spread, fmt="none", ecolor="#333333", capsize=3)
        top = np.maximum(top, height + spread)
    for x, y, row in zip(at, top, rows, strict=True):
        _write_gain(axes, (x, y), row, small=len(rows) > 16)
    axes.set_xticks(at, [row.name for row in rows])
    axes.set(xlim=(at[0] - 0.6, at[-1] + 0.6), ylim=(0, max(float(top.max()), 1.0) * 1.12))
    axes.set(xlabel="class", ylabel="test nodes labelled right, %")
    over = "; whiskers: standard deviation over seeds" if several else ""
    title = (
        f"Accuracy of the global model on all clients' test nodes (numbers: points gained{over})"
    )
    axes.set_title(title, fontsize=11, pad=26)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 0.98), ncols=2, frameon=False)


def _write_gain(axes: Any, place: tuple[float, float], row: Row, *, small: bool) -> None:
    """The points gained, above a pair of bars."""
    text = _percent(row.gain, several=False, sign="+")
    colour = RED if text.startswith("-") else "#333333" if text in ("+0.0", "–") else GREEN
    style = {"color": colour, "fontsize": 7 if small else 10}
    axes.annotate(
        text, place, xytext=(0, 4), textcoords="offset points", ha="center", weight="bold", **style
    )
