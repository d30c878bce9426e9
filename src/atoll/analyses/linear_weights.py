"""Check GCFL's Propositions 4.1 to 4.3: do weights follow structure, features and task?

The proofs assume a linear SGC, Θ = (L X)⁺ Y with L = D^-1/2 (A + I) D^-1/2, and bound ‖Θ' - Θ‖²:

    4.1  another L:  ‖X⁺‖² (ε_Y ‖L⁺‖² + ε_L / δ_L ‖Y‖² + ε_L ε_Y / δ_L)            Eq. 12
    4.2  another X:  ε_X / δ_X ‖L⁺Y‖² + ε_X² ε_Y / δ_X ‖(LX)⁺‖² + ε_X ε_Y ‖(LX)⁺‖⁴     Eq. 16
    4.3  another Y:  ε_Y ‖(LX)⁺‖²                                                Eq. 19

with ε_M = ‖M' - M‖² and δ_M = ‖M (M' - M)‖² in spectral norms. The bounds need as many features
as nodes. Here a growing fraction of one of the three changes: edges get another end, or features or
labels move to other nodes. X contains the clients' features or, for the bounds, is a square
Gaussian matrix. Afterwards we compare whole clients, which differ in all three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import scipy.sparse as sp
from numpy import ndarray
from numpy.linalg import norm, pinv

from atoll.analyses.claim import Claim, exponent
from atoll.analyses.similarity import rank_correlation
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.data.measure.heterogeneity import (
    compare_graphs,
    jensen_shannon,
    plain_features,
    real_edges,
)
from atoll.data.measure.structure import adjacency
from atoll.data.source import undirected_pairs
from atoll.present.chart import Axis, Chart, Dots, Panels, colour_of, number_text
from atoll.present.tables import Table, make_table

KINDS = {"4.1": "structure", "4.2": "features", "4.3": "task"}
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
NODES = 200  # maximum per client, because the bounds need dense inverses
SMALL = 1e-8  # singular values below this fraction of the largest count as zero


@dataclass(frozen=True, eq=False)
class Linear:
    """The matrices of one client: adjacency (N, N), features (N, D) and one-hot labels (N, C)."""

    a: ndarray
    x: ndarray
    y: ndarray

    @property
    def laplacian(self) -> ndarray:
        """The normalised adjacency D^-1/2 (A + I) D^-1/2, which the paper calls L, (N, N)."""
        scale = (1 + self.a.sum(1)) ** -0.5
        return np.asarray(scale[:, None] * (self.a + np.eye(len(self.a))) * scale)

    @property
    def weights(self) -> ndarray:
        """Θ, the least-squares weights of minimum norm, (D, C)."""
        return np.asarray(pinv(self.laplacian @ self.x, SMALL) @ self.y)

    def matrix(self, kind: str) -> ndarray:
        """Return L for structure, X for features, or Y for task."""
        return {"structure": self.laplacian, "features": self.x, "task": self.y}[kind]

    def changed(self, kind: str, share: float, rng: np.random.Generator) -> Linear:
        """Return the same graph with a fraction of its edges, features or labels at other nodes."""
        nodes = len(self.a)
        if kind == "structure":
            a, edges = self.a.copy(), np.argwhere(np.triu(self.a))
            first, second = edges[rng.random(len(edges)) < share].T
            a[first, second] = a[second, first] = 0
            for one in first:
                other = (one + rng.integers(1, nodes)) % nodes
                a[one, other] = a[other, one] = 1
            return replace(self, a=a)
        order, some = np.arange(nodes), np.flatnonzero(rng.random(nodes) < share)
        order[some] = rng.permutation(some)
        if kind == "features":
            return replace(self, x=self.x[order])
        return replace(self, y=self.y[order])


def bound(one: Linear, other: Linear, kind: str) -> float:
    """Return the right side of Eq. 12, 16 or 19, for graphs that differ only in this kind."""

    def square(matrix: ndarray) -> float:
        return float(norm(matrix, 2) ** 2)

    if kind == "task":
        return square(other.y - one.y) * square(pinv(one.laplacian @ one.x, SMALL))
    # The labels are equal, so ε_Y is zero.
    matrix, gap = one.matrix(kind), other.matrix(kind) - one.matrix(kind)
    left = square(matrix @ gap)
    ratio = square(gap) / left if left else 0.0
    if kind == "structure":
        return square(pinv(one.x, SMALL)) * (ratio * square(one.y))
    return ratio * square(pinv(one.laplacian, SMALL) @ one.y)


def client_matrices(graph: Graph, classes: int, seed: int, *, most: int = NODES) -> Linear:
    """Sample up to `most` nodes of a client, or of a set of graphs whole graphs, at least one.

    The label of a graph applies to all its nodes.
    """
    real, ends = real_edges(graph)
    root = np.arange(real.size) if graph.root is None else graph.root.numpy()
    groups = np.random.default_rng(seed).permutation(np.unique(root[real]))
    sizes = np.cumsum(np.bincount(root[real], minlength=real.size)[groups])
    chosen = groups[: max(1, np.searchsorted(sizes, most, side="right"))]
    nodes = np.flatnonzero(real & np.isin(root, chosen))
    pairs, _ = undirected_pairs(ends, real.size)
    a = adjacency(pairs, real.size)[nodes][:, nodes].toarray().astype(np.float64)
    x = sp.csr_array(plain_features(graph.x)[nodes]).toarray().astype(np.float64)
    return Linear(a, x, np.eye(classes)[graph.y.numpy()[root[nodes]]])


def weight_claim(federation: Federation, *, seed: int = 0, draws: int = 2) -> Claim:
    """Check the three propositions on every client's graph, and compare whole clients."""
    if len(federation) < 2:
        raise ConfigError("this command compares clients; give --clients 2 or more")
    owned = [graph.has_features for graph in federation.graphs]
    if any(one is not None and not bool(one.all()) for one in owned):
        raise ConfigError("weights need equal features at all clients; choose other data")
    rng = np.random.default_rng(seed)
    clients = [client_matrices(graph, federation.classes, seed) for graph in federation.graphs]
    lines, charts, sentences, numbers = [], [], [], dict[str, object]()
    for place, (number, kind) in enumerate(KINDS.items()):
        apart, moved, sides = [], [], []
        for client in clients:
            square = replace(client, x=rng.normal(size=client.a.shape))
            for part in np.repeat(SHARES, draws):
                other = client.changed(kind, part, rng)
                before, gap = client.matrix(kind), norm(other.weights - client.weights)
                if gap > 0:  # with few edges or labels, none may have moved
                    apart.append(norm(other.matrix(kind) - before) / norm(before))
                    moved.append(gap / norm(client.weights))
                twin = square.changed(kind, part, rng)
                step = float(norm(twin.weights - square.weights, 2) ** 2)
                sides.append((step, bound(square, twin, kind)))
        left, right = np.array(sides).T
        held = float((left <= right * (1 + 1e-6) + 1e-12).mean())
        x, y = np.array(apart), np.array(moved)
        numbers[number] = {"difference": x, "change": y, "left": left, "right": right}
        rank, _ = rank_correlation(x, y)
        lines.append([f"{number} ({kind})", *(f"{v:.2f}" for v in (rank, *exponent(x, y)))])
        lines[-1] += [f"{np.median(left):.3g}", f"{np.median(right):.3g}", f"{held:.0%}"]
        sentences.append(
            f"Proposition {number}: weights follow the {kind} (rank correlation {rank:.2f}); "
            f"the bound at the end of the proof holds for {held:.0%} of the pairs."
        )
        dots = (Dots(x, y, colour_of(place), opacity=0.4),)
        axes = Axis(f"difference of {kind}", log=True), Axis("change of Θ", log=True)
        charts.append(Chart(f"Proposition {number}", *axes, dots))
    columns = ("proposition", "rank correlation", "exponent", "R²", "left", "right", "bound holds")
    caption = (
        "Rank correlation, exponent and R² of ‖Θ' - Θ‖ / ‖Θ‖ over the same of L, X or Y, with the "
        "clients' features. Left and right: medians of both sides of the proof's last "
        "inequality, with square Gaussian features, for which its inverses exist."
    )
    title = f"Weights of a linear SGC against one change: {federation.name}"
    table = make_table(columns, lines, wrap=True, title=title, caption=caption)
    real, numbers["clients"] = _real_clients(federation, clients, seed)
    picture = Panels(title, (tuple(charts),), (13, 4.4))
    return Claim("weights", (table, real), tuple(sentences), picture, numbers)


