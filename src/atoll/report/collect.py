"""Collect the content of a report from folders: groups of named runs, and the missing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import AtollError, ConfigError, counted
from atoll.experiment.baseline import KINDS as BASELINE_KINDS
from atoll.experiment.baseline import POOLED
from atoll.experiment.config import RunConfig
from atoll.experiment.folder import NotFinished, RunFolder, open_run, read_json
from atoll.experiment.metrics import POOLED as POOLED_METRICS
from atoll.experiment.metrics import REGISTRY, find_metric, label_of
from atoll.experiment.status import failures
from atoll.present.tables import Number, ResultTable, number_of
from atoll.studies.reproduce.table import Reproduction, read_tables
from atoll.studies.tune.result import Tried, read_tried

COLUMN_KEYS = (
    *("data", "clients", "protocol", "partition", "split", "ratios", "fraction"),
    *("batch_size", "schema", "own", "allow"),
)
"""Settings that define a federation or its rules. Runs that share them are in one column."""
ROW_KEYS = ("epochs", "rounds", "evaluate", "compat", "seeds", "seed", "engine", "device", "chunk")
"""Settings, in addition to hyper-parameters, that distinguish two runs of one method."""
_SELECT = {
    "best-val": "at the round with the best mean validation score",
    "last": "after the last round",
    "best-val-per-client": "at each client's best validation round",
}
LOWER = tuple(f"test_{name}" for name, metric in REGISTRY.items() if not metric.higher)
_WEIGHTS = {
    "tests": "weighted by their test nodes (or graphs)",
    "nodes": "weighted by their nodes (or graphs)",
    "uniform": "all clients equally",
}


@dataclass(eq=False)
class ReportedRun:
    """One run on the page."""

    run: RunFolder
    labels: Mapping[str, Any]  # its labels in a study, if it is a cell of a study
    row: str = ""  # its method, and the settings that distinguish it from other runs of that method
    column: str = ""  # its federation and rules, with distinguishing settings
    style: int = 0  # the number of its colour
    chosen: str | None = None  # the metric of its study

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def metric(self) -> str:
        """The metric of its study or federation, or else of the run."""
        return self.chosen or self.run.result.metric

    @property
    def label(self) -> str:
        """The metric's label, with the name of a positive class that it depends on."""
        name = self.run.result.positive_class(self.metric)
        return label_of(self.metric) + (f" of class {name}" if name else "")


@dataclass(frozen=True)
class Missing:
    """A requested run that the page cannot show."""

    name: str
    why: str
    kind: str  # "failed", "not finished", "not run yet" or "not readable"
    labels: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Collection:
    """The content of a report."""

    shown: list[ReportedRun] = field(default_factory=list)  # finished runs, folder by folder
    missing: list[Missing] = field(default_factory=list)  # requested, but not finished
    studies: dict[Path, dict[str, Any]] = field(default_factory=dict)  # study.json by folder
    aside: list[str] = field(default_factory=list)  # notes on hidden trials and grid points
    verdicts: dict[str, list[str]] = field(default_factory=dict)  # conclusions of tests, by topic
    reproductions: list[Reproduction] = field(default_factory=list)  # tables of papers
    tried: list[Tried] = field(default_factory=list)  # the trials of tunings, by method

    @property
    def rows(self) -> tuple[str, ...]:
        return _once(one.row for one in self.shown)

    @property
    def bounds(self) -> tuple[str, ...]:
        """Rows that pool all data, unless all rows do."""
        pooled = _once(one.row for one in self.shown if one.run.result.scored == POOLED)
        return pooled if len(pooled) < len(self.rows) else ()

    @property
    def columns(self) -> tuple[str, ...]:
        return _once(one.column for one in self.shown)

    def group(self, column: str) -> list[ReportedRun]:
        """Return the runs in one column of the table."""
        return [one for one in self.shown if one.column == column]


