"""The administrator's part, against a scripted server."""

from __future__ import annotations

import json

import pytest

from atoll.core.errors import AtollError, ClientLost, ConfigError
from atoll.deploy.coordinator import Order, order_text, read_order
from atoll.deploy.kits import CLASSES
from atoll.deploy.supervise import Supervisor, read_saved_order, write_job


class FakeSession:
    """A server that plays a script: what each job leaves behind."""

    def __init__(self, *outcomes, rounds=(1, 2, 3, 4, 5, 6, 7, 8)):
        self.outcomes, self.rounds = list(outcomes), iter(rounds)
        self.jobs, self.aborted = [], []
        self.tokens = {"a": "1", "b": "2"}

    def connected(self):
        return dict(self.tokens)

    def submit(self, job):
        self.jobs.append(json.loads((job / "meta.json").read_text()))
        return str(len(self.jobs))

    def status(self, job):
        return "FINISHED:COMPLETED"

    def progress(self, job):
        return {"seed": 0, "round": next(self.rounds, 8), "rounds": 9, "out": {}}

    def abort(self, job):
        self.aborted.append(job)

    def download(self, job, to):
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            (to / "atoll").mkdir()
            text = json.dumps({"status": outcome, "reason": f"it was {outcome}"})
            (to / "atoll" / "outcome.json").write_text(text)
        return to


def supervised(desk, tmp_path, **options):
    order = Order(run="r", config="", sites=("a", "b"), quorum=1)
    said = []
    supervisor = Supervisor(desk, order, tmp_path / "out", tell=said.append,
                            on_progress=lambda now: None, patience=0.1, **options)  # fmt: skip
    return supervisor, said


def test_a_job_that_dies_is_submitted_again(tmp_path):
    desk = FakeSession(None, "stopped", "finished")
    supervisor, said = supervised(desk, tmp_path)
    supervisor.run()
    assert len(desk.jobs) == 3
    assert len(said) == 2
    assert read_saved_order(tmp_path / "out") == supervisor.order


def test_a_job_that_gets_nowhere_is_given_up(tmp_path):
    desk = FakeSession(None, None, None, None, None, rounds=(1, 1, 1, 1, 1, 1))
    with pytest.raises(ClientLost, match="--resume"):
        supervised(desk, tmp_path)[0].run()
    assert len(desk.jobs) == 5


def test_a_refused_run_is_not_submitted_again(tmp_path):
    desk = FakeSession("failed", "finished")
    with pytest.raises(AtollError, match="it was failed"):
        supervised(desk, tmp_path)[0].run()
    assert len(desk.jobs) == 1


def test_a_run_waits_for_its_sites_and_says_who_is_missing(tmp_path):
    desk = FakeSession("finished")
    desk.tokens = {"a": "1"}
    with pytest.raises(ClientLost, match=r"^b did not connect within 0\.1 s"):
        supervised(desk, tmp_path)[0].run()


def test_an_order_survives_its_way_through_a_job(tmp_path):
    order = Order(run="r", config='method = "fedavg"\n{x}', sites=("a",), quorum=1, deadline=2.5)
    assert read_order(order_text(order)) == order
    job = write_job(order, ["a"], tmp_path)
    assert not list(job.rglob("*.py"))
    text = (job / "server" / "config" / "config_fed_server.json").read_text()
    assert json.loads(text)["workflows"][0]["path"] == CLASSES["server"][0]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_order("{}")
