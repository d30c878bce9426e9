"""Untrusted input: checksums, pickles, archives, and raw files that PyG's or OGB's classes read."""

from __future__ import annotations

import errno
import hashlib
import io
import lzma
import os
import pickletools
import platform
import re
import shutil
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from atoll.core.errors import ConfigError, DataError, not_installed

if TYPE_CHECKING:
    from torch_geometric.data import InMemoryDataset

MAX_BYTES = 4 * 2**30
"""Most bytes that one archive may unpack to. The largest known set (COLLAB) takes 0.35 GiB."""

MAX_MEMBERS = 10_000  # most files and folders in one archive; the largest known set has 22
MAX_READ = 64 * 2**20  # most bytes that one header may make the reader hold in memory
IMPOSSIBLE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL)
"""Error numbers of names that cannot be created: too long, below a file, or a folder's name."""
OGB_CLASS = "PygNodePropPredDataset"
WORK_PREFIX = ".atoll-work-"
STALE_SECONDS = 24 * 3600


def parse_sums(text: str) -> dict[str, str]:
    """Parse the SHA-256 of each file name from the output of `sha256sum`. Skip other lines."""
    pattern = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
    found = (pattern.fullmatch(line.strip()) for line in text.splitlines())
    return {match[2]: match[1].lower() for match in found if match}


PUBLISHED = parse_sums(
    resources.files("atoll.data.public").joinpath("published.sha256").read_text(encoding="utf-8")
)
"""SHA-256 of published raw files, by file name. `check_published` accepts any file not listed."""

