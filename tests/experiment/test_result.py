"""A result: metrics, tables, and the same numbers read back from its files."""

from __future__ import annotations

import csv
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import atoll
from atoll.core.errors import ConfigError
from atoll.core.task import ROLES
from atoll.engines.ledger import Ledger
from atoll.experiment import result as tables
from atoll.experiment.config import make_config
from atoll.experiment.history import BEST_CACHED, History
from atoll.experiment.metrics import METRICS
from atoll.experiment.problem import frequent_positive
from atoll.experiment.result import Result, SeedResult, read_history, read_table
from atoll.present.terminal import plain_text, result_table

NAN = float("nan")


def history(
    val: list[list[float]], test: list[list[float]], local: list[list[float]] | None = None
) -> History:
    """Accuracies by round and client, with 10 test nodes at client 0 and 30 at client 1."""
    rounds, clients = np.array(val).shape

    def scores(val_: list[list[float]], test_: list[list[float]]) -> list[np.ndarray]:
        table = np.full((rounds, clients, len(ROLES), len(METRICS)), NAN)
        table[:, :, ROLES.index("val"), METRICS.index("accuracy")] = val_
        table[:, :, ROLES.index("test"), METRICS.index("accuracy")] = test_
        return list(table)

    return History(
        counts=np.array([[5, 20, 10], [5, 20, 30]])[:clients],
        nodes=np.array([100, 300])[:clients],
        scores={"deployed": scores(val, test), "local": scores(val, local or test)},
        seconds=[0.5, 0.1, 0.3][:rounds],
    )


def result(*histories: History, **options: object) -> Result:
    fields = {"weights": "tests", "select": "best-val", "deployed": "global", **options}
    config = make_config(evaluate=fields.pop("evaluate", "deployed"), rounds=3, clients=2)
    ledger = Ledger()
    ledger.add(0, "train", [0, 1], down=7, up=11)
    ledger.add(0, "score", [0, 1], down=1000, up=1000)
    both = [replace(history, ledger=ledger) for history in histories]
    seeds = tuple(SeedResult(number, history) for number, history in enumerate(both))
    return Result(config=config, seeds=seeds, engine="fused", device="cpu", **fields)


VAL = [[0.5, 0.5], [0.75, 0.75], [1.0, 0.5]]
TEST = [[0.0, 0.1], [0.2, 0.6], [0.9, 0.8]]


def test_a_run_without_validation_nodes_is_warned_of():
    ratios = {"ratios": "0.5/0/0.5"}
    result = atoll.run("fedavg", "lagoon:nodes=100", clients=2, rounds=2, epochs=1, **ratios)
    (warning, *_) = result.warnings()
    assert warning.startswith("no validation score exists, so the result is that of the last round")


def test_a_model_that_learnt_nothing_is_warned_of():
    options = {"data": "lagoon:nodes=150", "clients": 2, "rounds": 5, "set": {"hidden": 8}}
    learnt = atoll.run("fedavg", epochs=5, **options)
    assert learnt.warnings() == []
    assert "warnings" not in learnt.summary()
    blown = atoll.run("fedavg", **{**options, "set": {"hidden": 8, "lr": 1e-12}})
    said = " ".join(blown.warnings())
    assert "no better than always predicting the most frequent class, which is right for" in said
    assert "the best round is the first, so that training did not help" in said
    assert blown.summary()["warnings"] == blown.warnings()
    assert "fedavg: the best round is the first" in plain_text(result_table([blown]))


