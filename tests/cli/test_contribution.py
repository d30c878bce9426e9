"""`atoll contribution`: table, JSON, files, help, and one sentence for every mistake."""

from __future__ import annotations

import json
import re
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
    assert "What client 2 of 3 does to each class: lagoon:nodes=240" in result.stdout
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
    assert "What client 0 of 3" in result.stderr


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
            "a federation of one client has nobody left without it; give two clients or more",
        ),
        (
            ("--method", "local"),
            "local gives every client a model of its own, so that there is no global model to "
            "score with and without a client; choose another --method",
        ),
        (("--method", "fedavgg"), "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (("--vary", "node"), "unknown value of --vary 'node'; did you mean 'nodes'?"),
        (
            ("--ratio", 1),
            "--ratio is for random edges, but --vary is none; leave it out or vary the topology",
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
