"""`atoll advise`: compare candidate methods in short runs, and recommend one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from atoll.cli import common, options
from atoll.cli.options import PATH, command, option

CANDIDATES = (
    "Compare these methods, separated by commas, with settings as fedprox:mu=0.1; repeatable.  "
    "[default: local, fedavg, fedprox, fedopt, fedpub, reef, and more while there is time]"
)


@command(
    "Recommend a method after short runs on validation data.",
    *options.FEDERATION,
    option("--minutes M", "Stop after about M minutes.", float, default=3.0),
    options.repeatable("--candidates NAME,...", CANDIDATES),
    *(options.ROUNDS, options.EPOCHS, options.SEED, options.METRIC, options.POSITIVE),
    options.DEVICE,
    option("--out DIR", "Write advise.json into this folder.", PATH),
    options.AS_JSON,
    options.QUIET,
    example="atoll advise --data my-graph/ --minutes 5",
)
def advise(out: Path | None, as_json: bool, quiet: bool, **given: Any) -> None:
    """Compare candidate methods on validation nodes, and recommend one with its expected gain.

    The command does not read test nodes. It estimates the gain on seeds that the selection did
    not use.
    """
    from atoll.cli.study_progress import StudyWatcher
    from atoll.experiment.folder import check_folder
    from atoll.present.files import plain_json, write_all
    from atoll.present.tables import layout
    from atoll.studies import advise as study
    from atoll.studies.compare.plan import split_names

    if out is not None:
        check_folder(out, resuming=True)
    minutes, names = given.pop("minutes"), given.pop("candidates")
    chosen = common.chosen_options(given)
    candidates = [one for text in names for one in split_names(text)] or None
    watcher = StudyWatcher(common.make_console(stderr=as_json or quiet), quiet=quiet)

    def report_stop(stop: BaseException) -> None:
        click.echo("stopped; nothing was saved", err=True)

    with common.stoppable(report_stop), watcher:
        found = study.advise(candidates, minutes=minutes, observer=watcher, **chosen)
    summary = plain_json(study.summary(found))
    if not quiet:
        watcher.console.print(layout(found.parts()))
        common.print_next(watcher.console, [found.command])
    if out is not None:
        common.print_written(watcher.console, write_all(out, {"advise.json": summary}))
    if as_json:
        click.echo(json.dumps(summary))
