"""Metrics are scraped on loopback and read by Prometheus's own parser."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from atoll.core.errors import ConfigError
from atoll.deploy import metrics
from atoll.deploy.audit import Audit
from atoll.deploy.kits import provision
from atoll.deploy.local import free_port
from atoll.deploy.metrics import GAUGES, NEWEST, serving

Samples = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def kits(tmp_path_factory) -> dict[str, Path]:
    return provision(tmp_path_factory.mktemp("fed") / "kits", ["a", "b"], port=free_port())


def get(port: int, path: str, accept: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(port: int) -> Samples:
    """Samples by name and by the value of their label."""
    families = prometheus(get(port, "/metrics")[1])
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in families for sample in family.samples
    }  # fmt: skip


@contextmanager
def child(code: str) -> Iterator[int]:
    """A process that has run some lines and waits."""
    lines = ("import socket, time", code, "print(flush=True)", "time.sleep(99)")
    command = [sys.executable, "-c", "\n".join(lines)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_server_counts_all_runs_and_names_only_the_newest(kits):
    kit, port = kits["server"], free_port()
    with serving(kit, port, list):
        before = scrape(port)
        assert before["atoll_rounds_total", ""] == before["atoll_runs_total", ""] == 0
        for number in range(NEWEST + 2):
            log = Audit(kit / "atoll" / "runs" / f"run-{number}" / "audit.jsonl")
            log.note("start", run="r", sites=["a", "b"])
            log.note("step", step="train", round=0, bytes={"a": (10, 5), "b": (10, 0)})
            log.note("left out", site="b", round=0, kind="lost", reason="no answer")
            log.note("refused", site="b", reason="its policy does not allow it")
            log.note("round", seed=0, round=1, rounds=4, epsilon=2.5)
        found = scrape(port)
    runs = NEWEST + 2
    assert found["atoll_runs_total", ""] == found["atoll_rounds_total", ""] == runs
    assert found["atoll_sent_bytes_total", "a"] == 10 * runs
    assert found["atoll_received_bytes_total", "a"] == 5 * runs
    assert found["atoll_received_bytes_total", "b"] == 0
    assert found["atoll_failures_total", "b"] == found["atoll_refusals_total", "b"] == runs
    assert sum(name == "atoll_run_round" for name, _ in found) == NEWEST
    assert {value for (name, _), value in found.items() if name == "atoll_run_epsilon"} == {2.5}
    assert {value for (name, _), value in found.items() if name == "atoll_run_rounds"} == {4}
    assert (found["atoll_left_out", "a"], found["atoll_left_out", "b"]) == (0, 1)
    assert time.time() - found["atoll_last_answer_timestamp_seconds", "a"] < 600
    assert ("atoll_last_answer_timestamp_seconds", "b") not in found
    days = (found["atoll_certificate_expiry_timestamp_seconds", ""] - time.time()) / 86400
    assert 30 < days < 4000
    assert found["atoll_disk_free_bytes", ""] > 0
    assert not any("policy" in name or "policy" in label for name, label in found)


def test_a_site_shows_its_answers_refusals_and_budget(kits, tmp_path):
    kit, port = kits["a"], free_port()
    policy = tmp_path / "policy.toml"
    policy.write_text("epsilon = 8.0\n")
    (kit / "local" / "atoll.json").write_text(json.dumps({"policy": str(policy)}))
    log = Audit(kit / "atoll" / "audit.jsonl")
    log.note("begin", run="r-0", config="secret of the owner")
    place = {"run": "r-0", "step": "train", "bytes": 7, "noise": 2.0, "epsilon": 2.5}
    for number in range(3):
        log.note("sent", **place, round=number, release=f"release-{number}")
    log.note("refused", reason="its policy does not allow it", run="r-0")
    log.note("bad", reason="not a packet")
    with serving(kit, port, list):
        found = scrape(port)
        policy.write_text("epsilon = 0")
        unreadable = scrape(port)
    assert found["atoll_rounds_total", ""] == found["atoll_run_round", "r-0"] == 3
    assert found["atoll_sent_bytes_total", "server"] == 21
    assert found["atoll_refusals_total", "server"] == found["atoll_failures_total", "server"] == 1
    assert 3 < found["atoll_epsilon_spent", ""] < 8 == found["atoll_epsilon_limit", ""]
    assert "in all private runs" in GAUGES["atoll_epsilon_spent"][1]  # others have no epsilon
    assert ("atoll_received_bytes_total", "server") not in found
    assert ("atoll_epsilon_spent", "") not in unreadable  # no number that could be wrong
    text = str(found)
    assert "secret" not in text
    assert "release" not in text


def test_both_formats_parse_and_name_the_party(kits):
    port = free_port()
    with serving(kits["b"], port, list):
        wanted = "application/openmetrics-text; version=1.0.0"
        families = {family.name: family for family in openmetrics(get(port, "/metrics", wanted)[1])}
    (info,) = families["atoll"].samples
    assert info.labels["party"] == "b"
    assert info.labels["kind"] == "site"
    assert families["atoll_rounds"].type == "counter"
    assert all(name.startswith("atoll") for name in families)


def test_health_needs_the_process_and_ready_needs_the_listening_server(kits):
    port, served = free_port(), json.loads((kits["server"] / "kit.json").read_text())["port"]
    listen = f"s = socket.create_server(('127.0.0.1', {served}))"
    pids: list[int] = []
    with serving(kits["server"], port, lambda: pids):
        assert get(port, "/health") == (503, "service unavailable\n")
        with child("") as idle:
            pids.append(idle)
            assert get(port, "/health") == (200, "ok\n")
            assert get(port, "/ready")[0] == 503
            with child(listen) as server:
                pids.append(server)
                assert get(port, "/ready") == (200, "ok\n")
                found = scrape(port)
        assert get(port, "/health")[0] == 503  # processes that ended are no processes
        assert get(port, "/")[0] == get(port, "/kit.json")[0] == 404
    assert found["atoll_ready", ""] == 1
    assert found["atoll_processes", "party"] == 2
    assert found["atoll_process_threads", "party"] == 2
    assert found["atoll_process_resident_memory_bytes", "party"] > 1e6
    assert found["atoll_process_open_fds", "party"] >= 4


def test_a_site_is_ready_while_it_is_connected(kits):
    port, served = free_port(), json.loads((kits["a"] / "kit.json").read_text())["port"]
    connect = f"s = socket.create_connection(('127.0.0.1', {served}))"
    with socket.create_server(("127.0.0.1", served)), child(connect) as site:
        with serving(kits["a"], port, lambda: [site]):
            assert get(port, "/ready")[0] == 200
        with serving(kits["a"], port, lambda: [os.getpid()]):
            assert get(port, "/ready")[0] == 503


def test_a_port_in_use_and_no_port(kits):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be used"):
            serving(kits["a"], port, list).__enter__()
    with pytest.raises(ConfigError, match=r"port 99999 of 127.0.0.1 cannot be used"):
        serving(kits["a"], 99999, list).__enter__()
    with serving(kits["a"], None, list), pytest.raises(urllib.error.URLError):
        get(port, "/health")


def test_a_slow_client_is_dropped_without_a_word(kits, monkeypatch, capfd):
    monkeypatch.setattr(metrics._Handler, "timeout", 0.1)
    port = free_port()
    with serving(kits["b"], port, list), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        assert client.recv(1) == b""  # the server has closed it
    assert capfd.readouterr().err == ""


def test_an_alarm_about_a_file_stays_and_takes_no_other_number_away(tmp_path):
    kit = provision(tmp_path / "kits", ["a"], port=free_port())["server"]
    for name in ("good", "bad"):
        log = Audit(kit / "atoll" / "runs" / name / "audit.jsonl")
        log.note("round", seed=0, round=3, rounds=9)
        log.note("round", seed=0, round="x" if name == "bad" else 4, rounds=9)
    port = free_port()
    with serving(kit, port, list):
        for _ in range(3):  # the file is read once, but the alarm stays
            found = scrape(port)
            assert found["atoll_errors", "runs"] == 1
            assert found["atoll_errors", "certificate"] == 0
            assert found["atoll_run_round", "good"] == 4
            assert found["atoll_run_round", "bad"] == 3
        (kit / "startup").rename(kit / "elsewhere")
        assert get(port, "/metrics")[0] == 200
        assert scrape(port)["atoll_errors", "certificate"] == 1
        (kit / "elsewhere").rename(kit / "startup")
        assert scrape(port)["atoll_errors", "certificate"] == 0


HOSTILE = (
    b"\x00\xff\x16\x03\x01\r\n\r\n",
    b"GET /metrics HTTP/9.9\r\n\r\n",
    b"GET /metrics?" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
    b"GET /%00/../\xff%zz HTTP/1.1\r\n\r\n",
    b"GET /metrics?name[]=%ff&name[]= HTTP/1.1\r\nAccept: \xff;q=x\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n",
    b"\r\n" * 50,
)


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_no_bytes_end_the_pages_or_print_a_traceback(kits, data, capfd):
    port = free_port()
    with serving(kits["server"], port, list):
        line = socket.create_connection(("127.0.0.1", port), timeout=10)
        with line, suppress(OSError):  # the server may hang up before all bytes are sent
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            line.recv(1 << 16)
        assert get(port, "/metrics")[0] == 200
    assert capfd.readouterr() == ("", "")
