"""`atoll reproduce`: reproduce the papers' tables and figures, and compare the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from atoll.cli import common, options
from atoll.cli.claim import show_claim
from atoll.cli.options import PATH, command, option, repeatable

ONLY = (
    "Run only cells that match; columns are dataset, setting, clients, method and metric, and "
    "several values of one column are alternatives."
)
OUT = (
    "Save the study in this folder, and skip the runs that it already contains.  "
    "[default: atoll-runs/reproduce-PAPER]"
)


@command(
    "Reproduce a paper's table or figure and compare numbers.",
    click.Argument(["paper"], required=False),
    click.Argument(["item"], metavar="[TABLE|FIGURE]", required=False),
    repeatable("--only COLUMN=VALUE,...", ONLY),
    option("--seeds N", "Run every cell with N seeds.", int, default=3),
    option("--both", "Also run every cell under the protocol strict."),
    option("--rounds R", "Train for only R rounds, as a quick test without a verdict.", int),
    option("--tex", "Also write a LaTeX table."),
    option("--dry-run", "List the runs and the missing data, but run nothing."),
    options.DATA_ROOT,
    options.DEVICE,
    option("--out DIR", OUT, PATH),
    *options.STUDY,
    example="atoll reproduce fedath table1 --only dataset=Cora,clients=10 --both",
)
def reproduce(
    paper: str | None, item: str | None, out: Path | None, as_json: bool, quiet: bool, **given: Any
) -> None:
    """Reproduce a TABLE or FIGURE of PAPER (fedath, fedaux, fediih, fedtad, gcfl).

    Without arguments, the command lists all tables and figures. Write TABLE as table1 or 1, and
    FIGURE as fig1. `all` selects every table and figure of the paper.
    """
    from atoll.analyses.graph_sets import gcfl_table
    from atoll.cli.study_progress import StudyWatcher
    from atoll.present.tables import layout
    from atoll.studies.reproduce import printed
    from atoll.studies.reproduce import table as tables
    from atoll.studies.reproduce.figures import reproduce_figure
    from atoll.studies.reproduce.listing import dry_run_parts, items, listing_parts
    from atoll.studies.reproduce.recipes import PAPERS, read_paper

    console = common.make_console(stderr=as_json or quiet)
    tex, jobs, root, only = common.pop(given, "tex", "jobs", "data_root", "only").values()
    dry_run = given.pop("dry_run")
    if paper is None or item is None:
        names = PAPERS if paper is None else (read_paper(paper).name,)
        console.print(layout(listing_parts(names, root, given["seeds"])))
        return
    chosen = read_paper(paper)
    folder = out or Path("atoll-runs") / f"reproduce-{chosen.name}"
    wanted = tables.Wanted(tables.parse_only(only), root=root, **given)
    summaries: list[dict[str, Any]] = []

    def report_stop(stop: BaseException) -> None:
        click.echo(f"stopped; finished runs are in {folder}; run the same command again", err=True)

    for kind, number in items(chosen, item):
        if dry_run:
            console.print(layout([*dry_run_parts(chosen, kind, number, wanted), ""]))
            continue
        if kind == "table" and chosen.recipe.tables[number].from_data:
            show_claim(console, gcfl_table(number, root), folder)
            continue
        with common.stoppable(report_stop), StudyWatcher(console, quiet=quiet) as watcher:
            study = tables.PaperStudy(chosen, wanted, folder, watcher, jobs)
            if kind == "figure":
                figure = reproduce_figure(study, number)
                parts, paths, summary = figure.parts(), figure.paths, figure.summary()
            else:
                table = tables.reproduce_table(study, number)
                whole = tables.whole_table(folder, chosen, number, wanted.rounds)
                parts, summary = printed.table_parts(table, len(whole.rows)), printed.summary(table)
                paths = printed.write_table(whole, folder, tex=tex)
        if not quiet:
            console.print(layout(parts))
            common.print_written(console, paths)
        summaries.append(summary)
    if as_json and summaries:
        click.echo(json.dumps(summaries[0] if item.lower() != "all" else summaries))
    if any(summary.get("counts", {}).get("failed") for summary in summaries):
        click.get_current_context().exit(1)
