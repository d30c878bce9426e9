"""Comparisons: the same clients and seeds for all, grids decided by validation, tables, tests."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import atoll
from atoll.core.errors import ConfigError
from atoll.experiment.config import make_config
from atoll.methods import FedAvg, FedProx
from atoll.nn import GCN
from atoll.present.tables import tex
from atoll.present.terminal import noted_table
from atoll.studies.compare.comparison import Comparison, command, make_comparison, read_request
from atoll.studies.compare.plan import make_request, make_runs, parse_arm, split_names
from atoll.studies.compare.printed import p_text
from atoll.studies.study_run import RunOutcome, StudyRun

SMALL: dict[str, Any] = {"data": "lagoon:nodes=150", "clients": 3, "rounds": 2, "seeds": 2}
RNG = np.random.default_rng(3)


def outcome(
    tmp_path: Path, method: str, test: list[float] | None, *, data: str = "one", clients: int = 5,
    validation: float = 0.5, point: dict[str, Any] | None = None, partition: bytes = b"p",
) -> RunOutcome:  # fmt: skip
    """A cell as `run_study` gives it, with these scores; None has failed."""
    labels = {"data": data, "clients": clients, "method": method, "point": point or {}}
    name = f"{data}-{clients}-{method}-{point}"
    cell = StudyRun(name, make_config(method="fedavg", seeds=len(test or [0, 0])), labels)
    if test is None:
        return RunOutcome(cell, tmp_path / name, error="client 1, step train, round 0: loss is nan")
    for seed in range(len(test)):
        (tmp_path / name / f"seed-{seed}").mkdir(parents=True)
        (tmp_path / name / f"seed-{seed}" / "partition.npz").write_bytes(partition)
    summary = {
        "clients": clients, "partition": "louvain", "split": "stratified", "protocol": "strict",
        "rounds": 10, "seeds": len(test), "scored": "global", "metric": "accuracy",
        "metrics": {
            "test_accuracy": {"per_seed": test},
            "val_accuracy": {"mean": validation, "per_seed": [validation] * len(test)},
        },
        "bytes": {"up": 10**7, "down": 10**7}, "seconds": {"per_round": 0.25, "train": 5.0},
        "ledger": {str(seed): {"train": {"up": 5, "down": 5}, "score": {"up": 9, "down": 9}}
                   for seed in range(len(test))},
    }  # fmt: skip
    return RunOutcome(cell, tmp_path / name, summary)


def compared(outcomes: list[RunOutcome], against: str | None = None) -> Comparison:
    methods = list(dict.fromkeys(o.run.labels["method"] for o in outcomes))
    return make_comparison(outcomes, make_request(methods, against=against), None)


def noisy(mean: float, seeds: int = 10, spread: float = 0.01) -> list[float]:
    return (mean + spread * RNG.normal(size=seeds)).tolist()


def test_all_methods_get_the_clients_and_seeds_of_plain_runs(tmp_path: Path) -> None:
    found = atoll.compare(["fedavg", "fedprox:mu=0.1"], out=tmp_path, **SMALL)
    assert found.folder == tmp_path
    for name, settings in (("fedavg", {}), ("fedprox", {"mu": 0.1})):
        alone = atoll.run(name, set=settings, **SMALL).metrics()["test_accuracy"]
        row = next(row for row in found.tables[0].rows if row.method.startswith(name))
        assert row.scores.tolist() == alone["per_seed"]
        assert (row.mean, row.std) == pytest.approx((alone["mean"], alone["std"]))
    cells = sorted((tmp_path / "cells").iterdir())
    for seed in range(2):
        first, second = (cell / f"seed-{seed}" / "partition.npz" for cell in cells)
        assert first.read_bytes() == second.read_bytes()
    assert json.loads((tmp_path / "compare.json").read_text()) == found.summary()
    again = atoll.compare(["fedavg", "fedprox:mu=0.1"], out=tmp_path, **SMALL)
    assert again.table() == found.table()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["begin", "end"] * 2


def test_nothing_is_left_behind_without_a_folder(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = atoll.compare(["local", "fedavg"], **{**SMALL, "seeds": 1})
    assert found.folder is None
    assert list(tmp_path.iterdir()) == []
    assert found.tests()[0]["by"] == "nothing"
    assert "One seed cannot tell a difference from noise" in repr(found)


def test_objects_may_be_compared_too(tmp_path: Path) -> None:
    federation = atoll.partition(atoll.load("lagoon:nodes=150"), "louvain", clients=2)
    net = GCN(federation.features, federation.classes, hidden=8)
    methods = {"weak": FedProx(net=net, mu=0.01), "strong": FedProx(net=net, mu=1.0), "avg":
               FedAvg(net=net)}  # fmt: skip
    found = atoll.compare(methods, federation, rounds=2, seeds=2, out=tmp_path, against="avg")
    assert [row.method for row in found.tables[0].rows] == ["weak", "strong", "avg"]
    alone = atoll.run(methods["strong"], federation, rounds=2, seeds=2).metrics()["test_accuracy"]
    assert found.tables[0].rows[1].scores.tolist() == alone["per_seed"]
    assert [test["against"] for test in found.tests()] == ["avg", "avg"]
    saved = json.loads((tmp_path / "study.json").read_text())["command"]
    assert saved.startswith("# started in Python with objects (weak, strong, avg, lagoon)")
    assert saved.endswith(f"the same call of atoll.compare and out='{tmp_path}'")
    with pytest.raises(ConfigError, match=r"objects \(weak, strong, avg, lagoon\)"):
        read_request(tmp_path)
    with pytest.raises(ConfigError, match="is divided already; leave clients out"):
        atoll.compare(methods, federation, clients=3, rounds=2)
    with pytest.raises(ConfigError, match="'avg' is a method object with its own hyper-parameters"):
        atoll.compare({"avg": methods["avg"]}, federation, rounds=2, set={"hidden": 4})


def test_validation_decides_a_grid_and_test_scores_of_others_stay_unread(tmp_path: Path) -> None:
    found = compared([
        outcome(tmp_path, "a", [0.70, 0.72], point={"mu": 0.1}, validation=0.80),
        outcome(tmp_path, "a", [0.90, 0.92], point={"mu": 1.0}, validation=0.79),
        outcome(tmp_path, "b", [0.60, 0.62]),
    ])  # fmt: skip
    row = found.tables[0].rows[0]
    assert (dict(row.point), row.points, row.mean) == ({"mu": 0.1}, 2, pytest.approx(0.71))
    text = repr(found)
    assert "a: mu=0.1, chosen from 2 points by validation scores; test scores are" in text
    found.to_csv(tmp_path / "c.csv")
    for page in (text, found.markdown(), found.latex(), (tmp_path / "c.csv").read_text(),
                 json.dumps(found.summary())):  # fmt: skip
        assert not re.search(r"0\.9[0-2]?\b|9[0-2]\.\d", page)
    rows = list(csv.DictReader((tmp_path / "c.csv").read_text().splitlines()))
    assert [(row["chosen"], row["test"]) for row in rows] == [
        ("1", "0.7"), ("1", "0.72"), ("0", ""), ("0", ""), ("1", "0.6"), ("1", "0.62"),
    ]  # fmt: skip
    assert {row["bytes_per_round"] for row in rows} == {"1.0"}  # scoring is not traffic
    assert "Hyper-parameters were chosen by validation scores" in found.latex()


def test_a_failed_point_leaves_the_others_and_is_told(tmp_path: Path) -> None:
    found = compared([
        outcome(tmp_path, "a", [0.7, 0.7], point={"mu": 1}),
        outcome(tmp_path, "a", None, point={"mu": 9}), outcome(tmp_path, "b", [0.6, 0.6]),
    ])  # fmt: skip
    assert found.tables[0].rows[0].finished
    assert "1 of 2 points failed: client 1, step train, round 0: loss is nan" in " ".join(
        repr(found).split()
    )
    assert list(found.failed) == ["one-5-a-{'mu': 9}"]


def test_ranks_gaps_and_marks(tmp_path: Path) -> None:
    base = noisy(0.8)
    found = compared([
        outcome(tmp_path, "best", base),
        outcome(tmp_path, "near", [v - 0.0005 + 0.01 * RNG.normal() for v in base]),
        outcome(tmp_path, "far", [v - 0.1 for v in base]),
    ])  # fmt: skip
    table = found.tables[0]
    assert table.reference == table.best[0]
    far = table.test_of("far")
    assert far is not None
    assert far.different
    assert far.wilcoxon == pytest.approx(2 * 2**-9)
    assert table.rows[2].rank == 3
    assert sum(row.rank for row in table.rows) == pytest.approx(6)
    text = repr(found)
    assert text.count("≈") == 2  # the near one, and the caption
    assert "p (Wilcoxon)" in text
    assert "is within the noise of 10 seeds" in " ".join(text.split())
    assert re.search(r"would take (about|more than) \d+ seeds to show", " ".join(
        text.split()))  # fmt: skip
    assert "Friedman's test gives p < 0.001" in " ".join(text.split())
    assert "$^{\\approx}$" in found.latex()
    assert found.latex().count("\\textbf") == 1
    assert found.markdown().count("**") == 4


def test_five_seeds_say_what_they_cannot_tell(tmp_path: Path) -> None:
    found = compared([
        outcome(tmp_path, "a", noisy(0.8, 5)), outcome(tmp_path, "b", noisy(0.7, 5)),
        outcome(tmp_path, "c", noisy(0.6, 5)),
    ])  # fmt: skip
    said = " ".join(found.sentences())
    assert "With 5 pairs Wilcoxon's test cannot reach p < 0.05 whatever the scores" in said
    assert "its smallest p is 0.0625, 0.125 after Holm's correction; it takes 7 seeds" in said
    assert "so the paired t-test decides here" in said
    assert found.tests()[0]["wilcoxon"] == 0.125


def test_all_noise_is_said_plainly(tmp_path: Path) -> None:
    found = compared([outcome(tmp_path, name, noisy(0.8, 8, 0.05)) for name in "abc"])
    assert found.sentences()[0].endswith(
        "within the noise: on one, 5 clients, no method can be called better or worse than it."
    )
    same = noisy(0.8, 8)
    found = compared([outcome(tmp_path, name, same) for name in "de"])
    assert "e and d have the same score everywhere." in found.sentences()
    assert found.tables[0].best == ["d", "e"]
    assert [row.rank for row in found.tables[0].rows] == [1.5, 1.5]


def test_equal_gaps_have_no_spread_to_measure_by(tmp_path: Path) -> None:
    found = compared([outcome(tmp_path, "a", [0.5, 0.7]), outcome(tmp_path, "b", [0.6, 0.8])])
    assert found.sentences()[1] == (
        "a cannot be told from b: all 2 differences are −10.0 points, so that there is no spread "
        "to measure by; more seeds would tell."
    )


def test_over_all_problems_every_seed_of_each_is_a_block(tmp_path: Path) -> None:
    cells = [
        outcome(tmp_path, name, noisy(mean + shift, 4), data=data)
        for data, shift in (("one", 0.0), ("two", -0.3), ("three", 0.1))
        for name, mean in (("a", 0.8), ("b", 0.7))
    ]
    found = compared(cells, against="b")
    assert found.overall is not None
    scores = [found.overall.rows[0].scores, *[table.rows[0].scores for table in found.tables]]
    assert scores[0].tolist() == np.concatenate(scores[1:]).tolist()
    by_seed = np.mean(scores[1:], axis=0)
    row = found.overall.rows[0]
    assert (row.mean, row.std) == pytest.approx((by_seed.mean(), by_seed.std(ddof=1)))
    test = found.overall.tests[0]
    assert (test.pairs, test.by, test.different, test.against) == (12, "wilcoxon", True, "b")
    assert "b is worse than a" in " ".join(found.sentences())
    assert "Over all 3 problems, 4 seeds each (12 blocks)" in repr(found)
    assert found.table()[-1]["data"] is None


def test_a_method_that_failed_somewhere_is_not_ranked_over_all(tmp_path: Path) -> None:
    cells = [
        outcome(tmp_path, name, None if (data, name) == ("two", "b") else noisy(0.7, 2), data=data)
        for data in ("one", "two")
        for name in "abc"
    ]
    found = compared(cells)
    assert found.overall is not None
    assert [row.finished for row in found.overall.rows] == [True, False, True]
    assert "failed on 1 of 2 problems" in " ".join(repr(found).split())
    assert sum(row.rank for row in found.overall.rows if row.finished) == pytest.approx(3)
    assert found.latex().count(" -- ") == 2  # its score and its rank
    against = compared(cells, against="b")
    assert "has no result here" in " ".join(against.sentences())


def test_clients_that_are_not_the_same_are_not_compared(tmp_path: Path) -> None:
    found = compared([
        outcome(tmp_path, "a", [0.8, 0.8]), outcome(tmp_path, "b", [0.9, 0.9], partition=b"q")
    ])  # fmt: skip
    assert found.tables[0].tests == ()
    assert "its clients are not those of the other methods" in " ".join(repr(found).split())


def cells_of(*methods: str, **given: Any) -> list[StudyRun]:
    return make_runs(make_request(methods, **given), {}, {})


def test_a_grid_is_for_the_methods_that_have_it() -> None:
    cells = cells_of("fedavg", "fedprox", grid={"mu": ["0.1", "1"]}, data="lagoon", clients=[2, 3])
    assert [(c.labels["clients"], c.labels["method"], c.labels["point"]) for c in cells[:3]] == [
        (2, "fedavg", {}), (2, "fedprox", {"mu": "0.1"}), (2, "fedprox", {"mu": "1"}),
    ]  # fmt: skip
    assert len({cell.name for cell in cells}) == len(cells) == 6
    both = cells_of("fedavg", "fedprox", grid={"lr": [0.1, 0.01], "fedprox:mu": [1.0, 2.0]})
    assert len(both) == 2 + 4
    assert both[-1].config.set == {"lr": 0.01, "mu": 2.0}
    for key in ("net", "net.hidden", "epochs", "optimizer"):
        assert len(cells_of("fedavg", grid={key: ["1", "2"]})) == 2


@pytest.mark.parametrize(
    ("methods", "given", "sentence"),
    [
        (["fedavg", "fedavg"], {}, "method 'fedavg' is given twice; give each once"),
        ([], {}, "no method is given; give one or several"),
        (["fedavg"], {"data": "lagoon,lagoon"}, "data set 'lagoon' is given twice"),
        (["fedavg"], {"clients": [3, 3]}, "number of clients '3' is given twice"),
        (["fedprox:mu"], {}, "method 'fedprox:mu' cannot be read; settings follow the name as"),
        (["fedprox:mu=1,=2"], {}, "settings follow the name as fedprox:key=value,key=value"),
        (["fedprox:mu=1,mu=2"], {}, "cannot be read"),
        (["mu=1"], {}, "cannot be read"),
        (["fedprox:mu=1"], {"grid": {"mu": [1, 2]}}, "mu of fedprox:mu=1 is set to 1 and has a"),
        (["fedprox"], {"grid": {"mu": [1, 1]}}, "needs values, each once"),
        (["fedprox"], {"grid": {"fedpro:mu": [1]}}, "unknown method of a grid 'fedpro'; did you"),
    ],
)
def test_what_cannot_be_asked_for(methods: list[str], given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        cells_of(*methods, **given)


def test_methods_with_settings_and_files_of_ones_own_are_read() -> None:
    assert parse_arm("x", "fedprox:mu=0.1,lr=1e-2").settings == {"mu": "0.1", "lr": "1e-2"}
    assert parse_arm("x", "my_method.py:Mine").name == "my_method.py:Mine"
    own = parse_arm("x", "dir/my_method.py:Mine:mu=1")
    assert (own.name, own.settings) == ("dir/my_method.py:Mine", {"mu": "1"})


def test_names_with_commas_of_their_own(tmp_path: Path) -> None:
    assert split_names("cora, pubmed") == ["cora", "pubmed"]
    assert split_names("lagoon:nodes=150,homophily=0.3,cora") == [
        "lagoon:nodes=150,homophily=0.3", "cora",
    ]  # fmt: skip
    (tmp_path / "a,b").mkdir()
    assert split_names(str(tmp_path / "a,b")) == [str(tmp_path / "a,b")]


def test_cells_whose_names_look_alike_are_kept_apart() -> None:
    cells = cells_of("fedavg", "fedprox:mu=1", "fedprox:mu=1.0", data="lagoon:nodes=150")
    assert len({cell.name for cell in cells}) == 3
    long = cells_of(*(f"fedprox:mu=0.{'1' * 120}{i}" for i in range(2)))
    assert len({cell.name for cell in long}) == 2
    assert all(len(cell.name) <= 100 and "/" not in cell.name for cell in (*cells, *long))


def test_the_saved_command_asks_for_the_same() -> None:
    request = make_request(
        ["fedavg", "fedprox:mu=0.1"], "cora,pubmed", clients=[5, 10], grid={"lr": ["0.1", "1"]},
        options={"set": {"hidden": "8"}, "rounds": 3, "allow": ["no-edge"], "batch_size": 4},
        against="fedavg", alpha=0.1,
    )  # fmt: skip
    assert command(request, Path("s")) == (
        "atoll compare fedavg fedprox:mu=0.1 --data cora,pubmed --clients 5,10 --grid lr=0.1,1 "
        "--seeds 5 --set hidden=8 --rounds 3 --allow no-edge --batch-size 4 --against fedavg "
        "--alpha 0.1 --out s"
    )


def test_labels_of_ones_own_are_part_of_the_saved_command() -> None:
    given = {"weak": "fedprox:mu=0.01", "quite strong": "fedprox:mu=1", "fedavg": "fedavg"}
    request = make_request(given)
    saved = command(request, Path("s"))
    words = shlex.split(saved)[2:5]
    assert words == ["weak=fedprox:mu=0.01", "quite strong=fedprox:mu=1", "fedavg"]
    assert make_request(words) == request
    # A path with a "=" of its own is no label, and what cannot be said is not said wrongly.
    assert list(make_request(["a/b=c/mine.py:Mine"]).methods) == ["a/b=c/mine.py:Mine"]
    assert command(make_request({"mu=1": "fedprox:mu=1"}), Path("s")).startswith("# started in Pyt")


def test_latex_writes_its_own_characters_out() -> None:
    assert tex("a_b & 5% ± {x} ~^\\") == (
        "a\\_b \\& 5\\% $\\pm$ \\{x\\} \\textasciitilde{}\\textasciicircum{}\\textbackslash{}"
    )


def test_a_p_value_shows_on_which_side_of_alpha_it_is() -> None:
    assert [p_text(p) for p in (0.0312, 0.04971, 0.0503, 0.05, 0.0004)] == [
        "p = 0.031", "p = 0.0497", "p = 0.05", "p = 0.05", "p < 0.001",
    ]  # fmt: skip
    assert p_text(0.00998, alpha=0.01) == "p = 0.00998"


def test_long_names_are_folded_and_not_cut_off(tmp_path: Path) -> None:
    name = "fedprox:mu=0.1,lr=0.02,weight_decay=0.0001"
    found = compared([outcome(tmp_path, name, noisy(0.8)), outcome(tmp_path, "b", noisy(0.7))])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(noted_table(found.printed()[0]))
    rows = console.export_text().split("───\n")[1].split("\nb ")[0].splitlines()
    assert "".join(row.split()[0] for row in rows) == name
