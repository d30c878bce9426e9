"""Recorded commands: a refactoring changes no metric of a whole command, to the last digit.

`commands.json` holds what eighteen commands printed with `--json`, and a digest of every number in
their `metrics.csv`, on one CPU thread. If a change is meant to move them, record them anew and say
why in the change log:

    ATOLL_PIN=1 python -m pytest -n 0 tests/invariant/test_commands.py
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import atoll
from atoll.cli import main
from atoll.experiment.run import Stopped

RECORDED = Path(__file__).with_name("commands.json")
LAGOON = ["--data", "lagoon", "--clients", "4", "--rounds", "4", "--seeds", "2"]
CORA = ["--data", "cora", "--clients", "5", "--rounds", "4"]
COMMANDS: dict[str, list[str]] = {
    **{
        f"{name} on lagoon": ["run", name, *LAGOON]
        for name in ("fedavg", "fedprox", "scaffold", "fedath", "fedtad", "fedsage+")
    },
    **{
        f"{name} on cora": ["run", name, *CORA]
        for name in ("fedavg", "fediih", "fedath", "moon", "fedpub", "fedgta")
    },
    "gcfl+ on PROTEINS": [
        "run", "gcfl", "--data", "PROTEINS", "--protocol", "gcfl", "--clients", "4",
        "--rounds", "4", "--set", "preset=plus",
    ],
    "compare": ["compare", "local", "fedavg", "fedprox:mu=0.1", *LAGOON, "--jobs", "1"],
    "tune": [
        "tune", "fedprox", "--data", "lagoon", "--clients", "3", "--rounds", "4",
        "--trials", "4", "--seeds", "2",
    ],
    "private": ["run", "fedavg", *LAGOON, "--dp", "clip=1,noise=1.1", "--fraction", "0.5"],
    "resumed": ["run", "fedopt", *LAGOON],
    "wire": ["run", "fedgta", *LAGOON, "--engine", "wire"],
}  # fmt: skip
NOT_RESULTS = ("seconds", "out", "command", "commands", "folder", "environment")
"""Keys that say how long it took, and where."""


def machine() -> dict[str, str]:
    """The processor and the version of torch, which decide the last digits."""
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    )
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return {
        "cpu": model or platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__.partition("+")[0],
    }


def results(value: Any) -> Any:
    """Return the answer without times and paths. One seed has no spread."""
    if isinstance(value, dict):
        if len(value.get("per_seed", ())) == 1:
            value = {key: one for key, one in value.items() if key != "std"}
        return {key: results(one) for key, one in value.items() if key not in NOT_RESULTS}
    return [results(one) for one in value] if isinstance(value, list) else value


def alike(one: Any, other: Any) -> bool:
    """Whether two answers have the same form, and numbers close to each other."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=0.2, abs=0.2)
    return type(one) is type(other)


class StopAfter:
    """An observer that stops a run, as Ctrl-C does."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def begin(self, *about: Any) -> None:
        pass

    def round(self, *about: Any) -> None:
        self.rounds -= 1

    def should_stop(self) -> bool:
        return self.rounds <= 0


def measured(name: str, folder: Path, real_data: Callable[[str], Path]) -> dict[str, Any]:
    """The current output of a command."""
    words = [*COMMANDS[name], "--quiet", "--json"]
    for known in ("cora", "PROTEINS"):
        if known in words:
            words += ["--data-root", str(real_data(known))]
    torch.set_num_threads(1)
    if name == "resumed":
        options = dict(zip([w[2:] for w in LAGOON[::2]], LAGOON[1::2], strict=True))
        with pytest.raises(Stopped):
            atoll.run(
                words[1], options["data"], out=folder, observer=StopAfter(5), save_every=0,
                clients=int(options["clients"]), rounds=int(options["rounds"]),
                seeds=int(options["seeds"]),
            )  # fmt: skip
        words = ["run", "--resume", str(folder), "--quiet", "--json"]
    else:
        words += ["--out", str(folder)]
    answer = CliRunner().invoke(main, words)
    assert answer.exit_code == 0, answer.output
    tables = sorted(folder.rglob("metrics.csv"))
    numbers = [path.read_text() for path in tables]
    digest = hashlib.sha256("\n".join(numbers).encode()).hexdigest()
    return {"json": results(json.loads(answer.stdout.splitlines()[-1])), "metrics": digest}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_recorded_command_gives_the_same_numbers(name, tmp_path, real_data_or_skip):
    found = measured(name, tmp_path / "out", real_data_or_skip)
    kept = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if os.environ.get("ATOLL_PIN"):
        kept["machine"] = machine()
        kept[name] = found
        RECORDED.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        return
    if kept["machine"] != machine():
        # Another CPU sums in another order: the last digits differ, the results hardly do.
        assert alike(found["json"], kept[name]["json"])
        pytest.skip(f"recorded on {kept['machine']}, this is {machine()}: last digits not compared")
    assert found == kept[name]


@pytest.fixture
def real_data_or_skip(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Real data are asked for only by the commands that need them."""

    def get(name: str) -> Path:
        found: Path = request.getfixturevalue("real_data")(name)
        return found

    return get
