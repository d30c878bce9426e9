"""Verdicts, the choice of cells, names of runs: what `atoll reproduce` decides without running."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError
from atoll.studies.reproduce.recipes import read_paper
from atoll.studies.reproduce.table import (
    Gains,
    Ours,
    Reproduction,
    Wanted,
    about_study,
    chosen,
    compatible,
    filled,
    needed,
    parse_only,
    plan_table,
    read_tables,
    tolerance,
    unique,
    verdict,
    whole_table,
)
from atoll.studies.study_run import RunOutcome

ATH = read_paper("fedath")


@pytest.mark.parametrize(
    ("difference", "tolerance", "word"),
    [(0, 1.5, "reproduced"), (1.5, 1.5, "reproduced"), (-1.5, 1.5, "reproduced"),
     (1.51, 1.5, "above"), (-1.51, 1.5, "below"), (-2.9, 3.0, "reproduced")],
)  # fmt: skip
def test_verdicts(difference: float, tolerance: float, word: str) -> None:
    assert verdict(difference, tolerance) == word


def test_a_printed_spread_widens_the_tolerance_only_if_it_is_one_of_runs() -> None:
    assert tolerance(read_paper("fediih"), "acc", 2.5) == 2.5
    assert tolerance(read_paper("fediih"), "acc", 0.5) == 1.5
    gcfl = read_paper("gcfl")
    found = {(one.metric, tolerance(gcfl, one.metric, one.std)) for one in gcfl.printed}
    assert found == {("acc", 1.5), ("min_gain", 1.5), ("ratio_improved", 1.0)}


@pytest.mark.parametrize(
    ("paper", "spread", "ours", "answer"),
    [
        ("fediih", 0.9, [(71.0, 0.0, 5)], True),  # 2 * 0.9 / sqrt 3 is 1.04
        ("fediih", 0.9, [(71.1, 0.0, 5)], False),
        ("fediih", 0.0, [(71.0, 1.2, 5)], True),  # 2 * 1.2 / sqrt 5 is 1.07
        ("fediih", 5.0, [(75.0, 5.0, 5)], True),  # both are wide
        ("fedath", None, [(72.1, 1.0, 4)], True),  # one printed run has our spread: 2 * sqrt 1.25
        ("fedath", None, [(72.3, 1.0, 4)], False),
        ("gcfl", 5.0, [(72.3, 1.0, 5)], False),  # a spread of clients is none of runs
        ("fedath", None, [(73.0, 1.0, 5), (69.0, 1.0, 5)], True),  # two draws, four points apart
        ("fedath", None, [(71.0, None, 1)], None),
    ],
)
def test_both_spreads_decide_the_second_verdict(paper, spread, ours, answer) -> None:
    assert compatible(read_paper(paper), "acc", 70.0, spread, ours) is answer
    assert compatible(read_paper(paper), "min_gain", 70.0, spread, ours) is None


def test_the_last_round_and_other_draws_stand_beside_the_verdict(everything_here: None) -> None:
    tad = read_paper("fedtad")
    row = plan_table(tad, "4", Wanted(parse_only(["method=FedAvg"])))[0]
    assert list(row.runs) == ["fedtad", "fedtad:last"]
    assert len(unique(needed(row))) == 1
    (cell,) = row.runs["fedtad"]
    numbers = {"mean": 0.6, "std": 0.01, "per_seed": [0.59, 0.61]}
    last = {"mean": 0.4, "std": 0.01, "per_seed": [0.39, 0.41]}
    metrics = {"test_accuracy": numbers, "last_test_accuracy": last}
    whole = filled(row, {cell.name: RunOutcome(cell, Path(), {"metrics": metrics})}, Gains())
    assert whole.ours["fedtad"].mean == pytest.approx(60)
    assert whole.beside["fedtad:last"].mean == pytest.approx(40)
    only = parse_only(["dataset=Cora,clients=10,method=FedAvg"])
    (row,) = plan_table(ATH, "1", Wanted(only, both=True))
    assert list(row.runs) == ["fedath", "strict", "fedath:2022", "fedath:2024"]
    assert row.runs["fedath"][0].name == row.runs["fedath:2024"][0].name
    assert list(plan_table(ATH, "1", Wanted(only))[0].runs) == ["fedath"]  # others cost runs


def test_only_takes_names_with_commas_and_several_of_one_column() -> None:
    text = "dataset=Cora,method=FedATH(no ENT,no DEP),clients=10,clients=15"
    pairs = parse_only([text])
    assert pairs[1] == ("method", "FedATH(no ENT,no DEP)")
    kept = chosen(ATH, ATH.cells("3"), Wanted(pairs))
    assert [(one.dataset, one.clients) for one in kept] == [("Cora", "10"), ("Cora", "15")]


def test_only_knows_our_names_too_and_the_papers_first() -> None:
    cells = read_paper("gcfl").cells("3")
    assert {
        one.method for one in chosen(read_paper("gcfl"), cells, Wanted((("method", "gcfl"),)))
    } == {"GCFL"}
    iih = read_paper("fediih")
    kept = chosen(iih, iih.cells("1"), Wanted((("dataset", "photo"), ("method", "fedpub"))))
    assert {(one.dataset, one.method) for one in kept} == {("Amazon-Photo", "FED-PUB")}
    tad = read_paper("fedtad")
    kept = chosen(tad, tad.cells("4"), Wanted((("setting", "participation=40%"),)))
    assert len(kept) == 5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("dataset", "COLUMN=VALUE"), ("colour=red", "unknown column of --only"),
     ("dataset=Coar", "did you mean 'Cora'"), ("dataset=Cora,dataset=Photo", "choose one of"),
     ("clients=99", "unknown clients of this table .99.; choose one of: 10, 15, 20")],
)  # fmt: skip
def test_wrong_choices_are_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        chosen(ATH, ATH.cells("1"), Wanted(parse_only([text])))


def test_a_choice_that_leaves_nothing_is_refused() -> None:
    gcfl = read_paper("gcfl")
    with pytest.raises(ConfigError, match="no cell of this table has all of"):
        chosen(gcfl, gcfl.cells("3"), Wanted(parse_only(["dataset=NCI1,clients=10"])))


def test_a_table_that_describes_data_says_so() -> None:
    with pytest.raises(ConfigError, match="table 7 of fedath is not reproduced: It describes"):
        plan_table(ATH, "7", Wanted())


def test_tables_share_runs(everything_here: None) -> None:
    wanted = Wanted(both=True)
    runs = {
        table: {cell.name for row in plan_table(ATH, table, wanted) for cell in needed(row)}
        for table in ("1", "3", "5", "8")
    }
    # Ninety cells under two protocols and one other draw of the data.
    assert len(runs["1"]) == 270
    assert runs["8"] == runs["1"]
    assert runs["3"] & runs["5"] & runs["1"]


def test_a_name_tells_every_configuration_apart_but_not_where_data_lie(
    everything_here: None,
) -> None:
    def names(wanted: Wanted) -> list[str]:
        return [cell.name for row in plan_table(ATH, "1", wanted) for cell in needed(row)]

    assert names(Wanted(root="a")) == names(Wanted(root="b"))
    assert names(Wanted(seeds=2)) == names(Wanted(seeds=3))
    assert not set(names(Wanted(rounds=2))) & set(names(Wanted()))


def test_averages_are_of_all_their_parts(everything_here: None) -> None:
    iih = read_paper("fediih")
    rows = plan_table(iih, "3", Wanted(parse_only(["dataset=AVG(all datasets),method=Local"])))
    sizes = {row.printed.clients: len(row.runs["fediih"]) for row in rows}
    assert sizes == {"5": 5, "10": 5, "20": 5, "all": 15}
    row = next(row for row in rows if row.printed.clients == "5")
    found = {}
    for place, cell in enumerate(row.runs["fediih"]):
        spread = {"mean": place / 10, "std": 0.0, "per_seed": [place / 10] * 3}
        metrics = {"test_accuracy": spread, "test_auc": spread}
        found[cell.name] = RunOutcome(cell, Path(), {"metrics": metrics})
    whole = filled(row, found, None)  # type: ignore[arg-type]  # no gains here
    assert whole.ours["fediih"].mean == pytest.approx(20.0)
    assert row.metrics.count("test_auc") == 3
    first = row.runs["fediih"][0]
    found[first.name] = RunOutcome(first, Path(), error="it broke")
    assert filled(row, found, None).errors == {"fediih": "Local: it broke"}  # type: ignore[arg-type]


def test_averages_need_all_data_sets(tmp_path: Path) -> None:
    iih = read_paper("fediih")
    only = parse_only(["dataset=AVG(all datasets),method=Local"])
    (row,) = plan_table(iih, "1", Wanted(only, root=str(tmp_path)))
    assert row.reason.startswith("a mean over data sets, of which some are missing: Cora")


def test_gains_bring_their_baseline_and_have_none_under_strict(everything_here: None) -> None:
    only = parse_only(["dataset=PROTEINS,method=FedAvg"])
    rows = plan_table(read_paper("gcfl"), "3", Wanted(only, both=True))
    assert [row.printed.metric for row in rows] == ["acc", "min_gain", "ratio_improved"]
    assert [list(row.runs) for row in rows] == [["gcfl", "strict"], ["gcfl"], ["gcfl"]]
    assert rows[1].baseline is not None
    assert rows[1].baseline.config.method == "local"
    assert len(unique(cell for row in rows for cell in needed(row))) == 3


def test_shortened_runs_get_no_verdict(everything_here: None) -> None:
    only = parse_only(["dataset=Cora,clients=10,method=FedAvg"])
    (row,) = plan_table(ATH, "1", Wanted(only))
    done = type(row)(row.printed, row.runs, ours={"fedath": Ours(73.0, 0.2, 3)})
    whole = Reproduction(ATH, "1", (done,), ("fedath",), None, 3)
    assert (whole.verdict(done), whole.counts()) == ("reproduced", {"reproduced": 1})
    short = Reproduction(ATH, "1", (done,), ("fedath",), 5, 3)
    assert short.verdict(done) == "shortened"
    failed = type(row)(row.printed, row.runs, errors={"fedath": "it broke"})
    assert whole.verdict(failed) == "failed: it broke"
    missing = type(row)(row.printed, reason="no data")
    assert whole.verdict(missing) == "not run: no data"


def call(folder: Path, method: str, seeds: int = 1) -> list[str]:
    """Write a call for one cell into study.json and return the names of its runs."""
    only = parse_only([f"dataset=Cora,clients=10,method={method}"])
    wanted = Wanted(only, seeds=seeds)
    about = about_study(ATH, "table1", wanted, folder)
    (folder / "study.json").write_text(json.dumps(about))
    return [run.name for row in plan_table(ATH, "1", wanted) for run in needed(row)]


def finish(folder: Path, name: str, mean: float) -> None:
    spread = {"mean": mean, "std": None, "per_seed": [mean]}
    (folder / "cells" / name).mkdir(parents=True)
    content = {"seeds": 1, "metrics": {"test_accuracy": spread}}
    (folder / "cells" / name / "result.json").write_text(json.dumps(content))


def test_a_later_call_for_another_cell_keeps_the_first(
    everything_here: None, tmp_path: Path
) -> None:
    (average,) = call(tmp_path, "FedAvg")
    finish(tmp_path, average, 0.75)
    (other,) = call(tmp_path, "FedProx")
    failed = {"event": "failed", "cell": other, "error": "it broke"}
    (tmp_path / "events.jsonl").write_text(json.dumps(failed) + "\n")
    (table,) = read_tables(tmp_path)
    assert [row.printed.method for row in table.rows] == ["FedAvg", "FedProx"]
    assert table.rows[0].ours["fedath"].mean == pytest.approx(75.0)
    assert table.verdict(table.rows[1]) == "failed: FedProx: it broke"
    # A second call for more seeds replaces the first one, and its number stays.
    call(tmp_path, "FedAvg", seeds=2)
    assert len(json.loads((tmp_path / "study.json").read_text())["looks"]) == 2
    again = whole_table(tmp_path, ATH, "1", None)
    assert (again.seeds, again.rows[0].ours["fedath"].seeds) == (2, 1)
    assert whole_table(tmp_path, ATH, "1", 5).rows == ()  # shortened calls are another table


def test_a_call_that_cannot_be_read_is_one_sentence(everything_here: None, tmp_path: Path) -> None:
    call(tmp_path, "FedAvg")
    about = json.loads((tmp_path / "study.json").read_text())
    about["looks"][0]["seeds"] = "many"
    (tmp_path / "study.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=r"study\.json in .* cannot be used"):
        read_tables(tmp_path)
