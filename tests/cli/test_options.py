"""Options as values: their flags, values and defaults, and the configuration that they fill."""

from __future__ import annotations

import click
from click.testing import CliRunner

from atoll.cli.common import PAIRS
from atoll.cli.options import FEDERATION, MACHINE, TRAINING, command, option
from atoll.engines.base import AUTO, ENGINES
from atoll.experiment.config import RunConfig


def test_a_command_takes_flags_values_and_defaults() -> None:
    many = option("-r --rounds R", "Rounds.", int, name="many", default=3)

    @command("One line.", many, option("--fast", "A switch."), example="atoll go -r 2")
    def go(many: int, fast: bool) -> None:
        click.echo(f"{many} {fast}")

    run = CliRunner().invoke
    assert run(go, ["-r", "2", "--fast"]).output == "2 True\n"
    assert run(go, []).output == "3 False\n"
    page = run(go, ["--help"]).output
    assert "-r, --rounds R  Rounds.  [default: 3]" in page
    assert "--fast          A switch.\n" in page
    assert page.endswith("For example: atoll go -r 2\n")
    assert go.short_help == "One line."


def test_shared_options_are_fields_of_a_configuration() -> None:
    shared = [one for one in (*FEDERATION, *TRAINING) if one.expose_value]  # not --no-cache
    names = {PAIRS.get(str(one.name), one.name) for one in shared}
    assert names <= set(RunConfig.__struct_fields__)


def test_every_engine_is_named() -> None:
    text = next(one.help for one in MACHINE if one.name == "engine")
    assert all(name in str(text) for name in (AUTO, *ENGINES))
