"""`atoll data` and `atoll partition`: data sets, and one file that every command trains from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from atoll.data.archive import read_header
from atoll.experiment import problem
from tests.data.own.graphs import folder

MIRROR = Path(__file__).resolve().parents[3] / "shared" / "data"


def test_checking_nothing(cli) -> None:
    assert cli("data", "check").stdout == (
        "no data set is downloaded; get one with: atoll data fetch NAME\n"
    )


def test_the_cache_is_shown_and_cleared_and_can_be_left_out(cli, tmp_path, monkeypatch) -> None:
    assert cli("data", "cache").stdout == "the cache is off (ATOLL_CACHE=off)\n"
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "c"))
    empty = f"{tmp_path}/c/prepared: 0 entries; 0.0 of 2147 MB\n"
    small = ("--data", "lagoon:nodes=300", "--clients", "3")
    cli("partition", *small, "--no-cache", "--out", "a")
    assert cli("data", "cache").stdout == empty
    cli("partition", *small, "--out", "b")
    assert ": 1 entries, 1 of federation; " in cli("data", "cache").stdout
    assert read_header(tmp_path / "a.atoll") == read_header(tmp_path / "b.atoll")
    assert cli("data", "cache", "--clear").stdout == empty


@pytest.mark.data
@pytest.mark.skipif(not (MIRROR / "cornell.tar.xz").exists(), reason="no mirror in ../shared/data")
def test_fetch_check_and_use(cli, tmp_path: Path) -> None:
    where = ("--data-root", "d")
    fetched = cli("data", "fetch", "Cornell", "mutag", "--mirror", MIRROR, *where)
    assert fetched.stdout.splitlines()[0] == "Cornell: ready in d/WebKB/cornell"
    checked = cli("data", "check", *where)
    assert checked.stdout == "cornell: as published\nMUTAG: as published\n"
    assert "edge homophily" in cli("datasets", "cornell", *where).stdout
    listed = cli("datasets", *where).stdout
    assert re.search(r"^cornell .* yes *$", listed, re.MULTILINE)
    (tmp_path / "d" / "TUDataset" / "MUTAG" / "raw" / "MUTAG_A.txt").unlink()
    checked = cli("data", "check", *where, code=2)
    assert checked.stdout.splitlines() == [
        "cornell: as published",
        "MUTAG: incomplete: no raw/MUTAG_A.txt",
    ]
    assert "already" in cli("data", "fetch", "cornell", "--mirror", MIRROR, *where).stderr
    run = ("run", "--data", "cornell", *where, "--clients", 2, "--partition", "random")
    result = cli(*run, "--rounds", 1, "--json", "--quiet")
    assert json.loads(result.stdout)["clients"] == 2


def test_fetching_from_a_mirror_that_is_not_there(cli) -> None:
    found = cli("data", "fetch", "cora", "--mirror", "nowhere", code=2).stderr
    assert found == "error: the mirror nowhere is not there; give a folder or an http(s) address\n"


LAGOON = ("--data", "lagoon:nodes=200", "--clients", 3)
SHORT = ("--rounds", 2, "--json", "--quiet")


def divided(cli, *more: object) -> Path:
    out = Path("three.atoll")
    result = cli("partition", *LAGOON, *more, "--out", out)
    assert "3 clients" in result.stdout
    assert "saved in three.atoll" in result.stdout
    return out


def same(one: Path, two: Path) -> None:
    for name in ("metrics.csv", "ledger.csv"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "local", "fedgta"])
def test_a_run_from_the_file_gives_the_numbers_of_the_direct_run(
    cli, monkeypatch: pytest.MonkeyPatch, method: str, lazy: bool
) -> None:
    if lazy:
        monkeypatch.setattr(problem, "available_memory", lambda: 0)
    path = divided(cli, "--seed", 4)
    more = ("--seed", 4, "--fraction", 0.6, "--chunk", 2)
    cli("run", method, *LAGOON, *SHORT, *more, "--out", "direct")
    shown = cli("run", method, "--data", path, *SHORT, *more, "--out", "file")
    same(Path("direct"), Path("file"))
    found = json.loads(shown.stdout)
    assert (found["clients"], found["partition"], found["split"]) == (
        3, "column:owner", "stratified",
    )  # fmt: skip
    about = json.loads(Path("file/result.json").read_text())["federation"]
    assert (about["data"], about["seed"], about["protocol"]) == ("lagoon:nodes=200", 4, "strict")


def test_the_file_brings_its_protocol(cli) -> None:
    path = divided(cli, "--protocol", "fedtad", "--partition", "louvain-fedtad")
    direct = (*LAGOON, "--protocol", "fedtad", "--partition", "louvain-fedtad")
    cli("run", *direct, *SHORT, "--out", "direct")
    cli("run", "--data", path, *SHORT, "--out", "file")
    same(Path("direct"), Path("file"))
    assert json.loads(Path("file/result.json").read_text())["protocol"] == "fedtad"


def test_a_stopped_run_from_a_file_resumes(cli) -> None:
    path = divided(cli)
    cli("run", "--data", path, *SHORT, "--out", "whole")
    Path("whole/result.json").unlink()
    cli("run", "--resume", "whole", "--json", "--quiet")
    assert Path("whole/result.json").exists()


def test_people_read_where_clients_come_from(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    path = divided(cli)
    shown = cli("run", "--data", path, "--rounds", 1, "--seeds", 2).stdout.replace("\n", "")
    assert "three.atoll: lagoon in 3 clients (partition column:owner, split stratified" in shown
    assert "every seed trains the same clients with the same split" in shown
    assert "read when they are needed" not in shown
    monkeypatch.setattr(problem, "available_memory", lambda: 1000)
    shown = cli("run", "--data", path, "--rounds", 1).stdout.replace("\n", "")
    assert "clients are read when they are needed" in shown


def test_the_other_commands_take_the_file(cli) -> None:
    path = divided(cli)
    assert cli("inspect", "--data", path).stdout
    one = cli("contribution", "--data", path, "--rounds", 2, "--json")
    two = cli("contribution", *LAGOON, "--rounds", 2, "--json")
    one, two = (json.loads(shown.stdout.splitlines()[-1]) for shown in (one, two))
    assert one["groups"] == two["groups"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--clients", 5), "was divided with clients 3, but 5 was asked for; remove --clients"),
        (("--partition", "metis"), "was divided with partition column:owner, but metis was asked"),
        (("--split", "random"), "was divided with split stratified, but random was asked for"),
        (("--protocol", "openfgl"), "was divided with protocol strict, but openfgl was asked for"),
        (("--own", "dangling=drop"), "--own is for data that are still to be divided"),
        (("--batch-size", 3), "batch_size is for sets of graphs, but 'three.atoll' is one graph"),
    ],
)
def test_a_run_cannot_divide_again(cli, arguments: tuple[object, ...], sentence: str) -> None:
    path = divided(cli)
    refused = cli("run", "--data", path, *arguments, code=2)
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    assert sentence in refused.stderr


def test_bad_files_and_names_are_one_sentence(cli) -> None:
    path = divided(cli)
    cut = Path("cut.atoll")
    cut.write_bytes(path.read_bytes()[:-9])
    Path("text.atoll").write_text("hello")
    for arguments, sentence in (
        (("run", "--data", "none.atoll"), "there is no federation 'none.atoll'"),
        (("run", "--data", "text.atoll"), "'text.atoll' is not a federation that Atoll wrote"),
        (("run", "--data", cut), "federation 'cut.atoll' is damaged (it is cut off"),
        (("partition", *LAGOON, "--out", path), "'three.atoll' exists already; delete it"),
        (("partition", "--data", path, "--out", "b.atoll"), "is divided already"),
        (("partition", "--data", "croa", "--out", "b.atoll"), "did you mean 'cora'?"),
    ):
        refused = cli(*arguments, code=2)
        assert refused.stderr.count("\n") == 1
        assert sentence in refused.stderr
    assert not Path("b.atoll").exists()
    assert not Path("atoll-runs").exists()


@pytest.mark.parametrize("columns", [40, 80])
def test_a_description_fits_the_terminal(
    cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    nodes = "id,years_as_customer,signed_up,label\n"
    nodes += "a,1,2020-01-02,x\nb,,2020-01-03,y\nc,3,2020-01-04,x\n"
    folder(tmp_path / "g", nodes, "source,target\na,b\n")
    monkeypatch.setenv("COLUMNS", str(columns))
    found = cli("data", "describe", "g").stdout
    assert max(map(len, found.splitlines())) <= columns
    assert "…" not in found


def test_tables_are_described_and_a_schema_is_written(cli, tmp_path: Path) -> None:
    folder(tmp_path / "g", "id,age,label\na,1,x\nb,,y\nc,3,x\n", "source,target\na,b\n")
    found = cli("data", "describe", "g", "--out", "s.toml").stdout
    assert "3 nodes; 3 things to decide or to repair" in found
    assert "Name the label" not in found
    assert "1. nodes.csv: which column names the owner?" in found
    assert "2. nodes.csv, column 'age': rows have no value; choose missing (1 row)" in found
    assert "3. [edges] directed: an edge joins both ways" in found
    assert 'missing = "own category"' in (tmp_path / "s.toml").read_text()
    assert "'s.toml' exists" in cli("data", "describe", "g", "--out", "s.toml", code=2).stderr
    assert "--overwrite" in flat(cli("data", "describe", "g", "--out", "s.toml", code=2).stderr)
    (tmp_path / "s.toml").write_text("")
    assert (
        "Written: s.toml" in cli("data", "describe", "g", "--out", "s.toml", "--overwrite").stdout
    )
    assert 'missing = "own category"' in (tmp_path / "s.toml").read_text()
    assert "'g' exists" in cli("data", "describe", "g", "--out", "g", "--overwrite", code=2).stderr
    assert "; 1 thing to decide" in cli("data", "describe", "g", "--schema", "s.toml").stdout
    folder(tmp_path / "g", "id,age,kind,client\na,1,x,n\nb,2,y,n\n", "source,target\na,b\n")
    found = cli("data", "describe", "g").stdout.splitlines()[-1]
    assert found == "Name the label, then describe again: this may find columns that leak the label"


def test_a_description_takes_the_options_that_it_advises(cli, tmp_path: Path) -> None:
    folder(tmp_path / "g", "id,f,label\na,1,x\nb,2,y\nb,3,x\n", "source,target\na,b\na,z\n")
    found = flat(cli("data", "describe", "g").stdout)
    assert "--own dangling=drop" in found
    own = ("--own", "dangling=drop", "--own", "duplicate_nodes=first")
    found = flat(cli("data", "describe", "g", *own).stdout)
    assert "dangling" not in found
    assert "again" not in found
    error = cli("data", "describe", "g", "--own", "danglin=drop", code=2).stderr
    assert "did you mean 'dangling'?" in error


def test_no_data_are_refused(cli) -> None:
    for command in (("run", "fedavg"), ("inspect",)):
        sentence = "error: no data are named; give --data a name or a path\n"
        assert cli(*command, "--data", "", code=2).stderr == sentence


def test_a_saved_path_counts_from_where_the_run_was_started(cli) -> None:
    found = cli("run", "fedavg", "--data", "bank2", "--own", "scale=none", code=2).stderr
    assert found.startswith("error: there is no 'bank2' here; a saved path counts from")


@pytest.mark.data
@pytest.mark.skipif(not (MIRROR / "bail.tar.xz").exists(), reason="no mirror in ../shared/data")
def test_columns_that_give_the_label_away(cli, tmp_path: Path) -> None:
    cli("data", "fetch", "bail", "amlsim-20k", "--mirror", MIRROR, "--data-root", "d")
    raw = tmp_path / "d" / "NIFTY" / "bail" / "raw"
    head, *lines = (raw / "bail.csv").read_text().splitlines()
    rows = [f"{i},{line}" for i, line in enumerate(lines)]
    pairs = [",".join(line.split()) for line in (raw / "bail_edges.txt").read_text().splitlines()]
    folder(tmp_path / "bail", "\n".join([f"id,{head}", *rows]), "\n".join(["from,to", *pairs]))
    (tmp_path / "b.toml").write_text("[nodes]\nlabel = 'RECID'\n")
    assert "column 'TIME': predicts the label by itself (AUC 0.99" in flat(
        cli("data", "describe", "bail", "--schema", "b.toml").stdout
    )
    raw = next((tmp_path / "d" / "AMLSim").iterdir()) / "raw"
    (raw / "transactions.csv").rename(raw / "edges.csv")
    edges = "[edges]\nsource = 'sourceNodeId'\ntarget = 'targetNodeId'\n"
    (tmp_path / "a.toml").write_text(f"[nodes]\nlabel = 'isFraud'\n{edges}")
    assert "column 'fraudStep': by itself is certain of 50 % of one class" in flat(
        cli("data", "describe", raw, "--schema", "a.toml").stdout
    )


def flat(text: str) -> str:
    return " ".join(text.split())
