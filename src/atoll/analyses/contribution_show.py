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
from atoll.present.chart import (
    BLUE,
    GREEN,
    MAX_ROWS,
    ORANGE,
    RED,
    SOFT,
    Axis,
    Bars,
    Chart,
    Heat,
    Mark,
    Panels,
    Texts,
    named,
    number_text,
    number_words,
)
from atoll.present.chart_png import png
from atoll.present.plots import check_output, plain_json

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
    files = {
        "contribution.csv": _csv(found).encode(),
        "contribution.json": (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode(),
        "contribution.png": png(plot(found)),
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


def plot(found: Contribution) -> Panels:
    """Who has which labels, who links a class to itself, and what the client does to each class."""
    maps = 1.4 + 0.36 * min(max(found.clients, 3), MAX_ROWS)
    counts = found.train.mean(0)
    charts = [_map("Training nodes", counts, 0, max(float(counts.max()), 1e-9), found)]
    if np.isfinite(found.class_homophily).any():
        title = "Class-wise homophily (grey: no edge touches the class)"
        charts.append(_map(title, found.class_homophily, 2, 1.0, found))
    title = heading(found).replace(": ", "\n", 1)
    size = (min(max(11, 5 + 0.9 * found.train.shape[2]), 20), maps + 4.6)
    return Panels(title, (tuple(charts), (_bars(found),)), size, heights=(maps, 4))


def _map(title: str, values: np.ndarray, digits: int, top: float, found: Contribution) -> Chart:
    """Clients by classes, with a frame around the client in question."""
    frame = (found.client, 0, 1, values.shape[1])
    heat = Heat(values, number_words(values, digits), high=top, frame=frame)
    x = named("class", range(values.shape[1]))
    return Chart(title, x, named("client", range(found.clients), down=True), (heat,))


def _bars(found: Contribution) -> Chart:
    """A pair of bars for each class, with the points gained above it."""
    rows = [*found.classes(), found.groups()[0]]
    at = np.arange(len(rows), dtype=float)
    at[-1] += 0.4  # the last pair is no class
    several, top = found.config.seeds > 1, np.zeros(len(rows))
    marks: list[Mark] = []
    for side, name, colour in ((-0.2, "with", BLUE), (0.2, "without", ORANGE)):
        scores = [row.present if name == "with" else row.absent for row in rows]
        height = np.nan_to_num([100 * mean(values) for values in scores])
        spread = np.array([100 * std(values) for values in scores])
        label = f"{name} client {found.client}"
        whiskers = spread if several else None
        marks.append(Bars(at + side, height, 0.0, 0.38, colour, label, whiskers))
        top = np.maximum(top, height + spread)
    marks += [
        _gain(x, y, row, small=len(rows) > 16) for x, y, row in zip(at, top, rows, strict=True)
    ]
    ticks = [(x, row.name) for x, row in zip(at.tolist(), rows, strict=True)]
    x = Axis("class", at[0] - 0.6, at[-1] + 0.6, ticks=ticks)
    y = Axis("test nodes labelled right, %", 0.0, max(float(top.max()), 1.0) * 1.12)
    over = "; whiskers: standard deviation over seeds" if several else ""
    title = (
        f"Accuracy of the global model on all clients' test nodes (numbers: points gained{over})"
    )
    return Chart(title, x, y, tuple(marks), legend="above")


def _gain(x: float, y: float, row: Row, *, small: bool) -> Texts:
    """The points gained, above a pair of bars."""
    text = _percent(row.gain, several=False, sign="+")
    colour = RED if text.startswith("-") else SOFT if text in ("+0.0", "–") else GREEN
    return Texts([x], [y], [text], colour=colour, size=7 if small else 10, bold=True)
