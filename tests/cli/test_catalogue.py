"""`atoll datasets` and `atoll methods`: the lists and the pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from atoll.data.public.registry import DATASETS
from atoll.methods import METHODS


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
        assert re.search(rf"^{knob} +[\d.]+ +[A-Z0]", text, re.MULTILINE)
    found = cli("datasets", "croa", code=2).stderr
    assert "unknown data set 'croa'; did you mean 'cora'?" in found


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
        assert re.search(rf"^{key} +\S+ ", text, re.MULTILINE)
    # Line breaks of the source are not line breaks of the page.
    assert not any(len(line) < 30 and line.endswith(" the") for line in text.splitlines())


OWN = """
from dataclasses import dataclass
from atoll import Adam, Method, Optimizer, ToAll

@dataclass(frozen=True)
class Plain(Method):
    "The clients rest."

    warmth: float = 0.25

    def init(self, clients):
        return self.net.init(clients.key)

    def round(self, server, clients):
        return server

@dataclass(frozen=True)
class Optimised(Plain):
    "The clients rest, with an optimizer."

    optimizer: Optimizer = Adam()
"""


def test_an_own_method_has_a_page(cli, tmp_path: Path, request) -> None:
    file = tmp_path / f"{request.node.name}.py"
    file.write_text(OWN)
    for name, part in (("Plain", "The clients rest.\n"), ("Optimised", "optimizer adam")):
        text = cli("methods", f"{file.name}:{name}").stdout
        assert part in text
        assert "Paper: none" in text
        assert re.search(r"^warmth +0.25 ", text, re.MULTILINE)


def test_methods_that_are_bound_to_their_graph_say_so(cli) -> None:
    assert "New nodes (atoll predict): yes" in cli("methods", "fedavg").output
    page = " ".join(cli("methods", "fedgnn").output.split())
    assert "New nodes (atoll predict): no: its clients predict with rows that others sent" in page
    rows = {line.split()[0]: line for line in cli("methods").output.splitlines() if line.strip()}
    assert " no " in rows["fedgnn"]
    assert " yes " in rows["fedavg"]