def test_the_positive_class_of_a_metric_is_named(tmp_path):
    lines = [f"{i},{'north' if i % 2 else 'south'},{i % 5},{'ok' if i % 5 else 'fraud'}"
             for i in range(80)]  # fmt: skip
    edges = [f"{i},{(i + 4) % 80}" for i in range(80)]
    (tmp_path / "nodes.csv").write_text("\n".join(["id,branch,amount,label", *lines]))
    (tmp_path / "edges.csv").write_text("\n".join(["source,target", *edges]))
    how = {"data": str(tmp_path), "partition": "column:branch", "rounds": 2, "metric": "recall"}
    result = atoll.run("fedavg", **how)
    assert "positive class: ok." in " ".join(plain_text(result_table([result])).split())
    assert result.summary()["positive_class"] == result.positive_class() == "ok"
    assert result.positive_class("accuracy") == result.positive_class("brier") == ""
    other = atoll.run("fedavg", positive="fraud", **how)
    assert other.positive_class() == "fraud"
    plain = atoll.run("fedavg", **{**how, "metric": "auc"})
    assert plain.positive_class() == ""
    assert "positive class" not in plain_text(result_table([plain]))
    study = atoll.compare(["local", "fedavg"], **how)
    assert "Positive class: ok." in str(study)
    config = result.config
    federation = atoll.partition(atoll.load(str(tmp_path)), "random", clients=2)
    (note,) = frequent_positive(config, federation, "recall", 1)
    assert note == "positive class is 'ok', the frequent one; choose another with --positive"
    assert frequent_positive(config, federation, "accuracy", 1) == []
    assert frequent_positive(config, federation, "recall", 0) == []
    assert frequent_positive(other.config, federation, "recall", 1) == []


def test_the_earliest_best_round_is_picked_and_clients_weigh_by_their_test_nodes() -> None:
    metrics = result(history(VAL, TEST)).metrics()
    assert metrics["best_round"]["mean"] == 1.0  # equal to round 2, but earlier
    assert metrics["test_accuracy"]["mean"] == pytest.approx((10 * 0.2 + 30 * 0.6) / 40)
    assert metrics["val_accuracy"]["mean"] == pytest.approx(0.75)
    assert metrics["test_accuracy_by_nodes"]["mean"] == pytest.approx((100 * 0.2 + 300 * 0.6) / 400)
    assert metrics["test_accuracy_by_uniform"]["mean"] == pytest.approx(0.4)
    assert metrics["last_test_accuracy"]["mean"] == pytest.approx((10 * 0.9 + 30 * 0.8) / 40)


def test_the_last_round_and_each_clients_own_best() -> None:
    last = result(history(VAL, TEST), select="last", weights="uniform").metrics()
    assert last["test_accuracy"]["mean"] == pytest.approx(0.85)
    own = result(history(VAL, TEST), select="best-val-per-client", weights="uniform").metrics()
    assert own["test_accuracy"]["mean"] == pytest.approx((0.9 + 0.6) / 2)


def test_the_best_test_score_of_the_models_put_aside() -> None:
    both = history(VAL, [[0.3, 0.9], [0.8, 0.7], [0.5, 0.2]])
    leaky = {"select": BEST_CACHED, "weights": "uniform"}
    # Nothing put aside: the last model.
    assert result(both, **leaky).metrics()["test_accuracy"]["mean"] == pytest.approx(0.35)
    both.cached = [[0], [0, 1]]
    metrics = result(both, **leaky).metrics()
    # Client 0 was best in round 1, but had put aside only round 0.
    assert metrics["test_accuracy"]["mean"] == pytest.approx((0.5 + 0.9) / 2)
    assert metrics["last_test_accuracy"]["mean"] == pytest.approx(0.35)
    assert metrics["val_accuracy"]["mean"] == pytest.approx((VAL[2][0] + VAL[0][1]) / 2)
    both.cached = [[], [1]]
    assert result(both, **leaky).metrics()["test_accuracy"]["mean"] == pytest.approx(0.6)


def test_clients_without_test_nodes_are_left_out() -> None:
    metrics = result(history(VAL, [[0.1, NAN], [0.3, NAN], [0.2, NAN]])).metrics()
    assert metrics["test_accuracy"]["mean"] == pytest.approx(0.3)
    assert metrics["test_accuracy_by_uniform"]["mean"] == pytest.approx(0.3)


