"""`atoll inspect`: the differences between the clients of a federation."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.cli.common import chosen_options, make_console, print_notes
from atoll.cli.options import FEDERATION, PATH, SEED_OF_DATA, option, options


@click.command()
@options(*FEDERATION, SEED_OF_DATA, option("--out DIR", "Folder for plots and numbers.", PATH))
def inspect(out: Path | None, own: tuple[str, ...], **given: object) -> None:
    """Show what makes the clients of a federation differ."""
    from atoll.analyses.inspect import inspect_federation
    from atoll.experiment.config import make_config
    from atoll.experiment.folder import check_folder
    from atoll.experiment.problem import Problem, nearly_single_class, need_one_graph

    given_config = make_config(**chosen_options(given, own=own))
    if out is not None:
        check_folder(out, resuming=True)
    made = Problem.of(given_config).divide(given_config.seed)
    need_one_graph(made.federation)
    console = make_console(stderr=False)
    print_notes(console, [*made.notes, *nearly_single_class(made.federation)])
    console.print(inspect_federation(made.federation, out, seed=given_config.seed))
