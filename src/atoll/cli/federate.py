"""`atoll federate ...`: commands that hide the plumbing. Heavy packages are imported late."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.options import (
    DATA_ROOT,
    DP,
    EPOCHS,
    FEDERATION,
    ROUNDS,
    SEED,
    SEEDS,
    SETTINGS,
    options,
)

if TYPE_CHECKING:
    from atoll.deploy.coordinator import Order
    from atoll.engines.flare import Desk
    from atoll.experiment.config import RunConfig
    from atoll.experiment.result import Result

KIT = click.option(
    "--kit",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The kit of this party.",
)
OUT = click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path), help="Folder for the result."
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
FAULTS = (
    click.option(
        "--quorum",
        type=int,
        metavar="N",
        help="Fewest sites that a round may have.  [default: more than half]",
    ),
    click.option(
        "--deadline",
        type=float,
        default=600.0,
        show_default=True,
        metavar="S",
        help="Seconds that a step may take; a slower site is left out until it is back.",
    ),
    click.option(
        "--wait",
        "patience",
        type=float,
        default=60.0,
        show_default=True,
        metavar="S",
        help="Seconds to wait for sites that are not connected.",
    ),
    click.option(
        "--rejoin/--no-rejoin",
        default=True,
        show_default=True,
        help="Whether a site that comes back is taken in at once.",
    ),
)
TRAINING = (
    ROUNDS,
    EPOCHS,
    SEEDS,
    SEED,
    SETTINGS,
    DP,
    click.option(
        "--fraction", type=float, metavar="F", help="Share of sites in each round.  [default: 1]"
    ),
    click.option("--protocol", metavar="NAME", help="As for `atoll run`.  [default: strict]"),
)


@click.group(short_help="Run methods on real sites over the network.")
def federate() -> None:
    """Run methods on real sites (NVIDIA FLARE): mutual TLS, a policy and an audit log each."""


@federate.command(short_help="Make the kits of a federation.")
@click.option(
    "--site",
    "sites",
    multiple=True,
    required=True,
    metavar="NAME",
    help="An organisation that takes part; repeatable.",
)
@click.option(
    "--host",
    default="localhost",
    show_default=True,
    help="The name by which the sites reach the server.",
)
@click.option("--port", type=int, default=8102, show_default=True)
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder for the kits.",
)
def provision(sites: tuple[str, ...], host: str, port: int, out: Path) -> None:
    """Make one kit for the server, one for the administrator and one for each site.

    A kit holds a private key: give each party its own, and only that.
    """
    from atoll.deploy.kits import provision as make

    for name, kit in make(out, sites, host=host, port=port).items():
        click.echo(f"{name:28} {kit}")


@federate.command(short_help="Divide a data set into one file per site, for a trial.")
@options(*FEDERATION, SEED)
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder for the files.",
)
def split(out: Path, own: tuple[str, ...], **given: Any) -> None:
    """Divide a data set as `atoll run` would, and write one file per client."""
    from atoll.deploy.site_data import write_clients

    for path in write_clients(_federation(_config(own=own, **given)), out):
        click.echo(path)


@federate.command(short_help="Run the server of a federation.")
@KIT
def server(kit: Path) -> None:
    """Run the server until Ctrl-C."""
    from atoll.deploy.kits import server_command

    about = _opened(kit, "server")
    click.echo(f"server for {', '.join(about['sites'])} at {about['host']}:{about['port']}")
    _foreground("server", server_command(kit), kit)


@federate.command(short_help="Take part with your own data.")
@KIT
@click.option(
    "--data",
    required=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Your graph: tables, .pt, .graphml, or a client file.",
)
@click.option(
    "--policy",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="What you allow (TOML).  [default: every method, no disclosures]",
)
@click.option(
    "--schema",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Column roles of your own tables (TOML).",
)
@click.option(
    "--classes", metavar="A,B,...", help="All classes of the federation, where you may lack some."
)
@click.option(
    "--split",
    default="stratified",
    show_default=True,
    metavar="NAME",
    help="How your nodes become training, validation and test nodes.",
)
@SEED
@click.option(
    "--dry-run",
    "method",
    metavar="METHOD",
    help="Show what METHOD would send from here, and do not join.",
)
@SETTINGS
@DP
@AS_JSON
def site(
    kit: Path,
    data: Path,
    policy: Path | None,
    schema: Path | None,
    classes: str | None,
    split: str,
    seed: int | None,
    method: str | None,
    settings: tuple[str, ...],
    dp: str | None,
    as_json: bool,
) -> None:
    """Take part with your own data until Ctrl-C."""
    from atoll.deploy.kits import about_kit, need_nvflare, site_command, write_settings
    from atoll.deploy.policy import read_policy
    from atoll.deploy.site_data import read_site_data

    about = about_kit(kit)
    names = [name.strip() for name in classes.split(",")] if classes else []
    rules = read_policy(policy)
    # Read now, so that what is wrong with the data is said here and not in a log.
    own = read_site_data(data, schema=schema, classes=names, split=split, seed=seed or 0)
    if method is not None:
        from atoll.deploy.disclosure import disclosure, disclosure_table

        found = disclosure(_config(method=method, settings=settings, dp=dp), own, rules)
        click.echo(json.dumps(found)) if as_json else _print(disclosure_table(found))
        return
    need_nvflare()
    _check_kind(kit, about, "site")
    write_settings(
        kit, data, policy=policy, schema=schema, classes=names, split=split, seed=seed or 0
    )
    click.echo(f"{about['name']}: joining {about['host']}:{about['port']} with {data}")
    _foreground(about["name"], site_command(kit), kit)


@federate.command(short_help="Run a method on the sites of a federation.")
@click.argument("method", required=False)
@KIT
@options(*TRAINING)
@click.option("--sites", metavar="A,B,...", help="Which sites.  [default: all of the kit]")
@click.option("--name", metavar="NAME", default="federation", help="Of the data, for tables.")
@options(*FAULTS)
@OUT
@click.option(
    "--resume",
    "resume_from",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Continue the run in DIR.",
)
@AS_JSON
def run(
    method: str | None,
    kit: Path,
    sites: str | None,
    name: str,
    quorum: int | None,
    deadline: float,
    patience: float,
    rejoin: bool,
    out: Path | None,
    resume_from: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Run METHOD (default: fedavg) on the sites, with the administrator's kit."""
    from atoll.core.errors import ConfigError
    from atoll.deploy.supervise import read_saved_order
    from atoll.experiment.folder import check_folder

    about = _opened(kit, "admin")
    if resume_from is not None:
        if method or any(value not in (None, ()) for value in given.values()):
            raise ConfigError(
                "--resume continues a run with its own configuration; leave the rest out"
            )
        order, folder = read_saved_order(resume_from), resume_from
    else:
        config = _config(method=method, data=name, **given)
        chosen = tuple(s.strip() for s in sites.split(",")) if sites else tuple(about["sites"])
        folder = out or Path("atoll-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{config.method}"
        check_folder(folder, resuming=False)
        order = _order(config, chosen, quorum, deadline)
    with _stopping(), _desk(kit, about["name"]) as desk:
        result = _supervised(
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


@federate.command(short_help="Which sites are connected, which jobs run.")
@KIT
@AS_JSON
def status(kit: Path, as_json: bool) -> None:
    """Say which sites are connected and how far the jobs are."""
    about = _opened(kit, "admin")
    with _desk(kit, about["name"]) as desk:
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


@federate.command(short_help="Stop the running jobs.")
@KIT
def stop(kit: Path) -> None:
    """Stop the running jobs; what they reached is kept, and `run --resume` goes on."""
    about = _opened(kit, "admin")
    with _desk(kit, about["name"]) as desk:
        running = [job for job in desk.jobs() if not job["status"].startswith("FINISHED")]
        for job in running:
            desk.abort(job["job_id"])
            click.echo(f"stopped {job['job_name']}")
        if not running:
            click.echo("no job runs")


@federate.command(short_help="A whole federation on this machine, with mutual TLS.")
@click.argument("method", required=False)
@click.option("--clients", type=int, default=3, show_default=True, metavar="K", help="Sites.")
@click.option("--data", metavar="NAME|PATH", help="As for `atoll run`.  [default: lagoon]")
@click.option("--partition", metavar="NAME", help="As for `atoll run`.")
@DATA_ROOT
@options(*TRAINING)
@options(*FAULTS)
@click.option(
    "--keep",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Keep kits, logs and states there.  [default: thrown away]",
)
@OUT
@AS_JSON
def demo(
    clients: int,
    method: str | None,
    data: str | None,
    partition: str | None,
    data_root: str | None,
    quorum: int | None,
    deadline: float,
    patience: float,
    rejoin: bool,
    keep: Path | None,
    out: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Provision, start, run and clean up a federation on loopback."""
    from atoll.deploy.demo import Demo
    from atoll.deploy.kits import need_nvflare
    from atoll.experiment.folder import check_folder

    need_nvflare()
    given["rounds"] = given["rounds"] or 10
    config = _config(
        method=method, data=data, clients=clients, partition=partition, data_root=data_root, **given
    )
    folder = out or Path("atoll-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-federation"
    check_folder(folder, resuming=False)
    federation = _federation(config)
    with _stopping(), Demo(federation, keep) as started:
        click.echo(
            f"{len(federation)} sites on loopback, mutual TLS, port {started.port}", err=True
        )
        order = _order(config, started.sites, quorum, deadline)
        with _desk(started.kits["admin"], started.admin) as desk:
            result = _supervised(
                desk, order, folder, quiet=as_json, patience=patience, rejoin=rejoin
            )
    _show(result, folder, as_json)


def _config(settings: tuple[str, ...] = (), own: tuple[str, ...] = (), **given: Any) -> RunConfig:
    from atoll.core.errors import ConfigError
    from atoll.experiment.config import make_config

    chosen = {key: value for key, value in given.items() if value not in (None, ())}
    for name, texts in (("set", settings), ("own", own)):
        for text in texts:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise ConfigError(f"--{name} takes key=value, but got '{text}'")
            chosen.setdefault(name, {})[key.strip()] = value.strip()
    return make_config(**chosen)


def _federation(config: RunConfig) -> Any:
    from atoll.experiment.config import resolve
    from atoll.experiment.problem import make_federation

    filled, rules = resolve(config)
    return make_federation(filled, rules, filled.seed, None, config)[0]


def _order(config: RunConfig, sites: tuple[str, ...], quorum: int | None, deadline: float) -> Order:
    import secrets

    from atoll.core.errors import ConfigError
    from atoll.deploy.coordinator import Order
    from atoll.experiment.config import config_text, make_config, resolve
    from atoll.experiment.protocols import protocol
    from atoll.methods import method_class

    # Names and hyper-parameters are checked here already, not only on the server.
    given = {key: getattr(config, key) for key in config.__struct_fields__}
    able, meant = method_class(config.method).tasks, protocol(config.protocol).tasks
    task = next((task for task in able if task in meant), able[0])
    resolve(make_config(**{**given, "objects": ("data",)}), task)
    least = len(sites) // 2 + 1 if quorum is None else quorum
    if not 1 <= least <= len(sites):
        raise ConfigError(f"quorum is {least}; give a number from 1 to {len(sites)}, the sites")
    if deadline <= 0:
        raise ConfigError(f"deadline is {deadline:g}; give seconds above 0")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    return Order(run=name, config=config_text(config), sites=sites, quorum=least, deadline=deadline)


@contextmanager
def _desk(kit: Path, user: str) -> Iterator[Desk]:
    """A session with the server, closed at the end."""
    from atoll.engines.flare import Desk

    desk = Desk(kit, user)
    try:
        yield desk
    finally:
        desk.close()


@contextmanager
def _stopping() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that processes are cleaned up."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _supervised(
    desk: Desk, order: Order, folder: Path, *, quiet: bool, kept: str = "", **options: Any
) -> Result:
    """See a run through; `kept` is what to say when it is interrupted."""
    from atoll.deploy.coordinator import read_result
    from atoll.deploy.supervise import Supervisor

    said: set[str] = set()

    def on_progress(now: dict[str, Any]) -> None:
        for name, why in now["out"].items():
            line = f"{name} is left out: {why}"
            if line not in said:
                said.add(line)
                click.echo(line, err=True)
        line = f"round {now['round']} of {now['rounds']}"
        if not quiet and now["round"] and line not in said:
            said.add(line)
            value = now.get("validation")
            score = f", validation {value:.1%}" if value is not None else ""
            click.echo(f"{line}{score}", err=True)

    supervisor = Supervisor(
        desk,
        order,
        folder,
        tell=lambda text: click.echo(text, err=True),
        on_progress=on_progress,
        **options,
    )
    try:
        supervisor.run()
    except KeyboardInterrupt:
        supervisor.stop()
        if kept:
            click.echo(kept, err=True)
        raise
    return read_result(order, folder)


def _foreground(name: str, command: list[str], kit: Path) -> None:
    """Run a process until it ends or Ctrl-C, and leave none behind."""
    from atoll.core.errors import AtollError
    from atoll.deploy.processes import Processes

    with _stopping(), Processes() as processes:
        process = processes.start(name, command, kit.resolve() / "atoll" / "output.log")
        try:
            process.wait()
        except KeyboardInterrupt:
            click.echo("stopping", err=True)
            return
    raise AtollError(
        f"{name} ended by itself; see {kit / 'atoll' / 'output.log'} and {kit / 'log.txt'}"
    )


def _opened(kit: Path, kind: str) -> dict[str, Any]:
    """What a kit says of itself, once NVIDIA FLARE is there and the kit is of the right kind."""
    from atoll.deploy.kits import about_kit, need_nvflare

    need_nvflare()
    about = about_kit(kit)
    _check_kind(kit, about, kind)
    return about


def _check_kind(kit: Path, about: dict[str, Any], kind: str) -> None:
    from atoll.core.errors import ConfigError

    name = about["name"]
    found = "site" if name in about["sites"] else "server" if name == "server" else "admin"
    words = {"site": "a site", "server": "the server", "admin": "the administrator"}[kind]
    if found != kind:
        raise ConfigError(f"'{kit}' is the kit of {name} ({found}), but this needs {words}'s kit")


def _show(result: Result, folder: Path, as_json: bool) -> None:
    from atoll.present.terminal import result_table

    if as_json:
        click.echo(json.dumps(result.summary()))
    else:
        _print(result_table([result]))
        click.echo(f"Saved in {folder}")


def _print(what: Any) -> None:
    from rich.console import Console

    Console(highlight=False).print(what)
