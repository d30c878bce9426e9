"""A kit that was made before `atoll.federate` became `atoll.deploy` still starts and runs jobs."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from atoll.deploy.coordinator import Order
from atoll.deploy.kits import CLASSES, about_kit, server_command, site_command
from atoll.deploy.supervise import write_job
from atoll.experiment.config import config_text, make_config

OLD = Path(__file__).parent / "old"
PARTIES = {"server": server_command, "site": site_command}


def old_kit(party: str, folder: Path) -> Path:
    return Path(shutil.copytree(OLD / f"kit-{party}", folder / party))


def resources(kit: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((kit / "local" / "resources.json").read_text())
    return found


@pytest.mark.parametrize("party", PARTIES)
def test_starting_an_old_kit_renames_our_class_and_loosens_nothing(party, tmp_path):
    kit = old_kit(party, tmp_path)
    before, rights = resources(kit), (kit / "local" / "authorization.json").read_text()
    assert before["class_allow_list"] != CLASSES[party]
    PARTIES[party](kit)
    after = resources(kit)
    assert after["class_allow_list"] == CLASSES[party]
    assert after["class_list_enforcement_mode"] == "enforce"
    store = json.dumps(str(kit.resolve() / "atoll" / "store") + "/")[1:-1]
    expected = json.dumps({**before, "class_allow_list": CLASSES[party]})
    assert after == json.loads(expected.replace("/tmp/nvflare/", store))
    assert (kit / "local" / "authorization.json").read_text() == rights
    written = (kit / "local" / "resources.json").read_text()
    PARTIES[party](kit)
    assert (kit / "local" / "resources.json").read_text() == written


@pytest.mark.parametrize("party", PARTIES)
@pytest.mark.parametrize("allowed", [[], ["their.own.Class"]])
def test_a_list_that_its_owner_narrowed_gets_no_class_back(party, allowed, tmp_path):
    kit = old_kit(party, tmp_path)
    file = kit / "local" / "resources.json"
    file.write_text(json.dumps({**resources(kit), "class_allow_list": allowed}))
    PARTIES[party](kit)
    assert resources(kit)["class_allow_list"] == allowed


def test_a_job_names_only_classes_that_exist_and_that_an_old_kit_allows(tmp_path):
    pytest.importorskip("nvflare")
    kits = {party: old_kit(party, tmp_path) for party in PARTIES}
    for party, kit in kits.items():
        PARTIES[party](kit)
    order = Order(run="r", config=config_text(make_config(rounds=1)), sites=("a",), quorum=1)
    job = write_job(order, about_kit(kits["site"])["sites"], tmp_path)
    server = json.loads((job / "server" / "config" / "config_fed_server.json").read_text())
    site = json.loads((job / "site" / "config" / "config_fed_client.json").read_text())
    named = {
        "server": [part["path"] for part in server["workflows"]],
        "site": [part["executor"]["path"] for part in site["executors"]],
    }
    for party, paths in named.items():
        assert paths == resources(kits[party])["class_allow_list"]
        for module, _, name in (path.rpartition(".") for path in paths):
            assert isinstance(getattr(import_module(module), name), type)
