"""FedAux: clients with similar auxiliary projection vectors share more (Zhuo et al., 2025).

    h = f_θ(G),   s_i = <h_i, a> / max_j ‖h_j‖.          The client's vector a scores its nodes.
    z_i = Σ_j K_ij h_j / Σ_j K_ij,   K_ij = exp(-(s_i - s_j)² / σ²).
    logits = W [h_i ‖ z_i] + b.   Clients minimise CE over θ, a, W, b and their masks.
    (θ, a, W, b)_k <- Σ_l softmax_l(α cos(a_k, a_l)) (θ, a, W, b)_l       over the participants.

`score=cosine` is cos(h_i, a), as in the public code: the lengths of h and a do not matter. As in
FED-PUB, a client multiplies every weight matrix by its own mask, W ∘ μ. Masks start at 1, and
`masks=false` removes them. h is the last layer's input after activation and dropout. The authors'
network, two convolutions and a linear layer, is therefore `layers=3` and `head=linear`.

Wire, per client and round:  down  own model and a      up  model and a
Private state: masks, and the optimizer's moments of model, a and masks.
Floats per client and round: 2P + 2h for P parameters, including W's rows for z, and width h.
Compute: O(N² h), 1024 rows of K at a time. With cosines, |s| <= 1, and σ >= 1 it is O(26 N h): K is
the sum over m of products of e^(-s²/σ²) (√2 s/σ)^m / √m!, and 26 terms are exact to 2e-16.
Departures from the reference code: a client that has not trained yet gets the plain mean of the
participants' models. Masks are not uploaded, because no party reads them. Small masks are not cut
to zero in predictions. The score of a zero row h or a zero vector a is zero. The network's last
layer on h and the layer on z are initialised separately. The paper's classifier is an MLP of
unknown size; the code's classifier is linear, as is this one. `preset=paper` has the authors'
network. `preset=reference` also has the public code's score, σ, width and initial vector. At its σ
= 10 the kernel is within 4 percent of a constant. Thus z is nearly the mean of h for all nodes, and
a gets nearly no gradient.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from atoll.core.graph import Graph
from atoll.core.hyper import Epochs, Positive, Sharpness
from atoll.core.losses import unit
from atoll.core.masks import Private, first_masks, masked
from atoll.core.message import ToEach
from atoll.core.method import Clients, client_step
from atoll.core.random import fold, normal, uniform
from atoll.core.space import USUAL, Presets, Real, Settings, paper_grid
from atoll.core.training import Mixing, Mixtures, first_mixtures, mixing_of, next_mixtures
from atoll.core.tree import Tree, record
from atoll.nn.adafgl import by_rows
from atoll.nn.init import kaiming
from atoll.nn.nets import Layered
from atoll.nn.ops import matmul

BLOCK = 1024  # rows of the kernel at a time
TERMS = 26  # terms of the kernel's series
PAPER: Settings = {"layers": 3, "head": "linear"}


@record
class Update:
    """The reply of a client: its weights without the masks, and its vector, `apv`, (h,)."""

    model: Tree


@dataclass(frozen=True)
class FedAux(Mixing):
    """Personalised federated learning with auxiliary projection vectors."""

    epochs: Epochs = 1
    alpha: Annotated[Sharpness, "α: how sharply similarity decides a client's mixture"] = 10.0
    sigma: Annotated[Positive, "σ: width of the kernel along the scores"] = 1.0
    score: Annotated[Literal["maxnorm", "cosine"], "how a vector scores nodes"] = "maxnorm"
    apv: Annotated[Literal["normal", "uniform"], "initial values of the vector"] = "normal"
    masks: Annotated[bool, "whether clients have their own masks on the weights"] = True

    space = USUAL | {"alpha": Real(1, 20, log=True), "sigma": Real(0.1, 10, log=True)}
    grids = paper_grid(hidden=(64, 128, 256))
    paper = (
        "Zhuo, Zhan and Yu, Personalized Subgraph Federated Learning with Differentiable Auxiliary "
        "Projections, NeurIPS 2025"
    )
    not_private = "its server compares the clients' vectors one by one"
    nets = ("gcn", "sage", "gat", "mlp", "chebnet")
    made_for = (Layered, "fedaux smooths the input of the last of several layers")
    compares_embeddings = True
    presets: ClassVar[Presets] = {
        "paper": PAPER,
        "reference": {**PAPER, "hidden": 256, "score": "cosine", "sigma": 10.0, "apv": "uniform"},
    }

    @property
    def reach(self) -> None:
        return None  # z reads all nodes

    def first_model(self, key: Tensor) -> Tree:
        """Initialise the network, the vector, and the last layer's weights for z."""
        net: Any = self.net
        draw = normal if self.apv == "normal" else uniform
        apv = draw(fold(key, "apv"), (net.hidden,), torch.get_default_dtype())
        smooth = kaiming(fold(key, "smooth"), 2 * net.hidden, net.classes)[: net.hidden]
        return {"net": net.init(key), "apv": apv, "smooth": smooth}

    def init(self, clients: Clients) -> Mixtures:
        return first_mixtures(self.first_model(clients.key), clients)

    def round(self, server: Mixtures, clients: Clients) -> Mixtures:
        reply = clients.map(self.train, ToEach(server.models))
        return next_mixtures(server, reply.model, reply.model["apv"], self.alpha, clients)

    def diagnostics(self, server: Mixtures) -> Mapping[str, Tensor]:
        return mixing_of(server.similarity, self.alpha)

    def predict(
        self, graph: Graph, message: Tree, state: Private | None, key: Tensor | None = None
    ) -> Tensor:
        return self.logits(message, [] if state is None else state.masks, graph, key)

    @client_step
    def train(
        self, graph: Graph, received: Tree, state: Private | None, key: Tensor
    ) -> tuple[Update, Private]:
        """Train weights, vector and masks together."""
        if state is None:
            state = Private(first_masks(received) if self.masks else [], None)
        start, whole = {"model": received, "masks": state.masks}, "fedaux smooths over all nodes"
        params, moments = self.fit(graph, start, state.moments, key, needs_whole=whole)
        return Update(params["model"]), Private(params["masks"], moments)

    def loss(self, params: Tree, graph: Graph, key: Tensor | None) -> Tensor:
        return graph.task.loss(self.logits(params["model"], params["masks"], graph, key), graph)

    def logits(self, model: Tree, masks: list[Tensor], graph: Graph, key: Tensor | None) -> Tensor:
        """Return the masked model's logits W [h ‖ z] + b, (N, C)."""
        net: Any = self.net
        model = masked(model, masks) if masks else model
        h = net.read(model["net"], graph, key)
        score = scores(h, model["apv"], graph.real, self.score)
        series = self.score == "cosine" and self.sigma >= 1
        z = smoothed(h, score, graph.real, self.sigma, series)
        out: Tensor = net.last(model["net"], h, graph) + matmul(z, model["smooth"])
        return out


