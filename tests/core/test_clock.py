"""Stages count their own time, once."""

import time
from threading import Thread

import pytest

from atoll.core.clock import OFF, STAGES, Clock


def busy(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


def test_a_stage_inside_another_counts_by_itself():
    clock = Clock(on=True, before=(2.0, 1.0))
    with clock.stage("training"):
        busy(0.02)
        with clock.stage("scoring"):
            busy(0.04)
        busy(0.02)
    with clock.stage("scoring"):
        busy(0.04)
    found = clock.read()
    assert list(found) == [name for name in STAGES if name in found]
    assert found["import"] == (2.0, 1.0)
    assert found["training"][1] == pytest.approx(0.04, abs=0.02)
    assert found["scoring"][1] == pytest.approx(0.08, abs=0.02)
    assert all(wall >= 0 for wall, _ in found.values())


def test_everything_is_counted_once():
    began = time.process_time()
    clock = Clock(on=True)
    busy(0.02)
    with clock.stage("loading"), clock.stage("partition"):
        busy(0.02)
    found = clock.read()
    total = sum(processor for _, processor in found.values())
    assert total == pytest.approx(time.process_time() - began, abs=0.01)


def test_a_clock_that_is_off_counts_nothing():
    with OFF.stage("training"):
        pass
    assert OFF.read() == {}


def test_other_threads_do_not_disturb_it():
    clock = Clock(on=True)

    def work() -> None:
        with clock.stage("loading"):
            pass

    with clock.stage("partition"):
        thread = Thread(target=work)
        thread.start()
        thread.join()
    assert set(clock.read()) == {"import", "partition", "other"}


def test_it_waits_for_a_gpu_at_every_turn():
    clock, waited = Clock(on=True), []
    clock.wait = lambda: waited.append(1)
    with clock.stage("training"):
        assert len(waited) == 1
    assert len(waited) == 2


def test_a_stage_that_fails_is_counted():
    clock = Clock(on=True)
    with pytest.raises(ValueError, match="no"), clock.stage("training"):
        raise ValueError("no")
    with clock.stage("saving"):
        pass
    assert {"training", "saving"} <= set(clock.read())
