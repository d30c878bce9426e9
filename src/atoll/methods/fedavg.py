"""FedAvg: train locally, then average the models, weighted by size (McMahan et al., 2017).

    θ <- Σ_i n_i θ_i / Σ_i n_i   over the participants, n_i = nodes (or graphs) of client i

Wire, per client and round:  down  model      up  model, num_nodes
Private state: the optimizer's moments and the network's private layers. Moments persist across
rounds, as is usual; `optimizer_state=reset` clears them in every round.
Floats per client and round: 2P + 1 for P parameters.
Departures from the reference code: none.
"""

from dataclasses import dataclass

from atoll.core.aggregate import Aggregate, Mean
from atoll.core.hyper import OptimizerState, WeightBy
from atoll.core.task import TASKS
from atoll.core.training import Averaging


@dataclass(frozen=True)
class FedAvg(Averaging):
    """Federated averaging. `core.training.Averaging` defines the steps of server and client."""

    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "keep"
    aggregate: Aggregate = Mean()

    tasks = tuple(TASKS)
    paper = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized "
        "Data, AISTATS 2017"
    )
