"""`atoll reproduce`: the tables and figures of the papers again, beside what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.common import make_console, written
from atoll.cli.options import AS_JSON, DATA_ROOT, DEVICE, JOBS, PATH, QUIET, option, options

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.studies.reproduce.recipes import Paper
    from atoll.studies.reproduce.table import Wanted


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
    from atoll.studies.reproduce.listing import items, listing
    from atoll.studies.reproduce.recipes import PAPERS, read_paper
    from atoll.studies.reproduce.table import Wanted, parse_only

    console = make_console(stderr=as_json or quiet)
    if paper is None or item is None:
        names = PAPERS if paper is None else (read_paper(paper).name,)
        console.print(listing(names, data_root, seeds))
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
    from atoll.studies.reproduce import show
    from atoll.studies.reproduce.figures import reproduce_figure
    from atoll.studies.reproduce.history import whole_table
    from atoll.studies.reproduce.table import reproduce_table

    kind, number = item
    watcher = StudyWatcher(console, quiet=quiet)
    try:
        with watcher:
            if kind == "figure":
                drawn = reproduce_figure(paper, number, wanted, folder, observer=watcher, jobs=jobs)
                text, paths, said = show.figure_text(drawn), drawn.paths, drawn.summary()
            else:
                table = reproduce_table(paper, number, wanted, folder, observer=watcher, jobs=jobs)
                whole = whole_table(folder, paper, number, wanted.rounds)
                text, said = show.reproduction_table(table, whole), show.summary(table)
                paths = show.write_table(whole, folder, tex=tex)
    except (Stopped, KeyboardInterrupt):
        click.echo(f"stopped; what is done is in {folder}; the same command goes on", err=True)
        ctx.exit(130)
    if not quiet:
        console.print(text)
        written(console, paths)
    return said
