"""Whole federations on loopback: server, sites and administrator as processes of their own."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest
import torch

from atoll.core.tree import leaves
from atoll.deploy.audit import check_audit
from atoll.deploy.kits import provision, site_command
from atoll.deploy.local import free_port
from atoll.engines.codec import load_checkpoint, save_checkpoint
from atoll.experiment.privacy import epsilon, release
from tests.e2e.trial import ATOLL, SMALL, lagoon, processes, serial, submit_evil


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
    assert len(check_audit(tmp_path / "fed" / "kits" / "site-1" / "atoll" / "audit.jsonl")) > 4
    print(f"{time.monotonic() - began:.1f} s")


@pytest.mark.federation
@pytest.mark.parametrize(
    ("method", "settings"),
    [("fedavg", {}), ("fedath", {}), ("fedper", {}), ("reef", {}), ("gcfl", {"preset": "plus"})],
)
def test_methods_equal_the_serial_run(method, settings, trial):
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    run, _ = trial.start(method, "--rounds", "4", *SMALL, *words)
    found = trial.finish(run)
    assert found["metrics"] == serial(method, trial.federation, rounds=4, set=settings)


@pytest.mark.federation
def test_private_runs_over_the_network(trial):
    """A run equals the simulation with noise from the seed, but not with the sites' own noise."""
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
    assert "site-2 is excluded: training diverged" in found["said"]


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
    """Return the server's answer to a TLS client without a certificate."""
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


@pytest.mark.federation
@pytest.mark.parametrize("kind", ["class", "code"])
def test_a_job_with_another_class_or_with_code_does_not_run(kind, trial):
    witness = trial.folder / f"evil-{kind}.txt"
    last = submit_evil(trial, kind, witness)
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
