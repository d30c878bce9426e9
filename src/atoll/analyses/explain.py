"""What a method that weighs edges has learned: `atoll explain`.

Edge weights are private. They are computed here from a client's own graph and private state, and
written to one folder per client, the client's side; the ledger of the run shows that nothing with
an edge axis ever crossed.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, Sparse, with_views
from atoll.core.tree import num_bytes
from atoll.data.measure.heterogeneity import embedding_distance
from atoll.engines.codec import load_checkpoint, unpack_states
from atoll.engines.ledger import Ledger
from atoll.experiment.build import build_method
from atoll.experiment.folder import RunFolder
from atoll.experiment.problem import Problem
from atoll.present import chart as plot
from atoll.present.chart import Axis, Bars, Chart, Panels
from atoll.present.tables import Column, Table, make_table


@dataclass(frozen=True, eq=False)
class ClientEdges:
    """The E edges of one client between nodes with a known label, and their weights."""

    source: np.ndarray  # node ids, (E,)
    target: np.ndarray  # node ids, (E,)
    weight: np.ndarray  # causal weight, (E,)
    alike: np.ndarray  # whether both ends have the same label, (E,) bool
    norm: float  # Frobenius norm of the weighted, normalised adjacency
    norm_plain: float  # the same with every edge counting fully


@dataclass(frozen=True, eq=False)
class Explanation:
    """All clients' edges, and how far apart same-class nodes of different clients are."""

    clients: tuple[ClientEdges, ...]
    distance: dict[str, float]  # average Wasserstein, for "all edges" (plain graph), "causal edges"
    bytes_up: int  # sent by a client in one round of training, at most, from the ledger
    bytes_shared: int  # size of the shared networks and of the client's weight in the average

    def weights(self, *, alike: bool) -> np.ndarray:
        """The weights of all edges inside classes, or between classes."""
        return np.concatenate([c.weight[c.alike == alike] for c in self.clients])


def explain(folder: Path, seed: int | None = None) -> Explanation:
    """Read a finished run and compute the edge weights of its clients."""
    run = RunFolder(folder)
    number = run.config.seed if seed is None else seed
    made = Problem.of(run.config).divide(number)
    federation = made.federation
    method = build_method(made.config, federation.features, federation.classes)
    saved = load_checkpoint(run.checkpoint(number))
    message = method.deploy(saved["server"])
    states = unpack_states(saved["states"])
    clients, plain, weighted = [], [], []
    for position, bare in enumerate(federation.graphs):
        graph = with_views(bare, method.views)
        model, state = message.for_one(position), states[position]
        with torch.no_grad():
            weight = method.explain_edges(graph, model, state)
            if weight is None:
                name = made.config.method
                raise ConfigError(f"{name} does not weigh edges; `atoll explain` needs fedath")
            weighted.append(method.predict(graph, model, state).numpy())
            plain.append(method.predict(graph, model, None).numpy())
        clients.append(_client_edges(graph, weight))
    labels = [graph.y.numpy() for graph in federation.graphs]
    kinds = {"all edges": plain, "causal edges": weighted}
    distance = {n: embedding_distance(kind, labels, seed=number) for n, kind in kinds.items()}
    ledger = Ledger()
    ledger.restore(saved["ledger"])
    up = max(entry.up for entry in ledger.entries if entry.step == "train")
    weight_bytes = federation.graphs[0].real.element_size()  # of the client's share in the average
    shared = num_bytes(message.for_one(0)) + weight_bytes
    return Explanation(tuple(clients), distance, up, shared)


def _client_edges(graph: Graph, weight: Tensor) -> ClientEdges:
    loops = graph.sparse_view("loops")
    rows, columns = loops.rows.long(), loops.columns.long()
    edge = rows != columns
    known = (graph.train + graph.val + graph.test) > 0
    kept = edge & known[rows] & known[columns]
    return ClientEdges(
        source=graph.ids[columns[kept]].numpy(),
        target=graph.ids[rows[kept]].numpy(),
        weight=weight[kept].numpy(),
        alike=(graph.y[rows] == graph.y[columns])[kept].numpy(),
        norm=_norm(loops, torch.where(edge, weight, torch.ones_like(weight))),
        norm_plain=_norm(loops, torch.ones_like(weight)),
    )


def _norm(loops: Sparse, weight: Tensor) -> float:
    """‖D^-1/2 (A∘w + I) D^-1/2‖_F, the quantity of FedATH's Corollary 5.2."""
    rows, columns = loops.rows.long(), loops.columns.long()
    degree = torch.zeros(loops.shape[0], dtype=weight.dtype).index_add(0, rows, weight)
    return float((weight / (degree[rows] * degree[columns]).sqrt()).square().sum().sqrt())


