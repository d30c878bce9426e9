"""`atoll contribution`: the effect of one client's participation on each class."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.cli.common import chosen_options, make_console, print_json, print_notes, written
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
    from atoll.analyses.contribution import contribution as compare
    from atoll.analyses.contribution_view import (
        contribution_files,
        contribution_parts,
        summary,
    )
    from atoll.experiment.config import make_config, resolve
    from atoll.present.files import check_output, write_all
    from atoll.present.layout import layout
    from atoll.present.terminal import progress

    config = make_config(**chosen_options(given, set=settings, own=own))
    if out is not None:
        check_output(out)
    console = make_console(stderr=as_json)
    rounds = resolve(config)[0].rounds or 1
    with progress(console, 2 * config.seeds * rounds) as move:

        def on_round(seed: int, takes_part: bool, done: int) -> None:
            which = f"seed {seed}, {'with' if takes_part else 'without'} the client"
            move(1, which)
            if not console.is_terminal and done == rounds:
                console.print(f"{which}: {done} rounds")

        found = compare(config, client=client, vary=vary, ratio=ratio, on_round=on_round)
    print_notes(console, found.notes)
    console.print(layout(contribution_parts(found)))
    if out is not None:
        written(console, write_all(out, contribution_files(found)))
    if as_json:
        print_json(summary(found))
