"""Commands of the administrator: run a method, stop jobs, and run a demo federation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from atoll.cli.common import chosen_options, config_of, pop, show_results
from atoll.cli.federate import session
from atoll.cli.federate.session import AS_JSON, FAULTS, KIT, OUT, TRAINING
from atoll.cli.options import DATA_ROOT, METHOD, PATH, command, option, resume
from atoll.core.errors import ConfigError
from atoll.deploy.kits import about_kit, need_nvflare


@command(
    "Run a method on the sites of a federation.",
    METHOD,
    KIT,
    *TRAINING,
    option("--sites A,B,...", "Run on these sites.  [default: all approved or connected sites]"),
    option("--name NAME", "Set the name of the data in tables."),
    *FAULTS,
    OUT,
    resume("Resume the run in DIR."),
    option("--without A,B,...", "Exclude these sites from the resumed run."),
    AS_JSON,
)
def run(
    kit: Path, sites: str | None, name: str | None, out: Path | None, as_json: bool, **given: Any
) -> None:
    """Run METHOD (default: fedavg) on the sites, with the administrator's kit."""
    from atoll.deploy.supervise import read_saved_order
    from atoll.experiment.config import make_config

    about = session.open_kit(kit, "admin")
    limits = pop(given, "quorum", "deadline", "update_limit")
    waiting = pop(given, "patience", "rejoin")
    dropped = session.names(given.pop("without"))
    folder, chosen = given.pop("resume_from"), chosen_options(given)
    if resuming := folder is not None:
        if chosen:
            why = "--resume continues a run with its own configuration; remove the other options"
            raise ConfigError(why)
        if sites:
            raise ConfigError("--sites is for a new run; leave out a site with --without")
        order = session.continue_without(read_saved_order(folder), dropped, limits["quorum"])
    else:
        if dropped:
            why = "--without needs --resume; choose the sites of a new run with --sites"
            raise ConfigError(why)
        config = make_config(data=name or "federation", **chosen)
        some = session.names(sites) or tuple(about["sites"])
        folder = session.new_folder(out, config.method)
        order = session.make_order(config, some, **limits)
    waiting.update(
        resuming=resuming,
        removed=lambda: about_kit(kit).get("removed", ()),
        again=f"atoll federate run --resume {folder} --kit {kit}",
    )
    with session.stopping(), session.open_admin(kit, about["name"]) as admin:
        if not resuming and not sites:
            order = session.with_newcomers(order, admin.connected(), limits["quorum"])
        result = session.supervise(admin, order, folder, quiet=as_json, **waiting)
    show_results([result], folder, as_json=as_json, quiet=as_json)


@command("Stop all running jobs.", KIT)
def stop(kit: Path) -> None:
    """Stop all running jobs. Their runs stay saved, and `run --resume` continues them."""
    about = session.open_kit(kit, "admin")
    with session.open_admin(kit, about["name"]) as admin:
        stopped = session.stop_jobs(admin)
    click.echo("\n".join(f"stopped {job}" for job in stopped) or "no job runs")


@command(
    "Run a demo federation on this machine, with mutual TLS.",
    METHOD,
    option("--clients K", "Set the number of sites.", int, default=3),
    option("--data NAME|PATH", "Load these data, as in `atoll run`.  [default: lagoon]"),
    option("--partition NAME", "Divide the graph by this rule, as in `atoll run`."),
    DATA_ROOT,
    *TRAINING,
    *FAULTS,
    option("--keep DIR", "Keep kits, logs and states in DIR.  [default: delete them]", PATH),
    OUT,
    AS_JSON,
)
def demo(keep: Path | None, out: Path | None, as_json: bool, **given: Any) -> None:
    """Create, run and clean up a federation on this machine, with mutual TLS.

    Without --rounds, the command trains for 10 rounds.
    """
    from atoll.deploy.local import Demo
    from atoll.experiment.problem import Problem

    need_nvflare()
    limits = pop(given, "quorum", "deadline", "update_limit")
    waiting = pop(given, "patience", "rejoin")
    config = config_of(given, rounds=10)
    folder = session.new_folder(out, "federation")
    federation = Problem.of(config).federation(config.seed)
    with session.stopping(), Demo(federation, keep) as started:
        sites = f"{len(federation)} sites on loopback"
        click.echo(f"{sites}, mutual TLS, port {started.port}", err=True)
        order = session.make_order(config, started.sites, **limits)
        with session.open_admin(started.kits["admin"], started.admin) as admin:
            result = session.supervise(admin, order, folder, quiet=as_json, **waiting)
    show_results([result], folder, as_json=as_json, quiet=as_json)
