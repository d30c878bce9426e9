"""Whole federations on loopback: server, sites and administrator as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import atoll
from atoll.core.tree import leaves
from atoll.deploy.audit import check_audit
from atoll.deploy.coordinator import Order
from atoll.deploy.kits import provision, site_command
from atoll.deploy.local import Demo, free_port
from atoll.deploy.supervise import write_job
from atoll.engines.codec import load_checkpoint, save_checkpoint
from atoll.experiment.config import config_text, make_config
from atoll.experiment.privacy import epsilon, release

ATOLL = [sys.executable, "-m", "atoll"]
CLIENTS, ROUNDS = 3, 25
SMALL = ("--set", "hidden=8")


def lagoon(clients: int = CLIENTS) -> Any:
    return atoll.partition(atoll.load("lagoon", clients=clients), "column:owner")


def serial(method: str, federation: Any, **options: Any) -> dict[str, Any]:
    chosen = {"hidden": 8, **options.pop("set", {})}
    return atoll.run(method, federation, engine="serial", set=chosen, **options).metrics()


def processes(folder: Path) -> dict[int, list[str]]:
    """Every process that works in a folder, with its command."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(str(folder) in word for word in words) and "nvflare" in " ".join(words):
            found[int(entry.name)] = words
    return found


@pytest.mark.federation
def test_a_demo_equals_the_serial_run_and_leaves_no_process(tmp_path):
    began = time.monotonic()
    done = subprocess.run(
        [*ATOLL, "federate", "demo", "fedath", "--clients", "2", "--rounds", "2", *SMALL, "--json",
         "--keep", str(tmp_path / "fed"), "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["engine"] == "flare"
    assert found["metrics"] == serial("fedath", lagoon(2), rounds=2)
    assert processes(tmp_path / "fed") == {}
    assert check_audit(tmp_path / "fed" / "kits" / "site-1" / "atoll" / "audit.jsonl") > 4
    print(f"{time.monotonic() - began:.1f} s")


class Trial:
    """A federation that runs, and the administrator's commands on it."""

    def __init__(self, demo: Demo, federation: Any, folder: Path) -> None:
        self.demo, self.federation, self.folder = demo, federation, folder
        self.count = 0

    def start(self, *words: str) -> tuple[subprocess.Popen[str], Path]:
        """`atoll federate run ...` in the background, and where its result will be."""
        self.count += 1
        out = self.folder / f"out-{self.count}"
        place = [] if "--resume" in words else ["--out", str(out)]
        command = [*ATOLL, "federate", "run", *words, "--kit", str(self.demo.kits["admin"]),
                   *place, "--json"]  # fmt: skip
        run = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return run, out

    def finish(self, run: subprocess.Popen[str], timeout: float = 150) -> dict[str, Any]:
        out, err = run.communicate(timeout=timeout)
        assert run.returncode == 0, err
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        found["said"] = err
        return found

    def pids(self, name: str, kind: str) -> list[int]:
        """The processes of a party: its "parent", or that of its running "job"."""
        job = {pid for pid, words in processes(self.demo.kits[name]).items()
               if any("runner_process" in w or "worker_process" in w for w in words)}  # fmt: skip
        return sorted(job if kind == "job" else set(processes(self.demo.kits[name])) - job)

    def kill(self, name: str, *kinds: str) -> None:
        for kind in kinds:
            for pid in self.pids(name, kind):
                os.kill(pid, signal.SIGKILL)

    def events(self) -> list[dict[str, Any]]:
        """The audit log of the newest run, on the server."""
        logs = sorted(self.demo.kits["server"].glob("atoll/runs/*/audit.jsonl"),
                      key=lambda path: path.stat().st_mtime)  # fmt: skip
        lines = logs[-1].read_text().splitlines() if logs else []
        return [json.loads(line) for line in lines]

    def wait(self, what: Callable[[], Any], timeout: float = 90) -> None:
        end = time.monotonic() + timeout
        while not what():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.1)

    def wait_round(self, number: int, before: int = 0) -> None:
        self.wait(lambda: any(e.get("round", -1) >= number for e in self.events()[before:]))

    def status(self) -> dict[str, Any]:
        """What `atoll federate status` says; empty if it fails."""
        words = [*ATOLL, "federate", "status", "--kit", str(self.demo.kits["admin"]), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}

    def connected(self) -> dict[str, bool]:
        sites: dict[str, bool] = self.status().get("sites", {})
        return sites

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs that the server ever had."""
        jobs: list[dict[str, Any]] = self.status()["jobs"]
        return jobs


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    folder, federation = tmp_path_factory.mktemp("federation"), lagoon()
    with Demo(federation, folder / "fed") as demo:
        yield Trial(demo, federation, folder)
    assert processes(folder) == {}


@pytest.mark.federation
@pytest.mark.parametrize(
    ("method", "settings"),
    [("fedavg", {}), ("fedath", {}), ("fedper", {}), ("gcfl", {"preset": "plus"})],
)
def test_methods_equal_the_serial_run(method, settings, trial):
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    run, _ = trial.start(method, "--rounds", "4", *SMALL, *words)
    found = trial.finish(run)
    assert found["metrics"] == serial(method, trial.federation, rounds=4, set=settings)


@pytest.mark.federation
def test_private_runs_over_the_network(trial):
    """With noise from the seed it equals the simulation; with the sites' own it equals nothing."""
    dp = "clip=0.5,noise=0.2,delta=1e-6"
    told = f"{dp},scores=told,randomness=seed"
    run, _ = trial.start("fedavg", "--rounds", "3", *SMALL, "--dp", told)
    found = trial.finish(run)
    assert found["metrics"] == serial("fedavg", trial.federation, rounds=3, dp=told)
    assert found["privacy"]["epsilon_server"] is None
    run, out = trial.start("fedavg", "--rounds", "3", *SMALL, "--dp", dp)
    private = trial.finish(run)
    assert private["privacy"]["epsilon_server"] == pytest.approx(epsilon(3 * release(0.2), 1e-6))
    assert "test_accuracy" not in private["metrics"]
    servers = [load_checkpoint(folder / "seed-0" / "checkpoint.atoll")["server"]
               for folder in (out.with_name(f"out-{trial.count - 1}"), out)]  # fmt: skip
    one, other = (torch.cat([leaf.flatten() for leaf in leaves(tree)]) for tree in servers)
    assert (one - other).abs().max() > 0.05
    kit = trial.demo.kits["site-2"] / "atoll"
    assert len(list(kit.glob("runs/*/scores.csv"))) == 1
    sent = [json.loads(line) for line in (kit / "audit.jsonl").read_text().splitlines()]
    spent = [event["epsilon"] for event in sent if "release" in event]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(private["privacy"]["epsilon_server"])
    for path in trial.demo.kits["server"].rglob("*"):
        assert path.name not in ("noise.key", "scores.csv")


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What an undisturbed run gives."""
    return serial("fedath", lagoon(), rounds=ROUNDS)


def begun(trial: Trial, *words: str, round: int = 4) -> tuple[subprocess.Popen[str], Path]:
    """A run that has reached a round."""
    before = {path.name for path in trial.demo.kits["server"].glob("atoll/runs/*")}
    run, out = trial.start("fedath", "--rounds", str(ROUNDS), *SMALL, *words)
    trial.wait(lambda: before != {p.name for p in trial.demo.kits["server"].glob("atoll/runs/*")})
    trial.wait_round(round)
    return run, out


@pytest.mark.federation
def test_a_killed_site_that_comes_back_changes_nothing(trial, expected):
    run, _ = begun(trial)
    trial.kill("site-3", "parent", "job")
    time.sleep(2)
    trial.demo.start("site-3")
    found = trial.finish(run)
    assert "site-3 is back" in found["said"]
    assert found["metrics"] == expected


@pytest.mark.federation
def test_a_killed_site_that_stays_away_is_left_out(trial):
    run, out = begun(trial, "--deadline", "5")
    trial.kill("site-3", "parent", "job")
    found = trial.finish(run)
    assert "site-3 is left out" in found["said"]
    left = [e for e in trial.events() if e["event"] == "left out"]
    assert [e["site"] for e in left] == ["site-3"]
    scored = (out / "metrics.csv").read_text().splitlines()
    assert scored[-1].startswith(f"0,{ROUNDS - 1},2,")
    trial.demo.start("site-3")
    trial.wait(lambda: trial.connected().get("site-3"))


@pytest.mark.federation
@pytest.mark.parametrize("party", ["site-2", "server"])
def test_a_killed_job_process_is_started_again_and_changes_nothing(party, trial, expected):
    run, _ = begun(trial)
    trial.kill(party, "job")
    assert trial.finish(run)["metrics"] == expected


@pytest.mark.federation
def test_a_killed_server_loses_nothing(trial, expected):
    run, out = begun(trial)
    trial.kill("server", "parent", "job")
    _, said = run.communicate(timeout=60)
    assert run.returncode == 2
    assert "the server does not answer" in said
    trial.demo.start("server")
    trial.wait(lambda: list(trial.connected().values()) == [True] * CLIENTS)
    run, _ = trial.start("--resume", str(out))
    assert trial.finish(run)["metrics"] == expected


@pytest.mark.federation
@pytest.mark.parametrize("resumes", [1, 2])
def test_a_run_whose_administrator_was_killed_keeps_its_one_job(resumes, trial, expected):
    before = trial.jobs()
    run, out = begun(trial)
    run.kill()
    run.communicate()
    followed = [trial.start("--resume", str(out))[0] for _ in range(resumes)]
    for again in followed:
        found = trial.finish(again)
        assert found["metrics"] == expected
        assert "new job" not in found["said"]
    assert len(trial.jobs()) == len(before) + 1
    rounds = [e["round"] for e in trial.events() if e["event"] == "step" and e["step"] == "train"]
    assert rounds == list(range(ROUNDS))  # none was played twice


@pytest.mark.federation
def test_a_stopped_run_stays_stopped_and_two_resumes_share_one_job(trial, expected):
    run, out = begun(trial)
    words = [*ATOLL, "federate", "stop", "--kit", str(trial.demo.kits["admin"])]
    (job,) = trial.pids("site-1", "job")
    os.kill(job, signal.SIGSTOP)  # so that the run cannot finish first
    try:
        stopped = subprocess.run(words, capture_output=True, text=True, timeout=90, check=True)
        assert stopped.stdout.startswith("stopped atoll-")
        _, said = run.communicate(timeout=90)
    finally:
        with contextlib.suppress(ProcessLookupError):  # FLARE has ended it
            os.kill(job, signal.SIGCONT)
    assert run.returncode == 2
    assert f"the run is kept; continue with: atoll federate run --resume {out}" in said
    jobs = trial.jobs()
    both = [trial.start("--resume", str(out))[0] for _ in range(2)]
    assert [trial.finish(one)["metrics"] for one in both] == [expected] * 2
    assert len(trial.jobs()) == len(jobs) + 1
    (out / "result.json").unlink()
    again, _ = trial.start("--resume", str(out))
    assert trial.finish(again)["metrics"] == expected
    assert len(trial.jobs()) == len(jobs) + 1


@pytest.mark.federation
def test_a_site_slower_than_the_deadline_is_left_out_until_it_is_back(trial):
    run, _ = begun(trial, "--deadline", "3")
    (job,) = trial.pids("site-1", "job")
    os.kill(job, signal.SIGSTOP)
    try:
        trial.wait(lambda: any(e["event"] == "left out" for e in trial.events()))
    finally:
        os.kill(job, signal.SIGCONT)
    trial.wait(lambda: any(e["event"] == "back" for e in trial.events()))
    found = trial.finish(run)
    assert "site-1 is left out: no answer to" in found["said"]


@pytest.mark.federation
def test_a_site_whose_training_diverges_is_left_out(trial):
    settings = trial.demo.kits["site-2"] / "local" / "atoll.json"
    good = settings.read_text()
    content = load_checkpoint(Path(json.loads(good)["data"]))
    graph = content["graph"]
    huge = type(graph)(**{**vars(graph), "edge_weight": graph.edge_weight * float("nan")})
    save_checkpoint(trial.folder / "bad.atoll", {**content, "graph": huge})
    settings.write_text(json.dumps({**json.loads(good), "data": str(trial.folder / "bad.atoll")}))
    try:
        run, _ = trial.start("fedavg", "--rounds", "2", *SMALL)
        found = trial.finish(run)
    finally:
        settings.write_text(good)
    assert "site-2 is left out: training diverged" in found["said"]


@pytest.mark.federation
def test_a_method_outside_the_policy_is_refused_in_one_sentence(trial):
    policy = trial.demo.folder / "policy-site-2.toml"
    good = policy.read_text()
    policy.write_text('methods = ["fedavg"]\n')
    try:
        run, _ = trial.start("fedath", "--rounds", "2", *SMALL)
        _, said = run.communicate(timeout=90)
    finally:
        policy.write_text(good)
    assert run.returncode == 2
    last = said.strip().splitlines()[-1]
    assert last == ("error: site-2: its policy does not allow method 'fedath'; it allows: fedavg")


def without_certificate(port: int) -> bytes:
    """What a server says to somebody who speaks TLS and shows no certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection(("localhost", port), timeout=10) as plain,
            context.wrap_socket(plain) as wrapped,
        ):
            wrapped.send(b"hello")
            return wrapped.recv(1)
    except (ssl.SSLError, ConnectionError):
        return b""


