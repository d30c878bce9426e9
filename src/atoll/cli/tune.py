"""`atoll tune`: search hyper-parameters on validation scores, then test the best once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.common import chosen_options, fresh_folder, make_console, over_file, written
from atoll.cli.options import (
    AS_JSON,
    COMPAT,
    DP,
    EPOCHS,
    EVALUATE,
    FEDERATION,
    FRACTION,
    JOBS,
    MACHINE,
    PATH,
    QUIET,
    ROUNDS,
    SEED,
    SETTINGS,
    option,
    options,
)

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.studies.tune.result import Asked, TuningResult

_TUNING = (
    option("--trials N", "Configurations to try, for each method.  [default: 30]", int),
    option("--seeds K", "Fresh seeds of the final test; 0: no test.  [default: 5]", int),
    option("--trial-seeds N", "Seeds of each trial.  [default: 1]", int),
    option("--preset NAME", "paper: search the values that the method's paper tried."),
    option(
        "--search KEY=RANGE",
        "Search KEY in 1..5, 1e-4..1e-1:log or 32,64,128 instead of, or beside, the "
        "method's own ranges; repeatable.",
        multiple=True,
    ),
    option("--pruner NAME", "median gives up bad trials early, none does not.  [default: median]"),
)
_TRAINING = (ROUNDS, EPOCHS, FRACTION, SEED, SETTINGS, DP, EVALUATE, COMPAT)
_FILES = (
    option(
        "--config FILE",
        "A TOML file of options, for example of a saved run.",
        PATH,
        name="config_file",
    ),
    option(
        "--out DIR",
        "Folder of the study; the same command continues there.  [default: a new one]",
        PATH,
    ),
    option(
        "--resume DIR",
        "Continue the tuning in DIR; --trials may add to it.",
        PATH,
        name="resume_from",
    ),
    JOBS,
    AS_JSON,
    QUIET,
)


@click.command(
    short_help="Search a method's hyper-parameters on validation scores.",
    epilog="For example: atoll tune fedavg fedprox --data cora --clients 10 --trials 40",
)
@click.argument("methods", metavar="METHOD...", nargs=-1)
@options(*FEDERATION, *_TUNING, *_TRAINING, *MACHINE, *_FILES)
@click.pass_context
def tune(
    ctx: click.Context,
    /,
    methods: tuple[str, ...],
    config_file: Path | None,
    out: Path | None,
    resume_from: Path | None,
    jobs: str,
    as_json: bool,
    quiet: bool,
    settings: tuple[str, ...],
    own: tuple[str, ...],
    search: tuple[str, ...],
    **given: object,
) -> None:
    """Search METHOD's hyper-parameters on validation scores, then test the best once.

    Several methods get the same budget each. Test data are not read before the end.
    """
    from rich.text import Text

    from atoll.cli.study_progress import TuneWatcher
    from atoll.experiment.run import Stopped
    from atoll.present.files import check_output
    from atoll.studies.tune.printed import commands, summary, write_tuning
    from atoll.studies.tune.tuning import run_tuning

    chosen = chosen_options(given, set=settings, own=own, search=search)
    asked, folder = _asked(methods, config_file, out, resume_from, chosen)
    check_output(folder)
    console = make_console(stderr=as_json or quiet)
    watcher = TuneWatcher(console, quiet=quiet)
    try:
        with watcher:
            found = run_tuning(asked, folder, observer=watcher, jobs=jobs)
    except (Stopped, KeyboardInterrupt):
        saved = f"; go on with: atoll tune --resume {folder}" if folder.exists() else ""
        click.echo(f"stopped{saved}", err=True)
        ctx.exit(130)
    paths = write_tuning(found, folder)
    if not quiet:
        _show(console, found)
        console.print("\nGo on with:")
        for line in commands(found):
            console.print(Text("  " + line), soft_wrap=True)
        written(console, paths)
    if as_json:
        click.echo(json.dumps(summary(found)))
    if found.failed:
        where = folder / "tune.json"
        click.echo(f"failed: {', '.join(found.failed)}; the notes in {where} say why", err=True)
        ctx.exit(1)


def _show(console: Console, found: TuningResult) -> None:
    """The tables of all methods, and their final tests."""
    from rich.text import Text

    from atoll.present.tables import rich_table
    from atoll.studies.tune.printed import final_table, trials_table

    for tuned in found.methods.values():
        table = trials_table(tuned)
        console.print(Text(f"{table.title}\n", style="bold"))
        console.print(rich_table(table))
        for note in table.notes:
            console.print(Text(note))
        console.print()
    final = final_table(found)
    console.print(rich_table(final))
    for line in ("", final.caption, *final.notes):
        console.print(Text(line, style="dim"))


def _asked(
    methods: tuple[str, ...],
    config_file: Path | None,
    out: Path | None,
    resume_from: Path | None,
    chosen: dict[str, Any],
) -> tuple[Asked, Path]:
    """What is asked for, and the folder for it."""
    import msgspec

    from atoll.core.errors import ConfigError
    from atoll.experiment.config import make_config
    from atoll.studies.tune.result import SEEDS, TRIALS, Asked
    from atoll.studies.tune.tuning import read_asked

    trials = chosen.pop("trials", None)
    if resume_from is not None:
        if chosen or methods or config_file or out:
            raise ConfigError(
                "--resume goes on with a tuning as it was begun; leave out everything but "
                "--trials, --jobs, --json and --quiet"
            )
        before = read_asked(resume_from)
        more = before.trials if trials is None else trials
        return msgspec.structs.replace(before, trials=more), resume_from
    how = {key: chosen.pop(key) for key in ("preset", "search", "pruner") if key in chosen}
    seeds, trial_seeds = chosen.pop("seeds", SEEDS), chosen.pop("trial_seeds", 1)
    whole = over_file(config_file, chosen)
    names = methods or (whole.get("method", "fedavg"),)
    config = make_config(**{**whole, "method": names[0], "seeds": trial_seeds})
    asked = Asked(
        methods=names,
        config=config,
        trials=TRIALS if trials is None else trials,
        seeds=seeds,
        **how,
    )
    return asked, out or fresh_folder(f"tune-{'-'.join(names)}-{config.data}")
