"""`atoll methods` and `atoll datasets`: the list of all, or the page of one."""

from __future__ import annotations

import click

from atoll.cli.common import make_console
from atoll.cli.options import DATA_ROOT, command

NAME = click.Argument(["name"], required=False)


@command("List the methods, or say everything about one.", NAME)
def methods(name: str | None) -> None:
    """List the methods; with NAME, everything about one."""
    from atoll.present.catalogue import method_page, method_table
    from atoll.present.tables import rich_table
    from atoll.studies.baselines import BASELINES, SHORTHANDS, baseline_page, baseline_table

    console = make_console()
    if name is None:
        console.print(method_table())
        console.print(rich_table(baseline_table(), framed="left"))
    elif name.lower() in {**BASELINES, **SHORTHANDS}:
        console.print(baseline_page(name.lower()), markup=False, highlight=False)
    else:
        console.print(method_page(name))


@command("List the data sets, or say everything about one.", NAME, DATA_ROOT)
def datasets(name: str | None, data_root: str | None) -> None:
    """List the data sets; with NAME, size, source and where it is looked for."""
    from atoll.present.catalogue import dataset_page, dataset_table

    page = dataset_table(data_root) if name is None else dataset_page(name, data_root)
    make_console().print(page)
