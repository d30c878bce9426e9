"""GCFL: clusters of clients with similar updates, split during training (Xie et al., 2021).

    Δ_i = θ_i - θ_c        The update of client i of cluster c in this round, shared layers only.
    Split c if  ‖mean_{i ∈ c} Δ_i‖ < ε1  and  max_{i ∈ c} ‖Δ_i‖ > ε2  (Eqs. 4 and 5):
        the cluster as a whole no longer moves, while a member still does.
    The two sides are those of the minimum cut between its members, weighted by
        cosine          cos(Δ_i, Δ_j) + 1.                                GCFL.
        gradient-norms  max d - d_ij,  d = DTW (dynamic time warping) of   GCFL+.
                        the latest norms of the clients' gradients.
        update-norms    the same with the norms ‖Δ_i‖.                     GCFL+dWs.
    θ_c <- θ_c + Σ_{i ∈ c} n_i Δ_i / Σ_{i ∈ c} n_i,   n_i = training graphs (or nodes) of client i.

ε1 and ε2 are in units of ‖Δ‖: rescale them if rate, width, batch size or epochs change. All norms
and cosines come from one Gram matrix of the updates.

Wire, per client and round:  down  model of its cluster      up  model, n, one norm (not GCFL)
Private state: the optimizer's moments and the network's private layers.
Floats per client and round: 2P + 1 for P shared parameters, 2P + 2 for GCFL+ and GCFL+dWs.
Departures from the reference code: a client sends its model and the server computes the difference.
These rules are from the code, not from the paper. No cluster splits in the first `min_round`
rounds, or with `min_size` clients or fewer. The criterion uses the plain mean; Eq. 4 weights it
(`mean=weighted`). The update is a weighted mean; Eq. 7 prints a sum (`update=sum`: steps grow with
the cluster). The similarity of a DTW distance is the maximum minus the distance. After a split
GCFL+ restarts all its sequences. The paper describes GCFL+ with norms of Δ; the code uses the norm
of the last mini-batch's gradient. With partial participation, a cluster splits only in rounds in
which all its members take part. Its model moves for all members in every round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from atoll.core.aggregate import mix, put, spread
from atoll.core.graph import Graph
from atoll.core.hyper import NonNegative, OneOrMore, WeightBy, ZeroOrMore
from atoll.core.message import ToEach
from atoll.core.method import Clients, client_step
from atoll.core.private_layers import Private, fit_received, init_shared
from atoll.core.space import USUAL, Presets, Real, paper_grid
from atoll.core.task import TASKS
from atoll.core.training import Mixing
from atoll.core.tree import Tree, leaves, norm, record, take, tree_map

ROOM = 512
"""Rounds by which the trace grows at once, so that trees keep their shapes in between."""


@record
class Update:
    """The reply of a client. Only GCFL+ and GCFL+dWs send a norm."""

    model: Tree
    weight: Tensor
    norm: Tensor | None


@record
class Server:
    """The server's tree: the clusters, their models and their history.

    A row of `splits` is the round, and for each client 0 (in another cluster), 1 (stays) or 2
    (moves to the new cluster). `trace` contains the norms of each client's update and of its
    cluster's mean update.
    """

    models: Tree  # of all clients, stacked (N, ...); members of a cluster have equal rows
    cluster: Tensor  # of all clients, (N,) int64
    norms: Tensor  # the latest norms of each client, the newest last, (N, seq_length)
    recorded: Tensor  # number of norms that each client sent since the last split, (N,) int64
    splits: Tensor  # all possible splits, -1 for future ones, (N - 1, 1 + N) int64
    reasons: Tensor  # of each split: norm of the mean, largest norm, weight of the cut, (N - 1, 3)
    noted: Tensor  # the trace, -1 for absent clients, with room for future rounds, (R, 2, N)
    played: Tensor  # number of rounds so far, () int64

    @property
    def trace(self) -> Tensor:
        return self.noted[: int(self.played)]


class Criterion(NamedTuple):
    """The split criterion of all possible clusters, (N,) each. Zeros without participants."""

    mean: Tensor  # norm of the mean update
    largest: Tensor  # largest norm of an update
    met: Tensor  # whether the cluster must be split


class Split(NamedTuple):
    """One split of a cluster: its round, the members that stay and leave, and the reasons."""

    round: int
    stay: tuple[int, ...]
    leave: tuple[int, ...]
    mean_norm: float
    max_norm: float
    cut: float


@dataclass(frozen=True)
class GCFL(Mixing):
    """Average the models within clusters of clients, which split during training."""

    similarity: Annotated[
        Literal["cosine", "gradient-norms", "update-norms"], "similarity for the cut"
    ] = "cosine"
    eps1: Annotated[NonNegative, "ε1: a mean update below it allows a split"] = 0.05
    eps2: Annotated[NonNegative, "ε2: a largest update above it allows a split"] = 0.1
    mean: Annotated[Literal["plain", "weighted"], "the mean update in the criterion"] = "plain"
    update: Annotated[Literal["mean", "sum"], "a cluster's step; sum: Eq. 7 as printed"] = "mean"
    seq_length: Annotated[OneOrMore, "norms of a client that GCFL+ compares"] = 5
    standardize: Annotated[bool, "whether sequences are divided by their deviation"] = False
    min_round: Annotated[ZeroOrMore, "rounds before the first split"] = 20
    min_size: Annotated[OneOrMore, "a cluster of this size or smaller never splits"] = 2
    weight_by: WeightBy = "train"

    # seq_length matters only with preset=plus: --search seq_length=5,10.
    space = USUAL | {"eps1": Real(0.005, 0.2, log=True), "eps2": Real(0.02, 1, log=True)}
    # The values of its public run files. The paper found them by training for 50 rounds.
    grids = paper_grid(
        eps1=(0.025, 0.03, 0.04, 0.07, 0.08), eps2=(0.045, 0.06, 0.08, 0.28, 0.35, 0.4)
    )
    tasks = tuple(TASKS)
    paper = "Xie et al., Federated Graph Classification over Non-IID Graphs, NeurIPS 2021"
    not_private = (
        "its server compares the updates of single clients, and splits clusters accordingly"
    )
    not_averaging = "the mean of each cluster's updates also decides whether the cluster splits"
    presets: ClassVar[Presets] = {
        "plus": {"similarity": "gradient-norms"},
        "plus-dws": {"similarity": "update-norms"},
    }

    def init(self, clients: Clients) -> Server:
        start, total = init_shared(self.net, clients.key), clients.total
        like = leaves(start)[0]
        none = torch.zeros(total, dtype=torch.int64, device=like.device)
        norms, noted = like.new_zeros(total, self.seq_length), like.new_zeros(0, 2, total)
        splits, reasons = none.new_full((total - 1, 1 + total), -1), like.new_zeros(total - 1, 3)
        history = splits, reasons, noted, none.new_zeros(())
        return Server(spread(start, total), none, norms, none.clone(), *history)

    def round(self, server: Server, clients: Clients) -> Server:
        reply, present = clients.map(self.train, ToEach(server.models)), clients.positions
        updates = tree_map(torch.sub, reply.model, take(server.models, present))
        if reply.norm is not None:  # append each participant's newest norm
            newest = reply.norm.unsqueeze(1).to(server.norms.dtype)
            norms = put(server.norms, present, torch.cat([server.norms[present][:, 1:], newest], 1))
            recorded = put(server.recorded, present, server.recorded[present] + 1)
            server = replace(server, norms=norms, recorded=recorded)
        products = gram(updates).double()
        found = self._criterion(server, products, reply.weight.double(), present)
        server = _with_trace(server, products, found, clients)
        if clients.happens(found.met.any()):
            server = self._split(server, products.cpu(), found, clients)  # faster for few numbers
        return replace(server, models=_moved(server, updates, reply.weight, present, self.update))

    def stage(self, round: int) -> int:
        return round // ROOM

    def too_short(self, rounds: int) -> str:
        if rounds > self.min_round:
            return ""
        return f"with {rounds} rounds no cluster splits: splits begin in round {self.min_round}"

    def diagnostics(self, server: Server) -> Mapping[str, Any]:
        splits = cluster_tree(server)
        # The public code stores a member's model before every split of its cluster.
        cached = [
            [s.round - 1 for s in splits if s.round > 0 and member in s.stay + s.leave]
            for member in range(len(server.cluster))
        ]
        found = {"cluster": server.cluster, "cached": cached, "splits": splits}
        return {**found, "trace": server.trace}

    @client_step
    def train(
        self, graph: Graph, received: Tree, state: Private | None, key: Tensor
    ) -> tuple[Update, Private]:
        """Train the cluster's model. GCFL+ sends a gradient's norm, GCFL+dWs the update's norm."""
        steepness: list[Tree] = []

        def watch(grads: Tree, params: Tree) -> Tree:
            steepness[:] = [grads]  # the client sends only the last norm
            return grads

        adjust = watch if self.similarity == "gradient-norms" else None
        model, own = fit_received(self, graph, received, state, key, adjust=adjust)
        sent = norm(steepness[-1]) if steepness else None
        if self.similarity == "update-norms":
            sent = norm(tree_map(torch.sub, model, received))
        return Update(model, graph.size(self.weight_by), sent), own

    def _criterion(
        self, server: Server, products: Tensor, weight: Tensor, present: Tensor
    ) -> Criterion:
        """Find the clusters to split, given the inner products of the participants' updates."""
        members = _members(server)
        inside = members[:, present]
        mean, largest = update_norms(products, inside, weight, self.mean)
        met = (inside.sum(1) == members.sum(1)) & (members.sum(1) > self.min_size)
        met = met & (server.played + 1 > self.min_round)  # the code counts rounds from one
        if self.similarity != "cosine":
            met = met & (server.recorded.min() >= self.seq_length)
        return Criterion(mean, largest, met & (mean < self.eps1) & (largest > self.eps2))

    def _split(
        self, server: Server, products: Tensor, found: Criterion, clients: Clients
    ) -> Server:
        """Split each cluster that meets the criterion into two.

        GCFL+ and GCFL+dWs split only the first of these clusters, because all sequences restart.
        """
        row = {position: number for number, position in enumerate(clients.positions.tolist())}
        lines = zip(*(part.tolist() for part in found), strict=True)
        for members, (*reason, met) in zip(clusters(server), lines, strict=False):
            if met:
                rows = [row[member] for member in members]
                alike = self._similarity(server, members, products[rows][:, rows])
                cut, sides = minimum_cut(alike)
                parts = [[members[i] for i in side] for side in sides]
                server = _divided(server, clients.round, parts, (*reason, cut))
                if self.similarity != "cosine":  # all sequences restart
                    return replace(server, recorded=torch.zeros_like(server.recorded))
        return server

    def _similarity(self, server: Server, members: list[int], products: Tensor) -> Tensor:
        """Return the similarities of the k members of a cluster, (k, k), never negative."""
        if self.similarity == "cosine":
            length = products.diagonal().sqrt().clamp(min=1e-30)
            return (products / (length.unsqueeze(0) * length.unsqueeze(1)) + 1).clamp(min=0)
        distance = warped_distances(server.norms[members].double().cpu(), self.standardize)
        return distance.max() - distance


