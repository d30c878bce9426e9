"""What the documentation shows, runs: Python blocks are executed, commands are parsed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import atoll
from atoll.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def fenced(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def python_blocks() -> list[object]:
    return [
        pytest.param(text, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, text in enumerate(fenced(page, "python"))
    ]


def commands() -> list[object]:
    """Every `$ atoll ...` of a console, and every `atoll ...` of a plain block."""
    found = []
    for page in PAGES:
        lines = [line for text in fenced(page, "console", "", "sh", "bash", "text") for line in
                 text.replace("\\\n", " ").splitlines()]  # fmt: skip
        for line in lines:
            match = re.match(r"(?:\$ )?(?:\S*/)?(atoll .*)", line)
            if match:
                found.append(pytest.param(match[1], id=f"{page.stem}: {match[1][:50]}"))
    return found


@pytest.mark.parametrize("code", python_blocks())
def test_python_blocks_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a module in a file: a method's step looks its own source and annotations up.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "readme_block.py").write_text(code)
    monkeypatch.delitem(sys.modules, "readme_block", raising=False)
    __import__("readme_block")
    monkeypatch.delitem(sys.modules, "readme_block")


def test_the_example_of_the_package_runs() -> None:
    lines = (atoll.__doc__ or "").splitlines()
    code = "\n".join(line[4:] for line in lines if line.startswith("    "))
    assert "atoll.run" in code
    space: dict[str, object] = {}
    exec(code, space)
    assert space["result"].metrics()["test_accuracy"]["mean"] > 0.3


def parse(words: list[str]) -> None:
    """Let click read a command line without doing anything."""
    command: click.Command = main
    context = click.Context(main, info_name="atoll", obj={"debug": False})
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
        if isinstance(command, click.Group):
            context = click.Context(command, info_name=name, parent=context)
    command.make_context(command.name, words, parent=context)


def test_there_are_commands_to_check() -> None:
    assert len(commands()) > 5


@pytest.mark.parametrize("text", commands())
def test_commands_are_what_the_command_line_takes(text: str) -> None:
    words = shlex.split(text, comments=True)[1:]
    if any(word in ("-h", "--help", "--version") for word in words):
        return
    parse([word for word in words if word not in ("...", "…")])


def test_the_readmes_own_graph_runs(tmp_path: Path) -> None:
    line = next(
        line for text in fenced(ROOT / "README.md", "console") for line in text.splitlines()
        if "examples/three-banks" in line
    )  # fmt: skip
    words = shlex.split(line.removeprefix("$ "), comments=True)[1:]
    command = [sys.executable, "-m", "atoll", *words, "--rounds", "2", "--out", str(tmp_path / "a")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "three-banks, 3 clients, column:bank" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target
