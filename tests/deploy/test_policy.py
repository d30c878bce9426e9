"""An owner's policy: what it refuses, and files that cannot be used."""

from __future__ import annotations

import json

import pytest

from atoll.core.errors import ConfigError
from atoll.deploy.policy import Policy, Refusal, read_policy
from atoll.engines.fleet import SitesFailed
from atoll.methods import FedAvg
from atoll.testing import small_federation
from tests.deploy.private_site import (
    DP,
    OPEN,
    OPTIONS,
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("method = ['fedavg']", "did you mean 'methods'"),
        ("methods = ['fedavgg']", "did you mean 'fedavg'"),
        ("rounds = 'many'", "cannot be used"),
        ("disclose = 'all'", "disclose takes a list"),
        ("rounds = ", "cannot be read"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused(text, problem, tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_policy(file)


def test_a_policy_file_that_is_not_there_is_not_the_default(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_policy(tmp_path / "none.toml")


@pytest.mark.parametrize("round", [-2, 1])
def test_a_round_beyond_the_policy_is_refused(round):
    with pytest.raises(Refusal, match="allows 1 rounds"):
        Policy(rounds=1).check_step(FedAvg(None).train, round)


@pytest.mark.parametrize(
    ("policy", "dp", "reason"),
    [
        (Policy(noise=1.0), None, "demands differential privacy, but the run has none"),
        (Policy(epsilon=9.0), None, "demands differential privacy, but the run has none"),
        (Policy(noise=2.5), DP, "demands noise of at least 2.5, but the run has 2"),
        (Policy(noise=1.0), OPEN, "the noise would come from the seed"),
        (Policy(noise=1.0), f"{DP},scores=told", "scores would be told in the clear"),
        (
            Policy(epsilon=1.0),
            DP,
            "allows epsilon 1 at delta 1e-05 over all its runs, but this run",
        ),
        (Policy(epsilon=99.0), "clip=1,noise=0", "would make it inf"),
    ],
)
def test_an_owner_can_demand_privacy(policy, dp, reason, make_room):
    room = make_room(small_federation())
    sites = {**room.sites(), "site-2": room.sites(policy)["site-2"]}
    order = room.order("fedavg", **OPTIONS, **({} if dp is None else {"dp": dp}))
    with pytest.raises(SitesFailed) as error:
        room.run(order, room.fleet(sites=sites))
    assert str(error.value).startswith("site-2: its policy ")
    assert reason in str(error.value)
    sent = [json.loads(line) for line in sites["site-2"].audit.path.read_text().splitlines()]
    assert not [event for event in sent if event["event"] == "sent"]