def scores(h: Tensor, apv: Tensor, real: Tensor, kind: str) -> Tensor:
    """Return the score of every node, (N,)."""
    if kind == "cosine":
        return unit(h) @ unit(apv)
    longest = (h.square().sum(-1) * real).amax().clamp(min=1e-24).sqrt()
    return h @ apv / longest


def smoothed(h: Tensor, score: Tensor, real: Tensor, sigma: float, series: bool) -> Tensor:
    """Return z: each node's kernel-weighted mean of h, (N, h). The series needs |score| <= σ."""
    place = score / sigma
    # An additional column of ones gives the divisor.
    near = torch.cat([h, torch.ones_like(h[:, :1])], dim=1) * real.unsqueeze(-1)
    if series:
        power = torch.arange(TERMS, dtype=h.dtype, device=h.device)
        scale = torch.exp((power * math.log(2) - torch.lgamma(power + 1)) / 2)
        terms = place.unsqueeze(-1) ** power * scale * torch.exp(-place.square()).unsqueeze(-1)
        total = terms @ (terms.T @ near)
    else:
        total = by_rows(_kernel, (place,), (place, near), BLOCK)
    # A node's own term is 1, so only padding can have a smaller sum.
    return total[:, :-1] / total[:, -1:].clamp(min=0.5)


def _kernel(start: int, rows: Tensor, place: Tensor, near: Tensor) -> Tensor:
    """Return a block of rows of the kernel, multiplied with `near`."""
    return torch.exp(-(rows.unsqueeze(-1) - place).square()) @ near
