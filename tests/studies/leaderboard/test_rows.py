"""The file of rows: its content, its growth, and refused files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from atoll.core.errors import ConfigError
from atoll.experiment.config import make_config
from atoll.studies.leaderboard.rows import TRIALS, Row, add_rows, make_row, read_rows
from atoll.studies.study_run import RunOutcome, StudyRun

LABELS = {"league": "defaults", "data": "cora", "partition": "louvain-10", "method": "fedprox"}


def outcome(error: str | None = None) -> RunOutcome:
    config = make_config(
        method="fedprox", data="cora", rounds=4, epochs=3, seeds=2, set={"mu": 0.1},
        data_root="/mine", device="cpu",
    )  # fmt: skip
    scores = {"mean": 0.5, "std": 0.1, "per_seed": [0.25, 0.75]}
    summary = {
        "metric": "auc", "metrics": {"test_accuracy": scores, "val_accuracy": scores},
        "rounds": 4, "seeds": 2, "clients": 10, "device": "cpu",
        "bytes": {"up": 800, "down": 800}, "seconds": {"per_round": 0.002},
    }  # fmt: skip
    run = StudyRun("one", config, LABELS)
    return RunOutcome(run, Path("one"), None if error else summary, error)


def test_a_row_has_scores_costs_and_a_command_without_the_place() -> None:
    row = make_row(outcome(), "abc")
    assert (row.mean, row.seeds, row.scores, row.clients) == (0.5, 2, (0.25, 0.75), 10)
    assert row.metric == "accuracy"  # no client has both classes, so that there is no AUC
    assert row.std == pytest.approx(0.353553, abs=1e-6)
    assert (row.bytes_per_round, row.ms_per_round) == (200, 2)  # of one seed
    assert row.settings == "mu=0.1"
    assert row.command == (
        "atoll run fedprox --data cora --rounds 4 --epochs 3 --seeds 2 --set mu=0.1"
    )
    assert row.problem == ("cora", "louvain-10")


def test_a_file_grows_and_a_new_row_replaces_its_predecessor(tmp_path: Path) -> None:
    path, row = tmp_path / "l.csv", make_row(outcome(), "abc")
    assert read_rows(path) == {}
    other = msgspec.structs.replace(row, method="fedavg", std=None)
    add_rows(path, [row])
    add_rows(path, [other])
    assert list(read_rows(path)) == [other.key, row.key]
    found = read_rows(path)[row.key]
    assert msgspec.structs.replace(found, std=row.std) == row
    assert found.std == pytest.approx(row.std)
    assert read_rows(path)[other.key].std is None
    add_rows(path, [msgspec.structs.replace(row, mean=0.6, recipe="def")])
    assert [one.mean for one in read_rows(path).values()] == [0.5, 0.6]


def test_a_diverged_run_has_no_mean_and_trials_stay_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    lost = make_row(outcome("not finite"), "abc")
    add_rows(path, [lost])
    assert read_rows(path) == {lost.key: lost}
    assert lost.mean is None
    trials = [msgspec.structs.replace(lost, league=TRIALS, recipe=one) for one in "ab"]
    add_rows(path, trials)
    assert len(read_rows(path)) == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n", "has other columns than a leaderboard"),
        (",".join(Row.__struct_fields__) + "\ndefaults\n", "has a damaged row"),
    ],
)
def test_a_file_that_is_no_leaderboard_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "l.csv").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_rows(tmp_path / "l.csv")
