"""Steps as packets: which steps they can name, and what an engine of sites does with replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from atoll.core.dp import Noised
from atoll.core.errors import ServerDiverged, WireError
from atoll.core.message import ToAll, ToEach
from atoll.core.random import fold, make_key
from atoll.core.tree import tree_map
from atoll.engines.codec import decode, encode
from atoll.engines.fleet import (
    BAD,
    INTERVAL,
    LONGEST,
    NEVER,
    Failure,
    Packet,
    Remote,
    SitesFailed,
    name_step,
    owners_of,
    pause,
    steps_of,
)
from atoll.engines.plausible import Declared
from atoll.engines.serial import Serial
from atoll.engines.wire import make_probe
from atoll.methods import FedAvg, FedTAD
from atoll.nn import GCN
from atoll.testing import CLASSES, FEATURES, small_federation

NET = GCN(FEATURES, CLASSES, hidden=4)
METHOD = FedAvg(NET, epochs=1)


def test_packets_name_the_method_and_its_base_but_nothing_inside_a_private_one() -> None:
    assert [*owners_of(FedTAD(NET, base=METHOD))] == ["method", "method.base"]
    private = Noised(NET, base=METHOD, clip=1.0, noise=1.0)
    assert owners_of(private) == {"method": private}
    assert [(step.name, step.owner) for step in steps_of(private)] == [("train", private)]


def test_a_step_is_named_by_its_owner_and_the_flags_that_differ() -> None:
    owners = owners_of(METHOD)
    assert name_step(METHOD.train, owners) == {"owner": "method", "step": "train", "flags": {}}
    other = replace(METHOD, epochs=2)
    with pytest.raises(WireError, match="'train' belongs to nothing that the sites know"):
        name_step(other.train, owners)


class Local:
    """A fleet whose sites are the clients of the serial engine."""

    def __init__(self, spoilt: str = "") -> None:
        federation = small_federation().prepared(METHOD.views)
        self.serial, self.spoilt = Serial(federation.graphs), spoilt
        self.names = [f"site-{i}" for i in range(len(federation))]
        self.heads: list[dict[str, Any]] = []

    def map(self, step: str, packets: dict[str, Packet], timeout: float) -> Any:
        replies = {}
        for name, (head, body) in packets.items():
            self.heads.append(head)
            key = torch.tensor(head["key"])
            reply = self.serial.run_one(METHOD.train, self.names.index(name), decode(body), key)
            replies[name] = Packet({}, b"nonsense" if name == self.spoilt else encode(reply))
        return replies, {}


def engine(fleet: Local, notes: list[Any]) -> Remote:
    federation = small_federation()
    probe = make_probe(federation, dict(METHOD.views), federation.graphs[0].real)

    def note(event: str, **more: Any) -> None:
        notes.append((event, more))

    owners = owners_of(METHOD)
    sizes = {n: Declared((99, 99, 99), 99) for n in fleet.names}
    return Remote(fleet, sizes, owners, probe, run_name="r", deadline=1.0, note=note)


def play(remote: Remote, round: int) -> Any:
    keys = fold(make_key(round), torch.arange(len(remote.names)))
    remote.begin()
    message = ToAll(NET.init(make_key(1)))
    return remote.run(METHOD.train, range(len(remote.names)), message, keys, round)


def test_replies_come_back_stacked_and_each_packet_names_the_state_that_counts() -> None:
    fleet, notes = Local(), []
    remote = engine(fleet, notes)
    reply = play(remote, 0)
    assert len(reply.weight) == len(fleet.names)
    assert {head["state"] for head in fleet.heads} == {NEVER}
    fleet.heads.clear()
    play(remote, 0)  # the first attempt was not committed
    assert {head["state"] for head in fleet.heads} == {NEVER}
    remote.commit(0)
    fleet.heads.clear()
    play(remote, 1)
    assert {head["state"] for head in fleet.heads} == {0}
    event, more = notes[0]
    assert event == "step"
    assert all(down > 0 and up > 0 for down, up in more["bytes"].values())


def test_a_reply_that_cannot_be_read_fails_only_its_site() -> None:
    remote = engine(Local(spoilt="site-1"), [])
    with pytest.raises(SitesFailed) as found:
        play(remote, 0)
    ((site, failure),) = found.value.failures.items()
    assert (site, failure.kind) == ("site-1", BAD)
    assert isinstance(failure, Failure)


@pytest.mark.parametrize(
    ("trained", "error", "says"),
    [
        (
            [2],
            SitesFailed,
            "site-2: the server's model is not finite after the replies of only this site",
        ),
        ([0, 2], ServerDiverged, "is not finite after the replies of site-0, site-2"),
    ],
)
@pytest.mark.parametrize("each", [False, True])
def test_a_model_that_is_not_finite_names_the_sites_it_came_from(
    trained: list[int], error: type[Exception], says: str, each: bool
) -> None:
    """No site gets it, because each would refuse it and be excluded instead of the liar."""
    fleet = Local()
    remote, keys = engine(fleet, []), fold(make_key(0), torch.arange(len(fleet.names)))
    remote.run(METHOD.train, trained, ToAll(NET.init(make_key(1))), keys[trained], 0)
    fleet.heads.clear()
    message = rows_of(range(len(keys)), len(keys)) if each else ToAll(spoilt(NET))
    with pytest.raises(error, match=says):
        remote.run(METHOD.train, range(len(keys)), message, keys, 0)
    assert fleet.heads == []
    remote.begin()  # what was heard in another attempt blames no site
    with pytest.raises(ServerDiverged, match="not finite after the replies of an earlier round"):
        remote.run(METHOD.train, range(len(keys)), message, keys, 0)


def spoilt(net: GCN) -> Any:
    return tree_map(lambda leaf: leaf * torch.nan, net.init(make_key(1)))


def rows_of(bad: Sequence[int], total: int) -> ToEach:
    """A row for each site, of which some are not finite."""
    rows = torch.ones(total)
    rows[list(bad)] = torch.nan
    first = NET.init(make_key(1))
    return ToEach(tree_map(lambda leaf: rows.reshape(-1, *[1] * leaf.dim()) * leaf, first))


@pytest.mark.parametrize("asked", [[0, 1, 2], [1]])
def test_a_row_that_is_not_finite_fails_its_own_site_alone(asked: list[int]) -> None:
    fleet = Local()
    remote, keys = engine(fleet, []), fold(make_key(0), torch.arange(len(fleet.names)))
    play(remote, 0)
    fleet.heads.clear()
    with pytest.raises(SitesFailed) as found:
        remote.run(METHOD.train, asked, rows_of([1], len(keys)), keys[asked], 0)
    assert list(found.value.failures) == ["site-1"]
    assert fleet.heads == []


def test_the_row_of_a_site_that_is_out_shows_nothing() -> None:
    fleet = Local()
    remote, keys = engine(fleet, []), fold(make_key(0), torch.arange(len(fleet.names)))
    play(remote, 0)
    remote.out = {"site-0": Failure("lost", "")}
    others = list(range(1, len(keys)))
    with pytest.raises(ServerDiverged, match="after the replies of"):
        remote.run(METHOD.train, others, rows_of(others, len(keys)), keys[others], 0)


def test_states_continue_in_another_engine() -> None:
    fleet = Local()
    one, other = engine(fleet, []), engine(fleet, [])
    play(one, 0)
    one.commit(0)
    other.import_states(decode(encode(one.export_states())))
    assert other.committed == one.committed
    assert other.probe.templates.keys() == one.probe.templates.keys()


def test_sites_ask_less_often_while_a_step_takes_long() -> None:
    assert [pause(waited) for waited in (0.0, 0.5, 4.0, 600.0)] == [
        INTERVAL,
        INTERVAL,
        0.2,
        LONGEST,
    ]
