"""Archives, pickles and work folders that are not trusted."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from atoll.core.errors import DataError
from atoll.data.public import untrusted as checksums
from atoll.data.public.fetch import fetch
from atoll.data.public.registry import is_present

from .mirrors import FILES, HOME, Member, left_behind, member, pack


@pytest.fixture(autouse=True)
def no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_MIRROR", raising=False)
    monkeypatch.delenv("ATOLL_DATA", raising=False)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (member("../evil.txt"), r"leaves the target folder"),
        (member(f"{HOME}/raw/../../../../evil.txt"), r"leaves the target folder"),
        (member("/tmp/evil.txt"), r"absolute or foreign path '/tmp/evil.txt'"),
        (member("C:evil.txt"), r"absolute or foreign path"),
        (member("..\\evil.txt"), r"absolute or foreign path"),
        (member(f"{HOME}/raw/out", tarfile.SYMTYPE, "../../../.."), r"a link or a device"),
        (member(f"{HOME}/raw/out", tarfile.SYMTYPE, "/etc"), r"a link or a device"),
        (member(f"{HOME}/raw/out", tarfile.LNKTYPE, "/etc/passwd"), r"a link or a device"),
        (member(f"{HOME}/raw/out", tarfile.FIFOTYPE), r"a link or a device"),
        (member(f"{HOME}/raw/out", tarfile.CHRTYPE), r"a link or a device"),
        (member("TUDataset/BZR/raw/BZR_A.txt"), r"but this set belongs in 'TUDataset/MUTAG'"),
        (member("evil.txt"), r"but this set belongs in"),
        (member(f"{HOME}/processed/data.txt"), r"a cache that loading would unpickle"),
        (member(f"{HOME}/raw/data.PT"), r"a cache that loading would unpickle"),
        (member(f"{HOME}/raw/big", size=5000), r"unpacks to more than 3.73e-06 GiB"),
    ],
)
def test_an_archive_with_anything_else_is_refused(
    bad: Member, problem: str, root: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "MAX_BYTES", 4000)
    pack(mirror / "MUTAG.tar.xz", FILES, bad)
    before = left_behind(mirror.parent)
    with pytest.raises(DataError, match=rf"the archive MUTAG.tar.xz .*{problem}.*not unpacked$"):
        fetch("MUTAG", root, mirror)
    assert left_behind(root) == []
    assert [name for name in left_behind(mirror.parent) if name != "root"] == before


def test_forged_sizes_are_refused(
    root: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "MAX_READ", 20_000)
    named, content = member(f"{HOME}/raw/x")
    named.pax_headers = {"comment": "x" * 50_000}  # a header that is read into memory whole
    pack(mirror / "MUTAG.tar.xz", FILES, (named, content))
    with pytest.raises(DataError, match=r"unpacks to more than"):
        fetch("MUTAG", root, mirror)
    monkeypatch.setattr(checksums, "MAX_READ", 64 * 2**20)
    monkeypatch.setattr(checksums, "MAX_MEMBERS", 3)
    with pytest.raises(DataError, match=r"holds more than 3 files"):
        fetch("MUTAG", root, mirror)
    assert left_behind(root) == []


def test_folder_entries_above_the_set_are_harmless(root: Path, mirror: Path) -> None:
    folders = [member(name, tarfile.DIRTYPE) for name in ("./", "TUDataset", HOME, f"{HOME}/raw")]
    pack(mirror / "MUTAG.tar.xz", FILES, *folders)
    assert is_present("MUTAG", fetch("MUTAG", root, mirror).parents[1])


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (member(f"{HOME}/raw/{'x' * 300}"), "File name too long"),
        (member(f"{next(iter(FILES))}/inside"), "(Not a directory|File exists)"),
        (member(f"{HOME}/raw"), "Is a directory"),
    ],
)
def test_an_archive_with_a_file_that_no_folder_takes_is_refused(
    bad: Member, problem: str, root: Path, mirror: Path
) -> None:
    pack(mirror / "MUTAG.tar.xz", FILES, bad)
    why = rf"MUTAG.tar.xz holds a file that cannot be made \({problem}\); it was not unpacked$"
    with pytest.raises(DataError, match=why):
        fetch("MUTAG", root, mirror)
    assert left_behind(root) == []


@pytest.mark.parametrize("damage", ["text", "cut", "empty", "plain"])
def test_not_an_archive(damage: str, root: Path, mirror: Path) -> None:
    path = mirror / "MUTAG.tar.xz"
    if damage == "plain":
        with tarfile.open(path, "w") as tar:  # not compressed
            tar.addfile(member(f"{HOME}/raw/x")[0])
    else:
        whole = path.read_bytes()
        path.write_bytes({"text": b"<html>404</html>", "cut": whole[:-40], "empty": b""}[damage])
    with pytest.raises(DataError, match=r"MUTAG.tar.xz is not a complete .tar.xz archive"):
        fetch("MUTAG", root, mirror)
    assert left_behind(root) == []


def test_published_digests_and_pickles_are_checked(
    root: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
    names = [f"Planetoid/Cora/raw/ind.cora.{part}" for part in parts]
    pack(mirror / "cora.tar.xz", dict.fromkeys(names, b"changed"))
    with pytest.raises(DataError, match=r"ind.cora.x has SHA-256 .*the published one has 23cfa55d"):
        fetch("cora", root, mirror)
    monkeypatch.setattr(checksums, "PUBLISHED", {})
    pack(mirror / "cora.tar.xz", dict.fromkeys(names, pickle.dumps(os.getcwd, protocol=2)))
    with pytest.raises(DataError, match=r"is a pickle that names 'posix.getcwd'"):
        fetch("cora", root, mirror)
    assert left_behind(root) == []


def test_work_folders_of_dead_processes_are_removed(root: Path, mirror: Path) -> None:
    root.mkdir()
    dead = root / f"{checksums.WORK_PREFIX}{2**22 + 1}-{checksums._host()}-abc"
    old = root / f"{checksums.WORK_PREFIX}1-elsewhere-abc"
    alive = root / f"{checksums.WORK_PREFIX}{os.getpid()}-{checksums._host()}-abc"
    elsewhere = root / f"{checksums.WORK_PREFIX}1-elsewhere-def"
    for folder in (dead, old, alive, elsewhere):
        folder.mkdir()
    os.utime(old, (time.time() - 2 * checksums.STALE_SECONDS,) * 2)
    fetch("MUTAG", root, mirror)
    assert [folder.exists() for folder in (dead, old, alive, elsewhere)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02]r\xf0\xff\xff\x7f.",  # a place in a list of 2**31: 16 GB
        b"(lp2147483000\n.",
        b"\x80\x04\x8e" + b"\xff" * 8,
        b"\x80\x02" + b"I" * 100,
        b"\x80\x02\x8a",
        b"",
    ],
)
def test_a_damaged_pickle_is_refused_before_memory_is_allocated(tmp_path, content):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "ind.cora.x").write_bytes(content)
    with pytest.raises(DataError, match=r"the file ind.cora.x is not a complete pickle: "):
        checksums.check_pickles(tmp_path)


def test_ogb_asks_no_server_for_its_latest_version() -> None:
    if importlib.util.find_spec("ogb") is None:
        pytest.skip("the optional package ogb is not installed")
    code = (
        "import threading; from atoll.data.public.untrusted import OGB_CLASS, loader_class; "
        "loader_class(OGB_CLASS); print([t.name for t in threading.enumerate()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['MainThread']"
