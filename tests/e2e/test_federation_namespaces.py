"""Sites that share only a network link: its traffic equals the ledger."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import atoll

SCRIPT = Path(__file__).with_name("namespaces.sh")
PAGES = ("health", "ready", "metrics")
NEEDED = ("unshare", "nsenter", "ip", "awk")


def possible() -> bool:
    if not all(shutil.which(tool) for tool in NEEDED):
        return False
    probe = ["unshare", "-rn", "ip", "link", "add", "br0", "type", "bridge"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.federation
def test_bytes_on_the_wire_are_those_of_the_ledger(tmp_path):
    if not possible():
        pytest.skip("this machine does not let us make network namespaces")
    done = subprocess.run(
        ["unshare", "-rn", "bash", str(SCRIPT), sys.executable, str(tmp_path)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wire = json.loads(done.stdout.splitlines()[-1])
    with (tmp_path / "out" / "ledger.csv").open() as file:
        rows = list(csv.DictReader(file))
    for way in ("up", "down"):
        counted = sum(int(row[f"bytes_{way}"]) for row in rows)
        print(way, wire[way], counted, wire[way] / counted)
        assert counted < wire[way] < 1.1 * counted
    for party in ("server", "site-2"):
        pages = {page: (tmp_path / f"{party}.{page}").read_text() for page in PAGES}
        families = text_string_to_metric_families(pages["metrics"])
        found = {sample.name: sample.value for one in families for sample in one.samples}
        assert pages["health"].startswith("ok")
        assert pages["ready"].startswith("ok")
        assert found["atoll_rounds_total"] == 10
        assert found["atoll_sent_bytes_total"] > 1e6
        assert found["atoll_process_threads"] > 1
    federation = atoll.partition(atoll.load("lagoon", clients=3), "column:owner")
    expected = atoll.run("fedath", federation, engine="serial", rounds=10, set={"hidden": 256})
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["metrics"] == expected.metrics()
