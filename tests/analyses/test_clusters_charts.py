"""The pictures of `atoll clusters`, and its files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np

import atoll
from atoll.analyses.clusters import (
    ClusterStudy,
    study_clusters,
    summary,
)
from atoll.analyses.clusters_charts import (
    boxes,
    cluster_files,
    colours,
    norm_charts,
    rows,
)
from atoll.present.chart import Line, Texts
from atoll.present.files import plain_json, write_all
from tests.analyses.conftest import OPTIONS
from tests.analyses.test_clusters import by_hand, text_of


def test_pictures_and_json(cluster_study: ClusterStudy, tmp_path: Path) -> None:
    paths = write_all(tmp_path, cluster_files(cluster_study))
    names = {path.name for path in paths}
    assert names == {
        "clusters.json", "tree.png", "norms.png", "heterogeneity.png", "losses.png",
        "accuracy.png", "gains.png",
    }  # fmt: skip
    for path in paths[1:]:
        assert path.read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "clusters.json").read_text())
    assert saved == plain_json(summary(cluster_study))
    assert saved["splits"][0]["round"] == cluster_study.splits[0].round
    assert [one["members"] for one in saved["clusters"]] == cluster_study.members
    assert saved["gains"][0]["not_worse"] >= saved["gains"][0]["better"]
    assert np.array(saved["norms"]).shape == (6, 6)


def test_the_picture_of_the_tree_puts_clusters_together(cluster_study: ClusterStudy) -> None:
    made = by_hand(cluster_study)
    assert rows(made) == [0, 1, 4, 2, 5, 3]
    assert boxes(made) == [
        ([0, 1, 2, 3, 4, 5], 0, 4), ([2, 3, 5], 4, 6), ([0, 1, 4], 4, 6), ([2, 5], 6, 6),
        ([3], 6, 6), ([0], 6, 6), ([1, 4], 6, 6),
    ]  # fmt: skip
    colour = colours(made)
    assert colour[0] == colour[3] != colour[1] == colour[4] != colour[2] == colour[5]


def test_a_run_without_splits_or_baseline_can_be_shown(tmp_path: Path) -> None:
    atoll.run("gcfl", out=tmp_path / "r", set={"hidden": 8}, **{**OPTIONS, "seeds": 1})
    found = study_clusters(tmp_path / "r")
    text = " ".join(text_of(found).split())
    assert "0 splits, 1 cluster all 6 clients, eps1 0.05, eps2 0.1 └── at the end" in text
    assert "heterogeneity" not in text
    assert "give the folder of a run of local" in text
    assert cluster_files(found)["gains.png"] is None
    (tmp_path / "gains.png").write_bytes(b"of an earlier comparison")
    write_all(tmp_path, cluster_files(found))
    assert not (tmp_path / "gains.png").exists()


def test_names_of_single_clients_with_equal_norms_keep_apart() -> None:
    norms, label = np.ones((2, 3)), np.array([[0, 0, 0], [0, 1, 2]])
    norms[0] = 100
    found = SimpleNamespace(
        names=("a", "b", "c"), rounds=2, norms=norms, together=norms, label=label, splits=[],
        members=[[0], [1], [2]], several=[], eps=lambda _: 0.0,
    )  # fmt: skip
    ((chart,),) = norm_charts(cast("ClusterStudy", found), "").rows
    assert chart is not None
    (names,) = (mark for mark in chart.marks if isinstance(mark, Texts))
    assert np.diff(np.sort(names.y)).min() > 0.1


def test_absent_clients_have_no_norms(tmp_path: Path) -> None:
    some = {**OPTIONS, "seeds": 1, "fraction": 0.5}
    atoll.run("gcfl", out=tmp_path / "r", set={"hidden": 8}, **some)
    found = study_clusters(tmp_path / "r")
    assert np.isnan(found.norms).sum(1).tolist() == [3] * 6
    ((chart,),) = norm_charts(found, "").rows
    assert sum(isinstance(mark, Line) for mark in chart.marks) >= 6
