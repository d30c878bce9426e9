"""Networks of FedSage+: NeighGen generates a node's lost neighbours, and GraphSAGE reads them.

    z_v = GraphSAGE(v);   n̂_v = relu(w z_v + b);   x̂_v = tanh(W3 relu(W2 relu(W1 (z_v + noise))))

z_v is the embedding of node v, n̂_v the predicted number of its lost neighbours, x̂_v the features
of p generated neighbours. The mended graph contains the first a_v = min(⌊n̂_v⌋, p) of them. The
only neighbour of v's generated node k is v, so a layer gets h_v and h_vk without a larger graph:

    h_v  <- W_n (Σ_u h_u + Σ_{k < a_v} h_vk) / (deg_v + a_v) + W_s h_v + b
    h_vk <- W_n h_v + W_s h_vk + b

Each node has p slots for generated neighbours, and most are unused (on Cora 29 of 30). A CPU
generates neighbours only for used slots, its places (`nn.neighgen_slots`). A GPU computes all
slots, because shapes must not depend on values there.

Shapes: N nodes, p slots, R places, D features; x̂ is (N, p, D), or (R, 1, D) with places.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.graph import Graph, Sparse
from atoll.core.losses import masked_mean
from atoll.core.random import dropout, fold, random_bits
from atoll.core.tree import Tree, record
from atoll.nn.init import apply_linear, linear
from atoll.nn.neighgen_slots import Places
from atoll.nn.nets import GraphSAGE
from atoll.nn.ops import at_columns, at_rows, matmul, row_sum, row_top, with_values


@record
class Made:
    """Generated neighbours. (n, s) is (N, p) if every slot is computed, or (R, 1) at places."""

    x: Tensor  # their features, (n, s, D)
    linked: Tensor  # one for neighbours that their node reads, zero for unused slots, (n, s)
    total: Tensor  # sum of the features that a node reads, (N, D), or only for nodes with places
    places: Places | None = None  # None if every slot of every node is computed
    around: tuple[Sparse, Tensor] | None = None  # the cached result of `surrounded`

    def at(self, rows: Tensor) -> Tensor:
        """Return the row of the node of each generated neighbour: (N, C) -> (n, 1, C)."""
        return (rows if self.places is None else self.places.at(rows)).unsqueeze(1)

    def summed(self, g: Tensor) -> Tensor:
        """Sum over each node's linked neighbours: (n, s, C) -> one row per node (with places)."""
        return _summed(g, self.linked, self.places)

    def sent(self, total: Tensor, weight: Tensor) -> Tensor:
        """Multiply the output of `summed` by weights, for every node: (N, O)."""
        if self.places is None:
            return total @ weight
        return self.places.onto(self.places.node_product(total, weight))

    def product(self, g: Tensor, weight: Tensor) -> Tensor:
        """Multiply (n, s, C) by (C, O)."""
        if self.places is not None:
            return self.places.product(g, weight)
        # Nodes and slots share one axis. With two, `vmap` would copy the weights for every node.
        return (g.flatten(0, 1) @ weight).reshape(*g.shape[:2], -1)

    def dropped(
        self, g: Tensor, key: Tensor | None, ids: Tensor, net: GraphSAGE, number: int
    ) -> Tensor:
        """Apply dropout to (n, s, C). The noise of a slot depends on its node's id."""
        if self.places is not None:
            return self.places.dropped(g, key, ids, net.dropout, "made", number)
        return dropout(g.flatten(1), key, ids, net.dropout, "made", number).reshape(g.shape)


def _summed(g: Tensor, linked: Tensor, places: Places | None) -> Tensor:
    g = g * linked.unsqueeze(-1)
    return g.sum(1) if places is None else places.summed(g)


def made_neighbours(x: Tensor, linked: Tensor, places: Places | None = None) -> Made:
    """Return a `Made` with `total`, which a first layer needs. Arguments are as in `Made`."""
    return Made(x, linked, _summed(x, linked, places), places)


@record
class Lost:
    """The targets of a generator on a graph with hidden nodes."""

    kept: Tensor  # one for nodes that are not hidden, (N,)
    count: Tensor  # number of hidden neighbours of each node, (N,)
    index: Tensor  # up to p of them, (N, p) int64
    there: Tensor  # one if such a neighbour exists; existing ones come first, (N, p)


