"""FedSage: FedAvg of GraphSAGE, with equal weights of all clients (Zhang et al., 2021).

    θ <- mean_i θ_i   over the participants;   θ is a GraphSAGE with the mean aggregator

Wire, per client and round:  down  model      up  model (and one weight)
Private state: the optimizer's moments.
Floats per client and round: 2P + 1 for P parameters.
Departures from the reference code: clients use all neighbours and full batches instead of five
sampled neighbours per hop and batches of 32. All clients start from one common model instead of the
mean of their own. The network has two layers of one width, as in OpenFGL, instead of widths 64 and
32 and a dense layer.
"""

from dataclasses import dataclass

from torch import Tensor

from atoll.core.aggregate import Aggregate, Mean, Update
from atoll.core.graph import Graph
from atoll.core.hyper import OptimizerState, WeightBy
from atoll.core.method import client_step
from atoll.core.training import Averaging
from atoll.core.tree import Tree
from atoll.nn.nets import GraphSAGE


@dataclass(frozen=True)
class FedSage(Averaging):
    """Federated GraphSAGE."""

    weight_by: WeightBy = "uniform"
    optimizer_state: OptimizerState = "keep"
    aggregate: Aggregate = Mean()

    paper = (
        "Zhang et al., Subgraph Federated Learning with Missing Neighbor Generation, NeurIPS 2021"
    )
    nets = ("sage",)
    made_for = (GraphSAGE, "fedsage trains a GraphSAGE")

    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> tuple[Update, Tree]:
        """Train the received model on the training nodes."""
        model, moments = self.fit(graph, model, state, key)
        return Update(model, graph.size(self.weight_by)), moments
