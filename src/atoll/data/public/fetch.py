"""Download of public data sets, from a mirror or from their public sources."""

from __future__ import annotations

import errno
import http.client
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.data.public import registry, untrusted
from atoll.data.public.registry import DATASETS, DatasetInfo, dataset_info, missing_files
from atoll.data.public.untrusted import MAX_BYTES, sha256, unpack
from atoll.data.source import GraphSet, Source

TIMEOUT_SECONDS = 30.0
SUMS = "SHA256SUMS"
_HTTP_ERRORS = urllib.error.URLError, http.client.HTTPException
_NETWORK_ERRORS = *_HTTP_ERRORS, ssl.SSLError, TimeoutError, ConnectionError

Progress = Callable[[str], None]  # called with one line of text for every step


def fetch(
    name: str,  # in `DATASETS` in any case, or `tu:NAME`
    root: str | Path | None = None,
    mirror: str | Path | None = None,  # default `ATOLL_MIRROR`, else the public source
    *,
    force: bool = False,  # replace a complete set; an incomplete one is always replaced
    progress: Progress = lambda _: None,
) -> Path:
    """Download the raw files of a data set, unless they exist, and return its folder."""
    info, base = dataset_info(name), registry.data_root(root)
    home = base / info.home
    if not force and not missing_files(info, base):
        progress(f"{info.name} is already in {home}")
        return home
    source = str(mirror or os.environ.get("ATOLL_MIRROR") or "")
    # One rename moves a checked set into place, so an interruption leaves no partial set.
    try:
        with untrusted.workspace(base) as work:
            new = work / "new"
            if source:
                _from_mirror(info, source, work, progress)
            else:
                _from_public(info, new, progress)
            _verify(info, new)
            # Another process may have been faster.
            if force or missing_files(info, base):
                _place(new / info.home, home, work / "old")
    except OSError as error:
        problem = f"the data set could not be stored in {base} ({error})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = f"no space left in {base}; free some or choose another folder (ATOLL_DATA)"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            problem = f"no permission for {error.filename or base} ({error.strerror}); choose "
            problem += "another folder with --data-root or ATOLL_DATA"
        raise DataError(problem) from error
    progress(f"{info.name} is now in {home} (licence: {info.licence})")
    return home


def check(
    root: str | Path | None = None,
    names: Iterable[str] = tuple(DATASETS),
    *,
    progress: Progress = lambda _: None,
) -> list[tuple[str, bool, str | None]]:
    """Return for each data set its name, whether all its files exist, and its first problem.

    The problem is a missing file, an error, or a count that differs. It is None if there is none,
    and also if all files are missing.
    """
    base = registry.data_root(root)
    report: list[tuple[str, bool, str | None]] = []
    for name in names:
        info = dataset_info(name)
        absent = missing_files(info, base)
        if absent:
            some = len(absent) < len(info.files)
            report.append((info.name, False, f"incomplete: no {absent[0]}" if some else None))
            continue
        progress(f"loading {info.name}")
        try:
            found = counts(registry.load_dataset(info.name, base))
            wrong = [kind for kind in found if getattr(info, kind) not in (None, found[kind])]
            problem = None
            if wrong:
                kind, published = wrong[0], getattr(info, wrong[0])
                problem = f"has {found[kind]} {kind}, but {published} were published"
        except AtollError as error:
            problem = str(error)
        report.append((info.name, True, problem))
    return report


def counts(data: Source | GraphSet) -> dict[str, int]:
    """Return the counts of loaded data, named as the fields of `DatasetInfo`."""
    nodes, features = data.x.shape
    return {
        "nodes": int(nodes),
        "edges": int(data.edges.shape[1]),
        "features": int(features),
        "classes": data.classes,
        "graphs": data.num_graphs if isinstance(data, GraphSet) else 1,
    }


