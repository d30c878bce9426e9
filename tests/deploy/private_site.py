"""One site of a private run, and a server that asks it questions."""

from __future__ import annotations

import itertools

import torch

from atoll.core.random import make_key
from atoll.core.tree import leaves
from atoll.deploy.policy import Policy
from atoll.deploy.site import Site
from atoll.deploy.site_data import read_site_data, write_clients
from atoll.engines.codec import decode, encode
from atoll.engines.fleet import Packet
from atoll.experiment.build import build_method
from atoll.experiment.config import config_text, make_config
from atoll.testing import small_federation

CLIP, NOISE = 0.5, 2.0
DP = f"clip={CLIP},noise={NOISE}"
OPEN = f"{DP},scores=told,randomness=seed"
INDEPENDENT = 0.7
"""Differences of two drawings have deviation 1.41; of 78 numbers, six deviations more than this."""
OPTIONS = {"rounds": 2, "set": {"hidden": 5}}


def make_site(folder, policy=None):
    file = write_clients(small_federation(), folder / "data")[0]
    return Site(read_site_data(file), policy or Policy(), folder / "site")


def begin(site, dp=DP, rounds=9, run="r-0", seeds=1, **more):
    given = {"method": "fedavg", "rounds": rounds, "dp": dp, "seeds": seeds}
    config = config_text(make_config(**given, set={"hidden": 5}))
    return site.answer(Packet({"do": "begin", "run": run, "config": config, **more}, b""))


def model_for(site):
    """A message: the first model of a run."""

    data = site.data
    config = make_config(method="fedavg", set={"hidden": 5})
    net = build_method(config, data.graph.num_features, data.classes).net
    return net.init(make_key(0))


ATTEMPTS = itertools.count()


def ask(site, message, *, key=77, round=0, run="r-0", **change):
    """A question in a separate attempt, because private states of other attempts do not count."""
    head = {"do": "step", "run": run, "owner": "method", "step": "train", "flags": {},
            "round": round, "attempt": str(next(ATTEMPTS)), "state": -2, "key": key,
            **change}  # fmt: skip
    return site.answer(Packet(head, encode(message)))


def numbers(packet):
    return torch.cat([leaf.flatten() for leaf in leaves(decode(packet.body).model)]).double()
