"""FedSage+ with a narrow network and generator."""

from __future__ import annotations

from typing import Any

from atoll.nn import GraphSAGE
from atoll.testing import CLASSES, FEATURES

NET = GraphSAGE(FEATURES, CLASSES, hidden=6, dropout=0.4)
SMALL: dict[str, Any] = {
    "narrow": 6, "wide": 8, "latent": 5, "p_max": 3, "generator_epochs": 3, "exchanges": 2,
    "exchanged_nodes": 7, "generator_lr": 0.01,
}  # fmt: skip
