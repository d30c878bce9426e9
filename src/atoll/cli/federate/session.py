"""Options and functions that the commands of `atoll federate` share."""

from __future__ import annotations

import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from atoll.cli import options
from atoll.cli.common import fresh_folder
from atoll.cli.options import PATH, Strings, option
from atoll.core.errors import AtollError, ConfigError, counted
from atoll.deploy import kits
from atoll.deploy.kits import AboutKit, about_kit, check_certificates, need_nvflare

if TYPE_CHECKING:
    from atoll.deploy.coordinator import Order
    from atoll.engines.flare import AdminSession
    from atoll.experiment.config import RunConfig
    from atoll.experiment.result import Result

KIT = option(
    "--kit DIR",
    "Use this kit, the folder with this party's keys and certificates.",
    PATH,
    required=True,
)
HOST = "Set the host name at which the sites reach the server."
PORT = option("--port INTEGER", "Set the port of the server.", int, default=kits.PORT)
OUT, AS_JSON = options.OUT, options.AS_JSON
METRICS = option(
    "--metrics PORT",
    "Serve metrics and a health check on this port of localhost.",
    click.IntRange(1, 65535),
)
DEADLINE = "Exclude a site that needs more than S seconds for a step, until it reconnects."
WAIT = "Wait S seconds for sites that are not connected."
REJOIN = "Start a new job at once when an excluded site reconnects."
UPDATES = "Reject an update whose norm exceeds X times the median norm of the other sites."
FAULTS = (
    option("--quorum N", "Require N sites in each round.  [default: more than half]", int),
    option("--deadline S", DEADLINE, float, default=600.0),
    option("--update-limit X", UPDATES, float, default=100.0),
    option("--wait S", WAIT, float, name="patience", default=60.0),
    option("--rejoin/--no-rejoin", REJOIN, default=True),
)
TRAINING = (
    *(options.ROUNDS, options.EPOCHS, options.SEEDS, options.SEED, options.SETTINGS, options.DP),
    options.ENCODER,
    *(options.METRIC, options.POSITIVE, options.THRESHOLD, *options.LOSS),
    option(
        "--fraction F", "Train only this fraction of the sites in each round.  [default: 1]", float
    ),
    options.PROTOCOL,
)


def new_folder(out: Path | None, name: str) -> Path:
    """Return the folder for a new run. Raise an error if it already contains a run."""
    from atoll.experiment.folder import check_folder

    folder = out or fresh_folder(name)
    check_folder(folder, resuming=False)
    return folder


