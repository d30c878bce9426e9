"""`atoll claim`, and `atoll reproduce` for tables that are made of data, or not run at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.analyses.distillation_cost import Sizes
from tests.data.public.layouts import write_raw

SMALL = ("--data", "lagoon:nodes=150", "--clients", 3)


def test_bound(cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    training = ("--rounds", 2, "--epochs", 1, "--set", "hidden=8", "--every", 1)
    result = cli("claim", "bound", *SMALL, *training, "--out", "found")
    assert "Corollary 5.2 along training: lagoon:nodes=150, fedath, 1 seed" in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert (tmp_path / "found" / "bound.png").stat().st_size > 10_000


def test_weights(cli) -> None:
    result = cli("claim", "weights", *SMALL)
    assert "Proposition 4.3: weights follow the task" in " ".join(result.stdout.split())


def test_cost(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Sizes(nodes=40, pseudo=16, clients=2, features=8, classes=2, noise=4, iterations=1)
    monkeypatch.setattr("atoll.analyses.distillation_cost.Sizes", lambda: tiny)
    result = cli("claim", "cost", "--doublings", 1)
    assert "FedTAD's cost" in result.stdout
    assert "…" not in result.stdout


def test_errors_are_one_sentence(cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert cli("claim", "cost", "--out", "file", code=2).stderr.startswith("error: ")
    result = cli("claim", "weights", "--data", "lagoon:nodes=60", "--clients", 1, code=2)
    assert result.stderr.startswith("error: this command compares clients")
    assert "did you mean 'bound'" in cli("claim", "boud", code=2).stderr


def test_a_table_of_the_data_and_a_dry_run(cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_raw("PTC_MR", tmp_path / "data")
    where = ("--data-root", "data", "--out", "study")
    result = cli("reproduce", "gcfl", "1", *where)
    assert "GCFL, Table 1" in result.stdout
    assert (tmp_path / "study" / "table-1.csv").exists()
    result = cli("reproduce", "gcfl", "all", "--dry-run", *where)
    assert "gcfl, table 3" in result.stdout
    assert "gcfl, figure 8" in result.stdout
    assert "0 runs of" in result.stdout
    assert "get with: atoll data fetch" in result.stdout
