"""Networks on polynomials of an adjacency: GAMLP mixes hops, ChebNet sums Chebyshev terms.

Both networks multiply X by their weights first and propagate the narrow product. That is exact,
because neither has dropout on its input. Neither stores an (N, D) product of hops.

Shapes: x (N, D), logits (N, C), scores and weights of hops (N, K + 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.graph import Graph, View
from atoll.core.hyper import Dropout, Hidden, Layers, OneOrMore
from atoll.core.method import Embedder
from atoll.core.random import dropout, fold
from atoll.core.tree import Tree
from atoll.nn import views
from atoll.nn.init import apply_linear, glorot, linear, zeros
from atoll.nn.nets import Layered
from atoll.nn.ops import matmul


@dataclass(frozen=True)
class GAMLP(Embedder):
    """Graph attention MLP (Zhang et al., 2022), as FedGTA's authors use it.

        X_k = Â^k X,   k = 0..K,   Â = D^-1/2 (A + I) D^-1/2.
        w(v) = softmax_k sigmoid(u·[X_0(v) ‖ … ‖ X_K(v) ‖ X_k(v)] + b).
        H = Σ_k w_k X_k,   then an MLP with one PReLU slope for all its layers.

    The concatenated hops are the attention's reference, without a separate network. The weight of
    a hop is bounded: it lies between 0.109 and 0.475 for K = 3. So no hop can be switched off.
    `hop_weights=sgl` repeats a fault of FedGTA's public code. That code stacks the scores hop by
    hop and cuts them into rows of K + 1 without a transpose. A node then reads the scores of other
    nodes: of training nodes in training, and of any node in prediction. The code also averages a
    linear layer that nothing uses, which Atoll omits.
    """

    features: int
    classes: int
    hidden: Hidden = 64
    layers: Layers = 3
    hops: Annotated[OneOrMore, "K: number of products with the adjacency"] = 3
    dropout: Dropout = 0.5
    hop_weights: Annotated[
        Literal["nodes", "sgl"], "source of a node's hop weights; sgl: a fault of public code"
    ] = "nodes"

    @property
    def reach(self) -> int | None:
        """The number of hops that logits depend on, or None with `sgl`, which reads all nodes."""
        return self.hops if self.hop_weights == "nodes" else None

    @property
    def embeds(self) -> bool:
        """Whether the network has a hidden layer."""
        return self.layers > 1

    @property
    def views(self) -> Mapping[str, View]:
        return {"gcn": views.gcn_adjacency, "x": views.features}

    def init(self, key: Tensor) -> Tree:
        widths = pairwise([self.features, *[self.hidden] * (self.layers - 1), self.classes])
        layers = [
            {"weight": math.sqrt(2) * glorot(fold(key, n), *shape), "bias": zeros(key, shape[1])}
            for n, shape in enumerate(widths)
        ]
        attention = linear(key, (self.hops + 2) * self.features, 1, "attention")
        return {"attention": attention, "slope": zeros(key, 1) + 0.25, "layers": layers}

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return logits, (N, C). A key turns dropout on. With `sgl` a key stands for training."""
        first, *rest = params["layers"]
        used = graph.real if key is None else graph.train
        weights = self.weights(params["attention"], graph, used)
        seen = self._propagated(first["weight"], graph)
        h: Tensor = (torch.stack(seen, -1) * weights.unsqueeze(1)).sum(-1) + first["bias"]
        for number, layer in enumerate(rest, start=1):
            h = apply_linear(layer, self._dropped(params, h, number, graph, key))
        return h

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return the last layer's input before its activation and dropout, (N, hidden)."""
        return GAMLP.__call__(self, {**params, "layers": params["layers"][:-1]}, graph, key)

    def logits(self, params: Tree, h: Tensor, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return logits, (N, C), from the output `h` of `embed`."""
        number = len(params["layers"]) - 1
        return apply_linear(params["layers"][-1], self._dropped(params, h, number, graph, key))

    def weights(self, attention: Tree, graph: Graph, used: Tensor) -> Tensor:
        """Return the hop weights of every node, (N, K + 1). Only `sgl` reads the mask `used`."""
        # u·[X_0 … X_K] is the same for all hops, so a hop needs only one more column.
        scored = self._propagated(attention["weight"].reshape(self.hops + 2, -1).T, graph)
        base = sum((seen[:, k] for k, seen in enumerate(scored)), attention["bias"])
        scores = torch.stack([base + seen[:, -1] for seen in scored], dim=-1)
        if self.hop_weights == "sgl":
            scores = cut_without_transpose(scores, used)
        return torch.softmax(torch.sigmoid(scores), dim=-1)

    def _propagated(self, weight: Tensor, graph: Graph) -> list[Tensor]:
        """Compute X_k W for every hop, (N, H) each."""
        found = [matmul(graph.views["x"], weight)]
        for _ in range(self.hops):
            found.append(matmul(graph.views["gcn"], found[-1]))
        return found

    def _dropped(
        self, params: Tree, h: Tensor, number: int, graph: Graph, key: Tensor | None
    ) -> Tensor:
        h = functional.prelu(h, params["slope"])
        return dropout(h, key, graph.ids, self.dropout, "dropout", number)


def cut_without_transpose(scores: Tensor, used: Tensor) -> Tensor:
    """Stack the scores of used nodes hop by hop, and cut them into rows of K + 1 (`sgl`)."""
    count, total = scores.shape[1], used.sum().long().clamp(min=1)
    order = torch.argsort(used, descending=True, stable=True)  # used nodes first, as numbered
    own = (used.cumsum(0).long() - 1).clamp(min=0).unsqueeze(1)
    number = own * count + torch.arange(count, device=scores.device)
    return scores[order[number % total], (number // total).clamp(max=count - 1)]


@dataclass(frozen=True)
class ChebNet(Layered):
    """Chebyshev network (Defferrard et al., 2016): Σ_j T_j(M) H W_j + b, j below `terms`.

    M = L - I = -D^-1/2 A D^-1/2, the scaled Laplacian for λ_max = 2. `matrix=adjacency` is the
    network of AdaFGL's public code, which uses Â = D^-1/2 (A + I) D^-1/2 as M. With its two terms
    it is a low-pass filter, H W_0 + Â H W_1. As in that code, the rows of a weight are ordered by
    feature, with the terms of a feature next to each other.
    """

    terms: Annotated[OneOrMore, "number of Chebyshev polynomials, including T_0"] = 2
    matrix: Annotated[
        Literal["laplacian", "adjacency"], "M: scaled Laplacian, or the adjacency of AdaFGL's code"
    ] = "laplacian"

    @property
    def reach(self) -> int:
        return self.layers * (self.terms - 1)

    @property
    def views(self) -> Mapping[str, View]:
        if self.matrix == "adjacency":
            return {"gcn": views.gcn_adjacency, "x": views.features}
        return {"bare": views.bare_adjacency, "x": views.features}

    def init(self, key: Tensor) -> Tree:
        widths = enumerate(pairwise(self.widths))
        return [linear(key, self.terms * n_in, n_out, layer) for layer, (n_in, n_out) in widths]

    def _first(self, layer: Tree, graph: Graph) -> Tensor:
        return self._filtered(layer, matmul(graph.views["x"], self._side_by_side(layer)), graph)

    def _further(self, layer: Tree, h: Tensor, number: int, graph: Graph) -> Tensor:
        return self._filtered(layer, matmul(h, self._side_by_side(layer)), graph)

    def _side_by_side(self, layer: Tree) -> Tensor:
        """Return [W_0 … W_(terms - 1)], (D, terms * H)."""
        weight: Tensor = layer["weight"]
        return weight.reshape(len(weight) // self.terms, -1)

    def _filtered(self, layer: Tree, products: Tensor, graph: Graph) -> Tensor:
        """Return Σ_j T_j(M) P_j + b, given the products P_j = H W_j (Clenshaw's recurrence)."""
        sign, name = (1, "gcn") if self.matrix == "adjacency" else (-1, "bare")
        *rest, ahead = products.chunk(self.terms, dim=1)
        behind = torch.zeros_like(ahead)
        for number in reversed(range(len(rest))):
            step = sign * (2 if number else 1) * matmul(graph.views[name], ahead)
            ahead, behind = rest[number] + step - behind, ahead
        out: Tensor = ahead + layer["bias"]
        return out
