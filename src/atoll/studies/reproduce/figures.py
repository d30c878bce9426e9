"""Reproduce a figure: pictures and numbers of its runs. Published figures contain no numbers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.core.errors import ConfigError, check_name, counted, unknown
from atoll.core.task import TASKS
from atoll.data.public.registry import dataset_info, plain_name, task_of_data
from atoll.present.files import check_output, write_all
from atoll.present.tables import Part, heading, quiet
from atoll.studies.reproduce import figure_charts
from atoll.studies.reproduce.recipes import FigureRecipe, Paper, Variant, absent
from atoll.studies.reproduce.table import PaperStudy, Wanted, named_run, unique
from atoll.studies.study_run import Json, RunOutcome, StudyRun

Label = str | float | int
COLUMNS = ("dataset", "clients", "method")  # columns that `--only` accepts
ALONE = ("contribution",)  # figures that need no runs of a study


@dataclass(frozen=True)
class Point:
    """One run of a figure, with the paper's names of data and method."""

    dataset: str
    clients: int | None  # None: chosen by the protocol
    method: str
    x: Variant  # its position on the first axis
    y: Variant
    run: StudyRun
    outcome: RunOutcome | None = None
    group: int = 0  # index of the position on the first axis, whose labels may repeat


@dataclass(frozen=True)
class Figure:
    """A figure of a paper under the protocol `rules`. "" is the paper's own protocol."""

    paper: Paper
    number: str
    rules: str
    wanted: Wanted

    @property
    def recipe(self) -> FigureRecipe:
        return self.paper.recipe.figures[self.number]

    def runs(self, *, here: bool = True) -> list[StudyRun]:
        """Return the runs of the figure and its baselines. With `here`, skip runs without data."""
        points, _ = self.plan(here=here)
        return unique([*(point.run for point in points), *self.baselines(points).values()])

    def plan(self, *, here: bool = True) -> tuple[list[Point], list[str]]:
        """Return the points of the figure, and the reasons for missing parts."""
        paper, recipe, root = self.paper, self.recipe, self.wanted.root
        if recipe.reason:
            raise ConfigError(f"figure {self.number} of {paper.name} is not drawn: {recipe.reason}")
        for key in (key for key, _ in self.wanted.only if key not in COLUMNS):
            raise ConfigError(f"--only {key}=... is for tables; a figure has {', '.join(COLUMNS)}")
        datasets = self._kept(recipe.datasets, "dataset")
        sought = datasets if here else ()
        lacking = {one: paper.why_not(one, recipe.methods[0], root) for one in sought}
        points: list[Point] = []
        for dataset, clients in itertools.product(datasets, recipe.clients or (None,)):
            if lacking.get(dataset):
                continue
            for place, (x, y) in enumerate(itertools.product(recipe.x, recipe.y)):
                for method in self._kept(x.methods or recipe.methods, "method", check=False):
                    run = self.run_at(dataset, method, clients, (x, y))
                    if here and x.beside and (partner := absent(x.beside, root)):
                        lacking[x.beside] = partner
                    else:
                        points.append(Point(dataset, clients, method, x, y, run, group=place))
        numbers = {str(point.run.config.clients) for point in points}
        only = [value for key, value in self.wanted.only if key == "clients"]
        for value in only if points else ():
            check_name("number of clients of this figure", value, numbers)
        kept = [point for point in points if not only or str(point.run.config.clients) in only]
        return kept, [f"{one}: {reason}" for one, reason in lacking.items() if reason]

    def _kept(self, names: Sequence[str], column: str, *, check: bool = True) -> tuple[str, ...]:
        """Return the names that `--only` selects, in the order of the recipe."""
        only = {value.lower(): value for key, value in self.wanted.only if key == column}
        for low, value in only.items():
            if check and low not in {name.lower() for name in names}:
                raise unknown(f"{column} of this figure", value, names)
        return tuple(name for name in names if not only or name.lower() in only)

    def run_at(
        self, dataset: str, method: str, clients: int | None, variants: tuple[Variant, ...]
    ) -> StudyRun:
        """Return the run at one position of the axes."""
        setting = self.recipe.setting or next(iter(self.paper.recipe.settings))
        how: Json = {"clients": clients, "rules": self.rules, "variants": variants}
        config = self.paper.config(dataset, setting, method, **how, **self.wanted.options())
        labels: Json = {"method": method, "data": dataset, "clients": config.clients}
        labels["variant"] = ", ".join(str(one.label) for one in variants if one.label != "")
        labels["protocol"] = self.rules or self.paper.recipe.protocol
        return named_run(config, labels)

    def baselines(self, points: Sequence[Point]) -> dict[tuple[str, Label], StudyRun]:
        """Return the runs that gains are measured against, if the figure shows gains."""
        found = {}
        for point in points if self.recipe.draw == "violins" else ():
            # The baseline has the same clients, but not the method's hyper-parameters.
            options = {key: value for key, value in point.x.run.items() if key != "set"}
            plain = Variant(label=point.x.label, data=point.x.data, run=options)
            run = self.run_at(point.dataset, self.paper.recipe.baseline, point.clients, (plain,))
            found[point.dataset, point.x.label] = run
        return found


