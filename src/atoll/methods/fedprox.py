"""FedProx: FedAvg with a proximal term towards the received model (Li et al., 2020).

    min_w  f_i(w) + μ/2 ‖w - θ‖²,   i.e. gradient  ∇f_i(w) + μ (w - θ);   θ <- Σ_i n_i θ_i / Σ_i n_i

Wire, per client and round:  down  model      up  model, num_nodes
Private state: the optimizer's moments and the network's private layers.
Floats per client and round: 2P + 1 for P parameters.
Departures from the reference code: clients are sampled uniformly and averaged by size, as in the
authors' code (the paper samples by size and averages with equal weights). The gradient μ (w - θ) is
added to that of f_i. The result is the same, and no squared norm is differentiated. Adam
preconditions the term like the rest of the gradient; `optimizer=sgd` is the paper's step.
"""

from dataclasses import dataclass
from typing import Annotated

from atoll.core.aggregate import Aggregate, Mean
from atoll.core.hyper import NonNegative, OptimizerState, WeightBy
from atoll.core.optim import pull
from atoll.core.space import USUAL, Real, paper_grid
from atoll.core.task import TASKS
from atoll.core.training import Averaging
from atoll.core.tree import Tree


@dataclass(frozen=True)
class FedProx(Averaging):
    """Federated averaging with a proximal term."""

    mu: Annotated[NonNegative, "μ: weight of the pull towards the received model"] = 0.01
    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "keep"
    aggregate: Aggregate = Mean()

    space = USUAL | {"mu": Real(1e-4, 10, log=True)}
    grids = paper_grid(mu=(0.001, 0.01, 0.1, 1.0))
    tasks = tuple(TASKS)
    paper = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    def bend(self, grads: Tree, params: Tree, received: Tree) -> Tree:
        return pull(grads, params, received, self.mu)
