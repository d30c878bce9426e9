"""`atoll data`: fetch and check data sets."""

from __future__ import annotations

import click

from atoll.cli.common import AtollSubgroup, say
from atoll.cli.options import DATA_ROOT, option


@click.group(cls=AtollSubgroup)
def data() -> None:
    """Fetch and check data sets."""


@data.command()
@click.argument("names", nargs=-1, required=True)
@option(
    "--mirror DIR|URL", "Where NAME.tar.xz is.  [default: ATOLL_MIRROR, else the public source]"
)
@option("--data-root DIR", "Where to put them.  [default: ATOLL_DATA]")
@option("--force", "Replace what is there.")
def fetch(names: tuple[str, ...], mirror: str | None, data_root: str | None, force: bool) -> None:
    """Get data sets, or GCFL's groups of them, from their public source or from a mirror."""
    from atoll.data.public.fetch import fetch as fetch_one
    from atoll.data.public.registry import sets_of_group

    wanted = [one for name in names for one in sets_of_group(name) or (name,)]
    for name in wanted:
        folder = fetch_one(name, data_root, mirror, force=force, progress=say)
        click.echo(f"{name}: ready in {folder}")


@data.command()
@DATA_ROOT
@click.pass_context
def check(ctx: click.Context, data_root: str | None) -> None:
    """Load what is present and compare it with the published counts."""
    from atoll.data.public.fetch import check as check_all

    found = [row for row in check_all(data_root, progress=say) if row[1] or row[2]]
    for name, _, problem in found:
        click.echo(f"{name}: {problem or 'as published'}")
    if not found:
        click.echo("no data set is here; get one with: atoll data fetch NAME")
    if any(problem for _, _, problem in found):
        ctx.exit(2)
