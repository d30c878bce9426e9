"""`atoll watch`: how a run or a study goes that another process works on."""

from __future__ import annotations

import json
from pathlib import Path

import click

from atoll.cli.common import make_console
from atoll.cli.options import PATH, option


@click.command(
    short_help="Watch a run or a study of another process.",
    epilog="For example: atoll watch atoll-runs/20260101-120000-tune-fedavg-cora",
)
@click.argument("folder", metavar="DIR", type=PATH)
@option("--once", "Look once and end.")
@option("--every SECONDS", "How often to look.", click.FloatRange(min=0.1), default=1.0)
@option("--json", "Look once, and print one JSON object.", name="as_json")
def watch(folder: Path, once: bool, every: float, as_json: bool) -> None:
    """Watch the run or study in DIR from its files alone, until it is finished."""
    from atoll.experiment.watch import Watch
    from atoll.present.watch import follow, plain, seen_text

    watched = Watch(folder)
    if as_json:
        click.echo(json.dumps(plain(watched.look())))
    elif once:
        make_console(stderr=False).print(seen_text(watched.look()))
    else:
        try:
            follow(watched, make_console(stderr=False), every)
        except KeyboardInterrupt:
            return  # the user has seen enough
