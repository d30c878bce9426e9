"""What a command says that refuses its arguments."""

from __future__ import annotations

from pathlib import Path


def refusal(cli, *arguments: object) -> str:
    """The one sentence on standard error; standard output is empty and no folder was made."""
    result = cli(*arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert not Path("atoll-runs").exists()
    return result.stderr.removeprefix("error: ").rstrip("\n")
