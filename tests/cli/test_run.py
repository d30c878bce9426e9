"""`atoll run` and `atoll demo`, also with a method in a file of the user."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import socket
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from atoll.cli import main
from atoll.experiment.folder import read_result
from atoll.studies import parallel

SMALL = ("run", "--data", "lagoon:nodes=150", "--clients", 3, "--rounds", 3)
THREE_BANKS = Path(__file__).resolve().parents[2] / "examples" / "three-banks"
KEYS = {
    "method", "data", "clients", "partition", "protocol", "engine", "device", "rounds", "seeds",
    "scored", "metrics", "seconds", "bytes", "out",
}  # fmt: skip


def summary(result) -> dict:
    """The JSON object, which is the last line of standard output."""
    return json.loads(result.stdout.splitlines()[-1])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_json_is_all_of_standard_output(cli) -> None:
    result = cli(*SMALL, "--json", "--seeds", 2, "--out", "a")
    assert len(result.stdout.splitlines()) == 1
    found = summary(result)
    assert set(found) >= KEYS
    assert found["method"] == "fedavg"
    assert found["clients"] == found["rounds"] == 3
    assert found["scored"] == "global"
    accuracy = found["metrics"]["test_accuracy"]
    assert set(accuracy) == {"mean", "std", "per_seed"}
    assert len(accuracy["per_seed"]) == 2
    assert found["out"] == "a"
    assert "round 3/3" in result.stderr  # people read the progress and the table there
    assert "accuracy" in result.stderr


def test_quiet_says_nothing(cli) -> None:
    result = cli(*SMALL, "--quiet")
    assert result.output == ""
    result = cli(*SMALL, "--quiet", "--json")
    assert result.stderr == ""
    assert set(summary(result)) >= KEYS


def test_people_get_progress_a_table_and_the_folder(cli) -> None:
    result = cli(*SMALL, "--out", "here")
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[1].startswith("fedavg: round 1/3, seed 0, validation ")
    assert "lagoon:nodes=150, 3 clients, column:owner, 3 rounds, 1 seed, protocol strict" in lines
    assert lines[-1] == "Saved in here"
    assert max(map(len, lines)) <= 80


def test_every_option_is_taken_and_saved(cli, tmp_path: Path) -> None:
    options = {
        "data": "lagoon:nodes=200", "clients": 4, "partition": "random", "split": "random",
        "protocol": "openfgl", "rounds": 2, "epochs": 1, "fraction": 0.5, "seeds": 2, "seed": 5,
        "engine": "wire", "device": "cpu", "chunk": 2, "evaluate": "deployed",
        "data-root": "nowhere",
    }  # fmt: skip
    arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
    result = cli(
        "run", "fedprox", *arguments, "--set", "mu=0.5", "--set", "net=sage", "--set", "hidden=8",
        "--compat", "dropout-at-eval", "--allow", "no-edge", "--allow", "single-class",
        "--out", "a", "--json", "--quiet",
    )  # fmt: skip
    saved = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    for name, value in options.items():
        assert saved[name.replace("-", "_")] == value
    assert saved["set"] == {"mu": "0.5", "net": "sage", "hidden": "8"}
    assert saved["compat"] == ["dropout-at-eval"]
    assert saved["allow"] == ["no-edge", "single-class"]
    found = summary(result)
    assert (found["engine"], found["device"], found["protocol"]) == ("wire", "cpu", "openfgl")
    assert found["clients"] == 4


def test_a_saved_run_repeats_exactly(cli, tmp_path: Path) -> None:
    first = cli(*SMALL, "--seeds", 2, "--set", "hidden=8", "--out", "a", "--json", "--quiet")
    assert sorted(contents(tmp_path / "a")) == [
        "config.toml", "ledger.csv", "metrics.csv",
        "model/seed-0/MODEL_CARD.md",
        "model/seed-0/deployed.safetensors", "model/seed-0/model.toml",
        "model/seed-1/MODEL_CARD.md",
        "model/seed-1/deployed.safetensors", "model/seed-1/model.toml", "result.json",
        "seed-0/checkpoint.atoll", "seed-0/clients.npz", "seed-0/partition.npz",
        "seed-1/checkpoint.atoll", "seed-1/clients.npz", "seed-1/partition.npz",
    ]  # fmt: skip
    again = cli("run", "--config", "a/config.toml", "--out", "b", "--json", "--quiet")
    assert summary(again)["metrics"] == summary(first)["metrics"]
    a, b = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert a["metrics.csv"] == b["metrics.csv"]
    assert a["ledger.csv"] == b["ledger.csv"]
    rows = list(csv.DictReader(a["metrics.csv"].decode().splitlines()))
    assert {(r["seed"], r["round"], r["client"]) for r in rows} == {
        (str(s), str(n), str(k)) for s in range(2) for n in range(3) for k in range(3)
    }


def test_the_command_line_wins_over_a_file(cli, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'method = "fedprox"\ndata = "lagoon:nodes=150"\nclients = 3\nrounds = 9\n'
        "[set]\nmu = 0.5\nhidden = 4\n"
    )
    cli("run", "--config", "c.toml", "--rounds", 1, "--set", "hidden=5", "--out", "a", "--quiet")
    saved = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert (saved["method"], saved["rounds"]) == ("fedprox", 1)
    assert saved["set"] == {"mu": 0.5, "hidden": "5"}


def test_runs_without_a_name_get_folders_of_their_own(cli, tmp_path: Path) -> None:
    cli(*SMALL, "--quiet")
    cli(*SMALL, "--quiet")
    folders = sorted((tmp_path / "atoll-runs").iterdir())
    assert len(folders) == 2
    assert all("fedavg-lagoon-nodes-150" in folder.name for folder in folders)


def test_resuming_a_finished_run_is_harmless(cli, tmp_path: Path) -> None:
    first = cli(*SMALL, "--out", "a", "--json", "--quiet")
    before = contents(tmp_path / "a")
    again = cli("run", "--resume", "a", "--json", "--quiet")
    assert summary(again)["metrics"] == summary(first)["metrics"]
    after = contents(tmp_path / "a")
    del before["result.json"], after["result.json"]  # it says how long setting up took
    assert after == before


@pytest.mark.parametrize("engine", ["serial", "wire"])
def test_engines_give_the_same_accuracies(cli, engine: str) -> None:
    runs = [
        summary(cli(*SMALL, "--seeds", 2, "--engine", e, "--json", "--quiet"))["metrics"]
        for e in ("fused", engine)
    ]
    assert runs[0]["test_accuracy"] == runs[1]["test_accuracy"]
    assert runs[0]["local_test_accuracy"] == runs[1]["local_test_accuracy"]


# The user's own graph.


def test_three_banks_by_column_and_by_themselves(cli, tmp_path: Path) -> None:
    options = ("--rounds", 3, "--json", "--quiet")
    named = cli("run", "--data", THREE_BANKS, "--partition", "column:bank", "--out", "a", *options)
    assert summary(named)["clients"] == 3
    # The schema names the owners, so the command need not.
    alone = cli("run", "--data", THREE_BANKS, "--out", "b", *options)
    assert summary(alone)["partition"] == "column:bank"
    assert summary(alone)["metrics"] == summary(named)["metrics"]
    for folder in "ab":
        again = cli("run", "--config", f"{folder}/config.toml", "--out", f"{folder}2", *options)
        assert summary(again)["metrics"] == summary(named)["metrics"]
        cli("run", "--resume", folder, "--quiet")
    other = cli("run", "--data", THREE_BANKS, "--partition", "louvain", "--clients", 2, *options)
    assert summary(other)["clients"] == 2


def test_the_wrong_number_of_clients_for_a_column(cli) -> None:
    result = cli("run", "--data", THREE_BANKS, "--clients", 5, code=2)
    assert result.stderr == (
        "error: column 'bank' of 'three-banks' has 3 values, so it gives 3 clients, not 5; "
        "remove the number or use that one\n"
    )


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A folder per client, one of them with an edge to an unknown node."""
    for number, client in enumerate(("ann", "bob", "cy")):
        home = tmp_path / "mine" / client
        home.mkdir(parents=True)
        nodes = [f"{client}{i},{i * (number + 1) % 7},{'xyz'[i % 3]}\n" for i in range(30)]
        edges = [f"{client}{i},{client}{(i * 2 + 1) % 30}\n" for i in range(30)]
        (home / "nodes.csv").write_text("id,age,label\n" + "".join(nodes))
        lost = ["bob1,missing\n"] if client == "bob" else []
        (home / "edges.csv").write_text("source,target\n" + "".join(edges + lost))
    return tmp_path / "mine"


