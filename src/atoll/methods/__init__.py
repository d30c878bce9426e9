"""Every method, by the name that the command line knows it by. One file each."""

from __future__ import annotations

from atoll.core.errors import unknown
from atoll.core.method import Method
from atoll.methods.fedath import FedATH
from atoll.methods.fedavg import FedAvg
from atoll.methods.fedprox import FedProx
from atoll.methods.local import Local

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedath": FedATH,
}


def method_class(name: str) -> type[Method]:
    """The method with this name."""
    if name.lower() not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name.lower()]


__all__ = ["METHODS", "FedATH", "FedAvg", "FedProx", "Local", "method_class"]