def collect(folders: Sequence[Path]) -> Collection:
    """Read folders of runs, which must be finished, and of studies, which may lack runs."""
    found = Collection()
    for folder in dict.fromkeys(folders):
        if (folder / "study.json").exists():
            _read_study(folder, found)
        else:
            found.shown.append(ReportedRun(open_run(folder), {}))
    if not found.shown and not any(one.complete for one in found.tried):
        if found.missing or not found.aside:
            reasons = [f"{one.name}: {one.why}" for one in found.missing]
            first = (reasons or ["it has no runs"])[0]
            raise ConfigError(f"nothing in '{folders[0]}' is finished yet ({first})")
        raise ConfigError(f"'{folders[0]}' contains nothing to report: {' '.join(found.aside)}")
    _name(found.shown)
    for group in map(found.group, found.columns):
        for one in group:
            one.chosen = group[0].metric  # all runs of one federation use the same metric
            found.aside.extend(f"{one.row}, {one.column}: {note}." for note in one.run.notes)
    return found


def _read_study(folder: Path, found: Collection) -> None:
    about = read_json(folder / "study.json")
    found.studies[folder] = about
    cells, failed, before = about.get("cells", []), failures(folder), len(found.shown)
    trials = [cell for cell in cells if cell.get("labels", {}).get("role") == "trial"]
    for cell in cells:
        if cell not in trials:  # trials have no test nodes
            _read_cell(folder, cell, failed, found)
    if trials:
        found.aside.append(f"{counted(len(trials), 'trial')} of '{folder.name}' had no test nodes.")
    if about.get("kind") == "tune":
        found.tried.extend(read_tried(folder))
    if about.get("kind") == "reproduce":
        found.reproductions.extend(read_tables(folder))
    metric = about.get("request", {}).get("metric")
    for one in found.shown[before:]:
        one.chosen = metric
    found.shown[before:] = _chosen(found.shown[before:], found.aside)
    compared = folder / "compare.json"
    if compared.exists() and not _read_verdicts(read_json(compared), about, found.verdicts):
        found.aside.append(
            f"The tests of '{folder.name}' cover only some of its runs, so the report omits them; "
            f"atoll compare --resume {folder} repeats them."
        )


def _read_cell(
    folder: Path, cell: Mapping[str, Any], failed: Mapping[str, str], found: Collection
) -> None:
    name, labels = str(cell["name"]), cell.get("labels", {})
    path = folder / "cells" / name
    try:
        if (path / "config.toml").exists():
            found.shown.append(ReportedRun(open_run(path), labels))
            return
        kind = "not run yet"
    except NotFinished:
        kind = "not finished"
    except AtollError as error:
        found.missing.append(Missing(name, str(error), "not readable", labels))
        return
    kind = "failed" if name in failed else kind
    found.missing.append(Missing(name, failed.get(name, kind), kind, labels))


def _chosen(shown: list[ReportedRun], aside: list[str]) -> list[ReportedRun]:
    """Keep only the grid point that validation selected. Other test scores must stay hidden."""
    kept, names = [], ("data", "clients", "method")
    for points in _by(shown, lambda one: [str(one.labels.get(name)) for name in names]):
        if len(points) == 1 or not all("point" in one.labels for one in points):
            kept += points
            continue
        metrics = [(one.run.summary["metrics"], f"val_{one.metric}") for one in points]
        scores = [found.get(name, {}).get("mean", -np.inf) for found, name in metrics]
        best = points[int(np.argmax(scores))]
        kept.append(best)
        settings = " ".join(f"{k}={v}" for k, v in best.labels["point"].items())
        where = f"{best.labels['method']} on {_data(str(best.labels.get('data')))}"
        aside.append(f"{where}: validation selected {settings} among {len(points)} grid points.")
    return [one for one in shown if one in kept]