def test_a_folder_per_client_is_divided_by_its_clients(cli, folders: Path) -> None:
    options = ("--own", "dangling=drop", "--rounds", 2, "--json")
    first = cli("run", "--data", "mine", *options, "--out", "a")
    assert (summary(first)["clients"], summary(first)["partition"]) == (3, "column:client")
    assert "1 edge to missing nodes was dropped" in first.stderr
    again = cli("run", "--config", "a/config.toml", "--out", "b", "--json", "--quiet")
    assert summary(again)["metrics"] == summary(first)["metrics"]
    resumed = cli("run", "--resume", "a", "--json", "--quiet")
    assert summary(resumed)["metrics"] == summary(first)["metrics"]


def test_dangling_edges_are_refused_unless_dropped(cli, folders: Path) -> None:
    sentence = cli("run", "--data", "mine", code=2).stderr
    assert "bob/edges.csv" in sentence
    assert "missing" in sentence
    assert "drop" in sentence


def test_allow_lets_degenerate_clients_in(cli, tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    nodes = [f"{i},{i},{'x' if i < 20 else 'xy'[i % 2]},{'ab'[i // 20]}\n" for i in range(40)]
    (tmp_path / "g" / "nodes.csv").write_text("id,age,label,client\n" + "".join(nodes))
    edges = [f"{i},{i + 1}\n" for i in range(20, 39)]
    (tmp_path / "g" / "edges.csv").write_text("source,target\n" + "".join(edges))
    run = ("run", "--data", "g", "--rounds", 1, "--json", "--quiet")
    assert "client 'a' of 2 (20 nodes of 'g') has no edge" in cli(*run, code=2).stderr
    sentence = cli(*run, "--allow", "no-edge", code=2).stderr
    assert "client 'a' of 2 (20 nodes of 'g') has nodes of a single class" in sentence
    allowed = cli(*run, "--allow", "no-edge", "--allow", "single-class")
    assert summary(allowed)["clients"] == 2


def test_recipes_take_options(cli) -> None:
    run = ("run", "--data", "lagoon:nodes=300", "--clients", 3, "--rounds", 1, "--json", "--quiet")
    result = cli(*run, "--partition", "dirichlet:alpha=100", "--split", "random")
    assert summary(result)["partition"] == "dirichlet:alpha=100"


def test_the_stable_commands_are_there() -> None:
    assert {"run", "demo", "methods", "datasets", "data", "inspect"} <= set(main.commands)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("adafgl", "with 2 rounds this is FedAvg: clients adapt after round 50 (federated_rounds)"),
        ("gcfl", "with 2 rounds no cluster splits: splits begin in round 20"),
    ],
)
def test_a_run_that_is_too_short_for_its_method_says_so(cli, method: str, sentence: str) -> None:
    small = ("run", method, "--data", "lagoon:nodes=150", "--clients", 3, "--rounds", 2)
    result = cli(*small)
    assert sentence in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (
            "proteins",
            "data set 'PROTEINS' is not in here; get it with: atoll data fetch PROTEINS "
            "--data-root here",
        ),
        (
            "molecules",
            "group 'molecules' needs data sets that are not in here: MUTAG, BZR, COX2, DHFR, "
            "PTC_MR, AIDS, NCI1; get them with: atoll data fetch MUTAG BZR COX2 DHFR PTC_MR AIDS "
            "NCI1",
        ),
    ],
)
def test_a_recipe_without_its_data_is_one_sentence(cli, recipe: str, sentence: str) -> None:
    refused = cli("run", "--config", f"recipes/gcfl/{recipe}.toml", "--data-root", "here", code=2)
    assert refused.stderr == f"error: {sentence}\n"


