"""Commands of the administrator: orders that are refused before a job is submitted."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["run", "--kit", "site"], "needs the administrator's kit"),
        (["run", "--kit", "admin", "--quorum", "9"], "quorum is 9"),
        (["run", "--kit", "admin", "--deadline", "0"], "deadline is 0"),
        (["run", "nothing", "--kit", "admin"], "unknown method"),
        (["run", "--kit", "admin", "--resume", "x"], "holds no federated run"),
        (["run", "fedavg", "--kit", "admin", "--resume", "x"], "remove the other options"),
        (["demo", "--set", "x"], "--set takes key=value"),
        (["demo", "--clients", "0"], "clients is 0"),
    ],
)
def test_bad_input_gets_one_sentence(refusal, words: list[str], problem: str) -> None:
    assert problem in refusal(*words)