def _read_verdicts(
    compared: Mapping[str, Any], about: Mapping[str, Any], verdicts: dict[str, list[str]]
) -> bool:
    """Add a comparison's conclusions if its tests cover its whole study. Return whether they do."""
    cells, tables = about.get("cells", []), compared.get("tables", [])
    request, sizes = about.get("request", {}), len({table.get("clients") for table in tables})
    covers = (
        compared.get("cells") == len(cells)
        and list(compared.get("methods", [])) == list(request.get("methods", []))
        and {table.get("data") for table in tables} == set(request.get("data", []))
        and {cell["seeds"] for cell in cells if "seeds" in cell} <= {t.get("seeds") for t in tables}
    )
    for table in [*tables, compared.get("overall")] if covers else ():
        if table and table.get("sentences"):
            name = _data(table["data"]) if table.get("data") else "Over all federations"
            if sizes > 1 and table.get("data"):
                name += f", clients {table.get('clients')}"
            if table.get("metric", "accuracy") not in ("accuracy", "score"):
                name += f" ({label_of(table['metric'])})"
            verdicts.setdefault(name, []).extend(map(str, table["sentences"]))
    return covers


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _name(shown: list[ReportedRun]) -> None:
    """Give runs short, unique names, and each row a colour."""
    for one in shown:
        preset, scored = str(one.config.set.get("preset", "")), one.run.result.scored
        one.row = str(one.labels.get("method", f"{one.config.method} {preset}".strip()))
        one.row += f" ({scored})" if scored in BASELINE_KINDS else ""
        one.column = _data(one.config.data)
    # A name contains the number of clients, the partition, ... only if two groups differ in it.
    for same in _by(shown, lambda one: one.column):
        _distinguish(same, "column")
    for same in _by(shown, lambda one: one.row):
        _distinguish(same, "row")
    for same in _by(shown, lambda one: (one.row, one.column)):
        for one in same[1:]:
            one.row = f"{one.row} ({one.run.path.name})"
    rows = _once(one.row for one in shown)
    for one in shown:
        one.style = rows.index(one.row)


def _data(name: str) -> str:
    return Path(name).name if "/" in name else name


def _by(shown: list[ReportedRun], key: Callable[[ReportedRun], object]) -> list[list[ReportedRun]]:
    groups: dict[str, list[ReportedRun]] = {}
    for one in shown:
        groups.setdefault(str(key(one)), []).append(one)
    return list(groups.values())


def _distinguish(same: list[ReportedRun], what: str) -> None:
    """Add to a row or a column the settings in which runs with the same name differ."""
    column = what == "column"
    every = []
    for one in same:
        own = {} if column else {key: str(value) for key, value in one.config.set.items()}
        fixed = COLUMN_KEYS if column else ROW_KEYS
        every.append(own | {key: str(getattr(one.config, key)) for key in fixed})
    keys = _once(key for settings in every for key in settings)
    differ = [key for key in keys if len({settings.get(key) for settings in every}) > 1]
    # A setting that depends on the federation belongs to its column, not to the row.
    columns = [one.column for one in same]
    pairs = {key: {*zip(columns, (own.get(key) for own in every), strict=True)} for key in differ}
    inside = [key for key in differ if len(pairs[key]) > len(set(columns))]
    if column:  # a key must distinguish more than the previous keys: a protocol implies its split
        inside, kinds = [], 1
        for key in differ:
            found = len({tuple(own.get(k) for k in (*inside, key)) for own in every})
            inside, kinds = ([*inside, key], found) if found > kinds else (inside, kinds)
    for one, settings in zip(same, every, strict=True):
        known = [key for key in inside if settings.get(key) not in (None, "None")]
        parts = [f"{key}{' ' if column else '='}{settings[key]}" for key in known]
        setattr(one, what, ", ".join([getattr(one, what), *parts]))


