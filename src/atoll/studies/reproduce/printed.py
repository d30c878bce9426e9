"""The tables of a reproduction and their files, as values of `atoll.present.tables`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from atoll.core.errors import counted
from atoll.experiment.protocols import protocol
from atoll.present import tables as present
from atoll.present.files import write_all
from atoll.present.tables import DASH, Align, Cell, Column, Table, make_table
from atoll.studies.reproduce.recipes import STRICT
from atoll.studies.reproduce.table import COLUMNS, LAST, TOLERANCE, ReproducedRow, Reproduction
from atoll.studies.study_run import Json

AGREES = " ~"  # after a verdict by points: also statistically compatible
WIDTH = 80  # width of the narrowest supported terminal
METRIC_WORDS = {"acc": "accuracy", "f1": "F1", "auc": "AUC", "avg": "mean"}
METRIC_WORDS |= {"min_gain": "min gain", "ratio_improved": "improved"}
_COLOURS = {"reproduced": "green", "above": "cyan", "below": "yellow", "failed": "red"}


def value_text(value: float | None, std: float | None, metric: str) -> str:
    """Format a value: `77.9 ± 0.4`, or a number of clients."""
    if value is None:
        return DASH
    if metric == "ratio_improved":
        return f"{value:.0f}"
    sign = "+" if metric == "min_gain" else ""
    return f"{value:{sign}.1f}" + ("" if std is None else f" ± {std:.1f}")


def _texts(found: Reproduction, row: ReproducedRow) -> list[str]:
    """Format a row: printed, ours, difference and verdict, then strict and additional columns."""
    one = row.printed
    texts = [value_text(one.value, one.std, one.metric)]
    for rules in (*found.rules, *_beside(found)):
        own, gap = row.ours.get(rules), found.difference(row, rules)
        texts.append(DASH if own is None else value_text(own.mean, own.std, one.metric))
        if rules in found.rules:
            texts.append(DASH if gap is None else f"{gap:+.1f}")
        texts += [_verdicts(found, row)] if rules == found.rules[0] else []
    return texts


def _verdicts(found: Reproduction, row: ReproducedRow) -> str:
    """Return both verdicts: by points, and a `~` if the two values are statistically compatible."""
    return found.verdict(row) + (AGREES if found.is_compatible(row) else "")


def _beside(found: Reproduction) -> list[str]:
    """Return additional columns: the last round, and other seeds of the data."""
    return list(dict.fromkeys(rules for row in found.rows for rules in row.beside))


def _key(row: ReproducedRow, name: str) -> str:
    text = str(getattr(row.printed, name))
    return METRIC_WORDS[text] if name == "metric" else text


def _keys(found: Reproduction, row: ReproducedRow, names: Sequence[str]) -> list[str]:
    """Return the keys that distinguish a row, without parts of the setting that all rows share."""
    common = set.intersection(*(set(one.printed.setting.split(";")) for one in found.rows))
    own = [part for part in row.printed.setting.split(";") if part not in common]
    return [";".join(own) if name == "setting" else _key(row, name) for name in names]


def with_runs(found: Reproduction) -> Sequence[ReproducedRow]:
    """Return the rows that have a run, or all rows if none has a run."""
    return [row for row in found.rows if not row.reason] or found.rows


def _columns(found: Reproduction, rows: Sequence[ReproducedRow]) -> tuple[list[str], list[str]]:
    """Return the columns that distinguish these rows, and the columns of numbers."""
    several = [n for n in COLUMNS if n == "method" or len({_key(row, n) for row in rows}) > 1]
    numbers = ["printed", "ours", "diff.", "verdict"]
    numbers += [STRICT, "diff."] if STRICT in found.rules else []
    return several, numbers + [words.partition(":")[2] for words in _beside(found)]


def terminal_tables(found: Reproduction) -> list[Table]:
    """Return the rows that have a run as one table, or as several if it is too wide.

    Then each data set, setting and number of clients has a table. Only the files contain the
    difference under `strict` and other draws, because a terminal is too narrow.
    """
    if not (shown := [row for row in found.rows if not row.reason]):
        return []
    names, numbers = _columns(found, shown)
    kept = [at for at, name in enumerate(numbers) if at < 5 or name == LAST[1:]]
    head = [*names, *(numbers[at] for at in kept)]
    place = len(names) + 3
    blocks: dict[tuple[str, str, str], list[list[str]]] = {}
    for row in shown:
        texts = _texts(found, row)
        line = [*_keys(found, row, names), *(texts[at] for at in kept)]
        line[place] = line[place].partition(":")[0]  # reasons are below the table
        blocks.setdefault(row.printed.problem, []).append(line)
    lines = [line for block in blocks.values() for line in block]
    wide = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    columns = [Column(n, _align(n), width=w) for n, w in zip(head, wide, strict=True)]

    def cells(line: Sequence[str], left_out: Sequence[int] = ()) -> list[Cell]:
        texts = [(n, text) for n, text in enumerate(line) if n not in left_out]
        colours = {n: _COLOURS.get(text.removesuffix(AGREES), "") for n, text in texts}
        return [Cell(text, style=colours[n] if n == place else "") for n, text in texts]

    if sum(wide) + 2 * (len(wide) - 1) <= WIDTH:
        ends = list(itertools.accumulate(map(len, blocks.values())))[:-1]
        return [make_table(columns, map(cells, lines), sections=ends)]
    common = [n for n, name in enumerate(names) if name in ("dataset", "setting", "clients")]
    own = [column for n, column in enumerate(columns) if n not in common]
    tables = []
    for block in blocks.values():
        words = [f"{block[0][n]} clients" if names[n] == "clients" else block[0][n] for n in common]
        rows = [cells(line, common) for line in block]
        tables.append(make_table(own, rows, title=", ".join(filter(None, words))))
    return tables


def _align(name: str) -> Align:
    return "left" if name in ("dataset", "setting", "method", "metric", "verdict") else "right"


def _file_table(found: Reproduction, *, short: bool = False) -> Table:
    """Make a table of all rows, for a file. A `short` verdict has no reason."""
    names, numbers = _columns(found, found.rows)
    rows = []
    for row in found.rows:
        texts = _texts(found, row)
        texts[3] = texts[3].partition(":")[0] if short else texts[3]
        rows.append([*_keys(found, row, names), *texts])
    return make_table([Column(name, _align(name)) for name in (*names, *numbers)], rows)


def heading(found: Reproduction) -> str:
    """Return the paper and the title of the table."""
    shows = found.paper.recipe.tables[found.table].shows
    return f"{found.paper.name}, table {found.table}: {shows}"


def how(found: Reproduction, rows: Sequence[ReproducedRow]) -> str:
    """Describe the runs, and the properties that these rows share."""
    names, _ = _columns(found, rows)
    texts = [_key(rows[0], name) for name in COLUMNS if name not in names]
    clients = rows[0].printed.clients
    common = ", ".join(f"{text} clients" if text == clients else text for text in texts)
    short = f", only {counted(found.rounds, 'round')}" if found.rounds is not None else ""
    own = {one.seeds for row in found.rows for one in row.ours.values()} or {found.seeds}
    seeds = f"{min(own)} to " if len(own) > 1 else ""
    return (
        f"protocol {found.rules[0]}, {seeds}{counted(max(own), 'seed')}{short}"
        + (f"; {common}" if common else "")
        + ("; in percent" if any(r.printed.metric != "ratio_improved" for r in found.rows) else "")
    )


def summary_lines(found: Reproduction) -> list[str]:
    """Return sentences: the number of matching cells, the reasons for missing cells, and notes."""
    verdicts = Counter(map(found.verdict, found.rows))
    reasons = [f"{counted(n, 'cell')} {reason}" for reason, n in verdicts.items() if ": " in reason]
    notes = [f"{row.printed.method}: {row.note}" for row in found.rows if row.note and row.ours]
    return [_summary_sentence(found), *reasons, *dict.fromkeys(notes)]


def _summary_sentence(found: Reproduction) -> str:
    """State the number of cells within the tolerance."""
    counts = found.counts()
    if found.rounds is not None:
        return (
            f"Shortened to {counted(found.rounds, 'round')}: a quick test without a verdict; "
            "remove --rounds for a verdict."
        )
    ran = sum(counts.get(word, 0) for word in ("reproduced", "above", "below"))
    limit = f"{TOLERANCE} points"
    if found.paper.recipe.spread == "of runs" and any(r.printed.std for r in found.rows):
        limit += " or the published standard deviation"
    near = f"{counts.get('reproduced', 0)} of {counted(ran, 'cell')}"
    words = [f"{near} within {limit} of the published value"]
    others = ("above", "below", "failed", "not run")
    words += [f"{counts[word]} {word}" for word in others if counts.get(word)]
    judged = [one for one in map(found.is_compatible, found.rows) if one is not None]
    if judged:
        both = f"{sum(judged)} of {len(judged)} statistically compatible"
        words.append(f"{both} (~: at most two standard errors apart)")
    strict = f" {STRICT}: {protocol(STRICT).about}." if STRICT in found.rules else ""
    return f"{', '.join(words)}.{strict}"


def summary(found: Reproduction) -> Json:
    """Return the object that `--json` prints."""
    about: Json = {"paper": found.paper.name, "table": found.table, "seeds": found.seeds}
    about |= {"rounds": found.rounds, "protocols": list(found.rules), "counts": found.counts()}
    return {**about, "cells": [_record(found, row) for row in found.rows]}


def _record(found: Reproduction, row: ReproducedRow) -> Json:
    one, own = row.printed, found.rules[0]
    line: Json = {name: getattr(one, name) for name in COLUMNS}
    line |= {"printed": one.value, "printed_std": one.std}
    for rules in (*found.rules, *_beside(found)):
        ours, prefix = row.ours.get(rules), "" if rules == own else f"{rules.split(':')[-1]}_"
        line[f"{prefix}ours"] = None if ours is None else round(ours.mean, 3)
        line[f"{prefix}std"] = None if ours is None or ours.std is None else round(ours.std, 3)
        line[f"{prefix}seeds"] = None if ours is None else ours.seeds
        gap = found.difference(row, rules)
        line[f"{prefix}difference"] = None if gap is None else round(gap, 3)
        line[f"{prefix}cells"] = " ".join(run.name for run in row.runs.get(rules, ()))
    return {**line, "verdict": found.verdict(row), "compatible": found.is_compatible(row)}


def write_table(found: Reproduction, folder: Path, *, tex: bool) -> list[Path]:
    """Write CSV and Markdown, and LaTeX if requested now or earlier, into the study's folder."""
    stem = f"table-{found.table}" + (f"-rounds-{found.rounds}" if found.rounds else "")
    about = f"# {heading(found)}\n\n{found.paper.recipe.title}. {how(found, found.rows)}.\n"
    lines = [f"{line}\n" for line in summary_lines(found)]
    files: dict[str, object] = {
        f"{stem}.csv": present.record_table([_record(found, row) for row in found.rows]),
        f"{stem}.md": "\n".join([about, present.markdown(_file_table(found), escaped="|"), *lines]),
    }
    if tex or (folder / f"{stem}.tex").exists():
        table = present.latex(_file_table(found, short=True))
        files[f"{stem}.tex"] = f"{present.NEEDS_BOOKTABS}\n{table}"
    return write_all(folder, files)


def table_parts(found: Reproduction, rows: int) -> list[present.Part]:
    """Return the table, its summary, and the reasons for missing numbers.

    `rows` is the number of rows in the files, which earlier calls may have filled.
    """
    about = how(found, with_runs(found))
    parts: list[present.Part] = [present.heading(heading(found)), about, ""]
    for table in terminal_tables(found):
        parts += [present.heading(table.title), table, ""] if table.title else [table, ""]
    parts += summary_lines(found)
    if rows > len(found.rows):
        more = counted(rows - len(found.rows), "more cell")
        parts.append(present.quiet(f"The files contain {more} of this table, from earlier calls."))
    return parts
