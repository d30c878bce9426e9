"""A file is replaced completely, or stays unchanged."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from threading import Barrier, get_ident

import pytest

from atoll.core import files
from atoll.core.files import (
    WRITERS,
    clear_left_over,
    finish_replacing,
    replacing,
    side_by_side,
    write_atomically,
)


def test_a_file_in_a_new_folder_is_written_and_replaced(tmp_path):
    place = tmp_path / "deep" / "er" / "file"
    write_atomically(place, b"one")
    write_atomically(place, b"two")
    assert place.read_bytes() == b"two"
    assert place.stat().st_mode & 0o777 == 0o644


def test_many_files_wait_for_the_disk_together_and_few_are_in_memory(tmp_path):
    together, prepared, written = Barrier(WRITERS, timeout=20), [], []

    def write(number: int) -> None:
        if number < WRITERS:
            together.wait()  # breaks if they come one after the other
        write_atomically(tmp_path / str(number), b"new")
        written.append(number)

    def writers() -> Iterator[Callable[[], None]]:
        for number in range(3 * WRITERS):
            prepared.append(get_ident())
            assert number - len(written) <= WRITERS
            yield partial(write, number)

    side_by_side(writers())
    assert sorted(written) == list(range(3 * WRITERS))
    assert set(prepared) == {get_ident()}  # the thread of the caller prepares them


@pytest.mark.parametrize("count", [1, 4])
def test_a_file_that_cannot_be_written_is_an_error_whatever_stands_beside_it(tmp_path, count):
    (tmp_path / "taken").mkdir()
    places = [tmp_path / "taken", *(tmp_path / str(number) for number in range(1, count))]
    with pytest.raises(OSError, match="taken"):
        side_by_side(partial(write_atomically, place, b"new") for place in places)
    assert all(place.exists() for place in places)


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


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_atomically(tmp_path / "file", b"new")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "file")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["checkpoint.atoll", "config.toml", "deployed.safetensors"])
def test_a_file_that_a_killed_writer_left_is_cleared(tmp_path, name):
    if (child := os.fork()) == 0:
        files.os.fsync = lambda handle: os._exit(9)  # killed in the middle of a write
        write_atomically(tmp_path / "seed-0" / name, b"half")
    os.waitpid(child, 0)
    (left,) = (tmp_path / "seed-0").iterdir()
    clear_left_over(tmp_path)
    assert left.exists()  # it is young: its writer may not have its lock yet
    _make_old(left)
    clear_left_over(tmp_path)
    assert not left.exists()


def test_the_file_of_a_living_writer_and_those_of_others_stay(tmp_path, monkeypatch):
    kept = [".config.toml", ".mine.notebook", "config.toml.abcdefgh", ".x.json.abc", ".git.toml.d"]
    for name in kept:
        (tmp_path / name).touch()
        _make_old(tmp_path / name)
    (tmp_path / ".progress.json.4711").touch()
    _make_old(tmp_path / ".progress.json.4711")
    alive = []

    def look(handle: int) -> None:
        if not alive:
            (alive_path,) = tmp_path.glob(".config.toml.????????")
            _make_old(alive_path)
            clear_left_over(tmp_path)  # as another process that starts on this folder would
            alive.append(alive_path.exists())

    monkeypatch.setattr(files.os, "fsync", look)
    write_atomically(tmp_path / "config.toml", b"whole")
    assert alive == [True]
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "config.toml"])
    clear_left_over(tmp_path / "nowhere")


def test_a_disk_without_locks_is_written(tmp_path, monkeypatch):
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def _make_old(path):
    then = time.time() - 2 * files.AGE
    os.utime(path, (then, then))


def test_a_folder_is_replaced_whole_or_stays(tmp_path):
    place = tmp_path / "deep" / "folder"
    left = tmp_path / "deep" / ".folder.killed" / "new"
    left.mkdir(parents=True)
    for text in ("one", "two"):
        with replacing(place) as new:
            write_atomically(new / text, b"")
    assert [path.name for path in place.iterdir()] == ["two"]
    with pytest.raises(FileNotFoundError), replacing(place) as new:
        (new / "missing").read_bytes()
    assert [path.name for path in place.iterdir()] == ["two"]
    assert [path.name for path in place.parent.iterdir()] == ["folder"]


def test_a_file_is_for_its_owner_alone_from_its_start(tmp_path, monkeypatch):
    seen, replace = [], os.replace

    def look(old, new):
        seen.append(os.stat(old).st_mode & 0o777)
        replace(old, new)

    monkeypatch.setattr(os, "replace", look)
    write_atomically(tmp_path / "private", b"", mode=0o600)
    assert seen == [0o600]


@pytest.mark.parametrize("end", [finish_replacing, lambda place: replacing(place).__enter__()])
def test_a_kill_between_two_renames_loses_no_folder(end, tmp_path):
    place, left = tmp_path / "startup", tmp_path / ".startup.killed"
    (left / "old" / "one").mkdir(parents=True)
    (left / "new" / "two").mkdir(parents=True)
    end(place)
    assert [path.name for path in place.iterdir()] == ["two"]
    assert not left.exists()
