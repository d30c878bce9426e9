"""Charts of figures: the marks that the runs ask for, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from atoll.experiment.config import make_config
from atoll.present.chart import Bars, Chart, Heat, Line, Panels, Texts
from atoll.present.chart_png import png
from atoll.present.tables import csv_text
from atoll.studies.reproduce.figure_charts import DRAW
from atoll.studies.reproduce.figure_plan import Drawing, Point
from atoll.studies.reproduce.recipes import Variant, read_paper
from atoll.studies.reproduce.table import Wanted
from atoll.studies.study_run import RunOutcome, StudyRun


def figure(kind: str) -> tuple[str, str]:
    """A paper and the number of one of its figures that is drawn so."""
    for name in ("fedath", "fediih", "fedtad", "gcfl"):
        for number, recipe in read_paper(name).recipe.figures.items():
            if recipe.draw == kind:
                return name, number
    raise AssertionError(kind)


def drawing(kind: str, seeds: int = 2) -> Drawing:
    """All places of a figure with made-up scores: 0.50, 0.51, ..."""
    name, number = figure(kind)
    paper = read_paper(name)
    recipe, points = paper.recipe.figures[number], []
    data = recipe.datasets[0]
    for place, x in enumerate(recipe.x):
        for y in recipe.y:
            for method in x.methods or recipe.methods:
                score = 0.5 + 0.01 * len(points)
                run = StudyRun(f"run-{len(points)}", make_config(data="cora", clients=5))
                found = {"mean": score, "std": 0.02, "per_seed": [score] * seeds}
                metrics: Mapping[str, object] = {"test_accuracy": found, "test_auc": found}
                outcome = RunOutcome(run, Path(), {"metrics": metrics})
                points.append(Point(data, 5, method, x, y, run, outcome, place))
    return Drawing(paper, number, recipe.draw, tuple(points), {}, Wanted(seeds=seeds), Path())


def only_chart(panels: Panels) -> Chart:
    (chart,) = (chart for row in panels.rows for chart in row if chart is not None)
    return chart


@pytest.mark.parametrize("kind", ["lines", "bars", "grid"])
def test_scores_are_drawn_and_listed(kind: str) -> None:
    asked = drawing(kind)
    pictures, table = DRAW[kind](asked)
    assert list(pictures) == [""]
    assert png(pictures[""]).startswith(b"\x89PNG")
    lines = csv_text(table).splitlines()
    assert lines[0].startswith("dataset,clients,method,")
    assert len(lines) == 1 + len(asked.points)
    assert lines[1].endswith(f"50.0,2.0,2,{asked.rules},run-0")


def test_a_method_is_a_line_through_the_places_of_the_axis() -> None:
    asked = drawing("lines")
    chart = only_chart(DRAW["lines"](asked)[0][""])
    lines = [mark for mark in chart.marks if isinstance(mark, Line)]
    assert [line.name for line in lines] == asked.methods()
    assert list(lines[0].x) == [float(variant.label) for variant in asked.recipe.x]
    assert lines[-1].colour == "black"  # the paper's own method
    assert lines[0].y[0] == pytest.approx(50.0)


def test_bars_have_whiskers_and_their_number() -> None:
    asked = drawing("bars")
    chart = only_chart(DRAW["bars"](asked)[0][""])
    bars = [mark for mark in chart.marks if isinstance(mark, Bars)]
    words = [mark.words[0] for mark in chart.marks if isinstance(mark, Texts)]
    assert len(bars) == len(words) == len(asked.points)
    assert (words[0], list(bars[0].spread or [])) == ("50.0", [2.0])
    named = [bar.name for bar in bars if bar.name]
    assert named == asked.methods()  # each once in the legend


def test_a_grid_starts_at_its_least_value() -> None:
    chart = only_chart(DRAW["grid"](drawing("grid"))[0][""])
    (heat,) = chart.marks
    assert isinstance(heat, Heat)
    assert heat.low == pytest.approx(50.0)
    assert heat.high is not None
    assert heat.high >= heat.low + 1.0
    assert isinstance(drawing("grid").recipe.y[0], Variant)
