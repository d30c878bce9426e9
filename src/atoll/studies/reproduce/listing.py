"""List the tables and figures that can be reproduced, one per line, or the runs of one.

`atoll reproduce ... --dry-run` loads and trains nothing. It checks every configuration as a run
would, with the published numbers of features and classes, so it can validate a recipe before the
data are downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.core.errors import ConfigError, counted
from atoll.data.public.registry import dataset_info, plain_name, sets_of_group, task_of_data
from atoll.experiment.build import build_method
from atoll.experiment.config import option_words, resolve
from atoll.present.tables import DASH, Column, Part, heading, make_table, quiet
from atoll.present.terminal import duration
from atoll.studies.baselines import as_trained
from atoll.studies.reproduce.figures import ALONE, Figure
from atoll.studies.reproduce.recipes import Paper, absent, find_item, read_paper
from atoll.studies.reproduce.table import Wanted, needed, plan_table, unique
from atoll.studies.study_run import StudyRun, cost_of

SHORT = ("partition", "rounds", "epochs", "fraction", "set", "compat")  # shown options


def listing_parts(names: Sequence[str], root: str | None, seeds: int) -> list[Part]:
    """Make an overview of each paper: a row per table and figure. One explanation ends the list."""
    wanted = Wanted(seeds=seeds, root=root)
    columns = [
        Column(name, "left" if name in ("what", "it shows", "data") else "right", wrap=True)
        for name in ("what", "it shows", "cells", "data", "rough time")
    ]
    tables = [
        make_table(columns, _rows(one, wanted), title=f"{one.name}: {one.recipe.title}")
        for one in map(read_paper, names)
    ]
    paper = read_paper(names[0])
    first = next(number for number, table in paper.recipe.tables.items() if not table.reason)
    caption = (
        "cells: published numbers of a table, runs of a figure. Data in brackets are missing. "
        f"Rough time: {seeds} seeds of available data, one protocol, one core. Example: "
        f"atoll reproduce {paper.name} table{first} --only dataset={next(iter(paper.recipe.data))}"
    )
    parts = [part for table in tables for part in (heading(table.title), table, "")]
    return [*parts, quiet(caption)]


def _rows(paper: Paper, wanted: Wanted) -> Iterator[tuple[object, ...]]:
    for number, table in paper.recipe.tables.items():
        start = f"table{number}", table.shows
        if table.reason:
            yield *start, DASH, "computed from data" if table.from_data else "not a result", DASH
            continue
        rows = plan_table(paper, number, wanted)
        names = dict.fromkeys(row.printed.dataset for row in rows)
        sets = [name for name in names if name in paper.recipe.data]
        runs = unique(run for row in rows for run in needed(row))
        yield *start, len(rows), *_data_and_time(paper, sets, runs, wanted.root)
    for number, figure in paper.recipe.figures.items():
        start = f"fig{number}", figure.shows
        if figure.reason:
            yield *start, DASH, "no numbers" if "drawing" in figure.reason else "not drawn", DASH
            continue
        runs = Figure(paper, number, "", wanted).runs()
        yield *start, len(runs), *_data_and_time(paper, figure.datasets, runs, wanted.root)


def _data_and_time(
    paper: Paper, sets: Sequence[str], runs: Sequence[StudyRun], root: str | None
) -> tuple[str, str]:
    """Return the names of the data sets (missing sets in brackets) and the time of the runs."""
    words = [f"({one})" if absent(paper.data_name(one), root) else one for one in sets]
    return ", ".join(words), _time(runs).removeprefix("about ") if runs else DASH


def items(paper: Paper, text: str) -> list[tuple[str, str]]:
    """Return the (kind, number) of a table or figure. `all` is every item without a `reason`."""
    if text.lower() != "all":
        return [find_item(paper, text)]
    return [
        *(("table", number) for number, one in paper.recipe.tables.items() if not one.reason),
        *(("figure", number) for number, one in paper.recipe.figures.items() if not one.reason),
    ]


def planned_runs(paper: Paper, kind: str, number: str, wanted: Wanted) -> list[StudyRun]:
    """Return every run of a table or a figure. Raise an error for an invalid configuration."""
    recipe, runs = paper.recipe, list[StudyRun]()
    if kind == "table" and not recipe.tables[number].reason:
        rows = plan_table(paper, number, wanted, done=None)
        kept = [row for row in rows if not recipe.methods[row.printed.method].reason]
        runs = [run for row in kept for run in needed(row)]
    elif kind == "figure" and not recipe.figures[number].reason:
        figures = [Figure(paper, number, rules, wanted) for rules in wanted.rules(paper)]
        drawn = [one for one in figures if one.recipe.draw not in ALONE]
        runs = [run for figure in drawn for run in figure.runs(here=False)]
    found = unique(runs)
    for run in found:
        check_configuration(run)
    return found


def check_configuration(run: StudyRun) -> None:
    """Build the method of a run from published sizes. An error names the run."""
    name = plain_name(run.config.data)
    sets = [dataset_info(one) for one in sets_of_group(name) or (name,)]
    features, classes = (
        max(getattr(one, kind) or 2 for one in sets) for kind in ("features", "classes")
    )
    try:
        full, _ = resolve(as_trained(run.config))
        build_method(full, features, classes, task_of_data(full.data))
    except ConfigError as error:
        raise ConfigError(f"the recipe of {run.name} cannot be run: {error}") from error


def dry_run_parts(paper: Paper, kind: str, number: str, wanted: Wanted) -> list[Part]:
    """Return a line per configuration, the rough time, and the sources of missing data sets."""
    recipe = (paper.recipe.tables if kind == "table" else paper.recipe.figures)[number]
    title = f"{paper.name}, {kind} {number}: {recipe.shows}"
    found = planned_runs(paper, kind, number, wanted)
    if not found:
        own = getattr(recipe, "from_data", False)
        why = "It is computed from the data, without runs." if own else recipe.reason
        return [heading(title), why or "It needs no runs of a study."]
    alike: dict[tuple[str, str, str], list[StudyRun]] = {}
    for run in found:
        key = str(run.labels["data"]), str(run.labels["method"]), _words(run)
        alike.setdefault(key, []).append(run)
    lacking = {run.config.data: absent(run.config.data, wanted.root) for run in found}
    lines = []
    for (data, method, words), group in alike.items():
        there = not lacking[group[0].config.data]
        rough = _time(group).removeprefix("about ") if there else "no data"
        numbers = dict.fromkeys(str(run.config.clients or "") for run in group)
        lines.append([data, ", ".join(numbers), method, words, rough])
    names = ("data", "clients", "method", "configuration", "rough time")
    columns = [Column(name, "left", name not in ("data", "clients")) for name in names]
    ready = [run for run in found if not lacking[run.config.data]]
    runs, seeds = counted(len(ready), "run"), counted(wanted.seeds, "seed")
    total = _time(ready) if ready else "nothing"
    start = quiet(f"{runs} of {len(found)} can start, {seeds} each: {total}.")
    missing = dict.fromkeys(filter(None, lacking.values()))
    return [heading(title), make_table(columns, lines), start, *missing]


def _time(runs: Sequence[StudyRun]) -> str:
    return duration(sum(cost_of(run.config) for run in runs))


def _words(run: StudyRun) -> str:
    """Format the configuration briefly: method and options."""
    full, _ = resolve(as_trained(run.config))
    given = {name: getattr(full, name) for name in SHORT if getattr(full, name) != 1.0}
    return " ".join([run.config.method, *option_words(given)])
