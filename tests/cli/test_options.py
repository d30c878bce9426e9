"""Options as values: their flags, values and defaults, and the configuration that they fill."""

from __future__ import annotations

from collections.abc import Iterator

import click
from click.testing import CliRunner

from atoll.cli import main
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


PATHS = {"DIR", "FILE", "PATH", "RUN"}


def path_options(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, one in group.commands.items():
        if isinstance(one, click.Group):
            yield from path_options(one, (*words, name))
            continue
        flags = [p.opts for p in one.params if PATHS & {*str(p.metavar).split("|")}]
        longest = [max(opts, key=len) for opts in flags]
        yield from ((*words, name, flag) for flag in longest if flag[0] == "-" and flag != "--data")


def test_an_empty_path_is_refused(cli) -> None:
    found = list(path_options(main))
    assert {("run", "--out"), ("compare", "--data-root"), ("federate", "site", "--policy")} <= {
        *found
    }
    for *words, name in found:
        result = cli(*words, f"{name}=", code=2)
        assert result.stderr == f"error: {name} is empty; give a path\n", (words, name)
    assert cli("watch", "", code=2).stderr == "error: DIR is empty; give a path\n"
