"""`atoll run`: one method on one federation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from atoll.cli.common import chosen_options, fresh_folder, make_console, or_stopped, over_file
from atoll.cli.common import show_results as show
from atoll.cli.options import AS_JSON, FEDERATION, LOG, OUT, PATH, QUIET, TRAINING, option, options

FILES = (
    option(
        "--config FILE",
        "A TOML file of options, for example the config.toml of a saved run.",
        PATH,
        name="config_file",
    ),
    OUT,
    option("--resume DIR", "Continue the stopped run in DIR.", PATH, name="resume_from"),
    LOG,
    click.option("--save-every", type=float, default=10.0, hidden=True),
    AS_JSON,
    QUIET,
)


@click.command(
    short_help="Run a method on a federation and save the result.",
    epilog="For example: atoll run fedprox --data cora --clients 10 --set mu=0.1 --seeds 3",
)
@click.argument("method", required=False)
@options(*FEDERATION, *TRAINING, *FILES)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    settings: tuple[str, ...],
    own: tuple[str, ...],
    config_file: Path | None,
    out: Path | None,
    resume_from: Path | None,
    save_every: float,
    log: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    **given: object,
) -> None:
    """Run METHOD (default: fedavg) on a federation and save the result."""
    from atoll.experiment.config import make_config
    from atoll.experiment.run import resume, run_config
    from atoll.present.terminal import Watcher

    chosen = chosen_options(given, set=settings, own=own)
    watcher = Watcher(make_console(stderr=as_json or quiet), quiet=quiet)
    if resume_from is not None:
        _refuse_mixing({**chosen, "config": config_file, "out": out})
        result = or_stopped(
            ctx,
            watcher,
            resume_from,
            lambda: resume(resume_from, observer=watcher, save_every=save_every, log=log),
        )
    else:
        config = make_config(**over_file(config_file, chosen))
        folder = out or fresh_folder(f"{config.method}-{config.data}")
        result = or_stopped(
            ctx,
            watcher,
            folder,
            lambda: run_config(
                config, out=folder, observer=watcher, save_every=save_every, log=log
            ),
        )
    show([result], result.out, as_json=as_json, quiet=quiet)


def _refuse_mixing(given: Mapping[str, object]) -> None:
    from atoll.core.errors import ConfigError

    names = [name for name, value in given.items() if value is not None]
    if names:
        option = "--" + names[0].replace("_", "-")
        found = f"METHOD '{given['method']}'" if names[0] == "method" else option
        raise ConfigError(
            f"--resume continues a run with its own configuration, but {found} was given; leave "
            "everything out but --json and --quiet"
        )
