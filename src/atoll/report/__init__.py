"""Write runs and studies as one HTML page that opens from disk, and their tables as files."""

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
    """Write a page about runs and studies, and their tables. Return the content and the files.

    Without `out`, write only tables. `tables` maps formats ("md", "tex" or "csv") to files.
    """
    files = {form: path for form, path in (tables or {}).items() if path is not None}
    written = [] if out is None else [Path(out)]
    for path in (*written, *files.values()):
        check_file(path)
    found = collect([Path(folder) for folder in folders])
    for path in written:
        write_atomically(path, page(found, title).encode())
    tables_of = [table for one in found.reproductions for table in printed_tables(one)]
    tables_of += tuned_tables(found.tried)
    tables_of += [main_table(found), *other_tables(found)] if found.shown else []
    return found, [*written, *write_tables(tables_of, files)]
