"""FedPer: clients share the first layers and keep the last ones (Arivazhagan et al., 2019).

    (b_i, p_i) <- fit(b, p_i)                b is the base, p_i the client's personal layers.
    b <- Σ_i n_i b_i / Σ_i n_i               over the participants, n_i = nodes of client i.

`personal` is the paper's K_P, the number of personal layers, counted from the output. It counts
layers of a GCN, SAGE, GAT, GIN or MLP; DisenGCN has two layers, encoder and classifier. If the
network itself has private layers (gin-graph: all except the convolutions), these count as the first
personal layer. There `personal=1` is FedAvg, and larger values add the last convolutions. For other
networks `personal=0` is FedAvg. If all layers are personal, nothing is averaged, as in Local.

Wire, per client and round:  down  base      up  base, num_nodes
Private state: the personal layers, the network's private layers, and the moments of both.
Floats per client and round: 2P + 1 for P parameters of the base.
Departures from the reference code: no reference code exists. Every client initialises its personal
layers with its own key. The server sends nothing for them, and they are never reset, only trained
together with the base. A client that has not trained yet is scored with layers from a fixed key.
n_i counts all nodes (`weight_by=train`: the paper's number of examples). The paper's step is SGD.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from atoll.core import private_layers as layers
from atoll.core.aggregate import Aggregate, Mean, Update
from atoll.core.errors import ConfigError
from atoll.core.graph import Graph
from atoll.core.hyper import OptimizerState, WeightBy, ZeroOrMore
from atoll.core.method import client_step
from atoll.core.random import fold, make_key
from atoll.core.space import USUAL, Whole
from atoll.core.task import TASKS
from atoll.core.training import Averaging
from atoll.core.tree import Tree, record


@record
class Private:
    """The private state: the personal layers, and the network's private layers with all moments."""

    personal: Tree
    own: layers.Private


@dataclass(frozen=True)
class FedPer(Averaging):
    """Federated averaging of the first layers."""

    personal: Annotated[ZeroOrMore, "K_P: number of layers that never leave a client"] = 1
    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "keep"
    aggregate: Aggregate = Mean()

    space = USUAL | {"personal": Whole(1, 2)}
    tasks = tuple(TASKS)
    paper = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 2019"
    deployed = "personalised"

    def start(self, key: Tensor) -> Tree:
        return self._cut(super().start(key))[0]

    def predict(
        self, graph: Graph, message: Tree, state: Private | None, key: Tensor | None = None
    ) -> Tensor:
        personal, own = self._kept(state, make_key(0, graph.real.device))
        return super().predict(graph, rejoin(message, personal), own, key)

    def plain_params(self, message: Tree, state: Private | None) -> Tree:
        if state is None or layers.private_names(self.net):
            return None
        return rejoin(message, state.personal)

    @client_step
    def train(
        self, graph: Graph, received: Tree, state: Private | None, key: Tensor
    ) -> tuple[Update, Private]:
        """Train base and personal layers together."""
        personal, before = self._kept(state, fold(key, "personal"))
        model, own = layers.fit_received(self, graph, rejoin(received, personal), before, key)
        base, personal = self._cut(model)
        return Update(base, graph.size(self.weight_by)), Private(personal, own)

    def _kept(self, state: Private | None, key: Tensor) -> tuple[Tree, layers.Private | None]:
        """Return the client's personal layers and the rest of its state.

        Without a state, the key initialises the layers, and the rest is None.
        """
        if state is None:
            return self._cut(super().start(key))[1], None
        return state.personal, state.own

    def _cut(self, params: Tree) -> tuple[Tree, Tree]:
        """Split the layers into base and personal ones.

        If the network has private layers, all of them together count as one personal layer.
        """
        private = bool(layers.private_names(self.net))
        return cut(params, max(self.personal - private, 0))


def cut(params: Tree, count: int) -> tuple[Tree, Tree]:
    """Split a list or a dict of layers. Return the first ones and the last `count`."""
    # If a dict has only one name, which contains a list of layers, split that list.
    if isinstance(params, dict) and len(params) == 1:
        ((name, inner),) = params.items()
        if isinstance(inner, list | dict):
            first, last = cut(inner, count)
            return {name: first}, {name: last}
    at = len(params) - count
    if at < 0:
        raise ConfigError(
            f"{count} layers cannot be personal, because only {len(params)} are shared; give a "
            "smaller number (--set personal=1)"
        )
    if isinstance(params, list):
        return params[:at], params[at:]
    names = list(params)
    return {n: params[n] for n in names[:at]}, {n: params[n] for n in names[at:]}


def rejoin(first: Tree, last: Tree) -> Tree:
    """Join the two parts that `cut` returns."""
    if isinstance(first, list):
        return first + last
    both = {name: rejoin(first[name], last[name]) for name in first if name in last}
    return {**first, **last, **both}
