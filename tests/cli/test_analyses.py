"""`atoll contribution`, `clusters`, `tune-clusters`, `inspect`, `explain` and `similarity`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

THREE_BANKS = Path(__file__).resolve().parents[2] / "examples" / "three-banks"
SMALL = (
    "contribution", "--data", "lagoon:nodes=240", "--clients", 3, "--rounds", 2, "--epochs", 1,
    "--set", "hidden=8",
)  # fmt: skip


def test_the_table_says_what_a_client_does(cli) -> None:
    result = cli(*SMALL, "--client", 2, "--seeds", 2)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "Effect of client 2 of 3 on each class: lagoon:nodes=240" in result.stdout
    for name in ("train", "φ", "with", "without", "difference", "own | all"):
        assert name in result.stdout
    rows = [line.split()[0] for line in lines if re.match(r" +(\d|all|others) ", line)]
    assert rows == [*"012345", "all", "others"]
    assert re.search(r"^ +all .* [+-]\d+\.\d ± \d+\.\d *$", result.stdout, re.MULTILINE)
    text = " ".join(result.stdout.split())
    assert "Spearman's ρ of the gain with its share of the labels" in text
    assert "mean ± standard deviation over seeds" in text
    assert "…" not in text  # nothing is cut off
    assert not list(Path().iterdir())  # nothing is written unless asked for


def test_one_json_object_is_the_last_line(cli) -> None:
    result = cli(*SMALL, "--vary", "nodes", "--seed", 4, "--json")
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    assert (found["client"], found["vary"], found["seed"], found["seeds"]) == (0, "nodes", 4, 1)
    assert [row["name"] for row in found["classes"]] == list("012345")
    assert all(row["homophily"] is None for row in found["classes"])
    assert found["correlations"]["homophily"]["rho"] is None
    gain = found["groups"][0]
    difference = gain["with"]["mean"] - gain["without"]["mean"]
    assert gain["difference"]["mean"] == pytest.approx(difference)
    assert "Effect of client 0 of 3" in result.stderr


def test_files_are_written_and_repeat(cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    texts = []
    for folder in ("a [1]", "b"):
        result = cli(*SMALL, "--vary", "topology", "--ratio", 0.2, "--out", folder)
        assert f"Written: {folder}/contribution.csv" in result.stdout
        names = sorted(path.name for path in (tmp_path / folder).iterdir())
        assert names == ["contribution.csv", "contribution.json", "contribution.png"]
        texts.append((tmp_path / folder / "contribution.csv").read_text())
    assert texts[0] == texts[1]
    cli(*SMALL, "--out", "b")  # written again, nothing in the way
    assert (tmp_path / "b" / "contribution.csv").read_text() != texts[0]


def test_a_graph_of_ones_own(cli) -> None:
    own = ("contribution", "--data", THREE_BANKS, "--partition", "column:bank", "--rounds", 1)
    for vary in ("none", "nodes", "topology", "class-topology"):
        result = cli(*own, "--vary", vary, "--client", 1, "--method", "FedProx", "--json")
        found = json.loads(result.stdout)
        assert (found["method"], found["clients"], found["vary"]) == ("fedprox", 3, vary)


def test_the_help_page(cli) -> None:
    text = cli("contribution", "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    options = (
        "data clients partition split protocol allow schema own data-root method client rounds "
        "epochs set seeds seed vary ratio out json"
    )
    for option in options.split():
        assert re.search(rf"^  --{option}\b", text, re.MULTILINE)
    assert not re.search(r"^  --[\w-]+ (TEXT|PATH|INTEGER|FLOAT)\b", text, re.MULTILINE)
    assert re.search(r"^  contribution +[A-Z].*\.$", cli("--help").stdout, re.MULTILINE)


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom atoll.cli import main\n"
        "try:\n    main(['contribution', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'rich', 'msgspec'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--client", 3), "client 3 is not among the 3 clients; give a number from 0 to 2"),
        (("--client", -1), "client -1 is not among the 3 clients; give a number from 0 to 2"),
        (
            ("--clients", 1),
            "a federation of one client has no other client; give two clients or more",
        ),
        (
            ("--method", "local"),
            "local trains a separate model for every client, so there is no global model to "
            "evaluate with and without a client; choose another --method",
        ),
        (("--method", "fedavgg"), "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (("--vary", "node"), "unknown value of --vary 'node'; did you mean 'nodes'?"),
        (
            ("--ratio", 1),
            "--ratio is for random edges, but --vary is none; remove it or vary the topology",
        ),
        (
            ("--vary", "topology", "--ratio", -2),
            "ratio is -2.0; give a finite number that is not negative",
        ),
        (("--vary", "topology", "--ratio", 99), None),
        (("--set", "hidden"), "--set takes key=value, but got 'hidden'; write --set KEY=VALUE"),
        (("--rounds", 0), "rounds is 0; give a whole number of at least 1"),
        (("--seeds", 0), "seeds is 0; give a whole number of at least 1"),
        (("--data", "croa"), "unknown data set 'croa'; did you mean 'cora'?"),
        (("--own", "dangling=drop"), None),
        (("--out", "file"), None),
    ],
)
def test_mistakes_are_one_sentence(cli, arguments, sentence: str | None) -> None:
    Path("file").write_text("")
    result = cli(*SMALL, *arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    if sentence is not None:
        assert result.stderr == f"error: {sentence}\n"


def test_clusters_of_a_saved_run(cli) -> None:
    data = ("--data", "lagoon:nodes=300", "--clients", 5, "--rounds", 4, "--set", "hidden=8")
    eager = [word for text in ("eps1=1e9", "eps2=0", "min_round=1") for word in ("--set", text)]
    cli("run", "gcfl", *data, *eager, "--out", "ours", "--quiet")
    cli("run", "local", *data, "--out", "alone", "--quiet")
    result = cli("clusters", "ours", "--against", "alone")
    lines = result.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert "all 5 clients, eps1 1e+09, eps2 0" in lines
    assert "least gain" in result.stdout
    names = sorted(path.name for path in Path("ours/clusters").iterdir())
    assert names == [
        "accuracy.png", "clusters.json", "gains.png", "heterogeneity.png", "losses.png",
        "norms.png", "tree.png",
    ]  # fmt: skip
    found = json.loads(cli("clusters", "ours", "--json", "--out", "there").stdout)
    assert found == json.loads(Path("there/clusters.json").read_text())
    assert found["baseline"] is None
    for arguments in (("alone",), ("nowhere",), ("ours", "--seed", 9), ("ours", "--against", ".")):
        refused = cli("clusters", *arguments, code=2)
        assert refused.stdout == ""
        assert refused.stderr.startswith("error: ")
        assert refused.stderr.count("\n") == 1
    assert not Path("nowhere").exists()


TUNE = (
    "tune-clusters", "--data", "lagoon:nodes=300", "--clients", 4, "--rounds", 8, "--epochs", 1,
    "--set", "hidden=8",
)  # fmt: skip


def test_tuning_proposes_and_says_how_to_go_on(cli) -> None:
    result = cli(*TUNE, "--set", "min_round=4", "--grid", "--out", "t")
    lines = result.stdout.splitlines()
    text = " ".join(result.stdout.split())
    assert "gcfl without splits: lagoon:nodes=300, 4 clients, column:owner, 8 rounds" in text
    assert "eps1 | eps2" in result.stdout
    go_on = next(line for line in lines if line.startswith("  atoll run gcfl"))
    assert max(len(line) for line in lines if line not in (go_on, lines[-1])) <= 80
    run = cli(*shlex.split(go_on)[1:], "--rounds", 2, "--json", "--quiet")
    assert json.loads(run.stdout)["method"] == "gcfl"
    names = sorted(path.name for path in Path("t").iterdir())
    assert names == ["norms.csv", "tune-clusters.json", "tune-clusters.png"]


def test_tuning_takes_a_graph_of_your_own_and_prints_json(cli) -> None:
    tune = ("tune-clusters", "--data", THREE_BANKS, "--partition", "column:bank", "--rounds", 8)
    found = json.loads(cli(*tune, "--json").stdout)
    assert len(found["clients"]) == 3
    assert found["eps1"] > 0
    assert f"--data {THREE_BANKS} --partition column:bank" in found["command"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("local",), "local does not split clusters; this command needs gcfl"),
        (("--rounds", 3), "rounds is 3; give at least 8 to see the trend"),
        (("--set", "eps1"), "--set takes key=value, but got 'eps1'; write --set KEY=VALUE"),
        (("--out", "file"), None),
    ],
)
def test_mistakes_in_tuning_are_one_sentence(cli, arguments, sentence: str | None) -> None:
    Path("file").write_text("")
    result = cli(*TUNE, *arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    if sentence is not None:
        assert result.stderr == f"error: {sentence}\n"


def test_inspect_writes_plots_and_numbers(cli, tmp_path: Path) -> None:
    options = ("inspect", "--data", "lagoon:nodes=150", "--clients", 3)
    result = cli(*options, "--out", "look")
    assert sorted(path.name for path in (tmp_path / "look").iterdir()) == [
        "divergence.png", "heterogeneity.json", "homophily.png", "labels.png", "sizes.png",
    ]  # fmt: skip
    for path in (tmp_path / "look").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "look" / "heterogeneity.json").read_text())
    assert numbers["about"]["clients"] == 3
    assert "Clients of lagoon" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_inspect_takes_own_data(cli) -> None:
    text = cli("inspect", "--data", THREE_BANKS).stdout
    assert "Clients of three-banks" in text
    assert "15 duplicate edges were dropped" in text
    assert len(re.findall(r"^ *\w+ +80 ", text, re.MULTILINE)) == 3  # by bank, as the schema says


def test_the_edges_that_a_method_trusts(cli) -> None:
    data = ("--data", "lagoon:nodes=150", "--clients", 2, "--rounds", 1, "--set", "hidden=8")
    cli("run", "fedath", *data, "--out", "ours", "--quiet")
    text = cli("explain", "ours", "--edges").stdout
    assert "one folder per client, summary.json and edges.png in ours/explain" in text
    assert (Path("ours/explain/client-1/edges.csv")).exists()
    cli("run", "fedavg", *data, "--out", "other", "--quiet")
    assert "does not weigh edges" in cli("explain", "other", "--edges", code=2).stderr
    assert "Node 3 of client" in cli("explain", "other", "--node", 3).stdout
    for words in ((), ("--edges", "--node", 3)):
        assert "give either --node ID" in cli("explain", "other", *words, code=2).stderr


def test_similarities_beside_those_of_the_data(cli) -> None:
    data = ("--data", "lagoon:nodes=150", "--clients", 3, "--rounds", 1, "--set", "hidden=8")
    cli("run", "fedpub", *data, "--out", "ours", "--quiet")
    assert "fedpub" in cli("similarity", "ours").stdout
    names = sorted(path.name for path in Path("ours/similarity").iterdir())
    assert names == ["similarity.json", "similarity.png"]
