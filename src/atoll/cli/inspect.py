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
    from atoll.analyses.inspect import inspection_files, inspection_tables
    from atoll.data.measure.heterogeneity import describe
    from atoll.experiment.config import make_config
    from atoll.experiment.problem import Problem, nearly_single_class, need_one_graph
    from atoll.present.files import check_output, write_all
    from atoll.present.layout import layout

    config = make_config(**chosen_options(given, own=own))
    if out is not None:
        check_output(out)
    made = Problem.of(config).divide(config.seed)
    need_one_graph(made.federation)
    console = make_console(stderr=False)
    print_notes(console, [*made.notes, *nearly_single_class(made.federation)])
    found = describe(made.federation, seed=config.seed)
    console.print(layout(inspection_tables(found), framed="center"))
    if out is not None:
        paths = write_all(out, inspection_files(found, made.federation))
        console.print(layout([f"Written: {', '.join(map(str, paths))}"]))