def cluster_tree(server: Server) -> list[Split]:
    """Return the splits in the order in which they happened."""

    def side(line: list[int], wanted: int) -> tuple[int, ...]:
        return tuple(client for client, place in enumerate(line[1:]) if place == wanted)

    lines = zip(server.splits.tolist(), server.reasons.tolist(), strict=True)
    made = ((line, reason) for line, reason in lines if line[0] >= 0)
    return [Split(line[0], side(line, 1), side(line, 2), *reason) for line, reason in made]


def clusters(server: Server) -> list[list[int]]:
    """Return the members of every cluster, in the order of the clusters' numbers."""
    labels = server.cluster.tolist()
    return [[i for i, own in enumerate(labels) if own == c] for c in range(max(labels) + 1)]


def gram(updates: Tree) -> Tensor:
    """Return the inner products of all pairs of K stacked updates, (K, K)."""
    flat = torch.cat([leaf.flatten(1) for leaf in leaves(updates)], dim=1)
    return flat @ flat.T


def update_norms(
    products: Tensor, inside: Tensor, weight: Tensor, mean: str
) -> tuple[Tensor, Tensor]:
    """Return the norm of each cluster's mean update, and of its largest update, (C,) each.

    `products` are the inner products of all updates, (K, K). `inside` has one row per cluster,
    (C, K), which is true for its members.
    """
    share = _shares(inside, weight if mean == "weighted" else torch.ones_like(weight))
    together = ((share @ products) * share).sum(1).clamp(min=0).sqrt()
    return together, (inside * products.diagonal()).amax(1).sqrt()


