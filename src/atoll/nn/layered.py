"""Networks that are one layer after another, the first of which reads the graph's features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.graph import Graph
from atoll.core.hyper import Dropout, Hidden, Layers
from atoll.core.random import dropout
from atoll.core.tree import Tree


@dataclass(frozen=True)
class Layered(ABC):
    """Parameters are a list, a tree for every layer; the last layer makes the logits."""

    features: int
    classes: int
    hidden: Hidden = 64
    layers: Layers = 2
    dropout: Dropout = 0.5

    @property
    def widths(self) -> list[int]:
        """Widths of the input and of every layer's output."""
        return [self.features, *[self.hidden] * (self.layers - 1), self.classes]

    @property
    def embeds(self) -> bool:
        """Whether there is a hidden layer."""
        return self.layers > 1

    @abstractmethod
    def _first(self, layer: Tree, graph: Graph) -> Tensor:
        """The first layer, without its activation."""

    @abstractmethod
    def _further(self, layer: Tree, h: Tensor, number: int, graph: Graph) -> Tensor:
        """Layer `number` on what came before, after its activation and dropout."""

    def _activation(self, h: Tensor) -> Tensor:
        return torch.relu(h)

    def _next(
        self, layer: Tree, h: Tensor, number: int, graph: Graph, key: Tensor | None
    ) -> Tensor:
        """Activation and dropout of what came before, then layer `number` on it."""
        return self._further(layer, self._dropped(h, number, graph, key), number, graph)

    def _dropped(self, h: Tensor, number: int, graph: Graph, key: Tensor | None) -> Tensor:
        return dropout(self._activation(h), key, graph.ids, self.dropout, "dropout", number)

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Logits, (N, C); a key turns dropout on."""
        h = self._first(params[0], graph)
        for number, layer in enumerate(params[1:], start=1):
            h = self._next(layer, h, number, graph, key)
        return h

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """What the last layer reads, before its activation and dropout, (N, hidden)."""
        return Layered.__call__(self, params[:-1], graph, key)

    def logits(
        self, params: Tree, embedding: Tensor, graph: Graph, key: Tensor | None = None
    ) -> Tensor:
        """The last layer on what `embed` gave, (N, C)."""
        return self._next(params[-1], embedding, len(params) - 1, graph, key)