def _real_clients(
    federation: Federation, clients: list[Linear], seed: int
) -> tuple[Table, dict[str, ndarray]]:
    """Return a table of rank correlations of ‖Θ_k - Θ_l‖ with the differences of clients' data.

    The second result contains the compared numbers of all pairs of clients k and l.
    """
    weights = [client.weights for client in clients]
    pairs = list(combinations(range(len(clients)), 2))
    at = tuple(np.array(pairs).T)
    found = {"weights": np.array([norm(weights[k] - weights[j], 2) for k, j in pairs])}
    measured = compare_graphs(federation, seed=seed)
    found |= {"structure": measured.structure[at], "features": measured.features[at]}
    found["task"] = jensen_shannon(np.stack([client.y.sum(0) for client in clients]))[at]
    lines = []
    for kind in KINDS.values():
        rank, chance = rank_correlation(found[kind], found["weights"])
        lines.append([kind, number_text(rank, 2), number_text(chance, 3)])
    caption = (
        f"{len(pairs)} pairs of clients, which differ in all three. Structure: distance of "
        "anonymous walks; features: divergence of connected nodes' similarity; task: of labels."
    )
    title = "Weights of whole clients against the differences of their data"
    names = ("difference", "ρ", "p")
    return make_table(names, lines, wrap=True, title=title, caption=caption), found
