"""One run of a study: its faults cost no other run."""

from __future__ import annotations

from pathlib import Path

import pytest

import atoll
from atoll.core.errors import AtollError
from atoll.experiment.config import make_config
from atoll.experiment.events import read_events
from atoll.methods import FedAvg
from atoll.nn import GCN
from atoll.studies.study import run_study
from atoll.studies.study_run import StudyRun
from tests.studies.test_study import ABOUT, cells


def test_a_fault_in_one_method_does_not_stop_the_others(tmp_path: Path) -> None:
    class Broken(FedAvg):
        def round(self, server: object, clients: object) -> object:
            raise ZeroDivisionError("no clients\nat all")

    federation = atoll.partition(atoll.load("lagoon:nodes=150"), "louvain", clients=2)
    broken = Broken(net=GCN(federation.features, federation.classes))
    config = make_config(method="Broken", data=federation.name, rounds=2,
                         objects=["method", "data"])  # fmt: skip
    bad = StudyRun("bad", config, method=broken, data=federation)
    outcomes = run_study(tmp_path, [bad, *cells()[:1]], about=ABOUT)
    assert [outcome.summary is None for outcome in outcomes] == [True, False]
    assert outcomes[0].error is not None
    assert outcomes[0].error.startswith("internal error: ZeroDivisionError: no clients; ")
    assert "in round" in (tmp_path / "cells" / "bad" / "error.txt").read_text()


def test_a_gpu_that_is_lost_costs_no_other_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [StudyRun("bad", make_config(data="no-such-set")), *cells()[:1]]
    with monkeypatch.context() as patched:
        patched.setattr("atoll.studies.study_run.device_answers", lambda: False)
        with pytest.raises(AtollError, match="GPU no longer answers this process after bad failed"):
            run_study(tmp_path, asked, about=ABOUT)
    assert [event["cell"] for event in read_events(tmp_path)] == ["bad", "bad"]
    outcomes = run_study(tmp_path, asked, about=ABOUT)
    assert [outcome.summary is None for outcome in outcomes] == [True, False]
