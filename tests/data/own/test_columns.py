"""Columns of a node table turned into arrays, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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
