"""FedTGP: the server learns class prototypes with a margin between them (Zhang et al., 2024).

    P_i^c = mean of z_v over client i's training nodes v of class c, for the classes it has.
    P̂^c = F(v^c),   F = linear, ReLU, linear, all of width h;   v^c and F are the server's.
    min_{v, F}  mean over the uploaded P_i^c of  CE_c( -‖P_i^c - P̂^c'‖ - δ [c' = c] ).
    δ = min(margin, τ),   Q^c = mean of P_i^c over the clients that have class c.
    w_i <- fit(w_i) on  CE + λ R,   R pulls embeddings z to P̂; R = 0 at first.

    margin  code     the largest distance of a Q^c to its nearest other one.  Authors' code.
            paper    the largest distance of any two Q^c.                     The paper.
            openfgl  as `code`, but Q^c is the sum of P_i^c, divided by K^C: nearly zero.
                     K participants, C classes.
    pull    nodes    mean over training nodes and dimensions of (z_v - P̂^{y_v})².  Authors' code.
            classes  the same mean within each class, summed over classes.         OpenFGL.
            means    mean over the client's classes of ‖P_i^c - P̂^c‖.              The paper.

Wire, per client and round:  down  P̂, known classes, initial key      up  prototypes, own classes
Private state: the model and the optimizer's moments. The prototype of a class with one training
node is that node's embedding, and the reply discloses which classes a client has.
Floats per client and round: 2C(h + 1) + 1 for C classes and width h.
Departures from the reference code: the server takes one step on all prototypes per epoch. The
authors shuffle batches of 10, whose results would depend on the order of the clients. z is the last
layer's input before its activation, as in FedProto; OpenFGL uses it after the activation. Except
with OpenFGL's faults, a class that no participant has does not affect δ, and a class that no client
ever had is never predicted. Squared distances are at least 1e-12. `server_optimizer=adam` keeps its
moments and has the clients' weight decay, as in OpenFGL.
`compat=zero-prototypes` is OpenFGL's other fault: it trains a class that a client does not have as
a zero vector. `inference=head` is OpenFGL's classifier. Right after training, a client uses its own
prototypes. `preset=paper`, `reference` and `openfgl` have the variants and numbers of each source.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from atoll.core.fit import minimise
from atoll.core.hyper import LearningRate, OneOrMore, Positive
from atoll.core.losses import masked_mean
from atoll.core.method import Clients
from atoll.core.optim import SGD, Adam, Optimizer
from atoll.core.prototypes import PrototypeTraining, Server
from atoll.core.random import fold, normal
from atoll.core.space import USUAL, Real, preset_table
from atoll.core.tree import Tree, record
from atoll.nn import EMBEDDERS
from atoll.nn.init import apply_linear, linear


@record
class Learner:
    """The server's v and F, and the moments of the server's optimizer."""

    params: Tree
    moments: Tree


@dataclass(frozen=True)
class FedTGP(PrototypeTraining):
    """Learn the global prototypes at the server."""

    inference: Annotated[Literal["head", "prototype"], "last layer, or nearest prototype"] = (
        "prototype"
    )
    margin: Annotated[Literal["code", "paper", "openfgl"], "definition of the margin"] = "code"
    tau: Annotated[Positive, "τ: largest margin"] = 100.0
    server_epochs: Annotated[OneOrMore, "S: steps of the server per round"] = 100
    server_optimizer: Annotated[Literal["sgd", "adam"], "optimizer of the server"] = "sgd"
    server_lr: Annotated[LearningRate, "size of a step of the server"] = 0.01
    compat: Annotated[Literal["none", "zero-prototypes"], "a fault of OpenFGL"] = "none"

    space = USUAL | {
        "lam": Real(0.01, 10, log=True),
        "tau": Real(1, 100, log=True),
        "server_lr": Real(1e-3, 1, log=True),
    }
    nets = EMBEDDERS
    paper = (
        "Zhang et al., FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced "
        "Contrastive Learning for Data and Model Heterogeneity in Federated Learning, AAAI 2024"
    )
    not_averaging = "its clients send class prototypes, and the server trains its own"
    repeats = ("epochs", "server_epochs")
    presets = preset_table(
        *("margin", "pull", "lam", "inference", "optimizer_state"),
        *("server_epochs", "server_optimizer", "compat"),
        paper=("paper", "means", 0.1, "prototype", "keep", 100, "sgd", "none"),
        reference=("code", "nodes", 10.0, "prototype", "reset", 100, "sgd", "none"),
        openfgl=("openfgl", "classes", 1.0, "head", "keep", 10, "adam", "zero-prototypes"),
    )

    @property
    def trainer(self) -> Optimizer:
        """The server's optimizer."""
        if self.server_optimizer == "sgd":
            return SGD(lr=self.server_lr)
        return Adam(self.server_lr, weight_decay=getattr(self.optimizer, "weight_decay", 0.0))

    def init(self, clients: Clients) -> Server:
        return Server(clients.key, None, None)

    def first_learner(self, width: int, key: Tensor) -> Learner:
        """Initialise v and F for prototypes of this width."""
        params = {
            "first": linear(fold(key, "first"), width, width),
            "second": linear(fold(key, "second"), width, width),
            "vectors": normal(key, (self.net.classes, width), torch.get_default_dtype()),
        }
        return Learner(params, self.trainer.init(params))

    def round(self, server: Server, clients: Clients) -> Server:
        reply = clients.map(self.train, self.message(server))
        sent, owned = reply.prototypes, reply.mass
        delta = margin(sent, owned, self.margin).clamp(max=self.tau)
        if self.compat == "zero-prototypes":
            owned = torch.ones_like(owned)
        learner = server.learner or self.first_learner(sent.shape[-1], clients.key)

        def loss(params: Tree, key: Tensor) -> Tensor:
            return contrast(sent, owned, learned(params), delta)

        start, steps = (learner.params, self.trainer, learner.moments), self.server_epochs
        learner = Learner(*minimise(loss, *start, steps, clients.key))
        found = learned(learner.params)
        clients.require_finite(
            found,
            "training of the prototypes diverged on the server (they are not finite); lower "
            "server_lr, or the clients' learning rate",
        )
        known = (owned > 0).any(0).to(found.dtype)
        if server.known is not None:
            known = torch.maximum(known, server.known)
        return Server(server.start, found, known, learner=learner)


