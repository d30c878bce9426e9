"""`atoll datasets`: the list and the pages."""

from __future__ import annotations

import re
from pathlib import Path

from atoll.data.public.registry import DATASETS


def test_data_sets_are_listed_whole(cli) -> None:
    text = cli("datasets").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    listed = [line.split()[0] for line in text.splitlines()[3:-1]]
    assert listed[: len(DATASETS) + 2] == ["lagoon", "archipelago", *DATASETS]
    assert "atoll data fetch NAME" in text


def test_a_data_sets_page(cli, tmp_path: Path) -> None:
    text = cli("datasets", "Cora").stdout
    for part in ("2,708", "10,556", "1,433", "licence", "Planetoid", "atoll data fetch cora"):
        assert part in text
    text = cli("datasets", "mutag", "--data-root", "d").stdout
    assert "atoll data fetch MUTAG --data-root d" in text
    text = cli("datasets", "lagoon").stdout
    for knob in ("nodes", "classes", "homophily", "label_skew", "topology_skew", "feature_noise"):
        assert re.search(rf"^│ {knob} +│ [\d.]+ +│ [A-Z0]", text, re.MULTILINE)
    found = cli("datasets", "croa", code=2).stderr
    assert "unknown data set 'croa'; did you mean 'cora'?" in found
