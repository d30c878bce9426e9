"""Atoll: federated graph learning, every method in one place, from a laptop to a real federation.

    >>> import atoll
    >>> federation = atoll.partition(atoll.load("lagoon"), "louvain", clients=5)
    >>> result = atoll.run("fedavg", federation, rounds=20)
    >>> result.metrics()["test_accuracy"]["mean"] > 0.7
    True

Names are imported when they are first used, so that `import atoll` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from atoll import data, methods, nn, testing
    from atoll.api import Result, load, partition, read_result, resume, run, save
    from atoll.core.aggregate import (
        Aggregate,
        Mean,
        Median,
        Rule,
        Update,
        aggregated,
        average,
        first_server,
        mix,
        model_of,
        next_server,
        put,
        spread,
    )
    from atoll.core.errors import AtollError, ConfigError
    from atoll.core.federation import Federation
    from atoll.core.fit import fit
    from atoll.core.graph import Graph
    from atoll.core.hyper import (
        Epochs,
        Limits,
        NonNegative,
        OneOrMore,
        OptimizerState,
        Positive,
        Share,
        ShareBelowOne,
        WeightBy,
        ZeroOrMore,
    )
    from atoll.core.losses import cross_entropy, masked_mean, sq_distance
    from atoll.core.message import ToAll, ToEach
    from atoll.core.method import Clients, Method, Net, client_step
    from atoll.core.optim import SGD, Adam, Optimizer
    from atoll.core.private_layers import Private, fit_received, init_shared
    from atoll.core.random import fold
    from atoll.core.space import USUAL, OneOf, Real, Whole
    from atoll.core.tree import Empty, Tree, leaves, record, tree_map
    from atoll.core.wrapper import Wrapper
    from atoll.experiment.rounds import Experiment
    from atoll.studies.compare.comparison import compare
    from atoll.studies.tune.tuning import tune

_NAMES = {
    "atoll.api": ("Result", "load", "partition", "read_result", "resume", "run", "save"),
    "atoll.core.aggregate": (
        "Aggregate",
        "Mean",
        "Median",
        "Rule",
        "Update",
        "aggregated",
        "average",
        "first_server",
        "mix",
        "model_of",
        "next_server",
        "put",
        "spread",
    ),
    "atoll.core.errors": ("AtollError", "ConfigError"),
    "atoll.core.federation": ("Federation",),
    "atoll.core.fit": ("fit",),
    "atoll.core.graph": ("Graph",),
    "atoll.core.hyper": (
        "Epochs",
        "Limits",
        "NonNegative",
        "OneOrMore",
        "OptimizerState",
        "Positive",
        "Share",
        "ShareBelowOne",
        "WeightBy",
        "ZeroOrMore",
    ),
    "atoll.core.losses": ("cross_entropy", "masked_mean", "sq_distance"),
    "atoll.core.message": ("ToAll", "ToEach"),
    "atoll.core.method": ("Clients", "Method", "Net", "client_step"),
    "atoll.core.optim": ("SGD", "Adam", "Optimizer"),
    "atoll.core.private_layers": ("Private", "fit_received", "init_shared"),
    "atoll.core.random": ("fold",),
    "atoll.core.space": ("USUAL", "OneOf", "Real", "Whole"),
    "atoll.core.tree": ("Empty", "Tree", "leaves", "record", "tree_map"),
    "atoll.core.wrapper": ("Wrapper",),
    "atoll.experiment.rounds": ("Experiment",),
    "atoll.studies.compare.comparison": ("compare",),
    "atoll.studies.tune.tuning": ("tune",),
}
"""The public names by the module that has them. Whatever a method's file needs is among them."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("methods", "nn", "data", "testing")

__all__ = [
    "SGD",
    "USUAL",
    "Adam",
    "Aggregate",
    "AtollError",
    "Clients",
    "ConfigError",
    "Empty",
    "Epochs",
    "Experiment",
    "Federation",
    "Graph",
    "Limits",
    "Mean",
    "Median",
    "Method",
    "Net",
    "NonNegative",
    "OneOf",
    "OneOrMore",
    "Optimizer",
    "OptimizerState",
    "Positive",
    "Private",
    "Real",
    "Result",
    "Rule",
    "Share",
    "ShareBelowOne",
    "ToAll",
    "ToEach",
    "Tree",
    "Update",
    "WeightBy",
    "Whole",
    "Wrapper",
    "ZeroOrMore",
    "aggregated",
    "average",
    "client_step",
    "compare",
    "cross_entropy",
    "data",
    "first_server",
    "fit",
    "fit_received",
    "fold",
    "init_shared",
    "leaves",
    "load",
    "masked_mean",
    "methods",
    "mix",
    "model_of",
    "next_server",
    "nn",
    "partition",
    "put",
    "read_result",
    "record",
    "resume",
    "run",
    "save",
    "spread",
    "sq_distance",
    "testing",
    "tree_map",
    "tune",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        found: object = getattr(import_module(_HOMES[name]), name)
        return found
    if name in _MODULES:
        return import_module(f"atoll.{name}")
    raise AttributeError(f"module 'atoll' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
