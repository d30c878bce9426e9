"""Commands of the administrator: run a method, see and stop jobs, try a federation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from atoll.cli.common import chosen_options, make_console
from atoll.cli.federate.options import AS_JSON, FAULTS, KIT, OUT, TRAINING
from atoll.cli.federate.session import (
    divided,
    make_order,
    new_folder,
    open_desk,
    open_kit,
    stopping,
    supervise,
)
from atoll.cli.options import DATA_ROOT, PATH, option, options

if TYPE_CHECKING:
    from atoll.experiment.result import Result


@click.command(short_help="Run a method on the sites of a federation.")
@click.argument("method", required=False)
@KIT
@options(*TRAINING)
@option("--sites A,B,...", "Which sites.  [default: all of the kit]")
@option("--name NAME", "Of the data, for tables.")
@options(
    *FAULTS,
    OUT,
    option("--resume DIR", "Continue the run in DIR.", PATH, name="resume_from"),
    AS_JSON,
)
def run(
    kit: Path,
    sites: str | None,
    name: str | None,
    quorum: int | None,
    deadline: float,
    patience: float,
    rejoin: bool,
    out: Path | None,
    resume_from: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
    **given: object,
) -> None:
    """Run METHOD (default: fedavg) on the sites, with the administrator's kit."""
    from atoll.core.errors import ConfigError
    from atoll.deploy.supervise import read_saved_order
    from atoll.experiment.config import make_config

    about = open_kit(kit, "admin")
    chosen = chosen_options(given, set=settings)
    if resume_from is not None:
        if chosen:
            raise ConfigError(
                "--resume continues a run with its own configuration; leave the rest out"
            )
        order, folder = read_saved_order(resume_from), resume_from
    else:
        config = make_config(data=name or "federation", **chosen)
        some = tuple(s.strip() for s in sites.split(",")) if sites else tuple(about["sites"])
        folder = new_folder(out, config.method)
        order = make_order(config, some, quorum, deadline)
    with stopping(), open_desk(kit, about["name"]) as desk:
        result = supervise(
            desk,
            order,
            folder,
            quiet=as_json,
            patience=patience,
            rejoin=rejoin,
            resuming=resume_from is not None,
            kept=f"the run is kept; go on with: atoll federate run --resume {folder} --kit {kit}",
        )
    _show(result, folder, as_json)


@click.command(short_help="Which sites are connected, which jobs run.")
@KIT
@AS_JSON
def status(kit: Path, as_json: bool) -> None:
    """Say which sites are connected and how far the jobs are."""
    about = open_kit(kit, "admin")
    with open_desk(kit, about["name"]) as desk:
        connected = desk.connected()
        jobs = [
            {
                "job": job["job_id"],
                "name": job["job_name"],
                "status": job["status"],
                "progress": desk.progress(job["job_id"]) if job["status"] == "RUNNING" else {},
            }
            for job in desk.jobs()
        ]
    sites = {name: name in connected for name in (*about["sites"], *connected)}
    if as_json:
        click.echo(json.dumps({"sites": sites, "jobs": jobs}))
        return
    for name, there in sites.items():
        click.echo(f"{name:20} {'connected' if there else 'not connected'}")
    for job in jobs:
        where = job["progress"]
        text = f", round {where['round']} of {where['rounds']}" if where else ""
        click.echo(f"{job['name']:32} {job['status'].lower()}{text}")


@click.command(short_help="Stop the running jobs.")
@KIT
def stop(kit: Path) -> None:
    """Stop the running jobs; what they reached is kept, and `run --resume` goes on."""
    about = open_kit(kit, "admin")
    with open_desk(kit, about["name"]) as desk:
        running = [job for job in desk.jobs() if not job["status"].startswith("FINISHED")]
        for job in running:
            desk.abort(job["job_id"])
            click.echo(f"stopped {job['job_name']}")
        if not running:
            click.echo("no job runs")


@click.command(short_help="A whole federation on this machine, with mutual TLS.")
@click.argument("method", required=False)
@option("--clients K", "Sites.", int, default=3)
@option("--data NAME|PATH", "As for `atoll run`.  [default: lagoon]")
@option("--partition NAME", "As for `atoll run`.")
@options(DATA_ROOT, *TRAINING, *FAULTS)
@option("--keep DIR", "Keep kits, logs and states there.  [default: thrown away]", PATH)
@options(OUT, AS_JSON)
def demo(
    settings: tuple[str, ...],
    rounds: int | None,
    quorum: int | None,
    deadline: float,
    patience: float,
    rejoin: bool,
    keep: Path | None,
    out: Path | None,
    as_json: bool,
    **given: object,
) -> None:
    """Provision, start, run and clean up a federation on loopback."""
    from atoll.deploy.demo import Demo
    from atoll.deploy.kits import need_nvflare
    from atoll.experiment.config import make_config

    need_nvflare()
    config = make_config(rounds=rounds or 10, **chosen_options(given, set=settings))
    folder = new_folder(out, "federation")
    federation = divided(config)
    with stopping(), Demo(federation, keep) as started:
        click.echo(
            f"{len(federation)} sites on loopback, mutual TLS, port {started.port}", err=True
        )
        order = make_order(config, started.sites, quorum, deadline)
        with open_desk(started.kits["admin"], started.admin) as desk:
            result = supervise(desk, order, folder, quiet=as_json, patience=patience, rejoin=rejoin)
    _show(result, folder, as_json)


def _show(result: Result, folder: Path, as_json: bool) -> None:
    from atoll.present.terminal import result_table

    if as_json:
        click.echo(json.dumps(result.summary()))
    else:
        make_console(stderr=False).print(result_table([result]))
        click.echo(f"Saved in {folder}")
