"""The runs of a figure, refused choices, and missing data."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import ConfigError
from atoll.studies.baselines import RealFedTAD
from atoll.studies.reproduce import figures
from atoll.studies.reproduce.figures import Figure, reproduce_figure
from atoll.studies.reproduce.recipes import STRICT, read_paper
from atoll.studies.reproduce.table import PaperStudy, Wanted, parse_only


@pytest.fixture
def all_data(monkeypatch: pytest.MonkeyPatch, everything_here: None) -> None:
    monkeypatch.setattr(figures, "absent", lambda data, root: "")


def figure(paper: str, number: str, *only: str, rules: str = "") -> Figure:
    return Figure(read_paper(paper), number, rules, Wanted(parse_only(only)))


@pytest.mark.parametrize(
    ("only", "sentence"),
    [("metric=acc", "is for tables; a figure has dataset, clients, method"),
     ("dataset=Coar", "did you mean 'Cora'"), ("clients=999", "number of clients of this figure")],
)  # fmt: skip
def test_wrong_choices_are_one_sentence(only: str, sentence: str, all_data: None) -> None:
    with pytest.raises(ConfigError, match=sentence):
        figure("fedath", "7", only).plan()


def test_a_figure_that_is_a_drawing_says_so() -> None:
    paper = read_paper("fedath")
    number = next(n for n, one in paper.recipe.figures.items() if one.reason)
    with pytest.raises(ConfigError, match=f"figure {number} of fedath is not drawn"):
        figure("fedath", number).plan()


def test_only_gains_have_baselines_and_these_have_no_settings(all_data: None) -> None:
    gains = figure("gcfl", "6")
    points, reasons = gains.plan()
    assert not reasons
    bases = gains.baselines(points)
    assert {run.config.method for run in bases.values()} == {"local"}
    assert set(bases) == {(point.dataset, point.x.label) for point in points}
    curves = figure("fedath", "7")
    assert curves.baselines(curves.plan()[0]) == {}


def test_protocols_have_different_runs_of_the_same_points(all_data: None) -> None:
    own, strict = (figure("fedath", "7", "dataset=Cora", rules=r).plan()[0] for r in ("", STRICT))
    assert [point.method for point in own] == [point.method for point in strict]
    assert not {point.run.name for point in own} & {point.run.name for point in strict}
    assert {point.run.labels["protocol"] for point in strict} == {STRICT}


@pytest.mark.parametrize("rules", ["", STRICT])
def test_the_oracle_of_a_figure_is_a_baseline_with_tuned_settings(
    rules: str, all_data: None
) -> None:
    points, _ = figure("fedtad", "4", "clients=5", rules=rules).plan()
    by_method = {point.method: point.run for point in points}
    oracle, own = by_method["FedTAD-r-eq"], by_method["FedTAD"]
    assert isinstance(oracle.method, RealFedTAD)
    assert (oracle.config.objects, own.config.objects) == (("method",), ())
    assert own.method is None
    assert oracle.config.set == own.config.set
    assert oracle.config.set["distil_steps"] == 10


def test_absent_data_leave_nothing_to_draw(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    study = PaperStudy(read_paper("fedath"), Wanted(root=str(tmp_path)), folder)
    found = reproduce_figure(study, "7")
    summary = found.summary()
    assert (summary["files"], summary["runs"], summary["figure"]) == ([], 0, "7")
    assert any("atoll data fetch" in sentence for sentence in summary["left_out"])
    assert not list(folder.glob("figure-*"))
