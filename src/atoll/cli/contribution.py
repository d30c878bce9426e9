"""`atoll contribution`: the effect of one client's participation on each class."""

from __future__ import annotations

import json
from pathlib import Path

import click

from atoll.cli.common import chosen_options, make_console, print_notes, written
from atoll.cli.options import (
    AS_JSON,
    EPOCHS,
    FEDERATION,
    PATH,
    ROUNDS,
    SEED,
    SEEDS,
    SETTINGS,
    option,
    options,
)


@click.command(
    short_help="Show what one client's participation does to each class.",
    epilog="For example: atoll contribution --data cora --clients 3 --client 0 --seeds 5",
)
@options(*FEDERATION)
@option("--method NAME", "One with a global model.  [default: fedavg]")
@option("--client K", "Number of the client in question.", int, default=0)
@options(ROUNDS, EPOCHS, SETTINGS, SEEDS, SEED)
@option(
    "--vary WHAT",
    "One kind of difference alone: nodes (no edges), topology (one client's nodes, more "
    "random edges at each client), class-topology (random edges at other classes), or none.",
    default="none",
)
@option("--ratio R", "Random edges of a topology, as a share of its edges.  [default: 0.5]", float)
@options(option("--out DIR", "Folder for plot and numbers.", PATH), AS_JSON)
def contribution(
    client: int,
    vary: str,
    ratio: float | None,
    settings: tuple[str, ...],
    own: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    **given: object,
) -> None:
    """Train with and without one client: what does it do to each class?"""
    from atoll.analyses import contribution_show as show
    from atoll.analyses.contribution import contribution as compare
    from atoll.experiment.config import make_config
    from atoll.present.plots import check_output

    config = make_config(**chosen_options(given, set=settings, own=own))
    if out is not None:
        check_output(out)
    console = make_console(stderr=as_json)
    with show.progress(console, config) as on_round:
        found = compare(config, client=client, vary=vary, ratio=ratio, on_round=on_round)
    print_notes(console, found.notes)
    console.print(show.contribution_tables(found))
    if out is not None:
        written(console, show.write_contribution(found, out))
    if as_json:
        click.echo(json.dumps(show.summary(found)))
