"""A paper's table again: every printed number, ours beside it, and a verdict on the two.

A cell is one run of a study (`atoll.studies.study`), named after the options that decide its
numbers: tables and protocols share a run, and a second call runs only what is missing.

study.json lists all calls under "looks". So a call for a part leaves the files of a table complete,
and `atoll report` finds everything. Calls with fewer rounds than published make separate tables.
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

LAST = ":last"  # after the name of a protocol: the last round in place of the selected one
TOLERANCE = 1.5  # points from a printed number to ours, if the printed spread is no larger
Spread = tuple[float, float | None, int]  # mean, standard deviation and number of seeds
Done = Container[str] | None  # names of runs that need no data any more; None: all
COLUMNS = ("dataset", "setting", "clients", "method", "metric")  # that `--only` can choose by


@dataclass(frozen=True)
class Ours:
    """The number of a run: in percent, or a number of clients; `values` are the seeds'."""

    mean: float
    std: float | None
    seeds: int
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class ReproducedRow:
    """One printed cell and our numbers; `ours` and `errors` are by protocol.

    `runs` are also by protocol, the paper's first: several where the paper prints a mean over
    others of its cells, and none if there is a `reason`. `metrics` names what each of them gives.
    """

    printed: Printed
    runs: Mapping[str, tuple[StudyRun, ...]] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    baseline: StudyRun | None = None  # the run over which clients gain, where gains are printed
    reason: str = ""  # why it has no run
    ours: Mapping[str, Ours] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = TOLERANCE  # how far ours may lie from the print
    note: str = ""  # a departure of this method here

    @property
    def beside(self) -> dict[str, Ours]:
        """Further looks at the paper's protocol: its last round, and other seeds of the data."""
        return {rules: own for rules, own in self.ours.items() if ":" in rules}


@dataclass(frozen=True)
class Reproduction:
    """A table again; its rows are in the order of the print."""

    paper: Paper
    table: str
    rows: tuple[ReproducedRow, ...]
    rules: tuple[str, ...]  # the protocols that were run, the paper's first
    rounds: int | None  # in place of the published number; None: not shortened
    seeds: int

    def difference(self, row: ReproducedRow, rules: str) -> float | None:
        """Ours less the print; None if there is no number of ours."""
        return row.ours[rules].mean - row.printed.value if rules in row.ours else None

    def verdict(self, row: ReproducedRow) -> str:
        """The verdict on a row, under the paper's own protocol."""
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
        """The second verdict, by both spreads; None where one is missing or it was shortened."""
        if self.rules[0] not in row.ours or self.rounds is not None:
            return None
        draws = [own for rules, own in row.beside.items() if not rules.endswith(LAST)]
        ours = [(own.mean, own.std, own.seeds) for own in draws or [row.ours[self.rules[0]]]]
        return compatible(self.paper, row.printed.metric, row.printed.value, row.printed.std, ours)

    def counts(self) -> dict[str, int]:
        """How many rows have each verdict, by its first word or two."""
        return dict(Counter(self.verdict(row).partition(":")[0] for row in self.rows))


def verdict(difference: float, tolerance: float) -> str:
    """The verdict on a difference: "reproduced", or "above" or "below" the print."""
    if abs(difference) <= tolerance + 1e-9:
        return "reproduced"
    return "above" if difference > 0 else "below"


def compatible(
    paper: Paper, metric: str, printed: float, spread: float | None, ours: Sequence[Spread]
) -> bool | None:
    """Whether print and ours differ by at most two standard errors of their difference.

    `ours` are those of each draw of the data; runs of all draws count alike. The printed mean has
    the recipe's number of runs, and our spread where none is printed. If only seeds differ, about
    nine of ten cells agree. None: we have no spread.
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

    only: tuple[tuple[str, str], ...] = ()  # column and value; values of a column are alternatives
    both: bool = False  # whether `strict` stands beside the paper's protocol
    seeds: int = 3
    rounds: int | None = None  # in place of the published number
    root: str | None = None  # folder of the data
    device: str | None = None

    def __post_init__(self) -> None:
        make_config(**self.options())  # impossible numbers, before anything else

    def rules(self, paper: Paper) -> tuple[str, ...]:
        """The protocols, the paper's own first."""
        own = paper.recipe.protocol
        return (own, STRICT) if self.both else (own,)

    def looks(self, paper: Paper, table: str) -> tuple[str, ...]:
        """The protocols, and what stands beside the paper's own: its last round, other draws."""
        own, recipe = paper.recipe.protocol, paper.recipe.tables[table]
        more = [LAST] if recipe.last_round else []
        more += [f":{seed}" for seed in recipe.draws if self.both]
        return (*self.rules(paper), *(own + one for one in more))

    def options(self) -> Json:
        """The options of every run."""
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
        """Run what an item ("table1", "fig4") lacks; outcomes by name."""
        about = about_study(self.paper, item, self.wanted, self.folder)
        how: Json = {"observer": self.observer, "jobs": self.jobs, "adds": True}
        outcomes = run_study(self.folder, unique(runs), about=about, **how)
        return {outcome.run.name: outcome for outcome in outcomes}


