"""One look at all tables: every problem in one answer, and a schema that can be used."""

from __future__ import annotations

import random
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.core.errors import DataError
from atoll.data.load import parse_own_options
from atoll.data.own.columns import Column, Rows
from atoll.data.own.describe import describe
from atoll.data.own.look import Look, look_at
from atoll.data.own.reader import load_own
from atoll.data.own.rules import Rule
from atoll.data.own.schema import _KEYS, _TOP, OwnOptions, Schema, read_schema

from .graphs import E, G, folder


def ten_faults(path: Path) -> Path:
    """A table with gaps, decimal commas, marks, dates, names, words among numbers, and worse."""
    rows, rng = [], random.Random(3)
    for i in range(60):
        fraud = rng.random() < 0.4
        age = "" if i % 20 == 0 else str(rng.randint(20, 60))
        balance = f'"{rng.randint(1, 9)}.000,{rng.randint(1, 9)}5"'
        visits = "unknown" if i == 5 else str(rng.randint(1, 4))
        label = "N/A" if i == 7 else ["ok", "fraud"][fraud]
        opened = f"{rng.randint(13, 28)}.0{rng.randint(1, 9)}.2020"
        name = f"name {i}"
        kind = rng.choice(["app", "web"]) if i % 5 else "NA"
        when = 5 * fraud + rng.random()
        row = [f"c{4 if i == 9 else i}", age, balance, kind, opened, name, visits, when, label]
        rows.append(",".join(map(str, row)))
    nodes = "customer,age,balance,channel,opened,name,visits,closed,label"
    edges = [f"c{i},c{(i + 1) % 60},1" for i in range(11, 50)]
    edges += ["c1,zz,1", "c1,c1,1", "c12,c13,1", "c20,c30,-2"]
    return folder(path, "\n".join([nodes, *rows]), "\n".join(["source,target,weight", *edges]))


def test_all_problems_of_a_table_are_one_answer(tmp_path: Path) -> None:
    found = describe(ten_faults(tmp_path / "bank"))
    told = [(p.place.removeprefix("nodes.csv, "), p.text, p.rows) for p in found.problems]
    expected = [
        ("column 'customer'", "seems to be the id", 0),
        ("column 'customer'", "give an id again", 1),
        ("column 'age'", "rows have no value", 3),
        ("column 'balance'", "decimal comma", 60),
        ("column 'channel'", "'NA' may mean that there is no value", 12),
        ("column 'opened'", "dates of the form %d.%m.%Y", 0),
        ("column 'name'", "60 different texts seem to be an id or a free text", 60),
        ("column 'visits'", "'unknown' are no numbers", 1),
        ("column 'closed'", "predicts the label by itself (AUC 1.000)", 0),
        ("column 'label'", "'N/A' reads like a missing label", 1),
        ("edges.csv", "edges name a node that is not there, as 'zz' does", 1),
        ("edges.csv", "edges join a node to itself", 1),
        ("edges.csv", "edges are given again", 1),
        ("edges.csv, column 'weight'", "a weight is a finite number", 1),
    ]
    for place, text, rows in expected:
        assert any(p == place and text in t and n == rows for p, t, n in told), (place, text, told)
    # Visits has a gap too, where 'unknown' was; owner and directions are open.
    assert len(told) == len(expected) + 3


