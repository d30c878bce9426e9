"""Results and progress in the terminal: tables, a live bar, and a clean stop on Ctrl-C."""

from __future__ import annotations

import io
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from types import FrameType
from typing import Any, Self

import numpy as np
from rich import table as rich
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TimeRemainingColumn
from rich.text import Text

from atoll.core.errors import counted
from atoll.experiment.config import RunConfig
from atoll.experiment.history import BEST_CACHED, History, validation_curve
from atoll.experiment.metrics import label_of
from atoll.experiment.observers import Observer
from atoll.experiment.result import Result
from atoll.present.chart import MAX_ROWS
from atoll.present.tables import Table, make_table, rich_table

_PICKED = {
    "best-val": "at the best mean validation round",
    "last": "after the last round",
    BEST_CACHED: "selected on the test data: each client's best model among those saved before "
    "splits and the last model (test-selection)",
}


class FittedTable(rich.Table):
    """A table that drops its last columns until the others fit. The first two always remain."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fitted, dropped = copy(self), list[str]()
        fitted.columns = list(self.columns)
        while len(fitted.columns) > 2 and fitted._least(console, options) > options.max_width:
            dropped.insert(0, str(fitted.columns.pop().header).replace("\n", " "))
        yield from super(FittedTable, fitted).__rich_console__(console, options)
        if dropped:
            yield Text(f"Too narrow for: {', '.join(dropped)}", style="dim")

    def _least(self, console: Console, options: ConsoleOptions) -> int:
        """Return the smallest width at which no number and no word is cut."""
        wide = options.update(max_width=10_000)
        pairs = ((one, self._measure_column(console, wide, one)) for one in self.columns)
        widths = (m.maximum if column.no_wrap else m.minimum for column, m in pairs)
        return self._extra_width + sum(widths)


class LiveProgress:
    """A progress bar. The first Ctrl-C requests a clean stop, and the second stops at once.

    The bar appears only on a terminal. `columns` are rich's columns, or formats of text columns.
    """

    def __init__(self, console: Console, *columns: str | ProgressColumn, quiet: bool) -> None:
        self.console, self.quiet, self.stopping = console, quiet, False
        hidden = quiet or not console.is_terminal
        self.progress = Progress(*columns, console=console, disable=hidden, transient=True)
        self.began = time.monotonic()

    def __enter__(self) -> Self:
        self.previous = signal.getsignal(signal.SIGINT)
        # Python delivers signals only to the main thread; other threads cannot stop cleanly.
        self.handles_signals = threading.current_thread() is threading.main_thread()
        if self.handles_signals:
            signal.signal(signal.SIGINT, self._interrupt)
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()
        if self.handles_signals:
            signal.signal(signal.SIGINT, self.previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        self.console.print("stopping after this round (Ctrl-C again to stop at once)")

    def should_stop(self) -> bool:
        return self.stopping

    def say(self, text: str, style: str = "dim") -> None:
        """Print a permanent line, unless the progress is quiet."""
        if not self.quiet:
            self.console.print(Text(text, style=style), soft_wrap=True)


@contextmanager
def progress(console: Console, total: int, words: str = "") -> Iterator[Callable[..., None]]:
    """Show the progress of a computation on a terminal. Yield `move(steps, words)`."""
    columns = ("{task.description}", BarColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(words, total=total)

        def move(steps: int, words: str | None = None) -> None:
            bar.update(task, advance=steps, description=words)

        yield move


def last_validation(history: History, config: RunConfig) -> float:
    """Return the last validation score in the selected metric (or accuracy), or NaN if unknown."""
    return float(validation_curve(history, config, history.rounds - 1)[-1])


class Watcher(LiveProgress, Observer):
    """Shows the progress of a run."""

    def __init__(self, console: Console, *, quiet: bool, label: str = "") -> None:
        numbers = ("{task.completed}/{task.total}", "{task.fields[score]}", TimeRemainingColumn())
        super().__init__(console, "{task.description}", BarColumn(), *numbers, quiet=quiet)
        self.label = label
        self.done: dict[int, int] = {}
        self.quarters: dict[int, int] = {}
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
        self.task = self.progress.add_task(self.label or config.method, total=total, score="")

    def round(self, seed: int, history: History) -> None:
        assert self.config is not None
        self._draw(seed, history.rounds, last_validation(history, self.config))

    def follow(self, found: Mapping[str, Any]) -> None:
        """Show the progress of seeds in another process, from its progress.json."""
        value = found["validation"][-1] if found["validation"] else None
        self._draw(found["seed"], found["round"], float("nan") if value is None else value)

    def _draw(self, seed: int, number: int, value: float) -> None:
        assert self.config is not None
        assert self.task is not None
        score = f"seed {seed}"
        if np.isfinite(value):
            named = f"{label_of(self.config.metric)} " if self.config.metric else ""
            score += f", validation {named}{value:.1%}"
        rounds = self.config.rounds or 1
        self.done[seed] = number
        # An earlier process finished the seeds before the first seed seen here.
        before = (min(self.done) - self.config.seed) * rounds
        done = before + sum(self.done.values())
        self.progress.update(self.task, completed=done, score=score)
        # Without a bar, a line after each quarter shows that the run proceeds.
        quarter = 4 * number // rounds
        if self.progress.disable and not self.quiet and quarter > self.quarters.get(seed, 0):
            self.quarters[seed] = quarter
            name = (self.label or self.config.method).strip()
            spent = time.monotonic() - self.began
            self.console.print(f"{name}: round {number}/{rounds}, {score}, {spent:.1f} s")


def profile_table(profile: Mapping[str, Sequence[float]]) -> Group:
    """Make a table of the wall time and CPU time of each stage of a run, in seconds."""
    total = [sum(both) for both in zip(*profile.values(), strict=True)]
    rows = [[name, *(f"{s:.3f}" for s in both)] for name, both in {**profile, "": total}.items()]
    table = make_table(("stage", "seconds", "processor"), rows, sections=[len(profile)])
    return Group("", rich_table(table, gap=2))


def result_table(results: list[Result]) -> Group:
    """Render a table with a row for each result, and notes. For one result, add its clients."""
    first = results[0]
    config = first.config
    how = _PICKED.get(first.select, "at each client's best validation round")
    share = f" ({config.fraction:.0%} in a round)" if config.fraction < 1 else ""
    title = (
        f"{config.data}, {counted(first.clients, 'client')}{share}, {config.partition}, "
        f"{counted(config.rounds or 0, 'round')}, {counted(config.seeds, 'seed')}, "
        f"protocol {config.protocol}"
    )
    caption = (
        f"Test {'graphs' if 'graphs' in first.federation else 'nodes'}, in percent, {how}"
        + ("; mean ± standard deviation over seeds. " if config.seeds > 1 else ". ")
        + "scored: the model that accuracy and F1 evaluate; local: the client's model right after "
        "local training; MB: training traffic, up and down, without evaluation"
        + (f"; positive class: {name}." if (name := first.positive_class()) else ".")
    )
    kept = "scores stay at the sites (scores.csv); scores=told sends them in the clear"
    notes = []
    for name, found in ((one.config.method, one.privacy) for one in results):
        if found is not None:  # the guarantee of a private run, and the place of its scores
            stayed = not found["simulated"] and found["scores"] == "kept"
            lines = [found["says"], *([kept] if stayed else [])]
            notes += [Text(f"{name}: {line}") for line in lines]
    notes += [Text(line) for one in results for line in one.after_training()]
    for one in results:
        name = one.config.method
        notes += [Text(f"{name}: {line}") for line in alert_line(one)]
        notes += [Text(f"{name}: {line}", style="yellow") for line in one.warnings()]
    heading, quiet = Text(title, style="bold"), Text(caption, style="dim")
    parts: list[RenderableType] = [heading, Text(), rich_table(result_rows(results)), Text()]
    if len(results) == 1 and (by_client := client_table(first)) is not None:
        parts += [rich_table(by_client), Text()]
    return Group(*parts, *notes, quiet)


def alert_line(result: Result) -> list[str]:
    """Return a sentence about the alert threshold of the run, or no sentence without a rule."""
    rule, found = result.config.threshold, result.metrics()
    items = "graphs" if "graphs" in result.federation else "nodes"
    if rule is None:
        return []
    if result.privacy and not result.privacy["simulated"] and result.privacy["scores"] == "kept":
        last = "the scores stayed at the sites, so this is the model of the last round"
        return [f"{last}, and each site chose its own threshold ({rule}) and does not send it"]
    if len(found.get("threshold", {"per_seed": []})["per_seed"]) < len(result.seeds):
        return [
            f"no threshold reaches {rule} on the validation {items}, so the model has no threshold"
        ]
    names = {"precision": "threshold_precision", "recall": "threshold_recall"}
    words = [f"{name} {percent(found, key)}" for name, key in names.items()]
    values = [f"{v:.3g}" for v in dict.fromkeys(found["threshold"]["per_seed"])]
    value = values[0] if len(values) == 1 else f"{' or '.join(values)}, by seed"
    chosen = f"alert if the probability is at least {value} ({rule} on validation {items})"
    alerts = f"{percent(found, 'threshold_alerts')} % of test {items} are alerts"
    return [f"{chosen}: test {', '.join(words)}; {alerts}"]


def client_table(result: Result) -> Table | None:
    """Make a table of clients' scores, or None without names or scores, or with many clients."""
    scores = 100 * result.of_clients(result.metric)
    if not result.named or result.clients > MAX_ROWS or np.isnan(scores).all():
        return None
    nodes, what = result.seeds[0].history.nodes, result.federation
    lines = []
    for name, size, own in zip(result.client_names, nodes, scores.T, strict=True):
        known = own[np.isfinite(own)]
        std = f" ± {known.std(ddof=1):.1f}" if len(known) > 1 else ""
        lines.append([name, f"{size:,}", f"{known.mean():.1f}{std}" if len(known) else "-"])
    counted = "graphs" if "graphs" in what else "nodes"
    return make_table(["client", counted, label_of(result.metric)], lines, left=1)


