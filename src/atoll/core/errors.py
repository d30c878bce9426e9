"""Every error that Atoll raises on purpose: what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

_PACKAGES = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
_NOT_OWN = (str(Path(__file__).parents[1]), *_PACKAGES)
"""Folders of Atoll, Python and installed packages, whose lines tell a user nothing."""


class AtollError(Exception):
    """Root of the tree; the command line prints it as one sentence and exits with 2."""


class ConfigError(AtollError):
    """A name, option or value that Atoll does not know or cannot use."""


class DataError(AtollError):
    """A graph, split, partition or file that cannot be used."""


class WireError(AtollError):
    """A message that the other side did not declare."""


class StepError(AtollError):
    """A client step failed; says which client, step and round."""

    def __init__(self, client: int, step: str, round: int, problem: str) -> None:
        super().__init__(f"client {client}, step {step}, round {round}: {problem}")
        self.client, self.step, self.round, self.problem = client, step, round, problem

    def __reduce__(self) -> tuple[type[StepError], tuple[int, str, int, str]]:
        return type(self), (self.client, self.step, self.round, self.problem)


class ServerDiverged(AtollError):
    """A number of the server is not finite any more; says in which round."""

    def __init__(self, round: int, problem: str) -> None:
        super().__init__(f"round {round}: {problem}")
        self.round, self.problem = round, problem

    def __reduce__(self) -> tuple[type[ServerDiverged], tuple[int, str]]:
        return type(self), (self.round, self.problem)


class ClientLost(AtollError):
    """A client did not answer in time."""


class DeviceFull(AtollError):
    """The device's memory is too small, or others fill it; says what was needed and is free."""


def described(error: BaseException) -> str:
    """`TypeError in mine.py line 9: ...`: the innermost line of a user's own file, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.endswith(".py") and not f.filename.startswith(_NOT_OWN)]
    where = f" in {Path(own[-1].filename).name} line {own[-1].lineno}" if own else ""
    return f"{type(error).__name__}{where}: {error}"


def unknown(kind: str, given: str, allowed: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist, with the nearest names that do."""
    names = sorted(allowed)
    near = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"choose one of: {', '.join(names)}"
    return ConfigError(f"unknown {kind} '{given}'; {hint}")


def check_name(kind: str, given: str, allowed: Iterable[str]) -> None:
    """Raise the error of `unknown` for a name that does not exist."""
    if given not in allowed:
        raise unknown(kind, given, allowed)
