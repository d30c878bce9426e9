"""The loaders of tables with graphs: their columns, labels and edges, and the columns that leak."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from atoll.core.errors import ConfigError, DataError
from atoll.data.divide import federate
from atoll.data.load import load
from atoll.data.public.registry import DATASETS
from atoll.data.public.tables import COUNTRIES, similar
from atoll.data.source import Source


def write(root: Path, name: str, files: dict[str, str]) -> Path:
    for file, text in files.items():
        path = root / DATASETS[name].home / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def one(name: str, root: Path) -> Source:
    source, notes = load(name, root=root)
    assert isinstance(source, Source)
    assert notes == []
    return source


@pytest.fixture
def accounts(tmp_path: Path) -> Path:
    nodes = "nodeid,isFraud,init_balance,fraudStep\n2,0,30,-1\n0,1,10,7\n1,0,20,-1\n3,0,60,-1\n"
    moves = "sourceNodeId,targetNodeId,value,time\n0,1,5.0,4\n2,1,15,2\n1,0,10,9\n"
    return write(tmp_path, "amlsim-20k", {"raw/nodes.csv": nodes, "raw/transactions.csv": moves})


def test_accounts_keep_the_times_and_amounts_of_their_transfers(accounts: Path) -> None:
    source = one("AMLSim-20k", accounts)
    assert source.y.tolist() == [1, 0, 0, 0]  # rows are put in the order of the account numbers
    assert source.edges.tolist() == [[0, 2, 1], [1, 1, 0]]
    assert source.edge_time.tolist() == [4, 2, 9]
    assert source.weight.tolist() == [0.5, 1.5, 1.0]
    assert source.columns["first"].tolist() == [4, 2, 2, 0]  # account 3 has no transfer
    assert source.x.argsort(axis=0).ravel().tolist() == [0, 1, 2, 3]
    assert source.x.mean() == pytest.approx(0, abs=1e-6)
    assert source.x.std() == pytest.approx(1)
    # Of the two transfers between 0 and 1 the earlier one counts, and an induced part keeps them.
    both = source.undirected_simple()
    assert both.edges.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert both.edge_time.tolist() == [4, 4, 2, 2]


def test_sums_of_transfers_are_features_without_a_column_for_time_splits(accounts: Path) -> None:
    source = one("amlsim-20k:features=transfers", accounts)
    assert source.x.shape == (4, 5)
    assert source.x[:, 3].argmax() == 1  # the count of incoming transfers
    assert dict(source.columns) == {}


def test_leaking_columns_are_left_out_unless_wanted(accounts: Path) -> None:
    assert one("amlsim-20k", accounts).x.shape[1] == 1
    leaking = one("amlsim-20k:leaking=true", accounts)
    assert leaking.x[:, 1].argmax() == 0
    with pytest.raises(ConfigError, match=r"leaking must be true or false, but is 1"):
        load("amlsim-20k:leaking=1", root=accounts)
    with pytest.raises(ConfigError, match="unknown value of features 'all'"):
        load("amlsim-20k:features=all", root=accounts)
    with pytest.raises(ConfigError, match=r"unknown option of data set 'amlsim-20k' 'leak'; did"):
        load("amlsim-20k:leak=true", root=accounts)


def test_loans_name_their_classes_and_purposes(tmp_path: Path) -> None:
    table = "GoodCustomer,Gender,Age,PurposeOfLoan,Same\n1,Male,30,NewCar,0\n-1,Female,50,Other,0\n"
    files = {"raw/german.csv": table, "raw/german_edges.txt": "0 1\n1 0\n"}
    source = one("german", write(tmp_path, "german", files))
    assert source.y.tolist() == [0, 1]
    assert source.class_names == ("good", "bad")
    assert source.x.tolist() == [[1, -1, 0, 1, -1], [-1, 1, 0, -1, 1]]
    assert source.edges.tolist() == [[0, 1], [1, 0]]
    assert source.columns["purpose"].tolist() == ["NewCar", "Other"]
    with pytest.raises(ConfigError, match="unknown option of data set 'german' 'leaking'"):
        load("german:leaking=true", root=tmp_path)


def test_edges_of_bail_are_built_without_time(tmp_path: Path) -> None:
    # By AGE, rows 0 and 1 are near; with TIME, rows 0 and 2 are.
    table = "AGE,RECID,TIME\n1,1,90\n2,0,0\n58,1,90\n60,0,0\n"
    files = {"raw/bail.csv": table, "raw/bail_edges.txt": "0 2\n"}
    root = write(tmp_path, "bail", files)
    source, leaking = one("bail", root), one("bail:leaking=true", root)
    assert source.x.shape[1] == 1
    assert (source.edges == [[0], [1]]).all(axis=0).any()
    assert not (source.edges == [[0], [2]]).all(axis=0).any()
    assert leaking.x.shape[1] == 2
    assert leaking.edges.tolist() == [[0, 2], [2, 0]]


def test_similar_rows_are_joined_by_the_rule_of_nifty() -> None:
    rows = np.random.default_rng(0).integers(0, 30, size=(60, 3)).astype(float)
    near = 1 / (1 + np.sqrt(((rows[:, None] - rows) ** 2).sum(-1)))
    np.fill_diagonal(near, 0)
    joined = near > 0.7 * near.max(axis=1, keepdims=True)
    wanted = np.argwhere(joined | joined.T).T
    assert similar(rows, 0.7).tolist() == wanted.tolist()


def test_each_country_of_twitch_is_a_client(tmp_path: Path) -> None:
    files = {}
    for number, country in enumerate(COUNTRIES):
        target = "id,days,mature,views,partner,new_id\n9,5,True,1,False,1\n8,5,False,1,False,0\n"
        # The second country has a user twice.
        files[f"{country}/raw/{country}_target.csv"] = target + "9,5,True,1,False,1\n" * (
            number == 1
        )
        files[f"{country}/raw/{country}_edges.csv"] = "from,to\n0,1\n"
        files[f"{country}/raw/{country}.json"] = json.dumps({"1": [number, 3169, 3169], "0": []})
    source = one("twitch", write(tmp_path, "twitch", files))
    assert source.y.tolist() == [0, 1] * 6
    assert source.x.shape == (12, 3170)
    assert source.x.indices.tolist() == [n for number in range(6) for n in (number, 3169)]
    assert source.x.data.tolist() == [1.0] * 12
    assert source.edges[:, :4].tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]
    federation = federate(
        source, partition="column:client", ratios=(0.5, 0.5, 0), allow=["single-class"]
    )
    assert federation.about["client_names"] == list(COUNTRIES)


def test_damaged_tables_are_one_sentence(tmp_path: Path) -> None:
    files = {"raw/bail.csv": "AGE,TIME\n1,2\n", "raw/bail_edges.txt": "0 0\n"}
    with pytest.raises(DataError, match=r"'bail' in .* cannot be read \(KeyError: 'RECID'\)"):
        load("bail", root=write(tmp_path, "bail", files))


@pytest.mark.data
def test_no_feature_of_bail_or_amlsim_gives_the_label_away(
    real_data: Callable[[str], Path],
) -> None:
    def best(name: str, root: Path) -> float:
        source = one(name, root)
        areas = [roc_auc_score(source.y, source.x[:, i]) for i in range(source.num_features)]
        return max(max(area, 1 - area) for area in areas)

    root = real_data("bail")
    assert best("bail", root) < 0.6
    assert best("bail:leaking=true", root) > 0.99
    root = real_data("amlsim-20k")
    assert best("amlsim-20k", root) < 0.6
    assert best("amlsim-20k:features=transfers", root) < 0.8
    assert best("amlsim-20k:leaking=true", root) > 0.7
