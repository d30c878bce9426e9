"""Command line of the benchmarks: `python -m bench all`, or one of its parts."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench import scale as scaling
from bench import simulators
from bench.commands import commands
from bench.compare import RAW, Row, Work, compare, machine, report, table
from bench.design import design
from bench.faults import faults
from bench.gpu import gpu
from bench.peer_env import DEFAULT, peer_python
from bench.peer_runner import METHODS
from bench.predict import predict
from bench.processes import RunError
from bench.roofline import floor, machine_peaks, round_of_fedavg
from bench.rounds import rounds
from bench.rounds_gpu import rounds_gpu
from bench.soak import sites, soak
from bench.tables import tables
from bench.tables_page import tables_page
from bench.tune_tables import tune_tables


@click.group()
def main() -> None:
    """Benchmarks of Atoll, each measured side by side in one run."""


DATA_ROOT = click.option(
    "--data-root",
    envvar="ATOLL_DATA",
    type=click.Path(path_type=Path),
    help="Folder that holds Planetoid/Cora/raw; ATOLL_DATA by default.",
)
OUT = click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write."
)
PEER_ENV = click.option(
    "--peer-env", default=DEFAULT, type=click.Path(path_type=Path), help="Its folder."
)
FLOWER_ENV = click.option(
    "--flower-env",
    default=simulators.FLOWER_ENV,
    type=click.Path(path_type=Path),
    help="Folder of Flower's environment.",
)


@main.command()
@DATA_ROOT
@click.option("--methods", default="fedavg,fedprox", show_default=True, help="Comma-separated.")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1))
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--peer-only", is_flag=True, help="Run the peer only.")
@PEER_ENV
@OUT
def peer(
    *,
    data_root: Path | None,
    methods: str,
    rounds: int,
    threads: int,
    repeats: int,
    peer_only: bool,
    peer_env: Path,
    out: Path | None,
) -> None:
    """Compare the seconds per round of openfgl-lib 1.1.0 and Atoll on Cora with 10 clients."""
    names = _known(methods)
    work = Work(_with_cora(data_root), rounds=rounds, threads=threads)
    _check_out(out)
    python = peer_python(peer_env, Console(stderr=True))
    rows, result = _peer(names, work, python, repeats, peer_only=peer_only, out=out)
    _show(rows, result)
    failed = [row.method for row in rows if row.error]
    if failed:
        raise click.ClickException(f"{', '.join(failed)} failed; the reason is shown above.")


def _peer(
    names: list[str], work: Work, python: Path, repeats: int, *, peer_only: bool, out: Path | None
) -> tuple[list[Row], dict[str, Any]]:
    load = os.getloadavg()[0]
    rows: list[Row] = []
    with _progress() as progress:
        tell = _teller(progress)
        for name in names:
            rows.append(
                compare(name, work, python=python, repeats=repeats, peer_only=peer_only, tell=tell)
            )
            result = report(rows, work, load)
            if out:  # after every method, so that a stopped benchmark keeps its results
                _write(out, result)
    return rows, result


@main.command()
@click.option("--clients", default=10_000, show_default=True, type=click.IntRange(min=1))
@click.option("--theirs", default=100, show_default=True, type=click.IntRange(min=2),
              help="Clients of the other programs, which are too slow for more.")  # fmt: skip
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=2))
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--without-flower", is_flag=True, help="Compare with the plain loop only.")
@FLOWER_ENV
@OUT
def simulator(
    *,
    clients: int,
    theirs: int,
    rounds: int,
    repeats: int,
    threads: int,
    without_flower: bool,
    flower_env: Path,
    out: Path | None,
) -> None:
    """Compare Atoll's client updates per second with Flower's simulator and a plain PyG loop."""
    _check_out(out)
    pins = simulators.FLOWER_PINS
    flower = None if without_flower else peer_python(flower_env, Console(stderr=True), pins)
    with _progress() as progress:
        sides = simulators.compare(
            clients=clients, theirs=theirs, rounds=rounds, repeats=repeats, threads=threads,
            flower=flower, tell=_teller(progress),
        )  # fmt: skip
    Console().print(simulators.table(sides))
    if out:
        _write(out, {"machine": machine(threads), "simulator": [s.to_json() for s in sides]})


@main.command()
@DATA_ROOT
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@OUT
def scale(*, data_root: Path | None, rounds: int, threads: int, out: Path | None) -> None:
    """Measure seconds per round and peak memory of large federations."""
    _check_out(out)
    with _progress() as progress:
        found = scaling.measure(data_root, rounds, threads, _teller(progress))
    Console().print(scaling.table(found, threads))
    if out:
        _write(out, {"machine": machine(threads), "scale": found})


EVERYTHING = "local,fedavg,fedprox,scaffold,moon,feddc,fedproto,fedgta,fedtad"
"""Methods that both Atoll and the peer can run."""


@main.command("all")
@DATA_ROOT
@PEER_ENV
@FLOWER_ENV
@click.option(
    "--out",
    default="bench.json",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON file to write.",
)
def everything(*, data_root: Path | None, peer_env: Path, flower_env: Path, out: Path) -> None:
    """Run the peer, simulator, scale and roofline benchmarks in less than ten minutes."""
    from atoll.data.divide import federate
    from atoll.data.public.registry import load_dataset

    console = Console()
    work = Work(_with_cora(data_root), rounds=6)
    _check_out(out)
    python = peer_python(peer_env, Console(stderr=True))
    flower = peer_python(flower_env, Console(stderr=True), simulators.FLOWER_PINS)
    peaks = {threads: machine_peaks(threads) for threads in (1, 2)}
    rows, result = _peer(_known(EVERYTHING), work, python, 1, peer_only=False, out=out)
    _show(rows, result)
    with _progress() as progress:
        sides = simulators.compare(
            clients=10_000, theirs=100, rounds=3, repeats=1, threads=2, flower=flower,
            tell=_teller(progress),
        )  # fmt: skip
        console.print(simulators.table(sides))
        found = scaling.measure(data_root, 3, 2, _teller(progress))
    console.print(scaling.table(found, 2))
    whole = load_dataset("cora", work.data_root).undirected_simple()
    cora = federate(whole, clients=10, partition="louvain", seed=0)
    fedavg = next(row for row in rows if row.method == "fedavg")
    floors = {
        "Cora, 10 clients, 1 thread": {
            **floor(round_of_fedavg(cora), peaks[1]),
            "measured_seconds": fedavg.to_json()["atoll_seconds_per_round"],
        },
        "10,000 clients, 2 threads": {
            **floor(round_of_fedavg(simulators.archipelago(10_000)), peaks[2]),
            "measured_seconds": sides[0].seconds,
        },
    }
    _show_floors(console, peaks, floors)
    _write(out, {
        **result, "benchmark": "all", "peaks": peaks, "roofline": floors, "scale": found,
        "simulator": [side.to_json() for side in sides],
    })  # fmt: skip
    console.print(f"All measurements are in {out}.", highlight=False)


def _show_floors(
    console: Console, peaks: dict[int, dict[str, float]], floors: dict[str, dict[str, Any]]
) -> None:
    """Print the machine's peaks, and the floor and the time of a round of FedAvg."""
    for threads, peak in peaks.items():
        console.print(
            f"{threads} thread(s): {peak['bytes_per_s'] / 1e9:.1f} GB/s (triad), "
            f"{peak['flops_per_s'] / 1e9:.0f} Gflop/s (product)",
            highlight=False,
        )
    for name, found in floors.items():
        measured = found["measured_seconds"]
        console.print(
            f"FedAvg, {name}: {found['flops'] / 1e9:.2f} Gflop and {found['bytes'] / 1e9:.2f} GB, "
            f"at least {found['floor_seconds']:.4f} s ({found['bound_by']}), measured "
            f"{measured:.4f} s, {measured / found['floor_seconds']:.1f} times that",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _check_out(out: Path | None) -> None:
    if out and not out.absolute().parent.is_dir():
        raise click.ClickException(f"--out {out}: that folder does not exist; create it first.")


def _write(out: Path, result: dict[str, Any]) -> None:
    out.write_text(json.dumps(result, indent=2) + "\n")


def _teller(progress: Progress) -> Callable[[str], None]:
    """Return a function that shows the current run: live on a terminal, else as lines."""
    task = progress.add_task("")

    def tell(text: str) -> None:
        if progress.console.is_terminal:
            progress.update(task, description=text)
        else:
            progress.console.print(text)

    return tell


def _known(methods: str) -> list[str]:
    """Split the list of names and refuse methods that the peer does not have."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    for name in names:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(METHODS)}."
            raise click.ClickException(f"unknown method {name!r}; {hint}")
    if not names:
        raise click.ClickException(f"--methods is empty; choose from {', '.join(METHODS)}.")
    return names


def _with_cora(data_root: Path | None) -> Path:
    """Return the data folder as an absolute path. The error says where Cora must be."""
    if data_root is None:
        raise click.ClickException(
            f"no data folder; give --data-root DIR or set ATOLL_DATA to a folder with {RAW}."
        )
    if not (data_root / RAW / "ind.cora.graph").is_file():
        raise click.ClickException(
            f"{data_root} has no {RAW}/ind.cora.*; unpack Planetoid's Cora there first."
        )
    return data_root.absolute()


def _show(rows: list[Row], result: dict[str, Any]) -> None:
    """Print the table, then the machine, the versions, the notes and the failures."""
    console = Console()
    console.print(table(rows))
    machine, versions = result["machine"], result["versions"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} thread(s) per run, "
        f"load {machine['load']:.2f} at the start",
        *(
            f"{side}: " + ", ".join(f"{name} {number}" for name, number in packages.items())
            for side, packages in versions.items()
            if packages
        ),
        *(f"{r.method}*: {METHODS[r.method].note}" for r in rows if METHODS[r.method].note),
        *(f"{r.method}: {r.error}" for r in rows if r.error),
        *(
            f"{r['method']}: other programs slowed even the best run; measure on a quiet machine"
            for r in result["results"]
            if r["disturbed"]
        ),
    ]
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)


main.add_command(commands)
main.add_command(design)
main.add_command(faults)
main.add_command(gpu)
main.add_command(predict)
main.add_command(rounds)
main.add_command(rounds_gpu)
main.add_command(sites)
main.add_command(soak)
main.add_command(tables)
main.add_command(tables_page)
main.add_command(tune_tables)


if __name__ == "__main__":
    try:
        main(prog_name="python -m bench")
    except RunError as error:
        raise SystemExit(f"Error: {error}") from None
