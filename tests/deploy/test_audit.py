"""The audit log: each line is tied to the one before."""

from __future__ import annotations

import pytest

from atoll.core.errors import DataError
from atoll.deploy.audit import Audit, check_audit
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


def test_nothing_is_sent_that_cannot_be_noted(tmp_path, monkeypatch):
    site = make_site(tmp_path)
    begin(site)
    monkeypatch.setattr("os.write", lambda handle, line: len(line) // 2)  # a disk that is full
    with pytest.raises(DataError, match="its disk is full"):
        ask(site, model_for(site))
