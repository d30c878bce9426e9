"""A paper's figure again: its runs, drawn as pictures, with their numbers in a table.

Printed figures have no numbers to compare with: only their shape can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from atoll.core.errors import unknown
from atoll.present.files import check_output, write_all
from atoll.present.layout import Part, heading, quiet
from atoll.studies.reproduce.figure_charts import DRAW
from atoll.studies.reproduce.figure_plan import Drawing, Figure
from atoll.studies.reproduce.recipes import Paper
from atoll.studies.reproduce.table import PaperStudy
from atoll.studies.study_run import Json, RunOutcome

ALONE = ("contribution",)  # figures that do not come from runs of a study


@dataclass(frozen=True)
class ReproducedFigure:
    """A figure that was drawn."""

    paper: Paper
    number: str
    paths: list[Path]
    runs: int  # how many it comes from
    left_out: list[str]  # one sentence for each part that is not in it

    def summary(self) -> Json:
        """The object that `--json` prints."""
        about = {"paper": self.paper.name, "figure": self.number, "runs": self.runs}
        return {**about, "files": list(map(str, self.paths)), "left_out": self.left_out}

    def parts(self) -> list[Part]:
        """The title, the parts that it lacks, and a note, for `layout`."""
        recipe = self.paper.recipe.figures[self.number]
        note = f"{recipe.note} " if recipe.note else ""
        return [
            heading(f"{self.paper.name}, figure {self.number}: {recipe.shows}"),
            *([] if self.paths else ["Nothing to draw."]),
            *(f"not in it: {one}" for one in self.left_out),
            quiet(f"{note}The printed figure has no numbers to compare with."),
        ]


def reproduce_figure(study: PaperStudy, number: str) -> ReproducedFigure:
    """Run what a figure needs and is not there yet, draw it, and write its numbers."""
    check_output(study.folder)
    paper, wanted = study.paper, study.wanted
    figures = [Figure(paper, number, rules, wanted) for rules in wanted.rules(paper)]
    plans = [figure.plan() for figure in figures]
    kind, reasons = figures[0].recipe.draw, plans[0][1]
    if kind not in DRAW:
        raise unknown("way to draw in a recipe", kind, DRAW)
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
    """Every picture as PNG and SVG, and the numbers as CSV."""
    pictures, numbers = DRAW[drawing.recipe.draw](drawing)
    own = drawing.rules == drawing.paper.recipe.protocol
    stem = f"figure-{drawing.number}" + ("" if own else f"-{drawing.rules}")
    stem += f"-rounds-{drawing.wanted.rounds}" if drawing.wanted.rounds else ""
    files: dict[str, object] = {}
    for name, picture in pictures.items():
        for form in ("png", "svg"):
            files[f"{stem}-{name}.{form}" if name else f"{stem}.{form}"] = picture
    return write_all(folder, {**files, f"{stem}.csv": numbers})
