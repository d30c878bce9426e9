"""`atoll demo`: three methods on the built-in federation."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.cli.common import fresh_folder, make_console, or_stopped, show_results
from atoll.cli.options import PATH, option, options


@click.command(short_help="Compare three methods on the built-in federation.")
@option("--rounds R", "Rounds.", int, default=60)
@options(option("--seeds N", "Seeds.", int, default=3))
@option("--clients K", "Clients.", int, default=5)
@options(option("--out DIR", "Folder for the results.", PATH))
@click.pass_context
def demo(ctx: click.Context, rounds: int, seeds: int, clients: int, out: Path | None) -> None:
    """Three methods on the built-in federation: what does working together gain?"""
    from atoll.experiment.config import make_config
    from atoll.experiment.folder import check_folder
    from atoll.experiment.run import run_config
    from atoll.present.terminal import Watcher

    folder, names = out or fresh_folder("demo"), ("local", "fedavg", "fedath")
    given = {"clients": clients, "rounds": rounds, "seeds": seeds}
    # On this small graph the evaluator of FedATH's public code does better than its paper's.
    settings = {"fedath": {"evaluator": "gnn", "hsic": "trace/N", "entropy": "sum", "lam": 0.001}}
    configs = [make_config(method=name, set=settings.get(name, {}), **given) for name in names]
    for name in names:
        check_folder(folder / name, resuming=False)
    console = make_console(stderr=False)
    console.print(f"{clients} libraries own parts of one citation graph; nobody shows theirs.")
    results = []
    for config in configs:
        to = folder / config.method
        watcher = Watcher(console, quiet=False, label=f"{config.method:8}")
        action = lambda c=config, t=to, w=watcher: run_config(c, out=t, observer=w)  # noqa: E731
        results.append(or_stopped(ctx, watcher, to, action))
    show_results(results, folder, as_json=False, quiet=False)