def parse_only(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs from "dataset=Cora,clients=10"; a comma inside a name does not end it."""
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
    """The cells that `--only` asks for; a value that occurs nowhere is refused."""
    kept = list(cells)
    for column in dict.fromkeys(key for key, _ in wanted.only):
        values = [value for key, value in wanted.only if key == column]
        names = set[str]().union(*(_printed_names(paper, cells, column, v) for v in values))
        kept = [one for one in kept if getattr(one, column) in names]
    if not kept:
        only = ", ".join(f"{key}={value}" for key, value in wanted.only)
        raise ConfigError(f"no cell of this table has all of {only}; leave something out")
    return kept


def _printed_names(paper: Paper, cells: Sequence[Printed], column: str, value: str) -> set[str]:
    """The printed names that a value asks for: the same, or else those with such an alias."""
    names = dict.fromkeys(str(getattr(one, column)) for one in cells)

    def is_it(name: str) -> bool:
        return name.lower().replace(" ", "") == value.lower().replace(" ", "")

    same = {name for name in names if is_it(name)}
    same = same or {name for name in names if any(map(is_it, _aliases(paper, name, column)))}
    if not same:
        raise unknown(f"{column} of this table", value, names)
    return same


def _aliases(paper: Paper, name: str, column: str) -> list[str]:
    """Atoll's names of a paper's name; a setting is also known by its parts."""
    if column == "dataset" and name in paper.recipe.data:
        return [paper.data_name(name)]
    if column == "method":
        return [str(paper.recipe.methods[name].run.get("method", name))]
    return name.split(";") if column == "setting" else []


def plan_table(paper: Paper, table: str, wanted: Wanted, done: Done = ()) -> list[ReproducedRow]:
    """The rows of a table before anything is run; runs in `done`, or all (None), need no data."""
    if reason := paper.recipe.tables[table].reason:
        raise ConfigError(f"table {table} of {paper.name} is not reproduced: {reason}")
    cells = paper.cells(table)
    kept = set(chosen(paper, cells, wanted))
    return [_planned(paper, one, cells, wanted, done) for one in in_order(cells) if one in kept]


def in_order(cells: Sequence[Printed]) -> list[Printed]:
    """The cells of a table; methods on the same clients stand together."""
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
        whole = f"a mean over data sets that are not all here: {', '.join(lacking)}"
        return ReproducedRow(one, reason=whole if one.metric == AVERAGE else reasons[one.dataset])
    gains = one.metric in GAINS
    runs = {
        rules: tuple(_run(paper, part, rules.removesuffix(LAST), wanted) for part in parts)
        for rules in wanted.looks(paper, one.table)
        # Clients differ from seed to seed under strict, so that none of them gains.
        if rules != STRICT or not gains
    }
    base = replace(one, method=paper.recipe.baseline)
    base_run = _run(paper, base, own, wanted) if gains else None
    metrics = tuple(PRINTED_METRICS.get(part.metric, part.metric) for part in parts)
    near, note = tolerance(paper, one.metric, one.std), paper.note(parts[0].dataset, one.method)
    return ReproducedRow(one, runs, metrics, base_run, tolerance=near, note=note)


def tolerance(paper: Paper, metric: str, std: float | None) -> float:
    """How far ours may lie from a printed number of a paper, in its unit."""
    if metric == "ratio_improved":
        return 1.0
    own = std if paper.recipe.spread == "of runs" else None
    return max(TOLERANCE, own or 0.0)


def averaged(one: Printed, table: Sequence[Printed]) -> list[Printed]:
    """The cells that a printed average is over."""
    same = [c for c in table if (c.method, c.setting) == (one.method, one.setting)]
    return [c for c in same if c.metric != AVERAGE and one.clients in ("all", c.clients)]


def _run(paper: Paper, one: Printed, rules: str, wanted: Wanted) -> StudyRun:
    options: Json = {"clients": int(one.clients), "rules": rules, **wanted.options()}
    config = paper.config(one.dataset, one.setting, one.method, **options)
    labels = {"method": one.method, "data": one.dataset, "setting": one.setting}
    return named_run(config, {**labels, "clients": one.clients, "protocol": rules})


def named_run(config: RunConfig, labels: Json) -> StudyRun:
    """A run with a readable name that is different for every configuration.

    The data's folder, `allow` and the number of seeds do not change it: more seeds continue a run.
    """
    text = config_text(msgspec.structs.replace(config, data_root=None, seeds=1, allow=()))
    words = [plain_name(config.data).lower(), config.clients, config.method, config.protocol]
    stem = "-".join(str(word) for word in words if word is not None)
    name = f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    own = make_baseline(config.method, {}) if config.objects else None
    return StudyRun(name, config, dict(labels), own)


def unique(runs: Iterable[StudyRun]) -> list[StudyRun]:
    """Each run once, in the order of its first use."""
    return list({run.name: run for run in runs}.values())


def about_study(paper: Paper, item: str, wanted: Wanted, folder: Path) -> Json:
    """Content of study.json; "looks" are this call and those before it (`whole_table`)."""
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
    about = {"kind": "reproduce", "command": command, "paper": paper.name, "item": item}
    return {**about, "looks": [*calls, call]}


def reproduce_table(study: PaperStudy, table: str) -> Reproduction:
    """Run what a table needs and is not there yet, and put it beside the print."""
    paper, wanted = study.paper, study.wanted
    rows = plan_table(paper, table, wanted)
    found = study.run(f"table{table}", (run for row in rows for run in needed(row)))
    gains = Gains()
    done = tuple(filled(row, found, gains) for row in rows)
    return Reproduction(paper, table, done, wanted.rules(paper), wanted.rounds, wanted.seeds)


def needed(row: ReproducedRow) -> list[StudyRun]:
    """Every run that a row needs."""
    return [run for runs in (*row.runs.values(), (row.baseline,)) for run in runs if run]


def filled(row: ReproducedRow, found: Mapping[str, RunOutcome], gains: Gains) -> ReproducedRow:
    """A row with the numbers of its runs; a protocol that lacks one of its runs has no number."""
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
    """A metric of a finished run, in percent."""
    assert outcome.summary is not None
    if (found := outcome.summary["metrics"].get(metric)) is None:
        raise ConfigError(f"the run in '{outcome.folder}' has no {metric}")
    values = tuple(100 * value for value in found["per_seed"])
    std = 100 * found["std"] if len(values) > 1 else None  # earlier versions wrote 0 for one seed
    return Ours(100 * found["mean"], std, len(values), values)


class Gains(dict[Path, np.ndarray]):
    """Gains of clients over the baseline's; holds each run's accuracy by client, read once."""

    def __missing__(self, folder: Path) -> np.ndarray:
        self[folder] = open_run(folder).result.of_clients()
        return self[folder]

    def of(self, outcome: RunOutcome, base: RunOutcome, metric: str) -> Ours:
        """The least gain in points, or the number of clients that lose nothing."""
        accuracy = self[outcome.folder]
        gain = Gain("", accuracy, accuracy.mean(0) - self[base.folder].mean(0))
        assert gain.gain is not None
        least = metric == "min_gain"
        value = 100 * float(np.nanmin(gain.gain)) if least else float(gain.improved(ties=True))
        return Ours(value, None, len(accuracy))


def read_tables(folder: Path) -> list[Reproduction]:
    """Every requested table of a folder, in the order of the first call for each."""
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
    """The request of a call."""
    given = {key: value for key, value in call.items() if key not in ("item", "command")}
    try:
        return msgspec.convert(given, Wanted)
    except (AtollError, msgspec.ValidationError) as error:
        raise ConfigError(f"study.json in '{folder}' cannot be used: {error}") from error


def whole_table(folder: Path, paper: Paper, table: str, rounds: int | None) -> Reproduction:
    """All numbers of a table whose runs a folder holds, and why others have none.

    Of several calls for a cell (on another device, say) the last one with a number counts.
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
    """How a run ended, as far as the folder knows."""
    if run.name in failed:
        return RunOutcome(run, folder / "cells" / run.name, error=failed[run.name])
    # An earlier call may have asked for fewer seeds than there are, never for more.
    return read_outcome(folder, replace(run, config=msgspec.structs.replace(run.config, seeds=1)))


def _joined(before: ReproducedRow, now: ReproducedRow) -> ReproducedRow:
    """A row together with the numbers of an earlier call."""
    ours = {**before.ours, **now.ours}
    errors = {rules: e for rules, e in {**before.errors, **now.errors}.items() if rules not in ours}
    reason = "" if ours else now.reason
    return replace(now, ours=ours, runs={**before.runs, **now.runs}, reason=reason, errors=errors)
