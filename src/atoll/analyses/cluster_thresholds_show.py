"""`atoll tune-clusters` for people: progress, the proposal and why, files and the picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from atoll.analyses.cluster_thresholds import ROUNDS, STEPS, Tuning
from atoll.core.files import write_atomically
from atoll.experiment.command import run_command
from atoll.experiment.config import RunConfig
from atoll.present.chart import (
    BLUE,
    DASHED,
    GREY,
    MAX_ROWS,
    RED,
    SHADE,
    Axis,
    Chart,
    Heat,
    Line,
    Mark,
    Panels,
    Rule,
    named,
    number_text,
    number_words,
)
from atoll.present.chart_png import png
from atoll.present.plots import plain_json

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table


@contextmanager
def progress(console: Console, config: RunConfig) -> Iterator[Callable[[int], None]]:
    """Draws how far the training is, where a bar can be drawn."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("without splits", total=config.rounds or ROUNDS)
        yield lambda done: bar.update(task, completed=done)


def tuning_text(found: Tuning, *, grid: bool) -> Group:
    """Norms, proposal and doubts; the command to go on with belongs below, unwrapped."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(heading(found), style="bold"), Text(), _norm_table(found), Text()]
    parts += [Text(line) for line in reasons(found)]
    parts += [Text(f"But {line}.", style="yellow") for line in found.warnings()]
    if grid:
        parts += [Text(), _grid_table(found), Text(_GRID, style="dim")]
    return Group(*parts, Text(), Text("Go on with:"))


_GRID = (
    "Rounds, counted from 0, in which the first split would come; – in none of these. The "
    "proposal is the fourth row and column."
)


def heading(found: Tuning) -> str:
    """What was run."""
    config = found.config
    return (
        f"{config.method} without splits: {config.data}, {len(found.clients)} clients, "
        f"{config.partition}, {len(found.together)} rounds, protocol {config.protocol}"
    )


def reasons(found: Tuning) -> list[str]:
    """One line for each of the two numbers, and one for what they do."""
    first = found.first_split(found.eps1, found.eps2)
    when = f"in round {first:.0f}" if np.isfinite(first) else "in none of these rounds"
    return [
        f"eps1 = {found.eps1:g}: the mean update is shorter in one round of ten, in the second "
        f"half (median {found.calm:.3g})",
        f"eps2 = {found.eps2:g}: the largest update is longer in all those rounds (median of the "
        f"second half {found.restless:.3g})",
        f"The first split would come {when} (earliest: {found.may_split}).",
    ]


def command(found: Tuning) -> str:
    """The command that runs the method with the proposal, with everything else as asked."""
    settings = {**found.asked.set, "eps1": found.eps1, "eps2": found.eps2}
    # The rounds were for tuning; a run takes the protocol's.
    return run_command(msgspec.structs.replace(found.asked, rounds=None, set=settings))


def _norm_table(found: Tuning) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("norm of the update", no_wrap=True)
    for name in ("first round", "median, second half", "lowest", "highest"):
        table.add_column(name, justify="right")
    rows = [("mean of all", found.together), ("largest", found.largest)]
    table_rows = [
        *rows,
        *zip((f"client {name}" for name in found.clients), found.norms.T, strict=True),
    ]
    for place, (name, values) in enumerate(table_rows[: MAX_ROWS + len(rows)]):
        if place == len(rows):
            table.add_section()
        tail = values[found.tail :]
        numbers = (values[0], np.median(tail), tail.min(), tail.max())
        table.add_row(name, *(f"{number:.3g}" for number in numbers))
    return table


def _grid_table(found: Tuning) -> Table:
    from rich import box
    from rich.table import Table

    first, second, rounds = found.grid()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("eps1 | eps2", justify="right", no_wrap=True)
    for value in second:
        table.add_column(f"{value:g}", justify="right", no_wrap=True)
    for value, line in zip(first, rounds, strict=True):
        table.add_row(f"{value:g}", *(number_text(number, 0) for number in line))
    return table


def write_tuning(found: Tuning, out: Path) -> list[Path]:
    """Write norms.csv, tune-clusters.json and tune-clusters.png into a folder."""
    files = {
        "norms.csv": _csv(found).encode(),
        "tune-clusters.json": (json.dumps(summary(found), indent=1) + "\n").encode(),
        "tune-clusters.png": png(plot(found)),
    }
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]


def summary(found: Tuning) -> dict[str, Any]:
    """The object that `--json` prints; rounds count from 0, null is never."""
    config = found.config
    first, second, rounds = found.grid()
    whole = {
        "method": config.method,
        "data": config.data,
        "clients": list(found.clients),
        "partition": config.partition,
        "protocol": config.protocol,
        "seed": config.seed,
        "rounds": len(found.together),
        "eps1": found.eps1,
        "eps2": found.eps2,
        "calm": found.calm,
        "restless": found.restless,
        "falling": found.falling,
        "first_split": found.first_split(found.eps1, found.eps2),
        "may_split": found.may_split,
        "warnings": found.warnings(),
        "command": command(found),
        "grid": {"eps1": first, "eps2": second, "first_split": rounds},
    }
    plain: dict[str, Any] = plain_json(whole)
    return plain


def _csv(found: Tuning) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["round", "mean", "largest", *(f"client {name}" for name in found.clients)])
    columns = np.column_stack([found.together, found.largest, found.norms])
    for number, line in enumerate(columns):
        writer.writerow([number, *(f"{value:.6g}" for value in line)])
    return text.getvalue()


def plot(found: Tuning) -> Panels:
    """The norms and the two lines through them; the first split for other choices."""
    charts = (_norms_chart(found), _choices_chart(found))
    return Panels(heading(found), (charts,), (14, 5.6), widths=(1.25, 1))


def _norms_chart(found: Tuning) -> Chart:
    rounds = np.arange(len(found.together))
    marks: list[Mark] = [Rule(found.tail, upright=True, to=float(rounds[-1]), colour=SHADE)]
    for number, norms in enumerate(found.norms.T):
        name = "" if number else "each client"
        marks.append(Line(rounds, norms, GREY, name, width=0.8, opacity=0.7))
    marks.append(Line(rounds, found.largest, RED, "largest", width=1.6))
    marks.append(Line(rounds, found.together, BLUE, "mean update", width=2.2))
    for name, value, colour in (("ε1", found.eps1, BLUE), ("ε2", found.eps2, RED)):
        text = f"{name} = {value:g}"
        marks.append(Rule(value, colour=colour, dash=DASHED, width=1.2, text=text))
    title = "Norms while nothing is split (shaded: what the proposal reads)"
    x, y = Axis("round", 0.0, float(rounds[-1])), Axis("norm of the update", log=True)
    return Chart(title, x, y, tuple(marks), legend="below")


def _choices_chart(found: Tuning) -> Chart:
    first, second, rounds = found.grid()
    place, top = STEPS.index(0), max(len(found.together) - 1.0, 1.0)
    heat = Heat(rounds, number_words(rounds, 0), high=top, frame=(place, place, 1, 1))
    x, y = (
        named(name, [f"{value:g}" for value in values])
        for name, values in (("ε2", second), ("ε1", first))
    )
    title = "Round of the first split (grey: none; frame: the proposal)"
    return Chart(title, x, y, (heat,))