def test_the_schema_is_complete_and_loads(tmp_path: Path) -> None:
    bank = ten_faults(tmp_path / "bank")
    bank.joinpath("edges.csv").write_text(
        bank.joinpath("edges.csv").read_text().replace("c20,c30,-2", "c20,c30,2")
    )
    schema = tmp_path / "schema.toml"
    schema.write_text(describe(bank).toml())
    assert set(read_schema(schema).columns) == set(describe(bank).looks)
    assert schema.read_text().count("# ?") >= 10
    options = OwnOptions(duplicate_nodes="first", dangling="drop")
    source, report = load_own(bank, schema, options)
    assert source.num_nodes == 59
    assert report.features == (
        *("age", "age is missing", "balance", "channel=NA", "channel=app", "channel=web"),
        *("opened days", "visits", "visits is missing", "closed"),
    )
    assert report.classes == ("fraud", "ok")
    left = {p.text.split(";")[0] for p in describe(bank, schema).problems}
    assert left == {
        'which column names the owner? give it role = "owner"',
        "predicts the label by itself (AUC 1.000)",
        "give an id again",
        "edges name a node that is not there, as 'zz' does",
        "edges join a node to itself",
        "edges are given again",
    }


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        ("id,f\na,1\nb,2\n", "no column is the label"),
        ("id,f,label,y\na,1,x,1\n", "columns 'label', 'y' could each be the label"),
        ("key,f,label\nu,1,x\nv,2,y\n", "no column is the id"),
        ("id,f,label\na,1,x\nb,2\n", "row 3 has 2 values"),
        ("id,f,label\na,1,x\nb,2,x\n", "holds 1 class;"),
        ("id,f,label\na,1,0.5\nb,2,1\n", "holds fractions"),
        ("id,f,label\na,,x\nb,,y\n", "no row has a value; it is ignored"),
        ("id,f,label\na,007,x\nb,12,y\n", "begin with 0 may be names"),
        ("id,f,label\n,1,x\nb,2,y\n", "rows have no id"),
    ],
)
def test_each_problem(tmp_path: Path, nodes: str, sentence: str) -> None:
    found = [problem.text for problem in describe(folder(tmp_path, nodes, E)).problems]
    assert sentence in " | ".join(found)


def test_a_schema_decides(tmp_path: Path) -> None:
    rules = "[columns.f]\nkind='category'\nvalues=['1','2']\n[columns.label]\nrole='label'\n"
    rules += "[edges]\ndirected=true\n"
    owned = G.replace("label", "label,client").replace("\n", ",n\n").replace("client,n", "client")
    found = describe(folder(tmp_path, owned, E, rules))
    assert [(p.text, p.rows) for p in found.problems] == [("'3' do not fit kind = \"category\"", 1)]
    tmp_path.joinpath("schema.toml").write_text("[nodes]\nlabel = 'lobel'\n")
    assert "names the column 'lobel', which is not there" in str(describe(tmp_path).problems)


POOLED = OwnOptions(encoder="pooled")
MIXED = """key,bank,age,balance,far,opened,kind,channel,ok,name,other,part,class_
a,n,1.5,"1.000,5",3,05.01.2020,u,app,1,x,p,train,good
b,n,,"2,25",-7,30.06.2021,v,web,0,y,q,val,bad
c,s,NA,"7",12,,u,post,1,z,p,test,good
d,s,4,"0",5,31.12.1999,v,app,0,w,q,train,?
"""
PAID = "payer,payee,amount\na,b,2\na,b,3\nb,a,7\nc,c,1\nb,c,3\n"
EDGES = """[edges]
source = "payer"
target = "payee"
weight = "amount"
directed = true
self_loops = "keep"
duplicate_edges = "sum"
"""
BY_COLUMN = (
    """task = "node"
[nodes]
scale = "none"
missing = "own category"
[columns]
key = {role = "id", kind = "text"}
bank = {role = "owner"}
age = {kind = "number", missing = "mean", empty = ["NA"], scale = "robust"}
balance = {kind = "number", decimal = ",", scale = "log"}
far = {role = "feature", kind = "number", scale = "range", range = [0, 10]}
opened = {kind = "date", format = "%d.%m.%Y", parts = ["days", "year"], since = "2000-01-01"}
kind = {kind = "category"}
channel = {kind = "category", values = ["app", "web"], other = "rest", missing = "refuse"}
ok = {kind = "boolean"}
name = {kind = "text"}
other = {role = "ignore", kind = "category", values = ["p"]}
part = {role = "split"}
class_ = {role = "label", kind = "text", empty = ["?"]}
"""
    + EDGES
)
BY_LIST = (
    """target = "class_"
[nodes]
id = "key"
owner = "bank"
split = "part"
scale = "none"
features = ["far", "ok"]
categories = ["kind", "channel"]
ignore = ["name"]
[columns]
class_ = {empty = ["?"]}
"""
    + EDGES
)


def test_an_answer_under_an_ignored_text_stays(tmp_path: Path) -> None:
    rows = "".join(f"name {i},{i % 2},{'xy'[i % 2]}\n" for i in range(60))
    path, schema = folder(tmp_path, f"who,f,label\n{rows}", "source,target\n"), "schema.toml"
    asked = describe(path).toml()
    assert 'role = "ignore"\nkind = "text"' in asked
    path.joinpath(schema).write_text(asked.replace('role = "ignore"', 'role = "id"'))
    assert load_own(path)[0].columns["id"][0] == "name 0"
    again = describe(path)
    assert not any("no column is the id" in problem.text for problem in again.problems)
    assert 'role = "id"\nkind = "text"' in again.toml()


