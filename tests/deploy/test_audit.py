"""The audit log: each line is tied to the one before."""

from __future__ import annotations

import pytest

from atoll.core.errors import DataError
from atoll.deploy.audit import Audit, check_audit
from atoll.deploy.begun import Begun
from atoll.deploy.site import Site
from atoll.deploy.work import Work
from tests.deploy.private_site import (
    ask,
    begin,
    make_site,
    model_for,
)


def test_an_audit_log_shows_what_was_changed_later(tmp_path):
    path = tmp_path / "audit.jsonl"
    Audit(path).note("first", size=1)
    log = Audit(path)
    log.note("second")
    log.note("third")
    assert len(set(check_audit(path))) == 3
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
    assert len(check_audit(path)) == 2


def test_nothing_is_sent_that_cannot_be_noted(tmp_path, monkeypatch):
    site = make_site(tmp_path)
    begin(site)
    monkeypatch.setattr("os.write", lambda handle, line: len(line) // 2)  # a disk that is full
    with pytest.raises(DataError, match="its disk is full"):
        ask(site, model_for(site))


@pytest.mark.parametrize(
    "line",
    [
        b"[]", b"5", b"null", b"\xff", b"{", b'{"run": "r-0"}',
        b'{"event": "sent", "run": "r-0", "bytes": 1, "release": "x"}',
        b'{"event": "sent", "run": "r-0", "bytes": "x"}',
        b'{"event": "sent", "run": "r-0", "bytes": 1, "round": 0, "seconds": "x"}',
        b'{"event": "begin", "run": "r-0", "config": 5}',
        b'{"event": "begin", "run": "r-0", "config": "x ="}',
    ],
)  # fmt: skip
def test_a_damaged_log_is_named_in_one_sentence(tmp_path, line):
    site = make_site(tmp_path)
    assert begin(site).head == {}
    site.close()
    with site.audit.path.open("ab") as file:
        file.write(line + b"\n")

    def read() -> None:
        audit = Site(site.own, site.policy, site.folder).audit  # here, or when a run begins
        Begun(audit, "r-0")
        Work(audit, "r-0", tmp_path, 1.0)

    with pytest.raises(DataError, match=r"audit log .* (is no event|cannot be read)"):
        read()
