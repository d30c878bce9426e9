"""A dry run lists what would leave a site."""

from __future__ import annotations

from pathlib import Path

from atoll.deploy.disclosure import disclosure
from atoll.deploy.policy import Policy
from atoll.deploy.site import Site
from atoll.deploy.site_data import read_site_data, write_clients
from atoll.experiment.config import make_config
from atoll.testing import small_federation
from tests.deploy.private_site import (
    DP,
    make_site,
)


def site(tmp_path: Path, policy: Policy | None = None) -> Site:
    file = write_clients(small_federation(), tmp_path / "data")[0]
    return Site(read_site_data(file), policy or Policy(), tmp_path / "site")


def test_a_dry_run_lists_what_would_leave_and_what_is_refused(tmp_path):
    data = site(tmp_path).data
    found = disclosure(make_config(method="fedgnn"), data, Policy())
    rows = {(row["step"], row["field"]): row for row in found["fields"]}
    # Shapes are the site's own: one key for each of its 13 nodes.
    assert rows["announce", "keys"]["shape"] == "13"
    assert rows["announce", "keys"]["verdict"].startswith("refused: its policy does not allow")
    assert rows["train", "model.0.weight"]["verdict"] == "allowed"
    assert rows["train", "model.0.weight"]["bytes_per_round"] == 11 * 64 * 4
    assert found["told_when_joining"]["nodes"] == 13


def test_a_dry_run_shows_what_a_private_run_sends(tmp_path):
    data = make_site(tmp_path).data
    found = disclosure(make_config(method="moon", dp=DP), data, Policy(noise=1.0))
    assert found["run"] == "allowed"
    assert found["told_when_joining"]["nodes"] == 0
    assert {row["verdict"] for row in found["fields"]} == {"allowed"}
    found = disclosure(make_config(method="moon"), data, Policy(noise=1.0))
    assert found["run"].startswith("refused: its policy demands differential privacy")
