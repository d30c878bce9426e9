"""Atoll: federated graph learning, from a simulation on a laptop to a real federation.

    >>> import atoll
    >>> federation = atoll.partition(atoll.load("lagoon"), "louvain", clients=5)
    >>> result = atoll.run("fedavg", federation, rounds=20)
    >>> result.metrics()["test_accuracy"]["mean"] > 0.7
    True

Names are imported at their first use, so `import atoll` is fast.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from atoll import data as data
    from atoll import methods as methods
    from atoll import nn as nn
    from atoll import testing as testing
    from atoll.api import Result as Result
    from atoll.api import load as load
    from atoll.api import partition as partition
    from atoll.api import read_result as read_result
    from atoll.api import resume as resume
    from atoll.api import run as run
    from atoll.api import save as save
    from atoll.core.aggregate import Aggregate as Aggregate
    from atoll.core.aggregate import Mean as Mean
    from atoll.core.aggregate import Median as Median
    from atoll.core.aggregate import Rule as Rule
    from atoll.core.aggregate import Update as Update
    from atoll.core.aggregate import aggregated as aggregated
    from atoll.core.aggregate import average as average
    from atoll.core.aggregate import first_server as first_server
    from atoll.core.aggregate import mix as mix
    from atoll.core.aggregate import model_of as model_of
    from atoll.core.aggregate import next_server as next_server
    from atoll.core.aggregate import put as put
    from atoll.core.aggregate import spread as spread
    from atoll.core.errors import AtollError as AtollError
    from atoll.core.errors import ConfigError as ConfigError
    from atoll.core.federation import Federation as Federation
    from atoll.core.fit import fit as fit
    from atoll.core.graph import Graph as Graph
    from atoll.core.hyper import Epochs as Epochs
    from atoll.core.hyper import Limits as Limits
    from atoll.core.hyper import NonNegative as NonNegative
    from atoll.core.hyper import OneOrMore as OneOrMore
    from atoll.core.hyper import OptimizerState as OptimizerState
    from atoll.core.hyper import Positive as Positive
    from atoll.core.hyper import Share as Share
    from atoll.core.hyper import ShareBelowOne as ShareBelowOne
    from atoll.core.hyper import WeightBy as WeightBy
    from atoll.core.hyper import ZeroOrMore as ZeroOrMore
    from atoll.core.losses import cross_entropy as cross_entropy
    from atoll.core.losses import masked_mean as masked_mean
    from atoll.core.losses import sq_distance as sq_distance
    from atoll.core.losses import unit as unit
    from atoll.core.message import ToAll as ToAll
    from atoll.core.message import ToEach as ToEach
    from atoll.core.method import Clients as Clients
    from atoll.core.method import Method as Method
    from atoll.core.method import Net as Net
    from atoll.core.method import client_step as client_step
    from atoll.core.optim import SGD as SGD
    from atoll.core.optim import Adam as Adam
    from atoll.core.optim import Optimizer as Optimizer
    from atoll.core.private_layers import Private as Private
    from atoll.core.private_layers import fit_received as fit_received
    from atoll.core.private_layers import init_shared as init_shared
    from atoll.core.random import fold as fold
    from atoll.core.space import USUAL as USUAL
    from atoll.core.space import OneOf as OneOf
    from atoll.core.space import Real as Real
    from atoll.core.space import Whole as Whole
    from atoll.core.training import Averaging as Averaging
    from atoll.core.tree import Empty as Empty
    from atoll.core.tree import Tree as Tree
    from atoll.core.tree import leaves as leaves
    from atoll.core.tree import record as record
    from atoll.core.tree import tree_map as tree_map
    from atoll.core.wrapper import Wrapper as Wrapper
    from atoll.experiment.rounds import Experiment as Experiment
    from atoll.studies.compare.comparison import compare as compare
    from atoll.studies.tune.tuning import tune as tune

_NAMES = {
    "api": "Result load partition read_result resume run save",
    "core.aggregate": "Aggregate Mean Median Rule Update aggregated average first_server mix "
    "model_of next_server put spread",
    "core.errors": "AtollError ConfigError",
    "core.federation": "Federation",
    "core.fit": "fit",
    "core.graph": "Graph",
    "core.hyper": "Epochs Limits NonNegative OneOrMore OptimizerState Positive Share ShareBelowOne "
    "WeightBy ZeroOrMore",
    "core.losses": "cross_entropy masked_mean sq_distance unit",
    "core.message": "ToAll ToEach",
    "core.method": "Clients Method Net client_step",
    "core.optim": "SGD Adam Optimizer",
    "core.private_layers": "Private fit_received init_shared",
    "core.random": "fold",
    "core.space": "USUAL OneOf Real Whole",
    "core.training": "Averaging",
    "core.tree": "Empty Tree leaves record tree_map",
    "core.wrapper": "Wrapper",
    "experiment.rounds": "Experiment",
    "studies.compare.comparison": "compare",
    "studies.tune.tuning": "tune",
}
"""The public names by module. They include everything that a method's file needs."""
_HOMES = {name: f"atoll.{home}" for home, names in _NAMES.items() for name in names.split()}
_MODULES = ("methods", "nn", "data", "testing")

if not TYPE_CHECKING:  # a type checker reads the imports above
    __all__ = list(_HOMES | dict.fromkeys(_MODULES))


def __getattr__(name: str) -> object:
    if name in _HOMES:
        found: object = getattr(import_module(_HOMES[name]), name)
        return found
    if name in _MODULES:
        return import_module(f"atoll.{name}")
    raise AttributeError(f"module 'atoll' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})


if "IPython" in sys.modules:  # HTML representations of objects in a notebook
    import_module("atoll.present.notebook").register()
