"""`atoll partition`: a federation in one file."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.cli.common import chosen_options, make_console, print_notes
from atoll.cli.options import FEDERATION, PATH, SEED_OF_DATA, option, options


@click.command(
    short_help="Divide data among clients and save them in one file.",
    epilog="For example: atoll partition --data cora --clients 10 --out cora10.atoll, then "
    "atoll run fedavg --data cora10.atoll, here or elsewhere",
)
@options(
    *FEDERATION,
    SEED_OF_DATA,
    option("--out FILE", "The file to write; it must not exist.", PATH, required=True),
)
def partition(out: Path, own: tuple[str, ...], **given: object) -> None:
    """Divide data as a run would, and save the federation in one file (--data FILE)."""
    from rich.text import Text

    from atoll.experiment.config import make_config
    from atoll.experiment.problem import save_divided

    path, made = save_divided(make_config(**chosen_options(given, own=own)), out)
    console = make_console(stderr=False)
    print_notes(console, made.notes)
    size = path.stat().st_size / 1e6
    console.print(Text(f"{made.federation!r} saved in {path} ({size:.1f} MB)"), soft_wrap=True)