@dataclass(frozen=True)
class Drawing(Figure):
    """A figure with its finished runs. Methods and data sets are in the order of the recipe."""

    points: tuple[Point, ...]
    baseline_runs: Mapping[tuple[str, Label], RunOutcome]  # by data set and label of x

    def of(self, dataset: str) -> list[Point]:
        return [point for point in self.points if point.dataset == dataset]

    def methods(self) -> list[str]:
        return list(dict.fromkeys(point.method for point in self.points))

    def datasets(self) -> list[str]:
        return list(dict.fromkeys(point.dataset for point in self.points))

    def metric(self, dataset: str) -> str:
        """The metric of the data: "accuracy" or "auc"."""
        name = plain_name(self.paper.data_name(dataset))
        return "accuracy" if TASKS[task_of_data(name)].many_graphs else dataset_info(name).metric

    def title(self) -> str:
        """Describe the picture and its runs."""
        rounds = self.wanted.rounds
        short = f", only {counted(rounds, 'round')}" if rounds is not None else ""
        return (
            f"{self.paper.name}, figure {self.number}: {self.recipe.shows}\n"
            f"protocol {self.rules}, {counted(self.wanted.seeds, 'seed')}{short}"
        )


@dataclass(frozen=True)
class ReproducedFigure:
    """A figure after its reproduction."""

    paper: Paper
    number: str
    paths: list[Path]
    runs: int  # number of its runs
    left_out: list[str]  # one sentence for each missing part

    def summary(self) -> Json:
        """Return the object that `--json` prints."""
        about = {"paper": self.paper.name, "figure": self.number, "runs": self.runs}
        return {**about, "files": list(map(str, self.paths)), "left_out": self.left_out}

    def parts(self) -> list[Part]:
        """Return the title, the missing parts, and a note, for `layout`."""
        recipe = self.paper.recipe.figures[self.number]
        note = f"{recipe.note} " if recipe.note else ""
        return [
            heading(f"{self.paper.name}, figure {self.number}: {recipe.shows}"),
            *([] if self.paths else ["Nothing to draw."]),
            *(f"missing: {one}" for one in self.left_out),
            quiet(f"{note}The published figure contains no numbers to compare with."),
        ]


def reproduce_figure(study: PaperStudy, number: str) -> ReproducedFigure:
    """Run the missing runs of a figure, draw it, and write its numbers."""
    check_output(study.folder)
    paper, wanted = study.paper, study.wanted
    figures = [Figure(paper, number, rules, wanted) for rules in wanted.rules(paper)]
    plans = [figure.plan() for figure in figures]
    kind, reasons = figures[0].recipe.draw, plans[0][1]
    check_name("way to draw in a recipe", kind, figure_charts.DRAW)
    bases = [one.baselines(points) for one, (points, _) in zip(figures, plans, strict=True)]
    found: dict[str, RunOutcome] = {}
    if kind not in ALONE:
        runs = [point.run for points, _ in plans for point in points]
        found = study.run(f"fig{number}", [*runs, *(run for own in bases for run in own.values())])
        reasons += [f"{o.run.labels['method']}: {o.error}" for o in found.values() if o.error]
    finished = {name: outcome for name, outcome in found.items() if outcome.error is None}
    paths: list[Path] = []
    for figure, (points, _), own in zip(figures, plans, bases, strict=True):
        with_outcomes = [replace(point, outcome=finished.get(point.run.name)) for point in points]
        done = tuple(point for point in with_outcomes if kind in ALONE or point.outcome)
        base = {key: finished[run.name] for key, run in own.items() if run.name in finished}
        if done:
            drawing = Drawing(paper, number, figure.rules, wanted, done, base)
            paths += _write(drawing, study.folder)
    return ReproducedFigure(paper, number, paths, len(found), reasons)


def _write(drawing: Drawing, folder: Path) -> list[Path]:
    """Write every picture as PNG and SVG, and the numbers as CSV."""
    pictures, numbers = figure_charts.DRAW[drawing.recipe.draw](drawing)
    own = drawing.rules == drawing.paper.recipe.protocol
    stem = f"figure-{drawing.number}" + ("" if own else f"-{drawing.rules}")
    stem += f"-rounds-{drawing.wanted.rounds}" if drawing.wanted.rounds else ""
    files: dict[str, object] = {}
    for name, picture in pictures.items():
        for form in ("png", "svg"):
            files[f"{stem}-{name}.{form}" if name else f"{stem}.{form}"] = picture
    return write_all(folder, {**files, f"{stem}.csv": numbers})
