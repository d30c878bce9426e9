"""Functions that commands share: parse KEY=VALUE, name a folder, print, stop cleanly."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from atoll.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.experiment.config import RunConfig
    from atoll.experiment.result import Result

PAIRS = {"settings": "set", "own": "own", "search": "search"}
"""Parameters that take KEY=VALUE, and the names of their options."""
FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk, or of an exceeded disk quota


class AtollSubgroup(click.Group):
    """A command group that answers an unknown command with a suggestion."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = click.utils.make_str(args[0])
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            raise click.UsageError(str(unknown("command", name, self.commands)), ctx)
        return super().resolve_command(ctx, args)


def chosen_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the user gave, for `make_config`. None and () mark the others."""
    chosen = {key: value for key, value in given.items() if value not in (None, ())}
    for parameter, option in PAIRS.items():
        found: dict[str, str] = {}
        for key, value in (pair(option, text) for text in chosen.pop(parameter, ())):
            if key in found:
                twice = f"{key} twice, {found[key]} and {value}"
                raise ConfigError(f"--{option} gives {twice}; give it once")
            found[key] = value
        chosen |= {option: found} if found else {}
    return chosen


def pair(option: str, text: str) -> tuple[str, str]:
    """Parse KEY=VALUE into its key and its value."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        got = f"takes key=value, but got '{text}'"
        raise ConfigError(f"--{option} {got}; write --{option} KEY=VALUE")
    return key.strip(), value.strip()


def pop(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove these options from `given`, and return them."""
    return {name: given.pop(name) for name in names}


def config_of(given: Mapping[str, object], **defaults: object) -> RunConfig:
    """Return the configuration that the options of a command describe."""
    from atoll.experiment.config import make_config

    return make_config(**{**defaults, **chosen_options(given)})


def over_file(config_file: Path | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the options of a TOML file with the command line, which takes precedence."""
    from atoll.experiment.folder import located_options

    base = {} if config_file is None else located_options(config_file)
    pairs = {name: base.get(name, {}) | chosen[name] for name in ("set", "own") if name in chosen}
    return {**base, **chosen, **pairs}


def to_resume(folder: Path | None) -> Path | None:
    """Return the folder of --resume, and change to the folder in which the user started that run.

    Saved relative paths refer to that folder.
    """
    from atoll.experiment.folder import started_in

    if folder is not None and (there := started_in(folder) or Path.cwd()) != Path.cwd():
        folder = folder.absolute()
        click.get_current_context().with_resource(contextlib.chdir(there))
    return folder


def refuse_beside_resume(kind: str, given: Mapping[str, object], allowed: str) -> None:
    """Refuse options next to --resume, which continues with the saved configuration."""
    if names := [name for name, value in given.items() if value not in (None, ())]:
        words = {"methods": "METHOD", "method": f"METHOD '{given.get('method')}'"}
        option = words.get(names[0], "--" + names[0].replace("_", "-"))
        problem = f"--resume continues a {kind} with its own configuration, but {option} was given"
        raise ConfigError(f"{problem}; remove all options except {allowed}")


@contextmanager
def stoppable(report: Callable[[BaseException], None]) -> Iterator[None]:
    """Report how to continue if Ctrl-C or SIGTERM stops the command, then exit with 130 or 143.

    If the disk is full, print an error that names the file, report, and exit with 2.
    """
    from atoll.experiment.run import Stopped

    code, leave = 130, click.get_current_context().exit

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal code
        code = 128 + number
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):  # the handler of the progress bar stops after the round
            interrupt(number, frame)

    in_main = threading.current_thread() is threading.main_thread()  # others cannot set signals
    before = signal.signal(signal.SIGTERM, terminate) if in_main else None
    try:
        yield
    except (Stopped, KeyboardInterrupt) as stop:
        report(stop)
        leave(code)
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = f" '{error.filename}'" if error.filename else ""
        click.echo(f"error: {error.strerror}{where}; make room for it", err=True)
        report(error)
        leave(2)
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection while torch is imported. Later collections skip these objects."""
    # A process that imported torch earlier may have garbage, which `gc.freeze` would keep.
    first = "torch" not in sys.modules and gc.isenabled()
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()


def fresh_folder(name: str) -> Path:
    """Return the path of a new folder in atoll-runs, named after the time and `name`."""
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:60]
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for path in map(Path("atoll-runs").joinpath, names) if not path.exists())


def make_console(*, stderr: bool = False) -> Console:
    """Return the console for tables and notes. `stderr` keeps standard output free for JSON."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def print_text(console: Console, text: str, style: str = "dim", *, wrap: bool = False) -> None:
    """Print a paragraph. Square brackets in it are not markup."""
    from rich.text import Text

    console.print(Text(text, style=style), soft_wrap=not wrap)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Print notes about the data, before the result."""
    for note in notes:
        print_text(console, note, wrap=True)


def print_next(console: Console, commands: Iterable[str]) -> None:
    """Print the commands that the user can run next."""
    console.print("\nNext commands:")
    for command in commands:
        print_text(console, f"  {command}", style="")


def print_written(console: Console, paths: list[Path]) -> None:
    """Print the names of the files that a command wrote."""
    if paths:
        print_text(console, "Written: " + ", ".join(map(str, paths)))


def show_results(results: list[Result], folder: Path | None, *, as_json: bool, quiet: bool) -> None:
    """Print table and folder of runs unless `quiet`, and with `as_json` the first run's JSON."""
    from atoll.present.terminal import result_table

    if not quiet:
        console = make_console(stderr=as_json)
        console.print(result_table(results))
        print_text(console, f"Saved in {folder}")
    if as_json:
        click.echo(json.dumps(results[0].summary()))
