"""`atoll compare`: its output and files, its continuation, and every refusal in one sentence."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from atoll.studies.compare.plan import make_request
from tests.cli import refusals

SMALL = ("--data", "lagoon:nodes=150", "--clients", 3, "--rounds", 2)
LEADERBOARD = Path(__file__).parents[2] / "docs" / "results" / "leaderboard.csv"
METHODS = ("compare", "local", "fedavg")


def refusal(cli, *arguments: object) -> str:
    sentence = refusals.refusal(cli, *arguments)
    assert not Path("s").exists()
    return sentence


def test_a_study_of_two_methods_two_sizes_and_a_grid(cli, tmp_path: Path) -> None:
    options = ("--data", "lagoon:nodes=150", "--clients", "2,3", "--rounds", 2, "--seeds", 3)
    arguments = ("compare", "fedavg", "fedprox", *options, "--grid", "mu=0.1,1", "--tex", "t.tex")
    result = cli(*arguments, "--out", "s")
    lines = result.stdout.splitlines()
    assert max(map(len, lines[6:-1])) <= 80
    assert lines[0].startswith("[1/6] lagoon-nodes=150-2c-fedavg: validation ")
    assert re.search(r"; about \d+ s left$", lines[0])
    text = " ".join(result.stdout.split())
    assert (
        text.count("selected among 2 points by validation scores; only its test scores are read")
        == 2
    )
    assert "Over all 2 problems, 3 seeds each (6 blocks)" in text
    assert "Written: s/compare.csv, s/compare.md, s/compare.json, t.tex" in text
    rows = list(csv.DictReader((tmp_path / "s" / "compare.csv").read_text().splitlines()))
    assert len(rows) == 2 * 3 * 3
    assert [row["seed"] for row in rows[:3]] == ["0", "1", "2"]
    assert "\\toprule" in (tmp_path / "t.tex").read_text()
    assert (tmp_path / "s" / "compare.md").read_text().count("| method |") == 3
    about = json.loads((tmp_path / "s" / "study.json").read_text())
    assert about["kind"] == "compare"
    assert about["request"]["grid"] == {"mu": ["0.1", "1"]}
    assert len(about["cells"]) == 6

    # Shown again without running, tested another way.
    before = (tmp_path / "s" / "events.jsonl").read_text()
    again = cli("compare", "--resume", "s", "--against", "fedprox", "--json", "--quiet")
    found = json.loads(again.stdout.splitlines()[-1])
    assert again.stderr == ""
    assert {test["against"] for table in found["tables"] for test in table["tests"]} == {"fedprox"}
    assert (tmp_path / "s" / "events.jsonl").read_text() == before
    # The command that is saved asks for the same.
    cli(*about["command"].split()[1:], "--quiet")
    assert (tmp_path / "s" / "events.jsonl").read_text() == before


def test_what_is_given_several_times_adds_up(cli, tmp_path: Path) -> None:
    several = ("--data", "lagoon:nodes=150", "--data", "lagoon:nodes=120", "--clients", 2)
    several += ("--clients", "3", "--grid", "lr=0.1", "--grid", "lr=0.01")
    cli("compare", "fedavg", *several, "--rounds", 1, "--seeds", 1, "--out", "s", "--quiet",
        "--log", "tensorboard")  # fmt: skip
    about = json.loads((tmp_path / "s" / "study.json").read_text())["request"]
    assert about["data"] == ["lagoon:nodes=150", "lagoon:nodes=120"]
    assert about["clients"] == [2, 3]
    assert about["grid"] == {"lr": ["0.1", "0.01"]}
    cells = [*(tmp_path / "s" / "cells").iterdir()]
    assert len(cells) == 8
    assert all([*cell.glob("tensorboard/seed-0/events*")] for cell in cells)


def test_methods_are_shown_by_their_usual_names(cli) -> None:
    small = ("--data", "lagoon:nodes=150", "--clients", 3, "--rounds", 1)
    names = ("FED-PUB", "GCFL+", "Strong=GCFL+:eps1=0.1")
    cli("compare", *names, *small, "--seeds", 1, "--against", "Fed_Pub", "--out", "s", "--quiet")
    found = json.loads(Path("s/compare.json").read_text())
    assert found["methods"] == ["fedpub", "gcfl+", "Strong"]
    shown = cli("compare", "--resume", "s", "--against", "GCFLplus").stdout
    assert "gcfl+" in shown
    assert "FED-PUB" not in shown
    config = Path("s/cells/lagoon-nodes=150-3c-Strong/config.toml").read_text()
    assert 'method = "gcfl"' in config
    assert 'preset = "plus"' in config
    cli("run", "GCFL+", *small, "--out", "a", "--quiet")
    assert 'preset = "plus"' in Path("a/config.toml").read_text()
    rows = ("--methods", "reef,GCFL+", "--csv", LEADERBOARD, "--against", "Gcfl+", "--minutes", 0)
    assert "Against gcfl+" in cli("leaderboard", *rows).stdout
    advice = ("--candidates", "GCFL+", "--minutes", 0.1, "--json", "--quiet")
    raced = json.loads(cli("advise", *small, *advice).stdout)["race"]
    assert "gcfl+" in {row["method"] for row in raced}


def test_json_is_the_last_line_and_tables_go_elsewhere(cli) -> None:
    result = cli(*METHODS, *SMALL, "--seeds", 2, "--json")
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    assert found["kind"] == "compare"
    assert found["methods"] == ["local", "fedavg"]
    assert found["overall"] is None
    row = found["tables"][0]["rows"][1]
    assert row["mean"] == pytest.approx(sum(row["scores"]) / 2)
    assert set(row) >= {"mean", "std", "rank", "megabytes", "seconds", "scores"}
    assert found["tables"][0]["sentences"]
    assert "MB/round" in result.stderr
    assert Path(found["out"]).parent == Path("atoll-runs")
    assert cli(*METHODS, *SMALL, "--seeds", 2, "--quiet").output == ""


def test_more_methods_and_seeds_go_into_the_same_study(cli, tmp_path: Path) -> None:
    cli(*METHODS, *SMALL, "--seeds", 1, "--out", "s", "--quiet")
    result = cli(*METHODS, "fedprox", *SMALL, "--seeds", 2, "--out", "s", "--json")
    assert "finished before" not in result.stderr  # each has a seed to run
    result = cli(*METHODS, "fedprox", "moon", *SMALL, "--seeds", 2, "--out", "s", "--json")
    assert "3 of 4 cells were finished before" in result.stderr
    rows = json.loads(result.stdout)["tables"][0]["rows"]
    assert [len(row["scores"]) for row in rows] == [2, 2, 2, 2]
    found = cli(*METHODS, *SMALL, "--seeds", 2, "--epochs", 2, "--out", "s", code=2).stderr
    assert "was started with other options (epochs none, now 2); give" in found


def test_a_failed_cell_is_told_and_the_rest_goes_on(cli, tmp_path: Path) -> None:
    # Its learning rate drives the loss to infinity; the other one trains.
    broken = "fedavg:lr=1e5,optimizer=sgd,weight_decay=1e5"
    arguments = ("compare", "fedavg", broken, *SMALL, "--rounds", 8, "--seeds", 2, "--out", "s")
    result = cli(*arguments, "--json", code=1)
    found = json.loads(result.stdout)
    assert len(found["failed"]) == 1
    sentence = next(iter(found["failed"].values()))
    rows = found["tables"][0]["rows"]
    assert rows[0]["mean"] > 0
    assert rows[1]["mean"] is None
    assert rows[1]["error"] == sentence
    assert f"failed: {next(iter(found['failed']))}: {sentence}" in result.stderr
    assert f"Failed: {broken}: {sentence}"[:60] in result.stderr
    rows = list(csv.DictReader((tmp_path / "s" / "compare.csv").read_text().splitlines()))
    assert [row["error"] for row in rows] == ["", "", sentence]
    # Asked again, only the failed one is tried again.
    cli(*arguments, "--quiet", code=1)
    events = map(json.loads, (tmp_path / "s" / "events.jsonl").read_text().splitlines())
    assert [event["event"] for event in events] == ["begin", "end", *["begin", "failed"] * 2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("compare",), "no method is given; give one or several"),
        (("compare", "fedavg", "fedporx"), "unknown method 'fedporx'; did you mean 'fedprox'?"),
        (("compare", "fedavg:mu=1"), "unknown hyper-parameter of fedavg 'mu'; "),
        (("compare", "fedavg", "--data", "lagoon,croa"), "croa: unknown data set 'croa'; did you "),
        (("compare", "fedavg", "--data", "cora"), "data set 'cora' is not in "),
        ((*METHODS, "--data", "lagoon:nodes=150", "--clients", "3,999"),
         "lagoon:nodes=150 with 999 clients: lagoon with 150 nodes cannot have 999 clients; "),
        ((*METHODS, "--clients", "3,many"), "clients is '3,many'; give whole numbers with commas"),
        ((*METHODS, "--clients", "0"), "clients is 0; give a whole number of at least 1"),
        ((*METHODS, "--grid", "mu=1,2"), "no method of this study has a hyper-parameter 'mu'"),
        ((*METHODS, "--clients", 3, "--clients", 3), "number of clients '3' is given twice; "),
        ((*METHODS, "--data", "lagoon", "--data", "lagoon"), "data set 'lagoon' is given twice; "),
        ((*METHODS, "--grid", "lr=1", "--grid", "lr=1"), "the grid of lr needs values, each once"),
        ((*METHODS, "--set", "lr=1", "--set", "lr=2"), "--set gives lr twice, 1 and 2; give it "),
        ((*METHODS, "--log", "tensorbord"), "unknown value of --log 'tensorbord'; did you mean "),
        ((*METHODS, "--grid", "lr"), "--grid takes key=value, but got 'lr'; "),
        ((*METHODS, "--grid", "lr=1,fast"), "lr cannot be 'fast'; it takes a number"),
        ((*METHODS, "--against", "fedprox"), "unknown method to compare against 'fedprox'; "),
        ((*METHODS, "--metric", "acuracy"), "unknown metric 'acuracy'; choose one of: accuracy, "),
        ((*METHODS, "--metric", "auc"), "auc is computed for two classes, but 'lagoon' has 6; "),
        ((*METHODS, "--alpha", 2), "alpha is 2.0; give a number between 0 and 1"),
        ((*METHODS, "--seeds", 0), "seeds is 0; give a whole number of at least 1"),
        ((*METHODS, "--partition", "luvain"), "unknown partition 'luvain'; did you mean "),
        ((*METHODS, "--device", "gpu"), "unknown device 'gpu'; choose auto, cpu, "),
        ((*METHODS, "--engine", "fusd"), "unknown engine 'fusd'; did you mean 'fused'?"),
        (("compare", "--resume", "s"), "'s' contains no study to resume (study.json is missing); "),
        (("compare", "--resume", "s", "--rounds", 3),
         "--resume continues a study with its own configuration, but --rounds was given; "),
        (("compare", "fedavg", "--resume", "s"), "--resume continues a study with its own "
         "configuration, but METHOD was given; "),
        ((*METHODS, "--tex", "."), "'.' is a folder; give --tex a file"),
        ((*METHODS, "--jobs", 0), "jobs is '0'; give a number of processes, 1 or more, or auto"),
    ],
)  # fmt: skip
def test_everything_is_checked_before_the_first_cell(cli, arguments, sentence: str) -> None:
    assert refusal(
        cli, *arguments, *(() if "--resume" in arguments else ("--out", "s"))
    ).startswith(sentence)


def test_another_kind_of_study_is_refused(cli, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "study.json").write_text('{"kind": "reproduce"}')
    found = cli("compare", "--resume", "r", code=2).stderr
    assert "the study in 'r' is of the kind 'reproduce', not 'compare'" in found
    (tmp_path / "r" / "study.json").write_text('{"kind": "compare", "request": {"methods": 3}}')
    assert "cannot be used" in cli("compare", "--resume", "r", code=2).stderr


@pytest.mark.parametrize("command", [("watch", "r"), ("compare", "--resume", "r"),
                                     ("tune", "--resume", "r"), ("report", "r")])  # fmt: skip
def test_a_broken_study_is_one_sentence(cli, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "study.json").write_text('{"kind": ')
    assert "study.json' cannot be read" in refusal(cli, *command)


def test_a_finished_study_is_not_retested_by_what_it_has_not(cli, tmp_path: Path) -> None:
    cli(*METHODS, *SMALL, "--seeds", 1, "--out", "s")
    before = [(tmp_path / "s" / name).read_text() for name in ("compare.json", "study.json")]
    said = cli("compare", "--resume", "s", "--metric", "auc", code=2).stderr
    assert "has no test auc; choose another --metric" in said
    after = [(tmp_path / "s" / name).read_text() for name in ("compare.json", "study.json")]
    assert after == before


def test_a_test_for_once_is_not_remembered(cli, tmp_path: Path) -> None:
    cli(*METHODS, "prox=fedprox:mu=0.1", *SMALL, "--seeds", 2, "--out", "s", "--quiet")
    names = ("study.json", "compare.json", "compare.md", "compare.csv")
    before = [(tmp_path / "s" / name).read_text() for name in names]
    own = cli("compare", "--resume", "s").stdout
    once = cli("compare", "--resume", "s", "--against", "prox", "--alpha", 0.1, "--tex", "t.tex")
    assert "against prox, 2 seeds are too few to tell: " in " ".join(once.stdout.split())
    assert "Tested once with --against prox --alpha 0.1; the tables of the study " in once.stdout
    assert "Written: t.tex" in once.stdout
    assert "prox" in (tmp_path / "t.tex").read_text()
    assert [(tmp_path / "s" / name).read_text() for name in names] == before
    assert cli("compare", "--resume", "s").stdout == own


def test_the_help_page_reads_well(cli) -> None:
    text = cli("compare", "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    for option in ("data", "clients", "grid", "protocol", "seeds", "against", "tex", "resume"):
        assert re.search(rf"^  --{option}\b", text, re.MULTILINE)
    said = int(re.search(r"--seeds N .*?\[default: (\d+)\]", text, re.DOTALL)[1])
    assert said == make_request(["local"]).options["seeds"]
    assert re.search(r"^  compare +[A-Z].*\.$", cli("--help").stdout, re.MULTILINE)