def names(text: str | None) -> Strings:
    """Parse the names in a list like "a, b"."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


def make_order(
    config: RunConfig, sites: Strings, quorum: int | None, deadline: float, update_limit: float
) -> Order:
    """Make the order for a job, and check names, hyper-parameters and limits before it is sent."""
    from msgspec.structs import replace

    from atoll.deploy.coordinator import Order
    from atoll.experiment.config import config_text, make_config, resolve
    from atoll.experiment.protocols import protocol
    from atoll.methods import method_class, split_preset

    if "method" not in config.objects:  # sites accept only registered names
        name, preset = split_preset(config.method)
        setting = {"preset": preset} if preset else {}
        config = replace(config, method=name, set=setting | config.set)
    given = {key: getattr(config, key) for key in config.__struct_fields__}
    able, meant = method_class(config.method).tasks, protocol(config.protocol).tasks
    task = next((task for task in able if task in meant), able[0])
    whole, _ = resolve(make_config(**{**given, "objects": ("data",)}), task)
    if whole.held_out_client is not None:
        why = "holds out one client, but every site of a federation trains"
        raise ConfigError(f"protocol '{config.protocol}' {why}; choose another --protocol")
    if not sites:
        hint = "approve one (`atoll federate approve`), or name some with --sites"
        raise ConfigError(f"the kit lists no site yet; {hint}")
    least = len(sites) // 2 + 1 if quorum is None else quorum
    if not 1 <= least <= len(sites):
        raise ConfigError(f"quorum is {least}; give a number from 1 to {len(sites)}, the sites")
    if deadline <= 0:
        raise ConfigError(f"deadline is {deadline:g}; give seconds above 0")
    if not update_limit > 1:
        raise ConfigError(f"update limit is {update_limit:g}; give a factor above 1")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    limits: dict[str, Any] = {"quorum": least, "deadline": deadline, "update_limit": update_limit}
    return Order(run=name, config=config_text(config), sites=sites, **limits)


def continue_without(order: Order, sites: Strings, quorum: int | None = None) -> Order:
    """Return the order without these sites, which do not train any more, and with the quorum."""
    from msgspec.structs import replace

    for site in sites:
        if site not in order.sites:
            raise ConfigError(f"the run has no site '{site}'; it has: {', '.join(order.sites)}")
    without = tuple(dict.fromkeys((*order.without, *sites)))
    left, quorum = len(order.sites) - len(without), order.quorum if quorum is None else quorum
    if not 1 <= quorum <= left:
        remain = counted(left, "site remains", "sites remain")
        raise ConfigError(f"{remain}, but the quorum is {quorum}; give --quorum from 1 to {left}")
    return replace(order, without=without, quorum=quorum)


def with_newcomers(order: Order, connected: Collection[str], quorum: int | None) -> Order:
    """Add to the order all connected sites that the administrator's kit does not list yet."""
    from msgspec.structs import replace

    sites = (*order.sites, *sorted(set(connected) - set(order.sites)))
    return replace(order, sites=sites, quorum=quorum or len(sites) // 2 + 1)


def open_admin(kit: Path, user: str) -> closing[AdminSession]:
    """Open a session with the server. The context manager closes it."""
    from atoll.engines.flare import AdminSession

    warn_of_end(kit)
    return closing(AdminSession(kit, user))


def stop_jobs(admin: AdminSession) -> list[str]:
    """Stop all jobs that have not finished, and return their names."""
    running = [job for job in admin.jobs() if not job["status"].startswith("FINISHED")]
    for job in running:
        admin.abort(job["job_id"])
    return [job["job_name"] for job in running]


@contextmanager
def stopping(*more: signal.Signals) -> Iterator[None]:
    """Treat SIGTERM and `more` like Ctrl-C, so that processes and files are cleaned up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, *more)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def supervise(
    session: AdminSession,
    order: Order,
    folder: Path,
    *,
    quiet: bool,
    again: str = "",
    **limits: Any,
) -> Result:
    """Follow a run until it finishes, and return its result. The command `again` continues it."""
    from atoll.deploy.coordinator import read_federated_result
    from atoll.deploy.supervise import Supervisor

    tell, printed = partial(click.echo, err=True), set[str]()

    def tell_once(line: str, score: str = "") -> None:
        if line not in printed:
            printed.add(line)
            tell(line + score)

    def on_progress(now: dict[str, Any]) -> None:
        for name, why in now["out"].items():
            tell_once(f"{name} is excluded: {why}")
        if now["round"] and not quiet:
            value = now.get("validation")
            score = f", validation {value:.1%}" if value is not None else ""
            tell_once(f"round {now['round']} of {now['rounds']}", score)

    how = {"tell": tell, "on_progress": on_progress, "again": again, **limits}
    supervisor = Supervisor(session, order, folder, **how)
    try:
        supervisor.run()
    except KeyboardInterrupt:
        supervisor.stop()
        if again:
            tell(f"the run is saved; continue with: {again}")
        raise
    return read_federated_result(order, folder)


def printable(value: object) -> str:
    """Remove control characters, because a reason may quote another party."""
    return "".join(letter if letter.isprintable() else " " for letter in str(value))


def foreground(
    name: str,
    command: list[str],
    kit: Path,
    metrics: int | None,
    prepare: Callable[[], object] = lambda: None,
) -> None:
    """Run a party's process until it ends or Ctrl-C, and then end its children.

    Print a line when a site connects, and when a run begins, ends or is refused.
    Serve its metrics on the port `metrics`, if given. `prepare` changes the kit before the process
    starts (`Processes.start`).
    """
    from atoll.deploy.activity import News
    from atoll.deploy.local import CONNECTED, NewLines, Processes, bound_log, lost_session, refusal
    from atoll.deploy.metrics import serving

    log = kit.resolve() / "atoll" / "output.log"
    output, events, recent = NewLines(log), NewLines(kit / "log.json"), NewLines(kit / "log.json")
    why = partial(refusal, output, events) if name != "server" else str
    news, links = News(kit), 0
    with stopping(), Processes() as processes, serving(kit, metrics, processes.alive):
        process = processes.start(name, command, log, kit, prepare)
        try:
            while process.poll() is None and not why():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=2)
                before, links = links, len(CONNECTED.findall(events.read()))
                connected = ["connected to the server"] if links > before else []
                for line in (*connected, *news.read()):
                    click.echo(f"{name}: {printable(line)}")
                bound_log(log)
                bound_log(kit / "audit.log")  # FLARE's log of every request to the server
                if name != "server" and lost_session(recent):
                    click.echo(f"{name}: the server does not respond any more; joining again")
                    processes.end()
                    process = processes.start(name, command, log, kit)
        except KeyboardInterrupt:
            click.echo("stopping", err=True)
            return
    logs = f"ended unexpectedly; see {kit / 'atoll' / 'output.log'} and {kit / 'log.json'}"
    raise AtollError(f"{name} {why() or logs}")


def open_kit(kit: Path, kind: str) -> AboutKit:
    """Return a kit's description. Raise an error for another kind, or without NVIDIA FLARE."""
    need_nvflare()
    about = about_kit(kit)
    found, words = kind_of(about), {"site": "a site", "admin": "the administrator"}
    if found != kind:
        whose = f"'{kit}' is the kit of {about['name']} ({found})"
        raise ConfigError(f"{whose}, but this needs {words.get(kind, 'the server')}'s kit")
    return about


def kind_of(about: AboutKit) -> str:
    """Return the kind of party that a kit belongs to: site, server or admin."""
    name = about["name"]
    return "site" if name in about["sites"] else "server" if name == "server" else "admin"


def warn_of_end(kit: Path) -> None:
    """Warn if a certificate expires soon. Raise an error if it is not valid."""
    if warning := check_certificates(kit):
        click.echo(f"warning: {warning}", err=True)
