"""Write the reference of commands and options: docs/commands.md, and a table in docs/api.md.

Run `python tools/reference_pages.py` after a change of an option. A test compares pages and code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from atoll.cli import main
from atoll.experiment.config import RunConfig

Words = tuple[str, ...]
DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->\n"
OTHER_NAMES = {"from_run": "--from"}
"""Options of the command line whose names differ from the fields."""
TOP = """# Commands and options

`atoll COMMAND --help` prints the same text.
`python tools/reference_pages.py` writes this page from the commands, and a test compares both.

An option with KEY=VALUE, or with the word "repeatable", may be given several times.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | a part of a study failed, or an internal error |
| 2 | an error, in one sentence |
| 130, 143 | stopped by Ctrl-C, or by SIGTERM |
"""


def commands_page() -> str:
    """Return the page of all commands."""
    commands = [*walk(main, ("atoll",))]
    rows = [
        f"| [`{' '.join(path)}`](#{'-'.join(path)}) | {one.get_short_help_str(200)} |"
        for path, one in commands
    ]
    index = "\n".join(["| command | what it does |", "|---|---|", *rows, ""])
    return "\n".join([TOP, index, *(section(path, one) for path, one in commands)])


def walk(group: click.Group, path: Words) -> Iterator[tuple[Words, click.Command]]:
    """Yield every command below a group, with the words that call it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from walk(command, (*path, name))
        elif command is not None and not command.hidden:
            yield (*path, name), command


def section(path: Words, command: click.Command) -> str:
    """Return usage, help and options of a command."""
    context = click.Context(command, info_name=" ".join(path))
    usage = " ".join([*path, *command.collect_usage_pieces(context)])
    parts = [f"## {' '.join(path)}", f"```text\n{usage}\n```", *paragraphs(command.help or "")]
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    rows = [
        f"| `{names.replace('|', ' or ')}` | {escaped(meaning)} | {escaped(default)} |"
        for names, meaning, default in (about(one, context) for one in options)
    ]
    if rows:
        parts.append("\n".join(["| option | meaning | default |", "|---|---|---|", *rows]))
    if command.epilog:  # "For example: atoll ..."
        words, _, example = command.epilog.partition(": ")
        parts.append(f"{words}:\n\n```sh\n{example}\n```")
    return "\n\n".join(parts) + "\n"


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a help text, with one sentence per line."""
    found = [" ".join(part.replace("\b", "").split()) for part in text.split("\n\n")]
    return [re.sub(r"(?<=[.:]) (?=[A-Z`])", "\n", escaped(part)) for part in found if part]


def about(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    """Return names, meaning and default of an option."""
    names, text = option.get_help_record(context) or ("", "")
    meaning, *extra = re.split(
        r"\s*\[(?=default: |required\]|[\d<=]*x[<>])", " ".join(text.split())
    )
    notes = ", ".join(one.removesuffix("]").removeprefix("default: ") for one in extra)
    notes = re.sub(r"^(\d+)<=x<=(\d+)", r"none; \1 to \2", notes)
    return names, meaning, re.sub("[;,] x>=", ", at least ", notes)


def escaped(text: str) -> str:
    """Escape a text, so that Markdown shows it unchanged."""
    return re.sub(r"(?<!`)([<|*_])(?!`)", r"\\\1", text)


def page_with_options(page: str) -> str:
    """Return the page of the Python API with a new table of options."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + options_table() + "\n" + END + rest.partition(END)[2]


def options_table() -> str:
    """Return a table of the options of `atoll.run`, with the help of the command line."""
    command = main.commands["run"]
    context = click.Context(command, info_name="atoll run")
    named = {name: one for one in command.params for name in one.opts}
    lines = ["| option | type | meaning | default |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(RunConfig):
        flag = OTHER_NAMES.get(field.encode_name, f"--{field.encode_name.replace('_', '-')}")
        if isinstance(option := named.get(flag), click.Option):
            _, meaning, default = about(option, context)
            kind = RunConfig.__annotations__[field.name].replace(" | None", "").replace("|", "or")
            lines.append(f"| `{field.name}` | `{kind}` | {escaped(meaning)} | {escaped(default)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "commands.md").write_text(commands_page(), encoding="utf-8")
    api = DOCS / "api.md"
    api.write_text(page_with_options(api.read_text(encoding="utf-8")), encoding="utf-8")
