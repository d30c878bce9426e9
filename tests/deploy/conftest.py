"""A federation inside one process: sites that are called instead of messaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.core.federation import Federation
from atoll.deploy.coordinator import Order, coordinate
from atoll.deploy.policy import Policy
from atoll.deploy.site import Site
from atoll.deploy.site_data import read_site_data, write_clients
from atoll.engines.fleet import LOST, Failure, Packet, failure_in
from atoll.experiment.config import config_text, make_config
from atoll.experiment.result import Result
from atoll.testing import small_federation

ALL = Policy(disclose="declared")
Tamper = Callable[[str, Packet, Packet], Packet | None]
"""(site, question, answer) -> what arrives at the server; None if nothing does."""


class LocalFleet:
    """Sites in this process, whose answers a tamper may change or drop."""

    def __init__(self, sites: Mapping[str, Site], tamper: Tamper | None = None) -> None:
        self.all, self.tamper = dict(sites), tamper
        self.returned: set[str] = set()
        self.calls: list[tuple[str, str]] = []

    def map(self, step, packets, timeout):
        replies, failures = {}, {}
        for site, packet in packets.items():
            self.calls.append((site, step))
            question = Packet(json.loads(json.dumps(packet.head)), packet.body)
            answer = self.all[site].answer(question)
            if self.tamper is not None:
                answer = self.tamper(site, question, answer)
            if answer is None:
                failures[site] = Failure(LOST, f"no answer to '{step}' within {timeout:g} s")
            elif "failure" in answer.head:
                failures[site] = failure_in(answer.head)
            else:
                replies[site] = answer
        return replies, failures

    def back(self, site):
        return site in self.returned


def two_classes() -> Federation:
    """The small federation with two classes."""
    many = small_federation()
    graphs = tuple(replace(graph, y=graph.y.clamp(max=1)) for graph in many.graphs)
    return replace(many, graphs=graphs, classes=2)


class Room:
    """A folder with everything that one federated run leaves, at the server and at the sites."""

    def __init__(self, folder: Path, federation: Federation) -> None:
        self.folder = folder
        self.names = tuple(f"site-{i + 1}" for i in range(len(federation)))
        self.files = write_clients(federation, folder / "data")
        self.before: list[Site] = []

    def sites(self, policy: Policy = ALL) -> dict[str, Site]:
        """The sites as fresh processes would be: with nothing but their files."""
        for site in self.before:  # the processes before them have ended
            site.close()
        made = {
            name: Site(read_site_data(file), policy, self.folder / name)
            for name, file in zip(self.names, self.files, strict=True)
        }
        self.before = list(made.values())
        return made

    def fleet(
        self, tamper: Tamper | None = None, *, sites: dict[str, Site] | None = None
    ) -> LocalFleet:
        return LocalFleet(sites or self.sites(), tamper)

    def order(self, method: str, *, quorum: int = 2, **options) -> Order:
        config = make_config(method=method, **options)
        return Order(run="run", config=config_text(config), sites=self.names, quorum=quorum,
                     deadline=5.0)  # fmt: skip

    def run(self, order: Order, fleet: LocalFleet | None = None) -> Result:
        fleet = fleet or self.fleet()
        return coordinate(order, fleet, self.folder / "server", lambda progress: None)


@pytest.fixture
def make_room(tmp_path: Path) -> Callable[..., Room]:
    return lambda federation, name="room": Room(tmp_path / name, federation)


def _tables(folder: Path, labels: str, column: str = "b") -> Path:
    folder.mkdir()
    rows = [f"{i},{i / 10},{(i * 7 % 5) / 5},{labels[i % len(labels)]}" for i in range(30)]
    (folder / "nodes.csv").write_text("\n".join([f"id,a,{column},label", *rows]) + "\n")
    edges = [f"{i},{(i + k) % 30}" for i in range(30) for k in (1, 3)]
    (folder / "edges.csv").write_text("\n".join(["source,target", *edges]) + "\n")
    return folder


@pytest.fixture
def tables() -> Callable[..., Path]:
    """`tables(folder, "xyz")` writes an owner's graph as CSV, with classes x, y and z."""
    return _tables
