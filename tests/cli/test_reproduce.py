"""`atoll reproduce`: lists, runs, files and refusals."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch

from atoll.studies.reproduce.table import read_tables

TINY = ("--only", "dataset=Cora,clients=10,method=FedAvg", "--rounds", 1, "--seeds", 1)


def test_without_arguments_everything_is_listed(cli) -> None:
    text = cli("reproduce").stdout
    for name in (
        "fedath: Fu et al.",
        "fediih: Yu et al.",
        "fedtad: Zhu et al.",
        "gcfl: Xie et al.",
    ):
        assert name in text
    assert "(Cora)" in text  # not here, so in brackets
    assert not re.search(r"\b1 s\b", text)  # and no time for what cannot be run
    one = cli("reproduce", "gcfl").stdout
    assert "fig8" in one
    assert "fedath" not in one


@pytest.mark.data
def test_a_table_then_the_same_again_and_a_figure_of_the_same_run(cli, real_data) -> None:
    root = ("--data-root", real_data("cora"), "--out", "study")
    first = cli("reproduce", "fedath", "1", *TINY, "--both", "--tex", "--json", *root)
    found = json.loads(first.stdout)
    (cell,) = found["cells"]
    assert (cell["printed"], cell["verdict"]) == (73.59, "shortened")
    assert cell["difference"] == pytest.approx(cell["ours"] - 73.59, abs=1e-3)
    assert cell["strict_ours"] is not None
    with Path("study/table-1-rounds-1.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["ours"]) == cell["ours"]
    assert "| FedAvg | 73.6 |" in Path("study/table-1-rounds-1.md").read_text()
    assert "\\toprule" in Path("study/table-1-rounds-1.tex").read_text()
    events = Path("study/events.jsonl").read_text().count("\n")
    assert events == 6  # three runs begin and end: both protocols, and another draw of the data
    again = cli("reproduce", "fedath", "table1", *TINY, "--both", *root)
    assert "3 of 3 cells were finished before" in again.stdout
    assert "Shortened to 1 round" in again.stdout
    only = ("--only", "dataset=Cora,method=FedAvg", *TINY[2:])
    drawn = cli("reproduce", "fedath", "fig7", *only, *root)
    assert "no numbers to compare with" in " ".join(drawn.stdout.split())
    assert Path("study/events.jsonl").read_text().count("\n") == events
    assert Path("study/figure-7-rounds-1.svg").read_text().startswith("<?xml")
    assert Path("study/figure-7-rounds-1.png").stat().st_size > 5000
    assert Path("study/figure-7-rounds-1.csv").read_text().startswith("dataset,method,round,mean")


@pytest.mark.data
def test_a_look_at_a_part_leaves_the_fuller_table(cli, real_data) -> None:
    root = ("--data-root", real_data("cora"), "--out", "study", "--seeds", 1)
    two = ("--only", "dataset=Cora,clients=10,method=FedAvg,method=FedProx")
    one = ("--only", "dataset=Cora,clients=10,method=FedProx")

    def rows(name: str) -> list[dict[str, str]]:
        with Path("study", name).open(newline="") as file:
            return list(csv.DictReader(file))

    cli("reproduce", "fedath", "1", *two, "--rounds", 1, "--both", "--tex", *root)
    whole = rows("table-1-rounds-1.csv")
    assert [row["method"] for row in whole] == ["FedAvg", "FedProx"]
    tex = Path("study/table-1-rounds-1.tex").read_text()
    part = cli("reproduce", "fedath", "1", *one, "--rounds", 1, *root).stdout
    assert "FedAvg" not in part
    assert "The files contain 1 more cell of this table, from earlier calls." in part
    assert rows("table-1-rounds-1.csv") == whole
    assert whole[0]["strict_ours"]
    assert Path("study/table-1-rounds-1.tex").read_text() == tex
    # Other rounds are another table; more seeds are the same one, cell by cell.
    cli("reproduce", "fedath", "1", *one, "--rounds", 2, *root)
    assert [row["method"] for row in rows("table-1-rounds-2.csv")] == ["FedProx"]
    assert rows("table-1-rounds-1.csv") == whole
    elsewhere = Path("elsewhere").absolute()
    elsewhere.symlink_to(root[1])  # the same data by another name
    cli("reproduce", "fedath", "1", *one, "--rounds", 1, "--data-root", elsewhere, *root[2:-1], 2)
    assert [row["seeds"] for row in rows("table-1-rounds-1.csv")] == ["1", "2"]
    assert "1 to 2 seeds" in Path("study/table-1-rounds-1.md").read_text()
    assert rows("table-1-rounds-1.csv")[0] == whole[0]
    # Data that went away take nothing from it.
    about = json.loads(Path("study/study.json").read_text())
    assert [look["rounds"] for look in about["looks"]] == [1, 2, 1]
    assert all(look["command"].startswith("atoll reproduce") for look in about["looks"])
    for look in about["looks"]:
        look["root"] = "gone"
    Path("study/study.json").write_text(json.dumps(about))
    (first, second) = read_tables(Path("study"))
    assert [row.printed.method for row in first.rows] == ["FedAvg", "FedProx"]
    assert [row.printed.method for row in second.rows] == ["FedProx"]
    assert first.rows[0].ours["strict"].mean == pytest.approx(
        float(whole[0]["strict_ours"]), abs=1e-3
    )


@pytest.mark.data
def test_a_varied_figure_is_drawn_with_its_numbers(cli, real_data) -> None:
    root = ("--data-root", real_data("cora"), "--out", "study", "--rounds", 1, "--seeds", 1)
    only = ("--only", "dataset=Cora,method=FedAvg,method=FedTAD-nv,clients=5")
    found = json.loads(cli("reproduce", "fedtad", "fig4", *only, "--json", *root).stdout)
    assert found["runs"] == 2
    with Path("study/figure-4-rounds-1.csv").open(newline="") as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["FedAvg", "FedTAD-nv"]


@pytest.mark.data
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_failed_runs_are_reported_in_the_table(cli, real_data) -> None:
    root = ("--data-root", real_data("cora"), "--out", "study", "--device", "cuda")
    result = cli("reproduce", "fedath", "1", *TINY, "--json", *root, code=1)
    found = json.loads(result.stdout)
    assert found["counts"] == {"failed": 1}
    assert "failed: FedAvg: device" in Path("study/table-1-rounds-1.csv").read_text()
    assert "torch finds no GPU" in found["cells"][0]["verdict"]


def test_absent_data_are_reasons_and_no_error(cli) -> None:
    result = cli("reproduce", "fedath", "2", "--only", "dataset=WikiCS", "--data-root", "none")
    text = " ".join(result.stdout.split())
    assert "0 of 0 cells within" in text
    assert "30 cells not run: wikics is not in none; get with: atoll data fetch wikics" in text
    assert (
        "| not run: wikics is not in none"
        in Path("atoll-runs/reproduce-fedath/table-2.md").read_text()
    )
    figure = cli("reproduce", "fedath", "fig4", "--only", "dataset=WikiCS", "--data-root", "none")
    assert "Nothing to draw" in figure.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("fedaht",), "unknown paper 'fedaht'; did you mean 'fedath'?"),
        (("fedath", "table12"), "unknown table or figure of fedath 'table12'; choose one of: fig"),
        (("gcfl", "7"), "gcfl has no table 7; did you mean 'fig7'?"),
        (("fedath", "7"), "table 7 of fedath is not reproduced: It describes the data"),
        (("fedath", "fig2"), "figure 2 of fedath is not drawn: It is a drawing"),
        (("fedath", "1", "--only", "data=Cora"), "unknown column of --only 'data'; did you mean"),
        (("fedath", "1", "--only", "dataset=Coar"), "unknown dataset of this table 'Coar'"),
        (("fedath", "fig4", "--only", "dataset=Photo"), "unknown dataset of this figure 'Photo'"),
        (("fedath", "fig4", "--only", "metric=acc"), "--only metric=... is for tables"),
        (("fedath", "1", "--seeds", "0"), "seeds is 0; give a whole number of at least 1"),
        (("fedath", "1", "--jobs", "two"), "jobs is 'two'; give a number of processes, 1 or more"),
        (("fedath", "1", "--out", "file"), None),
    ],
)
def test_mistakes_are_one_sentence(cli, arguments, sentence: str | None) -> None:
    Path("file").write_text("")
    result = cli("reproduce", *arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    if sentence is not None:
        assert sentence in result.stderr
