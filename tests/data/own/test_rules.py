"""Rules of columns, in schema.toml and as words of `--own`."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import AtollError
from atoll.data.load import parse_own_options
from atoll.data.own.reader import load_own

from .graphs import E, G, Tables, check_refused, folder

REFUSED: dict[str, Tables] = {
    "key": (G, E, "[columns.f]\nscael = 'log'", "[columns.f] 'scael'; did you mean 'scale'?"),
    "choice": (G, E, "[columns.f]\nscale = 'lgo'", "'lgo'; did you mean 'log'?"),
    "section": (G, E, "columns = 3", "write a section [columns.NAME] for each column"),
    "value": (G, E, "[columns]\nf = 3", "[columns.f] is 3; write it as a section"),
    "text": (G, E, "[columns.f]\nscale = 3", "[columns.f] scale is 3; it must be a text"),
    "list": (G, E, "[columns.f]\nvalues = 'a'", "values is 'a'; it must be a list of texts"),
    "part": (G, E, "[columns.f]\nkind='date'\nparts = ['yaer']", "did you mean 'year'?"),
    "no column": (G, E, "[columns.q]\nkind = 'number'", "names column 'q', which nodes.csv does"),
    "kinds": (G, E, "[columns.f]\nkind='number'\nother='x'", "is for a category, but kind is 'nu"),
    "no kind": (G, E, "[columns.f]\nvalues = ['a']", '[columns.f] gives values; add kind = "cat'),
    "mean category": (G, E, "[columns.f]\nkind='category'\nmissing='mean'", "only numbers have"),
    "other": (
        G,
        E,
        "[columns.f]\nkind='category'\nvalues=['a','b']\nother='a'",
        "names 'a' as a value and as other",
    ),
    "value twice": (G, E, "[columns.f]\nkind='category'\nvalues=['a','a']", "names a value twice"),
    "since": (G, E, "[columns.f]\nkind='date'\nsince='1.2.2020'", "since is '1.2.2020'; give a"),
    "two ids": (
        G,
        E,
        "[nodes]\nid='id'\n[columns.f]\nrole='id'",
        "gives the role id to 'id' and 'f'; give one",
    ),
    "two roles": (G, E, "[nodes]\nlabel='f'\n[columns.f]\nrole='ignore'", "as label and as ignore"),
    "default": (G, E, "[nodes]\nscale = 'lgo'", "[nodes] scale 'lgo'; did you mean 'log'?"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(tmp_path: Path, kind: str) -> None:
    check_refused(tmp_path, *REFUSED[kind])


def test_rules_give_roles(tmp_path: Path) -> None:
    nodes = "key,team,bank,size,note,part\na,r,B1,1,q,train\nb,s,B2,2,r,val\nc,r,B1,3,s,test\n"
    schema = """
    [columns]
    key = {role = "id"}
    team = {role = "label"}
    bank = {role = "owner"}
    part = {role = "split"}
    note = {kind = "text"}
    size = {role = "feature", kind = "category"}
    """
    source, report = load_own(folder(tmp_path, nodes, E, schema))
    assert report.features == ("size=1", "size=2", "size=3")
    assert report.classes == ("r", "s")
    assert set(source.columns) == {"id", "bank"}
    assert source.split is not None


def test_words_win_over_the_schema(tmp_path: Path) -> None:
    schema = "[columns.f]\nscale = 'log'\nmissing = 'mean'\n"
    words = {"f.scale": "none", "f.empty": "1, 2"}
    source, _ = load_own(folder(tmp_path, G, E, schema), options=parse_own_options(words))
    assert source.x.ravel().tolist() == [3, 3, 3]
    rule = source.encoder.features[0].rule
    assert (rule.scale, rule.missing, rule.empty) == ("none", "mean", ("1", "2"))


def test_choices_for_all_columns(tmp_path: Path) -> None:
    nodes = "id,f,g,k,label\na,1,,u,x\nb,,2,,y\nc,3,5,v,x\n"
    schema = "[nodes]\nscale = 'none'\nmissing = 'median'\n[columns.g]\nmissing='own category'\n"
    source, report = load_own(folder(tmp_path, nodes, E, schema))
    assert report.features == ("f", "g", "g is missing", "k=u", "k=v", "k is missing")
    assert source.x[:, :3].tolist() == [[1, 3.5, 1], [2, 2, 0], [3, 5, 0]]
    assert source.x[:, 5].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"f.scael": "log"}, "unknown key of --own f 'scael'; did you mean 'scale'?"),
        ({"scale": "lgo"}, "unknown choice for scale 'lgo'; did you mean 'log'?"),
        ({"columns": "f"}, "unknown option of your own data 'columns'"),
    ],
)
def test_refused_words(words: dict[str, object], sentence: str) -> None:
    with pytest.raises(AtollError) as caught:
        parse_own_options(words)
    assert sentence in str(caught.value)
