"""`atoll methods`: the list of methods, or the page of one."""

from __future__ import annotations

import click

from atoll.cli.common import make_console


@click.command(short_help="List the methods, or say everything about one.")
@click.argument("name", required=False)
def methods(name: str | None) -> None:
    """List the methods; with NAME, everything about one."""
    from atoll.present.catalogue import method_page, method_table

    make_console(stderr=False).print(method_table() if name is None else method_page(name))
