"""Commands of the parties: kits that cannot be made, opened or used."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["provision", "--site", "a b", "--out", "k"], "cannot name a site"),
        (["provision", "--site", "a", "--site", "a", "--out", "k"], "is named twice"),
        (["provision", "--site", "server", "--out", "k"], "cannot name a site"),
        (["provision", "--site", "h", "--host", "h", "--out", "k"], "cannot name a site"),
        (["provision", "--site", "a", "--host", "h" * 64, "--out", "k"], "has 64 letters"),
        (["provision", "--site", "a", "--out", "."], "is not empty"),
        (["server", "--kit", "."], "is not a kit"),
        (["site", "--kit", "site", "--data", "no"], "there is no"),
        (["server", "--kit", "site"], "needs the server's kit"),
        (["site", "--kit", "site", "--data", "no", "--device", "tpu"], "unknown device 'tpu'"),
        (["server", "--kit", ".", "--metrics", "0"], "0 is not in the range"),
    ],
)
def test_bad_input_gets_one_sentence(refusal, words: list[str], problem: str) -> None:
    assert problem in refusal(*words)


def test_a_data_set_is_divided_into_one_file_per_site(cli) -> None:
    data = ("--data", "lagoon:nodes=150", "--clients", 2)
    lines = cli("federate", "split", *data, "--out", "sites").stdout.splitlines()
    assert [Path(line).parent.name for line in lines] == ["sites", "sites"]
    assert all(Path(line).exists() for line in lines)
    assert all(Path(line).stat().st_mode & 0o077 == 0 for line in (*lines, "sites"))


def test_a_missing_gpu_is_reported_at_the_start(refusal, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = refusal("site", "--kit", "site", "--data", "no", "--device", "cuda")
    assert "torch finds no GPU; use --device cpu" in said
