"""A paper's table again: every printed number, ours beside it, and what to make of the two.

A cell is one run of a study (`atoll.studies.study`), named after what decides its numbers: tables
and protocols that need the same run share it, and a second call runs only what is missing.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from atoll.analyses.clusters import Gain
from atoll.core.errors import ConfigError, unknown
from atoll.data.public.registry import plain_name
from atoll.experiment.command import option_words
from atoll.experiment.config import RunConfig, config_text, make_config
from atoll.experiment.folder import open_run, read_json
from atoll.studies.reproduce.recipes import AVERAGE, GAINS, PRINTED_METRICS, STRICT, Paper, Printed
from atoll.studies.study import run_study
from atoll.studies.study_run import Json, RunOutcome, StudyObserver, StudyRun

TOLERANCE = 1.5
"""Points that a reproduced number may lie from the printed one, if its own spread is no larger."""
COLUMNS = ("dataset", "setting", "clients", "method", "metric")
"""What `--only` can ask for."""


@dataclass(frozen=True)
class Ours:
    """What came out of a run: in percent, or a number of clients; `values` are the seeds'."""

    mean: float
    std: float | None
    seeds: int
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class ReproducedRow:
    """One printed cell and what stands beside it.

    Attributes:
        printed: What the paper says.
        runs: The runs behind it by protocol, the paper's first; several where the paper prints a
            mean over others of its cells, and none if it has no run.
        metrics: Our name of what is read from each of these runs.
        baseline: The run over which clients gain, where the paper prints gains.
        reason: Why it has no run; empty if it has.
        ours: By protocol, where the run is done.
        errors: By protocol, where it failed.
        tolerance: How far ours may lie from the print.
        note: What is different about this method here.
    """

    printed: Printed
    runs: Mapping[str, tuple[StudyRun, ...]] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    baseline: StudyRun | None = None
    reason: str = ""
    ours: Mapping[str, Ours] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    note: str = ""


@dataclass(frozen=True)
class Reproduction:
    """A table again.

    Attributes:
        paper: Whose.
        table: Its number.
        rows: In the order of the print.
        rules: The protocols that were run, the paper's first.
        rounds: So many in place of the published number; None: not shortened.
        seeds: How many.
    """

    paper: Paper
    table: str
    rows: tuple[ReproducedRow, ...]
    rules: tuple[str, ...]
    rounds: int | None
    seeds: int

    def difference(self, row: ReproducedRow, rules: str) -> float | None:
        """Ours less the print; None if there is no number of ours."""
        return row.ours[rules].mean - row.printed.value if rules in row.ours else None

    def verdict(self, row: ReproducedRow) -> str:
        """What to make of a row, under the paper's own protocol."""
        rules = self.rules[0]
        if row.reason:
            return f"not run: {row.reason}"
        if rules in row.errors:
            return f"failed: {row.errors[rules]}"
        if rules not in row.ours:
            return "not run"
        if self.rounds is not None:
            return "shortened"
        return verdict(row.ours[rules].mean - row.printed.value, row.tolerance)

    def counts(self) -> dict[str, int]:
        """How many rows have each verdict, by its first word or two."""
        found: dict[str, int] = {}
        for row in self.rows:
            word = self.verdict(row).partition(":")[0]
            found[word] = found.get(word, 0) + 1
        return found


def verdict(difference: float, tolerance: float) -> str:
    """What to make of a difference: "reproduced", or "above" or "below" the print."""
    if abs(difference) <= tolerance + 1e-9:
        return "reproduced"
    return "above" if difference > 0 else "below"


