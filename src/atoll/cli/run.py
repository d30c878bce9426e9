"""`atoll run`, `atoll demo` and `atoll watch`: train methods, and follow a running process."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from atoll.cli import common, options
from atoll.cli.options import PATH, command, option
from atoll.core.errors import ConfigError, counted
from atoll.experiment.status import StatusReader

NEWCOMER = (
    "Exclude one client from training (by name, by number, or `drawn` for a random client) and "
    "evaluate the trained model on it."
)


@command(
    "Run a method on a federation and save the result.",
    options.METHOD,
    *options.FEDERATION,
    *options.TRAINING,
    options.CONFIG,
    options.OUT,
    options.OVERWRITE,
    options.resume("Resume the stopped run in DIR; a larger --rounds extends a finished run."),
    option(
        "--from --from-run RUN", "Start with the model of a finished run.", PATH, name="from_run"
    ),
    option("--held-out-client NAME", NEWCOMER),
    options.LOG,
    option("--profile", "Print the wall time and the CPU time of each stage."),
    click.Option(["--save-every"], type=float, default=10.0, hidden=True),
    options.AS_JSON,
    options.QUIET,
    example="atoll run fedprox --data cora --clients 10 --set mu=0.1 --seeds 3",
)
def run(
    config_file: Path | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    profile: bool,
    **given: Any,
) -> None:
    """Run METHOD (default: fedavg) on a federation and save the result."""
    with common.without_collection():
        from atoll.core.clock import Clock
        from atoll.experiment.config import make_config
        from atoll.experiment.hardware import process_seconds
        from atoll.experiment.run import RunPlan, resume
        from atoll.present.terminal import Watcher, profile_table

    how = common.pop(given, "log", "save_every")
    how["clock"] = clock = Clock(on=profile, before=process_seconds())
    folder, chosen = common.to_resume(given.pop("resume_from")), common.chosen_options(given)
    watcher = Watcher(common.make_console(stderr=as_json or quiet), quiet=quiet)
    config = None
    if folder is not None:
        how["rounds"] = chosen.pop("rounds", None)
        others = chosen | {"config": config_file, "out": out, "overwrite": overwrite or None}
        common.refuse_beside_resume("run", others, "--rounds, --json and --quiet")
    else:
        if "from_run" in chosen:
            chosen["from_run"] = str(chosen["from_run"].absolute())
        config = make_config(**common.over_file(config_file, chosen))
        folder = out or common.fresh_folder(f"{config.method}-{config.data}")
        if overwrite and (folder / "progress.json").exists():
            now = StatusReader(folder).read()
            if now.cells.get("running") and not (now.gone or now.silent):
                raise ConfigError(f"another process works in '{folder}'; choose another --out")
    with common.stoppable(partial(_report_stop, folder)), watcher:
        if config is None:
            result = resume(folder, watcher, **how)
        else:
            result = RunPlan(config, folder, watcher, overwrite=overwrite, **how).run()
    common.show_results([result], result.out, as_json=as_json, quiet=quiet)
    if profile:
        common.make_console(stderr=as_json).print(profile_table(clock.read()))


def _report_stop(folder: Path, stop: BaseException) -> None:
    """Print the progress of a stopped run, and the command that continues it."""
    from atoll.experiment.run import Stopped

    how = "stopped at once"
    if isinstance(stop, Stopped):
        how = f"stopped after {counted(stop.rounds, 'round')} of seed {stop.seed}"
    if (folder / "config.toml").exists():
        how += f"; the run is saved in {folder}; continue with: atoll run --resume {folder}"
    click.echo(how, err=True)


@command(
    "Compare three methods on the built-in federation.",
    option("--rounds R", "Train for R communication rounds.", int, default=60),
    option("--seeds N", "Repeat each method with N seeds.", int, default=3),
    option("--clients K", "Set the number of clients.", int, default=5),
    options.OUT,
)
def demo(out: Path | None, **given: int) -> None:
    """Compare local training with two federated methods on the built-in federation."""
    with common.without_collection():
        from atoll.experiment.config import make_config
        from atoll.experiment.folder import check_folder
        from atoll.experiment.problem import FederationCache
        from atoll.experiment.run import RunPlan, Stopped
        from atoll.present.terminal import Watcher
        from atoll.studies.parallel import helped

    folder, results, divide = out or common.fresh_folder("demo"), [], FederationCache()
    # On this small graph the evaluator in FedATH's public code is better than the paper's version.
    fedath = {"evaluator": "gnn", "hsic": "trace/N", "entropy": "sum", "lam": 0.001}
    methods = {"local": {}, "fedavg": {}, "fedath": fedath}
    configs = [make_config(method=name, set=set_, **given) for name, set_ in methods.items()]
    for config in configs:
        check_folder(folder / config.method, resuming=False)
    console = common.make_console()
    clients = given["clients"]
    console.print(f"{clients} libraries own parts of one citation graph and share no data.")
    watchers = [Watcher(console, quiet=False, label=f"{c.method:8}") for c in configs]
    dear, last = configs[-1], watchers[-1]

    def follow(progress: dict[str, Any]) -> None:
        if last.should_stop():
            raise Stopped(folder / dear.method, progress["seed"], progress["round"])
        last.follow(progress)

    # FedATH takes two thirds of the time, so another process starts its later seeds now.
    with helped(dear, folder / dear.method, divide, follow) as shared:
        for config, watcher in zip(configs, watchers, strict=True):
            to, source = folder / config.method, shared if config is dear else divide
            with common.stoppable(partial(_report_stop, to)), watcher:
                results.append(RunPlan(config, to, watcher, divide=source).run())
    common.show_results(results, folder, as_json=False, quiet=False)


@command(
    "Show the live progress of a run or study.",
    click.Argument(["folder"], metavar="DIR", type=PATH),
    option("--once", "Show the progress once and exit."),
    option("--every SECONDS", "Set the refresh interval.", click.FloatRange(min=0.1), default=1.0),
    options.AS_JSON,
    example="atoll watch atoll-runs/20260101-120000-tune-fedavg-cora",
)
def watch(folder: Path, once: bool, every: float, as_json: bool) -> None:
    """Show the progress of the run or study in DIR until it finishes.

    The command reads only files, so another process may own the run. --json implies --once.
    """
    from atoll.present.watch import follow, plain, status_text

    watched = StatusReader(folder)
    if as_json:
        click.echo(json.dumps(plain(watched.read())))
    elif once:
        common.make_console().print(status_text(watched.read()))
    else:
        with contextlib.suppress(KeyboardInterrupt):  # the user has seen enough
            follow(watched, common.make_console(), every)
