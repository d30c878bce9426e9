"""`atoll methods`: the list and the pages."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from atoll.methods import METHODS


def test_methods_are_listed_with_their_papers(cli) -> None:
    text = cli("methods").stdout
    assert max(map(len, text.splitlines())) <= 80
    for name in METHODS:
        assert name in text


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_page_says_everything(cli, name: str) -> None:
    text = cli("methods", name.upper()).stdout
    assert max(map(cell_len, text.splitlines())) <= 80  # α̂ is two characters and one column wide
    for part in ("Wire, per client and round:", "Departures from the reference code:", "Paper:"):
        assert part in text
    for key in ("epochs", "hidden", "dropout", "lr", "weight_decay", "net", "optimizer"):
        assert re.search(rf"^│ {key} +│ \S+ +│", text, re.MULTILINE)
    # Line breaks of the source are not line breaks of the page.
    assert not any(len(line) < 30 and line.endswith(" the") for line in text.splitlines())
