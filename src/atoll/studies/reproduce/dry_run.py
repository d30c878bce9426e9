"""What a table or figure would run, and the data that it lacks: `atoll reproduce ... --dry-run`.

Nothing is loaded or trained. Every configuration is checked as a run would check it, with the
published numbers of features and classes, so that a recipe is valid before its data are there.
"""

from __future__ import annotations

from atoll.core.errors import ConfigError
from atoll.data.public.registry import dataset_info, plain_name, sets_of_group, task_of_data
from atoll.experiment.build import build_method
from atoll.experiment.config import option_words, resolve
from atoll.present.tables import Column, Part, heading, make_table, quiet
from atoll.present.terminal import counted, duration
from atoll.studies.reproduce.figures import ALONE, Figure
from atoll.studies.reproduce.recipes import Paper, absent
from atoll.studies.reproduce.table import Wanted, needed, plan_table, unique
from atoll.studies.study_run import StudyRun, cost_of

SHORT = ("partition", "rounds", "epochs", "fraction", "set", "compat")  # options that are shown


def planned_runs(paper: Paper, kind: str, number: str, wanted: Wanted) -> list[StudyRun]:
    """Every run of a table or a figure; a configuration that cannot be run is an error."""
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
    """Build the method of a run from published sizes; an error names the run."""
    name = plain_name(run.config.data)
    sets = [dataset_info(one) for one in sets_of_group(name) or (name,)]
    features, classes = (
        max(getattr(one, kind) or 2 for one in sets) for kind in ("features", "classes")
    )
    try:
        full, _ = resolve(run.config)
        build_method(full, features, classes, task_of_data(full.data))
    except ConfigError as error:
        raise ConfigError(f"the recipe of {run.name} cannot be run: {error}") from error


def dry_run_parts(paper: Paper, kind: str, number: str, wanted: Wanted) -> list[Part]:
    """A line for each run, the rough time, and where absent sets can be had."""
    recipe = (paper.recipe.tables if kind == "table" else paper.recipe.figures)[number]
    title = f"{paper.name}, {kind} {number}: {recipe.shows}"
    found = planned_runs(paper, kind, number, wanted)
    if not found:
        own = getattr(recipe, "from_data", False)
        why = "It is made of the data, without runs." if own else recipe.reason
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


def _time(runs: list[StudyRun]) -> str:
    return duration(sum(cost_of(run.config) for run in runs))


def _words(run: StudyRun) -> str:
    """The configuration in short: method and options."""
    full, _ = resolve(run.config)
    given = {name: getattr(full, name) for name in SHORT if getattr(full, name) != 1.0}
    return " ".join([full.method, *option_words(given)])