def warped_distances(sequences: Tensor, standardize: bool) -> Tensor:
    """Return the distances of n sequences (n, d) by dynamic time warping, (n, n).

    A distance is the root of the least sum of squared differences along a monotone path.
    """
    if standardize:  # divide each sequence by its own standard deviation (Eq. 20)
        spread = sequences.std(1, correction=0, keepdim=True)
        sequences = sequences / torch.where(spread > 0, spread, torch.ones_like(spread))
    count, length = sequences.shape
    cost = (sequences[:, None, :, None] - sequences[None, :, None, :]).square()
    best = cost.new_full((count, count, length + 1, length + 1), torch.inf)
    best[:, :, 0, 0] = 0
    for i in range(length):
        for j in range(length):
            before = torch.stack([best[..., i, j], best[..., i, j + 1], best[..., i + 1, j]])
            best[..., i + 1, j + 1] = cost[..., i, j] + before.amin(0)
    return best[..., length, length].sqrt()


def minimum_cut(similarity: Tensor) -> tuple[float, tuple[list[int], list[int]]]:
    """Return the weight of the minimum cut, and its two sides (Stoer and Wagner)."""
    import networkx as nx

    graph, values = nx.Graph(), similarity.tolist()
    for i, line in enumerate(values):
        graph.add_weighted_edges_from((i, j, line[j]) for j in range(i + 1, len(values)))
    cut, (one, other) = nx.stoer_wagner(graph)
    # The side with the first client keeps the number, independently of the library's order.
    first, second = sorted((sorted(one), sorted(other)))
    return float(cut), (first, second)