@pytest.mark.parametrize("given", [BY_COLUMN, BY_LIST])
def test_every_key_of_a_schema_survives(tmp_path: Path, given: str) -> None:
    path = folder(tmp_path / "bank", MIXED, PAID)
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text(given)
    found = describe(path, one)
    assert found.problems == []
    two.write_text(found.toml())
    assert describe(path, two).toml() == found.toml()
    before, after = read_schema(one), read_schema(two)
    lists = ("file", "columns", "features", "categories", "ignore")
    for key in (f.name for f in fields(Schema) if f.name not in lists):
        assert getattr(after, key) == getattr(before, key), key
    for name, rule in before.columns.items():
        for key in (f.name for f in fields(Rule) if getattr(rule, f.name)):
            assert getattr(after.columns[name], key) == getattr(rule, key), (name, key)
    (old, told), (new, again) = (load_own(path, schema, POOLED) for schema in (one, two))
    assert told.features == again.features
    for array in ("x", "y", "edges", "weight", "split"):
        np.testing.assert_array_equal(getattr(old, array), getattr(new, array))
    assert old.columns.keys() == new.columns.keys()


def test_the_schemas_of_that_test_have_every_key() -> None:
    raw = [tomllib.loads(text) for text in (BY_COLUMN, BY_LIST)]
    for section, keys in _KEYS.items():
        named = {key for one in raw for key in one[section]}
        assert {*keys} - named <= {"label"}  # which `target` gives
    assert {*_TOP} == {key for one in raw for key in one if not isinstance(one[key], dict)}
    rules = [rule for one in raw for rule in one["columns"].values()]
    assert {f.name for f in fields(Rule)} == {key for rule in rules for key in rule}


def test_what_a_schema_refuses_is_asked_about(tmp_path: Path) -> None:
    schema = EDGES.replace('"sum"', '"error"').replace('"keep"', '"error"')
    found = [p.text for p in describe(folder(tmp_path, MIXED, PAID, schema)).problems]
    assert 'edges join a node to itself; and self_loops = "error"' in found
    assert 'edges are given again; and duplicate_edges = "error"' in found


def test_another_separator_is_one_problem(tmp_path: Path) -> None:
    found = describe(folder(tmp_path, G.replace(",", ";"), E.replace(",", "\t")))
    assert [(p.place, p.text) for p in found.problems] == [
        ("nodes.csv", "seems to use ';' between values; save it with commas"),
        ("edges.csv", "seems to use tabs between values; save it with commas"),
        ("[edges] directed", "an edge joins both ways; choose true to keep directions"),
    ]


def test_owner_and_directions_are_asked_about(tmp_path: Path) -> None:
    found = describe(folder(tmp_path / "one", G, E))
    assert [p.text for p in found.problems] == [
        'which column names the owner? give it role = "owner"; '
        "without one, Louvain cuts the graph into invented clients",
        "an edge joins both ways; choose true to keep directions",
    ]
    assert sum("# ?" in line for line in found.toml().splitlines()[1:]) == 2
    two = "id,client,owner,f,label\na,n,s,1,x\nb,n,s,2,y\n"
    found = describe(folder(tmp_path / "two", two, E))
    assert "'client', 'owner' could each be the owner" in str(found.problems)
    tmp_path.joinpath("two.toml").write_text(found.toml())
    assert read_schema(tmp_path / "two.toml").owner == "client"
    folder(tmp_path / "sites/a", G, E)
    assert "owner" not in str(describe(tmp_path / "sites").problems)


def test_edges_without_known_ends_get_lines_to_fill_in(tmp_path: Path) -> None:
    found = describe(folder(tmp_path, G, "payer,payee\na,b\n"))
    assert '[edges]\n# ? source = "..."\n# ? target = "..."\n' in found.toml()
    assert "(columns: 'payer', 'payee')" in " ".join(p.text for p in found.problems)


def test_clients_that_differ(tmp_path: Path) -> None:
    folder(tmp_path / "a", "id,f,g,label\na,1,1,x\nb,2,2,y\n", E)
    folder(tmp_path / "b", "id,f,label\na,1,x\nb,2,y\n", E)
    assert "is not in 'b/nodes.csv'" in str(describe(tmp_path).problems)


HEAD = "id,f,day,label\n"


