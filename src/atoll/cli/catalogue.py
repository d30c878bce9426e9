"""`atoll methods` and `atoll datasets`: list all entries, or show the page of one."""

from __future__ import annotations

import click

from atoll.cli.common import make_console
from atoll.cli.options import DATA_ROOT, command

NAME = click.Argument(["name"], required=False)


@command("List all methods, or show the details of one.", NAME)
def methods(name: str | None) -> None:
    """List all methods. If NAME is given, show the details of that method."""
    from atoll.present.catalogue import method_page, method_table
    from atoll.present.terminal import noted_table
    from atoll.studies.baselines import BASELINES, SHORTHANDS, baseline_page, baseline_table

    console = make_console()
    if name is None:
        console.print(method_table())
        console.print(noted_table(baseline_table()))
    elif name.lower() in {**BASELINES, **SHORTHANDS}:
        console.print(baseline_page(name.lower()), markup=False, highlight=False)
    else:
        console.print(method_page(name))


@command("List all data sets, or show the details of one.", NAME, DATA_ROOT)
def datasets(name: str | None, data_root: str | None) -> None:
    """List all data sets. If NAME is given, show its size, its source and its folder."""
    from atoll.present.catalogue import dataset_page, dataset_table

    page = dataset_table(data_root) if name is None else dataset_page(name, data_root)
    make_console().print(page)
