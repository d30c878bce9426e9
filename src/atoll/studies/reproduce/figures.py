"""A paper's figure again: its runs, drawn as pictures, with their numbers in a table.

Printed figures have no numbers to compare with: only their shape can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from atoll.core.errors import unknown
from atoll.present.files import check_output, write_all
from atoll.studies.reproduce.figure_charts import DRAW
from atoll.studies.reproduce.figure_plan import Drawing, Point, baseline_runs, figure_points
from atoll.studies.reproduce.recipes import Paper
from atoll.studies.reproduce.table import Wanted, about_study, unique
from atoll.studies.study import run_study
from atoll.studies.study_run import Json, RunOutcome, StudyObserver

ALONE = ("contribution",)
"""Figures that do not come from runs of a study."""


@dataclass(frozen=True)
class ReproducedFigure:
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

    def summary(self) -> Json:
        """The object that `--json` prints."""
        return {
            "paper": self.paper.name,
            "figure": self.number,
            "runs": self.runs,
            "files": [str(path) for path in self.paths],
            "left_out": self.left_out,
        }


def reproduce_figure(
    paper: Paper,
    number: str,
    wanted: Wanted,
    folder: Path,
    *,
    observer: StudyObserver | None = None,
    jobs: int | str = 1,
) -> ReproducedFigure:
    """Run what a figure needs and is not there yet, draw it, and write its numbers."""
    check_output(folder)
    recipe = paper.recipe.figures[number]
    planned = {rules: figure_points(paper, number, wanted, rules) for rules in wanted.rules(paper)}
    if recipe.draw not in DRAW:
        raise unknown("way to draw in a recipe", recipe.draw, DRAW)
    bases = {
        rules: baseline_runs(paper, number, points, rules, wanted)
        for rules, (points, _) in planned.items()
    }
    reasons = next(iter(planned.values()))[1]
    found: dict[str, RunOutcome] = {}
    if recipe.draw not in ALONE:
        runs = unique(
            [
                *(point.run for points, _ in planned.values() for point in points),
                *(run for own in bases.values() for run in own.values()),
            ]
        )
        about = about_study(paper, f"fig{number}", wanted, folder)
        outcomes = run_study(folder, runs, about=about, observer=observer, adds=True, jobs=jobs)
        found = {outcome.run.name: outcome for outcome in outcomes}
        reasons += [f"{o.run.labels['method']}: {o.error}" for o in outcomes if o.error]
    paths: list[Path] = []
    for rules, (points, _) in planned.items():
        done = [p for p in _with_outcomes(points, found) if recipe.draw in ALONE or p.outcome]
        ended = {key: found.get(run.name) for key, run in bases[rules].items()}
        base = {key: one for key, one in ended.items() if one and one.error is None}
        if done:
            drawing = Drawing(paper, number, rules, tuple(done), base, wanted, folder)
            paths += _write(drawing)
    return ReproducedFigure(paper, number, paths, len(found), reasons)


def _with_outcomes(points: list[Point], found: dict[str, RunOutcome]) -> list[Point]:
    """The points with the outcomes of the runs that did not fail."""
    finished = {name: outcome for name, outcome in found.items() if outcome.error is None}
    return [replace(point, outcome=finished.get(point.run.name)) for point in points]


def _write(drawing: Drawing) -> list[Path]:
    """Every picture as PNG and SVG, and the numbers as CSV."""
    pictures, numbers = DRAW[drawing.recipe.draw](drawing)
    own = drawing.rules == drawing.paper.recipe.protocol
    stem = f"figure-{drawing.number}" + ("" if own else f"-{drawing.rules}")
    stem += f"-rounds-{drawing.wanted.rounds}" if drawing.wanted.rounds else ""
    files: dict[str, object] = {}
    for name, picture in pictures.items():
        for form in ("png", "svg"):
            files[f"{stem}-{name}.{form}" if name else f"{stem}.{form}"] = picture
    return write_all(drawing.folder, {**files, f"{stem}.csv": numbers})
