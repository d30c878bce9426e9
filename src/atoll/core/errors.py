"""The errors that Atoll reports to its users.

An error says in one sentence what was given, what is allowed and, usually, what to do next. The
classes name the kind of fault. Functions write the errors for unknown names and absent packages.
"""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

CUTOFF = 0.6  # similarity of two names above which one suggests the other
_PACKAGES = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
_NOT_OWN = (str(Path(__file__).parents[1]), *_PACKAGES)
"""Folders of Atoll, Python and installed packages. Users did not write the lines in them."""


class AtollError(Exception):
    """Base class of Atoll's errors. The command line prints the error and exits with code 2."""


class ConfigError(AtollError):
    """A name, option or value that Atoll does not know or cannot use."""


class DataError(AtollError):
    """A graph, split, partition or file that cannot be used."""


class WireError(AtollError):
    """A message, a reply or a delivered model that a party must not accept."""


class StepError(AtollError):
    """A client step failed. The error names the client, the step and the round."""

    def __init__(self, client: int, step: str, round: int, problem: str) -> None:
        super().__init__(f"client {client}, step {step}, round {round}: {problem}")
        self.client, self.step, self.round, self.problem = client, step, round, problem

    def __reduce__(self) -> tuple[type[StepError], tuple[int, str, int, str]]:
        return type(self), (self.client, self.step, self.round, self.problem)


class ServerDiverged(AtollError):
    """The server computed a non-finite number. The error names the round."""

    def __init__(self, round: int, problem: str) -> None:
        super().__init__(f"round {round}: {problem}")
        self.round, self.problem = round, problem

    def __reduce__(self) -> tuple[type[ServerDiverged], tuple[int, str]]:
        return type(self), (self.round, self.problem)


class ClientLost(AtollError):
    """A client or the server of a federation did not connect or answer."""


class DeviceFull(AtollError):
    """The device's memory is too small, or other processes use it."""


def described(error: BaseException) -> str:
    """Describe an error as `TypeError in mine.py line 9: ...`.

    The line is the innermost one in a user's file. Without such a line, the text contains only the
    type and the message.
    """
    where = f" in {place}" if (place := own_line(error)) else ""
    return f"{type(error).__name__}{where}: {error}"


def own_line(error: BaseException) -> str:
    """Return the innermost line of an error in a user's file: `mine.py line 9`, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.endswith(".py") and not f.filename.startswith(_NOT_OWN)]
    return f"{Path(own[-1].filename).name} line {own[-1].lineno}" if own else ""


def counted(number: int, thing: str, several: str = "") -> str:
    """Format a count: `1 round`, `2 rounds`, `3 classes`. `several` is another plural."""
    several = several or thing + ("es" if thing.endswith("s") else "s")
    return f"{number} {thing if number == 1 else several}"


def unknown(kind: str, given: str, allowed: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name. It suggests the nearest allowed name, or lists all.

    A name that differs only in its number, such as table9 from table1, is no suggestion.
    """
    names = sorted(allowed, key=lambda name: re.sub(r"\d+", lambda n: n[0].zfill(9), name))
    low = given.lower()
    plain = {name.lower(): name for name in names}
    near = [plain[name] for name in difflib.get_close_matches(low, plain, n=1, cutoff=CUTOFF)]
    word, *others = (re.sub(r"\d", "", name) for name in (low, *near))
    if others == [word] and near[0] not in (low, word):
        near = []
    hint = f"did you mean '{near[0]}'?" if near else f"choose one of: {', '.join(names)}"
    return ConfigError(f"unknown {kind} '{given}'; {hint}")


def not_installed(user: str, package: str, extra: str) -> ConfigError:
    """Return the error for a missing package. It names the extra that installs the package."""
    problem = f"{user} needs the package {package}, which is not installed"
    return ConfigError(f"{problem}; install it with: pip install 'atoll-fgl[{extra}]'")


def check_name(kind: str, given: str, allowed: Iterable[str]) -> None:
    """Raise the error of `unknown` if the name is not allowed."""
    if given not in allowed:
        raise unknown(kind, given, allowed)
