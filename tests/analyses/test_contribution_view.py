"""The output of `atoll contribution`: table, reading, files and picture."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from atoll.analyses.contribution import Contribution, contribution
from atoll.analyses.contribution_view import (
    contribution_files,
    contribution_parts,
    summary,
)
from atoll.experiment.config import make_config
from atoll.present.files import plain_json, write_all
from atoll.present.layout import layout
from tests.analyses.contributions import made_up

SMALL = {"data": "lagoon:nodes=240", "clients": 3, "rounds": 2, "epochs": 1, "set": {"hidden": 8}}


@pytest.fixture(scope="module")
def found() -> Contribution:
    return contribution(make_config(**SMALL, seeds=2), client=1)


def text_of(found: Contribution) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(layout(contribution_parts(found)))
    return console.file.getvalue()


def test_a_class_without_test_nodes_has_no_number(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    counts = np.diag([5.0, 0.0, 5.0])
    found = made_up(counts, counts, np.array([[1, 0, 2], [2, 0, 2]]))
    plain = json.loads(json.dumps(plain_json(summary(found)), allow_nan=False))
    assert plain["classes"][1]["with"]["mean"] is None
    assert plain["classes"][0]["difference"]["mean"] == 0
    assert plain["classes"][0]["difference"]["std"] is None  # one seed has no spread
    line = next(x for x in text_of(found).splitlines() if " 1 " in x[:9])
    assert line.split()[-3:] == ["–", "–", "–"]
    assert len(write_all(tmp_path, contribution_files(found))) == 3


@pytest.mark.parametrize("vary", ["none", "nodes"])
def test_files(vary: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = contribution(make_config(**SMALL, seeds=2), vary=vary)
    paths = write_all(tmp_path / "new" / "folder", contribution_files(found))
    assert [path.name for path in paths] == [
        "contribution.csv", "contribution.json", "contribution.png",
    ]  # fmt: skip
    with paths[0].open() as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["0"] * 9 + ["1"] * 9
    assert [row["class"] for row in rows[:9]] == [*"012345", "all", "client 0", "others"]
    assert (rows[0]["homophily"] == "") == (vary == "nodes")
    gain = float(rows[6]["with"]) - float(rows[6]["without"])
    assert float(rows[6]["difference"]) == pytest.approx(gain, abs=1e-5)
    whole = json.loads(paths[1].read_text())
    assert whole["config"]["seeds"] == 2
    assert whole["about"]["partition"] == "column:owner"
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    assert paths[2].stat().st_size > 20_000
    assert ("own | others" in text_of(found)) == (vary == "none")


def test_many_clients_and_classes_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (2, 45, 30, 30)).astype(float)
    found = Contribution(
        make_config(rounds=1, seeds=2), 44, "none", 0.5, rng.integers(0, 9, (2, 45, 30)),
        rng.random(45), rng.random((45, 30)), counts, counts, np.zeros((2, 2), dtype=int), {},
    )  # fmt: skip
    assert write_all(tmp_path, contribution_files(found))[2].stat().st_size > 20_000
