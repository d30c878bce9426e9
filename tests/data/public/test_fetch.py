"""Fetching: downloads are complete and checked, and leave no other file behind."""

from __future__ import annotations

import errno
import hashlib
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError, DataError
from atoll.data.public import fetch as fetching
from atoll.data.public import untrusted as checksums
from atoll.data.public.fetch import check, fetch
from atoll.data.public.registry import is_present, load_dataset
from atoll.data.source import GraphSet

from .mirrors import FILES, HOME, left_behind, pack


@pytest.fixture(autouse=True)
def no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_MIRROR", raising=False)
    monkeypatch.delenv("ATOLL_DATA", raising=False)


@pytest.mark.parametrize("way", ["folder", "environment", "address", "slash"])
def test_fetch_from_a_mirror(
    way: str, root: Path, mirror: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256((mirror / "MUTAG.tar.xz").read_bytes()).hexdigest()
    (mirror / "SHA256SUMS").write_text(f"{digest}  MUTAG.tar.xz\n{'0' * 64}  other.tar.xz\n")
    monkeypatch.setenv("ATOLL_MIRROR", str(mirror) if way == "environment" else "unused")
    given = {"folder": mirror, "environment": None, "address": address, "slash": f"{address}/"}[way]
    lines: list[str] = []
    home = fetch("mutag", root, given, progress=lines.append)
    assert home == root / HOME
    assert left_behind(root) == ["TUDataset", HOME, f"{HOME}/raw", *sorted(FILES)]
    assert {name: (root / name).read_bytes() for name in FILES} == FILES
    assert lines[-1] == f"MUTAG is now in {home} (licence: not stated by its authors)"
    data = load_dataset("MUTAG", root)
    assert isinstance(data, GraphSet)
    assert data.y.tolist() == [0, 1]


def test_a_set_that_is_there_stays_untouched_unless_forced(root: Path, mirror: Path) -> None:
    fetch("MUTAG", root, mirror)
    (root / HOME / "mine.txt").write_text("mine")
    fetch("MUTAG", root, "http://192.0.2.1/never-asked")
    assert (root / HOME / "mine.txt").exists()
    fetch("MUTAG", root, mirror, force=True)
    assert left_behind(root) == ["TUDataset", HOME, f"{HOME}/raw", *sorted(FILES)]


def test_an_incomplete_set_is_replaced(root: Path, mirror: Path) -> None:
    fetch("MUTAG", root, mirror)
    (root / HOME / "raw" / "MUTAG_A.txt").unlink()
    fetch("MUTAG", root, mirror)
    assert is_present("MUTAG", root)


@pytest.mark.parametrize("over_http", [False, True])
def test_wrong_checksum(over_http: bool, root: Path, mirror: Path, address: str) -> None:
    (mirror / "SHA256SUMS").write_text(f"{'0' * 64} *MUTAG.tar.xz\n")
    with pytest.raises(
        DataError, match=r"has SHA-256 .*SHA256SUMS says 000000000000…; it is damaged"
    ):
        fetch("MUTAG", root, address if over_http else mirror)
    assert left_behind(root) == []


def test_another_set_under_this_name(root: Path, mirror: Path) -> None:
    pack(mirror / "MUTAG.tar.xz", {f"{HOME}/raw/README.txt": b"nothing else"})
    with pytest.raises(DataError, match=r"is not that data set: it has no .*MUTAG_A.txt"):
        fetch("MUTAG", root, mirror)
    assert left_behind(root) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("step", ["unpack", "_verify", "_place"])
def test_interrupted_fetch_leaves_nothing(
    step: str, error: type[BaseException], root: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., None] = getattr(fetching, step)

    def half(*arguments: object) -> None:
        if step != "_place":
            real(*arguments)
        raise error

    monkeypatch.setattr(fetching, step, half)
    with pytest.raises(error):
        fetch("MUTAG", root, mirror)
    assert left_behind(root) == []


def test_failed_replacement_keeps_the_old_set(
    root: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch("MUTAG", root, mirror)
    before, real = left_behind(root), os.replace

    def replace(source: Path, target: Path) -> None:
        if "new" in source.parts:
            raise OSError(errno.EIO, "broken disk")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(DataError, match=r"could not be stored in .*broken disk"):
        fetch("MUTAG", root, mirror, force=True)
    assert left_behind(root) == before


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, r"^no space left in .*root; "),
        (errno.EROFS, r"^no permission for .*choose another folder with --data-root or ATOLL_DATA"),
        (errno.EACCES, r"^no permission for "),
    ],
)
def test_disk_problems(
    number: int, sentence: str, root: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tarfile.TarFile, "extract", fail)
    with pytest.raises(DataError, match=sentence):
        fetch("MUTAG", root, mirror)
    assert left_behind(root) == []


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_root(root: Path, mirror: Path) -> None:
    root.mkdir(mode=0o500)
    with pytest.raises(DataError, match=r"^no permission for "):
        fetch("MUTAG", root, mirror)