_PICKLED_NAMES = {
    # Planetoid's files, written by Python 2, name only these. None of them runs code.
    "numpy.core.multiarray _reconstruct",
    "numpy ndarray",
    "numpy dtype",
    "scipy.sparse.csr csr_matrix",
    "collections defaultdict",
    "__builtin__ list",
}
_NAMING_OPCODES = {"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
_NUMBERING_OPCODES = {"PUT", "LONG_BINPUT"}  # the unpickler allocates memory up to the number
_LOADED_BY_UNPICKLING = {".pt", ".pth", ".pkl", ".pickle"}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in lower-case hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_published(path: Path) -> None:
    """Refuse a raw file whose bytes differ from the published ones, if those are known."""
    wanted = PUBLISHED.get(path.name)
    if wanted is not None and (found := sha256(path)) != wanted:
        raise DataError(
            f"the file {path.name} has SHA-256 {found[:12]}…, but the published one has "
            f"{wanted[:12]}…; it is damaged or changed, fetch it from another mirror"
        )


def check_pickles(home: Path) -> None:
    """Refuse pickles that name anything except arrays, sparse matrices, lists and dictionaries."""
    # Unpickling calls any function that the file names. Reading the opcodes calls nothing. Only
    # Planetoid has pickles among its raw files.
    for path in sorted(home.glob("raw/ind.*")):
        if path.name.endswith(".test.index"):  # the only text file
            continue
        try:
            content = path.read_bytes()
            for opcode, argument, _ in pickletools.genops(content):
                if opcode.name in _NUMBERING_OPCODES and int(argument or 0) > len(content):
                    raise ValueError("a place in its memory is beyond its length")
                if opcode.name in _NAMING_OPCODES and argument not in _PICKLED_NAMES:
                    raise DataError(
                        f"the file {path.name} is a pickle that names "
                        f"'{str(argument).replace(' ', '.')}', which a data set has no use for and "
                        "which could run code; do not use this file"
                    )
        except DataError:
            raise
        except Exception as error:  # damaged bytes may cause any error in the reader
            raise DataError(f"the file {path.name} is not a complete pickle: {error}") from error


class _BoundedXZ(lzma.LZMAFile):
    """Decompressed bytes up to a limit, because a small file can unpack to any size."""

    def read(self, size: int | None = -1) -> bytes:
        # tarfile reads blocks and headers of a stated size. A huge one is a forged header.
        if size is None or not 0 <= size <= MAX_READ or self.tell() + size > MAX_BYTES + MAX_READ:
            raise DataError(f"unpacks to more than {MAX_BYTES / 2**30:.3g} GiB")
        return super().read(size)


def unpack(archive: Path, target: Path, inside: PurePosixPath) -> None:
    """Unpack a `.tar.xz` into `target`, an empty private folder.

    Refuse an archive with files outside of the sub-folder `inside`.
    """
    total = 0
    try:
        with _BoundedXZ(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for count, member in enumerate(tar, start=1):
                _check_member(member, inside)
                total += member.size
                if total > MAX_BYTES:
                    raise DataError(f"unpacks to more than {MAX_BYTES / 2**30:.3g} GiB")
                if count > MAX_MEMBERS:
                    raise DataError(f"holds more than {MAX_MEMBERS} files")
                tar.extract(member, target, filter="data")
            while stream.read(2**20):  # to the end, where the compressed stream is verified
                pass
    except DataError as error:
        raise DataError(f"the archive {archive.name} {error}; it was not unpacked") from error
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
        problem = f"the file {archive.name} is not a complete .tar.xz archive ({error})"
        raise DataError(f"{problem}; get it again") from error
    except OSError as error:
        if error.errno not in IMPOSSIBLE:  # an error of the disk
            raise
        why = f"the archive {archive.name} holds a file that cannot be made ({error.strerror})"
        raise DataError(f"{why}; it was not unpacked") from error


def _check_member(member: tarfile.TarInfo, inside: PurePosixPath) -> None:
    """Refuse a file of an archive that a data set must not contain."""
    name, path = member.name, PurePosixPath(member.name)
    if path.is_absolute() or re.match(r"[A-Za-z]:", name) or "\\" in name:
        raise DataError(f"holds the absolute or foreign path '{name}'")
    if ".." in path.parts:
        raise DataError(f"holds the path '{name}', which leaves the target folder")
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
        # No published set has links. With a link, an archive could write to other folders.
        kind = "neither a file nor a folder (a link or a device)"
        raise DataError(f"holds '{name}', which is {kind}")
    if not path.is_relative_to(inside) and not (member.isdir() and inside.is_relative_to(path)):
        raise DataError(f"holds '{name}', but this set belongs in '{inside}'")
    folders = {part.casefold() for part in path.parts}
    if path.suffix.lower() in _LOADED_BY_UNPICKLING or "processed" in folders:
        why = "a cache that loading would unpickle; only raw files belong"
        raise DataError(f"holds '{name}', {why}")


@contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """Create a private folder below `parent` that is always deleted afterwards."""
    # It is below `parent`, so that moving a finished result into place is one rename. Folders that
    # killed processes left behind are removed first.
    parent.mkdir(parents=True, exist_ok=True)
    for entry in parent.glob(f"{WORK_PREFIX}*"):
        if _is_stale(entry):
            shutil.rmtree(entry, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{WORK_PREFIX}{os.getpid()}-{_host()}-", dir=parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "", platform.node())


def _is_stale(entry: Path) -> bool:
    """Return whether a work folder is over a day old, or its process has ended."""
    try:
        if time.time() - entry.stat().st_mtime > STALE_SECONDS:
            return True
    except OSError:
        return False  # another process removed it in the meantime
    pid, _, rest = entry.name.removeprefix(WORK_PREFIX).partition("-")
    # A process ID is valid only on its own machine, and only POSIX can test it without side effect.
    if os.name != "posix" or not pid.isdigit() or rest.rpartition("-")[0] != _host():
        return False
    try:
        os.kill(int(pid), 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress another package's prints and warnings. One warning becomes an error."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # After this warning PyG would unpickle the cache without any restriction.
        warnings.filterwarnings("error", message="Weights only load failed")
        yield


def loader_class(loader: str, **replaced: Callable[..., None]) -> type[InMemoryDataset]:
    """Return a subclass of a PyG or OGB class with the given methods replaced."""
    if loader == OGB_CLASS:
        try:
            with _no_version_check():
                from ogb.nodeproppred import PygNodePropPredDataset as found
        except ImportError as error:
            if (error.name or "").startswith("ogb"):
                raise not_installed("this data set", "ogb", "ogb") from error
            raise ConfigError(f"the package ogb is damaged ({error}); install it again") from error
    else:
        import torch_geometric.datasets

        found = getattr(torch_geometric.datasets, loader)
    return type(loader, (found,), dict(replaced))


@contextmanager
def _no_version_check() -> Iterator[None]:
    """Import OGB without its request to a server for its latest version."""
    before = {name: sys.modules[name] for name in ("outdated",) if name in sys.modules}
    sys.modules["outdated"] = None  # type: ignore[assignment]  # importing it is an ImportError
    try:
        yield
    finally:
        del sys.modules["outdated"]
        sys.modules.update(before)


@contextmanager
def open_raw(
    loader: str, arguments: Mapping[str, str | bool], root: Path, home: Path
) -> Iterator[InMemoryDataset]:
    """Yield the data set that a PyG or OGB class reads from raw files.

    `home`, at or below the class's `root`, contains `raw/`.
    """
    # The class makes a cache of the raw files and unpickles it, so it gets a new folder. A cache
    # next to the raw files is never opened.
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-")))
        _link_raw(home, work / home.relative_to(root))
        with quiet():
            cls = loader_class(loader, download=_refuse_download)
        if loader == OGB_CLASS:  # torch's restricted unpickler must read whole PyG objects
            import torch
            from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
            from torch_geometric.data.storage import GlobalStorage

            allowed = [DataEdgeAttr, DataTensorAttr, GlobalStorage]
            stack.enter_context(torch.serialization.safe_globals(allowed))
        with quiet():
            dataset = cls(root=str(work), **arguments)
        yield dataset


def _refuse_download(_: object) -> None:
    raise DataError("raw files are missing, and loading does not download; run: atoll data fetch")


def _link_raw(home: Path, other: Path) -> None:
    """Link or copy the content of `home` into `other`, except caches and work folders."""
    other.mkdir(parents=True, exist_ok=True)
    for entry in home.iterdir():
        twin = other / entry.name
        if entry.name.startswith(("processed", WORK_PREFIX)) or twin.exists():
            continue
        try:
            twin.symlink_to(entry.resolve(), target_is_directory=entry.is_dir())
        except OSError:  # some systems do not allow links
            (shutil.copytree if entry.is_dir() else shutil.copy2)(entry, twin)
