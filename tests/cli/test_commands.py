"""The other commands: help, lists, pages, data, inspect and the demo."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len

from atoll.data.public.registry import DATASETS
from atoll.methods import METHODS

THREE_BANKS = Path(__file__).resolve().parents[2] / "examples" / "three-banks"
MIRROR = Path(__file__).resolve().parents[3] / "shared" / "data"


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_needs_no_torch_and_no_time() -> None:
    code = (
        "import sys\nfrom atoll.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'rich', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for arguments in (["--help"], ["run", "--help"], ["--version"], ["data", "-h"]):
        done = python(code, *arguments)
        assert done.returncode == 0, done.stderr
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "atoll", "--help"], capture_output=True, check=True)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.5


def test_help_pages_read_well(cli) -> None:
    page = cli("--help").stdout
    assert "..." not in page.replace("[ARGS]...", "")  # no sentence is cut off
    for command in ("run", "demo", "methods", "datasets", "data", "inspect"):
        assert re.search(rf"^  {command} +[A-Z]", page, re.MULTILINE)
        text = cli(command, "--help").stdout
        assert max(map(len, text.splitlines())) <= 80
        assert not re.search(r"^  --[\w-]+ (TEXT|PATH|INTEGER|FLOAT)\b", text, re.MULTILINE)
    text = cli("run", "--help").stdout
    options = (
        "data clients partition split protocol rounds epochs fraction seeds seed engine device set "
        "config data-root out resume json quiet"
    )
    for option in options.split():
        assert re.search(rf"^  --{option}\b", text, re.MULTILINE)


def test_no_command_shows_the_help(cli) -> None:
    assert "Commands:" in cli(code=2).output


def test_a_reader_that_goes_away_is_no_error() -> None:
    shell = f"{sys.executable} -m atoll datasets | head -1"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Data sets")
    assert done.stderr == ""


def test_methods_are_listed_with_their_papers(cli) -> None:
    text = cli("methods").stdout
    assert max(map(len, text.splitlines())) <= 80
    for name in METHODS:
        assert name in text


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_page_says_everything(cli, name: str) -> None:
    text = cli("methods", name.upper()).stdout
    assert max(map(cell_len, text.splitlines())) <= 80  # α̂ is two characters and one column wide
    for part in ("Wire, per client and round:", "Departures from the reference code:", "Paper:"):
        assert part in text
    for key in ("epochs", "hidden", "dropout", "lr", "weight_decay", "net", "optimizer"):
        assert re.search(rf"^│ {key} +│ \S+ +│", text, re.MULTILINE)
    # Line breaks of the source are not line breaks of the page.
    assert not any(len(line) < 30 and line.endswith(" the") for line in text.splitlines())


def test_data_sets_are_listed_whole(cli) -> None:
    text = cli("datasets").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    listed = [line.split()[0] for line in text.splitlines()[3:-1]]
    assert listed[: len(DATASETS) + 2] == ["lagoon", "archipelago", *DATASETS]
    assert "atoll data fetch NAME" in text


def test_a_data_sets_page(cli, tmp_path: Path) -> None:
    text = cli("datasets", "Cora").stdout
    for part in ("2,708", "10,556", "1,433", "licence", "Planetoid", "atoll data fetch cora"):
        assert part in text
    text = cli("datasets", "mutag", "--data-root", "d").stdout
    assert "atoll data fetch MUTAG --data-root d" in text
    text = cli("datasets", "lagoon").stdout
    for knob in ("nodes", "classes", "homophily", "label_skew", "topology_skew", "feature_noise"):
        assert re.search(rf"^│ {knob} +│ [\d.]+ +│ [A-Z0]", text, re.MULTILINE)
    found = cli("datasets", "croa", code=2).stderr
    assert "unknown data set 'croa'; did you mean 'cora'?" in found


def test_checking_nothing(cli) -> None:
    assert cli("data", "check").stdout == (
        "no data set is here; get one with: atoll data fetch NAME\n"
    )


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
    assert (
        len(re.findall(r"^│ +\d │ +80 │", text, re.MULTILINE)) == 3
    )  # by bank, as the schema says


def test_the_demo_compares_three_methods(cli, tmp_path: Path) -> None:
    result = cli("demo", "--rounds", 2, "--seeds", 1, "--out", "d")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "5 libraries own parts of one citation graph; nobody shows theirs."
    assert [line.split()[0] for line in lines if re.match(r"(local|fedavg|fedath) ", line)] == [
        "local", "fedavg", "fedath",
    ]  # fmt: skip
    assert lines[-1] == "Saved in d"
    for name in ("local", "fedavg", "fedath"):
        assert (tmp_path / "d" / name / "result.json").exists()
    found = cli("demo", "--out", "d", code=2).stderr
    assert "already holds a run" in found
