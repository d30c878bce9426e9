"""The curves of a page."""

import pytest

from atoll.report import collect, write_report


@pytest.fixture(scope="module")
def found(study):
    return collect([study])


def test_one_run_alone_shows_its_own_lines(study, tmp_path):
    found, _ = write_report([study / "cells" / "fedavg-1"], tmp_path / "one.html")
    text = (tmp_path / "one.html").read_text()
    assert found.rows == ("fedavg",)
    assert "validation" in text
    assert "local model, test" in text
