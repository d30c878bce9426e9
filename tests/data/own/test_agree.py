"""Several owners of tables agree on one encoder without sending a row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.data.own.agree import Agreed, Told, agree, with_agreed
from atoll.data.own.encoder import Encoder
from atoll.data.own.reader import load_new, load_own
from atoll.data.own.schema import OwnOptions
from atoll.data.source import Source

from .graphs import folder

SCHEMA = """
[columns]
age = {missing = "mean"}
paid = {scale = "log", missing = "own category"}
when = {kind = "date", format = "%Y-%m-%d"}
far = {scale = "range", range = [0, 10]}
"""


def hospitals(path: Path, schema: str = SCHEMA, sites: int = 3) -> Path:
    """A folder for each hospital, of which only the last has sex = x."""
    rng = np.random.default_rng(5)
    for site in range(sites):
        rows = []
        for i in range(20 + 7 * site):
            age = "" if i == 3 else f"{1e6 + rng.normal(50 * site, 9)}"
            paid = "" if i == 5 else f"{rng.exponential(1000)}"
            day = f"20{rng.integers(10, 24)}-01-{rng.integers(10, 28)}"
            sex = "x" if site == sites - 1 and i % 4 == 0 else "fm"[i % 2]
            rows.append(f"{i},{age},{paid},{day},{rng.uniform(-1, 12)},{sex},{'uv'[i % 2]}")
        nodes = "\n".join(["id,age,paid,when,far,sex,label", *rows])
        folder(path / f"h{site}", nodes, "source,target\n0,1\n1,2\n")
    (path / "schema.toml").write_text(schema)
    return path


def loaded(path: Path, mode: str) -> Source:
    return load_own(path, options=OwnOptions(encoder=mode))[0]


def test_hospitals_that_differ_in_a_category_agree(tmp_path: Path) -> None:
    together = loaded(hospitals(tmp_path), "federated")
    assert [n for n in together.encoder.names if n.startswith("sex")] == ["sex=f", "sex=m", "sex=x"]
    place = together.encoder.names.index("sex=x")
    assert set(together.columns["client"][together.x[:, place] == 1]) == {"h2"}


def test_agreed_statistics_are_those_of_all_rows(tmp_path: Path) -> None:
    hospitals(tmp_path)
    one, all_rows = loaded(tmp_path, "federated").encoder, loaded(tmp_path, "pooled").encoder
    for mine, other in zip(one.features, all_rows.features, strict=True):
        assert (mine.name, mine.values) == (other.name, other.values)
        for key in ("centre", "spread", "fill"):
            np.testing.assert_allclose(getattr(mine, key), getattr(other, key), rtol=1e-12)


ANGLES = """
[columns]
age = {missing = "own category", scale = "none"}
paid = {missing = "mean"}
when = {kind = "date", parts = ["year", "week"]}
far = {scale = "range", range = [-2, 20], missing = "mean"}
"""


def test_only_statistics_that_the_encoder_uses_leave_an_owner(tmp_path: Path) -> None:
    path = hospitals(tmp_path, ANGLES, 2)
    told = {one.name: one for one in load_own(path / "h0", path / "schema.toml", telling=1)[1].told}
    assert (told["when"].rows, told["when"].mean, told["when"].squares) == (0, 0, 0)
    assert (told["age"].rows, told["age"].squares) == (19, 0)  # only the mean fills its gaps
    assert told["age"].mean > 9e5
    assert told["far"].squares == 0
    assert told["paid"].squares > 0
    one, two = (loaded(path, mode) for mode in ("federated", "pooled"))
    np.testing.assert_allclose(one.x, two.x, rtol=1e-6, atol=1e-6)


def test_a_declared_range_stays_where_the_mean_fills_gaps(tmp_path: Path) -> None:
    path = hospitals(tmp_path, ANGLES, 2)
    for mode in ("federated", "pooled", "local"):
        encoder = loaded(path, mode).encoder
        far = encoder.of_client("h0").features[3]
        assert (far.name, far.centre, far.spread) == ("far", 9, 11)
        assert 0 < far.fill < 12


def test_each_client_may_measure_its_own_rows(tmp_path: Path) -> None:
    source = loaded(hospitals(tmp_path), "local")
    for name in ("h0", "h1", "h2"):
        ages = source.x[source.columns["client"] == name, 0].astype(np.float64)
        assert abs(ages.mean()) < 1e-5
    encoder = Encoder.from_plain(json.loads(json.dumps(source.encoder.plain())))
    again = load_new(tmp_path, encoder, OwnOptions())[0]
    np.testing.assert_array_equal(again.x, source.x)
    one = load_new(tmp_path / "h1", encoder, OwnOptions(), client="h1")[0]
    np.testing.assert_array_equal(one.x, source.x[source.columns["client"] == "h1"])
    np.testing.assert_array_equal(
        load_new(tmp_path / "h1", encoder.of_client("h1"), OwnOptions())[0].x, one.x
    )
    with pytest.raises(DataError, match="name the client of the tables with --client"):
        load_new(tmp_path / "h1", encoder, OwnOptions())
    with pytest.raises(DataError, match="has rows of client 'h9'; training knows 'h0', 'h1', 'h2'"):
        load_new(tmp_path / "h1", encoder, OwnOptions(), client="h9")
    with pytest.raises(ConfigError, match="every client has its own encoder; name one with"):
        encoder.of_client("")


def test_a_declared_range_needs_no_rows(tmp_path: Path) -> None:
    source = loaded(hospitals(tmp_path), "federated")
    place = source.encoder.names.index("far")
    assert source.x[:, place].min() == -1
    assert source.x[:, place].max() == 1
    feature = next(f for f in source.encoder.features if f.name == "far")
    assert (feature.centre, feature.spread) == (5, 5)


@pytest.mark.parametrize(
    ("schema", "options", "sentence"),
    [
        (
            SCHEMA.replace('"mean"', '"median"'),
            OwnOptions(),
            "column 'age' needs a median, which owners cannot agree on by sums; give scale",
        ),
        (SCHEMA, OwnOptions(private=True), "under [columns.age] of schema.toml, or --encoder"),
        (SCHEMA, OwnOptions(private=True, encoder="local"), "give values = [...] under [columns."),
        (SCHEMA.replace("[0, 10]", "[3]"), OwnOptions(), "give the lowest and the highest number"),
        (SCHEMA.replace("[0, 10]", "[3, 1]"), OwnOptions(), "give the lowest and the highest"),
        (SCHEMA.replace(", range = [0, 10]", ""), OwnOptions(), "range = [LOW, HIGH] go together"),
    ],
)
def test_refused(tmp_path: Path, schema: str, options: OwnOptions, sentence: str) -> None:
    with pytest.raises(AtollError) as caught:
        load_own(hospitals(tmp_path, schema), options=options)
    assert sentence in str(caught.value)


def test_a_private_run_with_a_complete_schema(tmp_path: Path) -> None:
    every = 'scale = "range", range = [0, 9], missing = "own category"'
    schema = f"""
    [columns]
    age = {{{every}}}
    paid = {{{every}}}
    far = {{{every}}}
    when = {{kind = "date", format = "%Y-%m-%d", scale = "range", range = [0, 30000]}}
    sex = {{kind = "category", values = ["f", "m", "x"]}}
    """
    source, _ = load_own(hospitals(tmp_path, schema), options=OwnOptions(private=True))
    assert np.abs(source.x).max() == 1


def test_one_owner_cannot_be_local(tmp_path: Path) -> None:
    hospitals(tmp_path)
    with pytest.raises(ConfigError, match="needs tables that name the client of each node"):
        load_own(tmp_path / "h0", tmp_path / "schema.toml", OwnOptions(encoder="local"))


def test_a_column_of_times_names_no_client(tmp_path: Path) -> None:
    hospitals(tmp_path)
    alone = OwnOptions(time="when", encoder="local", missing="mean")
    with pytest.raises(ConfigError, match="needs tables that name the client of each node"):
        load_own(tmp_path / "h0", options=alone)


@pytest.mark.parametrize(
    ("one", "two", "sentence"),
    [
        (
            [Told("f", "number, standard, refuse")],
            [Told("f", "number, log, refuse")],
            "'a' and 'b' read column 'f' differently",
        ),
        ([Told("f", "x"), Told("g", "x")], [Told("f", "x")], "differ in the column 'g'"),
        ([Told("f", "x"), Told("g", "x")], [Told("g", "x"), Told("f", "x")], "in the same order"),
    ],
)
def test_owners_that_differ_are_refused(one: list[Told], two: list[Told], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        agree({"a": one, "b": two})


def test_what_was_agreed_must_fit(tmp_path: Path) -> None:
    features = loaded(hospitals(tmp_path), "pooled").encoder.features
    with pytest.raises(DataError, match="the agreed columns differ from the columns of the tables"):
        with_agreed(features, [Agreed("other")])
    with pytest.raises(ValueError, match="not finite"):
        Agreed("f", centre=float("inf"))
    with pytest.raises(ValueError, match="not finite"):
        Told("f", "x", mean=float("nan"))
