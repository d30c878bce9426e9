"""Roles of columns and options of a user's own graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import AtollError, ConfigError
from atoll.data.own.reader import load_own
from atoll.data.own.schema import OwnOptions

from .graphs import E, G, Tables, check_refused, folder, pairs

REFUSED: dict[str, Tables] = {
    # nodes.csv, edges.csv, schema.toml, the sentence
    "no id": ("key,f,label\na,1,x\n", E, "", "nodes.csv has no id column: its columns are 'key'"),
    "no label": ("id,f\na,1\nb,2\n", E, "", "nodes.csv has no label column"),
    "no source": (G, "a,b\na,b\n", "", "edges.csv has no source column"),
    "no target": (G, "source,b\na,b\n", "", "edges.csv has no target column"),
    "two labels": (
        "id,f,label,y\na,1,x,1\n",
        E,
        "",
        "'label' and 'y', and either could be the label",
    ),
    "schema key": (G, E, "[nodes]\nlable = 'label'", "[nodes] key 'lable'; did you mean 'label'?"),
    "schema section": (
        G,
        E,
        "[node]\nid = 'id'",
        "section of schema.toml 'node'; did you mean 'nodes'",
    ),
    "schema value": (
        G,
        E,
        "[nodes]\nfeatures = 'f'",
        "features is 'f'; it must be a list of texts",
    ),
    "schema column": (G, E, "[nodes]\nlabel = 'lobel'", "does not have; did you mean 'label'?"),
    "schema feature": (G, E, "[nodes]\nfeatures = ['q']", "its columns are 'id', 'f', 'label'"),
    "schema twice": (G, E, "[nodes]\nlabel = 'f'\nfeatures = ['f']", "as label and as features"),
    "schema target": (
        G,
        E,
        "target = 'f'\n[nodes]\nlabel = 'label'",
        "schema.toml gives target = 'f' and [nodes] label = 'label', but both name the column to "
        "predict; remove one of them",
    ),
    "schema target column": (G, E, "target = 'lobel'", "does not have; did you mean 'label'?"),
    "schema target kind": (
        G,
        E,
        "target = ['label']",
        "schema.toml target is ['label']; it must be",
    ),
    "schema task": (
        G,
        E,
        "task = 'nodes'",
        "unknown task in schema.toml 'nodes'; did you mean 'node'?",
    ),
    "schema task of graphs": (
        G,
        E,
        "task = 'graph'",
        "schema.toml gives task = 'graph', but nodes and edges are tables of one graph",
    ),
    "schema top key": (
        G,
        E,
        "targt = 'f'",
        "section of schema.toml 'targt'; did you mean 'target'?",
    ),
    "schema key of an option": (
        G,
        E,
        "[edges]\ndangling = 'drop'",
        "[edges] key 'dangling'; give --own dangling=drop instead",
    ),
    "schema top key of an option": (
        G,
        E,
        "duplicate_nodes = 'first'",
        "'duplicate_nodes'; give --own duplicate_nodes=first instead",
    ),
    "schema syntax": (G, E, "[nodes\n", "schema.toml' is not readable as TOML"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(tmp_path: Path, kind: str) -> None:
    check_refused(tmp_path, *REFUSED[kind])


def test_a_schema_gives_roles(tmp_path: Path) -> None:
    nodes = (
        "key,note,size,zone,team,bank,why\na,u1,1,10,r,B1,q\nb,u2,2,20,s,B2,q\nc,u3,3,10,r,B1,q\n"
    )
    edges = "p,q,n,when\na,b,2,x\nb,c,1,y\n"
    schema = """
    [nodes]
    id = "key"
    label = "team"
    owner = "bank"
    features = ["size"]
    categories = ["zone"]
    ignore = ["note"]
    [edges]
    source = "p"
    target = "q"
    weight = "n"
    directed = true
    """
    source, report = load_own(folder(tmp_path, nodes, edges, schema))
    assert report.features == ("size", "zone=10", "zone=20")
    assert set(source.columns) == {"id", "bank"}
    assert pairs(source) == [(0, 1), (1, 2)]
    assert source.weight is not None
    assert source.weight.tolist() == [2, 1]
    assert "nodes.csv: ignored 'note', 'why'" in report.messages
    assert "edges.csv: ignored 'when'" in report.messages


@pytest.mark.parametrize("nodes", ["", "[nodes]\nid = 'key'\nlabel = 'team'\n"])
def test_a_role_wins_over_the_kind_text(tmp_path: Path, nodes: str) -> None:
    rules = [("key", "id"), ("team", "label"), ("note", "feature")]
    given = [f"{name} = {{kind = 'text', role = '{role}'}}\n" for name, role in rules]
    if nodes:
        given = [f"{name}.kind = 'text'\n" for name, _ in rules]
    schema = f"{nodes}[columns]\n{''.join(given)}"
    table = "key,f,team,note\na,1,x,u\nb,2,y,v\n"
    source, report = load_own(folder(tmp_path, table, E, schema))
    assert source.columns["id"].tolist() == ["a", "b"]
    assert (report.classes, report.features) == (("x", "y"), ("f",))


def test_a_schema_elsewhere_wins_over_the_folder_s_own(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", schema='[nodes]\nignore = ["age"]\n')
    other = tmp_path / "other.toml"
    other.write_text('[nodes]\nignore = ["kind"]\n')
    assert load_own(data)[1].features == ("kind=home", "kind=shop")
    assert load_own(data, schema=other)[1].features == ("age",)


def test_an_owner_option_keeps_a_column_out_of_the_features(tmp_path: Path) -> None:
    source, report = load_own(folder(tmp_path), options=OwnOptions(owner="kind"))
    assert report.features == ("age",)
    assert source.columns["kind"].tolist() == ["shop", "home", "shop", "home"]


@pytest.mark.parametrize(
    "schema",
    ["target = 'f'", "[nodes]\nlabel = 'f'", "task = 'node'\ntarget = 'f'\n[nodes]\nlabel = 'f'"],
)
def test_target_and_label_name_the_column_to_predict(schema: str, tmp_path: Path) -> None:
    tmp_path.joinpath("nodes.csv").write_text("id,f,label\na,1,x\nb,2,y\nc,1,x\n")
    tmp_path.joinpath("edges.csv").write_text("source,target\na,b\n")
    tmp_path.joinpath("schema.toml").write_text(schema)
    source, report = load_own(tmp_path)
    assert source.y.tolist() == [0, 1, 0]
    assert (report.classes, report.features) == (("1", "2"), ("label=x", "label=y"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (OwnOptions(self_loops="error"), "the graph has 1 self-loop, which self_loops = error"),
        (
            OwnOptions(duplicate_edges="error"),
            "the graph has 1 duplicate edge, which duplicate_edges",
        ),
        (OwnOptions(max_categories=2), "holds 3 different texts; at most 2 can become categories"),
        (
            OwnOptions(max_categories=1),
            "holds 2 different labels for 3 nodes; at most 1 are allowed",
        ),
        (
            OwnOptions(owner="bnak"),
            "option owner names column 'bnak', which nodes.csv does not have",
        ),
    ],
)
def test_refused_by_option(tmp_path: Path, options: OwnOptions, sentence: str) -> None:
    with pytest.raises(AtollError) as caught:
        load_own(
            folder(
                tmp_path,
                G.replace(",1,", ",u,").replace(",2,", ",v,").replace(",3,", ",w,"),
                "source,target\na,a\na,b\na,b\n",
            ),
            options=options,
        )
    assert sentence in str(caught.value)


def test_unknown_choices_of_an_option() -> None:
    with pytest.raises(
        ConfigError, match="unknown choice for dangling 'dorp'; did you mean 'drop'"
    ):
        OwnOptions(dangling="dorp")
    with pytest.raises(ConfigError, match="max_categories is 0"):
        OwnOptions(max_categories=0)
