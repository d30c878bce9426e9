"""The printed tables of a reproduction and their files, as values of `atoll.present.tables`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.present.files import write_all
from atoll.present.tables import (
    DASH,
    NEEDS_BOOKTABS,
    Align,
    Cell,
    Column,
    Table,
    latex,
    make_table,
    markdown,
    record_table,
)
from atoll.present.terminal import counted
from atoll.studies.reproduce.recipes import STRICT, describe_rules
from atoll.studies.reproduce.table import TOLERANCE, ReproducedRow, Reproduction
from atoll.studies.study_run import Json


def value_text(value: float | None, std: float | None, metric: str) -> str:
    """`77.9 ± 0.4`; clients are counted."""
    if value is None:
        return DASH
    if metric == "ratio_improved":
        return f"{value:.0f}"
    sign = "+" if metric == "min_gain" else ""
    return f"{value:{sign}.1f}" + ("" if std is None else f" ± {std:.1f}")


def _texts(found: Reproduction, row: ReproducedRow) -> list[str]:
    """A row as text: printed, ours, difference, verdict, then the same under strict."""
    one, texts = row.printed, []
    texts.append(value_text(one.value, one.std, one.metric))
    for rules in found.rules:
        own = row.ours.get(rules)
        gap = found.difference(row, rules)
        texts.append(DASH if own is None else value_text(own.mean, own.std, one.metric))
        texts.append(DASH if gap is None else f"{gap:+.1f}")
        if rules == found.rules[0]:
            texts.append(found.verdict(row))
    return texts


WIDTH = 80
"""Columns of the narrowest terminal that tables are made for."""
_KEYS = ("dataset", "setting", "clients", "method", "metric")
METRIC_WORDS = {
    "acc": "accuracy",
    "f1": "F1",
    "auc": "AUC",
    "avg": "mean",
    "min_gain": "min gain",
    "ratio_improved": "improved",
}


def _key(row: ReproducedRow, name: str) -> str:
    text = str(getattr(row.printed, name))
    return METRIC_WORDS[text] if name == "metric" else text


def _keys(found: Reproduction, row: ReproducedRow, names: Sequence[str]) -> list[str]:
    """What tells a row from the others; of the setting only what not all have."""
    common = set.intersection(*(set(one.printed.setting.split(";")) for one in found.rows))
    own = [part for part in row.printed.setting.split(";") if part not in common]
    return [";".join(own) if name == "setting" else _key(row, name) for name in names]


def with_runs(found: Reproduction) -> Sequence[ReproducedRow]:
    """The rows that have a run; all if none has."""
    return [row for row in found.rows if not row.reason] or found.rows


def _columns(found: Reproduction, rows: Sequence[ReproducedRow]) -> tuple[list[str], list[str]]:
    """Columns that tell these rows apart, and those of numbers."""
    several = [
        name for name in _KEYS if name == "method" or len({_key(row, name) for row in rows}) > 1
    ]
    numbers = ["printed", "ours", "diff.", "verdict"]
    return several, numbers + ([STRICT, "diff."] if STRICT in found.rules else [])


def _constant(found: Reproduction, rows: Sequence[ReproducedRow]) -> str:
    """What these rows have in common."""
    names, _ = _columns(found, rows)
    texts = [_key(rows[0], name) for name in _KEYS if name not in names]
    clients = rows[0].printed.clients
    return ", ".join(f"{text} clients" if text == clients else text for text in texts)


_COLOURS = {"reproduced": "green", "above": "cyan", "below": "yellow", "failed": "red"}


def terminal_tables(found: Reproduction) -> list[Table]:
    """The rows that have a run, as one table; as one for each problem if that is too wide.

    How far `strict` lies from the print is only in the files: a terminal is not wide enough.
    """
    shown = [row for row in found.rows if not row.reason]
    if not shown:
        return []
    names, numbers = _columns(found, shown)
    head = [*names, *numbers[:5]]
    place = len(names) + 3
    blocks: dict[tuple[str, str, str], list[list[str]]] = {}
    for row in shown:
        line = [*_keys(found, row, names), *_texts(found, row)][: len(head)]
        line[place] = line[place].partition(":")[0]  # reasons are below the table
        one = row.printed
        blocks.setdefault((one.dataset, one.setting, one.clients), []).append(line)
    lines = [line for block in blocks.values() for line in block]
    wide = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    columns = list(range(len(head)))
    if sum(wide) + 2 * (len(wide) - 1) <= WIDTH:
        return [_block("", head, wide, list(blocks.values()), columns)]
    common = [n for n, name in enumerate(names) if name in ("dataset", "setting", "clients")]
    left = [n for n in columns if n not in common]
    tables = []
    for block in blocks.values():
        words = [f"{block[0][n]} clients" if names[n] == "clients" else block[0][n] for n in common]
        title = ", ".join(word for word in words if word)
        tables.append(_block(title, head, wide, [block], left))
    return tables


def _block(
    title: str,
    head: Sequence[str],
    wide: Sequence[int],
    blocks: Sequence[Sequence[Sequence[str]]],
    columns: Sequence[int],
) -> Table:
    """Some columns of some blocks of lines, with a line between two blocks."""
    ends = [sum(map(len, blocks[:n])) for n in range(1, len(blocks))]
    rows = [
        [
            Cell(line[n], style=_COLOURS.get(line[n], "") if head[n] == "verdict" else "")
            for n in columns
        ]
        for block in blocks
        for line in block
    ]
    named = [Column(head[n], _align(head[n]), width=wide[n]) for n in columns]
    return make_table(named, rows, title=title, sections=ends)


def _align(name: str) -> Align:
    return "left" if name in ("dataset", "setting", "method", "metric", "verdict") else "right"


def _file_table(found: Reproduction, *, short: bool = False) -> Table:
    """All rows, for a file; a `short` verdict has no reason."""
    names, numbers = _columns(found, found.rows)
    rows = []
    for row in found.rows:
        texts = _texts(found, row)
        if short:
            texts[3] = texts[3].partition(":")[0]
        rows.append([*_keys(found, row, names), *texts])
    return make_table([Column(name, _align(name)) for name in (*names, *numbers)], rows)


def heading(found: Reproduction) -> str:
    """Whose table this is."""
    shows = found.paper.recipe.tables[found.table].shows
    return f"{found.paper.name}, table {found.table}: {shows}"


def how(found: Reproduction, rows: Sequence[ReproducedRow]) -> str:
    """How it was run, and what these rows have in common."""
    short = f", only {counted(found.rounds, 'round')}" if found.rounds is not None else ""
    common = _constant(found, rows)
    own = {one.seeds for row in found.rows for one in row.ours.values()} or {found.seeds}
    seeds = f"{min(own)} to " if len(own) > 1 else ""
    return (
        f"protocol {found.rules[0]}, {seeds}{counted(max(own), 'seed')}{short}"
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


def summary(found: Reproduction) -> Json:
    """The object that `--json` prints."""
    return {
        "paper": found.paper.name,
        "table": found.table,
        "seeds": found.seeds,
        "rounds": found.rounds,
        "protocols": list(found.rules),
        "counts": found.counts(),
        "cells": [_plain(found, row) for row in found.rows],
    }


def _plain(found: Reproduction, row: ReproducedRow) -> Json:
    one, own = row.printed, found.rules[0]
    line: Json = {
        "dataset": one.dataset,
        "setting": one.setting,
        "clients": one.clients,
        "method": one.method,
        "metric": one.metric,
        "printed": one.value,
        "printed_std": one.std,
    }
    for rules in found.rules:
        ours, prefix = row.ours.get(rules), "" if rules == own else f"{rules}_"
        line[f"{prefix}ours"] = None if ours is None else round(ours.mean, 3)
        line[f"{prefix}std"] = None if ours is None or ours.std is None else round(ours.std, 3)
        line[f"{prefix}seeds"] = None if ours is None else ours.seeds
        gap = found.difference(row, rules)
        line[f"{prefix}difference"] = None if gap is None else round(gap, 3)
        line[f"{prefix}cells"] = " ".join(cell.name for cell in row.runs.get(rules, ()))
    line["verdict"] = found.verdict(row)
    return line


def write_table(found: Reproduction, folder: Path, *, tex: bool) -> list[Path]:
    """CSV and Markdown, and LaTeX if asked for now or earlier, in the study's folder."""
    stem = f"table-{found.table}" + (f"-rounds-{found.rounds}" if found.rounds else "")
    about = f"# {heading(found)}\n\n{found.paper.recipe.title}. {how(found, found.rows)}.\n"
    files: dict[str, object] = {
        f"{stem}.csv": record_table([_plain(found, row) for row in found.rows]),
        f"{stem}.md": "\n".join(
            [
                about,
                markdown(_file_table(found), escaped="|"),
                *(f"{line}\n" for line in summary_lines(found)),
            ]
        ),
    }
    if tex or (folder / f"{stem}.tex").exists():
        files[f"{stem}.tex"] = f"{NEEDS_BOOKTABS}\n{latex(_file_table(found, short=True))}"
    return write_all(folder, files)
