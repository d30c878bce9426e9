"""Everything that one seed's rounds measured."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from atoll.core.federation import Federation
from atoll.core.task import ROLES
from atoll.core.tree import Tree
from atoll.engines.ledger import Ledger
from atoll.experiment.metrics import METRICS

SCORED = ("deployed", "local")


@dataclass
class History:
    """Everything measured, round by round; `scores` are lists over rounds of (K, 3, 5).

    The axes are client, role and metric.
    """

    counts: np.ndarray  # training, validation and test nodes (or graphs) of each client, (K, 3)
    nodes: np.ndarray  # nodes (or graphs) of each client, (K,)
    scores: dict[str, list[np.ndarray]] = field(default_factory=lambda: {k: [] for k in SCORED})
    seconds: list[float] = field(default_factory=list)  # of each round, training and scoring
    cached: list[list[int]] = field(default_factory=list)  # rounds of models put aside, by client
    ledger: Ledger | None = None  # None where a run is only read back

    @property
    def rounds(self) -> int:
        return len(self.seconds)

    def array(self, scored: str, metric: str, role: str) -> np.ndarray:
        """One number for each round and client, (R, K); NaN where a client has none."""
        stacked = np.stack(self.scores[scored])
        return np.asarray(stacked[:, :, ROLES.index(role), METRICS.index(metric)])

    def restore(self, checkpoint: Tree) -> None:
        """Continue with the scores and seconds of a checkpoint."""
        scores = checkpoint["scores"].items()
        self.scores = {name: list(rounds.numpy()) for name, rounds in scores}
        self.seconds = checkpoint["seconds"].tolist()


def empty_history(federation: Federation) -> History:
    """The clients' sizes, and nothing measured yet."""
    masks = [torch.stack([g.train, g.val, g.test]).sum(1) for g in federation.graphs]
    return History(
        counts=torch.stack(masks).numpy().astype(np.int64),
        nodes=np.array([int(g.size("nodes")) for g in federation.graphs]),
    )
