"""A paper's figure again: the runs that it needs, drawn as a picture with its numbers in a table.

Printed figures have no numbers to compare with: the shape is what can be compared.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError, unknown
from atoll.core.files import write_atomically
from atoll.data.public.registry import dataset_info, plain_name, task_of_data
from atoll.present.chart import Panels
from atoll.present.chart_png import image
from atoll.present.plots import check_output
from atoll.present.terminal import counted
from atoll.studies.reproduce.recipes import STRICT, FigureRecipe, Paper, Variant, absent
from atoll.studies.reproduce.table import Wanted, about_study, named_cell, unique
from atoll.studies.study import Cell, Outcome, StudyObserver, run_cells

COLUMNS = ("dataset", "clients", "method")
"""What `--only` can ask of a figure."""
ALONE = ("contribution",)
"""Figures that do not come from runs of a study."""


@dataclass(frozen=True)
class Point:
    """One run of a figure.

    Attributes:
        dataset: The paper's name of the data.
        clients: How many; None is the protocol's number.
        method: The paper's.
        x: Its place on the first axis.
        y: Its place on the second.
        cell: The run.
        outcome: What became of it.
        group: Number of the place on the first axis, which may have a label twice.
    """

    dataset: str
    clients: int | None
    method: str
    x: Variant
    y: Variant
    cell: Cell
    outcome: Outcome | None = None
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
    baselines: Mapping[tuple[str, Any], Outcome]
    wanted: Wanted
    folder: Path

    @property
    def recipe(self) -> FigureRecipe:
        return self.paper.recipe.figures[self.number]

    def datasets(self) -> list[str]:
        """Of the finished runs, in the recipe's order."""
        return list(dict.fromkeys(point.dataset for point in self.points))

    def metric(self, dataset: str) -> str:
        """What the data are scored by: "accuracy" or "auc"."""
        name = plain_name(self.paper.data_name(dataset))
        return "accuracy" if task_of_data(name) == "graph" else dataset_info(name).metric

    def title(self) -> str:
        """What the picture shows and how it was run."""
        rounds = self.wanted.rounds
        short = f", only {counted(rounds, 'round')}" if rounds is not None else ""
        return (
            f"{self.paper.name}, figure {self.number}: {self.recipe.shows}\n"
            f"protocol {self.rules}, {counted(self.wanted.seeds, 'seed')}{short}"
        )


@dataclass(frozen=True)
class Drawn:
    """A figure that was drawn.

    Attributes:
        paper: Whose.
        number: The figure's.
        paths: What was written.
        runs: How many it comes from.
        left_out: One sentence for each thing that is not in it.
    """

    paper: Paper
    number: str
    paths: list[Path]
    runs: int
    left_out: list[str]

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "paper": self.paper.name,
            "figure": self.number,
            "runs": self.runs,
            "files": [str(path) for path in self.paths],
            "left_out": self.left_out,
        }


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
                cell = _cell(paper, recipe, dataset, method, clients, (x, y), rules, wanted)
                partner = absent(x.beside, wanted.root) if x.beside else ""
                if partner:
                    lacking[x.beside] = partner
                else:
                    points.append(Point(dataset, clients, method, x, y, cell, group=place))
    reasons = [f"{one}: {why}" for one, why in lacking.items() if why]
    numbers = {str(point.cell.config.clients) for point in points}
    asked = [value for key, value in wanted.only if key == "clients"]
    for value in asked:
        if points and value not in numbers:
            raise unknown("number of clients of this figure", value, numbers)
    if asked:
        points = [point for point in points if str(point.cell.config.clients) in asked]
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


def _cell(
    paper: Paper,
    recipe: FigureRecipe,
    dataset: str,
    method: str,
    clients: int | None,
    variants: tuple[Variant, ...],
    rules: str,
    wanted: Wanted,
) -> Cell:
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
    return named_cell(config, labels)


def figure_cells(paper: Paper, number: str, wanted: Wanted) -> list[Cell]:
    """The runs of a figure under the paper's protocol, for the list."""
    points, _ = figure_points(paper, number, wanted)
    bases = _baselines(paper, number, points, "", wanted)
    return [*(point.cell for point in points), *bases.values()]


def _baselines(
    paper: Paper, number: str, points: Sequence[Point], rules: str, wanted: Wanted
) -> dict[tuple[str, Any], Cell]:
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
        found[point.dataset, point.x.label] = _cell(
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


def reproduce_figure(
    paper: Paper,
    number: str,
    wanted: Wanted,
    folder: Path,
    *,
    observer: StudyObserver | None = None,
    jobs: int | str = 1,
) -> Drawn:
    """Run what a figure needs and is not there yet, draw it, and write its numbers."""
    from atoll.studies.reproduce.figure_plots import DRAW

    check_output(folder)
    recipe = paper.recipe.figures[number]
    planned = [
        (rules, *figure_points(paper, number, wanted, rules)) for rules in wanted.rules(paper)
    ]
    if recipe.draw not in DRAW:
        raise unknown("way to draw in a recipe", recipe.draw, DRAW)
    bases = {
        rules: _baselines(paper, number, points, rules, wanted) for rules, points, _ in planned
    }
    cells = unique(
        [
            *(point.cell for _, points, _ in planned for point in points),
            *(cell for own in bases.values() for cell in own.values()),
        ]
    )
    reasons = planned[0][2]
    found: dict[str, Outcome] = {}
    if recipe.draw not in ALONE:
        about = about_study(paper, f"fig{number}", wanted, folder)
        outcomes = run_cells(folder, cells, about=about, observer=observer, adds=True, jobs=jobs)
        found = {outcome.cell.name: outcome for outcome in outcomes}
        reasons += [f"{o.cell.labels['method']}: {o.error}" for o in outcomes if o.error]
    paths: list[Path] = []
    for rules, points, _ in planned:
        if not points:
            continue
        done = [replace(p, outcome=found.get(p.cell.name)) for p in points]
        if recipe.draw not in ALONE:
            done = [p for p in done if p.outcome is not None and p.outcome.error is None]
        base = {
            key: found[cell.name]
            for key, cell in bases[rules].items()
            if found[cell.name].error is None
        }
        drawing = Drawing(paper, number, rules, tuple(done), base, wanted, folder)
        if done:
            paths += _write(drawing, *DRAW[recipe.draw](drawing))
    return Drawn(paper, number, paths, len(found), reasons)


def _write(
    drawing: Drawing, pictures: Mapping[str, Panels], rows: Sequence[Mapping[str, Any]]
) -> list[Path]:
    """Every picture as PNG and SVG, and the numbers as CSV."""
    own = drawing.rules == drawing.paper.recipe.protocol
    stem = f"figure-{drawing.number}" + ("" if own else f"-{drawing.rules}")
    stem += f"-rounds-{drawing.wanted.rounds}" if drawing.wanted.rounds else ""
    paths = []
    for name, picture in pictures.items():
        for form in ("png", "svg"):
            paths.append(drawing.folder / (f"{stem}-{name}.{form}" if name else f"{stem}.{form}"))
            write_atomically(paths[-1], image(picture, form))
    text = io.StringIO(newline="")
    names = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    paths.append(drawing.folder / f"{stem}.csv")
    write_atomically(paths[-1], text.getvalue().encode())
    return paths
