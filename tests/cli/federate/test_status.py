"""`atoll federate status` with the kit of each kind of party."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from atoll.cli.federate import session
from atoll.deploy.audit import Audit
from atoll.deploy.kits import ADMIN, certificate_days, provision


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return provision(tmp_path_factory.mktemp("fed") / "kits", ["site-1", "site-2"])


class Server:
    """Answers an administrator."""

    def last_seen(self) -> dict[str, float]:
        return {"site-1": time.time() - 300}

    def jobs(self) -> list[dict[str, str]]:
        names = ("RUNNING", "FINISHED:COMPLETED")
        return [{"job_id": s, "job_name": f"atoll-{s}", "status": s} for s in names]

    def progress(self, job: str) -> dict[str, object]:
        assert job == "RUNNING"
        peer = {"sent": 1_500_000, "received": 250_000, "out": "", "last": None}
        place = {"seed": 0, "round": 3, "rounds": 10, "epsilon": 2.5, "out": {}}
        return {**place, "sites": {"site-1": peer, "site-2": {**peer, "out": "it is lost"}}}


def test_an_administrator_sees_sites_traffic_and_jobs(cli, kits, monkeypatch) -> None:
    monkeypatch.setattr(session, "open_admin", lambda kit, user: nullcontext(Server()))
    lines = cli("federate", "status", "--kit", kits[ADMIN]).stdout.splitlines()
    days = certificate_days(kits[ADMIN])
    assert [" ".join(line.split()) for line in lines] == [
        f"{ADMIN}: certificate {days} days",
        "site last seen MB up MB down",
        "site-1 connected 5 min ago 0.25 1.50",
        "site-2 not connected 0.25 1.50 it is lost",
        "atoll-RUNNING running, round 3 of 10, epsilon 2.5",
        "atoll-FINISHED:COMPLETED finished:completed",
    ]
    found = json.loads(cli("federate", "status", "--kit", kits[ADMIN], "--json").stdout)
    assert found["sites"] == {"site-1": True, "site-2": False}
    assert found["certificate_days"] == days
    assert found["jobs"][0]["progress"]["sites"]["site-1"]["received"] == 250_000


def test_a_server_sees_its_own_runs_without_a_connection(cli, kits) -> None:
    for run, rounds in (("first", 2), ("second", 1)):
        log = Audit(kits["server"] / "atoll" / "runs" / run / "audit.jsonl")
        log.note("start", run=run, sites=["site-1", "site-2"])
        log.note("step", step="train", round=0, bytes={"site-1": (2_000_000, 10_000)})
        log.note("left out", site="site-2", round=0, kind="lost", reason="gone\x1b[2J")
        for number in range(1, rounds + 1):
            log.note("round", seed=0, round=number, rounds=2)
    log = Audit(kits["server"] / "atoll" / "runs" / "first" / "audit.jsonl")
    log.note("finished", run="first")
    text = cli("federate", "status", "--kit", kits["server"]).stdout
    assert "first: complete, round 2 of 2" in text
    assert ", round 1 of 2" in text
    assert "0.01   2.00" in text
    assert "gone [2J" in text
    assert "\x1b" not in text
    found = json.loads(cli("federate", "status", "--kit", kits["server"], "--json").stdout)
    assert {run["name"]: run["ended"] for run in found["runs"]} == {"first": True, "second": False}
    assert found["runs"][0]["peers"]["site-2"]["failures"] == 1


def test_a_site_sees_its_answers_its_budget_and_its_refusals(cli, kits) -> None:
    kit = kits["site-1"]
    text = cli("federate", "status", "--kit", kit).stdout
    assert "epsilon" not in text  # no run sent anything, and no policy limits it
    log = Audit(kit / "atoll" / "audit.jsonl")
    log.note("begin", run="plain-0", config="")
    log.note("sent", run="plain-0", round=0, step="train", bytes=10)
    text = cli("federate", "status", "--kit", kit).stdout
    assert "1 run without differential privacy: updates or scores left in the clear" in text
    assert "epsilon" not in text
    log.note("begin", run="r-0", config="")
    sent = {"step": "train", "bytes": 30_000, "release": "x", "noise": 2.0, "epsilon": 1.0}
    log.note("sent", run="r-0", round=4, **sent)
    log.note("refused", run="r-1", reason="its policy does not allow method '\x1b[31mevil'")
    Path("policy.toml").write_text("epsilon = 8.0\n")
    (kit / "local" / "atoll.json").write_text(json.dumps({"policy": "policy.toml"}))
    text = cli("federate", "status", "--kit", kit).stdout
    assert "epsilon 1.99 of 8 at delta 1e-05, in all private runs" in text
    assert "1 run without differential privacy" in text
    assert "1 refused, 0 failed; the last: its policy does not allow method ' [31mevil'" in text
    assert "r-0      5       0.03" in text
    found = json.loads(cli("federate", "status", "--kit", kit, "--json").stdout)
    assert found["epsilon"]["limit"] == 8.0
    log.note("sent", run="r-0", round=5, **{**sent, "noise": 0.0, "release": "y"})
    found = json.loads(cli("federate", "status", "--kit", kit, "--json").stdout)
    assert found["epsilon"]["spent"] is None
    log.note("sent", run="r-0", round=5, step="score", bytes=10, array_bytes=8, kept=True)
    assert "1 run without differential privacy" in cli("federate", "status", "--kit", kit).stdout
    log.note("sent", run="r-0", round=5, step="score", bytes=10, array_bytes=8)
    assert "2 runs without differential privacy" in cli("federate", "status", "--kit", kit).stdout
    assert "epsilon infinite of 8" in cli("federate", "status", "--kit", kit).stdout


def test_a_folder_that_is_no_kit_gets_one_sentence(refusal) -> None:
    assert "is not a kit" in refusal("status", "--kit", ".")
