"""`atoll tune-clusters`: a proposal for the thresholds of GCFL's splits."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.cli.common import chosen_options, make_console, print_json, print_notes, written
from atoll.cli.options import (
    AS_JSON,
    EPOCHS,
    FEDERATION,
    MACHINE,
    PATH,
    SEED,
    SETTINGS,
    option,
    options,
)


@click.command(
    "tune-clusters",
    short_help="Propose when the clusters of gcfl should split.",
    epilog="For example: atoll tune-clusters --data molecules --protocol gcfl --rounds 50",
)
@click.argument("method", required=False)
@options(*FEDERATION)
@option("--rounds R", "Rounds without splits.  [default: 50]", int)
@options(EPOCHS, SEED, SETTINGS, *MACHINE)
@option("--grid", "List when other choices would split first.")
@options(option("--out DIR", "Folder for plot and numbers.", PATH), AS_JSON)
def tune_clusters(
    grid: bool,
    settings: tuple[str, ...],
    own: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    **given: object,
) -> None:
    """Run METHOD (default: gcfl) for a while without splits; propose eps1 and eps2."""
    from rich.text import Text

    from atoll.analyses import cluster_thresholds_view as view
    from atoll.analyses.cluster_thresholds import ROUNDS
    from atoll.analyses.cluster_thresholds import tune_clusters as tune
    from atoll.experiment.config import make_config
    from atoll.present.files import check_output, write_all
    from atoll.present.layout import layout
    from atoll.present.terminal import progress

    config = make_config(**{"method": "gcfl", **chosen_options(given, set=settings, own=own)})
    if out is not None:
        check_output(out)
    console = make_console(stderr=as_json)
    with progress(console, config.rounds or ROUNDS, "without splits") as move:
        found = tune(config, on_round=lambda done: move(1))
    print_notes(console, found.notes)
    console.print(layout(view.threshold_parts(found, grid=grid), gap=2))
    console.print("\nGo on with:")
    console.print(Text("  " + view.command(found)), soft_wrap=True)
    if out is not None:
        written(console, write_all(out, view.threshold_files(found)))
    if as_json:
        print_json(view.summary(found))