def test_numbers_that_nobody_has_are_left_out() -> None:
    metrics = result(history([[NAN, NAN]], [[0.5, 0.5]])).metrics()
    assert "val_accuracy" not in metrics
    assert "test_auc" not in metrics
    assert metrics["test_accuracy"]["mean"] == 0.5  # without validation nodes, the last round


def test_spread_over_seeds_is_the_sample_standard_deviation() -> None:
    one, two = history([[0.5, 0.5]], [[0.2, 0.2]]), history([[0.5, 0.5]], [[0.6, 0.6]])
    found = result(one, two).metrics()["test_accuracy"]
    assert found["per_seed"] == pytest.approx([0.2, 0.6])
    assert found["mean"] == pytest.approx(0.4)
    assert found["std"] == pytest.approx(np.std([0.2, 0.6], ddof=1))
    alone = result(one)
    assert alone.metrics()["test_accuracy"]["std"] is None
    assert "test accuracy 0.2000 (global" in repr(alone)
    assert "± 0.2828" in repr(result(one, two))


def test_scored_names_the_model_and_both_are_kept() -> None:
    local = [[0.9, 0.9], [0.7, 0.7], [0.8, 0.8]]
    deployed = result(history(VAL, TEST, local))
    assert deployed.scored == "global"
    assert deployed.metrics()["local_test_accuracy"]["mean"] == pytest.approx(0.7)
    scored = result(history(VAL, TEST, local), evaluate="local")
    assert scored.scored == "local"
    assert scored.metrics()["test_accuracy"]["mean"] == pytest.approx(0.7)
    assert scored.metrics()["global_test_accuracy"] == deployed.metrics()["test_accuracy"]
    assert result(history(VAL, TEST), deployed="personalised").scored == "personalised"


def test_the_data_sets_own_metric_picks_the_round() -> None:
    both = history(VAL, TEST)
    for number, auc in enumerate((0.9, 0.1, 0.2)):
        both.scores["deployed"][number][:, ROLES.index("val"), METRICS.index("auc")] = auc
    assert result(both, metric="auc").metrics()["best_round"]["mean"] == 0.0
    assert result(both, metric="accuracy").metrics()["best_round"]["mean"] == 1.0
    # Where no client can have one, accuracy decides.
    assert result(history(VAL, TEST), metric="auc").metrics()["best_round"]["mean"] == 1.0


def test_traffic_is_training_alone_and_times_are_medians() -> None:
    found = result(history(VAL, TEST), setup_seconds=1.25)
    assert found.bytes() == {"up": 22, "down": 14}
    assert found.seconds() == {"setup": 1.25, "train": 0.9, "per_round": 0.3}


def test_the_summary_has_the_documented_keys() -> None:
    summary = result(history(VAL, TEST)).summary()
    documented = (
        "method data clients partition protocol engine device rounds seeds scored metrics seconds "
        "bytes out"
    )
    assert set(documented.split()) <= set(summary)
    assert set(summary["metrics"]["test_accuracy"]) == {"mean", "std", "per_seed"}
    assert set(summary["seconds"]) == {"setup", "train", "per_round"}
    assert set(summary["bytes"]) == {"up", "down"}
    assert summary["clients"] == 2
    json.dumps(summary, allow_nan=False)


def test_saving_writes_whole_files_and_nothing_else(tmp_path: Path) -> None:
    found = result(history(VAL, [[0.1, NAN], [0.3, NAN], [0.2, NAN]]))
    found.save(str(tmp_path / "new"))
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["config.toml", "ledger.csv", "metrics.csv", "result.json"]
    saved = json.loads((tmp_path / "new" / "result.json").read_text())
    assert saved["metrics"] == found.metrics()
    assert saved["out"] == str(tmp_path / "new")
    assert saved["ledger"]["0"]["train"] == {"messages": 2, "down": 14, "up": 22}
    assert tomllib.loads((tmp_path / "new" / "config.toml").read_text())["rounds"] == 3
    rows = list(csv.DictReader((tmp_path / "new" / "metrics.csv").read_text().splitlines()))
    assert len(rows) == 3 * 2 * 2
    cell = {(r["round"], r["client"], r["scored"]): r["test_accuracy"] for r in rows}
    assert cell["1", "0", "global"] == "0.3"
    assert cell["1", "1", "global"] == ""
    ledger = list(csv.reader((tmp_path / "new" / "ledger.csv").read_text().splitlines()))
    assert ledger[0] == ["seed", "round", "step", "client", "bytes_down", "bytes_up"]
    assert ledger[1] == ["0", "0", "train", "0", "7", "11"]
    found.save(tmp_path / "small", tables=False)
    assert {file.name for file in (tmp_path / "small").iterdir()} == {"config.toml", "result.json"}