def test_the_demo_compares_three_methods(cli, tmp_path: Path) -> None:
    result = cli("demo", "--rounds", 2, "--seeds", 1, "--out", "d")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "5 libraries own parts of one citation graph and share no data."
    assert [line.split()[0] for line in lines if re.match(r"(local|fedavg|fedath) ", line)] == [
        "local", "fedavg", "fedath",
    ]  # fmt: skip
    assert lines[-1] == "Saved in d"
    for name in ("local", "fedavg", "fedath"):
        assert (tmp_path / "d" / name / "result.json").exists()
    found = cli("demo", "--out", "d", code=2).stderr
    assert "already holds a run" in found


@pytest.mark.parametrize("dies", [False, True])
def test_a_second_process_trains_seeds_of_the_demo(cli, tmp_path: Path, monkeypatch, dies) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 1)
    few = ("demo", "--rounds", 2, "--seeds", 2)
    cli(*few, "--out", "one")
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    if dies:
        monkeypatch.setattr(parallel, "BOOT", "raise SystemExit(3)")
    said = cli(*few, "--out", "two").stdout
    assert "fedath: round 2/2, seed 1" in said  # of the other process, or of this one
    for name in ("local", "fedavg", "fedath"):
        one, two = (tmp_path / place / name for place in ("one", "two"))
        assert (one / "metrics.csv").read_bytes() == (two / "metrics.csv").read_bytes()
        assert {path.name for path in one.rglob("*")} == {path.name for path in two.rglob("*")}
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"fedath", "fedavg", "local"}


