"""The runs of a paper's figure, before and after they are run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import ConfigError, unknown
from atoll.core.task import TASKS
from atoll.data.public.registry import dataset_info, plain_name, task_of_data
from atoll.present.terminal import counted
from atoll.studies.reproduce.recipes import STRICT, FigureRecipe, Paper, Variant, absent
from atoll.studies.reproduce.table import Wanted, named_run
from atoll.studies.study_run import RunOutcome, StudyRun

Label = str | float | int
COLUMNS = ("dataset", "clients", "method")
"""What `--only` can ask of a figure."""


@dataclass(frozen=True)
class Point:
    """One run of a figure.

    Attributes:
        dataset: The paper's name of the data.
        clients: How many; None is the protocol's number.
        method: The paper's.
        x: Its place on the first axis.
        y: Its place on the second.
        run: The run.
        outcome: How it ended.
        group: Number of the place on the first axis, which may have a label twice.
    """

    dataset: str
    clients: int | None
    method: str
    x: Variant
    y: Variant
    run: StudyRun
    outcome: RunOutcome | None = None
    group: int = 0


@dataclass(frozen=True)
class Drawing:
    """What a picture is drawn from.

    Attributes:
        paper: Whose.
        number: The figure's.
        rules: The protocol.
        points: Finished runs.
        baselines: The run over which clients gain, by data set and label of x.
        wanted: What was asked for.
        folder: The study's.
    """

    paper: Paper
    number: str
    rules: str
    points: tuple[Point, ...]
    baselines: Mapping[tuple[str, Label], RunOutcome]
    wanted: Wanted
    folder: Path

    @property
    def recipe(self) -> FigureRecipe:
        return self.paper.recipe.figures[self.number]

    def of(self, dataset: str) -> list[Point]:
        """The finished runs on a data set."""
        return [point for point in self.points if point.dataset == dataset]

    def methods(self) -> list[str]:
        """The methods, in the recipe's order."""
        return list(dict.fromkeys(point.method for point in self.points))

    def datasets(self) -> list[str]:
        """Of the finished runs, in the recipe's order."""
        return list(dict.fromkeys(point.dataset for point in self.points))

    def metric(self, dataset: str) -> str:
        """What the data are scored by: "accuracy" or "auc"."""
        name = plain_name(self.paper.data_name(dataset))
        return "accuracy" if TASKS[task_of_data(name)].many_graphs else dataset_info(name).metric

    def title(self) -> str:
        """What the picture shows and how it was run."""
        rounds = self.wanted.rounds
        short = f", only {counted(rounds, 'round')}" if rounds is not None else ""
        return (
            f"{self.paper.name}, figure {self.number}: {self.recipe.shows}\n"
            f"protocol {self.rules}, {counted(self.wanted.seeds, 'seed')}{short}"
        )


def figure_points(
    paper: Paper, number: str, wanted: Wanted, rules: str = ""
) -> tuple[list[Point], list[str]]:
    """The runs of a figure, and why some of what it shows has none."""
    recipe = paper.recipe.figures[number]
    if recipe.reason:
        raise ConfigError(f"figure {number} of {paper.name} is not drawn: {recipe.reason}")
    datasets = _kept(recipe.datasets, "dataset", wanted)
    lacking = {one: paper.why_not(one, recipe.methods[0], wanted.root) for one in datasets}
    points: list[Point] = []
    for dataset, clients in itertools.product(datasets, recipe.clients or (None,)):
        if lacking[dataset]:
            continue
        for place, (x, y) in enumerate(itertools.product(recipe.x, recipe.y)):
            for method in _kept(x.methods or recipe.methods, "method", wanted, check=False):
                run = _run(paper, recipe, dataset, method, clients, (x, y), rules, wanted)
                partner = absent(x.beside, wanted.root) if x.beside else ""
                if partner:
                    lacking[x.beside] = partner
                else:
                    points.append(Point(dataset, clients, method, x, y, run, group=place))
    reasons = [f"{one}: {why}" for one, why in lacking.items() if why]
    numbers = {str(point.run.config.clients) for point in points}
    asked = [value for key, value in wanted.only if key == "clients"]
    for value in asked:
        if points and value not in numbers:
            raise unknown("number of clients of this figure", value, numbers)
    if asked:
        points = [point for point in points if str(point.run.config.clients) in asked]
    return points, reasons


def _kept(
    names: Sequence[str], column: str, wanted: Wanted, *, check: bool = True
) -> tuple[str, ...]:
    """The names that `--only` asks for, in the recipe's order."""
    for key, _ in wanted.only:
        if key not in COLUMNS:
            raise ConfigError(f"--only {key}=... is for tables; a figure has {', '.join(COLUMNS)}")
    asked = {value.lower(): value for key, value in wanted.only if key == column}
    for low, value in asked.items():
        if check and low not in {name.lower() for name in names}:
            raise unknown(f"{column} of this figure", value, names)
    return tuple(name for name in names if not asked or name.lower() in asked)


def _run(
    paper: Paper,
    recipe: FigureRecipe,
    dataset: str,
    method: str,
    clients: int | None,
    variants: tuple[Variant, ...],
    rules: str,
    wanted: Wanted,
) -> StudyRun:
    setting = recipe.setting or next(iter(paper.recipe.settings))
    config = paper.config(
        dataset,
        setting,
        method,
        clients=clients,
        rules=STRICT if rules == STRICT else "",
        variants=variants,
        **wanted.options(),
    )
    shown = ", ".join(str(variant.label) for variant in variants if variant.label != "")
    labels = {
        "method": method,
        "data": dataset,
        "clients": config.clients,
        "variant": shown,
        "protocol": rules or paper.recipe.protocol,
    }
    return named_run(config, labels)


def figure_runs(paper: Paper, number: str, wanted: Wanted) -> list[StudyRun]:
    """The runs of a figure under the paper's protocol, for the list."""
    points, _ = figure_points(paper, number, wanted)
    bases = baseline_runs(paper, number, points, "", wanted)
    return [*(point.run for point in points), *bases.values()]


def baseline_runs(
    paper: Paper, number: str, points: Sequence[Point], rules: str, wanted: Wanted
) -> dict[tuple[str, Label], StudyRun]:
    """The runs over which clients gain, where the figure shows gains."""
    recipe = paper.recipe.figures[number]
    if recipe.draw != "violins":
        return {}
    found = {}
    for point in points:
        # The baseline has the same clients and none of the method's hyper-parameters.
        plain = Variant(
            label=point.x.label,
            data=point.x.data,
            run={key: value for key, value in point.x.run.items() if key != "set"},
        )
        found[point.dataset, point.x.label] = _run(
            paper,
            recipe,
            point.dataset,
            paper.recipe.baseline,
            point.clients,
            (plain,),
            rules,
            wanted,
        )
    return found
