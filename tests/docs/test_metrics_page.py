"""docs/metrics.md says of every metric what the registry says: its kind and what a site sends."""

from __future__ import annotations

import re

from atoll.experiment.metrics import REGISTRY
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text()
ROWS = re.findall(r"^\| `([\w@%]+)` \| .* \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
LOWER = re.search(r"^(.*) are better when lower", PAGE, re.MULTILINE)


def test_the_table_has_every_metric_as_it_is() -> None:
    kinds = {True: "pooled", False: "mean over clients"}
    expected = [(name, kinds[one.pooled], one.sends) for name, one in REGISTRY.items()]
    assert expected == ROWS


def test_the_page_names_the_metrics_that_are_better_when_lower() -> None:
    assert LOWER is not None
    lower = [name for name, one in REGISTRY.items() if not one.higher]
    assert re.findall(r"`(\w+)`", LOWER[1]) == lower
