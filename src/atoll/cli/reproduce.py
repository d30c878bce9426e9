"""`atoll reproduce`: the tables and figures of the papers again, beside what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.common import make_console, written
from atoll.cli.options import AS_JSON, DATA_ROOT, DEVICE, JOBS, PATH, QUIET, option, options

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from atoll.studies.reproduce.figures import ReproducedFigure
    from atoll.studies.reproduce.recipes import Paper
    from atoll.studies.reproduce.table import Reproduction, Wanted


@click.command(
    short_help="Run a paper's table or figure again, beside the print.",
    epilog="For example: atoll reproduce fedath table1 --only dataset=Cora,clients=10 --both",
)
@click.argument("paper", required=False)
@click.argument("item", metavar="[TABLE|FIGURE]", required=False)
@option(
    "--only COLUMN=VALUE,...",
    "Some cells alone: dataset, setting, clients, method, metric; one column twice: either.",
    multiple=True,
)
@options(option("--seeds N", "Seeds.", int, default=3))
@option("--both", "Under protocol strict as well.")
@option("--rounds R", "Fewer rounds, for a quick look without a verdict.", int)
@option("--tex", "Write a LaTeX table, too.")
@options(
    DATA_ROOT,
    DEVICE,
    option(
        "--out DIR",
        "The study's folder; what is done there is not run again.  "
        "[default: atoll-runs/reproduce-PAPER]",
        PATH,
    ),
    JOBS,
    AS_JSON,
    QUIET,
)
@click.pass_context
def reproduce(
    ctx: click.Context,
    paper: str | None,
    item: str | None,
    only: tuple[str, ...],
    seeds: int,
    both: bool,
    rounds: int | None,
    tex: bool,
    data_root: str | None,
    device: str | None,
    out: Path | None,
    jobs: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run a TABLE or FIGURE of PAPER (fedath, fediih, fedtad, gcfl) again.

    Without arguments: what there is to reproduce. TABLE is table1 or 1, FIGURE is fig1, and `all`
    is every one of the paper.
    """
    from rich.console import Group
    from rich.text import Text

    from atoll.present.tables import rich_table
    from atoll.studies.reproduce.listing import items, listing
    from atoll.studies.reproduce.recipes import PAPERS, read_paper
    from atoll.studies.reproduce.table import Wanted, parse_only

    console = make_console(stderr=as_json or quiet)
    if paper is None or item is None:
        names = PAPERS if paper is None else (read_paper(paper).name,)
        tables, caption = listing(names, data_root, seeds)
        for table in tables:
            console.print(Group(Text(table.title, style="bold"), rich_table(table), Text()))
        console.print(Text(caption, style="dim"))
        return
    wanted = Wanted(parse_only(only), both, seeds, rounds, data_root, device)
    chosen = read_paper(paper)
    folder = out or Path("atoll-runs") / f"reproduce-{chosen.name}"
    found: list[dict[str, Any]] = []
    for one in items(chosen, item):
        said = _one(ctx, console, chosen, one, wanted, folder, jobs=jobs, tex=tex, quiet=quiet)
        found.append(said)
    if as_json:
        click.echo(json.dumps(found[0] if item.lower() != "all" else found))
    if any(one.get("counts", {}).get("failed") for one in found):
        ctx.exit(1)


def _one(
    ctx: click.Context,
    console: Console,
    paper: Paper,
    item: tuple[str, str],
    wanted: Wanted,
    folder: Path,
    *,
    jobs: str,
    tex: bool,
    quiet: bool,
) -> dict[str, Any]:
    """One table or figure: run, show, write; what `--json` says of it."""
    from atoll.cli.study_progress import StudyWatcher
    from atoll.experiment.run import Stopped
    from atoll.studies.reproduce.figures import reproduce_figure
    from atoll.studies.reproduce.history import whole_table
    from atoll.studies.reproduce.printed import summary, write_table
    from atoll.studies.reproduce.table import reproduce_table

    kind, number = item
    watcher = StudyWatcher(console, quiet=quiet)
    parts: list[RenderableType] = []
    try:
        with watcher:
            if kind == "figure":
                figure = reproduce_figure(
                    paper, number, wanted, folder, observer=watcher, jobs=jobs
                )
                parts, paths, said = _figure_text(figure), figure.paths, figure.summary()
            else:
                table = reproduce_table(paper, number, wanted, folder, observer=watcher, jobs=jobs)
                whole = whole_table(folder, paper, number, wanted.rounds)
                parts, said = _table_text(table, len(whole.rows)), summary(table)
                paths = write_table(whole, folder, tex=tex)
    except (Stopped, KeyboardInterrupt):
        click.echo(f"stopped; what is done is in {folder}; the same command goes on", err=True)
        ctx.exit(130)
    if not quiet:
        for part in parts:
            console.print(part)
        written(console, paths)
    return said


def _table_text(found: Reproduction, rows: int) -> list[RenderableType]:
    """The table, its summary, and the reasons of missing numbers; the files have so many rows."""
    from rich.text import Text

    from atoll.present.tables import rich_table
    from atoll.present.terminal import counted
    from atoll.studies.reproduce import printed

    about = Text(printed.how(found, printed.with_runs(found)))
    parts: list[RenderableType] = [Text(printed.heading(found), style="bold"), about, Text()]
    for place, table in enumerate(tables := printed.terminal_tables(found)):
        parts += [Text()] if place else []
        parts += [Text(table.title, style="bold")] if table.title else []
        parts.append(rich_table(table))
    parts += [Text()] if tables else []
    parts += [Text(line) for line in printed.summary_lines(found)]
    more = rows - len(found.rows)
    if more > 0:
        text = f"The files have {counted(more, 'more cell')} of this table, from earlier looks."
        parts.append(Text(text, style="dim"))
    return parts


def _figure_text(drawn: ReproducedFigure) -> list[RenderableType]:
    """The figure that was drawn, and what it lacks."""
    from rich.text import Text

    recipe = drawn.paper.recipe.figures[drawn.number]
    title = f"{drawn.paper.name}, figure {drawn.number}: {recipe.shows}"
    note = f"{recipe.note} " if recipe.note else ""
    return [
        Text(title, style="bold"),
        *([] if drawn.paths else [Text("Nothing to draw.")]),
        *(Text(f"not in it: {one}") for one in drawn.left_out),
        Text(f"{note}The printed figure has no numbers to compare with.", style="dim"),
    ]