def _download(url: str, target: Path) -> bool:
    """Download an address to a file. Return False if the server has no such address."""
    request = urllib.request.Request(url, headers={"User-Agent": "atoll"})
    try:
        reply = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        with reply, target.open("wb") as file:
            stated = reply.headers.get("Content-Length")
            while chunk := reply.read(2**20):
                if file.tell() > MAX_BYTES:
                    raise DataError(f"{url} is larger than {MAX_BYTES / 2**30:.3g} GiB")
                file.write(chunk)
            if stated is not None and file.tell() != int(stated):
                raise DataError(f"{url} broke off after {file.tell()} of {stated} bytes; try again")
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            return False
        raise DataError(f"{url} answered {error.code} {error.reason}") from error
    except _NETWORK_ERRORS as error:
        reason = getattr(error, "reason", error)
        raise DataError(f"cannot reach {url} ({reason}); check the network connection") from error
    return True


def _from_mirror(info: DatasetInfo, mirror: str, work: Path, progress: Progress) -> None:
    """Unpack `NAME.tar.xz` of a folder or an address into the folder `new` of `work`.

    If the mirror's `SHA256SUMS` lists the archive, check its hash first.
    """
    scheme, is_url, _ = mirror.partition("://")
    if is_url and scheme.lower() not in ("http", "https"):
        raise ConfigError(f"the mirror {mirror} is neither a folder nor an http(s) address")
    folder = work if is_url else Path(mirror).expanduser()
    archive, sums = folder / info.archive, folder / SUMS
    if is_url:
        progress(f"downloading {info.archive} from {mirror}")
        address = mirror.rstrip("/")
        if not _download(f"{address}/{urllib.parse.quote(info.archive)}", archive):
            raise DataError(f"the mirror {mirror} has no {info.archive}; try another mirror")
        _download(f"{address}/{SUMS}", sums)
    elif not folder.is_dir():
        raise DataError(f"the mirror {mirror} is not there; give a folder or an http(s) address")
    elif not archive.is_file():
        names = sorted(path.name.removesuffix(".tar.xz") for path in folder.glob("*.tar.xz"))
        found = f"it has: {', '.join(names) or 'nothing'}"
        raise DataError(f"the mirror {mirror} has no {info.archive}; {found}")
    listed = sums.read_text(encoding="utf-8", errors="replace") if sums.is_file() else ""
    wanted = untrusted.parse_sums(listed).get(archive.name)
    if wanted is not None and (found := sha256(archive)) != wanted:
        raise DataError(
            f"the archive {archive.name} has SHA-256 {found[:12]}…, but the mirror's {SUMS} says "
            f"{wanted[:12]}…; it is damaged or changed and was not unpacked"
        )
    progress(f"unpacking {archive.name}")
    unpack(archive, work / "new", PurePosixPath(info.home))


class _Downloaded(Exception):
    """Stops a loader before it processes the raw files."""


def _from_public(info: DatasetInfo, target: Path, progress: Progress) -> None:
    """Let PyG's or OGB's own class download the raw files into `target`."""
    mirror = f"give a mirror: atoll data fetch {info.name} --mirror DIR-or-URL"
    if info.by_atoll:
        raise DataError(f"data set '{info.name}' has no public source; {mirror}")

    def stop(_: object) -> None:
        raise _Downloaded

    progress(f"downloading {info.name} from its public source ({info.origin})")
    folder = target / info.folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with untrusted.quiet():
            # Without processing, because nothing may be unpickled before it is checked.
            untrusted.loader_class(info.loader, _process=stop)(root=str(folder), **info.arguments)
    except _Downloaded:
        return
    except AtollError:
        raise
    except Exception as error:  # their downloaders may raise any error
        problem = f"could not download '{info.name}' from its public source"
        hint = f"check the network connection or {mirror}"
        raise DataError(f"{problem} ({type(error).__name__}: {error}); {hint}") from error


def _verify(info: DatasetInfo, new: Path) -> None:
    """Refuse a set that lacks files, differs from the published one, or could run code."""
    absent = missing_files(info, new)
    if absent:
        problem = f"is not that data set: it has no {info.home}/{absent[0]}"
        raise DataError(f"what was got for '{info.name}' {problem}; try another mirror")
    for file in info.files:
        untrusted.check_published(new / info.home / file)
    untrusted.check_pickles(new / info.home)


def _place(new: Path, home: Path, old: Path) -> None:
    """Move a complete set into place, and an earlier one to the work folder for deletion."""
    home.parent.mkdir(parents=True, exist_ok=True)
    if home.exists():
        os.replace(home, old)
    try:
        os.replace(new, home)
    except OSError:
        if old.exists():
            os.replace(old, home)
        raise
