"""`atoll reproduce` for people: the list, progress with the time left, tables and their files."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from atoll.engines.checkpoint import write_atomically
from atoll.study.cells import Cell, Outcome
from atoll.study.config import RunConfig
from atoll.study.experiment import History
from atoll.study.figures import Drawn, figure_cells
from atoll.study.papers import (
    STRICT,
    Paper,
    absent,
    describe_rules,
    find_item,
    read_paper,
    rough_seconds,
)
from atoll.study.reproduce import (
    TOLERANCE,
    Reproduction,
    Row,
    Wanted,
    needed,
    plan_table,
    unique,
)
from atoll.study.run import Observer
from atoll.study.show import Watcher, counted


def span(seconds: float) -> str:
    """A time for people: 40 s, 12 min, 3 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


class StudyWatcher:
    """Draws a study's progress and the time left; the first Ctrl-C becomes a clean stop."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self.console, self.quiet = console, quiet
        self.stop = Watcher(console, quiet=True)
        self.began = time.monotonic()
        self.cost: dict[str, float] = {}
        self.total = self.done = self.ran = 0.0
        self.count = 0
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"),
            console=console, disable=quiet or not console.is_terminal, transient=True,
        )  # fmt: skip
        self.task = self.progress.add_task("", total=1.0, left="")

    def __enter__(self) -> StudyWatcher:
        self.stop.__enter__()
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()
        self.stop.__exit__(kind, error, trace)

    def begin(self, cells: Sequence[Cell], finished: int) -> None:
        self.cost = {cell.name: rough_seconds(cell.config) for cell in cells}
        self.total, self.done, self.ran = sum(self.cost.values()), 0.0, 0.0
        self.count, self.began = 0, time.monotonic()
        if not self.quiet and finished:
            self.console.print(Text(f"{finished} of {counted(len(cells), 'run')} are done already"))

    def cell(self, cell: Cell) -> Observer:
        return CellWatcher(self, cell)

    def during(self, cell: Cell, share: float) -> None:
        """After each round of a cell: how much of it is done."""
        spent = time.monotonic() - self.began
        self.progress.update(
            self.task, completed=(self.done + share * self.cost[cell.name]) / (self.total or 1),
            description=f"{self.count + 1}/{len(self.cost)} {_of(cell)}",
            left=self._left(spent, self.ran + share * self.cost[cell.name],
                            self.done + share * self.cost[cell.name]),
        )  # fmt: skip

    def _left(self, spent: float, ran: float, done: float) -> str:
        """What has been run says how fast this machine is."""
        if ran <= 0 or spent < 2:
            return ""
        return f"about {span((self.total - done) * spent / ran)} left"

    def ended(self, outcome: Outcome) -> None:
        own = self.cost[outcome.cell.name]
        self.done += own
        self.count += 1
        self.ran += own if outcome.fresh else 0.0
        self.progress.update(self.task, completed=self.done / (self.total or 1))
        if self.quiet or not outcome.fresh:
            return
        said = "done" if outcome.error is None else f"failed: {outcome.error}"
        left = self._left(time.monotonic() - self.began, self.ran, self.done)
        if outcome.error is not None or self.progress.disable:
            line = f"{self.count}/{len(self.cost)} {_of(outcome.cell)}: {said}"
            self.console.print(Text(f"{line}; {left}" if left else line), soft_wrap=True)


class CellWatcher:
    """Hears about one cell's rounds (`study.run.Observer`)."""

    def __init__(self, study: StudyWatcher, cell: Cell) -> None:
        self.study, self.own = study, cell
        self.total = 1
        self.done: dict[int, int] = {}

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.total = (config.rounds or 1) * config.seeds

    def round(self, seed: int, history: History) -> None:
        self.done[seed] = history.rounds
        self.study.during(self.own, sum(self.done.values()) / self.total)

    def should_stop(self) -> bool:
        return self.study.stop.should_stop()


def _of(cell: Cell) -> str:
    labels = cell.labels
    clients = f", {labels['clients']} clients" if labels.get("clients") else ""
    more = f", {labels['variant']}" if labels.get("variant") else ""
    return f"{labels['method']} on {labels['data']}{clients}{more}, {labels['protocol']}"