CODE = '''
"""Mine: FedAvg with plain means."""
from dataclasses import dataclass
from typing import ClassVar
from atoll.core.fit import fit
from atoll.core.losses import cross_entropy
from atoll.core.message import ToAll
from atoll.core.method import Method, client_step
from atoll.core.aggregate import average
from atoll.core.optim import Adam, Optimizer
from atoll.core.tree import Tree, record

@record
class Update:
    model: Tree

@dataclass(frozen=True)
class Mine(Method):
    optimizer: Optimizer = Adam()
    epochs: int = 3
    paper: ClassVar[str] = "none"

    def init(self, clients):
        return self.net.init(clients.key)

    def round(self, server, clients):
        return average(clients.map(self.train, ToAll(server)).model)

    def deploy(self, server):
        return ToAll(server)

    @client_step
    def train(self, graph, model, state, key):
        model, state = fit(self.loss, model, self.optimizer, state, self.epochs, key, graph)
        return Update(model), state
'''
OWN = ("--data", "lagoon:nodes=200", "--clients", 3, "--rounds", 2, "--set", "hidden=8")


def test_a_file_of_my_own_runs_equals_uniform_fedavg_and_resumes(cli, tmp_path: Path) -> None:
    (tmp_path / "cli_own_method.py").write_text(CODE)
    mine = cli("run", "cli_own_method.py:Mine", *OWN, "--json", "--quiet", "--out", "a")
    plain = cli("run", "fedavg", *OWN, "--set", "weight_by=uniform", "--json", "--quiet")
    found, expected = (json.loads(r.stdout.splitlines()[-1]) for r in (mine, plain))
    assert found["metrics"]["test_accuracy"] == expected["metrics"]["test_accuracy"]
    assert found["method"] == "cli_own_method.py:Mine"
    again = cli("run", "--resume", "a", "--json", "--quiet")
    assert json.loads(again.stdout.splitlines()[-1])["metrics"] == found["metrics"]
    assert "Mine: FedAvg with plain means" in cli("methods", "cli_own_method.py:Mine").stdout


