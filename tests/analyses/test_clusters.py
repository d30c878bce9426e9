"""`atoll clusters`: the tree as the server made it, heterogeneity and gains by hand, files."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import atoll
from atoll.analyses.clusters import (
    ClusterStudy,
    Gain,
    cluster_parts,
    inside,
    labels_by_round,
    study_clusters,
)
from atoll.core.errors import ConfigError
from atoll.data.measure.heterogeneity import PairHeterogeneity
from atoll.data.source import GraphGroup, GraphSet
from atoll.engines.codec import load_checkpoint
from atoll.experiment.folder import CHECKPOINT, read_run
from atoll.methods.gcfl import Split, clusters
from atoll.present.tables import layout
from tests.analyses.conftest import OPTIONS, SPLITS


def text_of(found: ClusterStudy) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(layout(cluster_parts(found), gap=2))
    return console.file.getvalue()


def test_a_saved_run_reports_what_it_reported(runs: Path) -> None:
    for name in ("gcfl", "local", "fedavg"):
        saved = read_run(runs / name)
        reported = json.loads((runs / name / "result.json").read_text())["metrics"]
        assert saved.result.metrics() == reported
        assert saved.result.scored == ("global" if name == "fedavg" else "personalised")
        # Means over clients of what each client reports.
        weights = [seed.history.counts[:, 2] for seed in saved.result.seeds]
        clients = saved.result.of_clients()
        means = [np.average(row, weights=w) for row, w in zip(clients, weights, strict=True)]
        assert reported["test_accuracy"]["per_seed"] == pytest.approx(means)


def test_the_clusters_are_the_servers(cluster_study: ClusterStudy, runs: Path) -> None:
    server = load_checkpoint(runs / "gcfl" / "seed-0" / CHECKPOINT)["server"]
    assert cluster_study.members == clusters(server)
    assert len(cluster_study.splits) == len(cluster_study.members) - 1 > 1
    assert (
        cluster_study.norms.shape
        == cluster_study.together.shape
        == cluster_study.label.shape
        == (6, 6)
    )
    assert (cluster_study.label[:2] == 0).all()  # the first two rounds may not split
    np.testing.assert_allclose(cluster_study.norms, server.trace[:, 0].numpy())
    other = study_clusters(runs / "gcfl", seed=1)
    assert other.seed == 1
    assert not np.array_equal(other.norms, cluster_study.norms)


HAND = [
    Split(3, (0, 1, 4), (2, 3, 5), 0.1, 0.5, 1.0),
    Split(5, (2, 5), (3,), 0.1, 0.5, 1.0),
    Split(5, (0,), (1, 4), 0.1, 0.5, 1.0),
]


DISTANCE = np.abs(np.subtract.outer([0.0, 1, 4, 9, 2, 5], [0.0, 1, 4, 9, 2, 5]))


def by_hand(found: ClusterStudy) -> ClusterStudy:
    return replace(
        found, splits=HAND, label=labels_by_round(HAND, 6, 6),
        pairs=PairHeterogeneity(DISTANCE, DISTANCE / 10),
    )  # fmt: skip


def test_labels_follow_the_splits() -> None:
    label = labels_by_round(HAND, 7, 6)
    assert label[2].tolist() == [0] * 6
    assert label[3].tolist() == label[4].tolist() == [0, 0, 1, 1, 0, 1]
    assert label[6].tolist() == [0, 3, 1, 2, 3, 1]


def test_heterogeneity_inside_clusters_by_hand(cluster_study: ClusterStudy) -> None:
    made = by_hand(cluster_study)
    assert [line[0] for line in made.within()] == [-1, 3, 5]
    # One cluster: 15 pairs. Then 0, 1, 4 at 0, 1, 2, and 2, 3, 5 at 4, 9, 5. Then 1, 4 and 2, 5.
    everything = DISTANCE[np.triu_indices(6, 1)].mean()
    expected = [everything, (1 + 2 + 1 + 5 + 1 + 4) / 6, (1 + 1) / 2]
    assert [line[1] for line in made.within()] == pytest.approx(expected)
    assert [line[2] for line in made.within()] == pytest.approx([v / 10 for v in expected])
    assert made.of_cluster([2, 5]) == pytest.approx((1, 0.1))
    assert np.isnan(made.of_cluster([3])[0])
    assert made.company().tolist() == pytest.approx([np.nan, 1, 1, np.nan, 1, 1], nan_ok=True)
    matrix = np.full((3, 3), np.nan)
    assert np.isnan(inside(matrix, np.zeros(3, dtype=int)))


def test_chance_tells_found_clusters_from_any(cluster_study: ClusterStudy) -> None:
    made = by_hand(cluster_study)
    # Of the 45 ways to choose two pairs of six clients, 0-1 | 4-2 ... few are as close as this.
    assert made.chance(DISTANCE) < 0.15
    assert made.chance(-DISTANCE) > 0.85
    assert made.chance(np.ones((6, 6))) == 1.0
    assert np.isnan(replace(made, splits=[]).chance(DISTANCE))


def test_gains_by_hand() -> None:
    accuracy = np.array([[0.5, 0.6, 0.7], [0.7, 0.6, 0.9]])
    gain = Gain("a", accuracy, np.array([0.1, 0.0, -0.2]))
    assert gain.mean == pytest.approx(4 / 6)
    assert gain.spread == pytest.approx(np.mean([0.1, 0, 0.1]) * np.sqrt(2))
    assert (gain.improved(ties=False), gain.improved(ties=True)) == (1, 2)
    assert Gain("b", accuracy[:1], None).spread is None


def test_gains_are_paired_by_client(cluster_study: ClusterStudy, runs: Path) -> None:
    ours, average, local = cluster_study.gains
    assert [gain.name for gain in cluster_study.gains] == ["gcfl", "fedavg", "local"]
    assert local.gain is None
    assert ours.gain == pytest.approx((ours.accuracy - local.accuracy).mean(0))
    assert cluster_study.baseline == "local"
    assert average.accuracy == pytest.approx(read_run(runs / "fedavg").result.of_clients())


def test_runs_of_one_method_are_told_apart_by_their_folders(runs: Path) -> None:
    found = study_clusters(runs / "gcfl", beside=[runs / "gcfl", runs / "fedavg"])
    assert [gain.name for gain in found.gains] == ["gcfl (gcfl)", "gcfl (gcfl)", "fedavg"]


def test_the_tree_in_words(cluster_study: ClusterStudy) -> None:
    lines = [line.rstrip() for line in text_of(by_hand(cluster_study)).splitlines()]
    start = lines.index("all 6 clients, eps1 1e+09, eps2 0")
    assert lines[start + 1 : start + 6] == [
        "├── round 3: clients 2, 3, 5 leave (mean 0.1, largest 0.5, cut 1)",
        "│   ├── round 5: client 3 leaves (mean 0.1, largest 0.5, cut 1)",
        "│   └── at the end: clients 2, 5",
        "├── round 5: client 0 leaves (mean 0.1, largest 0.5, cut 1)",
        "└── at the end: clients 1, 4",
    ]
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert f"all clients in one cluster {DISTANCE[np.triu_indices(6, 1)].mean():.3f}" in text
    assert "after the splits of round 5 1.000 0.100" in text
    assert "points over local" in text


def shapes(kind: str, graphs: int, name: str) -> GraphSet:
    """Cycles or stars of eight nodes, each of two classes that the number of marked nodes tells."""
    rng = np.random.default_rng(len(name))
    y = np.arange(graphs) % 2
    ptr = 8 * np.arange(graphs + 1)
    nodes = np.arange(8)
    one = np.stack([nodes, (nodes + 1) % 8] if kind == "cycle" else [nodes[1:], 0 * nodes[1:]])
    ends = np.concatenate([one + start for start in ptr[:-1]], axis=1)
    x = np.eye(3, dtype=np.float32)[rng.integers(0, 2, 8 * graphs) + np.repeat(y, 8)]
    return GraphSet(name, x, np.concatenate([ends, ends[::-1]], axis=1), ptr, y, 2)


def test_clients_with_data_sets_of_their_own(tmp_path: Path) -> None:
    kinds = ("cycle", "star", "cycle", "star")
    sets = tuple(shapes(kind, 30, f"{kind}{i}") for i, kind in enumerate(kinds))
    group = GraphGroup("shapes", sets)
    options = {"protocol": "gcfl", "rounds": 4, "set": {"hidden": 8, **SPLITS, "min_size": 1}}
    atoll.run("gcfl", group, out=tmp_path / "r", seeds=2, **options)
    found = study_clusters(tmp_path / "r", data=group)
    assert found.names == ("cycle0", "star1", "cycle2", "star3")
    assert found.pairs.structure[0, 2] < 0.1 < found.pairs.structure[0, 1]
    assert "client star1" in text_of(found)
    with pytest.raises(ConfigError, match="started in Python with a data object"):
        study_clusters(tmp_path / "r")


def test_what_cannot_be_read_is_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        study_clusters(tmp_path)
    with pytest.raises(ConfigError, match="local does not split clusters; this command needs gcfl"):
        study_clusters(runs / "local")
    with pytest.raises(ConfigError, match="seed is 7, but the run has the seeds 0 to 1"):
        study_clusters(runs / "gcfl", seed=7)
    atoll.run("local", out=tmp_path / "other", set={"hidden": 8}, **{**OPTIONS, "clients": 5})
    with pytest.raises(ConfigError, match="has clients 5, but the other has 6; only runs on the"):
        study_clusters(runs / "gcfl", against=tmp_path / "other")
    atoll.run("local", out=tmp_path / "seeds", set={"hidden": 8}, **{**OPTIONS, "seeds": 1})
    with pytest.raises(ConfigError, match="has seeds 1, but the other has 2"):
        study_clusters(runs / "gcfl", against=tmp_path / "seeds")
    (tmp_path / "other" / "result.json").unlink()
    with pytest.raises(ConfigError, match="is not finished; continue it with: atoll run --resume"):
        study_clusters(runs / "gcfl", against=tmp_path / "other")