@dataclass(frozen=True)
class NeighGen:
    """The generator: `encoder` gives z, `degree` gives n̂, and `features` gives x̂."""

    features: int
    hidden: int = 64
    latent: int = 128
    narrow: int = 256
    wide: int = 256
    slots: int = 5

    @property
    def encoder(self) -> GraphSAGE:
        return GraphSAGE(self.features, self.latent, self.hidden, layers=2, dropout=0.0)

    def init(self, key: Tensor) -> Tree:
        widths = (self.latent, self.narrow, self.wide, self.slots * self.features)
        degree = linear(fold(key, "degree"), self.latent, 1)
        return {
            "encoder": self.encoder.init(fold(key, "encoder")),
            # The bias starts at one. If n̂ started at zero for all nodes, its ReLU would have no
            # gradient. Two of ten clients on Cora would then never generate a neighbour.
            "degree": {**degree, "bias": torch.ones_like(degree["bias"])},
            "features": [
                linear(fold(key, "features", layer), n_in, n_out)
                for layer, (n_in, n_out) in enumerate(pairwise(widths))
            ],
        }

    def encode(self, params: Tree, graph: Graph, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return z, (N, latent), and n̂, (N,), without edges from nodes that are not `kept`."""
        z = mended_sage(self.encoder, params["encoder"], graph, kept, None, None)
        return z, torch.relu(apply_linear(params["degree"], z)).squeeze(-1)

    def make(self, layers: Tree, z: Tensor, places: Places | None = None) -> Tensor:
        """Return x̂ from the part `features` and from z plus noise.

        With places, z has only the rows of their nodes.
        """
        *hidden, last = layers
        h = z
        for layer in hidden:
            # Not `apply_linear`, because the number of rows changes in every step (`nn.dense`).
            h = torch.relu(h @ layer["weight"] + layer["bias"])
        if places is not None:
            return places.tanh_layer(h, last["weight"], last["bias"])
        return torch.tanh(apply_linear(last, h)).reshape(-1, self.slots, self.features)

    def used(self, lost: Tensor) -> Tensor:
        """Return one for the first ⌊n̂⌋ slots of each node, else zero, (N, p). No gradient."""
        slot = torch.arange(1, self.slots + 1, device=lost.device)
        return (slot <= lost.detach().unsqueeze(-1)).to(lost.dtype)


def mended_sage(
    net: GraphSAGE, params: Tree, graph: Graph, kept: Tensor, made: Made | None, key: Tensor | None
) -> Tensor:
    """Return logits, (N, C), on a graph with generated neighbours.

    Edges from nodes that are not `kept`, (N,), are ignored.
    """
    if made is not None and made.around is not None:
        adjacency, size = made.around
    else:
        adjacency, size = surrounded(graph, kept, made)
    h = graph.views["x"]
    if made is not None:
        g, total = made.x, made.total
    for number, layer in enumerate(params):
        if number and isinstance(h, Tensor):
            noise = key, graph.ids, net.dropout, "dropout", number
            h = dropout(h, *noise, after=torch.relu)
        sent = matmul(h, layer["neighbour"])
        gathered = matmul(adjacency, sent)
        if made is not None:
            if number:
                g = made.dropped(torch.relu(g), key, graph.ids, net, number)
                total = made.summed(g)
            gathered = gathered + made.sent(total, layer["neighbour"])
            if number < len(params) - 1:
                g = made.product(g, layer["self"]) + made.at(sent + layer["bias"])
        h = gathered / size.clamp(min=1) + matmul(h, layer["self"]) + layer["bias"]
    assert isinstance(h, Tensor)
    return h


def surrounded(graph: Graph, kept: Tensor, made: Made | None) -> tuple[Sparse, Tensor]:
    """Return the edges from kept nodes, and each node's neighbour count with generated ones."""
    adjacency, size = _edges_from(graph, kept)
    if made is None:
        return adjacency, size
    count = made.summed(torch.ones_like(made.linked).unsqueeze(-1))
    return adjacency, size + (count if made.places is None else made.places.onto(count))


def _edges_from(graph: Graph, nodes: Tensor) -> tuple[Sparse, Tensor]:
    """Return edges from nodes whose mask is one, and the number that end at each node, (N, 1)."""
    whole = graph.sparse_view("mean")
    edges = with_values(whole, at_columns(whole, nodes.unsqueeze(-1)).squeeze(-1))
    return edges, row_sum(whole, edges.values.unsqueeze(-1))


def random_order(key: Tensor, graph: Graph, chosen: Tensor) -> Tensor:
    """Return the chosen nodes, given by a mask, in a random order by ids, then all others, (N,)."""
    bits = random_bits(key, graph.ids, 1).squeeze(-1).to(torch.int64)
    return torch.argsort(torch.where(chosen > 0, bits, 1 << 40))


def some_neighbours(key: Tensor, graph: Graph, chosen: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Return up to `slots` random chosen neighbours of every node, and a mask, (N, slots) each."""
    adjacency = graph.sparse_view("mean")
    order = random_order(key, graph, chosen)
    # Ranks of chosen nodes start at one. Others and padding have zero. Pick the highest rank next.
    rank = (torch.argsort(order) + 1).to(chosen.dtype) * chosen
    score = at_columns(adjacency, rank.unsqueeze(-1))
    picks = []
    for _ in range(slots):
        picks.append(row_top(adjacency, score))
        score = torch.where(score == at_rows(adjacency, picks[-1]), torch.zeros_like(score), score)
    found = torch.cat(picks, dim=1)
    return order[(found.long() - 1).clamp(min=0)], (found > 0).to(chosen.dtype)


def hide_nodes(key: Tensor, graph: Graph, share: float, slots: int) -> Lost:
    """Hide a share of the nodes that are neither training nor test nodes. Return the targets."""
    may = graph.real * (1 - graph.train) * (1 - graph.test)
    place = torch.argsort(random_order(fold(key, "hide"), graph, may))
    hidden = may * (place < torch.round(share * may.sum())).to(may.dtype)
    _, count = _edges_from(graph, hidden)
    index, there = some_neighbours(fold(key, "lost"), graph, hidden, slots)
    return Lost(graph.real - hidden, count.squeeze(-1), index, there)


def degree_loss(guess: Tensor, count: Tensor, mask: Tensor) -> Tensor:
    """Return the mean smooth L1 loss of n̂, given the true counts, where the mask is one."""
    return masked_mean(functional.smooth_l1_loss(guess, count, reduction="none"), mask)


def feature_loss(
    made: Tensor,
    true: Tensor,
    used: Tensor,
    there: Tensor,
    mask: Tensor,
    last: bool = False,
    places: Places | None = None,
) -> Tensor:
    """Return the mean squared error of x̂ over nodes whose mask, (N,), is one.

    x̂, (n, s, D), is compared with candidates `true`, (n, k, D). `used`, (n, s), is one for used
    slots. `there`, (n, k), is one for candidates that exist, which come first. For n and s see
    `Made`, and for `last` see `compared`.
    """
    gaps = made - compared(made, true, there, last) @ true
    errors = gaps.square().mean(-1) * used * there[:, :1]
    if places is None:
        return masked_mean(errors.mean(-1), mask)
    each = places.onto(places.summed(errors.unsqueeze(-1)).squeeze(-1))
    return masked_mean(each / places.shape[1], mask)


def compared(made: Tensor, true: Tensor, there: Tensor, last: bool) -> Tensor:
    """Return one at each generated node's nearest (or last) candidate, else zero, (n, s, k)."""
    if last:
        best = (there.sum(-1, keepdim=True) - 1).clamp(min=0).expand(made.shape[:-1])
    else:
        # |x̂|² is the same for all candidates.
        square = torch.linalg.vector_norm(true, dim=-1).square().unsqueeze(-2)
        apart = square - 2 * made.detach() @ true.transpose(-1, -2)
        best = torch.where(there.unsqueeze(-2) > 0, apart, torch.inf).argmin(-1)
    candidate = torch.arange(there.shape[-1], device=best.device)
    return (best.unsqueeze(-1) == candidate).to(made.dtype)


def gathered(shown: Tensor) -> tuple[Tensor, Tensor]:
    """Remove most unused slots from the features that K participants sent, (K, M, p, D).

    Each participant sent M nodes. Of the K p slots of all m-th nodes, used ones come first and Q
    remain. Return these rows, (Q, M, D), and their positions among the K p slots, (Q, M).
    """
    used = shown.any(-1).movedim(2, 1).flatten(0, 1)
    most = max(1, int(used.sum(0).max()))
    places = torch.argsort(used.to(torch.uint8), dim=0, descending=True, stable=True)[:most]
    numbers, slots = torch.arange(shown.shape[1], device=shown.device), shown.shape[2]
    return shown[places // slots, numbers, places % slots], places


def from_others(slopes: Tensor, owner: Tensor) -> Tensor:
    """Sum the gradients of K participants, (K, Q, M, D), without that of each row's `owner`.

    Owners have shape (Q, M), and the result has shape (Q, M, D).
    """
    own = owner.unsqueeze(-1).expand(slopes.shape[1:]).unsqueeze(0)
    return slopes.sum(0) - slopes.gather(0, own).squeeze(0)


def given_back(rows: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Invert `gathered`. Return (K, M, p, D), with zeros for the omitted slots."""
    count, numbers, slots, wide = shape
    every = rows.new_zeros(count * slots, numbers, wide)
    every = every.scatter(0, places.unsqueeze(-1).expand_as(rows), rows)
    return every.reshape(count, slots, numbers, wide).movedim(1, 2)