def explanation_files(found: Explanation, form: str = "csv") -> dict[str, object]:
    """One folder per client with its edges, a summary and the picture, for `write_all`."""
    clients = enumerate(found.clients)
    edges = {f"client-{number}/edges.{form}": _edges(own, form) for number, own in clients}
    inside, between = (found.weights(alike=alike) for alike in (True, False))
    summary = {
        "median weight, same class": np.median(inside) if inside.size else None,
        "median weight, different class": np.median(between) if between.size else None,
        "distance between same-class nodes of different clients": found.distance,
        "norm of the causal adjacency": [c.norm for c in found.clients],
        "norm of the plain adjacency": [c.norm_plain for c in found.clients],
        "bytes up per client and round": found.bytes_up,
        "bytes of the shared networks and the client's weight": found.bytes_shared,
        "bytes up that these do not explain": found.bytes_up - found.bytes_shared,
    }
    return {**edges, "summary.json": summary, "edges.png": edge_charts(found)}


def explanation_table(found: Explanation) -> Table:
    """The medians and norms of each client."""
    plain, causal = found.distance["all edges"], found.distance["causal edges"]
    names = ("client", "edges", "same class", "different class", "norm", "norm, all edges")
    lines = []
    for number, client in enumerate(found.clients):
        picked = [client.weight[client.alike == alike] for alike in (True, False)]
        medians = [f"{np.median(weights):.2f}" if weights.size else "-" for weights in picked]
        norms = (f"{client.norm:.2f}", f"{client.norm_plain:.2f}")
        lines.append([number, client.weight.size, *medians, *norms])
    caption = (
        f"Same-class nodes of different clients are {plain:.3f} apart with all edges and "
        f"{causal:.3f} with causal weights (Wasserstein). {found.bytes_up:,} bytes went up per "
        f"client and round; the shared networks explain {found.bytes_shared:,}."
    )
    columns = [Column(name, wrap=True) for name in names]
    title = "Median causal weight of edges, and size of the propagation matrix"
    return make_table(columns, lines, title=title, caption=caption)


def _edges(client: ClientEdges, form: str) -> Table | bytes:
    """The edges as a table, or as the bytes of a parquet file."""
    names = ("source", "target", "weight", "same_class")
    columns = (client.source, client.target, client.weight, client.alike)
    if form == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        content = io.BytesIO()
        pq.write_table(pa.table(dict(zip(names, columns, strict=True))), content)
        return content.getvalue()
    rows = zip(*columns, strict=True)
    return make_table(names, ((s, t, f"{w:.6f}", int(a)) for s, t, w, a in rows))


def edge_charts(found: Explanation) -> Panels:
    """Weights of edges, sizes of the propagation matrices, and distances between clients."""
    weights: list[plot.Mark] = []
    kinds = ((True, "same class", plot.BLUE), (False, "different class", plot.RED))
    for alike, name, colour in kinds:
        values = found.weights(alike=alike)
        if values.size:
            density, ends = np.histogram(values, bins=40, range=(0, 1), density=True)
            x, y = np.repeat(ends, 2), np.concatenate([[0], np.repeat(density, 2), [0]])
            label = f"{name} (median {np.median(values):.2f})"
            weights.append(plot.Line(x, y, colour, label, width=2))
    place = np.arange(len(found.clients))
    norms, distances = list[plot.Mark](), list[plot.Mark]()
    sides = ((-0.2, "norm_plain", "all edges", plot.GREY), (0.2, "norm", "causal edges", plot.BLUE))
    for number, (side, field, name, colour) in enumerate(sides):
        lengths = [getattr(client, field) for client in found.clients]
        norms.append(Bars(place + side, lengths, width=0.4, colour=colour, name=name))
        distances.append(Bars([number], [found.distance[name]], width=0.6, colour=colour))
    apart = list(found.distance.values())
    distances.append(plot.Texts(range(len(apart)), apart, [f"{value:.2f}" for value in apart]))
    title = "How far apart same-class nodes\nof different clients are"
    weight, norm = Axis("causal weight of the edge"), Axis("Frobenius norm")
    distance = Axis("average Wasserstein distance", room=0.12)
    clients = plot.named("client", place)
    charts = (
        Chart("Which edges count", weight, Axis("density"), tuple(weights), legend="below"),
        Chart("Size of the propagation matrix", clients, norm, tuple(norms), legend="below"),
        Chart(title, plot.named("", list(found.distance)), distance, tuple(distances)),
    )
    return Panels("", (charts,), (13, 4.6))
