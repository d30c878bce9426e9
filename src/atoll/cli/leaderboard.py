"""`atoll leaderboard`: rank every method on every data set under the same rules."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli import common, options
from atoll.cli.options import PATH, command, option
from atoll.core.errors import ConfigError, check_name, counted

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.studies.leaderboard.leagues import Entry
    from atoll.studies.leaderboard.rows import Key, Row

LEAGUE = (
    "Follow the rules of these leagues: defaults (default hyper-parameters), tuned or ablation."
)
DATA = "Run only these data sets or paths, separated by commas.  [default: chosen by the league]"
METHODS = (
    "Run only these methods, separated by commas, also with settings (fedprox:mu=1).  "
    "[default: all methods of the league]"
)
PARTS = (
    "Run only these partitions of the league, separated by commas.  "
    "[default: all partitions that fit the data]"
)
CSV = "Add the row of each finished run to this file, and skip rows that it already contains."
REFERENCE = "reef"
OUT = "Save whole runs in this folder, so that a stopped run can resume.  [default: save only rows]"
MINUTES = "Stop after M minutes; the same command continues.  [default: no limit]"


@command(
    "Rank every method on every data set under the same rules.",
    option("--league NAME,...", LEAGUE, default="defaults"),
    option("--methods NAME,...", METHODS),
    option("--data NAME,...", DATA),
    option("--partitions NAME,...", PARTS),
    option("--seeds N", "Repeat every run with N seeds.  [default: chosen by the league]", int),
    option("--rounds R", "Train for R communication rounds.  [default: 100]", int),
    option("--epochs E", "Train for E local epochs per round.  [default: 3]", int),
    option("--against METHOD", f"Test all methods against METHOD.  [default: {REFERENCE}]"),
    option("--minutes M", MINUTES, float),
    option("--csv FILE", CSV, PATH, default="leaderboard.csv", name="path"),
    option("--page FILE", "Write a Markdown page of all rows of the CSV file, and a PNG.", PATH),
    option("--out DIR", OUT, PATH),
    option("--dry-run", "List the runs and their approximate time, but run nothing."),
    options.ALLOW,
    options.DATA_ROOT,
    options.DEVICE,
    options.JOBS,
    options.QUIET,
    example="atoll leaderboard --data cornell --methods reef,fedavg,fedprox --seeds 3",
)
def leaderboard(league: str, path: Path, page: Path | None, dry_run: bool, **given: Any) -> None:
    """Run the experiments of a league that the CSV file lacks, and print the ranking.

    A league is a set of rules. A row is one method on one data set and partition, over all seeds.
    The command skips a row that the file contains with the same complete configuration. --minutes
    0 only ranks the rows of the file, which needs no data.
    """
    from atoll.present.tables import check_file
    from atoll.studies.compare.plan import plain_arm, split_names
    from atoll.studies.leaderboard.leagues import Wanted, chosen_rows, plan_league
    from atoll.studies.leaderboard.rows import read_rows

    how = common.pop(given, "minutes", "out", "jobs", "quiet")
    texts = common.pop(given, "methods", "data", "partitions")
    lists = {name: split_names(text) if text else [] for name, text in texts.items()}
    reference, seeds = common.pop(given, "against", "seeds").values()
    reference = plain_arm(reference) if reference else None
    wanted = Wanted(**lists, seeds=seeds, options=common.chosen_options(given))
    check_file(path)
    if page is not None:
        _check_page(page)
    leagues, rows = split_names(league), read_rows(path)
    console, failed = common.make_console(), list[str]()
    if how["minutes"] == 0 and not dry_run:  # only rank, which needs no data
        _check_exists(path)
        found = chosen_rows(list(rows.values()), leagues, wanted)
        names = {row.method for row in found}
        known = f"{len(found)} of {counted(len(rows), 'row')} of {path} are ranked"
    else:
        plans = [plan_league(name, wanted) for name in leagues]
        entries = [entry for one, _ in plans for entry in one]
        notes = [note for _, own in plans for note in own]
        names = {one.run.labels["method"] for one in entries}
    if reference is not None:
        check_name("method to test against", reference, names)
    if dry_run:
        _show_plan(console, entries, rows, notes)
        return
    if how["minutes"] != 0:
        if not how["quiet"]:
            common.print_notes(console, notes)
        _run(console, entries, path, failed, **how)
        rows = read_rows(path)
        found = [rows[one.key] for one in entries if one.key in rows]
        count = sum(one.is_known(rows) for one in entries)
        known = f"{count} of {counted(len(entries), 'row')} are in {path}"
    if not how["quiet"]:
        _show(console, found, reference or REFERENCE)
    if page is not None:
        _write_page(page, list(rows.values()), reference or REFERENCE)
    click.echo(known, err=True)
    for problem in failed:
        click.echo(f"failed: {problem}", err=True)
    if failed:
        click.get_current_context().exit(1)


def _check_exists(path: Path) -> None:
    from atoll.studies.leaderboard.leagues import RUN_FIRST

    if not path.exists():
        raise ConfigError(f"the CSV file '{path}' does not exist; {RUN_FIRST}")


def _check_page(page: Path) -> None:
    """Raise an error if the page or its picture cannot be written."""
    from atoll.present.chart_png import need_matplotlib
    from atoll.present.tables import check_file

    if page.suffix == ".png":
        raise click.UsageError(
            "--page writes Markdown, and a PNG beside it; give a name like FILE.md"
        )
    for file in (page, page.with_suffix(".png")):
        check_file(file)
    need_matplotlib()


def _write_page(page: Path, rows: Sequence[Row], reference: str) -> None:
    """Write the Markdown page of all rows, and its picture."""
    from atoll.core.files import write_atomically
    from atoll.present.chart_png import image
    from atoll.studies.leaderboard.leagues import read_leagues
    from atoll.studies.leaderboard.page import page_text, picture

    about, drawn = (rows, read_leagues(), reference), page.with_suffix(".png")
    write_atomically(page, page_text(*about, drawn.name).encode())
    if (chart := picture(*about)) is not None:
        write_atomically(drawn, image(chart, "png"))


def _run(
    console: Console,
    entries: Sequence[Entry],
    path: Path,
    failed: list[str],
    *,
    minutes: float | None,
    quiet: bool,
    **how: Any,
) -> None:
    """Run the missing rows until they are finished or the time is over."""
    from atoll.cli.study_progress import StudyWatcher
    from atoll.experiment.run import Stopped
    from atoll.studies.leaderboard.runner import run_entries

    def report(stop: BaseException) -> None:
        click.echo("stopped; finished rows are kept, and the same command continues", err=True)

    seconds = None if minutes is None else 60 * minutes
    watcher = StudyWatcher(console, quiet=quiet, seconds=seconds)
    with common.stoppable(report), watcher:
        try:
            run_entries(entries, path, failed, observer=watcher, **how)
        except Stopped as stop:
            if watcher.stopping:  # the user stopped it
                raise
            report(stop)


def _show_plan(
    console: Console, entries: Sequence[Entry], rows: Mapping[Key, Row], notes: Sequence[str]
) -> None:
    """Print a line for each data set and partition, and the time of all missing runs."""
    from atoll.core.errors import counted
    from atoll.present.tables import layout, make_table, quiet
    from atoll.present.terminal import duration
    from atoll.studies.study_run import cost_of

    lines, whole, count = list[list[object]](), 0.0, 0
    for key, group in itertools.groupby(entries, lambda one: one.key[:3]):
        own = list(group)
        lacking = [one for one in own if not one.is_known(rows)]
        runs = [run for one in lacking for run in (one.run, *one.trials.values())]
        seconds = sum(cost_of(run.config) for run in runs)
        lines.append([*key, len(own), len(runs), duration(seconds) if runs else "none"])
        whole, count = whole + seconds, count + len(runs)
    table = make_table(("league", "data", "partition", "rows", "runs", "time"), lines, left=3)
    total = f"{counted(len(entries), 'row')}, {counted(count, 'run')} to do, {duration(whole)} of "
    total += "one process, approximately; several processes share the work."
    console.print(layout([table, quiet(total), *map(quiet, notes)]))


def _show(console: Console, rows: Sequence[Row], reference: str) -> None:
    from atoll.present.terminal import noted_table
    from atoll.studies.leaderboard.leagues import read_leagues
    from atoll.studies.leaderboard.page import league_tables

    recipe = read_leagues()
    for name, league in recipe.leagues.items():
        for group, tables in league_tables(rows, recipe, name, reference):
            console.print(f"[bold]{league.title}: {group}[/]\n")
            for table in tables:
                console.print(noted_table(table))
