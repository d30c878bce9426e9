"""The error of a command that refuses its arguments."""

from __future__ import annotations

from pathlib import Path


def refusal(cli, *arguments: object) -> str:
    """Return the only sentence on standard error. There is no output and no new folder."""
    result = cli(*arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert not Path("atoll-runs").exists()
    return result.stderr.removeprefix("error: ").rstrip("\n")
