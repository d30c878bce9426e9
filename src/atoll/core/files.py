"""Files that are never seen half-written, and the temporary ones of killed processes."""

from __future__ import annotations

import contextlib
import fcntl
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

KINDS = "atoll|csv|html|json|lineage|md|npz|png|safetensors|svg|tex|toml|txt"
TEMPORARY = re.compile(rf"\..+\.({KINDS})\.([a-z0-9_]{{8}}|[0-9]+)")
"""Names of temporary files: a writer's random letters or the number of its process at the end."""
WRITERS = 8  # threads that wait for the disk at the same time
AGE = 60.0  # least seconds since the last write before a temporary file counts as left over


def write_atomically(path: Path, data: bytes, mode: int = 0o644, *, new: bool = False) -> None:
    """Replace a file's content in one step, or not at all; the file has `mode` from its start.

    With `new` a file that exists stays, and is an error: of two processes one gets the name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                with contextlib.suppress(OSError):  # some network disks have no locks
                    fcntl.flock(handle, fcntl.LOCK_EX)  # a sign of life for `clear_left_over`
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(name, mode)
                if new:
                    os.link(name, path)
                    os.unlink(name)
                else:
                    os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:  # the system does not say which file a full disk could not take
        if error.errno is None or error.filename == str(path):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself must survive a power cut
    finally:
        os.close(folder)


def side_by_side(writers: Iterable[Callable[[], object]]) -> None:
    """Call functions that mostly wait for the disk, a few at a time; the first error is raised.

    Taking the next function from an iterator is the caller's thread's work, and happens late: an
    iterator that prepares the content of many files has few of them in memory.
    """
    left = iter(writers)
    first = list(islice(left, 2))
    if len(first) < 2:  # no thread for one
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
    """A path for a new folder, which takes the place of another; a crash leaves one of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    finish_replacing(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as work:
        new = Path(work) / "new"
        yield new
        if folder.exists():
            folder.rename(Path(work) / "old")
        new.rename(folder)


def finish_replacing(folder: Path) -> None:
    """Complete a replacement whose process was killed, and remove what else it left."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        # The old folder moves away only when the new one is complete.
        if not folder.exists() and (left / "old").exists():
            (left / "new").rename(folder)
        shutil.rmtree(left)


def clear_left_over(folder: Path) -> None:
    """Delete temporary files that killed processes left in a folder of Atoll's, and below it."""
    for path in folder.rglob(".*") if folder.is_dir() else ():
        if not TEMPORARY.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:  # another may be quicker
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
            if time.time() - path.stat().st_mtime > AGE:
                path.unlink()
