"""Parties that speak past Atoll, each with a good certificate: a site, and a lying server."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from nvflare.private.defs import RequestHeader, SysCommandTopic, TrainingTopic

from atoll.deploy.kits import provision, server_command, site_command, write_settings
from atoll.deploy.local import Demo, Processes, free_port
from tests.e2e.trial import SMALL, Trial, lagoon, serial, submit_evil
from tests.engines.test_gate import SITE

pytestmark = pytest.mark.federation
CURIOUS = Path(__file__).with_name("faulty") / "curious.py"


def wait_for(file, text):
    end = time.monotonic() + 120
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < end, f"no '{text}' in {file}"
        time.sleep(0.2)


def test_a_site_cannot_read_or_delete_files_of_another(tmp_path):
    kits = provision(tmp_path / "kits", ["bank-a", "bank-b"], port=free_port())
    secret, out = tmp_path / "payments.csv", tmp_path / "out.json"
    secret.write_text("iban,amount\n")
    for name in ("bank-a", "bank-b"):
        write_settings(kits[name], secret)
    log = kits["bank-b"] / "atoll" / "audit.jsonl"
    log.parent.mkdir()
    log.write_text("the spent budget\n")
    questions = [
        (SysCommandTopic.SHELL, f"cat {secret}", {}),
        (SysCommandTopic.REPORT_ENV, "", {}),
        (TrainingTopic.DELETE_RUN, "", {RequestHeader.JOB_ID: "atoll"}),
        (TrainingTopic.CHECK_STATUS, "", {}),
    ]
    python, *command = site_command(kits["bank-a"])
    rest = command[command.index("-m", 2) :]  # after the module that an honest site runs
    curious = [python, str(CURIOUS), "bank-b", json.dumps(questions), str(out), *rest]
    with Processes() as processes:
        logs = tmp_path / "logs"
        processes.start("server", server_command(kits["server"]), logs / "s", kits["server"])
        wait_for(kits["server"] / "log.json", "is starting")
        processes.start("bank-b", site_command(kits["bank-b"]), logs / "b", kits["bank-b"])
        wait_for(kits["server"] / "log.json", "SSL bank-b] is created")
        processes.start("bank-a", curious, logs / "a", kits["bank-a"])
        wait_for(out, "]]")
    found = json.loads(out.read_text())
    assert set(found["handlers"]) == SITE  # each of which the tests of the gate try
    for code, text in found["answers"]:
        assert code != "ok"
        assert text == "None"
    assert log.read_text() == "the spent budget\n"


def test_a_server_that_allows_code_gets_none_into_a_site(tmp_path):
    """FLARE takes the word of the server for the role that may send code: only the gate is left."""
    federation, witness = lagoon(2), tmp_path / "witness"
    demo = Demo(federation, tmp_path / "fed")
    for name in ("server", *demo.sites):
        local = demo.kits[name] / "local"
        rights = json.loads((local / "authorization.json").read_text())
        rights["permissions"]["project_admin"]["byoc"] = "any"
        (local / "authorization.json").write_text(json.dumps(rights))
        resources = json.loads((local / "resources.json").read_text())
        resources["class_allow_list"].append("evil.Evil")
        (local / "resources.json").write_text(json.dumps(resources))
    with demo:
        trial = Trial(demo, federation, tmp_path)
        trial.wait(lambda: trial.connected() == dict.fromkeys(demo.sites, True))
        assert "COMPLETED" not in submit_evil(trial, "code", witness)
        assert not witness.exists()
        assert not list(tmp_path.glob("fed/kits/site-*/*/app_*"))  # nothing was unpacked
        run, _ = trial.start("fedavg", "--rounds", "2", *SMALL)
        assert trial.finish(run)["metrics"] == serial("fedavg", federation, rounds=2)