def listing(names: Sequence[str], root: str | None, seeds: int) -> Group:
    """What can be reproduced: one line for each table and figure."""
    parts: list[Any] = []
    for name in names:
        paper = read_paper(name)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for column in ("what", "it shows", "cells", "data", "rough time"):
            left = column in ("what", "it shows", "data")
            table.add_column(column, justify="left" if left else "right")
        wanted = Wanted(seeds=seeds, root=root)
        for number, recipe in paper.recipe.tables.items():
            if recipe.reason:
                table.add_row(f"table{number}", recipe.shows, "–", "not a result", "–")
                continue
            rows = plan_table(paper, number, wanted)
            cells = unique(cell for row in rows for cell in needed(row))
            sets = list(dict.fromkeys(r.printed.dataset for r in rows))
            known = [one for one in sets if one in paper.recipe.data]
            table.add_row(
                f"table{number}", recipe.shows, str(len(rows)), _data(paper, known, root),
                span(sum(rough_seconds(cell.config) for cell in cells)),
            )  # fmt: skip
        for number, figure in paper.recipe.figures.items():
            if figure.reason:
                table.add_row(f"fig{number}", figure.shows, "–", _short_reason(figure.reason), "–")
                continue
            own = unique(cell for cell in figure_cells(paper, number, wanted))
            table.add_row(
                f"fig{number}", figure.shows, str(len(own)),
                _data(paper, figure.datasets, root),
                span(sum(rough_seconds(cell.config) for cell in own)),
            )  # fmt: skip
        title = f"{name}: {paper.recipe.title}"
        parts += [Text(title, style="bold"), table, Text()]
    one = names[0] if len(names) == 1 else "PAPER"
    parts.append(Text(
        f"cells: printed numbers of a table, runs of a figure. Rough time: {seeds} seeds of what "
        "is here, one protocol, one core. An example: "
        f"atoll reproduce {one} table1 --only dataset=Cora --both", style="dim",
    ))  # fmt: skip
    return Group(*parts)


def _short_reason(reason: str) -> str:
    return "no numbers" if "drawing" in reason else "not drawn"


def _data(paper: Paper, sets: Sequence[str], root: str | None) -> str:
    """What a table needs, absent sets in brackets."""
    return ", ".join(
        f"({one})" if absent(paper.data_name(one), root) else one for one in sets
    )  # fmt: skip


def value_text(value: float | None, std: float | None, metric: str) -> str:
    """`77.9 ± 0.4`; clients are counted."""
    if value is None:
        return "–"
    if metric == "ratio_improved":
        return f"{value:.0f}"
    sign = "+" if metric == "min_gain" else ""
    return f"{value:{sign}.1f}" + ("" if std is None else f" ± {std:.1f}")


def _cells(found: Reproduction, row: Row) -> list[str]:
    """A row as text: printed, ours, difference, verdict, then the same under strict."""
    one, texts = row.printed, []
    texts.append(value_text(one.value, one.std, one.metric))
    for rules in found.rules:
        own = row.ours.get(rules)
        gap = found.difference(row, rules)
        texts.append("–" if own is None else value_text(own.mean, own.std, one.metric))
        texts.append("–" if gap is None else f"{gap:+.1f}")
        if rules == found.rules[0]:
            texts.append(found.verdict(row))
    return texts


_KEYS = ("dataset", "setting", "clients", "method", "metric")
_METRIC_WORDS = {"acc": "accuracy", "f1": "F1", "auc": "AUC", "avg": "mean",
                 "min_gain": "least gain", "ratio_improved": "improved"}  # fmt: skip


def _key(row: Row, name: str) -> str:
    text = str(getattr(row.printed, name))
    return _METRIC_WORDS[text] if name == "metric" else text


def _columns(found: Reproduction) -> tuple[list[str], list[str]]:
    """Columns that tell rows apart, and those of numbers."""
    rows = [row for row in found.rows if not row.reason] or list(found.rows)
    several = [
        name for name in _KEYS if name == "method" or len({_key(row, name) for row in rows}) > 1
    ]
    numbers = ["printed", "ours", "diff.", "verdict"]
    return several, numbers + ([STRICT, "diff."] if STRICT in found.rules else [])


