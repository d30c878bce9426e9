"""CPU seconds of a round in two source trees of Atoll, which alternate round by round."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.processes import RunError, environment

RUNNER = Path(__file__).with_name("rounds_runner.py")
WARM_UP = 2  # rounds that the later ones exclude: AdaFGL's step 2 starts in the second
CORA = ("--data", "cora", "--clients", "10", "--partition", "louvain", "--epochs", "3")
PLUS = ("--protocol", "gcfl", "--set", "preset=plus")
WORK = {
    "fedavg": CORA,
    "fedtad": (*CORA, "--set", "iterations=5"),
    "gcfl": ("--data", "molecules", *PLUS),
    "gcfl:proteins": ("--data", "PROTEINS", "--clients", "10", *PLUS),
    "fedsage+": CORA,
    "adafgl": (*CORA, "--set", "federated_rounds=1"),
}
"""The options of each case. A case is a method, or a method and its data."""


@click.command()
@click.option("--data-root", envvar="ATOLL_DATA", type=click.Path(path_type=Path), required=True)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder src of the earlier code.",
)
@click.option("--methods", default=",".join(WORK), show_default=True, help="Comma-separated.")
@click.option("--rounds", default=8, show_default=True, type=click.IntRange(min=WARM_UP + 1))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1))
def rounds(*, data_root: Path, against: Path, methods: str, rounds: int, threads: int) -> None:
    """Compare the CPU seconds of a round with earlier code, alternating round by round.

    The table has the first round, in which FedSage+ trains its generators, and the fastest of the
    rounds after the second.
    """
    if not against.is_dir():  # otherwise both sides would run the same code
        raise click.ClickException(f"the folder '{against}' does not exist.")
    drawn = Table(title=f"CPU seconds of a round, {threads} thread(s)")
    for heading in (
        "method",
        "first: old",
        "new",
        "ratio",
        "later: old",
        "new",
        "ratio",
        "accuracy",
    ):
        drawn.add_column(heading, justify="right")
    for name in methods.split(","):
        if name not in WORK:
            raise click.ClickException(f"unknown method '{name}'; choose from {', '.join(WORK)}.")
        options = (*WORK[name], "--data-root", str(data_root.absolute()))
        sources = (against.absolute(), Path(__file__).parents[1] / "src")
        old, new = in_turn(name, options, sources, rounds, threads)
        cells = []
        for a, b in ((old[0], new[0]), (min(old[WARM_UP:-1]), min(new[WARM_UP:-1]))):
            cells += [f"{a:.4f}", f"{b:.4f}", f"{a / b:.2f}x"]
        drawn.add_row(name, *cells, f"{old[-1]:.4f}, {new[-1]:.4f}")
        Console(stderr=True).print(f"{name}: {' '.join(cells)}", highlight=False)
    Console().print(drawn)


def in_turn(
    method: str, options: tuple[str, ...], sources: tuple[Path, Path], rounds: int, threads: int
) -> list[list[float]]:
    """Return the seconds of all rounds, then the test accuracy, for each source."""
    name, how = method.partition(":")[0], ("--seeds", "1", "--device", "cpu")
    shared = (name, *options, "--rounds", str(rounds), *how)
    with ExitStack() as stack:
        sides = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(RUNNER), "run", *shared, "--json", "--quiet"],
                    # Each side has its own folder: runs of the same second have the same name.
                    cwd=stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")),
                    env={**environment(threads), "PYTHONPATH": str(source)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for source in sources
        ]
        found: list[list[float]] = [[], []]
        for number in range(rounds + 1):  # the last answer is the accuracy
            for side, answers in zip(sides, found, strict=True):
                assert side.stdin is not None
                assert side.stdout is not None
                if number < rounds:
                    side.stdin.write("\n")
                    side.stdin.flush()
                answer = side.stdout.readline()
                if not answer:
                    raise RunError(f"{method} ended early; its last lines are above.")
                answers.append(float(answer))
    return found
