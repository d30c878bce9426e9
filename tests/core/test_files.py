"""A file is replaced whole, or stays as it was."""

from __future__ import annotations

import os

import pytest

from atoll.core import files
from atoll.core.files import write_atomically


def test_a_file_in_a_new_folder_is_written_and_replaced(tmp_path):
    place = tmp_path / "deep" / "er" / "file"
    write_atomically(place, b"one")
    write_atomically(place, b"two")
    assert place.read_bytes() == b"two"
    assert place.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("broken", ["fsync", "chmod", "replace"])
def test_a_failure_leaves_the_old_content_and_no_other_file(tmp_path, monkeypatch, broken):
    place = tmp_path / "file"
    write_atomically(place, b"old")

    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(files.os, broken, fails)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(place, b"new")
    assert place.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