def test_problems_name_the_clients_that_have_them(tmp_path: Path) -> None:
    first = f"{HEAD}a,1,2020-01-02,x\nb,,2020-01-03,y\n"
    folder(tmp_path / "north", first, "source,target,paid\na,b,1\na,z,1\na,a,1\n")
    second = f"{HEAD}c,NA,3.1.2020,x\nd,,2020-01-04,y\ne,,2020-01-04,?\n"
    folder(tmp_path / "south", second, "source,target,paid\nc,d,1\nc,y,1\nd,y,1\n")
    (tmp_path / "schema.toml").write_text("[columns]\nday = {kind = 'date'}\n")
    found = describe(tmp_path).problems
    both = "north/edges.csv, south/edges.csv"
    expected = [
        ("south/nodes.csv, column 'f'", "'NA' may mean that there is no value", 1),
        ("north/nodes.csv (1), south/nodes.csv (3), column 'f'", "rows have no value; choose", 4),
        ("south/nodes.csv, column 'day'", "'3.1.2020' do not fit kind = \"date\"", 1),
        ("south/nodes.csv, column 'label'", "'?' reads like a missing label", 1),
        (both, "columns 'paid' of the edges are not used", 0),
        ("north/edges.csv (1), south/edges.csv (2)", "node that is not there, as 'z' does", 3),
        ("north/edges.csv", "edges join a node to itself", 1),
        ("[edges] directed", "an edge joins both ways", 0),
    ]
    assert len(found) == len(expected), found
    for place, text, rows in expected:
        assert any(p.place == place and text in p.text and p.rows == rows for p in found), place
    for name in ("east", "west"):
        folder(tmp_path / name, first, "source,target,paid\na,b,1\n")
    told = "east/edges.csv, north/edges.csv, south/edges.csv and 1 more"
    assert told in [p.place for p in describe(tmp_path).problems]


@pytest.mark.parametrize("bad", ["north", "south"])
def test_an_unreadable_file_of_a_client_is_one_problem(tmp_path: Path, bad: str) -> None:
    for name in ("north", "south"):
        folder(tmp_path / name, "key,f,label\na,1,x\nb,2,y\n", E)
    (tmp_path / bad / "nodes.csv").write_text("key,f,label\na,1,x\nb,2\n")
    found = [(p.place, p.text) for p in describe(tmp_path).problems]
    good = "south" if bad == "north" else "north"
    assert found[1:] == [
        (
            f"{good}/nodes.csv, column 'key'",
            f"seems to be the id, because {good}/edges.csv names its values",
        ),
        ("[edges] directed", "an edge joins both ways; choose true to keep directions"),
    ]
    assert found[0][0] == f"{bad}/nodes.csv"


def test_options_answer_questions(tmp_path: Path) -> None:
    bank = ten_faults(tmp_path / "bank")
    words = {"dangling": "drop", "duplicate_nodes": "first", "self_loops": "keep"}
    words |= {"duplicate_edges": "sum", "directed": "true", "owner": "channel", "age.kind": "text"}
    before, after = describe(bank), describe(bank, None, parse_own_options(words))
    gone = {p.text.split(";")[0] for p in before.problems} - {
        p.text.split(";")[0] for p in after.problems
    }
    assert gone == {
        "edges name a node that is not there, as 'zz' does",
        "give an id again",
        "edges join a node to itself",
        "edges are given again",
        "an edge joins both ways",
        'which column names the owner? give it role = "owner"',
        "'NA' may mean that there is no value",
    }
    assert not after.looks["age"].questions
    assert after.roles["channel"] == "owner"
    assert 'self_loops = "keep"\nduplicate_edges = "sum"\ndirected = true' in after.toml()


def test_types_of_parquet(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2, 3], "ok": [True, False, None], "label": ["x", "y", "x"]})
    folder(tmp_path, edges="source,target\n1,2\n").joinpath("nodes.csv").unlink()
    pq.write_table(table, tmp_path / "nodes.parquet")
    found = describe(tmp_path)
    assert found.looks["ok"].rule.kind == "boolean"
    assert ("rows have no value; choose missing", 1) in [(p.text, p.rows) for p in found.problems]


