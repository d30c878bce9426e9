"""Whole commands, from the start of the process to its end, with a cold and a warm cache.

    python -m bench commands --device cuda --out commands.json
    python -m bench commands --against OLD/src --only demo     compare with other source code

The benchmark subtracts the time of torch's import and CUDA's start, measured before each command,
and the training time that the result reports. It first loads each data set without measuring,
because in older code PyG processes raw files once. `--together` measures both sources at the same
time, which takes half as long on a machine with many cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from bench.compare import machine
from bench.processes import RunError

LOUVAIN = "--clients 10 --partition louvain"
COMMANDS = {
    "demo": "demo",
    "fedavg lagoon": "run fedavg",
    "fedavg Cora": f"run fedavg --data cora {LOUVAIN}",
    "fedavg Cora, 5 seeds": f"run fedavg --data cora {LOUVAIN} --seeds 5",
    "fedavg Cora, 10 seeds": f"run fedavg --data cora {LOUVAIN} --seeds 10",
    "fedavg PubMed, 5 seeds": f"run fedavg --data pubmed {LOUVAIN} --seeds 5",
    "fedavg CS, 5 seeds": f"run fedavg --data cs {LOUVAIN} --seeds 5",
    "fedath Cora": f"run fedath --data cora {LOUVAIN}",
    "fediih Cora": f"run fediih --data cora {LOUVAIN}",
    "fedtad Cora": f"run fedtad --data cora {LOUVAIN} --set iterations=5",
    "gcfl+ PROTEINS": "run gcfl --data PROTEINS --clients 10 --set preset=plus",
}
START = "import torch; torch.ones(1, 1, 1, device='{0}').bmm(torch.ones(1, 1, 1, device='{0}'))"
LOAD = "from atoll.data.public.registry import load_dataset as load; [load(n) for n in {0}]"
SETS = ("cora", "pubmed", "cs", "PROTEINS")
HERE = Path(__file__).parents[1] / "src"


def timed(words: list[str], variables: dict[str, str]) -> dict[str, float]:
    """Return wall and CPU seconds of one process with its children."""
    with tempfile.TemporaryFile() as printed:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *words], env=variables, stdout=printed, stderr=printed
        )
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        if process.returncode:
            tail = printed.read().decode(errors="replace")[-600:]
            raise RunError(f"{' '.join(words)} failed; its last output was:\n{tail}")
    return {"seconds": wall, "processor": used.ru_utime + used.ru_stime}


def whole(
    source: Path, name: str, how: list[str], folder: Path, times: int
) -> list[dict[str, Any]]:
    """Run one command of one source several times, with one cache that is empty at first."""
    variables = dict(os.environ)
    path = [str(source), *filter(None, [variables.get("PYTHONPATH")])]
    cache = tempfile.mkdtemp(dir=folder)
    variables |= {"PYTHONPATH": os.pathsep.join(path), "ATOLL_CACHE": cache}
    rows = []
    for number in range(times):
        out = Path(tempfile.mkdtemp(dir=folder), "run")
        words = ["-m", "atoll", *COMMANDS[name].split(), *how, "--out", str(out)]
        row = timed(words, variables)
        found = [json.loads(path.read_text()) for path in out.rglob("result.json")]
        training = sum(one["seconds"]["train"] for one in found)
        row |= {"cache": "cold" if number == 0 else "warm", "training": training}
        rows.append({"command": name, "source": str(source), **row})
    return rows


@click.command()
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds of every command.")
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(min=1),
              help="Runs with a warm cache.")  # fmt: skip
@click.option("--against", type=click.Path(file_okay=False, path_type=Path),
              help="The folder src of other code, measured in the same run.")  # fmt: skip
@click.option("--only", multiple=True, type=click.Choice(list(COMMANDS)), help="Repeatable.")
@click.option("--together", is_flag=True, help="Both sources at the same time.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write.")
def commands(
    device: str, rounds: int | None, repeats: int, against: Path | None, only: tuple[str, ...],
    together: bool, out: Path | None,
) -> None:  # fmt: skip
    """Measure complete commands without torch's import, CUDA's start and training."""
    names = only or tuple(COMMANDS)
    more = [] if rounds is None else ["--rounds", str(rounds)]
    options = {name: more + (["--device", device] if name != "demo" else []) for name in names}
    sources = [HERE, *([against] if against else [])]
    sets = [one for one in SETS if any(f" {one} " in COMMANDS[name] for name in names)]
    for source in sources if sets else ():
        path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
        timed(["-c", LOAD.format(sets)], {**os.environ, "PYTHONPATH": path})
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name in names:
            starts = [timed(["-c", START.format(device)], dict(os.environ)) for _ in range(2)]
            start = {key: min(one[key] for one in starts) for key in starts[0]}
            click.echo(f"torch's import and the start of {device}: {start['seconds']:.2f} s")
            # Other code may have no cache, so a second run would equal the first.
            work = [(source, 1 + repeats if source == HERE else 1) for source in sources]
            with ThreadPoolExecutor(len(work) if together else 1) as pool:
                made = [
                    pool.submit(whole, source, name, options[name], Path(folder), times)
                    for source, times in work
                ]
                new = [row for one in made for row in one.result()]
            rows += new
            for row in new:
                row["start"] = start
                _show(row, start)
    if out is not None:
        result = {
            "benchmark": "commands",
            "device": device,
            "machine": machine(os.cpu_count() or 1),
        }
        out.write_text(json.dumps(result | {"commands": rows}, indent=2) + "\n")


def _show(row: dict[str, Any], start: dict[str, float]) -> None:
    """Print one line: total time, training time, and the rest in wall and CPU seconds."""
    row["rest"] = row["seconds"] - start["seconds"] - row["training"]
    row["rest_processor"] = row["processor"] - start["processor"]
    which = "this source" if row["source"] == str(HERE) else row["source"]
    click.echo(
        f"{row['command']:24} {row['cache']:4}  whole {row['seconds']:6.2f} s  training "
        f"{row['training']:6.2f}  apart from start and training {row['rest']:6.2f}  "
        f"(processor apart from start: {row['rest_processor']:6.2f})  {which}"
    )