def _constant(found: Reproduction) -> str:
    """What all rows have in common."""
    names, _ = _columns(found)
    first = next((row for row in found.rows if not row.reason), found.rows[0])
    texts = [_key(first, name) for name in _KEYS if name not in names]
    clients = first.printed.clients
    return ", ".join(f"{text} clients" if text == clients else text for text in texts)


_COLOURS = {"reproduced": "green", "above": "cyan", "below": "yellow", "failed": "red"}


def reproduction_table(found: Reproduction) -> Group:
    """The table for the terminal, what it says in one sentence, and why cells are missing."""
    names, numbers = _columns(found)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in [*names, *numbers]:
        left = name in ("dataset", "setting", "method", "metric", "verdict")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "setting")
    shown = [row for row in found.rows if not row.reason]
    last = ""
    for row in shown:
        texts: list[Any] = [_key(row, name) for name in names] + _cells(found, row)
        block = "".join(texts[: names.index("method")])
        if last and block != last:
            table.add_section()
        last = block
        place = len(names) + 3
        word = texts[place].partition(":")[0]
        texts[place] = Text(word, style=_COLOURS.get(word, ""))
        table.add_row(*texts)
    parts: list[Any] = [Text(heading(found), style="bold"), Text(how(found)), Text()]
    parts += [table, Text()] if shown else []
    parts += [Text(line) for line in summary_lines(found)]
    return Group(*parts)


def heading(found: Reproduction) -> str:
    """Whose table this is."""
    shows = found.paper.recipe.tables[found.table].shows
    return f"{found.paper.name}, table {found.table}: {shows}"


def how(found: Reproduction) -> str:
    """How it was run, and what all rows have in common."""
    short = f", only {counted(found.rounds, 'round')}" if found.rounds is not None else ""
    common = _constant(found)
    return (
        f"protocol {found.rules[0]}, {counted(found.seeds, 'seed')}{short}"
        + (f"; {common}" if common else "")
        + ("; in percent" if any(r.printed.metric != "ratio_improved" for r in found.rows) else "")
    )


def summary_lines(found: Reproduction) -> list[str]:
    """How many cells agree, and each reason for a missing one."""
    lines = [summary_sentence(found)]
    reasons: dict[str, int] = {}
    for row in found.rows:
        word, colon, reason = found.verdict(row).partition(": ")
        if colon:
            key = f"{word}: {reason}"
            reasons[key] = reasons.get(key, 0) + 1
    lines += [f"{counted(count, 'cell')} {reason}" for reason, count in reasons.items()]
    notes = {row.printed.method: row.note for row in found.rows if row.note and row.ours}
    lines += [f"{method}: {note}" for method, note in notes.items()]
    return lines


def summary_sentence(found: Reproduction) -> str:
    """How many cells are within."""
    counts = found.counts()
    if found.rounds is not None:
        return (
            f"Shortened to {counted(found.rounds, 'round')}: a quick look, and no verdict; leave "
            "out --rounds for one."
        )
    ran = sum(counts.get(word, 0) for word in ("reproduced", "above", "below"))
    limit = f"{TOLERANCE} points"
    if found.paper.recipe.spread == "of runs" and any(r.printed.std for r in found.rows):
        limit += " or the printed spread"
    text = f"{counts.get('reproduced', 0)} of {counted(ran, 'cell')} within {limit} of the print"
    more = [f"{counts[word]} {word}" for word in ("above", "below") if counts.get(word)]
    if counts.get("failed"):
        more.append(f"{counts['failed']} failed")
    if counts.get("not run"):
        more.append(f"{counts['not run']} not run")
    text += "".join(f", {part}" for part in more) + "."
    if STRICT in found.rules:
        text += f" {STRICT}: {describe_rules(STRICT)}."
    return text


