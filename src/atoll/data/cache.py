"""A disk cache of the clients of public and built-in data, so that they are partitioned once.

An entry's key is the SHA-256 of everything that determines its content: the bytes of the raw files,
the recipe, the seed, the code of Atoll that reads and partitions, and the versions of the packages
that it uses. Entries never change, so they need no invalidation. A user's data are never cached.

Entries are safetensors files or hashes as text, never pickles. Entry `KIND-KEY-CHECKSUM` is in a
folder named after the first two letters of the key. A new entry is renamed into place, so that any
number of processes may share the cache. A damaged entry is deleted and made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from atoll import __version__
from atoll.core.errors import DataError

T = TypeVar("T")
log = logging.getLogger(__name__)
OFF = "off"  # the value of ATOLL_CACHE without a cache, as with --no-cache
LIMIT = 2 << 30  # bytes of all entries; the least recently used are evicted first
MOST = 4  # one entry takes at most the limit divided by this
FORMAT = 1
ENTRY = re.compile(r"([0-9a-f]{2})/[a-z]+-\1[0-9a-f]{62}-[0-9a-f]{8}")
LEFT = re.compile(r"\.new-[a-z0-9_]{8}")  # the folder of an unfinished entry
HELPERS = (
    *("numpy", "scipy", "scikit-learn", "scikit-network", "networkx", "python-louvain"),
    *("pymetis", "pyarrow", "torch", "torch_geometric", "ogb"),
)
CODE = (
    *("data", "core/graph.py", "experiment/config.py", "experiment/problem.py"),
    "recipes/protocols.toml",
)
RECENT = 2.0  # seconds within which a file may change again without another time stamp
STALE = 3600.0  # seconds after which the unfinished entry of a killed process is removed


@dataclass(frozen=True)
class Cache:
    """The cache in a folder, which need not exist."""

    folder: Path
    limit: int = LIMIT

    @classmethod
    def of_environment(cls) -> Cache | None:
        """Return the cache below ATOLL_CACHE, else XDG_CACHE_HOME/atoll, else ~/.cache/atoll.

        If ATOLL_CACHE is "off", return None.
        """
        given = os.environ.get("ATOLL_CACHE")
        shared = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "atoll")
        folder = Path(given) if given else shared
        return None if given == OFF else cls(folder.expanduser() / "prepared")

    def read(self, kind: str, key: str, read: Callable[[Path], T]) -> T | None:
        """Return an entry's content, or None if it is missing, damaged, or writable by others."""
        for path in self._shelf(key).glob(f"{kind}-{key}-*"):
            if not all(map(_is_own, (self.folder, path.parent, path))):
                log.info("cache entry %s is not read: another user could have written it", path)
                continue
            try:
                if _checksum(path) != path.name.rpartition("-")[2]:
                    raise DataError("its bytes have changed")
                found = read(path)
                os.utime(path)  # the time of the last use
                return found
            except FileNotFoundError:  # another process evicted it
                continue
            except Exception as error:  # a damaged file may cause any error in its reader
                log.warning("cache entry %s is damaged (%s); it is made again", path.name, error)
                with suppress(OSError):
                    path.unlink()
        return None

    def write(self, kind: str, key: str, write: Callable[[Path], object], size: int = 0) -> None:
        """Make an entry of the file that `write` writes, unless it is too large (`MOST`).

        A full or read-only disk is no error.
        """
        if size > self.limit // MOST or any(self._shelf(key).glob(f"{kind}-{key}-*")):
            return  # too large, or another process was faster
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder, shelf := self._shelf(key)):
                folder.mkdir(mode=0o700, exist_ok=True)
            if not (_is_own(self.folder) and _is_own(shelf)):
                raise PermissionError(f"{self.folder} belongs to another user, or others may write")
            with tempfile.TemporaryDirectory(prefix=".new-", dir=shelf) as work:
                new = Path(work) / "entry.atoll"
                write(new)
                if new.stat().st_size > self.limit // MOST:
                    return
                new.chmod(0o600)
                new.replace(shelf / f"{kind}-{key}-{_checksum(new)}")
            self._make_room()
        except OSError as error:
            log.info("nothing is cached in %s: %s", self.folder, error)

    def entries(self) -> list[tuple[float, int, Path]]:
        """Return the time of the last use, the size and the file of every entry, oldest first."""
        found = []
        for path in self.folder.glob("??/*-*-*"):
            if not ENTRY.fullmatch(f"{path.parent.name}/{path.name}"):
                continue  # a file of another program
            with suppress(OSError):  # another process evicted it
                known = path.lstat()
                if stat.S_ISREG(known.st_mode):
                    found.append((known.st_mtime, known.st_size, path))
        return sorted(found)

    def clear(self) -> None:
        """Delete all entries and old unfinished ones, but no other file of the folder."""
        for _, _, path in self.entries():
            path.unlink(missing_ok=True)
        self._clear_left_over()
        for folder in (*self.folder.glob("??"), self.folder):
            with suppress(OSError):  # it contains other files, or is a file
                folder.rmdir()

    def hash_of(self, homes: Sequence[Path]) -> str:
        """Return the SHA-256 of all raw files below these folders, by name and content.

        If any size or time stamp has changed, all files are read again.
        """
        files = [file for home in homes for file in _raw_files(home)]
        stats = [(str(file), file.stat()) for file in files]
        stamp = [(name, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in stats]
        key = hashlib.sha256(json.dumps(stamp).encode()).hexdigest()
        if (known := self.read("files", key, Path.read_text)) is not None:
            return known
        whole = hashlib.sha256()
        for file in files:
            with file.open("rb") as raw:
                whole.update(
                    f"{file.name} {hashlib.file_digest(raw, 'sha256').hexdigest()}".encode()
                )
        newest = max((at.st_ctime for _, at in stats), default=0.0)
        if time.time() - newest > RECENT:
            self.write("files", key, lambda path: path.write_text(whole.hexdigest()))
        return whole.hexdigest()

    def _shelf(self, key: str) -> Path:
        return self.folder / key[:2]

    def _make_room(self) -> None:
        found = self.entries()
        total = sum(size for _, size, _ in found)
        for _, size, path in found:
            if total <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= size
        self._clear_left_over()

    def _clear_left_over(self) -> None:
        for left in self.folder.glob("??/.new-*"):
            if not LEFT.fullmatch(left.name):
                continue
            with suppress(OSError):  # it is a file, or contains other files
                if time.time() - left.lstat().st_mtime > STALE and not left.is_symlink():
                    for file in (*left.glob("entry.atoll"), *left.glob(".entry.atoll.*")):
                        file.unlink()
                    left.rmdir()


def key_of(*parts: object) -> str:
    """Return the key of an entry that depends on these parts, on code and on packages."""
    text = json.dumps([FORMAT, __version__, _code(), _versions(), *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_own(path: Path) -> bool:
    """Return whether a folder or regular file belongs to this user, and no other may write it."""
    try:
        known = path.lstat()
    except OSError:
        return False
    kind = stat.S_ISREG(known.st_mode) or stat.S_ISDIR(known.st_mode)
    return kind and known.st_uid == os.getuid() and not known.st_mode & 0o022


def _checksum(path: Path) -> str:
    return f"{zlib.crc32(path.read_bytes()):08x}"


def _raw_files(home: Path) -> Iterator[Path]:
    """Yield all files below a folder, except PyG's own cache and unfinished downloads."""
    for folder, below, names in os.walk(home):
        below[:] = sorted(name for name in below if not name.startswith((".", "processed")))
        yield from (Path(folder, name) for name in sorted(names))


@cache
def _code() -> str:
    """Return a hash of the code that determines an entry, so that edits make new entries."""
    package = Path(__file__).parents[1]
    roots = (package / part for part in CODE)
    files = [
        file for root in roots for file in (sorted(root.rglob("*.*")) if root.is_dir() else [root])
    ]
    names = ("py", "toml", "csv", "sha256")
    read = (file.read_bytes() for file in files if file.name.rpartition(".")[2] in names)
    return hashlib.sha256(b"".join(read)).hexdigest()


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in HELPERS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
