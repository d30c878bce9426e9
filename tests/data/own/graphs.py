"""Folders of tables that the tests of a user's own graph load."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import AtollError
from atoll.data.own.reader import load_own
from atoll.data.own.schema import OwnOptions
from atoll.data.source import Source

NODES = """id,age,kind,label,client,split
a,1.5,shop,x,north,train
b,2.5,home,y,north,val
c,3.5,shop,x,south,test
d,4.5,home,,south,
"""
EDGES = "source,target\na,b\nb,c\nc,d\n"
G = "id,f,label\na,1,x\nb,2,y\nc,3,x\n"
E = "source,target\na,b\n"
W = "source,target,weight\na,b,1\n"
RAW = OwnOptions(scale="none")
"""Unscaled numbers of the tables."""
Tables = tuple[str | bytes, str, str, str]


def folder(
    path: Path, nodes: str | bytes = NODES, edges: str | bytes = EDGES, schema: str = ""
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.joinpath("nodes.csv").write_bytes(nodes if isinstance(nodes, bytes) else nodes.encode())
    path.joinpath("edges.csv").write_bytes(edges if isinstance(edges, bytes) else edges.encode())
    if schema:
        path.joinpath("schema.toml").write_text(schema)
    return path


def pairs(source: Source) -> list[tuple[int, int]]:
    return [(int(u), int(v)) for u, v in source.edges.T]


def check_refused(path: Path, nodes: str | bytes, edges: str, schema: str, sentence: str) -> None:
    with pytest.raises(AtollError) as caught:
        load_own(folder(path / "g", nodes, edges, schema))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
