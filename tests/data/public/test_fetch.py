"""Fetching: what is got is whole and checked, and nothing else is ever left behind."""

from __future__ import annotations

import errno
import functools
import hashlib
import http.server
import io
import os
import pickle
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError, DataError
from atoll.data.public import fetch as fetching
from atoll.data.public import untrusted as checksums
from atoll.data.public.fetch import check, fetch
from atoll.data.public.registry import is_present, load_dataset
from atoll.data.source import GraphSet

HOME = "TUDataset/MUTAG"
FILES = {
    f"{HOME}/raw/MUTAG_A.txt": b"1, 2\n2, 1\n3, 4\n4, 3\n",
    f"{HOME}/raw/MUTAG_graph_indicator.txt": b"1\n1\n2\n2\n",
    f"{HOME}/raw/MUTAG_graph_labels.txt": b"-1\n1\n",
    f"{HOME}/raw/MUTAG_node_labels.txt": b"0\n1\n1\n0\n",
}
Member = tuple[tarfile.TarInfo, bytes]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    folder = tmp_path / "mirror"
    folder.mkdir()
    pack(folder / "MUTAG.tar.xz", FILES)
    return folder


@pytest.fixture(autouse=True)
def no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_MIRROR", raising=False)
    monkeypatch.delenv("ATOLL_DATA", raising=False)


@pytest.fixture
def address(mirror: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(mirror))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def pack(path: Path, files: dict[str, bytes], *extra: Member) -> None:
    with tarfile.open(path, "w:xz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member, content in extra:
            tar.addfile(member, io.BytesIO(content))


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> Member:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, size
    return made, b"x" * size


def left_behind(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*")) if root.exists() else []


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


@pytest.mark.parametrize("over_http", [False, True])
def test_wrong_checksum(over_http: bool, root: Path, mirror: Path, address: str) -> None:
    (mirror / "SHA256SUMS").write_text(f"{'0' * 64} *MUTAG.tar.xz\n")
    with pytest.raises(
        DataError, match=r"has SHA-256 .*SHA256SUMS says 000000000000…; it is damaged"
    ):
        fetch("MUTAG", root, address if over_http else mirror)
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
