"""A conditional generator of node features: noise and a label in, features out (FedTAD's code).

    x̂ = W4 tanh(W3 tanh(W2 tanh(W1 [z ‖ e_label])))      widths 64, 128, 256, features

Shapes: noise (B, noise), labels (B,), out (B, features).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from atoll.core.random import fold, normal
from atoll.core.tree import Tree
from atoll.nn.init import kaiming, kaiming_bias


@dataclass(frozen=True)
class Generator:
    """The label's embedding is as wide as there are classes."""

    features: int
    classes: int
    noise: int = 32
    widths: tuple[int, ...] = (64, 128, 256)

    def init(self, key: Tensor) -> Tree:
        widths = [self.noise + self.classes, *self.widths, self.features]
        shape = (self.classes, self.classes)
        return {
            "labels": normal(fold(key, "labels"), shape, torch.get_default_dtype()),
            "layers": [
                {
                    "weight": kaiming(fold(key, "weight", layer), n_in, n_out),
                    "bias": kaiming_bias(fold(key, "bias", layer), n_in, n_out),
                }
                for layer, (n_in, n_out) in enumerate(pairwise(widths))
            ],
        }

    def __call__(self, params: Tree, noise: Tensor, labels: Tensor) -> Tensor:
        h = torch.cat([noise, params["labels"][labels]], dim=1)
        *hidden, last = params["layers"]
        for layer in hidden:
            h = torch.tanh(h @ layer["weight"] + layer["bias"])
        out: Tensor = h @ last["weight"] + last["bias"]
        return out
