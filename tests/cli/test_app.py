"""The command line as a whole: help pages, start-up, pipes, and one sentence for each mistake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.core.errors import ConfigError
from tests.cli.refusals import refusal


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_needs_no_torch_and_no_time() -> None:
    code = (
        "import sys, time\nfrom atoll.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'rich', 'msgspec', 'nvflare'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert time.process_time() < 0.3"
    )
    for arguments in (["--help"], ["run", "--help"], ["--version"], ["data", "-h"]):
        done = python(code, *arguments)
        assert done.returncode == 0, done.stderr


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


SMALL = ("run", "--data", "lagoon:nodes=150", "--clients", 3, "--rounds", 1)
FEW = ("run", "--clients", 2, "--rounds", 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "fedporx"), "unknown method 'fedporx'; did you mean 'fedprox'?"),
        (("run", "--data", "croa"), "unknown data set 'croa'; did you mean 'cora'?"),
        ((*SMALL, "--partition", "metiss"), "unknown partition 'metiss'; did you mean 'metis'?"),
        ((*SMALL, "--split", "globl"), "unknown split 'globl'; did you mean 'global'?"),
        ((*SMALL, "--protocol", "fedtda"), "unknown protocol 'fedtda'; did you mean 'fedtad'?"),
        ((*SMALL, "--engine", "fusd"), "unknown engine 'fusd'; did you mean 'fused'?"),
        (
            (*SMALL, "--device", "gpu"),
            "unknown device 'gpu'; choose auto, cpu, cuda, or cuda:1 for GPU 1",
        ),
        (
            (*SMALL, "--evaluate", "locl"),
            "unknown value of --evaluate 'locl'; did you mean 'local'?",
        ),
        (
            (*SMALL, "--compat", "dropout-at-evl"),
            "unknown compat switch 'dropout-at-evl'; did you mean 'dropout-at-eval'?",
        ),
        (
            (*SMALL, "--allow", "single-clas"),
            "unknown value of --allow 'single-clas'; did you mean 'single-class'?",
        ),
        (
            (*SMALL, "--set", "hiden=3"),
            "unknown hyper-parameter of fedavg 'hiden'; did you mean 'hidden'?",
        ),
        ((*SMALL, "--set", "hidden=big"), "hidden cannot be 'big'; it takes a whole number"),
        (
            (*SMALL, "--set", "hidden"),
            "--set takes key=value, but got 'hidden'; write --set KEY=VALUE",
        ),
        (
            (*SMALL, "--partition", "dirichlet:alfa=1"),
            "unknown option of partition 'dirichlet' 'alfa'; did you mean 'alpha'?",
        ),
        ((*SMALL, "--partition", "column:bank"), None),
        ((*SMALL, "--clients", 0), "clients is 0; give a whole number of at least 1"),
        ((*SMALL, "--clients", -4), "clients is -4; give a whole number of at least 1"),
        ((*SMALL, "--rounds", 0), "rounds is 0; give a whole number of at least 1"),
        ((*SMALL, "--epochs", -1), "epochs is -1; give a whole number of at least 1"),
        ((*SMALL, "--seeds", 0), "seeds is 0; give a whole number of at least 1"),
        ((*SMALL, "--seed", -1), "seed is -1; give a whole number from 0 to 2147483647"),
        ((*SMALL, "--fraction", 0), "fraction is 0.0; give a number above 0 and up to 1"),
        ((*SMALL, "--fraction", 1.5), "fraction is 1.5; give a number above 0 and up to 1"),
        ((*SMALL, "--fraction", "nan"), "fraction is nan; give a number above 0 and up to 1"),
        (
            (*SMALL, "--task", "graph"),
            "task is graph, but 'lagoon' has nodes to classify; remove --task, or choose other "
            "data",
        ),
        ((*SMALL, "--chunk", -1), "chunk is -1; give 0 (choose) or a number of clients"),
        (
            (*SMALL, "--clients", 999),
            "lagoon with 150 nodes cannot have 999 clients; give 1 to 15, or more nodes (--data "
            "lagoon:nodes=...)",
        ),
        (
            ("run", "--data", "lagoon:nodez=3"),
            "unknown lagoon knob 'nodez'; did you mean 'nodes'?",
        ),
        (
            ("run", "--data", "lagoon:nodes=x"),
            "lagoon: nodes cannot be 'x'; it takes a whole number",
        ),
        (
            (*SMALL, "--own", "dangling=drop"),
            "--own is for a graph of your own, but data is 'lagoon:nodes=150'; remove it",
        ),
        (("methods", "fedporx"), "unknown method 'fedporx'; did you mean 'fedprox'?"),
        (("inspect", "--data", "croa"), "unknown data set 'croa'; did you mean 'cora'?"),
        (("inspect", "--seed", -1), "seed is -1; give a whole number from 0 to 2147483647"),
        (
            ("inspect", "--partition", "luvain"),
            "unknown partition 'luvain'; did you mean 'louvain'?",
        ),
        (("demo", "--rounds", 0), "rounds is 0; give a whole number of at least 1"),
        (
            (*SMALL, "--protocol", "gcfl"),
            "protocol 'gcfl' is for sets of graphs, but 'lagoon' is one graph; choose another "
            "protocol",
        ),
        (
            ("run", "--resume", "none"),
            "'none' holds no run to resume (it has no config.toml); give the folder of a run",
        ),
        (
            ("run", "--resume", "a", "--epochs", 3),
            "--resume continues a run with its own configuration, but --epochs was given; remove "
            "all options except --rounds, --json and --quiet",
        ),
        (("run", "fedavg", "--resume", "a"), None),
        (("run", "--resume", "a", "--out", "b"), None),
        (("run", "--resume", "a", "--config", "c.toml"), None),
        (
            ("run", "--config", "none.toml"),
            "configuration file none.toml does not exist; give a TOML file of options",
        ),
        (
            ("run", "--data", "cora"),
            "data set 'cora' is not in {home}/.cache/atoll/data (no Planetoid/Cora/raw/ind.cora.x);"
            " get it with: atoll data fetch cora",
        ),
        (
            ("run", "--data", "Cora", "--data-root", "here"),
            "data set 'cora' is not in here; get it with: atoll data fetch cora --data-root here",
        ),
        (("run", "--data", "no/such/folder"), None),
        (("run", "--data", "graph.gml"), None),
    ],
)  # fmt: skip
def test_one_sentence(cli, tmp_path: Path, arguments, sentence: str | None) -> None:
    found = refusal(cli, *arguments)
    if sentence is not None:
        assert found == sentence.format(home=tmp_path / "home")
    assert ";" in found  # what is wrong, then what to do


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("rnu",), ("unknown command 'rnu'; did you mean 'run'?",)),
        (("data", "fech"), ("unknown command 'fech'; did you mean 'fetch'?",)),
        (("run", "--rouds", 3), ("No such option '--rouds'", "--rounds")),
        (("run", "--clients", "many"), ("'--clients'", "'many' is not a valid integer")),
        (("run", "--rounds", 1.5), ("'--rounds'", "'1.5' is not a valid integer")),
        (("run", "--fraction", "half"), ("'--fraction'", "'half' is not a valid float")),
        (("run", "a", "b"), ("unexpected extra argument", "b")),
        (("data", "fetch"), ("Missing argument 'NAMES",)),
        (("--rouds",), ("No such option '--rouds'; see ",)),
        (("federate", "kit", "--nothing"), ("No such ",)),
    ],
)
def test_what_the_command_line_itself_refuses(cli, arguments, parts: tuple[str, ...]) -> None:
    found = refusal(cli, *arguments)  # one line that begins with `error: `, as all others
    assert found.endswith("--help") or "?" in found
    for part in parts:
        assert part in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(cli) -> None:
    assert refusal(cli, *SMALL, "--device", "cuda") == (
        "device 'cuda' was asked for, but torch finds no GPU; use --device cpu or auto"
    )


def test_debug_shows_where(cli) -> None:
    result = cli("--debug", "run", "fedporx", code=1)
    assert isinstance(result.exception, ConfigError)
    assert "method_class" in "".join(traceback.format_exception(result.exception))


def test_a_bug_is_called_one(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.experiment.run.RunPlan", None)
    result = cli(*SMALL, code=1)
    sentence = "internal error: TypeError: 'NoneType' object is not callable; `atoll --debug ...`"
    assert result.stderr.startswith(sentence)


@pytest.mark.parametrize("where", ["init", "round", "deploy"])
def test_an_error_of_my_method_outside_a_step_has_its_line(cli, where: str) -> None:
    lines = ("import atoll", "", "class Mine(atoll.Averaging):", f"    def {where}(self, *given):")
    path = Path(f"cli_app_{where}.py")
    path.write_text("\n".join([*lines, "        return given.nothing", ""]))
    fault = f"AttributeError in {path} line 5: 'tuple' object has no attribute 'nothing'"
    found = refusal(cli, "run", f"{path}:Mine", *SMALL[1:], "--quiet", "--out", "a")
    assert found == f"{fault}; correct it"
    compared = cli("compare", "local", f"{path}:Mine", *SMALL[1:], "--seeds", 1, code=1)
    assert f": {fault}; see the traceback in " in compared.stderr


def test_a_full_disk_is_one_sentence(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes, **how: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("atoll.experiment.folder.write_atomically", full)
    result = cli(*SMALL, "--out", "a", "--quiet", code=2)
    assert result.stderr == (
        "error: No space left on device 'a/config.toml'; make room for it\nstopped at once\n"
    )


def test_a_disk_that_is_full_later_tells_how_to_continue(cli, monkeypatch) -> None:
    def full(path: Path, data: bytes, mode: int) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("atoll.engines.codec.write_atomically", full)  # the first checkpoint
        result = cli(*SMALL, "--out", "a", "--quiet", code=2)
    assert result.stderr == (
        "error: No space left on device 'a/seed-0/checkpoint.atoll'; make room for it\n"
        "stopped at once; the run is saved in a; continue with: atoll run --resume a\n"
    )
    cli("run", "--resume", "a", "--quiet")
    cli(*SMALL, "--out", "b", "--quiet")
    assert Path("a/metrics.csv").read_bytes() == Path("b/metrics.csv").read_bytes()


# Files.


def test_folders_that_cannot_be_written(cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in (SMALL, ("inspect",), ("demo",)):
        found = refusal(cli, *command, "--out", "file/run")
        assert "cannot be made: " in found
        assert found.endswith("is a file; choose another --out")
        assert "'file/run" in found


def test_an_existing_run_is_refused_and_left_alone(cli, tmp_path: Path) -> None:
    cli(*SMALL, "--out", "a", "--quiet")
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert refusal(cli, *SMALL, "--out", "a") == (
        "'a' already holds a run; continue it with --resume a, replace it with --overwrite, or "
        "choose another --out"
    )
    assert {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()} == before


def test_a_refused_run_does_not_take_the_folder(cli) -> None:
    refusal(cli, *SMALL, "--set", "hiden=3", "--out", "a")
    cli(*SMALL, "--set", "hidden=3", "--out", "a", "--quiet")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rounds = ", ("c.toml is not valid TOML",)),
        ("rouds = 3", ("unknown key in c.toml 'rouds'", "did you mean 'rounds'?")),
        ("rounds = 'x'", ("c.toml", "rounds cannot be 'x'; it takes a whole number")),
        ("rounds = 0", ("c.toml", "rounds is 0; give a whole number of at least 1")),
        (
            "objects = ['method']",
            ("started in Python with a method object", "atoll.resume(folder, method=...)"),
        ),
    ],
)
def test_damaged_configurations(cli, tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "c.toml").write_text(text)
    found = refusal(cli, "run", "--config", "c.toml")
    for part in parts:
        assert part in found


def test_a_damaged_checkpoint(cli, tmp_path: Path) -> None:
    cli(*SMALL, "--out", "a", "--quiet")
    path = tmp_path / "a" / "seed-0" / "checkpoint.atoll"
    path.write_bytes(path.read_bytes()[:-1])
    assert refusal(cli, "run", "--resume", "a", "--quiet") == (
        "checkpoint a/seed-0/checkpoint.atoll is damaged (its checksum does not match); delete it "
        "to start this seed again from round 0"
    )


# Graphs that cannot be used for training.


def save(path: Path, x: object, y: object, edges: object = ((0, 1, 2, 3), (1, 2, 3, 0))) -> None:
    tensors = {"x": x, "y": y, "edge_index": edges}
    torch.save({name: torch.as_tensor(np.array(value)) for name, value in tensors.items()}, path)


X, Y = [[1.0], [2.0], [3.0], [4.0]], [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("x", "y", "edges", "parts"),
    [
        ([[1.0], [np.nan], [3.0], [4.0]], Y, None, ("data 'g'", "NaN or infinite", "node 1")),
        ([[1.0], [2.0], [np.inf], [4.0]], Y, None, ("data 'g'", "NaN or infinite", "node 2")),
        (X, [0, 1, 0, -7], None, ("g.pt", "-7")),
        (X, Y, ((0, 9), (1, 0)), ("g.pt", "9", "0 to 3")),
        (np.zeros((0, 1)), np.zeros(0, int), np.zeros((2, 0), int), ("g.pt", "no nodes")),
    ],
)
def test_unusable_graphs(cli, tmp_path: Path, x, y, edges, parts: tuple[str, ...]) -> None:
    given = () if edges is None else (edges,)
    save(tmp_path / "g.pt", x, y, *given)
    found = refusal(cli, *FEW, "--data", "g.pt", "--partition", "random")
    for part in parts:
        assert part in found


def test_more_clients_than_nodes(cli, tmp_path: Path) -> None:
    save(tmp_path / "g.pt", X, Y)
    assert refusal(cli, "run", "--data", "g.pt", "--partition", "random", "--clients", 5) == (
        "data 'g' has 4 nodes, too few for 5 clients; use at most 4 clients"
    )


@pytest.mark.parametrize("partition", ["louvain", "metis", "random", "dirichlet"])
def test_too_many_clients_for_a_partition(cli, tmp_path: Path, partition: str) -> None:
    save(tmp_path / "g.pt", X, Y)
    found = refusal(cli, "run", "--data", "g.pt", "--partition", partition, "--clients", 4)
    assert "client" in found
    assert "fewer clients" in found or "at most" in found or "smaller" in found


def test_a_client_without_a_training_node(cli, tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    rows = [
        f"{i},{i},{'xy'[i % 2]},{'ab'[i // 4]},{'train' if i < 4 else 'test'}\n" for i in range(8)
    ]
    (tmp_path / "g" / "nodes.csv").write_text("id,age,label,client,split\n" + "".join(rows))
    (tmp_path / "g" / "edges.csv").write_text("source,target\n0,1\n2,3\n4,5\n6,7\n")
    assert refusal(cli, "run", "--data", "g", "--split", "given") == (
        "client 'b' of 2 (4 nodes of 'g') has no training node; use fewer clients, another "
        "partition or split, or a larger training share"
    )


def test_divergence_is_one_sentence(cli) -> None:
    wild = ("--set", "optimizer=sgd", "--set", "layers=4", "--set", "lr=9e5", "--rounds", 20)
    result = cli(*SMALL, *wild, "--quiet", "--out", "a", code=2)
    assert re.fullmatch(
        r"error: client \d, step \w+, round \d+: training diverged \(.* the loss is nan\); lower "
        r"the learning rate or check the features\n",
        result.stderr,
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete_commands_and_options(shell: str) -> None:
    def ask(**given: str) -> str:
        known = os.environ | {"COMP_WORDS": "", "COMP_CWORD": "1"} | given
        code = "from atoll.cli import main; main(prog_name='atoll')"
        words = [sys.executable, "-c", code]
        return subprocess.run(words, env=known, capture_output=True, check=False).stdout.decode()

    assert "_ATOLL_COMPLETE" in ask(_ATOLL_COMPLETE=f"{shell}_source")
    at = "com" if shell == "fish" else "1"
    found = ask(_ATOLL_COMPLETE=f"{shell}_complete", COMP_WORDS="atoll com", COMP_CWORD=at)
    assert "compare" in found
    assert "report" not in found
    at = "--over" if shell == "fish" else "2"
    words = "atoll run --over"
    assert "--overwrite" in ask(
        _ATOLL_COMPLETE=f"{shell}_complete", COMP_WORDS=words, COMP_CWORD=at
    )


def test_a_terminal_without_unicode_gets_ascii(tmp_path: Path) -> None:
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "atoll", "run", "--rounds", "1", "--seeds", "2", "--out", "a"]
    words += ["--data", "lagoon:nodes=150", "--clients", "3"]
    done = subprocess.run(words, env=plain, capture_output=True, cwd=tmp_path, check=True)
    assert done.stdout.isascii()
    lines = done.stdout.decode().splitlines()
    head, row = ([line for line in lines if line.startswith(k)][-1] for k in ("method", "fedavg"))
    assert " +-" in row
    assert head.index("|MB/round") == row.rindex("|", 0, row.rindex("|"))  # columns stay in line
    done = subprocess.run(
        [*words[:3], "methods", "gcfl"], env=plain, capture_output=True, check=True
    )
    assert done.stdout.isascii()
    assert b"epsilon1: a mean update" in done.stdout
