"""The list of tables and figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from atoll import run
from atoll.core.errors import ConfigError
from atoll.data.public.registry import GROUPS
from atoll.present.tables import Table
from atoll.studies.reproduce.figures import ALONE
from atoll.studies.reproduce.listing import dry_run_parts, items, listing_parts, planned_runs
from atoll.studies.reproduce.recipes import PAPERS, absent, read_paper
from atoll.studies.reproduce.table import PaperStudy, Wanted, plan_table, reproduce_table, unique
from tests.data.public.layouts import write_raw

WITHOUT_RUNS = ("not a result", "computed from data", "no numbers", "not drawn")


def test_absent_data_stand_in_brackets_and_take_no_time(tmp_path: Path) -> None:
    _, table, _, caption = listing_parts(["gcfl"], str(tmp_path), seeds=3)
    assert isinstance(table, Table)
    rows = {row[0].text: [cell.text for cell in row] for row in table.rows}
    recipe = read_paper("gcfl").recipe
    assert len(rows) == len(recipe.tables) + len(recipe.figures)
    for name, (_, _, cells, data, time) in rows.items():
        assert data.startswith("(") or data in WITHOUT_RUNS, name
        assert (cells == "–") != data.startswith("(")
        assert time == "–"
    assert "Rough time: 3 seeds" in str(caption)


def test_all_leaves_out_drawings_and_descriptions() -> None:
    paper = read_paper("fedath")
    found = items(paper, "all")
    assert ("table", "1") in found
    assert ("table", "7") not in found  # it describes the data
    assert all(not paper.recipe.figures[n].reason for kind, n in found if kind == "figure")
    assert items(paper, "fig7") == [("figure", "7")]


@pytest.mark.parametrize("name", PAPERS)
def test_every_recipe_is_valid_without_data(name: str, tmp_path: Path) -> None:
    paper, wanted = read_paper(name), Wanted(both=True, root=str(tmp_path))
    for number, table in paper.recipe.tables.items():
        found = planned_runs(paper, "table", number, wanted)
        assert bool(found) == (not table.reason)
        lacking = {one.config.data: absent(one.config.data, str(tmp_path)) for one in found}
        assert all("atoll data fetch" in why for why in lacking.values())
    for number, figure in paper.recipe.figures.items():
        found = planned_runs(paper, "figure", number, wanted)
        assert bool(found) == (not figure.reason and figure.draw not in ALONE)


@pytest.mark.usefixtures("everything_here")
@pytest.mark.parametrize(("name", "number"), [("fedath", "1"), ("gcfl", "3"), ("fediih", "5")])
def test_the_runs_are_those_of_the_table(name: str, number: str) -> None:
    paper, wanted = read_paper(name), Wanted(both=True)
    rows = plan_table(paper, number, wanted)
    runs = unique(one for row in rows for some in row.runs.values() for one in some)
    runs += [row.baseline for row in rows if row.baseline is not None]
    found = {one.name for one in planned_runs(paper, "table", number, wanted)}
    assert found == {one.name for one in runs}


def test_the_runs_are_those_that_only_leaves_of_a_figure(tmp_path: Path) -> None:
    only = (("dataset", "Cora"), ("clients", "20"), ("method", "fedath"))
    wanted = Wanted(only=only, root=str(tmp_path))
    (found,) = planned_runs(read_paper("fedath"), "figure", "6", wanted)
    assert (found.config.method, found.config.clients) == ("fedath", 20)


def test_a_recipe_that_cannot_be_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = read_paper("fedtad")
    monkeypatch.setitem(paper.recipe.methods["FedAvg"].run, "set", {"hiden": 3})
    with pytest.raises(ConfigError, match=r"recipe of .*fedavg.* cannot be run: .*hidden"):
        planned_runs(paper, "table", "2", Wanted())


def test_parts_say_what_runs_and_where_data_are(tmp_path: Path) -> None:
    wanted = Wanted(only=(("dataset", "WikiCS"), ("method", "FedAvg")), seeds=5, root=str(tmp_path))
    parts = dry_run_parts(read_paper("fedath"), "table", "2", wanted)
    assert [[cell.plain for cell in row] for row in parts[1].rows] == [
        ["WikiCS", "10, 15, 20", "FedAvg", *(cell.plain for cell in parts[1].rows[0][3:])]
    ]
    assert parts[-1] == f"wikics is not in {tmp_path}; get with: atoll data fetch wikics"
    from_data = dry_run_parts(read_paper("gcfl"), "table", "1", wanted)
    assert from_data[1] == "It is computed from the data, without runs."


CELLS = [
    ("fedath", "1", "ogbn-arxiv", "10"),
    ("fedath", "2", "WikiCS", "10"),
    ("fedath", "2", "Roman-empire", "10"),
    ("fedtad", "2", "Physics", "5"),
    ("fediih", "1", "Amazon-Computer", "5"),
    ("fediih", "3", "Amazon-ratings", "5"),
    ("fediih", "3", "Questions", "5"),
    ("fediih", "3", "Tolokers", "5"),
]


@pytest.mark.parametrize(("name", "table", "dataset", "clients"), CELLS)
def test_a_cell_runs_on_files_of_the_published_layout(
    name: str, table: str, dataset: str, clients: str, tmp_path: Path
) -> None:
    if dataset == "ogbn-arxiv" and importlib.util.find_spec("ogb") is None:
        pytest.skip("the optional package ogb is not installed")
    paper = read_paper(name)
    write_raw(paper.data_name(dataset), tmp_path)
    only = (("dataset", dataset), ("clients", clients), ("method", "FedAvg"))
    wanted = Wanted(only=only, seeds=1, rounds=1, root=str(tmp_path))
    done = reproduce_table(PaperStudy(paper, wanted, tmp_path / "study"), table)
    assert done.counts() == {"shortened": len(done.rows)}


@pytest.mark.parametrize("name", ["texas", "wisconsin", "squirrel"])
def test_other_sets_run_too(name: str, tmp_path: Path) -> None:
    write_raw(name, tmp_path)
    how = {"clients": 3, "rounds": 1, "epochs": 1, "set": {"hidden": 8}}
    done = run("fedavg", data=name, data_root=str(tmp_path), **how)
    assert 0 <= done.summary()["metrics"]["test_accuracy"]["mean"] <= 1


def test_a_group_runs_with_its_absent_set(tmp_path: Path) -> None:
    for name in GROUPS["biochem"]:
        write_raw(name, tmp_path)
    only = (("dataset", "BIOCHEM"), ("method", "FedAvg"))
    wanted = Wanted(only, seeds=1, rounds=1, root=str(tmp_path))
    done = reproduce_table(PaperStudy(read_paper("gcfl"), wanted, tmp_path / "study"), "4")
    assert done.counts() == {"shortened": len(done.rows)}
