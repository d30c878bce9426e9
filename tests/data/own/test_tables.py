"""Node and edge tables as CSV and Parquet, in one folder or in one per client."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.data.own.reader import load_own
from atoll.data.own.schema import OwnOptions

from .graphs import E, G, Tables, W, check_refused, folder, pairs

REFUSED: dict[str, Tables] = {
    # nodes.csv, edges.csv, schema.toml, the sentence
    "empty file": ("", E, "", "nodes.csv is empty; its first line must name the columns"),
    "empty edge file": (G, "", "", "edges.csv is empty"),
    "header only": ("id,f,label\n", E, "", "nodes.csv has a header but no rows"),
    "open quote": ('"' + G, E, "", "nodes.csv has a column name of several lines; close its quote"),
    "column twice": ("id,f,f,label\na,1,1,x\n", E, "", "two columns named 'f'"),
    "semicolons": (
        "id;f;label\na;1,5;x\n",
        E,
        "",
        "nodes.csv seems to use ';' between values; save it with commas",
    ),
    "semicolons and a comma": ("id;f, EUR;label\na;1;x\n", E, "", "seems to use ';' between"),
    "tabs": (G, "source\ttarget\na\tb\n", "", "edges.csv seems to use tabs between values"),
    "duplicate ids": (G + "b,4,x\n", E, "", "or give --own duplicate_nodes=first"),
    "a repeated id": (G + "b,4,x\n", E, "", "nodes.csv row 5 gives the id 'b' again (1 such"),
    "no id value": ("id,f,label\na,1,x\n,2,y\n", E, "", "row 3, column 'id' has no value"),
    "ragged row": (G + "d,4\n", E, "", "nodes.csv row 5 has 2 values, but the header names 3"),
    "ragged edge": (G, "source,target\na,b\na,b,c\n", "", "edges.csv row 3 has 3 values"),
    "not UTF-8": (b"id,f,label\na,1,x\nb,2,\xe9\n", E, "", "nodes.csv row 3 is not UTF-8 text"),
    "header not UTF-8": (b"id,\xe9,label\na,1,x\n", E, "", "nodes.csv row 1 is not UTF-8"),
    "no training node": (
        "id,f,label,split\na,1,x,val\nb,2,y,test\n",
        E,
        "",
        "no labelled training",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(tmp_path: Path, kind: str) -> None:
    check_refused(tmp_path, *REFUSED[kind])


@pytest.mark.parametrize("where", ["id", "kind", "label", "source", "packed", "name"])
def test_parquet_text_that_is_not_utf8_is_refused(tmp_path: Path, where: str) -> None:
    bad = pa.array([b"a", b"\xff\xfe", b"c"]).view(pa.string())
    kinds = bad.dictionary_encode() if where == "packed" else pa.array(["u", "v", "w"])
    good = {"id": pa.array(["a", "b", "c"]), "kind": kinds, "label": pa.array(["x", "y", "x"])}
    nodes = {name: bad if name == where else column for name, column in good.items()}
    ends = {"source": bad if where == "source" else good["id"], "target": good["id"]}
    pa.parquet.write_table(pa.table(nodes), tmp_path / "nodes.parquet")
    pa.parquet.write_table(pa.table(ends), tmp_path / "edges.parquet")
    if where == "name":
        path = tmp_path / "nodes.parquet"
        path.write_bytes(path.read_bytes().replace(b"kind", b"ki\xffd"))
    with pytest.raises(DataError) as caught:
        load_own(tmp_path)
    column = "kind" if where == "packed" else where
    found = "not readable as Parquet" if where == "name" else f"column '{column}' holds text that"
    assert found in str(caught.value)


def test_parquet_with_whole_number_ids_matches_csv(tmp_path: Path) -> None:
    nodes = "id,a,b,label\n7,1,true,0\n3,2.5,false,1\n5,-1,true,10\n"
    edges = "src,dst,weight\n7,3,2\n3,5,0.5\n"
    from_csv, _ = load_own(folder(tmp_path / "csv", nodes, edges))
    other = tmp_path / "parquet"
    other.mkdir()
    table = {"id": [7, 3, 5], "a": [1, 2.5, -1], "b": [True, False, True], "label": [0, 1, 10]}
    pa.parquet.write_table(pa.table(table), other / "nodes.parquet")
    table = {"src": [7, 3], "dst": [3, 5], "weight": [2, 0.5]}
    pa.parquet.write_table(pa.table(table), other / "edges.parquet")
    source, report = load_own(other)
    np.testing.assert_array_equal(source.x, from_csv.x)
    np.testing.assert_array_equal(source.y, from_csv.y)
    np.testing.assert_array_equal(source.edges, from_csv.edges)
    np.testing.assert_array_equal(source.weight, from_csv.weight)
    assert source.columns["id"].dtype == np.int64
    assert report.classes == ("0", "1", "10")  # in the order of numbers, not of texts


def test_parquet_nodes_with_csv_edges(tmp_path: Path) -> None:
    folder(tmp_path, edges="source,target\n1,2\n").joinpath("nodes.csv").unlink()
    table = pa.table(
        {"id": [1, 2], "f": [0.5, 1.5], "label": pa.array(["p", "q"]).dictionary_encode()}
    )
    pa.parquet.write_table(table, tmp_path / "nodes.parquet")
    assert pairs(load_own(tmp_path)[0]) == [(0, 1), (1, 0)]


def test_ids_stay_text_where_they_look_like_numbers(tmp_path: Path) -> None:
    nodes = "id,f,label\n007,1,x\n7,2,y\n"
    source, _ = load_own(folder(tmp_path, nodes, "source,target\n 7, 007\n"))
    assert source.columns["id"].tolist() == ["007", "7"]
    assert pairs(source) == [(0, 1), (1, 0)]


def test_a_row_is_the_line_that_an_editor_shows(tmp_path: Path) -> None:
    nodes = 'id,f,label,note\na,1,x,"two\nlines"\n\n\nb,,y,z\nc,3,y,z\n'
    with pytest.raises(DataError, match=r"^nodes.csv row 6, column 'f' has no value"):
        load_own(folder(tmp_path, nodes, "source,target\na,b\n"))


def test_a_parquet_row_counts_from_one(tmp_path: Path) -> None:
    pa.parquet.write_table(
        pa.table({"id": [1, 2], "f": [1.0, None], "label": ["x", "y"]}), tmp_path / "nodes.parquet"
    )
    tmp_path.joinpath("edges.csv").write_text("source,target\n1,2\n")
    with pytest.raises(DataError, match=r"^nodes.parquet row 2, column 'f' has no value \(1 such"):
        load_own(tmp_path)


def test_a_row_of_a_client_names_the_client(tmp_path: Path) -> None:
    folder(tmp_path / "p", "id,f,label\na,1,x\nb,2,y\na,3,y\n", "source,target\n")
    folder(tmp_path / "q", "id,f,label\na,1,x\nb,nan,y\n", "source,target\n")
    with pytest.raises(DataError, match=r"^q/nodes.csv row 3, column 'f' holds nan"):
        load_own(tmp_path, options=OwnOptions(duplicate_nodes="first"))


def test_refused_parquet(tmp_path: Path) -> None:
    tmp_path.joinpath("edges.csv").write_text(E)
    file = tmp_path / "nodes.parquet"
    file.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"^nodes.parquet is not readable as Parquet"):
        load_own(tmp_path)
    table = {"id": ["a", "b"], "f": [[1, 2], [3]], "label": ["x", "y"]}
    pa.parquet.write_table(pa.table(table), file)
    with pytest.raises(DataError, match=r"column 'f' is of type list<.*store one text or number"):
        load_own(tmp_path)
    pa.parquet.write_table(pa.table({**table, "f": [1, 2], "id": [0.5, 1]}), file)
    with pytest.raises(DataError, match=r"column 'id' is of type double; ids are text or whole"):
        load_own(tmp_path)


def test_refused_clients(tmp_path: Path) -> None:
    folder(tmp_path / "p", "id,f,label\na,1,x\n", "source,target\n")
    q = tmp_path / "q"
    folder(q, "id,f,g,label\na,1,1,y\n", "source,target\n")
    with pytest.raises(DataError, match=r"^q/nodes.csv has the column 'g' and p/nodes.csv has not"):
        load_own(tmp_path)
    folder(q, "id,f,label\na,u,y\n", "source,target\n")
    with pytest.raises(DataError, match=r"column 'f' is of type int64 in p/nodes.csv and of type"):
        load_own(tmp_path)
    folder(q, "id,f,label\na,1,y\n", "source,target,weight\na,a,1\n")
    with pytest.raises(DataError, match=r"^q/edges.csv has weights and p/edges.csv has none"):
        load_own(tmp_path)
    folder(q, "id,f,label\nb,1,y\n", "source,target\nb,a\n")
    with pytest.raises(
        DataError, match=r"^q/edges.csv row 2, column 'target' holds 'a', not a node"
    ):
        load_own(tmp_path)
    folder(q, G, E, schema="[nodes]\n")
    with pytest.raises(ConfigError, match=r"^client folder 'q' has its own schema.toml"):
        load_own(tmp_path)
    q.joinpath("schema.toml").unlink()
    q.joinpath("nodes.csv").unlink()
    with pytest.raises(DataError, match=r"q' has no nodes.csv or nodes.parquet; a graph needs"):
        load_own(tmp_path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_damage_loads_or_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    files = [b"id,f,g,label,split\na,1,u,x,train\nb,2.5,v,y,val\nc,-3,u,x,\n", W.encode()]
    which = data.draw(st.integers(0, 1))
    for _ in range(data.draw(st.integers(1, 3))):
        text = files[which]
        at = data.draw(st.integers(0, len(text)))
        junk = data.draw(
            st.one_of(st.binary(max_size=3), st.sampled_from([b",", b"\n", b'"', b"nan"]))
        )
        files[which] = text[:at] + junk + text[at + data.draw(st.integers(0, 2)) :]
    options = OwnOptions(dangling=data.draw(st.sampled_from(["error", "drop"])))
    with contextlib.suppress(AtollError):
        load_own(folder(tmp_path, files[0], files[1]), options=options)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_header_alone_means_no_edges(tmp_path: Path, end: str) -> None:
    source, _ = load_own(folder(tmp_path, G, "source,target,weight" + end))
    assert source.edges.shape == (2, 0)
    with pytest.raises(AtollError, match="has a header but no rows"):
        load_own(folder(tmp_path / "none", "id,f,label" + end, E))
