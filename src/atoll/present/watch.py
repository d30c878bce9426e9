"""`atoll watch` for people: how far, how long, how good, in a few lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.experiment.status import Status, StatusReader

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 34
"""Columns of a sparkline; what stands beside it fills a terminal of 80."""
BESIDE = 6
"""Most lines about cells that run beside the first."""
STATES = ("finished", "pruned", "failed", "stopped", "running", "left")


def sparkline(values: Sequence[float | None], width: int = WIDTH) -> str:
    """A curve as a line of blocks from its lowest to its highest value; a gap where it has none."""
    every = -(-len(values) // width) if values else 1
    points = list(values)[::-1][::every][::-1]
    known = [value for value in points if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    step = (high - low) / (len(BARS) - 1) or 1.0
    return "".join(" " if v is None else BARS[round((v - low) / step)] for v in points)


def spoken(seconds: float) -> str:
    """`12 s`, `3 min`, `2 h 5 min`, `3 d 4 h`."""
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


def seen_text(seen: Status) -> Group:
    """Everything that is known, for a terminal of 80 columns."""
    parts: list[Any] = [Text(f"{seen.title}  ({seen.folder})", style="bold")]
    if seen.kind != "run":
        parts.append(_bar(seen))
    parts.append(_status(seen))
    if seen.now is not None and not seen.finished:
        parts += _current(seen.now, alone=seen.kind == "run")
        parts += [_current(one, alone=False)[0] for one in seen.beside[:BESIDE]]
        more = len(seen.beside) - BESIDE
        parts += [Text(f"and {more} more")] if more > 0 else []
    if seen.result:
        parts += _result(seen.result)
    if seen.best:
        far = "" if seen.finished else " so far"
        parts += [Text(f"Best{far}, by validation accuracy:"), _best(seen)]
    for name, reason in seen.failures:
        parts.append(Text(f"failed: {name}: {reason}", style="red"))
    return Group(*parts)


def _bar(seen: Status) -> Table:
    total = sum(seen.cells.values())
    done = sum(seen.cells.get(state, 0) for state in ("finished", "pruned", "failed"))
    names = {"running": "running" if seen.silent is None else "without a sign"}
    words = [f"{seen.cells[s]} {names.get(s, s)}" for s in STATES if seen.cells.get(s)]
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(
        total=max(total, 1), completed=done, width=20, complete_style="cyan", finished_style="green"
    )
    grid.add_row(bar, Text(", ".join(words)))
    return grid


def _status(seen: Status) -> Text:
    if seen.finished:
        return Text("finished", style="green")
    if seen.silent is not None:
        why = "; its process is gone" if seen.gone else ""
        return Text(f"no sign for {spoken(seen.silent)}{why}", style="yellow")
    if not seen.cells.get("running"):
        if seen.cells.get("stopped"):
            return Text("stopped", style="yellow")
        begun = set(seen.cells) - {"left"}
        return Text("between two cells, or stopped there" if begun else "not begun", style="yellow")
    left = "" if seen.left is None else f", about {spoken(seen.left)} left"
    return Text(f"running{left}")


def _current(now: Any, *, alone: bool) -> list[Text]:
    name = "" if alone or not now.get("cell") else f"{now['cell']}: "
    if "round" not in now:
        return [Text(f"{name}no round yet")]
    of = f" of {now['seeds']}" if now["seeds"] > 1 else ""
    place = now["seed"] - now["first_seed"] + 1 if of else now["seed"]
    line = f"{name}seed {place}{of}, round {now['round']}/{now['rounds']}"
    lines = [Text(f"{line}, {now['per_round']:.3g} s a round")]
    curve = [value for value in now["validation"] if value is not None]
    if curve:
        best = f"best {now['best']:.1%} in round {now['best_round']}"
        lines.append(Text(f"validation {sparkline(now['validation'])} {curve[-1]:.1%}, {best}"))
    return lines


def _result(metrics: Any) -> list[Text]:
    words = [
        f"{name.partition('_')[0]} accuracy {metrics[name]['mean']:.1%}"
        for name in ("val_accuracy", "test_accuracy")
        if name in metrics
    ]
    return [Text(", ".join(words))] if words else []


def _best(seen: Status) -> Table:
    grid = Table.grid(padding=(0, 2))
    for whose, name, value in seen.best[:8]:
        grid.add_row(Text(f"  {whose}"), Text(f"{value:.1%}", justify="right"), Text(name))
    if len(seen.best) > 8:
        grid.add_row(Text(f"  and {len(seen.best) - 8} more"), Text(), Text())
    return grid


def plain(seen: Status) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {**asdict(seen), "folder": str(seen.folder), "finished": seen.finished}


def follow(
    watch: StatusReader,
    console: Console,
    every: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Draw until there is nothing left to wait for; where nothing can be redrawn, what is new."""
    if console.is_terminal:
        seen = watch.read()
        with Live(seen_text(seen), console=console, auto_refresh=False) as live:
            while not seen.finished:
                sleep(every)
                seen = watch.read()
                live.update(seen_text(seen), refresh=True)
        return
    told = None
    while True:
        seen = watch.read()
        news = (dict(seen.cells), seen.silent is None)
        if news != told:
            console.print(seen_text(seen))
            told = news
        if seen.finished:
            return
        sleep(every)
