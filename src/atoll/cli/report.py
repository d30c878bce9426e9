"""`atoll report`: write runs and studies as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.cli.common import make_console, print_written
from atoll.cli.options import PATH, command, option


@command(
    "Write an HTML report and tables of runs or studies.",
    click.Argument(["folders"], metavar="DIR...", nargs=-1, required=True, type=PATH),
    option(
        "-o --out FILE",
        "Write the page to FILE.  [default: report.html, or no page if you request tables]",
        PATH,
    ),
    option("--title TEXT", "Set the heading of the page.  [default: names of methods and data]"),
    option("--md FILE", "Write the result tables as Markdown.", PATH),
    option("--tex FILE", "Write the result tables as LaTeX (booktabs).", PATH),
    option("--csv FILE", "Write the result tables as CSV.", PATH),
    example="atoll report my-study -o report.html --tex tables.tex",
)
def report(
    folders: tuple[Path, ...], out: Path | None, title: str | None, **tables: Path | None
) -> None:
    """Write the runs or studies in DIR... as one self-contained HTML page.

    DIR is the folder of a run, or of a study (atoll compare and others). The page works offline and
    on a phone.
    """
    from atoll.report import write_report

    ordered = {form: tables[form] for form in ("md", "tex", "csv")}
    page = out or (None if any(tables.values()) else Path("report.html"))
    found, paths = write_report(folders, page, title=title, tables=ordered)
    if found.missing:
        total = len(found.shown) + len(found.missing)
        names = ", ".join(f"{gap.name} ({gap.kind})" for gap in found.missing)
        click.echo(f"the report lacks {len(found.missing)} of {total} runs: {names}", err=True)
    print_written(make_console(), paths)