@pytest.mark.federation
def test_strangers_do_not_get_in(trial):
    """Another federation's kit, a kit under another site's name, and no certificate at all."""
    strange = provision(trial.folder / "strange", ["site-4"], port=trial.demo.port)["site-4"]
    taken = trial.folder / "taken"
    shutil.copytree(trial.demo.kits["site-1"], taken)
    about = json.loads((taken / "kit.json").read_text())
    (taken / "kit.json").write_text(json.dumps({**about, "name": "site-9"}))
    for name, kit in (("site-4", strange), ("site-9", taken)):
        log = trial.folder / f"{name}.log"
        trial.demo.processes.start(name, site_command(kit), log)
    assert without_certificate(trial.demo.port) == b""
    time.sleep(15)
    try:
        assert trial.connected() == dict.fromkeys(trial.demo.sites, True)
    finally:
        for name in ("site-4", "site-9"):
            trial.demo.processes.started[name].kill()
            trial.demo.processes.started[name].wait()


SUBMIT = """
import sys, time
from pathlib import Path
from atoll.core.errors import ClientLost
from atoll.engines.flare import AdminSession
kit, user, job = sys.argv[1:]
desk = AdminSession(Path(kit), user)
try:
    number = desk.submit(Path(job))
    while not desk.status(number).startswith("FINISHED"):
        time.sleep(0.5)
    print(desk.status(number))
except ClientLost as error:
    print("REFUSED", error)
desk.close()
"""


