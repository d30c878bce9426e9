"""Every way to draw a paper's figure, from made-up runs: marks, titles and rows of the CSV."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from atoll.present.chart import Area, Bars, Chart, Dots, Heat, Line, Panels, Rule
from atoll.present.chart_png import image
from atoll.present.tables import Table
from atoll.studies.reproduce import figure_charts, figures, recipes
from atoll.studies.reproduce.table import Wanted


class MadeUp:
    """Scores of a run, drawn from its name."""

    def __init__(self, name: Path) -> None:
        self.rng = np.random.default_rng(sum(map(ord, str(name))))

    def of_clients(self) -> np.ndarray:
        return 0.6 + 0.1 * self.rng.random((2, 10))

    def curve(self, metric: str) -> np.ndarray:
        return self.rng.random((2, 4))


def read_made_up(folder: Path, like: object = None) -> SimpleNamespace:
    config = SimpleNamespace(method="local" if "alone" in str(folder) else "fedavg")
    return SimpleNamespace(result=MadeUp(folder), federations=[folder], config=config)


@pytest.fixture
def draw(monkeypatch):
    """Draws a figure of a paper with two seeds of every run."""
    for module in (recipes, figures):
        monkeypatch.setattr(module, "absent", lambda data, root: "")
    pair = SimpleNamespace(structure=np.array([[0, 0.3], [0.3, 0]]))
    made_up = SimpleNamespace(mean=60.0, std=1.5, seeds=2)
    monkeypatch.setattr(figure_charts, "read_run", read_made_up)
    monkeypatch.setattr(figure_charts, "compare_graphs", lambda federation: pair)
    monkeypatch.setattr(figure_charts, "_distances", lambda folder: [0.2, 0.3])
    monkeypatch.setattr(figure_charts, "_ours", lambda point, drawing: made_up)
    monkeypatch.setattr(
        figure_charts, "_folder", lambda point: Path(f"{point.x.label}-{point.method}")
    )

    def draw(name: str, number: str):
        paper, wanted = recipes.read_paper(name), Wanted()
        points, _ = figures.Figure(paper, number, "", wanted).plan()
        base = SimpleNamespace(folder=Path("base"))
        bases = {(point.dataset, point.x.label): base for point in points}
        rules = paper.recipe.protocol
        drawing = figures.Drawing(paper, number, rules, wanted, tuple(points), bases)
        pictures, table = figure_charts.DRAW[paper.recipe.figures[number].draw](drawing)
        (picture,) = pictures.values()
        assert isinstance(picture, Panels)
        assert "figure" in picture.title
        assert image(picture, "png").startswith(b"\x89PNG")
        return drawing, [chart for row in picture.rows for chart in row if chart], records(table)

    return draw


def records(table: Table) -> list[dict[str, str]]:
    names = [column.name for column in table.columns]
    return [dict(zip(names, (cell.text for cell in row), strict=True)) for row in table.rows]


def marks(chart: Chart, kind: type) -> list:
    return [mark for mark in chart.marks if isinstance(mark, kind)]


def test_lines_of_one_method_have_a_band_and_a_logarithmic_axis(draw) -> None:
    drawing, charts, rows = draw("fedath", "4")
    assert [chart.title for chart in charts] == drawing.datasets()
    assert len(rows) == len(drawing.points)
    (line,) = marks(charts[0], Line)
    assert list(line.y) == [60.0] * 6
    assert list(line.high) == [61.5] * 6
    assert rows[0]["std"] == "1.5"
    assert charts[0].x.log


def test_curves_of_many_methods_differ_in_colour_or_dash(draw) -> None:
    drawing, charts, rows = draw("fedath", "7")
    lines = marks(charts[0], Line)
    assert len({(line.colour, line.dash) for line in lines}) == len(lines)
    assert (lines[-1].name, lines[-1].colour) == ("FedATH", "black")
    assert [row["round"] for row in rows[:4]] == ["1", "2", "3", "4"]
    assert float(rows[0]["mean"]) == round(
        100 * MadeUp(Path(f"{drawing.points[0].x.label}-FedAvg")).curve("").mean(0)[0], 3
    )


def test_bars_name_each_method_once_and_have_whiskers(draw) -> None:
    drawing, (chart,), rows = draw("fedtad", "4")
    bars = marks(chart, Bars)
    assert len(bars) == len(rows) == len(drawing.points)
    names = [bar.name for bar in bars if bar.name]
    assert sorted(names) == sorted({point.method for point in drawing.points})
    assert all(list(bar.spread) == [1.5] for bar in bars)
    assert chart.y.low == 50.5


def test_a_grid_is_a_heat_map_of_all_pairs(draw) -> None:
    _, charts, rows = draw("gcfl", "2")
    assert [chart.title.split("\n")[0] for chart in charts] == [
        "MOLECULES, GCFL",
        "MOLECULES, GCFL+",
    ]
    (heat,) = marks(charts[0], Heat)
    assert heat.values.tolist() == [[60.0] * 3] * 3
    assert (heat.low, heat.high) == (60.0, 61.0)  # equal values do not look different
    assert len(rows) == 18


def test_distances_have_their_number_above_the_bar(draw) -> None:
    _, (chart,), rows = draw("fedath", "1")
    assert [row["distance"] for row in rows] == ["0.25"] * len(rows)
    assert [bar.length for bar in marks(chart, Bars)] == [[0.25]] * len(rows)


def test_pairs_show_the_client_alone_as_a_line(draw) -> None:
    _, (chart,), rows = draw("gcfl", "5")
    (alone,) = marks(chart, Rule)
    assert alone.name == "alone"
    assert len(marks(chart, Dots)) == len(rows) - 1
    assert {row["structure_heterogeneity"] for row in rows} == {"", "0.3"}


def test_violins_have_two_halves_and_a_dot_for_each_client(draw) -> None:
    drawing, charts, rows = draw("gcfl", "6")
    halves, dots = marks(charts[0], Area), marks(charts[0], Dots)
    assert len(halves) == len(dots) == 8  # four methods, two kinds of clients
    assert np.all(np.asarray(halves[0].high) == 0)  # the left half ends at its method
    assert len(rows) == 10 * len(drawing.points)