def test_root_that_is_a_file(root: Path, mirror: Path) -> None:
    root.write_text("a file")
    with pytest.raises(DataError, match=r"could not be stored in "):
        fetch("MUTAG", root, mirror)


def test_mirrors_that_cannot_serve(root: Path, mirror: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'mutagg'; did you mean 'mutag'\?"):
        fetch("mutagg", root, mirror)
    with pytest.raises(DataError, match=r"has no BZR.tar.xz; it has: MUTAG$"):
        fetch("BZR", root, mirror)
    with pytest.raises(DataError, match=r"mirror http.* has no BZR.tar.xz"):
        fetch("BZR", root, address)
    with pytest.raises(DataError, match=r"is not there; give a folder or an http"):
        fetch("BZR", root, mirror / "nowhere")
    with pytest.raises(ConfigError, match=r"neither a folder nor an http\(s\) address"):
        fetch("BZR", root, "ftp://mirror")
    with pytest.raises(DataError, match=r"cannot reach http://127.0.0.1:1/BZR.tar.xz .*network"):
        fetch("BZR", root, "http://127.0.0.1:1")
    with pytest.raises(DataError, match=r"has no public source; give a mirror"):
        fetch("ogbn-arxiv-structure", root)
    assert left_behind(root) == []


def test_fetch_from_the_public_source(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with checksums.quiet():
        from torch_geometric.datasets import TUDataset

    def download(self: TUDataset) -> None:
        for name, content in FILES.items():
            path = Path(self.raw_dir) / Path(name).name
            path.write_bytes(content)

    def fail(_: TUDataset) -> None:
        raise ConnectionResetError("no route")

    monkeypatch.setattr(TUDataset, "download", fail)
    with pytest.raises(DataError, match=r"could not download 'MUTAG' .*no route.*--mirror"):
        fetch("MUTAG", root)
    assert left_behind(root) == []
    monkeypatch.setattr(TUDataset, "download", download)
    fetch("MUTAG", root)
    assert left_behind(root) == ["TUDataset", HOME, f"{HOME}/raw", *sorted(FILES)]


def test_check_compares_with_what_was_published(root: Path, mirror: Path) -> None:
    assert {(present, problem) for _, present, problem in check(root)} == {(False, None)}
    fetch("MUTAG", root, mirror)
    lines: list[str] = []
    wrong = ("MUTAG", True, "has 4 nodes, but 3371 were published")
    assert check(root, ["mutag"], progress=lines.append) == [wrong]
    assert lines == ["loading MUTAG"]
    (root / HOME / "raw" / "MUTAG_A.txt").unlink()
    assert check(root, ["MUTAG"]) == [("MUTAG", False, "incomplete: no raw/MUTAG_A.txt")]


@pytest.mark.data
def test_check_of_real_data(real_data: Callable[[str], Path]) -> None:
    names = ["cora", "MUTAG", "cornell"]
    (root,) = {real_data(name) for name in names}
    assert check(root, names) == [(name, True, None) for name in names]
