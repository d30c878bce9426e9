"""The reference of commands and options is made from the commands."""

from __future__ import annotations

import click
from tools.reference_pages import about, commands_page, page_with_options, walk

from atoll.cli import main
from atoll.experiment.config import RunConfig
from tests.docs.pages import ROOT

MAKE = "run: python tools/reference_pages.py"


def test_the_page_of_commands_is_up_to_date() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == commands_page(), MAKE


def test_the_options_of_run_on_the_api_page_are_up_to_date() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert page_with_options(page) == page, MAKE
    inner = ("method", "objects")  # a separate argument, and a mark of saved files
    for name in RunConfig.__struct_fields__:
        assert (f"\n| `{name}` | " in page) == (name not in inner), name


def test_every_command_has_a_section_and_every_option_a_row() -> None:
    page = commands_page()
    commands = dict(walk(main, ("atoll",)))
    assert ("atoll", "federate", "run") in commands
    for path, command in commands.items():
        section = page.partition(f"\n## {' '.join(path)}\n")[2].partition("\n## ")[0]
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[0] in section, (path, option.opts)


def test_meaning_and_default_are_apart() -> None:
    option = click.Option(["--top"], help="Features.  [default: all]", type=click.IntRange(1))
    context = click.Context(click.Command("one"))
    assert about(option, context) == ("--top INTEGER RANGE", "Features.", "all, at least 1")
