"""The parts of a federation one by one: policy, audit log, data of a site, dry run, supervisor."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from atoll.core.errors import AtollError, ClientLost, ConfigError, DataError
from atoll.deploy.audit import Audit, check_audit
from atoll.deploy.coordinator import Order, order_text, read_order
from atoll.deploy.disclosure import disclosure
from atoll.deploy.kits import ADMIN, CLASSES, provision
from atoll.deploy.local import Processes, marked
from atoll.deploy.policy import Policy, Refusal, read_policy
from atoll.deploy.site import Site
from atoll.deploy.site_data import read_site_data, write_clients
from atoll.deploy.supervise import Supervisor, read_saved_order, write_job
from atoll.engines.codec import encode
from atoll.engines.fleet import Packet
from atoll.experiment.config import config_text, make_config
from atoll.methods import FedAvg
from atoll.testing import small_federation


def test_an_audit_log_shows_what_was_changed_later(tmp_path):
    path = tmp_path / "audit.jsonl"
    Audit(path).note("first", size=1)
    log = Audit(path)
    log.note("second")
    log.note("third")
    assert check_audit(path) == 3
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0].replace("1", "2"), *lines[1:]]))
    with pytest.raises(DataError, match="line 2"):
        check_audit(path)
    path.write_text("".join([lines[0], lines[2]]))
    with pytest.raises(DataError, match="line 2"):
        check_audit(path)


def test_a_line_that_a_crash_cut_off_does_not_break_the_audit_log(tmp_path):
    path = tmp_path / "audit.jsonl"
    Audit(path).note("first")
    with path.open("a") as file:
        file.write('{"event": "sec')
    Audit(path).note("second")
    assert check_audit(path) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("method = ['fedavg']", "did you mean 'methods'"),
        ("methods = ['fedavgg']", "did you mean 'fedavg'"),
        ("rounds = 'many'", "cannot be used"),
        ("disclose = 'all'", "disclose takes a list"),
        ("rounds = ", "cannot be read"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused(text, problem, tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_policy(file)


def test_a_policy_file_that_is_not_there_is_not_the_default(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_policy(tmp_path / "none.toml")


def test_a_site_that_lacks_a_class_numbers_the_others_as_all_do(tmp_path, tables):
    whole = read_site_data(tables(tmp_path / "a", "xyz"))
    part = read_site_data(tables(tmp_path / "b", "xz"), classes=["x", "y", "z"])
    assert whole.words == part.words
    assert part.classes == 3
    assert set(part.graph.y.tolist()) == {0, 2}
    with pytest.raises(ConfigError, match="class 'z', which --classes does not name"):
        read_site_data(tmp_path / "b", classes=["x", "y"])


def test_a_file_that_is_no_clients_data_is_refused(tmp_path):
    from atoll.engines.checkpoint import save_checkpoint

    save_checkpoint(tmp_path / "x.atoll", {"server": 1})
    with pytest.raises(DataError, match="is not a client's data"):
        read_site_data(tmp_path / "x.atoll")


def site(tmp_path: Path, policy: Policy | None = None) -> Site:
    file = write_clients(small_federation(), tmp_path / "data")[0]
    return Site(read_site_data(file), policy or Policy(), tmp_path / "site")


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ({}, "is nothing that a site does"),
        ({"do": "delete"}, "is nothing that a site does"),
        ({"do": "step", "run": "x"}, "was not begun here"),
        ({"do": "hello"}, "KeyError"),
        ({"do": "hello", "version": "9.9"}, "it has Atoll"),
    ],
)
def test_a_site_answers_nonsense_with_a_reason_and_lives_on(head, problem, tmp_path):
    one = site(tmp_path)
    answer = one.answer(Packet(head, b""))
    assert problem in answer.head["reason"]
    assert one.answer(Packet({"do": "ping"}, b"")).head == {}


@pytest.mark.parametrize("run", ["", "../r", "r/../..", "/tmp/r", "r.0", "r" * 101, 3, None])
def test_a_run_cannot_name_any_folder(run, tmp_path):
    one = site(tmp_path)
    config = config_text(make_config(method="fedavg", rounds=1))
    answer = one.answer(Packet({"do": "begin", "run": run, "config": config}, b""))
    assert "a run's name" in answer.head["reason"]
    if isinstance(run, str):
        order = Order(run=run, config=config, sites=("a",), quorum=1)
        with pytest.raises(ConfigError, match="a run's name"):
            read_order(order_text(order))


@pytest.mark.parametrize(
    ("policy", "base", "problem"),
    [
        (Policy(), "BASE", "does not come with Atoll"),
        (Policy(methods=("fedtad",)), "fedavg", "does not allow method 'fedavg'"),
    ],
)
def test_a_policy_counts_for_the_method_inside_a_plug(policy, base, problem, tmp_path):
    code, ran = tmp_path / "mine_too.py", tmp_path / "ran"
    code.write_text(f"open({str(ran)!r}, 'w')")
    one = site(tmp_path, policy)
    base = base.replace("BASE", f"{code}:Mine")
    config = config_text(make_config(method="fedtad", rounds=1, set={"base": base}))
    answer = one.answer(Packet({"do": "begin", "run": "r", "config": config}, b""))
    assert problem in answer.head["reason"]
    assert not ran.exists()
    if not base.endswith("Mine"):
        assert problem in disclosure(
            make_config(method="fedtad", rounds=1, set={"base": base}), one.data, policy
        )["run"]  # fmt: skip


def test_a_server_cannot_have_a_site_open_its_files(tmp_path):
    one = site(tmp_path)
    federation = tmp_path / "other.atoll"  # opened, it would be told from one that is not there
    config = config_text(make_config(method="fedavg", rounds=1)).replace(
        'data = "lagoon"', f'data = "{federation}"'
    )
    assert str(federation) in config
    assert one.answer(Packet({"do": "begin", "run": "r", "config": config}, b"")).head == {}


@pytest.mark.parametrize("round", [-2, 1])
def test_a_round_beyond_the_policy_is_refused(round):
    with pytest.raises(Refusal, match="allows 1 rounds"):
        Policy(rounds=1).check_step(FedAvg(None).train, round)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "__init__"},
        {"step": "net"},
        {"owner": "method.net"},
        {"owner": "method", "flags": {"epochs": True}},
        {"owner": "evaluator", "step": "score", "flags": {"method": True}},
    ],
)
def test_a_packet_can_name_declared_steps_alone(change, tmp_path):
    one = site(tmp_path)
    config = config_text(make_config(method="fedavg", rounds=1))
    assert one.answer(Packet({"do": "begin", "run": "r", "config": config}, b"")).head == {}
    head = {"do": "step", "run": "r", "owner": "method", "step": "train", "flags": {}, "round": 0,
            "attempt": "a", "state": -2, "key": 1, **change}  # fmt: skip
    answer = one.answer(Packet(head, encode(None)))
    assert answer.head["failure"] == "bad"
    assert not (tmp_path / "site" / "runs").exists()


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


def test_no_process_outlives_its_block(tmp_path):
    sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    child = f"import subprocess, sys; subprocess.Popen({sleep}, start_new_session=True).wait()"
    with Processes() as processes:
        processes.start("parent", [sys.executable, "-c", child], tmp_path / "log")
        end = time.monotonic() + 20
        while len(processes.alive()) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(processes.alive()) == 2
        # The parent is killed; the child goes on, and is found by the mark that it inherited.
        processes.started["parent"].kill()
        processes.started["parent"].wait()
        assert len(processes.alive()) == 1
        assert processes.dead() == ["parent"]
    assert processes.alive() == []
    assert os.getpid() not in dict(marked())


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


def test_a_site_counts_what_it_sent_over_restarts(tmp_path):
    log = Audit(tmp_path / "site" / "audit.jsonl")
    log.note("sent", run="r", bytes=70)
    log.note("sent", run="other", bytes=500)
    one = site(tmp_path, Policy(run_bytes=100))
    config = config_text(make_config(method="fedavg", rounds=1))
    one.answer(Packet({"do": "begin", "run": "r", "config": config}, b""))
    assert one.job.sent == 70
