"""`atoll explain`: the edges that a method trusts."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.cli.common import make_console
from atoll.cli.options import PATH, SEED_OF_RUN, option, options


@click.command(short_help="Show which edges a method trusts (fedath).")
@click.argument("folder", metavar="RESULT_DIR", type=PATH)
@options(SEED_OF_RUN, option("--out DIR", "Where to write.  [default: RESULT_DIR/explain]", PATH))
@click.option("--form", type=click.Choice(["csv", "parquet"]), default="csv", show_default=True)
def explain(folder: Path, seed: int | None, out: Path | None, form: str) -> None:
    """Show which edges a method trusts (fedath): weights per client, plots, distances."""
    from atoll.analyses.explain import explain as explain_run
    from atoll.analyses.explain import explanation_files, explanation_table
    from atoll.present.files import write_all
    from atoll.present.tables import rich_table

    found = explain_run(folder, seed)
    to = out or folder / "explain"
    write_all(to, explanation_files(found, form))
    console = make_console(stderr=False)
    console.print(rich_table(explanation_table(found), framed="left"))
    console.print(f"[dim]one folder per client, summary.json and edges.png in {to}[/dim]")
