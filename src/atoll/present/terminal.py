"""Results and progress for people: tables and a live bar in the terminal."""

from __future__ import annotations

import io
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from atoll.experiment.config import RunConfig
from atoll.experiment.history import History
from atoll.experiment.metrics import mean_over_clients
from atoll.experiment.result import Result
from atoll.experiment.selection import BEST_CACHED
from atoll.present.tables import Table as TableValue
from atoll.present.tables import rich_table


class CtrlC:
    """While it is entered, the first Ctrl-C asks for a clean stop and the second stops at once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.stopping = False

    def __enter__(self) -> CtrlC:
        self.previous = signal.getsignal(signal.SIGINT)
        if self._hears_signals:
            signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._hears_signals:
            signal.signal(signal.SIGINT, self.previous)

    @property
    def _hears_signals(self) -> bool:
        # Python takes signals in the main thread alone; elsewhere a run goes on without.
        return threading.current_thread() is threading.main_thread()

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        self.console.print("stopping after this round (Ctrl-C again to stop at once)")


class Drawn:
    """While it is entered, a bar is drawn and Ctrl-C is heard."""

    def __init__(self, console: Console, progress: Progress, *, quiet: bool) -> None:
        self.console, self.progress, self.quiet = console, progress, quiet
        self.ctrl_c = CtrlC(console)

    def __enter__(self) -> Self:
        self.ctrl_c.__enter__()
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()
        self.ctrl_c.__exit__(kind, error, trace)


@contextmanager
def progress(console: Console, total: int, words: str = "") -> Iterator[Callable[..., None]]:
    """Draw how far a computation is, where a bar can be drawn; yield `move(steps, words)`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(words, total=total)

        def move(steps: int, words: str | None = None) -> None:
            bar.update(task, advance=steps, description=words)

        yield move


class Watcher(Drawn):
    """Draws a run's progress; the first Ctrl-C becomes a clean stop (`experiment.run.Observer`)."""

    def __init__(self, console: Console, *, quiet: bool, label: str = "") -> None:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[score]}"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        super().__init__(console, bar, quiet=quiet)
        self.label = label
        self.done: dict[int, int] = {}
        self.quarters: dict[int, int] = {}
        self.began = time.monotonic()
        self.config: RunConfig | None = None
        self.task: TaskID | None = None

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.config = config
        if not self.quiet:
            for note in notes:
                self.console.print(Text(note, style="dim"))
            if not self.label:
                self.console.print(f"[dim]engine {engine}: {why}[/dim]")
        total = (config.rounds or 0) * config.seeds
        name = self.label or config.method
        self.task = self.progress.add_task(name, total=total, score="")

    def round(self, seed: int, history: History) -> None:
        assert self.config is not None
        assert self.task is not None
        scored = self.config.evaluate or "deployed"
        validation = history.scores[scored][-1][:, 1, 0]
        value = float(mean_over_clients(validation, history.counts[:, 1]))
        score = f"seed {seed}, validation {value:.1%}" if np.isfinite(value) else f"seed {seed}"
        rounds = self.config.rounds or 1
        self.done[seed] = history.rounds
        # Seeds before the first that is heard of were finished in an earlier run.
        before = (min(self.done) - self.config.seed) * rounds
        done = before + sum(self.done.values())
        self.progress.update(self.task, completed=done, score=score)
        # Where no bar can be drawn, a line now and then still shows that something happens.
        quarter = 4 * history.rounds // rounds
        if self.progress.disable and not self.quiet and quarter > self.quarters.get(seed, 0):
            self.quarters[seed] = quarter
            spent = time.monotonic() - self.began
            self.console.print(
                f"{(self.label or self.config.method).strip()}: round {history.rounds}/{rounds}, "
                f"{score}, {spent:.1f} s"
            )

    def should_stop(self) -> bool:
        return self.ctrl_c.stopping


_PICKED = {
    "best-val": "at the best mean validation round",
    "last": "after the last round",
    BEST_CACHED: "picked on the test data: each client's best of the models put aside before "
    "splits and the last (test-selection)",
}


def result_table(results: list[Result]) -> Group:
    """Methods as rows; accuracy with spread, F1, traffic and time as columns."""
    first = results[0]
    config = first.config
    how = _PICKED.get(first.select, "at each client's best validation round")
    several = config.seeds > 1
    share = f" ({config.fraction:.0%} in a round)" if config.fraction < 1 else ""
    title = (
        f"{config.data}, {counted(first.clients, 'client')}{share}, {config.partition}, "
        f"{counted(config.rounds or 0, 'round')}, {counted(config.seeds, 'seed')}, "
        f"protocol {config.protocol}"
    )
    caption = (
        f"Test {'graphs' if 'graphs' in first.federation else 'nodes'}, in percent, {how}"
        + ("; mean ± standard deviation over seeds. " if several else ". ")
        + "scored: the model behind accuracy and F1; local: the client's own model right after "
        "training; MB: what training moved, up and down, without scoring."
    )
    table = _result_rows(results)
    told = [Text(f"{one.config.method}: {line}") for one in results for line in _private(one)]
    return Group(
        Text(title, style="bold"), Text(), table, Text(), *told, Text(caption, style="dim")
    )


def _private(result: Result) -> list[str]:
    """What a differentially private run has to say of itself."""
    found = result.privacy
    if found is None:
        return []
    stayed = not found["simulated"] and found["scores"] == "kept"
    kept = "the sites kept their scores (scores.csv there; scores=told sends them in the clear)"
    return [found["says"], *([kept] if stayed else [])]


def counted(number: int, thing: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _result_rows(results: list[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    auc = any("test_auc" in r.metrics() for r in results)
    names = ["method", "scored", "accuracy", "local", "macro F1", *(["AUC"] if auc else [])]
    for name in [*names, "MB/round", "s/round"]:
        left = name in ("method", "scored")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for result in results:
        metrics = result.metrics()
        rounds = (result.config.rounds or 1) * result.config.seeds
        keys = ["test_accuracy", "local_test_accuracy", "test_macro_f1"]
        cells = [percent(metrics, key) for key in [*keys, *(["test_auc"] if auc else [])]]
        traffic = sum(result.bytes().values()) / rounds / 1e6
        seconds = result.seconds()["per_round"]
        table.add_row(
            result.config.method, result.scored, *cells, f"{traffic:.2f}", f"{seconds:.3f}"
        )
    return table


def percent(metrics: dict[str, dict[str, Any]], name: str) -> str:
    """`78.1 ± 0.6`, or a dash."""
    if name not in metrics:
        return "-"
    found = metrics[name]
    spread = f" ± {100 * found['std']:.1f}" if len(found["per_seed"]) > 1 else ""
    return f"{100 * found['mean']:.1f}{spread}"


def duration(seconds: float) -> str:
    """`about 40 s`, `about 12 min`, `about 3.5 h`."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def noted_table(table: TableValue, plain: Container[str] = ()) -> Group:
    """A table between its title and its notes; notes are dim but for the `plain` ones."""

    def style(note: str) -> str:
        return "yellow" if note.startswith("Failed: ") else "" if note in plain else "dim"

    notes = [Text(note, style=style(note)) for note in table.notes]
    return Group(Text(table.title, style="bold"), Text(), rich_table(table), Text(), *notes, Text())


def plain_text(*parts: RenderableType, width: int = 88) -> str:
    """The parts as a terminal without colours shows them."""
    console = Console(file=io.StringIO(), width=width, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(Group(*parts))
    return captured.get().rstrip()