def _members(server: Server) -> Tensor:
    """Return whether each client (column) is in each possible cluster (row), (N, N)."""
    numbers = torch.arange(len(server.cluster), device=server.cluster.device)
    return server.cluster == numbers.unsqueeze(1)


def _shares(inside: Tensor, weight: Tensor) -> Tensor:
    """Return weights within each cluster, (C, K). They sum to one, or zero without participants."""
    share = inside * weight
    return share / share.sum(1, keepdim=True).clamp(min=torch.finfo(share.dtype).tiny)


def _with_trace(server: Server, products: Tensor, found: Criterion, clients: Clients) -> Server:
    """Store the norms of the round in the next free row of the trace."""
    present, noted = clients.positions, server.noted
    norms = torch.stack([products.diagonal().sqrt(), found.mean[server.cluster[present]]])
    line = noted.new_full((2, clients.total), -1.0)
    line = line.scatter(1, present.expand(2, -1), norms.to(noted.dtype))
    if clients.round >= len(noted):
        noted = torch.cat([noted, noted.new_zeros(ROOM, *line.shape)])
    here = torch.arange(len(noted), device=noted.device) == server.played
    noted = torch.where(here[:, None, None], line, noted)
    return replace(server, noted=noted, played=server.played + 1)


def _divided(
    server: Server, number: int, sides: Sequence[Sequence[int]], reason: tuple[float, ...]
) -> Server:
    """Make the second side a new cluster, and record the split."""
    cluster, splits, reasons = (t.clone() for t in (server.cluster, server.splits, server.reasons))
    row = new = int(cluster.max())  # every split adds a cluster
    splits[row] = 0
    splits[row, 0] = number
    for side, members in enumerate(sides, start=1):
        splits[row, [1 + member for member in members]] = side
    cluster[list(sides[1])] = new + 1
    reasons[row] = reasons.new_tensor(reason)
    return replace(server, cluster=cluster, splits=splits, reasons=reasons)


def _moved(server: Server, updates: Tree, weight: Tensor, positions: Tensor, update: str) -> Tree:
    """Return each client's model plus the weighted mean, or the sum, of its cluster's updates."""
    inside = _members(server)[:, positions].to(weight.dtype)
    steps = mix(updates, _shares(inside, weight) if update == "mean" else inside)
    return tree_map(lambda model, step: model + step[server.cluster], server.models, steps)
