"""Steps that commands share: read KEY=VALUE, name a folder, print, stop cleanly."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.experiment.result import Result
    from atoll.present.terminal import Watcher

PAIRS = ("set", "own")
"""Options of a configuration that take KEY=VALUE, and add to those of a file."""


class AtollSubgroup(click.Group):
    """Turns unknown commands into a suggestion."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = click.utils.make_str(args[0])
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            from atoll.core.errors import unknown

            raise click.UsageError(str(unknown("command", name, self.commands)), ctx)
        return super().resolve_command(ctx, args)


def chosen_options(given: Mapping[str, object], **pairs: tuple[str, ...]) -> dict[str, Any]:
    """The options that the user gave, for `make_config`.

    Args:
        given: All options; None and () are those that the user left out.
        **pairs: The options that take KEY=VALUE.
    """
    chosen = {key: value for key, value in given.items() if value not in (None, ())}
    for name, texts in pairs.items():
        if texts:
            chosen[name] = _pairs(name, texts)
    return chosen


def _pairs(option: str, texts: tuple[str, ...]) -> dict[str, str]:
    from atoll.core.errors import ConfigError

    found: dict[str, str] = {}
    for key, value in (pair(option, text) for text in texts):
        if key in found:
            raise ConfigError(
                f"--{option} gives {key} twice, {found[key]} and {value}; give it once"
            )
        found[key] = value
    return found


def pair(option: str, text: str) -> tuple[str, str]:
    """Key and value of KEY=VALUE."""
    from atoll.core.errors import ConfigError

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"--{option} takes key=value, but got '{text}'; write --{option} KEY=VALUE"
        )
    return key.strip(), value.strip()


def over_file(config_file: Path | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a TOML file, replaced by those of the command line."""
    from atoll.experiment.config import read_config

    base = {} if config_file is None else read_config(config_file)
    pairs = {name: {**base.get(name, {}), **chosen[name]} for name in PAIRS if name in chosen}
    return {**base, **chosen, **pairs}


def or_stopped(
    ctx: click.Context, watcher: Watcher, folder: Path, action: Callable[[], Result]
) -> Result:
    """The result, watched; Ctrl-C ends the command and says how to go on."""
    from atoll.experiment.run import Stopped

    try:
        with watcher:
            return action()
    except Stopped as stop:
        how = f"stopped after {stop.rounds} rounds of seed {stop.seed}"
    except KeyboardInterrupt:
        how = "stopped at once"
    if (folder / "config.toml").exists():
        how += f"; the run is saved in {folder}; continue with: atoll run --resume {folder}"
    click.echo(how, err=True)
    ctx.exit(130)


def fresh_folder(name: str) -> Path:
    """A folder for a result that the user gave no name for."""
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:60]
    stem = Path("atoll-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}"
    number, folder = 1, stem
    while folder.exists():
        number += 1
        folder = stem.with_name(f"{stem.name}-{number}")
    return folder


def make_console(*, stderr: bool) -> Console:
    """Where tables and notes go; what a program reads keeps standard output for itself."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Remarks about the data, before the result."""
    from rich.text import Text

    for note in notes:
        console.print(Text(note, style="dim"))


def show_results(results: list[Result], folder: Path | None, *, as_json: bool, quiet: bool) -> None:
    """Print the table of finished runs, where they are saved, and the JSON of the first."""
    from rich.text import Text

    from atoll.present.terminal import result_table

    if not quiet:
        console = make_console(stderr=as_json)
        console.print(result_table(results))
        console.print(Text(f"Saved in {folder}", style="dim"), soft_wrap=True)
    if as_json:
        click.echo(json.dumps(results[0].summary()))


def print_json(value: object) -> None:
    """One JSON object as the last line; null for undefined numbers."""
    from atoll.present.files import plain_json

    click.echo(json.dumps(plain_json(value)))


def say(text: str) -> None:
    """Progress, beside the output."""
    click.echo(text, err=True)


def written(console: Console, paths: list[Path]) -> None:
    """Name the files that a command wrote."""
    from rich.text import Text

    if paths:
        console.print(Text("Written: " + ", ".join(map(str, paths)), style="dim"), soft_wrap=True)
