"""The command line in this process: `cli("run", "--rounds", 3)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from atoll.cli import main


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in an empty folder, 80 columns wide, and checks its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    monkeypatch.delenv("ATOLL_MIRROR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no data set of the user's own

    def call(*arguments: object, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        if code != 1:
            assert "Traceback" not in result.output
        assert result.exit_code == code, result.output
        return result

    return call