def test_named_clients_are_named_in_the_table_and_in_the_result(tmp_path: Path) -> None:
    about = {"client_names": ["north", "south, inc"], "class_names": ["late", "paid"]}
    made = result(history(VAL, TEST), federation=about)
    assert made.client_names == ("north", "south, inc")
    assert made.class_names == ("late", "paid")
    made.save(tmp_path)
    table = read_table(tmp_path, "metrics")
    assert table["name"].tolist() == ["north", "south, inc"] * 6
    assert read_history(table, read_table(tmp_path, "ledger"), 0, {}).nodes.shape == (2,)
    plain = result(history(VAL, TEST), federation={"sites": ["one"]})  # not of these clients
    assert plain.client_names == ("0", "1")
    result(history(VAL, TEST)).save(tmp_path)
    assert "name" not in read_table(tmp_path, "metrics")


def test_a_metric_that_an_older_run_lacks_is_missing_and_the_others_are_read(tmp_path):
    folder = tmp_path / "run"
    result = atoll.run("fedavg", "lagoon:nodes=60", clients=2, rounds=2, out=folder)
    columns = read_table(folder, "metrics")
    older = {name: values for name, values in columns.items() if "macro_f1" not in name}
    history = read_history(older, tables.ledger_table({}), 0, {})
    whole = read_history(columns, tables.ledger_table({}), 0, {})
    assert np.isnan(history.array("deployed", "macro_f1", "test")).all()
    for metric in ("accuracy", "loss"):
        found = history.array("deployed", metric, "test")
        assert np.array_equal(found, whole.array("deployed", metric, "test"))
    assert result.metrics()["test_macro_f1"]["mean"] > 0


def test_long_tables_become_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    options = {"clients": 3, "rounds": 2, "seeds": 2}
    atoll.run("fedavg", "lagoon:nodes=150", out=tmp_path / "text", **options)
    monkeypatch.setattr(tables, "MAX_CSV_ROWS", 20)
    atoll.run("fedavg", "lagoon:nodes=150", out=tmp_path / "long", **options)
    for name in ("metrics", "ledger"):
        assert not (tmp_path / "long" / f"{name}.csv").exists()
        with (tmp_path / "text" / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        table = pq.read_table(tmp_path / "long" / f"{name}.parquet")
        assert table.column_names == list(rows[0])
        for column in table.column_names:
            values = table[column].to_pylist()
            for given, row in zip(values, rows, strict=True):
                if isinstance(given, float):
                    assert given == pytest.approx(float(row[column]), rel=1e-5)
                else:
                    assert ("" if given is None else str(given)) == row[column]


def test_unknown_names_of_scores_are_one_sentence_with_the_names():
    result = atoll.run("fedavg", "lagoon:nodes=90", clients=2, rounds=1)
    with pytest.raises(ConfigError, match="unknown metric 'f3'; choose one of: accuracy"):
        result.of_clients("f3")
    for ask in (result.of_clients, result.curve):
        with pytest.raises(ConfigError, match="role 'testing'; choose one of: train, val, test"):
            ask("accuracy", "testing")
    with pytest.raises(ConfigError, match="model 'lokal'; choose one of: deployed, local"):
        result.curve(scored="lokal")
