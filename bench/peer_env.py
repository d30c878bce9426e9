"""Python environments of the peers, each installed once with exact versions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from pathlib import Path

from click import ClickException
from rich.console import Console
from rich.markup import escape

PINS = Path(__file__).with_name("peer-constraints.txt")
DEFAULT = Path(__file__).parent.parent / ".bench-venv"


def peer_python(folder: Path, console: Console, pins: Path = PINS) -> Path:
    """Return a peer's interpreter. Install or update its environment if necessary.

    The last step of an installation copies the pins into the folder. An environment that was
    interrupted, or made for other pins, is installed again.
    """
    python = folder.absolute() / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = folder / "installed-pins.txt"
    if python.exists() and stamp.exists() and stamp.read_text() == pins.read_text():
        return python
    console.print(f"Installing a peer into {folder.name}/ (once; about 1.3 GB) ...")
    stamp.unlink(missing_ok=True)
    if not python.exists():
        _follow([sys.executable, "-m", "venv", str(folder)], "python -m venv", console)
        (folder / ".gitignore").write_text("*\n")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    _follow([*pip, "--requirement", str(pins)], "pip install", console)
    stamp.write_text(pins.read_text())
    return python


def _follow(command: list[str], name: str, console: Console) -> None:
    """Run a command and show its latest line. If it fails, the error has its last lines."""
    tail: deque[str] = deque(maxlen=8)
    pipe = subprocess.PIPE
    with (
        console.status(name) as status,
        subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process,
    ):
        for line in process.stdout or ():
            tail.append(line.rstrip())
            status.update(escape(f"{name}: {tail[-1]}"[: console.width - 4]))
    if process.returncode:
        last = "\n".join(tail)
        raise ClickException(
            f"`{name}` ended with exit status {process.returncode} while it set up the peer's "
            f"environment; check the package index and run the command again. Its last lines:\n"
            f"{last}"
        )
