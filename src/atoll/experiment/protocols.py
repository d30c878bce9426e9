"""How results are made comparable: one strict rule for all, and each paper's own rules.

A protocol fixes the data's preparation, partition and split, what is scored, how it is averaged and
selected, and the defaults of width, rate and budget. Options on the command line win over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.core.errors import check_name
from atoll.core.task import GRAPHS, NODES, TASKS

COMPAT: dict[str, str] = {
    "dropout-at-eval": "score with dropout on, as the public codes of FedTAD and FedATH do",
    "test-selection": "report each client's best test score over the models that GCFL put aside "
    "before its splits and the last one, as its public code does",
}
"""Known errors of public codes; switched on, they show how much of a number they explain."""


@dataclass(frozen=True)
class Protocol:
    """One set of rules: defaults of a run's options, and what they do not cover."""

    name: str
    about: str
    prepare: tuple[str, ...] = ("undirected",)  # names from `data.prepare`, in order
    partition: str = "louvain"
    split: str = "stratified"
    ratios: tuple[float, float, float] | None = None  # where not the split's own
    data_seed: int | None = None  # of partition and split; None varies them with the run's seed
    # By partition, numbers of clients in the order in which the public code draws them, one after
    # the other from one seed: each has another partition and split.
    draws: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    clients: int = 5
    rounds: int = 100
    epochs: int = 3
    evaluate: str = "deployed"  # what `method.deploy` gives; "local" is the model after training
    weights: str = "tests"  # mean over clients, one of `metrics.WEIGHTINGS`
    select: str = "best-val"  # (mean over clients), "best-val-per-client", or "last"
    settings: Mapping[str, Any] = field(default_factory=dict)  # hyper-parameters, as for `--set`
    of_methods: Mapping[str, Any] = field(default_factory=dict)  # the same, if a method has them
    of_data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # and by the data's name
    clients_of_data: Mapping[str, int] = field(default_factory=dict)
    tasks: tuple[str, ...] = (NODES.name,)
    graph_partition: str = "gcfl-oneds"  # for a set of graphs
    batch_size: int = 128


_GCFL_EPSILONS = {
    "proteins": {"eps1": 0.03, "eps2": 0.06, "seq_length": 10},
    "imdb-binary": {"eps1": 0.025, "eps2": 0.045, "seq_length": 5},
    "nci1": {"eps1": 0.04, "eps2": 0.08, "seq_length": 5},
    "molecules": {"eps1": 0.07, "eps2": 0.28, "seq_length": 5},
    "biochem": {"eps1": 0.07, "eps2": 0.35, "seq_length": 5},
    "mix": {"eps1": 0.08, "eps2": 0.4, "seq_length": 5},
}
"""When GCFL splits, from the run files of its public code."""
_FEDTAD = Protocol(
    "fedtad",
    "FedTAD's tables: python-louvain, per-class split, the broadcast global model",
    partition="louvain-fedtad",
    split="fedtad",
    data_seed=2024,
    clients=10,
    weights="nodes",
)
_ALL = (
    Protocol(
        "strict",
        "one rule for every method: deployed model, best mean validation round, data vary by seed",
        tasks=tuple(TASKS),
    ),
    Protocol(
        "openfgl",
        "OpenFGL's defaults: its Louvain packing and split, the local model after training",
        partition="louvain-openfgl",
        split="openfgl",
        data_seed=2024,
        clients=10,
        evaluate="local",
        weights="nodes",
    ),
    _FEDTAD,
    replace(
        _FEDTAD,
        name="fedath",
        about="FedATH's tables: FedTAD's data, lr 1e-3, the local model after training "
        "(docs/results)",
        evaluate="local",
        settings={"lr": 1e-3},
    ),
    Protocol(
        "fediih",
        "FedIIH's and FED-PUB's tables: largest component, METIS, global split, local models",
        prepare=("undirected", "largest-component", "words-normalized"),
        partition="metis",
        split="global",
        data_seed=1234,
        clients=10,
        epochs=1,
        draws={"metis": (5, 10, 20), "metis-overlap": (10, 30, 50)},
        evaluate="local",
        weights="uniform",
        select="best-val-per-client",
        settings={"hidden": 128, "weight_decay": 1e-6},
    ),
    Protocol(
        "gcfl",
        "GCFL's tables: graph classification, last round, every client alike",
        prepare=(),
        partition="gcfl-oneds",
        split="gcfl",
        data_seed=123,
        clients=10,
        rounds=200,
        epochs=1,
        weights="uniform",
        select="last",
        settings={"lr": 1e-3},
        of_methods={"weight_by": "train"},
        of_data=_GCFL_EPSILONS,
        clients_of_data={"nci1": 30},
        tasks=(GRAPHS.name,),
    ),
)
PROTOCOLS: dict[str, Protocol] = {rules.name: rules for rules in _ALL}


def protocol(name: str) -> Protocol:
    """The protocol with this name."""
    check_name("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]
