"""The encoder of a node table: the same numbers for the same values, in any table that follows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from atoll.core.errors import AtollError, DataError
from atoll.data.own.encoder import Encoder
from atoll.data.own.reader import load_new, load_own
from atoll.data.own.schema import OwnOptions
from atoll.data.source import Source

from .graphs import EDGES, NODES, RAW, folder

NEW = "label,kind,id,age\n,home,e,-0.0\ny,shop,f,9\n"
NEW_EDGES = "source,target\ne,f\n"


def trained(path: Path, nodes: str = NODES) -> Source:
    return load_own(folder(path / "old", nodes))[0]


def dense(source: Source) -> np.ndarray:
    return source.x.toarray() if sp.issparse(source.x) else source.x


def test_the_training_tables_come_out_as_they_went_in(tmp_path: Path) -> None:
    old = trained(tmp_path)
    encoder = Encoder.from_plain(json.loads(json.dumps(old.encoder.plain())))
    assert encoder == old.encoder
    again = load_new(tmp_path / "old", encoder, OwnOptions())[0]
    np.testing.assert_array_equal(dense(again), dense(old))
    np.testing.assert_array_equal(again.y, old.y)
    assert encoder.names == ("age", "kind=home", "kind=shop")
    assert encoder.classes == ("x", "y")


def test_a_new_table_has_its_columns_in_any_order(tmp_path: Path) -> None:
    encoder = load_own(folder(tmp_path / "old"), options=RAW)[0].encoder
    new, report = load_new(folder(tmp_path / "new", NEW, NEW_EDGES), encoder, OwnOptions())
    np.testing.assert_array_equal(new.x, [[0, 1, 0], [9, 0, 1]])
    assert not np.signbit(new.x).any()
    assert new.y.tolist() == [-1, 1]
    assert new.columns["id"].tolist() == ["e", "f"]
    assert report.messages == ()


def test_rare_categories_give_sparse_features(tmp_path: Path) -> None:
    rows = [f"n{i},{'xy'[i % 2]},k{i},{i % 2}" for i in range(20)]
    nodes = "\n".join(["id,label,kind,z", *rows])
    old = load_own(folder(tmp_path / "old", nodes, "source,target\nn0,n1\n"), options=RAW)[0]
    assert sp.issparse(old.x)
    assert old.x.dtype == np.float32
    expected = np.zeros((20, 21), np.float32)
    order = {name: place for place, name in enumerate(sorted(f"k{i}" for i in range(20)))}
    for i in range(20):
        expected[i, order[f"k{i}"]], expected[i, 20] = 1, i % 2
    np.testing.assert_array_equal(old.x.toarray(), expected)


def test_categories_that_look_like_numbers_stay_texts(tmp_path: Path) -> None:
    schema = '[nodes]\ncategories = ["kind"]\n'
    nodes = "id,label,kind,f\na,x,007,1\nb,y,7,2\nc,x,7,3\nd,y,007,4\n"
    old = load_own(folder(tmp_path / "old", nodes, EDGES, schema), options=RAW)[0]
    lone = "id,kind,f\ne,7,1\n"
    new, _ = load_new(folder(tmp_path / "new", lone, "source,target\n"), old.encoder, OwnOptions())
    np.testing.assert_array_equal(new.x, [[0, 1, 1]])


def test_further_columns_are_ignored_with_a_note(tmp_path: Path) -> None:
    encoder = trained(tmp_path).encoder
    nodes = NEW.replace("id,age", "id,age,colour").replace("-0.0", "1,red").replace("f,9", "f,9,b")
    _, report = load_new(folder(tmp_path / "new", nodes, NEW_EDGES), encoder, OwnOptions())
    assert report.messages == ("nodes.csv: ignored 'colour'",)


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        (
            NEW.replace("home", "farm"),
            "row 2, column 'kind' holds 'farm', a category that training",
        ),
        (
            "id,kind\ne,home\nf,shop\n",
            "nodes.csv lacks 1 of the 3 columns that the model needs: 'age'",
        ),
        (
            NEW.replace("9", "old"),
            "row 3, column 'age' holds 'old', but the model was trained on numbers there; correct "
            'it, or leave it empty and train again with missing = "own category", "mean" or '
            '"median", because the training\'s schema says missing = "refuse"',
        ),
        (
            NEW.replace(",f,9", ",f,"),
            "row 3, column 'age' has no value (1 such rows in all); fill them in, or train again "
            'with missing = "own category", "mean" or "median", because the training\'s schema '
            'says missing = "refuse"',
        ),
        (
            NEW.replace("shop,f", ",f"),
            "column 'kind' has no value (1 such rows in all); fill them in, or train again with "
            'missing = "own category", because',
        ),
        (NEW.replace("y,shop", "z,shop"), "row 3, column 'label' holds 'z', a class that training"),
        (
            NEW.replace(",f,", ",e,"),
            "gives the id 'e' again (1 such rows in all); an id names one node: remove one of the "
            "rows",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path: Path, nodes: str, sentence: str) -> None:
    encoder = trained(tmp_path).encoder
    with pytest.raises(AtollError) as caught:
        load_new(folder(tmp_path / "new", nodes, NEW_EDGES), encoder, OwnOptions())
    assert sentence in str(caught.value)
    for word in ("\n", "--own", "duplicate_nodes", "schema.toml"):
        assert word not in str(caught.value)


def test_a_text_where_gaps_are_filled_may_be_left_empty(tmp_path: Path) -> None:
    path = folder(tmp_path / "old", NODES, EDGES, '[columns.age]\nmissing = "mean"\n')
    encoder = load_own(path)[0].encoder
    new = folder(tmp_path / "new", NEW.replace("9", "old"), NEW_EDGES)
    with pytest.raises(AtollError, match=r"leave it empty: .* says missing = \"mean\"$"):
        load_new(new, encoder, OwnOptions())


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"format": 2},
        {"format": 3},
        {"format": 1, "label": 3},
        {"format": 1, "features": [], "label": "y", "classes": ["a", "b"]},
        {
            "format": 1,
            "features": [{"name": "f", "kind": "word"}],
            "label": "y",
            "classes": ["a", "b"],
        },
    ],
)
def test_another_encoder_file_is_refused(plain: dict[str, object]) -> None:
    with pytest.raises(DataError, match=r"encoder\.json cannot be used"):
        Encoder.from_plain(plain)


def test_an_encoder_of_an_older_run_leaves_numbers_as_they_are(tmp_path: Path) -> None:
    features = [
        {"name": "age", "kind": "number", "values": []},
        {"name": "kind", "kind": "category", "values": ["home", "shop"]},
    ]
    schema = {"file": "schema.toml", "ignore": []}
    plain = {"format": 1, "features": features, "label": "label", "classes": ["x", "y"], "id": "id"}
    encoder = Encoder.from_plain({**plain, "schema": schema})
    new, _ = load_new(folder(tmp_path / "new", NEW, NEW_EDGES), encoder, OwnOptions())
    np.testing.assert_array_equal(new.x, [[0, 1, 0], [9, 0, 1]])


def test_what_training_learnt_is_applied_to_new_tables(tmp_path: Path) -> None:
    schema = '[columns.age]\nmissing = "mean"\n[columns.kind]\nkind = "category"\nother = "rest"\n'
    old = load_own(folder(tmp_path / "old", schema=schema))[0]
    encoder = Encoder.from_plain(json.loads(json.dumps(old.encoder.plain())))
    nodes = "id,age,kind\ne,,farm\nf,4.5,shop\n"
    new, _ = load_new(folder(tmp_path / "new", nodes, NEW_EDGES), encoder, OwnOptions())
    assert encoder.names == ("age", "kind=home", "kind=shop", "kind=rest")
    np.testing.assert_allclose(new.x[0], [0, 0, 0, 1])
    np.testing.assert_array_equal(new.x[1], old.x[3] * [1, 0, 1, 1] + [0, 0, 1, 0])


def test_a_class_that_the_schema_does_not_list_names_its_row(tmp_path: Path) -> None:
    path = folder(tmp_path / "own", NODES)
    schema = '[columns.label]\nrole = "label"\nkind = "category"\nvalues = ["x"]\n'
    (path / "schema.toml").write_text(schema)
    with pytest.raises(DataError, match=r"row \d+, column 'label' holds the class 'y', but values"):
        load_own(path)
    (path / "schema.toml").write_text(schema.replace('"x"', '"x", "y"'))
    assert load_own(path)[0].classes
