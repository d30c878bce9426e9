"""`atoll federate audit`: the chain of a log, its end, and what left a site."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.deploy.audit import Audit
from atoll.deploy.kits import ADMIN, provision


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return provision(tmp_path_factory.mktemp("fed") / "kits", ["site-1"])


def test_a_site_shows_what_left_it_and_notices_a_removed_end(cli, kits, refusal) -> None:
    kit = kits["site-1"]
    path = kit / "atoll" / "audit.jsonl"
    assert "0 lines, unchanged; last hash none" in cli("federate", "audit", "--kit", kit).stdout
    log = Audit(path)
    log.note("hello", run="r", method="fedavg", bytes=300)
    for round in range(2):
        log.note("sent", run="r-0", round=round, step="train", bytes=1000, array_bytes=900)
        log.note("sent", run="p-0", round=round, step="train", bytes=10, release=round, noise=1.5)
    log.note("sent", run="p-0", round=1, step="score", bytes=10, kept=True)
    log.note("refused", run="r-0", reason="no")
    found = json.loads(cli("federate", "audit", "--kit", kit, "--json").stdout)
    assert [tuple(row.values()) for row in found["sent"]] == [
        ("r", "summary", "", 1, 300),
        ("r-0", "train", "no noise", 2, 2000),
        ("p-0", "train", "noise 1.5", 2, 20),
        ("p-0", "score", "scores kept here", 1, 10),
    ]
    (about,) = found["logs"].values()
    text = cli("federate", "audit", "--kit", kit, "--after", about["last"]).stdout
    assert f"7 lines, unchanged; last hash {about['last']}" in text
    assert "r-0  train    no noise          2        2000" in text
    whole = path.read_bytes()
    path.write_bytes(whole[: whole[:-1].rfind(b"\n") + 1])
    assert "6 lines, unchanged" in cli("federate", "audit", "--kit", kit).stdout
    told = refusal("audit", "--kit", kit, "--after", about["last"])
    assert f"contains the line '{about['last']}'; its end was removed" in told
    path.write_bytes(whole.replace(b"1000", b"1001", 1))
    assert "line 3 was changed or follows a missing one" in refusal("audit", "--kit", kit)


def test_a_server_verifies_all_its_runs_and_an_administrator_has_no_log(cli, kits, refusal) -> None:
    for run in ("one", "two"):
        Audit(kits["server"] / "atoll" / "runs" / run / "audit.jsonl").note("start", run=run)
    text = cli("federate", "audit", "--kit", kits["server"]).stdout
    assert text.count("1 lines, unchanged") == 2
    assert "has no audit log" in refusal("audit", "--kit", kits[ADMIN])
