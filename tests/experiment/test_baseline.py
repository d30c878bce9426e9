"""A baseline as a run: it never sees test labels, and impossible ones are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.experiment.baseline import run_baseline
from atoll.experiment.config import make_config
from tests.experiment.pooled import Pooled, federation


def test_a_baseline_never_sees_test_labels() -> None:
    seen: list[Graph] = []

    class Curious(Pooled):
        def fit(self, federation: Federation, seed: int) -> int:
            seen.extend(federation.graphs)
            return 0

    clients = federation()
    config = make_config(method="Curious", data=clients.name, objects=["method", "data"])
    run_baseline(config, Curious(), data=clients)
    for blind, graph in zip(seen, clients.graphs, strict=True):
        assert blind.test.sum() == 0
        assert blind.y[graph.test > 0].sum() == 0


def test_what_a_baseline_cannot_do_is_refused() -> None:
    clients, names = federation(), ["method", "data"]
    config = make_config(method="m", data=clients.name, objects=names, dp="clip=1,noise=1")
    with pytest.raises(ConfigError, match="'m' is a baseline without any; remove dp"):
        run_baseline(config, Pooled(), data=clients)

    class Flat(Pooled):
        def predict(self, model: int, client: int, graph: Graph) -> Tensor:
            return torch.zeros(graph.num_nodes)

    plain = make_config(method="m", data=clients.name, objects=names)
    with pytest.raises(ConfigError, match=r"Flat.predict gave scores of shape .* for client 0"):
        run_baseline(plain, Flat(), data=clients)
