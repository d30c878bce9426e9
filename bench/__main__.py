"""Command line of the benchmarks: `python -m bench peer --data-root DIR`."""

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

from bench.compare import RAW, Row, Work, compare, report, table
from bench.gpu import gpu
from bench.peer_env import DEFAULT, peer_python
from bench.peer_runner import METHODS


@click.group()
def main() -> None:
    """Benchmarks of Atoll, each measured side by side in one run."""


@main.command()
@click.option(
    "--data-root",
    envvar="ATOLL_DATA",
    type=click.Path(path_type=Path),
    help="Folder that holds Planetoid/Cora/raw; ATOLL_DATA by default.",
)
@click.option("--methods", default="fedavg,fedprox", show_default=True, help="Names, with commas.")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1))
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--peer-only", is_flag=True, help="Leave Atoll out.")
@click.option("--peer-env", default=DEFAULT, type=click.Path(path_type=Path), help="Its folder.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write.")
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
    """Seconds per round of openfgl-lib 1.1.0 and of Atoll, on Cora with 10 clients."""
    names = _known(methods)
    work = Work(_with_cora(data_root), rounds=rounds, threads=threads)
    if out and not out.absolute().parent.is_dir():
        raise click.ClickException(f"--out {out}: that folder does not exist; create it first.")
    console = Console(stderr=True)
    python = peer_python(peer_env, console)
    load = os.getloadavg()[0]
    rows: list[Row] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tell = _teller(progress)
        for name in names:
            rows.append(
                compare(name, work, python=python, repeats=repeats, peer_only=peer_only, tell=tell)
            )
            result = report(rows, work, load)
            if out:  # after every method, so that a stopped benchmark keeps what it has
                out.write_text(json.dumps(result, indent=2) + "\n")
    _show(rows, result)
    failed = [row.method for row in rows if row.error]
    if failed:
        raise click.ClickException(f"{', '.join(failed)} failed; the reason is shown above.")


def _teller(progress: Progress) -> Callable[[str], None]:
    """Returns a function that shows what runs: live on a terminal, as plain lines elsewhere."""
    task = progress.add_task("")

    def tell(text: str) -> None:
        if progress.console.is_terminal:
            progress.update(task, description=text)
        else:
            progress.console.print(text)

    return tell


def _known(methods: str) -> list[str]:
    """Splits the list of names and refuses one that the peer does not offer."""
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
    """Returns the data folder as an absolute path, or says how to get Cora into it."""
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
    """Prints the table with the machine, the versions, the notes and the failures below it."""
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


main.add_command(gpu)


if __name__ == "__main__":
    main(prog_name="python -m bench")
