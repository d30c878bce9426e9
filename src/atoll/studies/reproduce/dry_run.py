"""What a table or figure would run, and the data that it lacks: `atoll reproduce ... --dry-run`.

Nothing is loaded or trained. Every configuration is checked as a run would check it, with the
published numbers of features and classes, so that a recipe is valid before its data are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.core.errors import ConfigError
from atoll.data.public.registry import dataset_info, plain_name, sets_of_group, task_of_data
from atoll.experiment.build import build_method
from atoll.experiment.config import option_words, resolve
from atoll.present.tables import Column, Part, heading, make_table, quiet
from atoll.present.terminal import counted, duration
from atoll.studies.baselines import as_trained
from atoll.studies.reproduce.figures import ALONE, Figure
from atoll.studies.reproduce.recipes import Paper, absent
from atoll.studies.reproduce.table import Wanted, needed, plan_table, unique
from atoll.studies.study_run import StudyRun, cost_of

SHORT = ("partition", "rounds", "epochs", "fraction", "set", "compat")  # options that are shown


@dataclass(frozen=True)
class Planned:
    """One run, and why it cannot start here: an absent set, or nothing."""

    run: StudyRun
    lacking: str

    @property
    def words(self) -> str:
        """The configuration in short: method and options."""
        full, _ = resolve(as_trained(self.run.config))
        given = {name: getattr(full, name) for name in SHORT if getattr(full, name) != 1.0}
        return " ".join([self.run.config.method, *option_words(given)])


def planned_runs(paper: Paper, kind: str, number: str, wanted: Wanted) -> list[Planned]:
    """Every run of a table or a figure; a configuration that cannot be run is an error."""
    if kind == "table" and paper.recipe.tables[number].reason:
        return []
    runs = (
        _of_table(paper, number, wanted) if kind == "table" else _of_figure(paper, number, wanted)
    )
    found = [Planned(run, absent(run.config.data, wanted.root)) for run in unique(runs)]
    for one in found:
        check_configuration(one.run)
    return found


class _Everything:
    """Runs that need no data any more: all of them, so that a plan leaves none out."""

    def __contains__(self, name: object) -> bool:
        return True


def _of_table(paper: Paper, number: str, wanted: Wanted) -> Iterator[StudyRun]:
    for row in plan_table(paper, number, wanted, _Everything()):
        if not paper.recipe.methods[row.printed.method].reason:
            yield from needed(row)


def _of_figure(paper: Paper, number: str, wanted: Wanted) -> Iterator[StudyRun]:
    for rules in wanted.rules(paper):
        figure = Figure(paper, number, rules, wanted)
        recipe = figure.recipe
        if recipe.reason or recipe.draw in ALONE:
            return
        points = figure.places()
        yield from (point.run for point in points)
        yield from figure.baselines(points).values()


def check_configuration(run: StudyRun) -> None:
    """Build the method of a run from published sizes; an error names the run."""
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
    """A line for each run, the rough time, and where absent sets can be had."""
    recipe = (paper.recipe.tables if kind == "table" else paper.recipe.figures)[number]
    title = f"{paper.name}, {kind} {number}: {recipe.shows}"
    found = planned_runs(paper, kind, number, wanted)
    if not found:
        own = getattr(recipe, "from_data", False)
        why = "It is made of the data, without runs." if own else recipe.reason
        return [heading(title), why or "It needs no runs of a study."]
    alike: dict[tuple[str, str, str], list[Planned]] = {}
    for one in found:
        key = str(one.run.labels["data"]), str(one.run.labels["method"]), one.words
        alike.setdefault(key, []).append(one)
    lines = []
    for (data, method, words), group in alike.items():
        seconds = sum(cost_of(one.run.config) for one in group)
        rough = "no data" if group[0].lacking else duration(seconds).removeprefix("about ")
        numbers = dict.fromkeys(str(one.run.config.clients or "") for one in group)
        lines.append([data, ", ".join(numbers), method, words, rough])
    names = ("data", "clients", "method", "configuration", "rough time")
    columns = [Column(name, "left", name not in ("data", "clients")) for name in names]
    ready = [one for one in found if not one.lacking]
    total = duration(sum(cost_of(one.run.config) for one in ready)) if ready else "nothing"
    seeds = counted(wanted.seeds, "seed")
    words = f"{counted(len(ready), 'run')} of {len(found)} can start, {seeds} each: {total}."
    missing = dict.fromkeys(one.lacking for one in found if one.lacking)
    return [heading(title), make_table(columns, lines), quiet(words), *missing]
