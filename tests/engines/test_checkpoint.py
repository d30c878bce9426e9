"""Checkpoints: the last complete one survives everything, and nothing else is taken for one."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path

import pytest
import torch

from atoll.core import files
from atoll.core.errors import DataError
from atoll.core.tree import Tree, record
from atoll.engines.checkpoint import load_checkpoint, save_checkpoint
from atoll.engines.codec import encode


@record
class Saved:
    model: Tree
    note: Tree


OLD = Saved({"w": torch.tensor([1.0, torch.nan])}, "old")
NEW = Saved({"w": torch.tensor([2.0, torch.inf])}, "new")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A place where an old checkpoint lies."""
    place = tmp_path / "run" / "checkpoint"
    save_checkpoint(place, OLD)
    return place


def note(path: Path) -> str:
    return load_checkpoint(path).note


def test_what_is_saved_is_loaded_even_if_it_is_not_finite(path):
    back = load_checkpoint(path)
    assert isinstance(back, Saved)
    assert back.note == "old"
    assert torch.equal(back.model["w"].isnan(), torch.tensor([False, True]))
    save_checkpoint(path, NEW)
    assert note(path) == "new"


def test_no_other_file_stays_behind(path):
    save_checkpoint(path, NEW)
    assert os.listdir(path.parent) == ["checkpoint"]
    assert path.stat().st_mode & 0o777 == 0o644


class Killed(BaseException):
    """The process ends here: nothing in it runs any more."""


@pytest.mark.parametrize("at", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("problem", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_one_and_no_rubbish(path, monkeypatch, at, problem):
    def fail(*_: object) -> None:
        raise problem

    with monkeypatch.context() as patch:
        patch.setattr(files.os, at, fail)
        with pytest.raises(type(problem)):
            save_checkpoint(path, NEW)
    assert note(path) == "old"
    assert os.listdir(path.parent) == ["checkpoint"]


@pytest.mark.parametrize("at", ["fsync", "chmod", "replace"])
def test_a_process_killed_between_write_and_rename_leaves_the_old_one(path, monkeypatch, at):
    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files.os, at, die)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a dead process cleans nothing up
        with pytest.raises(Killed):
            save_checkpoint(path, NEW)
    assert len(os.listdir(path.parent)) == 2
    assert note(path) == "old"
    save_checkpoint(path, NEW)
    assert note(path) == "new"


def test_the_new_content_is_on_the_disk_before_the_name_changes(path, monkeypatch):
    order = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(files.os, name, lambda *a, n=name, r=real: (order.append(n), r(*a))[1])
    save_checkpoint(path, NEW)
    assert order == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def test_a_damaged_checkpoint_is_refused(path):
    good = path.read_bytes()
    for place in (0, 31, 32, 40, len(good) // 2, len(good) - 1):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        with pytest.raises(DataError, match=r"is damaged .* delete it to start this seed again"):
            load_checkpoint(path)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 100, -1])
def test_a_truncated_checkpoint_is_refused(path, size):
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match="is damaged"):
        load_checkpoint(path)


FOREIGN = {
    "text": b"hello\n" * 20,
    "a pickle": pickle.dumps({"model": 1}),
    "a message without a checksum": encode(OLD),
}


@pytest.mark.parametrize("content", list(FOREIGN.values()), ids=list(FOREIGN))
def test_a_foreign_file_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        load_checkpoint(path)


def test_a_checkpoint_of_another_version_is_refused(path):
    data = encode(OLD).replace(b"Saved", b"Sayed")
    path.write_bytes(hashlib.sha256(data).digest() + data)
    with pytest.raises(DataError, match="written by another version of Atoll"):
        load_checkpoint(path)


def test_a_checkpoint_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(DataError, match=r"nowhere cannot be read: No such file"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(DataError, match="Is a directory"):
        load_checkpoint(tmp_path)


def test_states_of_different_shapes_survive_a_checkpoint() -> None:
    from atoll.engines.checkpoint import pack_states, unpack_states

    states = [None, {"a": torch.ones(2)}, None, {"a": torch.zeros(3)}, {"a": torch.zeros(2)}]
    again = unpack_states(pack_states(states))
    assert again[0] is None
    assert again[2] is None
    for position in (1, 3, 4):
        assert torch.equal(again[position]["a"], states[position]["a"])