def result_rows(results: list[Result]) -> Table:
    """Make a table with a row for each result: scores, traffic and time."""
    columns = {"accuracy": "test_accuracy", "local": "local_test_accuracy"}
    columns["macro F1"] = "test_macro_f1"
    if any("test_auc" in result.metrics() for result in results):
        columns["AUC"] = "test_auc"
    if (metric := results[0].config.metric) not in (None, "accuracy"):  # the metric comes first
        head = label_of(metric).replace(" ", "\n")  # a long head takes two lines
        first = {head: f"test_{metric}", "local": f"local_test_{metric}"}
        columns = first | {k: v for k, v in columns.items() if k != "local"}
    rows = []
    for result in results:
        config, metrics = result.config, result.metrics()
        megabytes = sum(result.bytes().values()) / ((config.rounds or 1) * config.seeds) / 1e6
        scores = [percent(metrics, key) for key in columns.values()]
        cost = f"{megabytes:.2f}", f"{result.seconds()['per_round']:.3f}"
        rows.append([config.method, result.scored, *scores, *cost])
    return make_table(["method", "scored", *columns, "MB/round", "s/round"], rows, left=2)


def listed(words: Sequence[str]) -> str:
    """Join words: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def percent(metrics: dict[str, dict[str, Any]], name: str) -> str:
    """Format a metric in percent, such as `78.1 ± 0.6`, or return a dash."""
    if name not in metrics:
        return "-"
    found = metrics[name]
    spread = f" ± {100 * found['std']:.1f}" if len(found["per_seed"]) > 1 else ""
    return f"{100 * found['mean']:.1f}{spread}"


def duration(seconds: float) -> str:
    """Format a duration: `about 40 s`, `about 12 min`, `about 3.5 h`."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def noted_table(table: Table, plain: Container[str] = ()) -> Group:
    """Render a table with title, caption and notes. Notes are dim, except those in `plain`."""

    def style(note: str) -> str:
        return "yellow" if note.startswith("Failed: ") else "" if note in plain else "dim"

    title = [Text(table.title, style="bold"), Text()] if table.title else []
    notes = [Text(note, style=style(note)) for note in (table.caption, *table.notes) if note]
    return Group(*title, rich_table(table), Text(), *notes, Text())


def plain_text(*parts: RenderableType, width: int = 88) -> str:
    """Render the parts as plain text without colours."""
    console = Console(
        file=io.StringIO(), width=width, highlight=False, no_color=True, force_jupyter=False
    )
    with console.capture() as captured:
        console.print(Group(*parts))
    return captured.get().rstrip()
