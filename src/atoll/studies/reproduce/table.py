"""Reproduce a table: every published number, our number, and a verdict on the two.

The name of a run in the study (`atoll.studies.study`) depends on the options that determine its
numbers. Therefore tables and figures share a run, and a second call runs only missing runs.

study.json lists all calls under "looks". Therefore a partial call keeps the files of a table
complete, and `atoll report` finds all calls. Calls with other rounds make separate tables.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from atoll.analyses.clusters import Gain
from atoll.core.errors import AtollError, ConfigError, unknown
from atoll.data.public.registry import plain_name
from atoll.experiment.config import RunConfig, config_text, make_config, option_words
from atoll.experiment.folder import open_run, read_json
from atoll.experiment.status import failures
from atoll.studies.baselines import make_baseline
from atoll.studies.reproduce import recipes
from atoll.studies.reproduce.recipes import AVERAGE, GAINS, PRINTED_METRICS, STRICT, Paper, Printed
from atoll.studies.study import run_study
from atoll.studies.study_run import Json, RunOutcome, StudyObserver, StudyRun, read_outcome

LAST = ":last"  # after the name of a protocol: the last round instead of the selected round
TOLERANCE = 1.5  # maximum difference in points, or the published deviation if larger
Spread = tuple[float, float | None, int]  # mean, standard deviation and number of seeds
Done = Container[str] | None  # names of runs that need no data; None: all
COLUMNS = ("dataset", "setting", "clients", "method", "metric")  # columns that `--only` accepts


@dataclass(frozen=True)
class Ours:
    """The number of a run, in percent or as a number of clients. `values` are the seeds' values."""

    mean: float
    std: float | None
    seeds: int
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class ReproducedRow:
    """One published cell and our numbers. `ours` and `errors` are by protocol.

    `runs` are also by protocol, with the paper's protocol first. A published mean over other cells
    has several runs, and a cell with a `reason` has no run. `metrics` names the metric of each run.
    """

    printed: Printed
    runs: Mapping[str, tuple[StudyRun, ...]] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    baseline: StudyRun | None = None  # the run that gains are measured against
    reason: str = ""  # why it has no run
    ours: Mapping[str, Ours] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = TOLERANCE  # maximum distance of our value from the published value
    note: str = ""  # a departure of this method here

    @property
    def beside(self) -> dict[str, Ours]:
        """Additional results under the paper's protocol: its last round, and other data seeds."""
        return {rules: own for rules, own in self.ours.items() if ":" in rules}


@dataclass(frozen=True)
class Reproduction:
    """A reproduced table. Its rows have the order of `in_order`."""

    paper: Paper
    table: str
    rows: tuple[ReproducedRow, ...]
    rules: tuple[str, ...]  # the protocols of the runs, with the paper's first
    rounds: int | None  # instead of the published number; None: not shortened
    seeds: int

    def difference(self, row: ReproducedRow, rules: str) -> float | None:
        """Return our value minus the published value, or None without our value."""
        return row.ours[rules].mean - row.printed.value if rules in row.ours else None

    def verdict(self, row: ReproducedRow) -> str:
        """Return the verdict on a row, under the paper's protocol."""
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

    def is_compatible(self, row: ReproducedRow) -> bool | None:
        """Return the statistical verdict, or None if a deviation is missing or rounds were cut."""
        if self.rules[0] not in row.ours or self.rounds is not None:
            return None
        draws = [own for rules, own in row.beside.items() if not rules.endswith(LAST)]
        ours = [(own.mean, own.std, own.seeds) for own in draws or [row.ours[self.rules[0]]]]
        return compatible(self.paper, row.printed.metric, row.printed.value, row.printed.std, ours)

    def counts(self) -> dict[str, int]:
        """Count the rows of each verdict, without its reason."""
        return dict(Counter(self.verdict(row).partition(":")[0] for row in self.rows))


def verdict(difference: float, tolerance: float) -> str:
    """Return the verdict on a difference: "reproduced", "above" or "below"."""
    if abs(difference) <= tolerance + 1e-9:
        return "reproduced"
    return "above" if difference > 0 else "below"


