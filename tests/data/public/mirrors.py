"""A small data set as an archive in a mirror."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

HOME = "TUDataset/MUTAG"
FILES = {
    f"{HOME}/raw/MUTAG_A.txt": b"1, 2\n2, 1\n3, 4\n4, 3\n",
    f"{HOME}/raw/MUTAG_graph_indicator.txt": b"1\n1\n2\n2\n",
    f"{HOME}/raw/MUTAG_graph_labels.txt": b"-1\n1\n",
    f"{HOME}/raw/MUTAG_node_labels.txt": b"0\n1\n1\n0\n",
}
Member = tuple[tarfile.TarInfo, bytes]


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
