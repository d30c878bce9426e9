"""A dry run lists what would leave a site."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from atoll.deploy.disclosure import disclosure, disclosure_table
from atoll.deploy.policy import Policy
from atoll.deploy.site import Site
from atoll.deploy.site_data import read_site_data, write_clients
from atoll.experiment.config import make_config
from atoll.testing import small_federation
from tests.data.own.graphs import folder
from tests.deploy.private_site import (
    DP,
    make_site,
)


def site(tmp_path: Path, policy: Policy | None = None) -> Site:
    file = write_clients(small_federation(), tmp_path / "data")[0]
    return Site(read_site_data(file), policy or Policy(), tmp_path / "site")


def test_a_dry_run_lists_what_would_leave_and_what_is_refused(tmp_path):
    data = site(tmp_path).data
    found = disclosure(make_config(method="fedgnn"), data, Policy())
    rows = {(row["step"], row["field"]): row for row in found["fields"]}
    # Shapes are the site's own: one key for each of its 13 nodes.
    assert rows["announce", "keys"]["shape"] == "13"
    assert rows["announce", "keys"]["verdict"].startswith("refused: its policy does not allow")
    assert rows["train", "model.0.weight"]["verdict"] == "allowed"
    assert rows["train", "model.0.weight"]["bytes_per_round"] == 11 * 64 * 4
    assert found["told_when_joining"]["nodes"] == 13


def plain(found) -> str:
    console = Console(width=300)
    with console.capture() as caught:
        console.print(disclosure_table(found))
    return caught.get()


def test_a_dry_run_speaks_in_plain_words_and_knows_the_metric(tmp_path):
    rows = [f"n{i},{i % 3},20{10 + i}-01-01,{'uv'[i % 2]},{'xy'[i // 6]}" for i in range(12)]
    nodes = "\n".join(["id,age,day,kind,label", *rows])
    rules = "[columns]\nday = {kind = 'date', parts = ['year']}\n"
    data = read_site_data(folder(tmp_path, nodes, "source,target\nn0,n1\nn1,n2\n", rules))
    text = plain(disclosure(make_config(method="fedavg"), data, Policy()))
    assert "told of column age: 12 rows have one, mean 1, squared deviations 8 (read as num" in text
    assert "told of column day: no number (read as date, standard, refuse, year, 1970-01-01" in text
    assert "told of column kind: values 'u', 'v' (read as category" in text
    assert "told when joining: " in text
    assert "{" not in text
    assert "score.bins" not in text
    assert "score.loss is its own mean loss" in text
    wanted = make_config(method="fedavg", metric="average_precision")
    text = plain(disclosure(wanted, data, Policy()))
    assert "score.bins is positives and negatives by bin" in text
    assert "refused" in text
    allowed = plain(disclosure(wanted, data, Policy(disclose=("score.bins",))))
    assert "refused" not in allowed


def test_a_dry_run_shows_what_a_private_run_sends(tmp_path):
    data = make_site(tmp_path).data
    found = disclosure(make_config(method="moon", dp=DP), data, Policy(noise=1.0))
    assert found["run"] == "allowed"
    assert found["told_when_joining"]["nodes"] == 0
    assert {row["verdict"] for row in found["fields"]} == {"allowed"}
    found = disclosure(make_config(method="moon"), data, Policy(noise=1.0))
    assert found["run"].startswith("refused: its policy demands differential privacy")
