"""The administrator's part, against a scripted server."""

from __future__ import annotations

import json

import msgspec
import pytest

from atoll.core.errors import AtollError, ClientLost, ConfigError
from atoll.deploy.coordinator import Order, order_text, read_order
from atoll.deploy.kits import CLASSES
from atoll.deploy.supervise import Supervisor, read_saved_order, write_job


class FakeSession:
    """A server that plays a script: what each job leaves behind."""

    def __init__(self, *outcomes, rounds=(1, 2, 3, 4, 5, 6, 7, 8), before=()):
        self.outcomes, self.rounds = list(outcomes), iter(rounds)
        self.listed = [{"job_id": str(i), "status": one} for i, one in enumerate(before)]
        self.submitted, self.aborted, self.watched = {}, [], []
        self.tokens, self.undelivered = {"a": "1", "b": "2"}, {}

    def connected(self):
        return dict(self.tokens)

    def jobs(self, name):
        assert name == "atoll-r"
        return self.listed[::-1]

    def submit(self, job, token):
        if token not in self.submitted:
            self.submitted[token] = json.loads((job / "meta.json").read_text())
            number = str(len(self.listed))
            self.listed.append({"job_id": number, "status": "SUBMITTED"})
        return self.listed[-1]["job_id"]

    def status(self, job):
        self.watched.append(job)
        self.listed[int(job)]["status"] = "FINISHED:COMPLETED"
        return "FINISHED:COMPLETED"

    def progress(self, job):
        return {"seed": 0, "round": next(self.rounds, 8), "rounds": 9, "out": {}}

    def joined(self, job):
        return dict(self.tokens)

    def abort(self, job):
        self.aborted.append(job)

    def download(self, job, to):
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            (to / "atoll").mkdir()
            left = {"reason": f"it was {outcome}", "undelivered": self.undelivered}
            (to / "atoll" / "outcome.json").write_text(json.dumps({"status": outcome, **left}))
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
    assert len(desk.submitted) == 3
    assert len(said) == 2
    assert read_saved_order(tmp_path / "out") == supervisor.order


def test_a_job_that_gets_nowhere_is_given_up(tmp_path):
    desk = FakeSession(None, None, None, None, None, rounds=(1, 1, 1, 1, 1, 1))
    with pytest.raises(ClientLost, match="--resume"):
        supervised(desk, tmp_path)[0].run()
    assert len(desk.submitted) == 5


def test_a_refused_run_is_not_submitted_again(tmp_path):
    desk = FakeSession("failed", "finished")
    with pytest.raises(AtollError, match="it was failed"):
        supervised(desk, tmp_path)[0].run()
    assert len(desk.submitted) == 1


@pytest.mark.parametrize("trained", [False, True])
def test_only_a_run_that_trained_blocks_its_folder(tmp_path, trained):
    desk, download = FakeSession("failed"), FakeSession.download

    def more(job, to):
        found = download(desk, job, to) / "atoll"
        (found / "config.toml").write_text("")
        (found / "seed-0").mkdir()
        (found / f"seed-0/{'checkpoint.atoll' if trained else 'other'}").write_text("")
        return to

    desk.download = more
    with pytest.raises(AtollError, match="it was failed"):
        supervised(desk, tmp_path)[0].run()
    assert (tmp_path / "out/config.toml").exists() == trained
    assert read_saved_order(tmp_path / "out").run == "r"  # --resume tries again


@pytest.mark.parametrize("status", ["SUBMITTED", "APPROVED", "DISPATCHED", "RUNNING"])
def test_a_resumed_run_follows_the_job_that_has_not_ended(status, tmp_path):
    desk = FakeSession("finished", before=("FINISHED:ABORTED", status))
    supervisor, said = supervised(desk, tmp_path, resuming=True)
    supervisor.run()
    assert desk.submitted == {}
    assert desk.watched == ["1"]
    assert said == [f"the run has a job ({status.lower()}); following it"]


def test_a_result_that_nobody_fetched_is_fetched(tmp_path):
    desk = FakeSession("finished", before=("FINISHED:COMPLETED",))
    desk.tokens = {}  # no site is needed for it
    supervised(desk, tmp_path, resuming=True)[0].run()
    assert desk.submitted == {}
    assert (tmp_path / "out" / "outcome.json").exists()


@pytest.mark.parametrize(("connected", "jobs"), [("a", 0), ("b", 1)])
def test_a_site_that_lacks_its_model_gets_it_once_it_is_connected(connected, jobs, tmp_path):
    desk = FakeSession("finished", "finished", before=("FINISHED:COMPLETED",))
    desk.tokens, desk.undelivered = {connected: "1"}, {"b": "it was away"}
    supervisor, said = supervised(desk, tmp_path, resuming=True)
    supervisor.run()
    assert len(desk.submitted) == jobs
    assert any(line.startswith("b did not take the model: it was away") for line in said)


def test_a_run_that_its_last_job_did_not_finish_gets_another(tmp_path):
    desk = FakeSession("short", "busy", "finished", before=("FINISHED:COMPLETED",))
    supervised(desk, tmp_path, resuming=True)[0].run()
    assert list(desk.submitted) == ["r-1", "r-2"]  # two that submit at once use the same token


