"""Protocols that make results comparable: one strict protocol for all, and each paper's own.

A protocol fixes the data's preparation, partition and split, the model that is scored, the mean
over clients, and the rule that selects a round. It also has defaults of hyper-parameters, rounds
and epochs. Command-line options override most of these choices.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import msgspec

from atoll.core.errors import check_name
from atoll.core.task import NODES

COMPAT: dict[str, str] = {
    "dropout-at-eval": "score with dropout on, as the public codes of FedTAD and FedATH do",
    "test-selection": "report each client's best test score over the models that GCFL cached "
    "before its splits and the last model, as its public code does",
}
"""Known errors of public codes. These switches show how much of a number an error explains."""


@dataclass(frozen=True)
class Protocol:
    """One set of rules: defaults of a run's options, and further rules."""

    name: str
    about: str
    prepare: tuple[str, ...] = ("undirected",)  # names from `data.divide.PREPARATIONS`
    partition: str = "louvain"
    split: str = "stratified"
    ratios: tuple[float, float, float] | None = None  # None: the ratios of the split
    data_seed: int | None = None  # of partition and split; None varies them with the run's seed
    # By partition: numbers of clients in the order in which the public code draws them from one
    # seed. Each number of clients therefore has its own partition and split.
    draws: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    clients: int = 5
    held_out: str | None = None  # a client that never trains, or `newcomer.DRAWN`
    rounds: int = 100
    epochs: int = 3
    evaluate: str = "deployed"  # the result of `method.deploy`, or "local": after training
    weights: str = "tests"  # mean over clients, one of `metrics.WEIGHTINGS`
    select: str = "best-val"  # (mean over clients), "best-val-per-client", or "last"
    settings: Mapping[str, Any] = field(default_factory=dict)  # hyper-parameters, as for `--set`
    of_methods: Mapping[str, Any] = field(default_factory=dict)  # the same, if a method has them
    of_data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # and by the data's name
    clients_of_data: Mapping[str, int] = field(default_factory=dict)
    tasks: tuple[str, ...] = (NODES.name,)
    graph_partition: str = "gcfl-oneds"  # for a set of graphs
    batch_size: int = 128


_TABLES = tomllib.loads(files("atoll").joinpath("recipes/protocols.toml").read_text("utf-8"))
PROTOCOLS = {
    name: msgspec.convert({"name": name, **rules}, Protocol) for name, rules in _TABLES.items()
}


def protocol(name: str) -> Protocol:
    """Return the protocol with this name."""
    check_name("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]