def compatible(
    paper: Paper, metric: str, printed: float, spread: float | None, ours: Sequence[Spread]
) -> bool | None:
    """Return whether published and our values differ by at most two standard errors.

    `ours` contains a `Spread` for each draw of the data, and all runs have equal weight. The
    published mean has the recipe's number of runs. It has our deviation if the paper publishes none
    over runs. If only seeds differ, eight to nine of ten cells agree. The result is None for gains,
    or if we have no deviation.
    """
    if metric in GAINS or any(std is None for _, std, _ in ours):
        return None
    count = sum(seeds for *_, seeds in ours)
    mean = sum(seeds * mean for mean, _, seeds in ours) / count
    squares = sum((n - 1) * (std or 0) ** 2 + n * (one - mean) ** 2 for one, std, n in ours)
    own = squares / max(1, count - 1)
    known = spread is not None and paper.recipe.spread == "of runs"
    theirs = (spread or 0) ** 2 if known else own
    limit = 2 * math.sqrt(theirs / paper.recipe.printed_runs + own / count)
    return abs(printed - mean) <= limit + 1e-9


@dataclass(frozen=True)
class Wanted:
    """The user's request for tables and figures."""

    only: tuple[
        tuple[str, str], ...
    ] = ()  # column and value; several values of a column are alternatives
    both: bool = False  # whether to run `strict` in addition to the paper's protocol
    seeds: int = 3
    rounds: int | None = None  # instead of the published number
    root: str | None = None  # folder of the data
    device: str | None = None

    def __post_init__(self) -> None:
        make_config(**self.options())  # rejects impossible numbers first

    def rules(self, paper: Paper) -> tuple[str, ...]:
        """Return the protocols, with the paper's first."""
        own = paper.recipe.protocol
        return (own, STRICT) if self.both else (own,)

    def looks(self, paper: Paper, table: str) -> tuple[str, ...]:
        """Return the protocols, and variants of the paper's protocol.

        These are its last round and, with `both`, other data seeds (`TableRecipe`).
        """
        own, recipe = paper.recipe.protocol, paper.recipe.tables[table]
        more = [LAST] if recipe.last_round else []
        more += [f":{seed}" for seed in recipe.draws if self.both]
        return (*self.rules(paper), *(own + one for one in more))

    def options(self) -> Json:
        """Return the options of every run."""
        given: Json = {"seeds": self.seeds, "rounds": self.rounds}
        given |= {"data_root": self.root, "device": self.device}
        return {key: value for key, value in given.items() if value is not None}


@dataclass(frozen=True)
class PaperStudy:
    """The study of a paper's tables and figures."""

    paper: Paper
    wanted: Wanted
    folder: Path
    observer: StudyObserver | None = None
    jobs: int | str = 1

    def run(self, item: str, runs: Iterable[StudyRun]) -> dict[str, RunOutcome]:
        """Run the missing runs of an item ("table1", "fig4"). Return outcomes by name."""
        about = about_study(self.paper, item, self.wanted, self.folder)
        how: Json = {"observer": self.observer, "jobs": self.jobs, "adds": True}
        outcomes = run_study(self.folder, unique(runs), about=about, **how)
        return {outcome.run.name: outcome for outcome in outcomes}


