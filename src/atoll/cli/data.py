"""`atoll data` and `atoll partition`: fetch and check data sets, divide one among clients."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from atoll.cli.common import AtollSubgroup, config_of, make_console, print_notes, print_text
from atoll.cli.options import DATA_ROOT, FEDERATION, PATH, SEED_OF_DATA, Strings, command, option

MIRROR = "Where NAME.tar.xz is.  [default: ATOLL_MIRROR, else the public source]"


@click.group(cls=AtollSubgroup)
def data() -> None:
    """Fetch and check data sets."""


@data.command(
    params=[
        click.Argument(["names"], nargs=-1, required=True),
        option("--mirror DIR|URL", MIRROR),
        option("--data-root DIR", "Where to put them.  [default: ATOLL_DATA]"),
        option("--force", "Replace what is there."),
    ]
)
def fetch(names: Strings, mirror: str | None, data_root: str | None, force: bool) -> None:
    """Get data sets, or GCFL's groups of them, from their public source or from a mirror."""
    from atoll.data.public.fetch import fetch as fetch_one
    from atoll.data.public.registry import sets_of_group

    progress = partial(click.echo, err=True)
    wanted = [one for name in names for one in sets_of_group(name) or (name,)]
    for name in wanted:
        folder = fetch_one(name, data_root, mirror, force=force, progress=progress)
        click.echo(f"{name}: ready in {folder}")


@data.command(params=[DATA_ROOT])
@click.pass_context
def check(ctx: click.Context, data_root: str | None) -> None:
    """Load what is present and compare it with the published counts."""
    from atoll.data.public.fetch import check as check_all

    progress = partial(click.echo, err=True)
    found = [row for row in check_all(data_root, progress=progress) if row[1] or row[2]]
    for name, _, problem in found:
        click.echo(f"{name}: {problem or 'as published'}")
    if not found:
        click.echo("no data set is here; get one with: atoll data fetch NAME")
    if any(problem for _, _, problem in found):
        ctx.exit(2)


@command(
    "Divide data among clients and save them in one file.",
    *FEDERATION,
    SEED_OF_DATA,
    option("--out FILE", "The file to write; it must not exist.", PATH, required=True),
    example="atoll partition --data cora --clients 10 --out cora10.atoll, then "
    "atoll run fedavg --data cora10.atoll, here or elsewhere",
)
def partition(out: Path, **given: object) -> None:
    """Divide data as a run would, and save the federation in one file (--data FILE)."""
    from atoll.experiment.problem import save_divided

    path, made = save_divided(config_of(given), out)
    console = make_console()
    print_notes(console, made.notes)
    size = path.stat().st_size / 1e6
    print_text(console, f"{made.federation!r} saved in {path} ({size:.1f} MB)", style="")
