"""Processes of a federation on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from atoll.core.errors import ConfigError
from atoll.deploy.kits import LOG_BYTES, AboutKit, nvflare
from atoll.deploy.local import (
    NewLines,
    Processes,
    bound_log,
    check_port,
    environment,
    free_port,
    locked,
    lost_session,
    marked,
    refusal,
)


def test_no_process_outlives_its_block(tmp_path):
    sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    child = f"import subprocess, sys; subprocess.Popen({sleep}, start_new_session=True).wait()"
    with Processes() as processes:
        processes.start("parent", [sys.executable, "-c", child], tmp_path / "log")
        end = time.monotonic() + 20
        while len(processes.alive()) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(processes.alive()) == 2
        # The parent is killed. The child continues, and its inherited mark identifies it.
        processes.started["parent"].kill()
        processes.started["parent"].wait()
        assert len(processes.alive()) == 1
        assert processes.dead() == ["parent"]
    assert processes.alive() == []
    assert os.getpid() not in dict(marked())


def test_a_kit_serves_one_process_until_that_has_ended(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with Processes() as processes:
        first = processes.start("one", sleep, tmp_path / "one.log", tmp_path)
        with pytest.raises(ConfigError, match=f"is in use by process {first.pid}; stop"):
            processes.start("two", sleep, tmp_path / "two.log", tmp_path)
        first.kill()
        first.wait()
        processes.start("two", sleep, tmp_path / "two.log", tmp_path)


def test_a_kit_waits_for_the_jobs_of_a_killed_process(tmp_path, monkeypatch):
    """FLARE's jobs inherit the lock, and need some seconds to end after their parent."""
    sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    child = f"import subprocess, sys; subprocess.Popen({sleep}, close_fds=False).wait()"
    monkeypatch.setattr("atoll.deploy.local.ENDING", 0.5)
    with Processes() as processes:
        first = processes.start("one", [sys.executable, "-c", child], tmp_path / "log", tmp_path)
        end = time.monotonic() + 20
        while len(processes.alive()) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        (job,) = set(processes.alive()) - {first.pid}
        first.kill()
        first.wait()
        says = f"in use: process {first.pid} was killed, and one of its jobs .* again in a minute"
        with pytest.raises(ConfigError, match=says), locked(tmp_path):
            pass
        monkeypatch.setattr("atoll.deploy.local.ENDING", 20.0)
        threading.Timer(0.5, os.kill, (job, signal.SIGKILL)).start()
        with locked(tmp_path):
            pass


def test_a_port_that_is_taken_is_refused():
    about = AboutKit(name="server", org="x", host="localhost", port=free_port(), sites=[])
    check_port(about)
    taken = pytest.raises(ConfigError, match=rf"port {about['port']} .* cannot be used")
    with socket.create_server(("127.0.0.1", about["port"])), taken:
        check_port(about)
    check_port(about)


def test_a_refused_site_learns_why(tmp_path):
    output, events = tmp_path / "output.log", tmp_path / "log.json"
    output.write_text("Client 'a' is disabled")  # of an earlier start
    new = NewLines(output), NewLines(events)
    assert refusal(*new) == ""
    line = '{"message": "Connection [CN%d 127.0.0.1:5 => 127.0.0.1:6 SSL x] is created: PID: 1"}\n'
    events.write_text("".join(line % i for i in range(3)) + line.replace("=>", "<=") % 9)
    assert refusal(*new) == ""
    events.write_text("".join(line % i for i in range(4)))
    assert refusal(*new).endswith("stop the other process that uses its kit")
    new[1].began -= 60  # the one that was there first stays
    assert refusal(*new) == ""
    with output.open("a") as file:
        file.write("error:client_registration Client 'a' is disabled")
    assert "was removed from the federation" in refusal(*new)
    new[0].begin()
    output.write_text("rotated, and Client 'a' is disabled")
    assert "was removed from the federation" in refusal(*new)


def test_a_site_joins_again_after_two_signs_of_life_in_a_row(tmp_path):
    log = tmp_path / "log.json"
    line = (
        '{"message": "[ME=a CH=task TP=heart_beat SCH=? SEQ=?] timeout on Request 1 after 30 s"}\n'
    )
    recent = NewLines(log)
    assert not lost_session(recent)
    log.write_text(line)
    assert not lost_session(recent)
    recent.began -= 121  # the next one is another case
    assert not lost_session(recent)
    log.write_text(line * 2)
    assert not lost_session(recent)
    log.write_text(line * 3)
    assert lost_session(recent)
    assert not lost_session(recent)


def test_a_log_stays_small_while_its_process_writes(tmp_path):
    log = tmp_path / "output.log"
    with log.open("ab", buffering=0) as out:
        out.write(b"x" * LOG_BYTES)
        bound_log(log)
        assert log.stat().st_size == LOG_BYTES
        out.write(b"y")
        bound_log(log)
        out.write(b"z")
    assert log.read_bytes() == b"z"
    assert (tmp_path / "output.log.1").stat().st_size == LOG_BYTES + 1
    log.unlink()
    bound_log(log)  # its owner deleted it


def test_no_process_inherits_the_passphrase(monkeypatch, tmp_path):
    monkeypatch.setenv("ATOLL_PASSPHRASE", "secret")
    monkeypatch.setenv("ATOLL_OTHER", "kept")
    found = environment("mark")
    assert "secret" not in found.values()
    assert found["ATOLL_OTHER"] == "kept"
    assert found["MALLOC_ARENA_MAX"] == "2"
    monkeypatch.setenv("MALLOC_ARENA_MAX", "5")  # the owner's choice
    assert environment("mark")["MALLOC_ARENA_MAX"] == "5"
    given = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **o: given.append(o["env"]) or run(["true"]))
    nvflare(tmp_path, "cert", "init")
    assert "secret" not in given[0].values()
