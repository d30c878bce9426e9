"""`atoll report`: runs and studies as one page that opens from disk, and their tables as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.core.files import write_atomically
from atoll.present.tables import check_file, write_tables
from atoll.report.collect import Collection, collect, main_table, other_tables
from atoll.report.page import page
from atoll.report.printed import printed_tables
from atoll.report.tuning import tuned_tables

__all__ = ["Collection", "collect", "write_report"]


def write_report(
    folders: Sequence[str | Path],
    out: str | Path | None,
    *,
    title: str | None = None,
    tables: Mapping[str, Path | None] | None = None,
) -> tuple[Collection, list[Path]]:
    """Write a page about finished runs, and their tables; return the content and the files.

    Args:
        folders: Folders of runs, of studies, or both.
        out: The page; None for none.
        title: Its heading; by default it names the runs.
        tables: Files for the result tables by form: "md", "tex", "csv".
    """
    files = {form: path for form, path in (tables or {}).items() if path is not None}
    for path in [*([Path(out)] if out is not None else []), *files.values()]:
        check_file(path)
    found = collect([Path(folder) for folder in folders])
    written = []
    if out is not None:
        write_atomically(Path(out), page(found, title).encode())
        written.append(Path(out))
    tables_of = [table for one in found.reproductions for table in printed_tables(one)]
    tables_of += tuned_tables(found.tried)
    tables_of += [main_table(found), *other_tables(found)] if found.shown else []
    return found, [*written, *write_tables(tables_of, files)]
