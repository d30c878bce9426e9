"""`atoll data`: fetching and checking data sets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

MIRROR = Path(__file__).resolve().parents[3] / "shared" / "data"


def test_checking_nothing(cli) -> None:
    assert cli("data", "check").stdout == (
        "no data set is here; get one with: atoll data fetch NAME\n"
    )


@pytest.mark.data
@pytest.mark.skipif(not (MIRROR / "cornell.tar.xz").exists(), reason="no mirror in ../shared/data")
def test_fetch_check_and_use(cli, tmp_path: Path) -> None:
    where = ("--data-root", "d")
    fetched = cli("data", "fetch", "Cornell", "mutag", "--mirror", MIRROR, *where)
    assert fetched.stdout.splitlines()[0] == "Cornell: ready in d/WebKB/cornell"
    checked = cli("data", "check", *where)
    assert checked.stdout == "cornell: as published\nMUTAG: as published\n"
    assert "edge homophily" in cli("datasets", "cornell", *where).stdout
    listed = cli("datasets", *where).stdout
    assert re.search(r"^cornell .* yes *$", listed, re.MULTILINE)
    (tmp_path / "d" / "TUDataset" / "MUTAG" / "raw" / "MUTAG_A.txt").unlink()
    checked = cli("data", "check", *where, code=2)
    assert checked.stdout.splitlines() == [
        "cornell: as published",
        "MUTAG: incomplete: no raw/MUTAG_A.txt",
    ]
    assert "already" in cli("data", "fetch", "cornell", "--mirror", MIRROR, *where).stderr
    run = ("run", "--data", "cornell", *where, "--clients", 2, "--partition", "random")
    result = cli(*run, "--rounds", 1, "--json", "--quiet")
    assert json.loads(result.stdout)["clients"] == 2


def test_fetching_from_a_mirror_that_is_not_there(cli) -> None:
    found = cli("data", "fetch", "cora", "--mirror", "nowhere", code=2).stderr
    assert found == "error: the mirror nowhere is not there; give a folder or an http(s) address\n"