@dataclass(frozen=True)
class Wanted:
    """What to run, as the user asked for it.

    Attributes:
        only: Pairs of column and value; values of one column are alternatives.
        both: Whether `strict` stands beside the paper's protocol.
        seeds: How many.
        rounds: In place of the published number; None: that number.
        root: Where the data are.
        device: As in `RunConfig`.
    """

    only: tuple[tuple[str, str], ...] = ()
    both: bool = False
    seeds: int = 3
    rounds: int | None = None
    root: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        make_config(**self.options())  # impossible numbers, before anything else

    def rules(self, paper: Paper) -> tuple[str, ...]:
        """The protocols, the paper's own first."""
        own = paper.recipe.protocol
        return (own, STRICT) if self.both else (own,)

    def options(self) -> Json:
        """What every run gets."""
        given = {
            "seeds": self.seeds,
            "rounds": self.rounds,
            "data_root": self.root,
            "device": self.device,
        }
        return {key: value for key, value in given.items() if value is not None}


def parse_only(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs from "dataset=Cora,clients=10"; a comma inside a name does not end it."""
    pairs = []
    for text in texts:
        for part in re.split(r",(?=\s*\w+\s*=)", text):
            key, equals, value = part.partition("=")
            if not equals or not key.strip() or not value.strip():
                raise ConfigError(
                    f"--only takes COLUMN=VALUE, but got '{part}'; columns: {', '.join(COLUMNS)}"
                )
            if key.strip().lower() not in COLUMNS:
                raise unknown("column of --only", key.strip(), COLUMNS)
            pairs.append((key.strip().lower(), value.strip()))
    return tuple(pairs)


def chosen(paper: Paper, cells: Sequence[Printed], wanted: Wanted) -> list[Printed]:
    """The cells that `--only` asks for; a value that occurs nowhere is refused."""
    kept = list(cells)
    for column in dict.fromkeys(key for key, _ in wanted.only):
        meant: set[str] = set()
        for value in (value for key, value in wanted.only if key == column):
            meant |= _meant(paper, cells, column, value)
        kept = [one for one in kept if getattr(one, column) in meant]
    if not kept:
        asked = ", ".join(f"{key}={value}" for key, value in wanted.only)
        raise ConfigError(f"no cell of this table has all of {asked}; leave something out")
    return kept


def _meant(paper: Paper, cells: Sequence[Printed], column: str, value: str) -> set[str]:
    """The printed names that a value asks for: the same, or else those that Atoll calls so."""
    names = dict.fromkeys(str(getattr(one, column)) for one in cells)
    same = {name for name in names if _plain(name) == _plain(value)}
    if same:
        return same
    other = {name for name in names if _plain(value) in map(_plain, _other(paper, name, column))}
    if not other:
        raise unknown(f"{column} of this table", value, names)
    return other


def _plain(text: str) -> str:
    return text.lower().replace(" ", "")


def _other(paper: Paper, name: str, column: str) -> list[str]:
    """What Atoll calls what a paper calls so; a setting is also known by its parts."""
    if column == "dataset" and name in paper.recipe.data:
        return [paper.data_name(name)]
    if column == "method":
        return [str(paper.recipe.methods[name].run.get("method", name))]
    return name.split(";") if column == "setting" else []


def plan_table(
    paper: Paper, table: str, wanted: Wanted, done: Collection[str] = ()
) -> list[ReproducedRow]:
    """The rows of a table before anything is run; runs in `done` need no data any more."""
    reason = paper.recipe.tables[table].reason
    if reason:
        raise ConfigError(f"table {table} of {paper.name} is not reproduced: {reason}")
    cells = paper.cells(table)
    kept = set(chosen(paper, cells, wanted))
    return [_planned(paper, one, cells, wanted, done) for one in in_order(cells) if one in kept]


def in_order(cells: Sequence[Printed]) -> list[Printed]:
    """The cells of a table; methods on the same clients stand together."""
    problems = list(dict.fromkeys((one.dataset, one.setting, one.clients) for one in cells))
    return sorted(cells, key=lambda one: problems.index((one.dataset, one.setting, one.clients)))


def _planned(
    paper: Paper, one: Printed, table: Sequence[Printed], wanted: Wanted, done: Collection[str]
) -> ReproducedRow:
    parts = averaged(one, table) if one.metric == AVERAGE else [one]
    own = paper.recipe.protocol
    reasons = {
        part.dataset: paper.why_not(part.dataset, part.method, wanted.root)
        for part in parts
        if not done or _run(paper, part, own, wanted).name not in done
    }
    lacking = [name for name, reason in reasons.items() if reason]
    if lacking and one.metric == AVERAGE:
        return ReproducedRow(
            one, reason=f"a mean over data sets that are not all here: {', '.join(lacking)}"
        )
    if lacking:
        return ReproducedRow(one, reason=reasons[one.dataset])
    gains = one.metric in GAINS
    cells = {
        rules: tuple(_run(paper, part, rules, wanted) for part in parts)
        for rules in wanted.rules(paper)
        # Clients differ from seed to seed under strict, so that none of them gains.
        if rules != STRICT or not gains
    }
    base = replace(one, method=paper.recipe.baseline) if gains else None
    return ReproducedRow(
        one,
        cells,
        tuple(PRINTED_METRICS.get(part.metric, part.metric) for part in parts),
        _run(paper, base, own, wanted) if base else None,
        tolerance=tolerance(paper, one.metric, one.std),
        note=paper.recipe.methods[one.method].note,
    )


def tolerance(paper: Paper, metric: str, std: float | None) -> float:
    """How far ours may lie from a printed number of a paper, in its unit."""
    if metric == "ratio_improved":
        return 1.0
    own = std if paper.recipe.spread == "of runs" else None
    return max(TOLERANCE, own or 0.0)


def averaged(one: Printed, table: Sequence[Printed]) -> list[Printed]:
    """The cells that a printed average is over."""
    return [
        cell
        for cell in table
        if cell.metric != AVERAGE
        and (cell.method, cell.setting) == (one.method, one.setting)
        and one.clients in ("all", cell.clients)
    ]


def _run(paper: Paper, one: Printed, rules: str, wanted: Wanted) -> StudyRun:
    config = paper.config(
        one.dataset,
        one.setting,
        one.method,
        clients=int(one.clients),
        rules=STRICT if rules == STRICT else "",
        **wanted.options(),
    )
    labels = {
        "method": one.method,
        "data": one.dataset,
        "setting": one.setting,
        "clients": one.clients,
        "protocol": rules,
    }
    return named_run(config, labels)


def named_run(config: RunConfig, labels: Json) -> StudyRun:
    """A cell whose name says what it is and tells it from every other configuration.

    Where the data lie is no part of it, nor which clients would be accepted, nor the number of
    seeds: more of them continue a cell.
    """
    text = config_text(msgspec.structs.replace(config, data_root=None, seeds=1, allow=()))
    words = [plain_name(config.data).lower(), config.clients, config.method, config.protocol]
    stem = "-".join(str(word) for word in words if word is not None)
    return StudyRun(f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}", config, dict(labels))


def unique(cells: Iterable[StudyRun]) -> list[StudyRun]:
    """Each run once, in the order of its first use."""
    return list({cell.name: cell for cell in cells}.values())


def about_study(paper: Paper, item: str, wanted: Wanted, folder: Path) -> Json:
    """What a study's folder says of itself, with the command that goes on with it.

    "looks" are this call and those before it, each with its command (`history`).
    """
    words = ["atoll", "reproduce", paper.name, item]
    if wanted.only:
        words += ["--only", ",".join(f"{key}={value}" for key, value in wanted.only)]
    words += option_words({"both": wanted.both, **wanted.options(), "out": folder})
    command, path = shlex.join(words), folder / "study.json"
    call = {"item": item, **msgspec.to_builtins(wanted), "command": command}
    call["only"] = [list(pair) for pair in wanted.only]  # as JSON gives it back
    before = read_json(path).get("looks", []) if path.exists() else []
    same = ("seeds", "root", "command")  # may differ: the later call has the last word
    calls = [one for one in before if any(one[k] != call[k] for k in call if k not in same)]
    return {
        "kind": "reproduce",
        "command": command,
        "paper": paper.name,
        "item": item,
        "looks": [*calls, call],
    }


def reproduce_table(
    paper: Paper,
    table: str,
    wanted: Wanted,
    folder: Path,
    *,
    observer: StudyObserver | None = None,
    jobs: int | str = 1,
) -> Reproduction:
    """Run what a table needs and is not there yet, and put it beside the print."""
    rows = plan_table(paper, table, wanted)
    runs = unique(run for row in rows for run in needed(row))
    about = about_study(paper, f"table{table}", wanted, folder)
    outcomes = run_study(folder, runs, about=about, observer=observer, adds=True, jobs=jobs)
    found, gains = {outcome.run.name: outcome for outcome in outcomes}, Gains()
    done = tuple(filled(row, found, gains) for row in rows)
    return Reproduction(paper, table, done, wanted.rules(paper), wanted.rounds, wanted.seeds)


def needed(row: ReproducedRow) -> list[StudyRun]:
    """Every run that a row needs."""
    own = [run for runs in row.runs.values() for run in runs]
    return own if row.baseline is None else [*own, row.baseline]


def filled(row: ReproducedRow, found: Mapping[str, RunOutcome], gains: Gains) -> ReproducedRow:
    """A row with what its runs say; a protocol of which one is not there says nothing."""
    ours, errors = {}, {}
    for rules, runs in row.runs.items():
        base = () if row.baseline is None else (row.baseline,)
        behind = [found[run.name] for run in (*runs, *base) if run.name in found]
        if len(behind) < len(runs) + len(base):
            continue
        outcomes = behind[: len(runs)]
        failed = [f"{o.run.labels['method']}: {o.error}" for o in behind if o.error is not None]
        if failed:
            errors[rules] = failed[0]
        elif row.baseline is not None:
            ours[rules] = gains.of(behind[0], behind[1], row.printed.metric)
        else:
            read = [ours_of(o, name) for o, name in zip(outcomes, row.metrics, strict=True)]
            ours[rules] = read[0] if len(read) == 1 else _mean(read)
    return replace(row, ours=ours, errors=errors)


def _mean(parts: Sequence[Ours]) -> Ours:
    return Ours(float(np.mean([part.mean for part in parts])), None, parts[0].seeds)


def ours_of(outcome: RunOutcome, metric: str) -> Ours:
    """A metric of a finished run, in percent."""
    assert outcome.summary is not None
    metrics = outcome.summary["metrics"]
    if metric not in metrics:
        raise ConfigError(f"the run in '{outcome.folder}' has no {metric}")
    found = metrics[metric]
    seeds = len(found["per_seed"])
    values = tuple(100 * value for value in found["per_seed"])
    std = 100 * found["std"] if seeds > 1 else None  # earlier versions wrote 0 for one seed
    return Ours(100 * found["mean"], std, seeds, values)


class Gains:
    """What clients gain over the baseline's; a run is read once."""

    def __init__(self) -> None:
        self.clients: dict[Path, np.ndarray] = {}

    def of(self, outcome: RunOutcome, base: RunOutcome, metric: str) -> Ours:
        """The least gain in points, or the number of clients that lose nothing."""
        accuracy = self._of_clients(outcome.folder)
        gain = Gain("", accuracy, accuracy.mean(0) - self._of_clients(base.folder).mean(0))
        assert gain.gain is not None
        least = metric == "min_gain"
        value = 100 * float(np.nanmin(gain.gain)) if least else float(gain.improved(ties=True))
        return Ours(value, None, len(accuracy))

    def _of_clients(self, folder: Path) -> np.ndarray:
        if folder not in self.clients:
            self.clients[folder] = open_run(folder).result.of_clients()
        return self.clients[folder]