def test_what_cannot_be_loaded_is_one_sentence(cli, tmp_path: Path) -> None:
    assert "there is no file nowhere.py" in cli("run", "nowhere.py:Mine", code=2).stderr
    (tmp_path / "cli_broken.py").write_text("def (")
    assert "cannot be loaded" in cli("run", "cli_broken.py:Mine", code=2).stderr
    (tmp_path / "cli_empty.py").write_text("Mine = 3")
    refused = cli("run", "cli_empty.py:Mine", code=2).stderr
    assert "'cli_empty.py' has no method 'Mine'; write a class(atoll.Method) in" in refused
    assert "No module named" in cli("run", "no_such_package:Mine", code=2).stderr


def test_a_finished_run_gets_more_rounds_and_starts_another(tmp_path):
    first, second = str(tmp_path / "one"), str(tmp_path / "two")
    small = ["--data", "lagoon:nodes=200", "--clients", "2", "--quiet"]
    runner = CliRunner()
    assert runner.invoke(main, ["run", "--rounds", "1", *small, "--out", first]).exit_code == 0
    done = runner.invoke(main, ["run", "--resume", first, "--rounds", "2", "--json", "--quiet"])
    assert json.loads(done.output.splitlines()[-1])["rounds"] == 2
    words = ["run", "fedprox", "--from", first, "--rounds", "1", *small, "--out", second]
    assert runner.invoke(main, words).exit_code == 0
    config = (tmp_path / "two" / "config.toml").read_text()
    assert f'from_run = "{first}"' in config
    words = ["run", "--from", first, *small, "--set", "hidden=3", "--out", str(tmp_path / "no")]
    refused = runner.invoke(main, words)
    assert refused.exit_code == 2
    assert "does not fit: '0.weight' is (600, 64) there and (600, 3) in FedAvg" in refused.output


def test_a_profile_names_the_stages_and_is_kept(cli, tmp_path: Path) -> None:
    shown = cli(*SMALL, "--out", "a", "--profile").stdout
    kept = json.loads((tmp_path / "a" / "result.json").read_text())["profile"]
    for stage in ("import", "loading", "partition", "views", "training", "scoring", "saving"):
        assert re.search(rf"^{stage} +\d+\.\d+ +\d+\.\d+ *$", shown, re.MULTILINE), stage
    wanted = {"import", "loading", "partition", "views", "training", "scoring", "saving"}
    assert wanted <= kept.keys()
    assert read_result(tmp_path / "a").profile == kept
    cli(*SMALL, "--out", "b")
    assert "profile" not in json.loads((tmp_path / "b" / "result.json").read_text())
    a, b = (read_result(tmp_path / name).metrics() for name in "ab")
    assert a == b


FAILS = CODE.replace(
    "        model, state = fit(", "        graph.real.nothing\n        model, state = fit("
)


def test_an_error_of_my_method_has_its_line_and_can_be_overwritten(cli, tmp_path: Path) -> None:
    (tmp_path / "cli_failing.py").write_text(FAILS)
    line = FAILS.splitlines().index("        graph.real.nothing") + 1
    for engine in ("fused", "serial"):
        words = ("run", "cli_failing.py:Mine", *OWN, "--engine", engine, "--quiet", "--out", "a")
        refused = cli(*words, "--overwrite", code=2).stderr
        assert f"round 0: AttributeError in cli_failing.py line {line}: " in refused
    assert "--resume a, replace it with --overwrite, or choose" in cli(*words, code=2).stderr
    (tmp_path / "a" / "mine.txt").write_text("kept")
    cli("run", "fedavg", *OWN, "--quiet", "--out", "a", "--overwrite")
    assert "overwrite" in cli("run", "--resume", "a", "--overwrite", code=2).stderr
    before = (tmp_path / "a" / "result.json").read_bytes()
    cli("run", "fedavg", "--data", "no-such-data", "--out", "a", "--overwrite", code=2)
    assert (tmp_path / "a" / "result.json").read_bytes() == before  # refused before it deletes
    assert (tmp_path / "a" / "mine.txt").read_text() == "kept"


