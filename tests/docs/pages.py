"""The documentation as the tests read it: pages, their fenced blocks, and the commands in them.

A page runs from top to bottom in its own folder. Python blocks share one namespace. A block with a
title (```csv title="nodes.csv") is a file. `$ ...` of a console is a command, and the next lines
are its expected output. A comment on the line before a block changes that:

    <!-- not run: needs Cora -->       only check that the command line is valid
    <!-- run with: --rounds 30 -->     more options, which override the page's options
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import click
from bench.__main__ import main as bench_main

from atoll.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
PROGRAMS = {("atoll",): main, ("python", "-m", "bench"): bench_main}
"""What a command may begin with, and who reads the rest."""

_FENCE = re.compile(
    r"(?:^<!-- (?P<what>not run|run with): (?P<words>.+?) -->\n)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    not_run: str | None = None
    run_with: str = ""

    @property
    def place(self) -> str:
        return f"{name(self.page)}:{self.line}"

    def commands(self) -> list[tuple[str, list[str]]]:
        """Every command of a console, with the lines that are shown below it."""
        if self.language != "console":
            return []
        found: list[tuple[str, list[str]]] = []
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            elif line.strip() and not line.startswith("#") and found:
                found[-1][1].append(line)
        return found


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text, found = page.read_text(), []
    for match in _FENCE.finditer(text):
        line = text[: match.start("text")].count("\n")
        about = {match["what"]: match["words"]}
        found.append(
            Block(page, line, match["language"], match["title"], match["text"],
                  about.get("not run"), about.get("run with", ""))
        )  # fmt: skip
    return found


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def parse(words: list[str]) -> click.Context | None:
    """Parse a command line without running it. Return None for other programs."""
    for start, program in PROGRAMS.items():
        if tuple(words[: len(start)]) == start:
            return _parse(program, words[len(start) :])
    return None


def _parse(program: click.Command, words: list[str]) -> click.Context:
    command, context = program, click.Context(program, info_name="atoll", obj={"debug": False})
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found, chosen, words = command.resolve_command(context, words)
        assert chosen is not None
        command = chosen
        if isinstance(command, click.Group):
            context = click.Context(command, info_name=found, parent=context)
    if isinstance(command, click.Group) or {"-h", "--help", "--version"} & {*words}:
        return context
    return command.make_context(command.name, words, parent=context)
