"""One name for every kind of data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.data.load import is_own, load, parse_own_options
from atoll.data.public.registry import DATASETS, parse_name, plain_name, task_of_data
from atoll.data.source import Source


@pytest.fixture
def graph_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "nodes.csv").write_text("id,age,label\na,1,x\nb,2,y\nc,3,x\n")
    (folder / "edges.csv").write_text("source,target\na,b\nb,c\nc,missing\n")
    return folder


def test_lagoon_takes_its_owners_and_seed() -> None:
    source, notes = load("lagoon:nodes=60", clients=3, seed=1)
    assert isinstance(source, Source)
    assert np.unique(source.columns["owner"]).tolist() == [0, 1, 2]
    assert notes == []


def test_own_data_by_path_with_options_and_notes(graph_folder: Path) -> None:
    source, notes = load(str(graph_folder), own={"dangling": "drop"})
    assert source.num_nodes == 3
    assert any("1 edge to missing nodes was dropped" in note for note in notes)
    with pytest.raises(AtollError, match="missing"):
        load(str(graph_folder))


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ("name,label\na,x\nb,y\n", "nodes.csv has no id column"),
        ("id,born,label\na,2020-01-01,x\nb,2020-01-02,y\n", "is of type date32"),
        ("id,age,label\na,1,x\nb,,y\n", "has no value"),
    ],
)
def test_errors_of_tables_name_the_command_that_lists_all(
    graph_folder: Path, nodes: str, problem: str
) -> None:
    (graph_folder / "nodes.csv").write_text(nodes)
    (graph_folder / "edges.csv").write_text("source,target\na,b\n")
    with pytest.raises(DataError, match=problem) as told:
        load(str(graph_folder))
    hint = f"; `atoll data describe {graph_folder}` lists all problems at once"
    assert str(told.value).endswith(hint)
    (graph_folder / "nodes.csv").unlink()
    with pytest.raises(DataError) as told:
        load(str(graph_folder))
    assert "describe" not in str(told.value)


def test_what_is_a_path_and_what_is_a_name(
    graph_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(graph_folder.parent)
    assert is_own("mine")
    assert is_own("./mine")
    assert is_own("graph.pt")
    assert not is_own("lagoon:nodes=10.5")
    assert not is_own("tu:MUTAG")
    (graph_folder.parent / "cora").mkdir()  # a result folder, say, must not hide the data set
    assert not is_own("cora")
    assert is_own("./cora")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("croa", "unknown data set 'croa'; did you mean 'cora'?"),
        ("mutga", "unknown data set 'mutga'; did you mean 'MUTAG'?"),
        ("lagon", "unknown data set 'lagon'; did you mean 'lagoon'?"),
        (
            "zzzzz",
            "unknown data set 'zzzzz'; `atoll datasets` lists the names, and a graph of your own "
            "is given by its path",
        ),
        (
            "nowhere/graph",
            "there is no 'nowhere/graph'; give a folder with nodes.csv and edges.csv (or "
            ".parquet), a .pt file or a .graphml file",
        ),
    ],
)
def test_unknown_names(name: str, sentence: str) -> None:
    with pytest.raises(AtollError) as caught:
        load(name)
    assert str(caught.value) == sentence


def test_a_missing_set_names_the_exact_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AtollError) as caught:
        load("Cora", root=tmp_path)
    assert str(caught.value) == (
        f"data set 'cora' is not in {tmp_path}; get it with: "
        f"atoll data fetch cora --data-root {tmp_path}"
    )
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    for name in DATASETS:
        with pytest.raises(AtollError) as caught:
            load(name)
        assert str(caught.value).endswith(f"get it with: atoll data fetch {name}")
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"danglin": "drop"},
            "unknown option of your own data 'danglin'; did you mean 'dangling'?",
        ),
        ({"dangling": "drp"}, "unknown choice for dangling 'drp'; did you mean 'drop'?"),
        ({"directed": "maybe"}, "directed is 'maybe'; give true or false"),
        ({"max_categories": "few"}, "max_categories is 'few'; give a whole number"),
        ({"max_categories": 0}, "max_categories is 0; give 1 or more"),
    ],
)
def test_options_of_own_data_are_checked(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_own_options(given)
    assert str(caught.value) == sentence


def test_options_of_own_data_are_words_or_values() -> None:
    options = parse_own_options({"directed": "True", "max_categories": "7", "self_loops": "keep"})
    assert (options.directed, options.max_categories, options.self_loops) == (True, 7, "keep")
    assert parse_own_options({"directed": False}).directed is False


def test_options_of_own_data_do_not_pass_silently_with_other_data() -> None:
    with pytest.raises(ConfigError, match="--own is for a graph of your own, but data is 'lagoon'"):
        load("lagoon", own={"dangling": "drop"})
    with pytest.raises(ConfigError, match="--schema is for a graph of your own"):
        load("lagoon", schema="schema.toml")


def test_loading_a_pt_file_does_not_spoil_public_data_sets(tmp_path: Path) -> None:
    code = (
        "import sys, torch, torch_geometric.data\n"
        "from atoll.data.load import load\n"
        "x, y, edges = torch.ones(3, 1), torch.tensor([0, 1, 0]), torch.tensor([[0, 1], [1, 2]])\n"
        "torch.save({'x': x, 'y': y, 'edge_index': edges}, sys.argv[1])\n"
        "before = set(torch.serialization.get_safe_globals())\n"
        "load(sys.argv[1])\n"
        "sys.exit(set(torch.serialization.get_safe_globals()) != before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "g.pt")], capture_output=True, check=False
    )
    assert done.returncode == 0


def test_names_with_options() -> None:
    assert parse_name("PROTEINS:features=degree,max_degree=7") == (
        "PROTEINS",
        {"features": "degree", "max_degree": 7},
    )
    assert parse_name("tu:COIL-DEL") == ("tu:COIL-DEL", {})
    assert parse_name("TU:COIL-DEL:features=degree") == ("TU:COIL-DEL", {"features": "degree"})
    assert plain_name("molecules:features=degree") == "molecules"
    names = ("nci1:features=degree", "tu:X", "Molecules", "cora", "lagoon:nodes=3", "a/b:c")
    assert [task_of_data(name) for name in names] == [*["graph"] * 3, *["node"] * 3]
    assert not is_own("molecules:features=degree")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("cora:features=degree", "data set 'cora' takes no options, but got 'features'"),
        ("MUTAG:feature=degree", "unknown option of a set of graphs 'feature'; did you mean"),
        ("MUTAG:features=degrees", "unknown value of features 'degrees'; did you mean 'degree'"),
        ("molecules:max_degree=much", "max_degree is much; give a whole number"),
        ("moleculs", "unknown data set 'moleculs'; did you mean 'molecules'"),
    ],
)
def test_bad_names(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(name)


def test_a_group_names_all_that_is_missing(tmp_path) -> None:
    with pytest.raises(DataError) as caught:
        load("Molecules", root=tmp_path)
    assert str(caught.value) == (
        f"group 'molecules' needs data sets that are not in {tmp_path}: MUTAG, BZR, COX2, DHFR, "
        "PTC_MR, AIDS, NCI1; get them with: atoll data fetch MUTAG BZR COX2 DHFR PTC_MR AIDS NCI1"
    )
