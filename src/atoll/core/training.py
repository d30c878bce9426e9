"""Base classes of most methods. A method overrides the parts in which it differs.

`Training`: clients train a network. `Averaging`: clients train the server's model, and the server
aggregates their models (FedAvg). `Mixing`: every client gets its own mixture of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.core.aggregate import (
    Mean,
    Rule,
    Update,
    average,
    cosines,
    first_server,
    mix,
    model_of,
    next_server,
    put,
    spread,
)
from atoll.core.errors import ConfigError
from atoll.core.fit import Adjust, Loss, fit
from atoll.core.graph import Graph
from atoll.core.hyper import Epochs
from atoll.core.message import ToAll, ToEach
from atoll.core.method import Clients, Method, client_step, embedder
from atoll.core.optim import Adam, Optimizer
from atoll.core.private_layers import Private, fit_received, init_shared
from atoll.core.tree import Tree, record, tree_map


@dataclass(frozen=True)
class Training(Method):
    """A method whose clients train for `epochs` epochs. A field may replace `optimizer_state`."""

    optimizer: Optimizer = Adam()
    epochs: Epochs = 3

    # The required type of network, and the reason, which begins the error for other networks.
    made_for: ClassVar[tuple[type[object], str]] = (object, "")
    compares_embeddings: ClassVar[bool] = False  # whether the network needs a hidden layer

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, reason = self.made_for
        if not isinstance(self.net, kind):
            raise ConfigError(f"{reason}; use --set net={self.nets[0]}")
        if self.compares_embeddings:
            embedder(self.net)

    @property
    def optimizer_state(self) -> str:
        """Whether clients keep the optimizer's moments between rounds: "keep" or "reset"."""
        return "keep"

    def fit(
        self,
        graph: Graph,
        model: Tree,
        moments: Tree,
        key: Tensor,
        *,
        loss: Loss | None = None,
        adjust: Adjust | None = None,
        needs_whole: str = "",
    ) -> tuple[Tree, Tree]:
        """Train a client's model with `core.fit.fit`. Return the model and the moments."""
        state = None if self.optimizer_state == "reset" else moments
        start = model, self.optimizer, state, self.epochs
        return fit(loss or self.loss, *start, key, graph, adjust, needs_whole=needs_whole)


@dataclass(frozen=True)
class Averaging(Training):
    """FedAvg, and the base of methods that override its `loss`, `bend` or more.

    To let the user choose `weight_by` or `aggregate`, declare a field of this name.
    """

    not_private = ""

    @property
    def weight_by(self) -> str:
        """The kind of a client's weight in the mean, as in `Graph.size`."""
        return "nodes"

    @property
    def aggregate(self) -> Rule:
        """The rule that combines the clients' models into one model."""
        return Mean()

    def init(self, clients: Clients) -> Tree:
        return first_server(self.aggregate, self.start(clients.key))

    def start(self, key: Tensor) -> Tree:
        """Return the first model: all layers that may leave a client."""
        return init_shared(self.net, key)

    def round(self, server: Tree, clients: Clients) -> Tree:
        reply = clients.map(self.train, ToAll(model_of(server)))
        return next_server(self.aggregate, server, reply, clients.key)

    @client_step
    def train(
        self, graph: Graph, received: Tree, state: Private | None, key: Tensor
    ) -> tuple[Update, Private]:
        """Train the received model on the client's graph. Reply with the model and its weight."""

        def bent(grads: Tree, params: Tree) -> Tree:
            return self.bend(grads, params, received)

        model, own = fit_received(self, graph, received, state, key, adjust=bent)
        return Update(model, graph.size(self.weight_by)), own

    def bend(self, grads: Tree, params: Tree, received: Tree) -> Tree:
        """Return the gradient for a step. A method may add a term to `grads`."""
        return grads


@dataclass(frozen=True)
class Mixing(Training):
    """Every client gets its own model. The server's record stores all models in `models`."""

    not_averaging = "every client gets a mixture of models, weighted by the clients' similarity"
    deployed = "personalised"

    def deploy(self, server: Tree) -> ToEach:
        return ToEach(server.models)


@record
class Mixtures:
    """The server's tree of a method that mixes the models of N clients by similarity."""

    models: Tree  # each client's mixture, stacked
    seen: Tensor  # whether each client has trained, (N,) bool
    similarity: Tensor  # the latest cosine of each pair, (N, N); NaN if the pair never met


def first_mixtures(model: Tree, clients: Clients) -> Mixtures:
    """Start every client with the same model."""
    never = torch.zeros(clients.total, dtype=torch.bool, device=clients.key.device)
    return Mixtures(spread(model, clients.total), never, unmet(clients))


def next_mixtures(
    server: Mixtures, models: Tree, descriptions: Tensor, tau: float, clients: Clients
) -> Mixtures:
    """Mix the models of K participants. Their weights are softmax(tau * cosine).

    The cosines compare the rows of `descriptions`, (K, h), one for each participant. An absent
    client keeps its mixture. If it has never trained, it gets the mean of the participants' models.
    """
    present, alike = clients.positions, cosines(descriptions)
    mixed = put(server.models, present, mix(models, torch.softmax(tau * alike, dim=-1)))
    seen = server.seen.index_fill(0, present, True)

    def own_or_mean(own: Tensor, mean: Tensor) -> Tensor:
        return torch.where(seen.reshape(-1, *[1] * mean.dim()), own, mean)

    if len(clients) < clients.total:
        mixed = tree_map(own_or_mean, mixed, average(models))
    return Mixtures(mixed, seen, put_pairs(server.similarity, present, alike))


def unmet(clients: Clients, *sizes: int) -> Tensor:
    """Return similarities of all pairs of clients before the first round: NaN, (*sizes, N, N)."""
    shape, kind = (*sizes, clients.total, clients.total), torch.get_default_dtype()
    return torch.full(shape, torch.nan, dtype=kind, device=clients.key.device)


def put_pairs(known: Tensor, positions: Tensor, found: Tensor) -> Tensor:
    """Replace the entries of K participants in a matrix of all pairs of clients, (..., N, N)."""
    # Indexed axes come first, because `vmap` moves an index behind other axes.
    pairs, new = (one.movedim((-2, -1), (0, 1)) for one in (known, found.to(known.dtype)))
    return pairs.index_put((positions.unsqueeze(-1), positions), new).movedim((0, 1), (-2, -1))


def mixing_of(similarity: Tensor, tau: float) -> dict[str, Tensor]:
    """Return the diagnostics: the latest similarities, and the mixing weights that they give."""
    known = similarity.nan_to_num(nan=-torch.inf)
    return {"similarity": similarity, "mixing": torch.softmax(tau * known, dim=-1)}
