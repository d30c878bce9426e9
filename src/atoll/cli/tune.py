"""`atoll tune`: search hyper-parameters on validation scores, then test the best once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli import common, options
from atoll.cli.options import PATH, Strings, command, option, repeatable

if TYPE_CHECKING:
    from atoll.studies.tune.result import TuningRequest

OUT = (
    "Save the study in this folder, where the same command continues it.  "
    "[default: a new folder in atoll-runs]"
)
SEARCH = (
    "Search KEY in this range (1..5, 1e-4..1e-1:log or 32,64,128), which replaces the method's "
    "range of KEY or adds one; repeatable."
)


@command(
    "Search a method's hyper-parameters on validation scores.",
    options.METHODS,
    *options.FEDERATION,
    option("--trials N", "Try N configurations of each method.  [default: 30]", int),
    option("--seeds K", "Test the best settings with K new seeds; 0: no test.  [default: 5]", int),
    option("--trial-seeds N", "Run each trial with N seeds.  [default: 1]", int),
    option("--preset NAME", "Search this grid; paper is the grid of the method's paper."),
    repeatable("--search KEY=RANGE", SEARCH),
    option(
        "--pruner NAME",
        "Stop bad trials early (median), or run all to their end (none).  [default: median]",
    ),
    *(one for one in options.TRAINING if one is not options.SEEDS),
    options.CONFIG,
    option("--out DIR", OUT, PATH),
    options.OVERWRITE,
    options.resume("Resume the tuning in DIR; a larger --trials adds trials."),
    *options.STUDY,
    example="atoll tune fedavg fedprox --data cora --clients 10 --trials 40",
)
def tune(out: Path | None, overwrite: bool, as_json: bool, quiet: bool, **given: Any) -> None:
    """Search METHOD's hyper-parameters on validation scores, then test the best once.

    Each of several methods gets the same budget. The search does not read test data.
    """
    from atoll.cli.study_progress import TuneWatcher
    from atoll.present.files import check_output
    from atoll.present.tables import layout
    from atoll.studies.tune.result import commands, summary, tuning_parts, write_tuning
    from atoll.studies.tune.tuning import run_tuning

    how = common.pop(given, "jobs") | {"overwrite": overwrite}
    request, folder = _request(out=out, overwrite=overwrite or None, **given)
    check_output(folder)
    watcher = TuneWatcher(common.make_console(stderr=as_json or quiet), quiet=quiet)

    def report_stop(stop: BaseException) -> None:
        saved = f"; continue with: atoll tune --resume {folder}" if folder.exists() else ""
        click.echo(f"stopped{saved}", err=True)

    with common.stoppable(report_stop), watcher:
        found = run_tuning(request, folder, observer=watcher, **how)
    paths = write_tuning(found, folder)
    if not quiet:
        watcher.console.print(layout(tuning_parts(found)))
        common.print_next(watcher.console, commands(found))
        common.print_written(watcher.console, paths)
    if as_json:
        click.echo(json.dumps(summary(found)))
    if found.failed:
        where = folder / "tune.json"
        click.echo(f"failed: {', '.join(found.failed)}; see the reasons in {where}", err=True)
        click.get_current_context().exit(1)


def _request(
    methods: Strings, config_file: Path | None, out: Path | None, **given: Any
) -> tuple[TuningRequest, Path]:
    """Return the search that the options describe, and its folder."""
    import msgspec

    from atoll.experiment.config import make_config
    from atoll.methods import method_name
    from atoll.studies.tune.result import TuningRequest
    from atoll.studies.tune.tuning import read_request

    folder, chosen = common.to_resume(given.pop("resume_from")), common.chosen_options(given)
    overwrite = {"overwrite": chosen.pop("overwrite", None)}
    budget = {"trials": chosen.pop("trials")} if "trials" in chosen else {}
    if folder is not None:
        others = {**chosen, **overwrite, "methods": methods, "config": config_file, "out": out}
        common.refuse_beside_resume("tuning", others, "--trials, --jobs, --json and --quiet")
        return msgspec.structs.replace(read_request(folder), **budget), folder
    about_search = chosen.keys() & {"preset", "search", "pruner", "seeds"}
    search = budget | {name: chosen.pop(name) for name in about_search}
    trial_seeds = chosen.pop("trial_seeds", 1)
    whole = common.over_file(config_file, chosen)
    names = tuple(map(method_name, methods or (whole.get("method", "fedavg"),)))
    config = make_config(**{**whole, "method": names[0], "seeds": trial_seeds})
    request = TuningRequest(methods=names, config=config, **search)
    return request, out or common.fresh_folder(f"tune-{'-'.join(names)}-{config.data}")
