"""The human-readable output of `atoll watch`: progress, remaining time and scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.experiment.status import Status, StatusReader

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 34  # columns of a sparkline; with its numbers it fills a terminal of 80 columns
MAX_OTHERS = 6  # maximum number of lines about other running cells
MAX_BEST = 8  # maximum number of lines about the best cells
STATES = ("finished", "pruned", "failed", "stopped", "running", "left")
Sleep = Callable[[float], None]


def sparkline(values: Sequence[float | None], width: int = WIDTH) -> str:
    """Draw a curve as a line of blocks from its lowest to its highest value, with gaps for None."""
    every = -(-len(values) // width) if values else 1
    points = list(values)[::-1][::every][::-1]
    if not (known := [value for value in points if value is not None]):
        return ""
    low, high = min(known), max(known)
    step = (high - low) / (len(BARS) - 1) or 1.0
    return "".join(" " if v is None else BARS[round((v - low) / step)] for v in points)


def elapsed(seconds: float) -> str:
    """Format a time: `12 s`, `3 min`, `2 h 5 min`, `3 d 4 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h" + (f" {minutes} min" if minutes else "")
    days, hours = divmod(hours, 24)
    return f"{days} d" + (f" {hours} h" if hours else "")


def status_text(status: Status) -> Group:
    """Render the whole status for a terminal of 80 columns."""
    parts: list[RenderableType] = [Text(f"{status.title}  ({status.folder})", style="bold")]
    parts += [_state(status)] if status.kind == "run" else [_bar(status), _state(status)]
    if status.now is not None and not status.finished:
        parts += _current(status.now, alone=status.kind == "run")
        parts += [_current(one, alone=False)[0] for one in status.others[:MAX_OTHERS]]
        more = len(status.others) - MAX_OTHERS
        parts += [Text(f"and {more} more")] if more > 0 else []
    scores = status.result or {}
    shown = status.metric.replace("_", " ")
    names = [name for name in (f"val_{status.metric}", f"test_{status.metric}") if name in scores]
    words = [f"{n.partition('_')[0]} {shown} {scores[n]['mean']:.1%}" for n in names]
    parts += [Text(", ".join(words))] if words else []
    if status.best:
        far = "" if status.finished else " so far"
        parts.append(Text(f"Best{far}, by validation {shown}:"))
        wide = max(len(whose) for whose, _, _ in status.best[:MAX_BEST])
        best = status.best[:MAX_BEST]
        parts += [Text(f"  {whose:{wide}}  {v:5.1%}  {name}") for whose, name, v in best]
        if len(status.best) > MAX_BEST:
            parts.append(Text(f"  and {len(status.best) - MAX_BEST} more"))
    failures = (Text(f"failed: {name}: {why}", style="red") for name, why in status.failures)
    return Group(*parts, *failures)


def _bar(status: Status) -> Table:
    total = sum(status.cells.values())
    done = sum(status.cells.get(state, 0) for state in ("finished", "pruned", "failed"))
    names = {"running": "running" if status.silent is None else "silent"}
    words = [f"{status.cells[s]} {names.get(s, s)}" for s in STATES if status.cells.get(s)]
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(max(total, 1), done, 20, complete_style="cyan", finished_style="green")
    grid.add_row(bar, Text(", ".join(words)))
    return grid


def _state(status: Status) -> Text:
    if status.finished:
        return Text("finished", style="green")
    if status.silent is not None:
        why = "; its process has ended" if status.gone else ""
        return Text(f"silent for {elapsed(status.silent)}{why}", style="yellow")
    if status.cells.get("running"):
        left = "" if status.left is None else f", about {elapsed(status.left)} left"
        return Text(f"running{left}")
    begun = "between two cells, or stopped" if set(status.cells) - {"left"} else "not started"
    return Text("stopped" if status.cells.get("stopped") else begun, style="yellow")


def _current(now: Any, *, alone: bool) -> list[Text]:
    name = "" if alone or not now.get("cell") else f"{now['cell']}: "
    if "round" not in now:
        return [Text(f"{name}no round yet")]
    of = f" of {now['seeds']}" if now["seeds"] > 1 else ""
    place = now["seed"] - now["first_seed"] + 1 if of else now["seed"]
    line = f"{name}seed {place}{of}, round {now['round']}/{now['rounds']}"
    lines = [Text(f"{line}, {now['per_round']:.3g} s a round")]
    if curve := [value for value in now["validation"] if value is not None]:
        best = f"best {now['best']:.1%} in round {now['best_round']}"
        lines.append(Text(f"validation {sparkline(now['validation'])} {curve[-1]:.1%}, {best}"))
    return lines


def plain(status: Status) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    # Programs read the other running cells from the key "beside".
    fields = {"beside" if k == "others" else k: value for k, value in asdict(status).items()}
    return {**fields, "folder": str(status.folder), "finished": status.finished}


def follow(reader: StatusReader, console: Console, every: float, sleep: Sleep = time.sleep) -> None:
    """Show the status until the run finishes. Without a terminal, print it when cells change."""
    status, printed = reader.read(), None
    if console.is_terminal:
        with Live(status_text(status), console=console, auto_refresh=False) as live:
            while not status.finished:
                sleep(every)
                status = reader.read()
                live.update(status_text(status), refresh=True)
        return
    while True:
        if (news := (dict(status.cells), status.silent is None)) != printed:
            console.print(status_text(status))
            printed = news
        if status.finished:
            return
        sleep(every)
        status = reader.read()
