"""FedAvg with faults, switched on by files in the folder that ATOLL_TEST_FAULTS names.

`slow-N` makes the site with N nodes sleep as many seconds as the file says, `nan-N` makes it send a
NaN past its own checks.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from atoll.core.message import ToAll
from atoll.core.method import client_step
from atoll.methods import FedAvg


def fault(kind, graph):
    path = Path(os.environ.get("ATOLL_TEST_FAULTS", "/nonexistent")) / f"{kind}-{graph.num_nodes}"
    return path.read_text() if path.exists() else ""


@dataclass(frozen=True)
class Faulty(FedAvg):
    paper: ClassVar[str] = "none"

    def round(self, server, clients):
        return super().round(server, clients)

    @client_step
    def train(self, graph, model, state, key):
        if seconds := fault("slow", graph):
            time.sleep(float(seconds))
        return FedAvg.train.function(self, graph, model, state, key)


__all__ = ["Faulty", "ToAll"]
