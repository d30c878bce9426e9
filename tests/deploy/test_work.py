"""A restarted process does not reset the work that an owner allows."""

from __future__ import annotations

import os
import time

import pytest

from atoll.deploy.audit import Audit
from atoll.deploy.policy import Policy
from atoll.deploy.site import Site
from atoll.deploy.work import Work
from atoll.engines.fleet import Packet
from tests.deploy.private_site import ask, begin, make_site, model_for


def test_a_job_that_is_stopped_in_each_step_uses_up_its_questions(tmp_path):
    policy = Policy(questions=2)
    site = make_site(tmp_path, policy)
    for _ in range(2):
        begin(site, dp=None)
        site.job.work.begin(0)
        os.close(site.job.work.file)  # and the process ends
        site.close()
        site = Site(site.data, policy, site.folder)
    begin(site, dp=None)
    assert "its policy allows questions = 2" in ask(site, model_for(site)).head["reason"]
    assert ask(site, model_for(site), round=1).head == {}
    begin(site, dp=None)  # the step before has ended
    assert +site.job.work.questions == {0: 3, 1: 1}


@pytest.mark.parametrize(("worked", "counted"), [(5.0, 5.0), (100.0, 60.0), (-50.0, 1.0)])
def test_a_step_without_an_end_counts_for_the_time_that_it_ran(worked, counted, tmp_path):
    audit = Audit(tmp_path / "audit.jsonl")
    work = Work(audit, "r-0", tmp_path, 60.0)
    work.begin(-1)
    assert Work(audit, "r-0", tmp_path, 60.0).questions == {}  # it still runs
    began = time.time()
    os.close(work.file)  # its process has ended, and the machine was off for a while
    os.utime(work.mark, (began + worked,) * 2)
    for _ in range(2):  # it counts once
        again = Work(audit, "r-0", tmp_path, 60.0)
        assert again.questions == {-1: 1}
        assert again.seconds[-1] == pytest.approx(counted, abs=2.0)
    work.mark.write_text("")
    assert Work(audit, "r-0", tmp_path, 60.0).questions == {-1: 1}
    assert not work.mark.exists()


def test_a_begin_that_is_stopped_is_logged_and_counted(tmp_path, monkeypatch):
    policy = Policy(round_seconds=60.0, seconds=40.0)
    site = make_site(tmp_path, policy)

    def stopped(*_):
        raise KeyboardInterrupt  # no handler answers for a process that has ended

    for number in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Work, "end", lambda *_: None)
            patch.setattr(Site, "_begin", stopped)
            with pytest.raises(KeyboardInterrupt):
                begin(site, dp=None)
        (mark,) = site.folder.glob("step_under_way-*")
        other = Site(site.data, policy, site.folder)
        begin(other, run="other-0", dp=None)
        assert "protocol" in other.answer(Packet({"do": "hello", "run": "r-0"}, b"")).head["reason"]
        other.close()
        assert mark.exists()  # another job at the site does not touch it
        os.close(site.under_way.file)
        os.utime(mark, (time.time() + 100,) * 2)
        site = Site(site.data, policy, site.folder)
        assert len(site.audit.events(event="bad")) == number + 1
    assert not list(site.folder.glob("step_under_way-*"))
    assert "its policy allows" in begin(site, dp=None).head["reason"]
    assert [event["seconds"] for event in site.audit.events(event="bad")][:2] == [40.0, 40.0]


def test_a_name_that_no_run_can_have_is_not_counted(tmp_path):
    site = make_site(tmp_path)
    for name in ("x" * 101, "../r", "", ["r-0"]):
        assert "a run's name is" in begin(site, run=name).head["reason"]
    assert not list(site.folder.glob("step_under_way*"))
