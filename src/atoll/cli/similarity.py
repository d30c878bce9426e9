"""`atoll similarity`: the similarities that methods see, beside those of the data."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.cli.common import make_console, written
from atoll.cli.options import PATH, option, options


@click.command(
    short_help="Compare the similarities that methods see with the data's.",
    epilog="For example: atoll similarity fediih-run fedpub-run fedgta-run",
)
@click.argument("folders", metavar="RUN_DIR...", nargs=-1, required=True, type=PATH)
@options(
    option("--seed S", "Which of the runs' seeds.  [default: first]", int),
    option("--out DIR", "Where to write.  [default: similarity in the first RUN_DIR]", PATH),
)
def similarity(folders: tuple[Path, ...], seed: int | None, out: Path | None) -> None:
    """Compare how alike clients seem to fediih, fedpub or fedgta with how alike their data are."""
    from atoll.analyses.similarity import read_similarities, similarity_files, similarity_table
    from atoll.present.files import check_output, write_all
    from atoll.present.tables import rich_table

    to = out or folders[0] / "similarity"
    if folders[0].exists():
        check_output(to)
    found = read_similarities(folders, seed)
    console = make_console(stderr=False)
    console.print(rich_table(similarity_table(found), framed="left"))
    written(console, write_all(to, similarity_files(found)))
