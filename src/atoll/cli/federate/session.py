"""Steps that the commands of `atoll federate` share. Heavy packages are imported late."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from atoll.core.federation import Federation
    from atoll.deploy.coordinator import Order
    from atoll.deploy.kits import AboutKit
    from atoll.engines.flare import AdminSession
    from atoll.experiment.config import RunConfig
    from atoll.experiment.result import Result


def new_folder(out: Path | None, name: str) -> Path:
    """The folder for a new run; refused where it holds one."""
    from atoll.experiment.folder import check_folder

    folder = out or Path("atoll-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    check_folder(folder, resuming=False)
    return folder


def divided(config: RunConfig) -> Federation:
    """The clients that `atoll run` would make."""
    from atoll.experiment.problem import Problem

    return Problem.of(config).federation(config.seed)


def make_order(
    config: RunConfig, sites: tuple[str, ...], quorum: int | None, deadline: float
) -> Order:
    """The order for a job; names, hyper-parameters and limits are checked before it is sent."""
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
def open_desk(kit: Path, user: str) -> Iterator[AdminSession]:
    """A session with the server, closed at the end."""
    from atoll.engines.flare import AdminSession

    desk = AdminSession(kit, user)
    try:
        yield desk
    finally:
        desk.close()


@contextmanager
def stopping() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that processes are cleaned up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def supervise(
    desk: AdminSession, order: Order, folder: Path, *, quiet: bool, kept: str = "", **options: Any
) -> Result:
    """Follow a job to its end; `kept` is printed when it is interrupted."""
    from atoll.deploy.coordinator import read_federated_result
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
    return read_federated_result(order, folder)


def foreground(name: str, command: list[str], kit: Path) -> None:
    """Run a process until it ends or Ctrl-C, and leave none behind."""
    from atoll.core.errors import AtollError
    from atoll.deploy.processes import Processes

    with stopping(), Processes() as processes:
        process = processes.start(name, command, kit.resolve() / "atoll" / "output.log")
        try:
            process.wait()
        except KeyboardInterrupt:
            click.echo("stopping", err=True)
            return
    raise AtollError(
        f"{name} ended by itself; see {kit / 'atoll' / 'output.log'} and {kit / 'log.txt'}"
    )


def open_kit(kit: Path, kind: str) -> AboutKit:
    """The description of a kit, once NVIDIA FLARE is there and the kit is of the right kind."""
    from atoll.deploy.kits import about_kit, need_nvflare

    need_nvflare()
    about = about_kit(kit)
    check_kind(kit, about, kind)
    return about


def check_kind(kit: Path, about: AboutKit, kind: str) -> None:
    """Refuse the kit of another kind of party."""
    from atoll.core.errors import ConfigError

    name = about["name"]
    found = "site" if name in about["sites"] else "server" if name == "server" else "admin"
    words = {"site": "a site", "server": "the server", "admin": "the administrator"}[kind]
    if found != kind:
        raise ConfigError(f"'{kit}' is the kit of {name} ({found}), but this needs {words}'s kit")