@pytest.mark.federation
@pytest.mark.parametrize("kind", ["class", "code"])
def test_a_job_with_another_class_or_with_code_does_not_run(kind, trial):
    config = config_text(make_config(rounds=1))
    order = Order(run=f"evil-{kind}", config=config, sites=trial.demo.sites, quorum=1)
    job = write_job(order, trial.demo.sites, trial.folder)
    witness = trial.folder / f"evil-{kind}.txt"
    if kind == "code":
        (job / "site" / "custom").mkdir()
        (job / "site" / "custom" / "evil.py").write_text(
            "from atoll.deploy.jobs import Participant\n"
            f"open({str(witness)!r}, 'w').close()\nclass Evil(Participant): pass\n"
        )
        path = "evil.Evil"
    else:
        path = "nvflare.app_common.np.np_trainer.NPTrainer"
    file = job / "site" / "config" / "config_fed_client.json"
    content = json.loads(file.read_text())
    content["executors"][0]["executor"]["path"] = path
    file.write_text(json.dumps(content))
    words = [
        sys.executable,
        "-c",
        SUBMIT,
        str(trial.demo.kits["admin"]),
        trial.demo.admin,
        str(job),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    last = (done.stdout.splitlines() or [done.stderr])[-1]
    assert last.startswith(("REFUSED", "FINISHED")), last
    assert "COMPLETED" not in last
    assert not witness.exists()
    assert not list(trial.demo.kits["server"].glob(f"atoll/runs/evil-{kind}/result.json"))


@pytest.mark.federation
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process(how, tmp_path):
    demo = subprocess.Popen(
        [*ATOLL, "federate", "demo", "--rounds", "500", "--keep", str(tmp_path / "fed"), "--out",
         str(tmp_path / "out")], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    end = time.monotonic() + 60
    while len(processes(tmp_path / "fed")) < 8 and time.monotonic() < end:
        time.sleep(0.1)
    demo.send_signal(how)
    demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert processes(tmp_path / "fed") == {}


def test_a_free_port_can_be_bound():
    with socket.socket() as one:
        one.bind(("127.0.0.1", free_port()))