def summary(found: Reproduction) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "paper": found.paper.name, "table": found.table, "seeds": found.seeds,
        "rounds": found.rounds, "protocols": list(found.rules), "counts": found.counts(),
        "cells": [_plain(found, row) for row in found.rows],
    }  # fmt: skip


def _plain(found: Reproduction, row: Row) -> dict[str, Any]:
    one, own = row.printed, found.rules[0]
    line: dict[str, Any] = {
        "dataset": one.dataset, "setting": one.setting, "clients": one.clients,
        "method": one.method, "metric": one.metric, "printed": one.value, "printed_std": one.std,
    }  # fmt: skip
    for rules in found.rules:
        ours, prefix = row.ours.get(rules), "" if rules == own else f"{rules}_"
        line[f"{prefix}ours"] = None if ours is None else round(ours.mean, 3)
        line[f"{prefix}std"] = None if ours is None or ours.std is None else round(ours.std, 3)
        gap = found.difference(row, rules)
        line[f"{prefix}difference"] = None if gap is None else round(gap, 3)
        line[f"{prefix}cells"] = " ".join(cell.name for cell in row.cells.get(rules, ()))
    line["verdict"] = found.verdict(row)
    return line


def write_table(found: Reproduction, folder: Path, *, tex: bool) -> list[Path]:
    """CSV and Markdown, and LaTeX if asked for, in the study's folder."""
    stem = f"table-{found.table}"
    files = {f"{stem}.csv": _csv(found), f"{stem}.md": _markdown(found)}
    if tex:
        files[f"{stem}.tex"] = _tex(found)
    for name, text in files.items():
        write_atomically(folder / name, text.encode())
    return [folder / name for name in files]


def _csv(found: Reproduction) -> str:
    lines = [_plain(found, row) for row in found.rows]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _markdown(found: Reproduction) -> str:
    names, numbers = _columns(found)
    head = [*names, *numbers]
    lines = [
        f"# {heading(found)}",
        "",
        f"{found.paper.recipe.title}. {how(found)}.",
        "",
        _bar(head),
    ]
    lines.append(_bar(["---"] * len(head)))
    for row in found.rows:
        own = [_key(row, name) for name in names]
        lines.append(_bar([*own, *_cells(found, row)]))
    return "\n".join([*lines, "", *(f"{line}\n" for line in summary_lines(found))])


def _bar(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _tex(found: Reproduction) -> str:
    names, numbers = _columns(found)
    head = [*names, *numbers]
    wide = ["l" if n in (*names, "verdict") and n != "clients" else "r" for n in head]
    lines = [
        "% Needs \\usepackage{booktabs}.", f"\\begin{{tabular}}{{{''.join(wide)}}}", "\\toprule",
        " & ".join(map(_escaped, head)) + " \\\\", "\\midrule",
    ]  # fmt: skip
    for row in found.rows:
        texts = [_key(row, name) for name in names] + _cells(found, row)
        texts[len(names) + 3] = texts[len(names) + 3].partition(":")[0]
        lines.append(" & ".join(map(_escaped, texts)) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _escaped(text: str) -> str:
    for sign in "&%#_{}$":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("±", "$\\pm$").replace("–", "--")


def items(paper: Paper, text: str) -> list[tuple[str, str]]:
    """What a word asks for: one table or figure, or all that are not drawings or descriptions."""
    if text.lower() != "all":
        return [find_item(paper, text)]
    tables, figures = paper.recipe.tables, paper.recipe.figures
    return [
        *(("table", number) for number, one in tables.items() if not one.reason),
        *(("figure", number) for number, one in figures.items() if not one.reason),
    ]


def figure_text(drawn: Drawn) -> Group:
    """What was drawn, and what is not in it."""
    recipe = drawn.paper.recipe.figures[drawn.number]
    lines = [Text(f"{drawn.paper.name}, figure {drawn.number}: {recipe.shows}", style="bold")]
    if not drawn.paths:
        lines.append(Text("Nothing to draw."))
    lines += [Text(f"not in it: {one}") for one in drawn.left_out]
    note = f"{recipe.note} " if recipe.note else ""
    lines.append(Text(f"{note}The printed figure has no numbers to compare with.", style="dim"))
    return Group(*lines)
