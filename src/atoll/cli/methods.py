"""`atoll methods`: the list of methods, or the page of one."""

from __future__ import annotations

import click

from atoll.cli.common import make_console


@click.command(short_help="List the methods, or say everything about one.")
@click.argument("name", required=False)
def methods(name: str | None) -> None:
    """List the methods; with NAME, everything about one."""
    from atoll.present.catalogue import method_page, method_table
    from atoll.present.tables import rich_table
    from atoll.studies.baselines import BASELINES, baseline_page, baseline_table

    console = make_console(stderr=False)
    if name is None:
        console.print(method_table())
        console.print(rich_table(baseline_table(), framed="left"))
    elif name.lower() in BASELINES:
        console.print(baseline_page(name.lower()), markup=False, highlight=False)
    else:
        console.print(method_page(name))
