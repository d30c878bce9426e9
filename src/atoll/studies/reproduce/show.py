"""`atoll reproduce` for people: a table again in the terminal, and its files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from atoll.core.files import write_atomically
from atoll.present.terminal import counted
from atoll.studies.compare.show import tex as escaped
from atoll.studies.reproduce.figures import Drawn
from atoll.studies.reproduce.recipes import STRICT, describe_rules
from atoll.studies.reproduce.table import TOLERANCE, Reproduction, Row


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


def _key(row: Row, name: str) -> str:
    text = str(getattr(row.printed, name))
    return METRIC_WORDS[text] if name == "metric" else text


def _keys(found: Reproduction, row: Row, names: Sequence[str]) -> list[str]:
    """What tells a row from the others; of the setting only what not all have."""
    common = set.intersection(*(set(one.printed.setting.split(";")) for one in found.rows))
    own = [part for part in row.printed.setting.split(";") if part not in common]
    return [";".join(own) if name == "setting" else _key(row, name) for name in names]


def with_runs(found: Reproduction) -> Sequence[Row]:
    """The rows that have a run; all if none has."""
    return [row for row in found.rows if not row.reason] or found.rows


def _columns(found: Reproduction, rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Columns that tell these rows apart, and those of numbers."""
    several = [
        name for name in _KEYS if name == "method" or len({_key(row, name) for row in rows}) > 1
    ]
    numbers = ["printed", "ours", "diff.", "verdict"]
    return several, numbers + ([STRICT, "diff."] if STRICT in found.rules else [])


def _constant(found: Reproduction, rows: Sequence[Row]) -> str:
    """What these rows have in common."""
    names, _ = _columns(found, rows)
    texts = [_key(rows[0], name) for name in _KEYS if name not in names]
    clients = rows[0].printed.clients
    return ", ".join(f"{text} clients" if text == clients else text for text in texts)


_COLOURS = {"reproduced": "green", "above": "cyan", "below": "yellow", "failed": "red"}


def reproduction_table(found: Reproduction, whole: Reproduction | None = None) -> Group:
    """The table for the terminal, what it says in one sentence, and why cells are missing.

    How far `strict` lies from the print is in the files: a terminal is not wide enough for it. They
    also have what earlier looks found, the `whole`.
    """
    shown = [row for row in found.rows if not row.reason]
    parts: list[Any] = [
        Text(heading(found), style="bold"),
        Text(how(found, with_runs(found))),
        Text(),
    ]
    parts += [*_tables(found, shown), Text()] if shown else []
    parts += [Text(line) for line in summary_lines(found)]
    more = len(whole.rows) - len(found.rows) if whole else 0
    if more > 0:
        text = f"The files have {counted(more, 'more cell')} of this table, from earlier looks."
        parts.append(Text(text, style="dim"))
    return Group(*parts)


def _tables(found: Reproduction, shown: Sequence[Row]) -> list[Any]:
    """One table; where that is too wide for a terminal, one below each problem's name."""
    names, numbers = _columns(found, shown)
    head = [*names, *numbers[:5]]
    place = len(names) + 3
    blocks: dict[tuple[str, str, str], list[list[str]]] = {}
    for row in shown:
        line = [*_keys(found, row, names), *_cells(found, row)][: len(head)]
        line[place] = line[place].partition(":")[0]  # reasons are below the table
        one = row.printed
        blocks.setdefault((one.dataset, one.setting, one.clients), []).append(line)
    lines = [line for block in blocks.values() for line in block]
    wide = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    columns = list(range(len(head)))
    if sum(wide) + 2 * (len(wide) - 1) <= WIDTH:
        return [_table(head, wide, list(blocks.values()), columns)]
    said = [n for n, name in enumerate(names) if name in ("dataset", "setting", "clients")]
    parts: list[Any] = []
    for block in blocks.values():
        words = [f"{block[0][n]} clients" if names[n] == "clients" else block[0][n] for n in said]
        parts += [Text()] if parts else []
        parts.append(Text(", ".join(word for word in words if word), style="bold"))
        parts.append(_table(head, wide, [block], [n for n in columns if n not in said]))
    return parts


def _table(
    head: Sequence[str],
    wide: Sequence[int],
    blocks: Sequence[Sequence[Sequence[str]]],
    columns: Sequence[int],
) -> Table:
    """Some columns of some blocks of lines."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for n in columns:
        left = head[n] in ("dataset", "setting", "method", "metric", "verdict")
        table.add_column(
            head[n], justify="left" if left else "right", no_wrap=True, min_width=wide[n]
        )
    for block in blocks:
        table.add_section()
        for line in block:
            style = {n: _COLOURS.get(line[n], "") for n in columns if head[n] == "verdict"}
            table.add_row(*(Text(line[n], style=style.get(n, "")) for n in columns))
    return table


def heading(found: Reproduction) -> str:
    """Whose table this is."""
    shows = found.paper.recipe.tables[found.table].shows
    return f"{found.paper.name}, table {found.table}: {shows}"


def how(found: Reproduction, rows: Sequence[Row]) -> str:
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


def summary(found: Reproduction) -> dict[str, Any]:
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


def _plain(found: Reproduction, row: Row) -> dict[str, Any]:
    one, own = row.printed, found.rules[0]
    line: dict[str, Any] = {
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
        line[f"{prefix}cells"] = " ".join(cell.name for cell in row.cells.get(rules, ()))
    line["verdict"] = found.verdict(row)
    return line


def write_table(found: Reproduction, folder: Path, *, tex: bool) -> list[Path]:
    """CSV and Markdown, and LaTeX if asked for now or earlier, in the study's folder."""
    stem = f"table-{found.table}" + (f"-rounds-{found.rounds}" if found.rounds else "")
    files = {f"{stem}.csv": _csv(found), f"{stem}.md": _markdown(found)}
    if tex or (folder / f"{stem}.tex").exists():
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
    names, numbers = _columns(found, found.rows)
    head = [*names, *numbers]
    lines = [
        f"# {heading(found)}",
        "",
        f"{found.paper.recipe.title}. {how(found, found.rows)}.",
        "",
        _bar(head),
    ]
    lines.append(_bar(["---"] * len(head)))
    for row in found.rows:
        lines.append(_bar([*_keys(found, row, names), *_cells(found, row)]))
    return "\n".join([*lines, "", *(f"{line}\n" for line in summary_lines(found))])


def _bar(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _tex(found: Reproduction) -> str:
    names, numbers = _columns(found, found.rows)
    head = [*names, *numbers]
    wide = ["l" if n in (*names, "verdict") and n != "clients" else "r" for n in head]
    lines = [
        "% Needs \\usepackage{booktabs}.",
        f"\\begin{{tabular}}{{{''.join(wide)}}}",
        "\\toprule",
        " & ".join(map(escaped, head)) + " \\\\",
        "\\midrule",
    ]
    for row in found.rows:
        texts = [*_keys(found, row, names), *_cells(found, row)]
        texts[len(names) + 3] = texts[len(names) + 3].partition(":")[0]
        lines.append(" & ".join(map(escaped, texts)) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


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
