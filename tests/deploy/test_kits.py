"""Kits allow two classes and no code."""

from __future__ import annotations

import json
from pathlib import Path

from atoll.deploy.kits import ADMIN, CLASSES, certificate_days, provision
from atoll.deploy.policy import Policy
from atoll.deploy.site import Site
from atoll.deploy.site_data import read_site_data, write_clients
from atoll.testing import small_federation


def site(tmp_path: Path, policy: Policy | None = None) -> Site:
    file = write_clients(small_federation(), tmp_path / "data")[0]
    return Site(read_site_data(file), policy or Policy(), tmp_path / "site")


def test_kits_allow_our_classes_alone_and_no_code(tmp_path):
    kits = provision(tmp_path / "kits", ["bank-a", "bank-b"], port=12345)
    assert set(kits) == {"server", ADMIN, "bank-a", "bank-b"}
    resources = json.loads((kits["bank-a"] / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == CLASSES["site"]
    assert resources["class_list_enforcement_mode"] == "enforce"
    rules = json.loads((kits["bank-a"] / "local" / "authorization.json").read_text())
    assert rules["permissions"]["project_admin"]["byoc"] == "none"
    assert rules["permissions"]["project_admin"]["shell_commands"] == "none"
    connection = json.loads((kits["bank-a"] / "startup" / "fed_client.json").read_text())
    assert connection["client"]["connection_security"] == "mtls"
    assert connection["servers"][0]["service"]["target"] == "localhost:12345"
    assert kits["bank-a"].stat().st_mode & 0o077 == 0
    assert {certificate_days(kit) for kit in kits.values()} == {359}  # of 360, the hours round down
