"""Atomic writes of files and folders, and the removal of temporary files of killed processes.

A reader never sees half of a file that `write_atomically` writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path

from atoll.core.errors import ConfigError

KINDS = "atoll|csv|html|json|lineage|md|npz|png|safetensors|svg|tex|toml|txt"
TEMPORARY = re.compile(rf"\..+\.({KINDS})\.([a-z0-9_]{{8}}|[0-9]+)")
"""Names of temporary files. They end with random letters or with a process number."""
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK)  # no hard links on the disk
WRITERS = 8  # threads that wait for the disk at the same time
AGE = 60.0  # seconds since the last write before a temporary file counts as abandoned


def folder_of(out: str | Path | None) -> Path | None:
    """Return the folder `out`. An empty text would mean the current folder, and is refused."""
    if out == "":
        raise ConfigError("out is empty; give a path")
    return None if out is None else Path(out)


def write_atomically(path: Path, data: bytes, mode: int = 0o644, *, new: bool = False) -> None:
    """Replace a file's content completely or not at all. The file always has `mode`.

    With `new`, an existing file stays and raises an error, so only one of two processes succeeds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                with contextlib.suppress(OSError):  # some network disks have no locks
                    fcntl.flock(handle, fcntl.LOCK_EX)  # `clear_left_over` skips locked files
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(name, mode)
                if not new:
                    os.replace(name, path)
                elif _linked(name, path):
                    os.unlink(name)
                else:
                    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
                    os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:  # the system does not name the file if the disk is full
        if error.errno is None or error.filename == str(path):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name must survive a power failure, too
    finally:
        os.close(folder)


def _linked(name: str, path: Path) -> bool:
    """Give a file a second name that must not exist. Return False on a disk without hard links."""
    try:
        os.link(name, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return False
    return True


def side_by_side(writers: Iterable[Callable[[], object]]) -> None:
    """Call functions that mostly wait for the disk, a few at a time. Raise the first error.

    The caller's thread advances the iterator, at most one step before a thread is free. An iterator
    that prepares the content of many files therefore has only a few in memory.
    """
    left = iter(writers)
    first = list(islice(left, 2))
    if len(first) < 2:  # one function needs no thread
        for write in first:
            write()
        return
    with ThreadPoolExecutor(WRITERS) as pool:
        under_way: deque[Future[object]] = deque()
        for write in chain(first, left):
            if len(under_way) == WRITERS:
                under_way.popleft().result()
            under_way.append(pool.submit(write))
        for one in under_way:
            one.result()


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a path for a new folder, which then replaces `folder`. A crash leaves one of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    finish_replacing(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as work:
        new = Path(work) / "new"
        yield new
        if folder.exists():
            folder.rename(Path(work) / "old")
        new.rename(folder)


def finish_replacing(folder: Path) -> None:
    """Complete the replacement of a killed process, and remove its temporary folders."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        # The old folder is moved only after the new folder is complete.
        if not folder.exists() and (left / "old").exists():
            (left / "new").rename(folder)
        shutil.rmtree(left)


def file_digest(path: str | Path) -> str:
    """Return the SHA-256 of a file, or "" if it cannot be read."""
    try:
        here = Path(path)
        return hashlib.sha256(here.read_bytes()).hexdigest() if here.is_file() else ""
    except (OSError, ValueError):
        return ""


def clear_left_over(folder: Path) -> None:
    """Delete the temporary files of killed processes in a folder of Atoll and its subfolders."""
    for path in folder.rglob(".*") if folder.is_dir() else ():
        if not TEMPORARY.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:  # may be deleted already
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
            if time.time() - path.stat().st_mtime > AGE:
                path.unlink()


@contextlib.contextmanager
def locked(folder: Path, sentence: str) -> Iterator[None]:
    """Lock a folder without a lock file. Raise an error if another process holds the lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network disks have no locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(sentence) from None
        yield
    finally:
        os.close(handle)  # this releases the lock, and so does the end of the process
