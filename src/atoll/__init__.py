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
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from atoll import methods, nn
    from atoll.api import Result, load, partition, read_result, resume, run, save
    from atoll.core.federation import Federation
    from atoll.core.method import Method, client_step
    from atoll.experiment.rounds import Experiment
    from atoll.studies.compare.comparison import compare
    from atoll.studies.tune.tuning import tune

_HOMES = {
    "load": "atoll.api",
    "partition": "atoll.api",
    "save": "atoll.api",
    "compare": "atoll.studies.compare.comparison",
    "run": "atoll.api",
    "resume": "atoll.api",
    "read_result": "atoll.api",
    "tune": "atoll.studies.tune.tuning",
    "Experiment": "atoll.experiment.rounds",
    "Result": "atoll.api",
    "Federation": "atoll.core.federation",
    "Method": "atoll.core.method",
    "client_step": "atoll.core.method",
}
_MODULES = ("methods", "nn", "data", "testing")

__all__ = [
    "Experiment",
    "Federation",
    "Method",
    "Result",
    "client_step",
    "compare",
    "load",
    "methods",
    "nn",
    "partition",
    "read_result",
    "resume",
    "run",
    "save",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"atoll.{name}")
    raise AttributeError(f"module 'atoll' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
