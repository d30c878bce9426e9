"""Columns of a node table turned into arrays, or refused."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp

from atoll.data.own.reader import load_own

from .graphs import RAW, E, Tables, check_refused, folder

REFUSED: dict[str, Tables] = {
    # nodes.csv, edges.csv, schema.toml, the sentence
    "no value": ("id,f,label\na,1,x\nb,,y\n", E, "", "nodes.csv row 3, column 'f' has no value"),
    "no owner": (
        "id,f,label,client\na,1,x,\nb,2,y,p\n",
        E,
        "",
        "row 2, column 'client' has no value",
    ),
    "no category": ("id,f,label\na,u,x\nb, ,y\n", E, "", "row 3, column 'f' has no value"),
    "nan": ("id,f,label\na,nan,x\nb,2,y\n", E, "", "nodes.csv row 2, column 'f' holds nan"),
    "inf": ("id,f,label\na,1,x\nb,-inf,y\n", E, "", "row 3, column 'f' holds -inf (1 such"),
    "too large": ("id,f,label\na,1,x\nb,1e99,y\n", E, "", "holds 1e+99"),
    "text among numbers": (
        "id,f,label\na,1,x\nb,NA,y\nc,3,x\n",
        E,
        "",
        "nodes.csv row 3, column 'f' holds 'NA', but most of its values are numbers",
    ),
    "text for a number": (
        "id,f,label\na,u,x\nb,v,y\n",
        E,
        '[nodes]\nfeatures = ["f"]',
        "nodes.csv row 2, column 'f' holds 'u', but schema.toml says",
    ),
    "a date": ("id,f,label\na,2020-01-01,x\nb,2020-01-02,y\n", E, "", "is of type date32"),
    "unknown split": (
        "id,f,label,split\na,1,x,trian\nb,2,y,val\n",
        E,
        "",
        "holds 'trian'; a split",
    ),
    "one class": ("id,f,label\na,1,x\nb,2,x\n", E, "", "holds only the class 'x'"),
    "no labels": ("id,f,label\na,1,\nb,2,\n", E, "", "holds no label at all"),
    "fraction label": (
        "id,f,label\na,1,0.5\nb,2,1\n",
        E,
        "",
        "row 2, column 'label' holds the fraction",
    ),
    "missing mark": ("id,f,label\na,1,\nb,2,N/A\nc,3,x\n", E, "", "reads like a missing label"),
    "no features": ("id,label\na,x\nb,y\n", E, "", "nodes.csv has no feature column"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(tmp_path: Path, kind: str) -> None:
    check_refused(tmp_path, *REFUSED[kind])


def test_many_categories_become_a_sparse_array(tmp_path: Path) -> None:
    rows = "".join(f"n{i},t{i % 50:02d},{i % 2},{i}\n" for i in range(100))
    nodes, edges = "id,tag,label,f\n" + rows, "source,target\nn0,n1\n"
    source, report = load_own(folder(tmp_path, nodes, edges), options=RAW)
    assert isinstance(source.x, sp.csr_array)
    assert source.x.shape == (100, 51)
    dense = source.x.toarray()
    np.testing.assert_array_equal(dense[:, 50], np.arange(100))
    np.testing.assert_array_equal(dense[:, :50].argmax(1), np.arange(100) % 50)
    assert dense[:, :50].sum() == 100
    assert report.features[0] == "tag=t00"


def made(path: Path, values: list[str], rule: str, raw: bool = True) -> np.ndarray:
    """The features of a table with one column, as CSV, and a rule."""
    rows = [f'n{i},"{value}",{"xy"[i % 2]}' for i, value in enumerate(values)]
    nodes = "\n".join(["id,f,label", *rows])
    edges = "source,target\nn0,n1\n"
    source, _ = load_own(
        folder(path, nodes, edges, f"[columns.f]\n{rule}\n"), options=RAW if raw else None
    )
    return source.x


def test_numbers_are_standardised_by_default(tmp_path: Path) -> None:
    found = made(tmp_path, ["1", "2", "3", "6"], "", raw=False).ravel()
    np.testing.assert_allclose(found.mean(), 0, atol=1e-7)
    np.testing.assert_allclose(found.std(), 1, rtol=1e-6)


def test_a_constant_stays_finite(tmp_path: Path) -> None:
    assert made(tmp_path, ["7", "7"], "", raw=False).toarray().ravel().tolist() == [0, 0]


def test_robust_and_log(tmp_path: Path) -> None:
    values = ["1", "2", "3", "4", "1000"]
    found = made(tmp_path / "r", values, "scale = 'robust'").ravel()
    np.testing.assert_allclose(found, [-1, -0.5, 0, 0.5, 498.5])
    found = made(tmp_path / "l", ["-1", "0", "1"], "scale = 'log'").ravel()
    np.testing.assert_allclose(found, [-np.sqrt(1.5), 0, np.sqrt(1.5)], rtol=1e-6)


def test_gaps_are_filled(tmp_path: Path) -> None:
    values = ["1", "", "NA", "2", "6"]
    marks = "empty = ['NA']\n"
    found = made(tmp_path / "a", values, marks + "missing = 'mean'").ravel()
    assert found.tolist() == [1, 3, 3, 2, 6]
    found = made(tmp_path / "b", values, marks + "missing = 'median'").ravel()
    assert found.tolist() == [1, 2, 2, 2, 6]
    found = made(tmp_path / "c", values, marks + "missing = 'own category'")
    assert found[:, 1].tolist() == [0, 1, 1, 0, 0]
    found = made(tmp_path / "d", ["1", "nan", "3"], "missing = 'mean'").ravel()
    assert found.tolist() == [1, 2, 3]


def test_decimal_commas(tmp_path: Path) -> None:
    rule = "kind = 'number'\ndecimal = ','"
    assert made(tmp_path, ["1,5", "1.234,25", "7"], rule).ravel().tolist() == [1.5, 1234.25, 7]


def test_truth_values(tmp_path: Path) -> None:
    assert made(tmp_path / "a", ["yes", "No", "1"], "kind = 'boolean'").ravel().tolist() == [
        1,
        0,
        1,
    ]
    assert made(tmp_path / "b", ["true", "false"], "", raw=False).ravel().tolist() == [1, 0]
    found = made(tmp_path / "c", ["t", "", "f"], "kind = 'boolean'\nmissing = 'own category'")
    assert found.tolist() == [[1, 0], [0.5, 1], [0, 0]]


def test_categories_with_other_and_missing(tmp_path: Path) -> None:
    rule = "kind='category'\nvalues=['b','a']\nother='rest'\nmissing='own category'"
    found = made(tmp_path, ["a", "q", "", "b"], rule)
    assert found.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    "raw", [("2020-01-02", "2020-07-01", ""), ("02.01.2020", "01.07.2020", "")]
)
def test_dates(tmp_path: Path, raw: tuple[str, ...]) -> None:
    rule = "kind='date'\nsince='2020-01-01'\nmissing='mean'\nparts=['days','year','week']\n"
    form = "format = '%d.%m.%Y'" if "." in raw[0] else ""
    found = made(tmp_path, list(raw), rule + form)
    assert found[:, 0].tolist() == [1, 182, 91.5]
    angle = 2 * np.pi * np.array([1 / 366, 182 / 366])
    np.testing.assert_allclose(found[:2, 1], np.sin(angle), rtol=1e-5)
    np.testing.assert_allclose(found[:2, 2], np.cos(angle), atol=1e-6)
    np.testing.assert_allclose(found[:2, 3], np.sin(2 * np.pi * np.array([3, 2]) / 7), rtol=1e-5)
    assert found[2, 1:].tolist() == [0, 0, 0, 0]


def test_instants_of_parquet(tmp_path: Path) -> None:
    folder(tmp_path, schema="[columns.f]\nkind='date'\nparts=['day']\n").joinpath(
        "nodes.csv"
    ).unlink()
    when = [datetime.datetime(2020, 1, 1, hour, tzinfo=datetime.UTC) for hour in (0, 6, 12, 18)]
    table = pa.table({"id": [*"abcd"], "f": when, "label": [*"xyxy"]})
    pq.write_table(table, tmp_path / "nodes.parquet")
    source, report = load_own(tmp_path)
    assert report.features == ("f day sin", "f day cos")
    np.testing.assert_allclose(source.x, [[0, 1], [1, 0], [0, -1], [-1, 0]], atol=1e-6)


REFUSED_NUMBERS: dict[str, Tables] = {
    "no truth": (
        "id,f,label\na,yes,x\nb,maybe,y\n",
        E,
        "[columns.f]\nkind='boolean'",
        "row 3, column 'f' holds 'maybe' (1 such rows in all); a truth value is",
    ),
    "no date": (
        "id,f,label\na,2020-01-01,x\nb,soon,y\n",
        E,
        "[columns.f]\nkind='date'",
        "row 3, column 'f' holds 'soon', no date of the form %Y-%m-%d (1 such",
    ),
    "undeclared date": (
        "id,f,label\na,2020-01-01,x\nb,2020-01-02,y\n",
        E,
        "",
        'add [columns.f] kind = "date" or "text"',
    ),
    "gap": ("id,f,label\na,1,x\nb,,y\n", E, "", "under [columns.f] in schema.toml"),
    "all gaps": (
        "id,f,label\na,,x\nb,,y\n",
        E,
        "[columns.f]\nmissing='mean'",
        "column 'f' has no value in any row",
    ),
    "infinite": (
        "id,f,label\na,inf,x\nb,,y\n",
        E,
        "[columns.f]\nmissing='mean'",
        "row 2, column 'f' holds inf",
    ),
    "a value that is not declared": (
        "id,f,label\na,u,x\nb,v,y\n",
        E,
        "[columns.f]\nkind='category'\nvalues=['u']",
        "row 3, column 'f' holds 'v', a category",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_NUMBERS)
def test_refused_numbers(tmp_path: Path, kind: str) -> None:
    check_refused(tmp_path, *REFUSED_NUMBERS[kind])
