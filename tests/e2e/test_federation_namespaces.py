"""Sites that share nothing but a wire: what crosses it is what the ledger says."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import atoll

SCRIPT = Path(__file__).with_name("namespaces.sh")
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
    federation = atoll.partition(atoll.load("lagoon", clients=3), "column:owner")
    expected = atoll.run("fedath", federation, engine="serial", rounds=10, set={"hidden": 256})
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["metrics"] == expected.metrics()
