"""The classes that a FLARE job names."""

from __future__ import annotations

import json

import pytest

from atoll import __version__
from atoll.core.errors import ConfigError
from atoll.deploy.coordinator import Order, order_text
from atoll.deploy.kits import write_settings
from atoll.deploy.site_data import write_clients
from atoll.engines.fleet import Packet
from atoll.testing import small_federation

pytest.importorskip("nvflare")


def test_a_site_answers_with_the_data_that_its_owner_named(tmp_path, monkeypatch):
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell

    from atoll.deploy.jobs import Participant

    unguarded = CoreCell.process_message
    monkeypatch.setattr(CoreCell, "process_message", unguarded)
    with pytest.raises(ConfigError, match="was not started by `atoll federate site`"):
        Participant().open(tmp_path)
    assert CoreCell.process_message is not unguarded  # a job's process has a gate from its start
    (tmp_path / "local").mkdir()
    policy = tmp_path / "policy.toml"
    policy.write_text("rounds = 3")
    file = write_clients(small_federation(), tmp_path / "data")[0]
    write_settings(tmp_path, file, policy=policy, schema=None, seed=2)
    answer = Participant().open(tmp_path)
    assert answer(Packet({"do": "ping"}, b"")).head == {}
    head = {"do": "hello", "run": "r", "method": "fedavg", "rounds": 4, "dp": None}
    refused = answer(Packet({**head, "version": __version__}, b"")).head["reason"]
    assert refused == "its policy allows 3 rounds, but the run has 4"


def test_a_run_is_complete_whatever_happens_in_its_delivery(tmp_path, monkeypatch):
    from atoll.deploy import jobs

    order = Order(run="r", config="", sites=("a", "b"), quorum=1)

    def breaks(*_):
        raise OSError("the key is gone")

    monkeypatch.setattr(jobs, "coordinate", lambda *_: None)
    monkeypatch.setattr(jobs, "Signer", breaks)
    jobs.Coordinator(order_text(order)).main(None, tmp_path, tmp_path / "out")
    ended = json.loads((tmp_path / "out" / "outcome.json").read_text())
    assert ended["status"] == "finished"
    why = "the server failed to send it (the key is gone)"
    assert ended["undelivered"] == {"a": why, "b": why}