def parse_only(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse pairs from "dataset=Cora,clients=10". A comma inside a name does not end it."""
    pairs = []
    for part in (part for text in texts for part in re.split(r",(?=\s*\w+\s*=)", text)):
        key, _, value = (word.strip() for word in part.partition("="))
        if not key or not value:
            known = f"columns: {', '.join(COLUMNS)}"
            raise ConfigError(f"--only takes COLUMN=VALUE, but got '{part}'; {known}")
        if key.lower() not in COLUMNS:
            raise unknown("column of --only", key, COLUMNS)
        pairs.append((key.lower(), value))
    return tuple(pairs)


def chosen(paper: Paper, cells: Sequence[Printed], wanted: Wanted) -> list[Printed]:
    """Return the cells that `--only` selects. Raise an error for an unknown value."""
    kept = list(cells)
    for column in dict.fromkeys(key for key, _ in wanted.only):
        values = [value for key, value in wanted.only if key == column]
        names = set[str]().union(*(_printed_names(paper, cells, column, v) for v in values))
        kept = [one for one in kept if getattr(one, column) in names]
    if not kept:
        only = ", ".join(f"{key}={value}" for key, value in wanted.only)
        raise ConfigError(f"no cell of this table has all of {only}; remove one condition")
    return kept


def _printed_names(paper: Paper, cells: Sequence[Printed], column: str, value: str) -> set[str]:
    """Return the published names that a value selects: equal names, or names with this alias."""
    names = dict.fromkeys(str(getattr(one, column)) for one in cells)

    def is_it(name: str) -> bool:
        return name.lower().replace(" ", "") == value.lower().replace(" ", "")

    same = {name for name in names if is_it(name)}
    same = same or {name for name in names if any(map(is_it, _aliases(paper, name, column)))}
    if not same:
        raise unknown(f"{column} of this table", value, names)
    return same


def _aliases(paper: Paper, name: str, column: str) -> list[str]:
    """Return Atoll's aliases of a name in a paper. A setting also matches each of its parts."""
    if column == "dataset" and name in paper.recipe.data:
        return [paper.data_name(name)]
    if column == "method":
        return [str(paper.recipe.methods[name].run.get("method", name))]
    return name.split(";") if column == "setting" else []


def plan_table(paper: Paper, table: str, wanted: Wanted, done: Done = ()) -> list[ReproducedRow]:
    """Plan the rows of a table. Runs named in `done` need no data. None means all runs."""
    if reason := paper.recipe.tables[table].reason:
        raise ConfigError(f"table {table} of {paper.name} is not reproduced: {reason}")
    cells = paper.cells(table)
    kept = set(chosen(paper, cells, wanted))
    return [_planned(paper, one, cells, wanted, done) for one in in_order(cells) if one in kept]


def in_order(cells: Sequence[Printed]) -> list[Printed]:
    """Sort the cells of a table, so that methods on the same clients are together."""
    problems = list(dict.fromkeys(one.problem for one in cells))
    return sorted(cells, key=lambda one: problems.index(one.problem))


def _planned(
    paper: Paper, one: Printed, table: Sequence[Printed], wanted: Wanted, done: Done
) -> ReproducedRow:
    parts = averaged(one, table) if one.metric == AVERAGE else [one]
    own = paper.recipe.protocol
    reasons = {
        part.dataset: paper.why_not(part.dataset, part.method, wanted.root)
        for part in (parts if done is not None else ())
        if not done or _run(paper, part, own, wanted).name not in done
    }
    if lacking := [name for name, reason in reasons.items() if reason]:
        whole = f"a mean over data sets, of which some are missing: {', '.join(lacking)}"
        return ReproducedRow(one, reason=whole if one.metric == AVERAGE else reasons[one.dataset])
    gains = one.metric in GAINS
    runs = {
        rules: tuple(_run(paper, part, rules.removesuffix(LAST), wanted) for part in parts)
        for rules in wanted.looks(paper, one.table)
        # Under strict, clients differ from seed to seed, so they have no gains.
        if rules != STRICT or not gains
    }
    base = replace(one, method=paper.recipe.baseline)
    base_run = _run(paper, base, own, wanted) if gains else None
    metrics = tuple(PRINTED_METRICS.get(part.metric, part.metric) for part in parts)
    near, note = tolerance(paper, one.metric, one.std), paper.note(parts[0].dataset, one.method)
    return ReproducedRow(one, runs, metrics, base_run, tolerance=near, note=note)


def tolerance(paper: Paper, metric: str, std: float | None) -> float:
    """Return the maximum distance of our value from a published number, in its unit."""
    if metric == "ratio_improved":
        return 1.0
    own = std if paper.recipe.spread == "of runs" else None
    return max(TOLERANCE, own or 0.0)


def averaged(one: Printed, table: Sequence[Printed]) -> list[Printed]:
    """Return the cells that a published average covers."""
    same = [c for c in table if (c.method, c.setting) == (one.method, one.setting)]
    return [c for c in same if c.metric != AVERAGE and one.clients in ("all", c.clients)]


def _run(paper: Paper, one: Printed, rules: str, wanted: Wanted) -> StudyRun:
    options: Json = {"clients": int(one.clients), "rules": rules, **wanted.options()}
    config = paper.config(one.dataset, one.setting, one.method, **options)
    labels = {"method": one.method, "data": one.dataset, "setting": one.setting}
    return named_run(config, {**labels, "clients": one.clients, "protocol": rules})


def named_run(config: RunConfig, labels: Json) -> StudyRun:
    """Make a run with a readable name that is unique for every configuration.

    The folder of the data, `allow` and the number of seeds do not change the name, so more seeds
    continue a run.
    """
    text = config_text(msgspec.structs.replace(config, data_root=None, seeds=1, allow=()))
    words = [plain_name(config.data).lower(), config.clients, config.method, config.protocol]
    stem = "-".join(str(word) for word in words if word is not None)
    name = f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    own = make_baseline(config.method, {}) if config.objects else None
    return StudyRun(name, config, dict(labels), own)


def unique(runs: Iterable[StudyRun]) -> list[StudyRun]:
    """Remove duplicate runs, in the order of first use."""
    return list({run.name: run for run in runs}.values())


def about_study(paper: Paper, item: str, wanted: Wanted, folder: Path) -> Json:
    """Return the content of study.json. "looks" contains this and earlier calls (`whole_table`)."""
    words = ["atoll", "reproduce", paper.name, item]
    if wanted.only:
        words += ["--only", ",".join(f"{key}={value}" for key, value in wanted.only)]
    words += option_words({"both": wanted.both, **wanted.options(), "out": folder})
    command, path = shlex.join(words), folder / "study.json"
    call = {"item": item, **msgspec.to_builtins(wanted), "command": command}
    call["only"] = [list(pair) for pair in wanted.only]  # the form that JSON returns
    before = read_json(path).get("looks", []) if path.exists() else []
    same = ("seeds", "root", "command")  # may differ: the later call takes precedence
    calls = [one for one in before if any(one[k] != call[k] for k in call if k not in same)]
    about = {"kind": "reproduce", "command": command, "paper": paper.name, "item": item}
    return {**about, "looks": [*calls, call]}


def reproduce_table(study: PaperStudy, table: str) -> Reproduction:
    """Run the missing runs of a table, and compare them with the published values."""
    paper, wanted = study.paper, study.wanted
    rows = plan_table(paper, table, wanted)
    found = study.run(f"table{table}", (run for row in rows for run in needed(row)))
    gains = Gains()
    done = tuple(filled(row, found, gains) for row in rows)
    return Reproduction(paper, table, done, wanted.rules(paper), wanted.rounds, wanted.seeds)


def needed(row: ReproducedRow) -> list[StudyRun]:
    """Return every run that a row needs."""
    return [run for runs in (*row.runs.values(), (row.baseline,)) for run in runs if run]


def filled(row: ReproducedRow, found: Mapping[str, RunOutcome], gains: Gains) -> ReproducedRow:
    """Fill a row with the numbers of its runs. A protocol with a missing run has no number."""
    ours, errors = {}, {}
    for rules, runs in row.runs.items():
        base = () if row.baseline is None else (row.baseline,)
        behind = [found[run.name] for run in (*runs, *base) if run.name in found]
        if len(behind) < len(runs) + len(base):
            continue
        failed = [f"{o.run.labels['method']}: {o.error}" for o in behind if o.error is not None]
        if failed:
            errors[rules] = failed[0]
        elif row.baseline is not None:
            ours[rules] = gains.of(behind[0], behind[1], row.printed.metric)
        else:
            last = rules.endswith(LAST)
            names = ["last_test_accuracy"] * len(runs) if last else row.metrics
            parts = [ours_of(o, name) for o, name in zip(behind, names, strict=True)]
            mean = float(np.mean([part.mean for part in parts]))
            ours[rules] = parts[0] if len(parts) == 1 else Ours(mean, None, parts[0].seeds)
    return replace(row, ours=ours, errors=errors)


def ours_of(outcome: RunOutcome, metric: str) -> Ours:
    """Return a metric of a finished run, in percent."""
    assert outcome.summary is not None
    if (found := outcome.summary["metrics"].get(metric)) is None:
        raise ConfigError(f"the run in '{outcome.folder}' has no {metric}")
    values = tuple(100 * value for value in found["per_seed"])
    std = 100 * found["std"] if len(values) > 1 else None  # earlier versions wrote 0 for one seed
    return Ours(100 * found["mean"], std, len(values), values)


class Gains(dict[Path, np.ndarray]):
    """Gains of clients over the baseline. It caches each run's accuracy by client."""

    def __missing__(self, folder: Path) -> np.ndarray:
        self[folder] = open_run(folder).result.of_clients()
        return self[folder]

    def of(self, outcome: RunOutcome, base: RunOutcome, metric: str) -> Ours:
        """Return the smallest gain in points (min_gain), or the count of clients without loss."""
        accuracy = self[outcome.folder]
        gain = Gain("", accuracy, accuracy.mean(0) - self[base.folder].mean(0))
        assert gain.gain is not None
        least = metric == "min_gain"
        value = 100 * float(np.nanmin(gain.gain)) if least else float(gain.improved(ties=True))
        return Ours(value, None, len(accuracy))


def read_tables(folder: Path) -> list[Reproduction]:
    """Read every requested table of a folder, in the order of the first calls."""
    about = read_json(folder / "study.json")
    paper = recipes.read_paper(str(about.get("paper")))
    calls = [(str(one["item"]), _wanted(one, folder)) for one in about.get("looks", [])]
    items = dict.fromkeys((item, wanted.rounds) for item, wanted in calls)
    found = [
        whole_table(folder, paper, item.removeprefix("table"), rounds)
        for item, rounds in items
        if item.startswith("table")
    ]
    return [table for table in found if table.rows]


def _wanted(call: Json, folder: Path) -> Wanted:
    """Parse the request of a call."""
    given = {key: value for key, value in call.items() if key not in ("item", "command")}
    try:
        return msgspec.convert(given, Wanted)
    except (AtollError, msgspec.ValidationError) as error:
        raise ConfigError(f"study.json in '{folder}' cannot be used: {error}") from error


def whole_table(folder: Path, paper: Paper, table: str, rounds: int | None) -> Reproduction:
    """Return a table with the numbers of all runs in a folder, and reasons for missing numbers.

    Of several calls for a cell (for example on another device), the last one with a number counts.
    """
    calls = [
        _wanted(one, folder)
        for one in read_json(folder / "study.json").get("looks", [])
        if one["item"] == f"table{table}" and one["rounds"] == rounds
    ]
    rows: dict[Printed, ReproducedRow] = {}
    gains, failed = Gains(), failures(folder)
    done = {path.parent.name for path in folder.glob("cells/*/result.json")}
    for wanted in calls:
        for row in plan_table(paper, table, wanted, done):
            found = [_outcome(folder, run, failed) for run in needed(row)]
            new = filled(row, {one.run.name: one for one in found if one}, gains)
            rows[row.printed] = _joined(rows.get(row.printed, new), new)
    ordered = [rows[one] for one in in_order(paper.cells(table)) if one in rows]
    shown = [row for row in ordered if row.ours or row.errors or row.reason]
    both = any(wanted.both for wanted in calls)
    rules = (paper.recipe.protocol, *([STRICT] if both else []))
    seeds = max((wanted.seeds for wanted in calls), default=0)
    return Reproduction(paper, table, tuple(shown), rules, rounds, seeds)


def _outcome(folder: Path, run: StudyRun, failed: Mapping[str, str]) -> RunOutcome | None:
    """Return the outcome of a run, if the folder contains it."""
    if run.name in failed:
        return RunOutcome(run, folder / "cells" / run.name, error=failed[run.name])
    # An earlier call may have requested fewer seeds than exist, never more.
    return read_outcome(folder, replace(run, config=msgspec.structs.replace(run.config, seeds=1)))


def _joined(before: ReproducedRow, now: ReproducedRow) -> ReproducedRow:
    """Merge a row with the numbers of an earlier call."""
    ours = {**before.ours, **now.ours}
    errors = {rules: e for rules, e in {**before.errors, **now.errors}.items() if rules not in ours}
    reason = "" if ours else now.reason
    return replace(now, ours=ours, runs={**before.runs, **now.runs}, reason=reason, errors=errors)
