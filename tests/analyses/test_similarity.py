"""What methods take for alike, beside the data, from saved runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from atoll import run
from atoll.analyses.similarity import (
    Similarities,
    read_similarities,
    similarity_files,
    similarity_table,
)
from atoll.core.errors import ConfigError
from atoll.data.measure.heterogeneity import describe
from atoll.experiment.folder import read_run
from atoll.present.files import write_all

DATA = {"data": "lagoon:nodes=300", "clients": 4, "rounds": 2, "seeds": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("similarity")
    hidden = {"hidden": 8}
    for method in ("fediih", "fedpub", "fedgta", "fedavg"):
        run(method, **DATA, set=hidden, out=root / method)
    return [root / name for name in ("fediih", "fedpub", "fedgta", "fedavg")]


def test_methods_and_data_side_by_side(folders: list[Path], tmp_path: Path) -> None:
    found = read_similarities(folders[:3])
    assert list(found.methods) == ["fediih", "fedpub", "fedgta"]
    assert found.methods["fediih"].shape == (2, 4, 4)
    saved = read_run(folders[1])
    np.testing.assert_array_equal(found.methods["fedpub"], saved.servers[0].similarity.numpy())
    expected = 1 - describe(saved.federations[0], random_graphs=0).label_divergence
    np.testing.assert_allclose(found.data["labels"], expected)
    assert len(similarity_table(found).rows) == 3
    written = write_all(tmp_path / "out", similarity_files(found))
    numbers = json.loads(written[0].read_text())
    assert numbers["rank correlation"]["fedgta"].keys() == {"labels", "features", "structure"}
    assert written[1].stat().st_size > 10_000


def test_seeds_have_clients_of_their_own(folders: list[Path]) -> None:
    first, second = (read_similarities(folders[1:2], seed) for seed in (0, 1))
    assert not np.allclose(first.methods["fedpub"], second.methods["fedpub"])
    assert not np.allclose(first.data["labels"], second.data["labels"])
    with pytest.raises(ConfigError, match="has no seed 7"):
        read_similarities(folders[1:2], 7)


def test_agreement_is_a_rank_correlation_of_pairs() -> None:
    data = np.array(
        [[1, 0.9, 0.5, 0.1], [0.9, 1, 0.4, 0.2], [0.5, 0.4, 1, 0.3], [0.1, 0.2, 0.3, 1]]
    )
    factors = np.stack([data**2, data**2])
    found = Similarities(
        np.arange(4),
        {"labels": data},
        {"same order": factors, "reversed": 1 - data, "all alike": np.ones((4, 4))},
    )
    assert found.agreement("same order", "labels") == pytest.approx(1)
    assert found.agreement("reversed", "labels") == pytest.approx(-1)
    assert np.isnan(found.agreement("all alike", "labels"))


def test_what_cannot_be_compared_is_refused(folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not compare clients; use fediih"):
        read_similarities(folders[3:])
    other = tmp_path / "other"
    run("fedgta", **{**DATA, "clients": 3}, set={"hidden": 8}, out=other)
    with pytest.raises(ConfigError, match="only runs on the same clients"):
        read_similarities([folders[0], other])
