"""The documentation works: the tests run pages, check commands and follow links."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner

from atoll.cli import main
from atoll.cli.common import pair
from atoll.data.public.registry import GROUPS, dataset_info, plain_name
from atoll.data.synthetic import built_in
from atoll.experiment.config import RunConfig, make_config, read_config, resolve
from atoll.methods import method_class
from atoll.studies.baselines import BASELINES
from atoll.studies.compare.plan import parse_arm
from tests.docs.pages import PAGES, ROOT, Block, blocks, name, parse, words_of

SMALL = {"rounds": 2, "seeds": 2, "trials": 2}
"""The most that a command of a page is run with."""
SHELL = ("cat", "ls", "head", ".")
"""Other programs that a page may use."""
OTHERS = ("tensorboard", "docker", "nvflare", "sudo")
"""Programs that a page may name where nothing is run."""


class Reader:
    """Runs the blocks of a page in its own folder."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.folder = folder
        # As a module in a file, at the lines of the page: a method's step looks its source up.
        self.module = ModuleType("page_of_the_docs")
        self.module.__file__ = str(folder / "page_of_the_docs.py")
        lines = [""] * (page.read_text().count("\n") + 1)
        for block in blocks(page):
            if block.language == "python":
                shown = block.text.splitlines()
                lines[block.line : block.line + len(shown)] = shown
        Path(self.module.__file__).write_text("\n".join(lines))
        for shared in ("docs", "examples"):
            (folder / shared).symlink_to(ROOT / shared)

    def do(self, block: Block) -> None:
        if block.title:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "python":
            code = compile("\n" * block.line + block.text, str(self.module.__file__), "exec")
            exec(code, vars(self.module))
        for command, shown in block.commands():
            words = words_of(command)
            if words[0] == "atoll":
                failed, printed = self.atoll([*small(words), *words_of(block.run_with)])
            elif words[0] in SHELL:
                failed, printed = self.shell(command)
            elif is_example(words):
                script = [sys.executable, *words[1:], *words_of(block.run_with)]
                failed, printed = self.shell(shlex.join(script))
            else:
                pytest.fail(f"{block.place}: no rule runs `{command}`; mark the block")
            assert failed == any(line.startswith("error:") for line in shown), (command, printed)
            for line in shown:
                assert squeezed(line) in squeezed(printed), f"{block.place}: {line}\n\n{printed}"

    def atoll(self, words: list[str]) -> tuple[bool, str]:
        done = CliRunner().invoke(main, words[1:], env={"COLUMNS": "200"})
        return done.exit_code != 0, done.output

    def shell(self, command: str) -> tuple[bool, str]:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        return done.returncode != 0, done.stdout + done.stderr


def is_example(words: list[str]) -> bool:
    """Whether the command runs a script of `examples/`."""
    return words[0] == "python" and words[1].startswith("examples/") and (ROOT / words[1]).is_file()


def small(words: list[str]) -> list[str]:
    """Return the command with few rounds and seeds. The last of equal options counts."""
    context = parse(words)
    assert context is not None
    if context.params.get("resume_from"):
        return words
    more = [
        f"--{key}={most}"
        for key, most in SMALL.items()
        if key in context.params and (context.params[key] or most + 1) > most
    ]
    return [*words, *more]


def squeezed(text: str) -> str:
    return " ".join(text.split())


RUN = [page for page in PAGES if any(not block.not_run for block in blocks(page))]


@pytest.mark.parametrize("page", RUN, ids=name)
def test_pages_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name_of_mirror in ("ATOLL_DATA", "ATOLL_MIRROR"):  # a page must work without
        monkeypatch.delenv(name_of_mirror, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    before = set(sys.modules)
    reader = Reader(page, tmp_path)
    monkeypatch.setitem(sys.modules, reader.module.__name__, reader.module)
    try:
        for block in blocks(page):
            if not block.not_run:
                reader.do(block)
    finally:
        for new in set(sys.modules) - before:  # files of this page, which another may have, too
            if str(getattr(sys.modules[new], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[new]


COMMANDS = [
    pytest.param(block, command, id=f"{block.place}: {command[:60]}")
    for page in PAGES
    for block in blocks(page)
    for command, _ in block.commands()
]


@pytest.mark.parametrize(("block", "command"), COMMANDS)
def test_commands_could_be_given(block: Block, command: str) -> None:
    words = words_of(command)
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= {*targets}
    elif words[0] == "pip":
        extras = re.findall(r"\[([\w,]+)\]", command)
        known = (ROOT / "pyproject.toml").read_text()
        assert all(re.search(f"^{one} = ", known, re.M) for e in extras for one in e.split(","))
    elif (context := parse(words)) is None:
        known = (*SHELL, *OTHERS) if block.not_run else SHELL
        assert words[0] in known or is_example(words), f"{block.place}: what is `{words[0]}`?"
    elif block.not_run:
        check_names(context)


def check_names(context: click.Context) -> None:
    """Methods, data sets, hyper-parameters and recipes exist, as far as names can tell."""
    params = context.params
    for data in (*listed(params.get("data")), *listed(params.get("names"))):
        kind = plain_name(data).lower()
        if "/" not in data and kind not in GROUPS and built_in(kind) is None:
            dataset_info(plain_name(data))
    if isinstance(params.get("methods"), tuple):  # of a command for several
        for one in params["methods"]:
            if ".py:" not in one:
                arm = parse_arm("", re.sub(r"^[\w-]+=", "", one))  # without its label
                assert arm.name in BASELINES or method_class(arm.name)
    elif ".py:" in (params.get("method") or "") or params.get("resume_from"):
        return  # a file of the reader's own, a run of the reader's own
    elif "protocol" in params:  # of a command that trains
        known = {key for key in RunConfig.__struct_fields__ if params.get(key) not in (None, ())}
        given: dict[str, Any] = {key: params[key] for key in known - {"own"}}
        recipe = params.get("config_file")
        base = read_config(Path(recipe)) if recipe else {}
        base |= {"method": "fedath"} if context.command.name == "bound" else {}  # its only method
        settings = dict(pair("set", text) for text in params.get("settings", ()))
        resolve(make_config(**{**base, **given, "set": {**base.get("set", {}), **settings}}))


def listed(value: Any) -> list[str]:
    """Return the names in an option: one, several or comma-separated, but no path."""
    values = value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
    return [one for text in values for one in re.split(r",(?!\w+=)", text)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_that_is_not_run_is_python(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, block.place, "exec")


def test_every_page_with_commands_is_read() -> None:
    assert len(COMMANDS) > 20
    assert len(RUN) > 3
    for page in PAGES:
        shown = re.findall(r"^```(\w*)", page.read_text(), re.MULTILINE)
        assert len(shown) == 2 * len(blocks(page)), f"{name(page)} has a block that no test reads"


INLINE = [
    pytest.param(text, id=f"{name(page)}: {text[:60]}")
    for page in PAGES
    for text in re.findall(r"`(atoll [a-z][^`\n]*)`", page.read_text())
]


@pytest.mark.parametrize("text", INLINE)
def test_commands_in_sentences_could_be_given(text: str) -> None:
    # A sentence may name a command and leave the rest out; what it does give is checked before.
    with contextlib.suppress(click.MissingParameter):
        parse([word for word in words_of(text) if word != "..."])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target
