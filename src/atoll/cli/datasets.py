"""`atoll datasets`: the list of data sets, or the page of one."""

from __future__ import annotations

import click

from atoll.cli.common import make_console
from atoll.cli.options import DATA_ROOT


@click.command(short_help="List the data sets, or say everything about one.")
@click.argument("name", required=False)
@DATA_ROOT
def datasets(name: str | None, data_root: str | None) -> None:
    """List the data sets; with NAME, size, source and where it is looked for."""
    from atoll.present.catalogue import dataset_page, dataset_table

    page = dataset_table(data_root) if name is None else dataset_page(name, data_root)
    make_console(stderr=False).print(page)
