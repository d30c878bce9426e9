"""Steps of `atoll federate`: orders, signals and the lines about a job."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.cli.federate.session import (
    continue_without,
    foreground,
    make_order,
    names,
    stopping,
    supervise,
    with_newcomers,
)
from atoll.core.errors import AtollError, ConfigError
from atoll.deploy import coordinator
from atoll.deploy import supervise as supervising
from atoll.deploy.audit import Audit
from atoll.experiment.config import make_config


def test_a_protocol_that_holds_a_client_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fedlog' holds out one client, but every site of a"):
        make_order(make_config(protocol="fedlog"), ("a", "b"), None, 60.0, 100.0)


def test_a_protocol_for_graphs_can_be_ordered() -> None:
    config = make_config(method="fedavg", protocol="gcfl", rounds=2)
    assert make_order(config, ("a", "b", "c"), None, 1.0, 100.0).quorum == 2
    order = make_order(make_config(method="GCFL+"), ("a", "b"), None, 1.0, 100.0)
    assert 'method = "gcfl"' in order.config  # sites accept only registered names
    assert 'preset = "plus"' in order.config
    with pytest.raises(ConfigError, match="update limit is 0; give a factor above 1"):
        make_order(config, ("a", "b", "c"), None, 1.0, 0.0)


def test_a_run_continues_without_sites_that_it_has_and_that_the_quorum_can_spare() -> None:
    order = make_order(make_config(method="fedavg"), ("a", "b", "c"), None, 1.0, 100.0)
    less = continue_without(order, names("b, b"))
    assert less.without == ("b",)
    assert continue_without(less, names(None)) == less
    with pytest.raises(ConfigError, match="the run has no site 'x'; it has: a, b, c"):
        continue_without(order, ("x",))
    with pytest.raises(ConfigError, match="1 site remains, but the quorum is 2; give --quorum fr"):
        continue_without(less, ("c",))
    one = continue_without(less, ("c",), 1)
    assert (one.without, one.quorum) == (("b", "c"), 1)
    with pytest.raises(ConfigError, match="2 sites remain, but the quorum is 3"):
        continue_without(less, (), 3)


def test_sites_that_joined_later_take_part() -> None:
    config = make_config(method="fedavg", rounds=2)
    order = make_order(config, ("a", "b"), None, 1.0, 100.0)
    more = with_newcomers(order, {"d": "token", "a": "token", "c": "token"}, None)
    assert (more.sites, more.quorum) == (("a", "b", "c", "d"), 3)
    assert with_newcomers(order, ["c"], 2).quorum == 2
    assert with_newcomers(order, [], None) == order
    with pytest.raises(ConfigError, match="lists no site yet"):
        make_order(config, (), None, 1.0, 100.0)


def test_sigterm_unwinds_like_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stopping():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_party_tells_what_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "atoll" / "audit.jsonl"
    Audit(log).note("begin", run="old-0")
    code = f"""from pathlib import Path
from atoll.deploy.audit import Audit
Path({str(tmp_path / "log.json")!r}).write_text("Connection [CN1 a:1 => b:2] is created")
Audit(Path({str(log)!r})).note("refused", run="r-0", reason="no \\x1b[2J")
"""
    with pytest.raises(AtollError, match="bank-a ended unexpectedly"):
        foreground("bank-a", [sys.executable, "-c", code], tmp_path, None)
    lines = capsys.readouterr().out.splitlines()
    told = ["connected to the server", "run r-0 was refused: no  [2J"]
    assert lines == [f"bank-a: {line}" for line in told]


def test_each_line_about_a_job_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Job:
        def __init__(self, *order: object, on_progress, **more: object) -> None:
            self.on_progress = on_progress

        def run(self) -> None:
            first = {"round": 1, "rounds": 2, "validation": 0.5, "out": {"a": "slow"}}
            for now in (first, first, {**first, "round": 2, "validation": None}):
                self.on_progress(now)

    monkeypatch.setattr(supervising, "Supervisor", Job)
    monkeypatch.setattr(coordinator, "read_federated_result", lambda order, folder: "done")
    session = order = SimpleNamespace()
    assert supervise(session, order, Path("x"), quiet=False) == "done"
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["a is excluded: slow", "round 1 of 2, validation 50.0%", "round 2 of 2"]
    supervise(session, order, Path("x"), quiet=True)
    assert capsys.readouterr().err.splitlines() == ["a is excluded: slow"]
