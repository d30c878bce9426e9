"""`atoll run`, `atoll demo` and `atoll watch`: one method on one federation, three, or a look."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from atoll.cli import common, options
from atoll.cli.options import PATH, command, option
from atoll.core.errors import ConfigError
from atoll.experiment.status import StatusReader

NEWCOMER = "A client that never trains, by name or number, or drawn: what it gets on its first day."
CONFIG = "A TOML file of options, for example the config.toml of a saved run."


@command(
    "Run a method on a federation and save the result.",
    options.METHOD,
    *options.FEDERATION,
    *options.TRAINING,
    option("--config FILE", CONFIG, PATH, name="config_file"),
    options.OUT,
    option("--overwrite", "Replace the run in --out."),
    options.resume("Continue the stopped run in DIR; with --rounds R also beyond its end."),
    option("--from --from-run RUN", "Start from a finished run's model.", PATH, name="from_run"),
    option("--held-out-client NAME", NEWCOMER),
    options.LOG,
    option("--profile", "Print where the time went: wall and processor seconds by stage."),
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
    """How far a stopped run is, and how to continue it."""
    from atoll.experiment.run import Stopped

    how = "stopped at once"
    if isinstance(stop, Stopped):
        how = f"stopped after {stop.rounds} rounds of seed {stop.seed}"
    if (folder / "config.toml").exists():
        how += f"; the run is saved in {folder}; continue with: atoll run --resume {folder}"
    click.echo(how, err=True)


@command(
    "Compare three methods on the built-in federation.",
    option("--rounds R", "Rounds.", int, default=60),
    option("--seeds N", "Seeds.", int, default=3),
    option("--clients K", "Clients.", int, default=5),
    option("--out DIR", "Folder for the results.", PATH),
)
def demo(out: Path | None, **given: int) -> None:
    """Three methods on the built-in federation: what does working together gain?"""
    with common.without_collection():
        from atoll.experiment.config import make_config
        from atoll.experiment.folder import check_folder
        from atoll.experiment.problem import FederationCache
        from atoll.experiment.run import RunPlan, Stopped
        from atoll.present.terminal import Watcher
        from atoll.studies.parallel import helped

    folder, results, divide = out or common.fresh_folder("demo"), [], FederationCache()
    # On this small graph the evaluator of FedATH's public code does better than its paper's.
    fedath = {"evaluator": "gnn", "hsic": "trace/N", "entropy": "sum", "lam": 0.001}
    methods = {"local": {}, "fedavg": {}, "fedath": fedath}
    configs = [make_config(method=name, set=set_, **given) for name, set_ in methods.items()]
    for config in configs:
        check_folder(folder / config.method, resuming=False)
    console = common.make_console()
    clients = given["clients"]
    console.print(f"{clients} libraries own parts of one citation graph; nobody shows theirs.")
    watchers = [Watcher(console, quiet=False, label=f"{c.method:8}") for c in configs]
    dear, last = configs[-1], watchers[-1]

    def follow(progress: dict[str, Any]) -> None:
        if last.should_stop():
            raise Stopped(folder / dear.method, progress["seed"], progress["round"])
        last.follow(progress)

    # FedATH takes two thirds of the time: another process begins with its later seeds now.
    with helped(dear, folder / dear.method, divide, follow) as shared:
        for config, watcher in zip(configs, watchers, strict=True):
            to, source = folder / config.method, shared if config is dear else divide
            with common.stoppable(partial(_report_stop, to)), watcher:
                results.append(RunPlan(config, to, watcher, divide=source).run())
    common.show_results(results, folder, as_json=False, quiet=False)


@command(
    "Watch a run or a study of another process.",
    click.Argument(["folder"], metavar="DIR", type=PATH),
    option("--once", "Look once and end."),
    option("--every SECONDS", "How often to look.", click.FloatRange(min=0.1), default=1.0),
    option("--json", "Look once, and print one JSON object.", name="as_json"),
    example="atoll watch atoll-runs/20260101-120000-tune-fedavg-cora",
)
def watch(folder: Path, once: bool, every: float, as_json: bool) -> None:
    """Watch the run or study in DIR from its files alone, until it is finished."""
    from atoll.present.watch import follow, plain, status_text

    watched = StatusReader(folder)
    if as_json:
        click.echo(json.dumps(plain(watched.read())))
    elif once:
        common.make_console().print(status_text(watched.read()))
    else:
        with contextlib.suppress(KeyboardInterrupt):  # the user has seen enough
            follow(watched, common.make_console(), every)
