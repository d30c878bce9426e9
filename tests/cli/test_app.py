"""The command line as a whole: help pages, start-up, pipes."""

from __future__ import annotations

import re
import subprocess
import sys


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_needs_no_torch_and_no_time() -> None:
    code = (
        "import sys, time\nfrom atoll.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'rich', 'msgspec', 'nvflare'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert time.process_time() < 0.3"
    )
    for arguments in (["--help"], ["run", "--help"], ["--version"], ["data", "-h"]):
        done = python(code, *arguments)
        assert done.returncode == 0, done.stderr


def test_help_pages_read_well(cli) -> None:
    page = cli("--help").stdout
    assert "..." not in page.replace("[ARGS]...", "")  # no sentence is cut off
    for command in ("run", "demo", "methods", "datasets", "data", "inspect"):
        assert re.search(rf"^  {command} +[A-Z]", page, re.MULTILINE)
        text = cli(command, "--help").stdout
        assert max(map(len, text.splitlines())) <= 80
        assert not re.search(r"^  --[\w-]+ (TEXT|PATH|INTEGER|FLOAT)\b", text, re.MULTILINE)
    text = cli("run", "--help").stdout
    options = (
        "data clients partition split protocol rounds epochs fraction seeds seed engine device set "
        "config data-root out resume json quiet"
    )
    for option in options.split():
        assert re.search(rf"^  --{option}\b", text, re.MULTILINE)


def test_no_command_shows_the_help(cli) -> None:
    assert "Commands:" in cli(code=2).output


def test_a_reader_that_goes_away_is_no_error() -> None:
    shell = f"{sys.executable} -m atoll datasets | head -1"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Data sets")
    assert done.stderr == ""
