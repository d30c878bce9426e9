"""A study's cells: each is run to its end once, and one that fails stops nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError
from atoll.study.cells import Cell, run_cells
from atoll.study.config import make_config

ABOUT = {"kind": "compare"}


def cells(rounds: int = 2) -> list[Cell]:
    return [
        Cell(name, make_config(method=name, rounds=rounds, clients=2), {"method": name})
        for name in ("local", "fedavg")
    ]


def events(folder: Path) -> list[tuple[str, str]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [(event["event"], event["cell"]) for event in map(json.loads, lines)]


def test_finished_cells_are_only_read_again(tmp_path: Path) -> None:
    first = run_cells(tmp_path, cells()[:1], about=ABOUT)
    both = run_cells(tmp_path, cells(), about=ABOUT)
    assert [outcome.fresh for outcome in both] == [False, True]
    assert both[0].summary == first[0].summary
    assert events(tmp_path) == [(e, c) for c in ("local", "fedavg") for e in ("begin", "end")]


def test_a_failed_cell_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    broken = Cell("broken", make_config(method="fedavg", data="no-such-set"))
    outcomes = run_cells(tmp_path, [broken, *cells()], about=ABOUT)
    assert [outcome.summary is None for outcome in outcomes] == [True, False, False]
    assert "no-such-set" in (outcomes[0].error or "")
    assert ("failed", "broken") in events(tmp_path)


def test_other_options_under_the_same_name_are_refused(tmp_path: Path) -> None:
    run_cells(tmp_path, cells()[:1], about=ABOUT)
    with pytest.raises(ConfigError, match="begun with other options"):
        run_cells(tmp_path, cells(rounds=3)[:1], about=ABOUT)


def test_two_cells_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two cells"):
        run_cells(tmp_path, cells()[:1] * 2, about=ABOUT)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a folder"):
        run_cells(tmp_path / "file", cells(), about=ABOUT)
