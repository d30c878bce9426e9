"""Atoll in a notebook: HTML representations of its objects, and the progress of a run.

The objects do not depend on this module: IPython finds the representations by the names of their
types (`register`). Slow modules are imported when an object is shown.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable
from functools import wraps
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from atoll.core.federation import Federation
    from atoll.data.source import Source
    from atoll.experiment.config import RunConfig
    from atoll.experiment.history import History
    from atoll.experiment.result import Result
    from atoll.present.tables import Table

P = ParamSpec("P")
T = TypeVar("T")
EVERY = 0.2  # minimum seconds between two updates of a bar
MOST_ROWS = 30  # maximum number of clients in the table of a federation


def register() -> None:
    """Register the HTML representations in the IPython shell of this process."""
    if (found := shell()) is not None:
        formatter = found.display_formatter.formatters["text/html"]
        for place, form in FORMS.items():
            formatter.for_type_by_name(*place.rsplit(".", 1), form)


def shell() -> Any:
    """Return the IPython shell of this process, or None outside of IPython."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def with_progress(function: Callable[P, T]) -> Callable[P, T]:
    """Show the progress of a function in a notebook, unless the caller passes an `observer`."""

    @wraps(function)
    def inner(*args: P.args, **options: P.kwargs) -> T:
        given = inspect.signature(function).bind_partial(*args, **options).arguments
        if given.get("observer") is None and getattr(shell(), "kernel", None) is not None:
            options["observer"] = Bar()
        return function(*args, **options)

    return inner


class Bar:
    """Shows the progress of a run or of a study. It is an observer of both."""

    def __init__(self) -> None:
        self.html = import_module("IPython.display")
        self.handle: Any = None
        self.drawn, self.runs, self.ended_runs = 0.0, 0, 0
        self.config: RunConfig | None = None

    def begin(self, config: Any, engine: object = "", why: str = "", notes: object = ()) -> None:
        """Start the bar of a run, or of a study (`config` is then the list of its runs)."""
        if isinstance(config, list | tuple):
            self.runs = len(config)
        else:
            self.config = config
        self.draw(0.0, "preparing")

    def parallel(self, jobs: int, threads: int) -> None:
        """Do nothing, because the processes of a study report only through `ended`."""

    def run(self, run: object) -> Bar:
        """Return the observer of a study's next run."""
        return self

    def ended(self, outcome: object) -> None:
        """Count a finished run of a study."""
        self.ended_runs += 1
        self.draw(self.ended_runs / max(self.runs, 1), f"{self.ended_runs} of {self.runs} runs")

    def round(self, seed: int, history: History) -> None:
        """Show the last round of a run."""
        from atoll.present.terminal import last_validation

        assert self.config is not None
        rounds, first = self.config.rounds or 1, self.config.seed
        last = history.rounds == rounds
        if not last and time.monotonic() - self.drawn < EVERY:
            return
        value = last_validation(history, self.config)
        score = f", validation {value:.1%}" if not math.isnan(value) else ""
        text = f"{self.config.method}, seed {seed}, round {history.rounds} of {rounds}{score}"
        if self.runs:
            text = f"{self.ended_runs} of {self.runs} runs; {text}"
            self.draw(self.ended_runs / self.runs, text)
        else:
            done = (seed - first) * rounds + history.rounds
            self.draw(done / (rounds * self.config.seeds), text)

    def should_stop(self) -> bool:
        """Return False, because a notebook interrupts the process itself."""
        return False

    def draw(self, share: float, text: str) -> None:
        """Draw the bar in place, over the previous bar."""
        self.drawn = time.monotonic()
        bar = self.html.HTML(f"<progress value={share:.4f} max=1></progress> {escape(text)}")
        if self.handle is None:
            self.handle = self.html.display(bar, display_id=True)
        else:
            self.handle.update(bar)


def source_html(source: Source) -> str:
    """Render the sizes of a graph that is not partitioned."""
    from atoll.present.tables import make_table

    known = int((source.y >= 0).sum())
    classes = ", ".join(source.class_names) or "named by number"
    rows = [
        ("nodes", f"{source.num_nodes:,} ({known:,} with a label)"),
        ("edges", f"{source.edges.shape[1]:,}{'' if source.weight is None else ', weighted'}"),
        ("features", f"{source.num_features:,}"),
        ("classes", f"{source.classes} ({classes})"),
        ("columns", ", ".join(source.columns) or "none"),
    ]
    return _tables([make_table(("graph", source.name), rows)])


def federation_html(federation: Federation) -> str:
    """Render the sizes of each client."""
    from atoll.present.tables import make_table

    columns = ("client", federation.task.plural, "edges", "training", "validation", "test")
    rows = []
    for name, graph in zip(federation.client_names[:MOST_ROWS], federation.graphs, strict=False):
        roles = (int(part.sum()) for part in (graph.train, graph.val, graph.test))
        numbers = (int(graph.size("nodes")), graph.edges.shape[1], *roles)
        rows.append((name, *(f"{number:,}" for number in numbers)))
    more = len(federation) - len(rows)
    rest = f"{more} more clients. " if more else ""
    about = f"{rest}{federation.features} features; classes: {', '.join(federation.class_names)}."
    title = f"{federation.name}: {len(federation)} clients"
    return _tables([make_table(columns, rows, title=title, caption=about)])


def result_html(result: Result) -> str:
    """Render the scores of a run and of its clients."""
    from atoll.core.errors import counted
    from atoll.present.terminal import client_table, result_rows

    config = result.config
    sizes = {"client": result.clients, "round": config.rounds or 0, "seed": config.seeds}
    title = ", ".join((config.data, *(counted(size, thing) for thing, size in sizes.items())))
    text = f"<p><b>{escape(title)}</b> (test {result.metric}, in percent)</p>"
    return text + _tables(filter(None, (result_rows([result]), client_table(result))))


def comparison_html(comparison: Any) -> str:
    """Render the tables of a comparison, with their conclusions."""
    return _tables(comparison.printed()) + f"<p>{escape(comparison.caption)}</p>"


def _tables(tables: Iterable[Table]) -> str:
    from atoll.present.tables import html

    return "".join(map(html, tables))


FORMS: dict[str, Callable[[Any], str]] = {
    "atoll.data.source.Source": source_html,
    "atoll.core.federation.Federation": federation_html,
    "atoll.experiment.result.Result": result_html,
    "atoll.studies.compare.comparison.Comparison": comparison_html,
}
"""The HTML representation of each type."""