def test_a_run_that_goes_on_elsewhere_is_not_overwritten(cli, tmp_path: Path) -> None:
    cli("run", "fedavg", *OWN, "--quiet", "--out", "a")
    (tmp_path / "a" / "result.json").unlink()
    now = {"state": "running", "pid": os.getpid(), "host": socket.gethostname(), "per_round": 1.0}
    (tmp_path / "a" / "progress.json").write_text(json.dumps(now | {"total": 2, "done": 1}))
    refused = cli("run", "fedavg", *OWN, "--out", "a", "--overwrite", code=2).stderr
    assert "another process works in 'a'; choose another --out" in refused
    assert (tmp_path / "a" / "config.toml").exists()


def test_saved_paths_count_from_where_the_run_was_started(cli, tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(THREE_BANKS, tmp_path / "banks")
    (tmp_path / "cli_moved.py").write_text(CODE)
    small = ("--data", "banks", "--rounds", 1, "--quiet")
    cli("run", "cli_moved.py:Mine", *small, "--out", "a")
    cli("compare", "local", "fedavg", *small, "--seeds", 2, "--out", "s")
    shutil.rmtree(tmp_path / "s" / "cells" / "banks-fedavg")
    other = tmp_path / "elsewhere"
    other.mkdir()
    monkeypatch.chdir(other)
    resumed = cli("run", "--resume", "../a", "--rounds", 2).stdout
    assert f"Saved in {tmp_path / 'a'}\n" in resumed
    cli("compare", "--resume", "../s", "--quiet", "--tex", "t.tex")
    assert (tmp_path / "s" / "cells" / "banks-fedavg" / "result.json").exists()
    cli("run", "--config", "../a/config.toml", "--quiet", "--out", "again")
    assert Path.cwd() == other
    assert sorted(path.name for path in other.iterdir()) == ["again", "t.tex"]
    results = [tmp_path / "a" / "result.json", other / "again" / "result.json"]
    one, two = (json.loads(path.read_text())["metrics"]["test_accuracy"] for path in results)
    assert one == two
    saved = (other / "again" / "config.toml").read_text()
    assert f'data = "{tmp_path / "banks"}"' in saved
    assert f'method = "{tmp_path / "cli_moved.py"}:Mine"' in saved


@pytest.mark.parametrize(
    ("words", "score"),
    [
        (("run", "cli_edited.py:Mine"), "result.json"),
        (("compare", "local", "cli_edited.py:Mine", "--seeds", 1), "compare.csv"),
        (("tune", "cli_edited.py:Mine", "--trials", 1, "--seeds", 1), "trials.csv"),
    ],
)
def test_results_of_an_edited_method_are_not_mixed(cli, monkeypatch, words, score: str) -> None:
    def edit(text: str) -> None:
        Path("cli_edited.py").write_text(text)
        monkeypatch.delitem(sys.modules, "cli_edited", raising=False)  # another process loads it

    edit(CODE)
    command = (*words, *OWN, "--quiet", "--out", "a")
    cli(*command)
    Path("a/mine.txt").write_text("kept")
    before = Path("a", score).read_bytes()
    edit(CODE.replace("epochs: int = 3", "epochs: int = 30"))
    for again in ((words[0], "--resume", "a"), *([command] if words[0] != "run" else [])):
        refused = cli(*again, code=2).stderr
        assert "error: 'cli_edited.py' has changed since this " in refused
        assert refused.endswith("start again with --overwrite or another --out\n")
    assert Path("a", score).read_bytes() == before
    assert "--overwrite" in cli(words[0], "--resume", "a", "--overwrite", code=2).stderr
    cli(*command, "--overwrite", "--partition", "no-such", code=2)  # refused before it deletes
    assert Path("a", score).read_bytes() == before
    cli(*command, "--overwrite")
    assert Path("a", score).read_bytes() != before
    assert Path("a/mine.txt").read_text() == "kept"