def test_only_folders_are_described(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no folder; give one with"):
        describe(tmp_path / "none")


def look(values: list[object], rule: Rule | None = None) -> Look:
    column = Column(pa.chunked_array([pa.array(values)]), "f", Rows("nodes.csv", str))
    return look_at(column, rule or Rule())


def test_infinite_numbers_are_reported(tmp_path: Path) -> None:
    cells = ["1", "inf", "3", "-Inf", "1e39", "4", "5"]
    nodes = "\n".join(f"{i},{cell},{'xy'[i % 2]}" for i, cell in enumerate(cells))
    edges = "source,target,weight\n0,1,1\n1,2,inf\n2,3,1e39\n3,4,nan\n"
    bank = folder(tmp_path / "bank", f"id,f,label\n{nodes}\n", edges)
    found = describe(bank)
    told = [(p.place, p.text, p.rows) for p in found.problems]
    wrong = "'inf', '-Inf', '1e39' are no numbers, and become missing values"
    assert ("nodes.csv, column 'f'", wrong, 3) in told
    weight = "a weight is a finite number, zero or more"
    assert ("edges.csv, column 'weight'", weight, 3) in told
    (bank / "edges.csv").write_text("source,target,weight\n0,1,1\n")
    (bank / "schema.toml").write_text(found.toml())
    assert load_own(bank)[1].features == ("f", "f is missing")
    given = look(cells, Rule(kind="number", missing="mean"))
    assert given.questions == [("'inf', '-Inf', '1e39' do not fit kind = \"number\"", 3)]
    assert look([1.5, float("inf"), 2.5]).questions == [("'inf' do not fit kind = \"number\"", 1)]
    number = Rule(kind="number", missing="mean")
    assert not look([1.5, float("nan")], number).questions
    assert not look(["1.5", "inf"], replace(number, empty=("inf",))).questions


def test_rare_values_of_a_category_count_as_other_and_stay_out_of_the_schema(
    tmp_path: Path,
) -> None:
    towns = ["Rome"] * 6 + ["other"] * 5 + ["Oslo"] * 4 + ["Bern"]
    found = look(list(towns))
    assert found.rule == Rule(kind="category", values=("Rome", "other"), other="any other")
    told = '2 values in fewer than 5 rows, and new values, count as "any other"'
    assert found.questions == [(f"{told}; list more values to keep them", 5)]
    rows = "".join(f"n{i},{town},{'xy'[i % 2]}\n" for i, town in enumerate(towns))
    (tmp_path / "nodes.csv").write_text(f"id,town,label\n{rows}")
    (tmp_path / "edges.csv").write_text("source,target\nn0,n1\n")
    text = describe(tmp_path).toml()
    assert 'other = "any other"' in text
    assert "Oslo" not in text
    assert "Bern" not in text
    (tmp_path / "schema.toml").write_text(text)
    again = describe(tmp_path)  # the decision is kept, and not asked for again
    assert again.looks["town"].rule.other == "any other"
    assert not again.looks["town"].questions


def test_one_frequent_value_among_rare_ones_is_listed_without_them() -> None:
    found = look(["Rome"] * 90 + [f"Person {i}" for i in range(20)])
    assert found.rule == Rule(kind="category", values=("Rome",), other="other")
    assert look(["Rome"] * 9 + ["Oslo"]).questions[0][0].startswith("a value in fewer than 5 rows")


def test_bytes_that_are_no_text_are_described_as_before() -> None:
    assert look(pa.array([b"\xff\xfe"] * 12), Rule(kind="text")).rule.kind == "text"


@pytest.mark.parametrize("values", [["a", "b", "b"], ["a"] * 5 + ["b"] * 5])
def test_a_category_with_only_rare_or_only_frequent_values_stays_closed_and_the_schema_explains_it(
    tmp_path: Path, values: list[str]
) -> None:
    assert look(list(values)).rule == Rule(kind="category")
    rows = "".join(f"n{i},{value},{'xy'[i % 2]}\n" for i, value in enumerate(values))
    (tmp_path / "nodes.csv").write_text(f"id,f,label\n{rows}")
    (tmp_path / "edges.csv").write_text("source,target\nn0,n1\n")
    line = '# A new value is an error; other = "other" accepts it.'
    assert f'values = ["a", "b"]\n{line}' in describe(tmp_path).toml()


def test_a_number_that_is_nan_does_not_fit_its_kind() -> None:
    given = Rule(kind="number", missing="refuse")
    assert "'NaN' do not fit" in look(["1.5", "NaN", "2.5"], given).questions[0][0]
    assert not look(["1.5", "NaN", "2.5"], replace(given, empty=("NaN",), missing="mean")).questions