def main_table(found: Collection) -> ResultTable:
    """Make the main table of the report, with the metric of each federation."""
    metrics = {column: found.group(column)[0].metric for column in found.columns}
    several = set(metrics.values()) != {"accuracy"}
    labels = {column: found.group(column)[0].label for column in found.columns}
    heads = {c: f"{c} ({labels[c]})" if several else c for c in found.columns}
    cells = {
        (one.row, heads[one.column]): number_of(one.run.summary["metrics"], f"test_{one.metric}")
        for one in found.shown
    }
    rows = [*found.rows]
    for gap in found.missing:
        row = str(gap.labels.get("method", gap.name))
        places = [c for c in found.columns if _data(str(gap.labels.get("data", ""))) == c]
        rows += [] if row in rows else [row]
        for column in places or (found.columns if len(found.columns) == 1 else ()):
            cells.setdefault((row, heads[column]), Number(why=gap.kind))
    only = next(iter(metrics.values())) if len(set(metrics.values())) == 1 else "score"
    names, columns = {*labels.values()}, tuple(heads.values())
    name = names.pop() if len(names) == 1 else "score" if only == "score" else label_of(only)
    title, how = f"Test {name}, in percent", how_scored(found)
    table = ResultTable(title, tuple(rows), columns, cells, how, metric=f"test_{only}")
    return replace(table, bounds=found.bounds)


def other_tables(found: Collection) -> list[ResultTable]:
    """Make tables of the other measurements. Costs have no standard deviation."""
    summaries = {(one.row, one.column): one.run.summary for one in found.shown}
    traffic, time = {}, {}
    for place, summary in summaries.items():
        rounds = max(1, int(summary["rounds"] or 1) * int(summary["seeds"]))
        traffic[place] = Number(sum(summary["bytes"].values()) / rounds / 1e6)
        time[place] = Number(float(summary["seconds"]["per_round"]))
    own = "Test accuracy of the client's model right after local training, in percent"
    seconds = "Seconds per round (median), training and evaluation"
    tables: list[tuple[str, str, Mapping[tuple[str, str], Number], float, int]] = [
        ("test_macro_f1", "Test macro F1, in percent", {}, 100.0, 1),
        *((f"test_{n}", f"Test {label_of(n)}, in percent", {}, 100.0, 1) for n in _more(found)),
        ("local_test_accuracy", own, {}, 100.0, 1),
        ("best_round", "Round with the best mean validation score", {}, 1.0, 0),
        ("mb_per_round", "MB in a round, up and down, all clients", traffic, 1.0, 2),
        ("seconds_per_round", seconds, time, 1.0, 3),
    ]
    made, shape = [], (found.rows, found.columns)
    for metric, title, numbers, scale, digits in tables:
        of_metric = {place: number_of(s["metrics"], metric) for place, s in summaries.items()}
        higher = metric not in LOWER if scale == 100.0 else None
        table = ResultTable(title, *shape, numbers or of_metric, metric=metric, scale=scale)
        made.append(replace(table, digits=digits, higher=higher, bounds=found.bounds))
    return made


def _more(found: Collection) -> list[str]:
    """If a run has metrics of a positive class, return these and AUC, without the main metric."""
    known = {name for one in found.shown for name in one.run.summary["metrics"]}
    wanted = ("auc", *POOLED_METRICS)
    names = wanted if known & {f"test_{name}" for name in POOLED_METRICS} else ()
    return [n for n in names if f"test_{n}" in known and {n} != {one.metric for one in found.shown}]


def how_scored(found: Collection) -> str:
    """Describe in sentences how the numbers were computed."""
    results = [one.run.result for one in found.shown]
    selects = _once(_SELECT.get(r.select, "chosen on test data (test-selection)") for r in results)
    pooled = [find_metric(one.metric).pooled for one in found.shown]
    weights = _once(_WEIGHTS.get(r.weights, r.weights) for r in results)
    over = f"mean over clients, {' or '.join(weights)}"
    if any(pooled):
        over = "pooled over clients" if all(pooled) else f"{over}, or pooled over clients"
    seeds = _once(counted(r.config.seeds, "seed") for r in results)
    protocols = ", ".join(_once(r.config.protocol for r in results))
    spread = "; mean ± standard deviation over seeds" if seeds != ("1 seed",) else ""
    return f"Protocol {protocols}; {over}, {' or '.join(selects)}; {' or '.join(seeds)}{spread}."