def learned(params: Tree) -> Tensor:
    """Return P̂ of all classes, (C, h)."""
    hidden = torch.relu(apply_linear(params["first"], params["vectors"]))
    return apply_linear(params["second"], hidden)


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the distances of all rows of a to all rows of b. Equal rows have a finite gradient."""
    return (a.unsqueeze(1) - b).square().sum(-1).clamp(min=1e-12).sqrt()


def contrast(prototypes: Tensor, owned: Tensor, ours: Tensor, delta: Tensor) -> Tensor:
    """Return the server's loss, given prototypes (K, C, h), a mask of owned classes, and P̂."""
    own = torch.eye(len(ours), dtype=ours.dtype, device=ours.device).repeat(len(prototypes), 1)
    logits = -(distances(prototypes.flatten(0, 1), ours) + delta * own)
    return masked_mean(-(own * logits.log_softmax(-1)).sum(-1), owned.flatten())


def margin(prototypes: Tensor, owned: Tensor, kind: str) -> Tensor:
    """Return the margin between the classes' mean prototypes, before τ limits it.

    The module docstring defines each `kind`.
    """
    total, count = torch.einsum("kc,kch->ch", owned, prototypes), owned.sum(0)
    if kind == "openfgl":
        centres, held = total * float(len(owned)) ** -len(count), torch.ones_like(count) > 0
    else:
        centres, held = total / count.clamp(min=1).unsqueeze(-1), count > 0
    other = ~torch.eye(len(count), dtype=torch.bool, device=count.device)
    pairs, apart = held & held.unsqueeze(-1) & other, distances(centres, centres)
    if kind == "paper":
        return torch.where(pairs, apart, 0.0).amax()
    nearest = torch.where(pairs, apart, torch.inf).amin(-1)
    return torch.where(held, nearest, 0.0).amax()