def test_a_refused_token_means_that_another_was_faster(tmp_path):
    desk = FakeSession("finished")

    def submit(job, token):
        desk.listed.append({"job_id": "0", "status": "RUNNING"})
        raise ClientLost("the token belongs to another job")

    desk.submit = submit
    supervised(desk, tmp_path)[0].run()
    assert desk.watched == ["0"]


def test_a_site_that_comes_back_is_taken_in_by_a_new_job(tmp_path):
    desk = FakeSession("stopped", "finished")
    answers = iter(["RUNNING", "FINISHED:ABORTED", "FINISHED:COMPLETED"])
    desk.status = lambda job: (
        desk.listed[int(job)].update(status=next(answers)) or (desk.listed[int(job)]["status"])
    )
    desk.joined = lambda job: {"a": "1", "b": "2" if desk.aborted else "an older process"}
    supervisor, said = supervised(desk, tmp_path)
    supervisor.run()
    assert desk.aborted == ["0"]
    assert said == ["b is back; continuing in a new job"]


def test_a_run_waits_for_its_sites_and_says_who_is_missing(tmp_path):
    desk = FakeSession("finished")
    desk.tokens = {"a": "1"}
    supervisor, _ = supervised(desk, tmp_path)
    supervisor.again = "atoll federate run --resume r --kit admin"
    late = r"^b did not connect within 0\.1 s; start it, or leave it out with"
    with pytest.raises(ClientLost, match=f"{late} --sites, and continue with: {supervisor.again}"):
        supervisor.run()
    supervisor.resuming = True
    with pytest.raises(ClientLost, match=f"{late} --without b, and continue with"):
        supervisor._gather(2)


def test_an_order_survives_its_way_through_a_job(tmp_path):
    order = Order(run="r", config='method = "fedavg"\n{x}', sites=("a",), quorum=1, deadline=2.5)
    assert read_order(order_text(order)) == order
    job = write_job(order, ["a"], tmp_path)
    assert not list(job.rglob("*.py"))
    text = (job / "server" / "config" / "config_fed_server.json").read_text()
    assert json.loads(text)["workflows"][0]["path"] == CLASSES["server"][0]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_order("{}")


def test_a_run_continues_without_a_site_when_its_job_has_ended(tmp_path):
    desk = FakeSession("finished", before=("RUNNING",))
    supervisor, _ = supervised(desk, tmp_path, resuming=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "order").write_text(order_text(supervisor.order))
    supervisor.order = msgspec.structs.replace(supervisor.order, without=("b",))
    with pytest.raises(ConfigError, match="stop it with `atoll federate stop`"):
        supervisor.run()
    desk.listed[0]["status"] = "FINISHED:ABORTED"
    supervisor.run()
    assert [job["deploy_map"]["site"] for job in desk.submitted.values()] == [["a"]]
    assert read_saved_order(tmp_path / "out").without == ("b",)


@pytest.mark.parametrize("outcome", ["stopped", None])
def test_a_job_that_another_administrator_stopped_stays_stopped(outcome, tmp_path, monkeypatch):
    monkeypatch.setattr("atoll.deploy.supervise.PAUSE", 0.1)
    desk = FakeSession(outcome, "finished")
    desk.status = lambda job: (
        desk.listed[int(job)].update(status="FINISHED:ABORTED") or ("FINISHED:ABORTED")
    )
    with pytest.raises(
        AtollError, match="the job was stopped, and the run is saved; continue with"
    ):
        supervised(desk, tmp_path)[0].run()
    assert len(desk.submitted) == 1


def test_a_job_that_the_removal_of_a_site_stopped_continues(tmp_path):
    desk, removed = FakeSession("stopped", "finished"), ["earlier"]
    answers = iter(["FINISHED:ABORTED", "FINISHED:COMPLETED"])

    def status(job):
        if not desk.watched:
            removed.append("b")
            del desk.tokens["b"]
        desk.watched.append(job)
        desk.listed[int(job)]["status"] = next(answers)
        return desk.listed[int(job)]["status"]

    desk.status = status
    supervised(desk, tmp_path, removed=lambda: removed)[0].run()
    assert [job["deploy_map"]["site"] for job in desk.submitted.values()] == [["a", "b"], ["a"]]


def test_a_job_that_another_administrator_continues_is_followed(tmp_path):
    desk = FakeSession("stopped", "finished")
    answers = iter(["FINISHED:ABORTED", "FINISHED:COMPLETED"])

    def status(job):
        desk.watched.append(job)
        desk.listed[int(job)]["status"] = next(answers)
        if job == "0":
            desk.listed.append({"job_id": "1", "status": "RUNNING"})
        return desk.listed[int(job)]["status"]

    desk.status = status
    supervised(desk, tmp_path)[0].run()
    assert desk.watched == ["0", "1"]
    assert len(desk.submitted) == 1


def test_a_finished_run_is_not_submitted_again_for_a_site_that_was_excluded(tmp_path):
    desk = FakeSession("finished", "finished", before=["FINISHED:COMPLETED"])
    desk.undelivered = {"b": "it did not begin this run"}
    supervisor, _ = supervised(desk, tmp_path, resuming=True)
    supervisor.order = msgspec.structs.replace(supervisor.order, without=("b",))
    supervisor.run()
    assert not desk.submitted


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"e30", b"{}"])
def test_a_damaged_order_is_one_sentence(tmp_path, content):
    (tmp_path / "order").write_bytes(content)
    with pytest.raises(ConfigError, match="order"):
        read_saved_order(tmp_path)
