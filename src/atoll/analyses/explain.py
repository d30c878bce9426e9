"""What a method that weighs edges has learned: `atoll explain`.

Edge weights are private. They are computed here from a client's own graph and private state, and
written to one folder per client, the client's side; the ledger of the run shows that nothing with
an edge axis ever crossed.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, Sparse, with_views
from atoll.core.tree import num_bytes
from atoll.data.measure.heterogeneity import embedding_distance
from atoll.engines.checkpoint import load_checkpoint, unpack_states
from atoll.engines.ledger import Ledger
from atoll.experiment.build import build_method
from atoll.experiment.folder import RunFolder
from atoll.experiment.problem import Problem
from atoll.present.chart import (
    BLUE,
    GREY,
    RED,
    Axis,
    Bars,
    Chart,
    Line,
    Mark,
    Panels,
    Texts,
    named,
    steps,
)
from atoll.present.chart_png import png


@dataclass(frozen=True, eq=False)
class ClientEdges:
    """One client's edges and what they weigh.

    Attributes:
        source: Node ids, (E,).
        target: Node ids, (E,).
        weight: Causal weight, (E,).
        alike: Whether both ends have the same label, (E,) bool; only nodes with a known label.
        norm: Frobenius norm of the weighted, normalised adjacency.
        norm_plain: The same with every edge counting fully.
    """

    source: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    alike: np.ndarray
    norm: float
    norm_plain: float


@dataclass(frozen=True, eq=False)
class Explanation:
    """All clients' edges, and how far apart same-class nodes of different clients are.

    Attributes:
        clients: One per client.
        distance: Average Wasserstein distance between same-class representations of two clients,
            by name: "all edges" (the trained network on the plain graph) and "causal edges".
        bytes_up: What a client sent in one round of training, at most, from the ledger.
        bytes_shared: What the shared networks and the client's weight in the average take.
    """

    clients: tuple[ClientEdges, ...]
    distance: dict[str, float]
    bytes_up: int
    bytes_shared: int


def explain(folder: Path, seed: int | None = None) -> Explanation:
    """Read a finished run and compute what its clients would see."""
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
        state = states[position]
        with torch.no_grad():
            weight = method.explain_edges(graph, message.for_one(position), state)
            if weight is None:
                raise ConfigError(
                    f"{made.config.method} does not weigh edges; `atoll explain` needs fedath"
                )
            weighted.append(method.predict(graph, message.for_one(position), state).numpy())
            plain.append(method.predict(graph, message.for_one(position), None).numpy())
        clients.append(_client_edges(graph, weight))
    labels = [graph.y.numpy() for graph in federation.graphs]
    distance = {
        "all edges": embedding_distance(plain, labels, seed=number),
        "causal edges": embedding_distance(weighted, labels, seed=number),
    }
    ledger = Ledger()
    ledger.restore(saved["ledger"])
    up = max(entry.up for entry in ledger.entries if entry.step == "train")
    shared = num_bytes(message.for_one(0))
    return Explanation(tuple(clients), distance, up, shared + clients_weight(federation.graphs[0]))


def clients_weight(graph: Graph) -> int:
    """Bytes of the one number that says how much a client counts."""
    return graph.real.element_size()


def _client_edges(graph: Graph, weight: Tensor) -> ClientEdges:
    loops = graph.views["loops"]
    assert isinstance(loops, Sparse)
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


def write_explanation(found: Explanation, out: Path, form: str = "csv") -> list[Path]:
    """One folder per client with its edges; a summary and plots beside them."""
    written = []
    for number, client in enumerate(found.clients):
        folder = out / f"client-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        written.append(_write_edges(client, folder / f"edges.{form}"))
    summary = {
        "median weight, same class": _median(found, alike=True),
        "median weight, different class": _median(found, alike=False),
        "distance between same-class nodes of different clients": found.distance,
        "norm of the causal adjacency": [c.norm for c in found.clients],
        "norm of the plain adjacency": [c.norm_plain for c in found.clients],
        "bytes up per client and round": found.bytes_up,
        "bytes of the shared networks and the client's weight": found.bytes_shared,
        "bytes up that these do not explain": found.bytes_up - found.bytes_shared,
    }
    path = out / "summary.json"
    path.write_text(json.dumps(summary, indent=2))
    return [*written, path, *_plots(found, out)]


def explanation_table(found: Explanation) -> Table:
    """The summary for people."""
    plain, causal = found.distance["all edges"], found.distance["causal edges"]
    table = Table(
        title="Median causal weight of edges, and size of the propagation matrix",
        caption=f"Same-class nodes of different clients are {plain:.3f} apart with all edges and "
        f"{causal:.3f} with causal weights (Wasserstein). {found.bytes_up:,} bytes went up per "
        f"client and round; the shared networks explain {found.bytes_shared:,}.",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("client", "edges", "same class", "different class", "norm", "norm, all edges"):
        table.add_column(name, justify="right")
    for number, client in enumerate(found.clients):
        picked = [client.weight[client.alike == alike] for alike in (True, False)]
        medians = [f"{np.median(weights):.2f}" if weights.size else "-" for weights in picked]
        norms = (f"{client.norm:.2f}", f"{client.norm_plain:.2f}")
        table.add_row(str(number), str(client.weight.size), *medians, *norms)
    return table


def _median(found: Explanation, *, alike: bool) -> float:
    weights = np.concatenate([c.weight[c.alike == alike] for c in found.clients])
    return float(np.median(weights)) if weights.size else float("nan")


def _write_edges(client: ClientEdges, path: Path) -> Path:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = ("source", "target", "weight", "same_class")
        columns = (client.source, client.target, client.weight, client.alike)
        pq.write_table(pa.table(dict(zip(names, columns, strict=True))), path)
        return path
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["source", "target", "weight", "same_class"])
        rows = zip(client.source, client.target, client.weight, client.alike, strict=True)
        writer.writerows((s, t, f"{w:.6f}", int(a)) for s, t, w, a in rows)
    return path


def _plots(found: Explanation, out: Path) -> list[Path]:
    path = out / "edges.png"
    path.write_bytes(png(plot(found)))
    return [path]


def plot(found: Explanation) -> Panels:
    """Which edges count, how much each client's matrix shrinks, and how far clients are apart."""
    charts = (_weights_chart(found), _norms_chart(found), _distance_chart(found))
    return Panels("", (charts,), (13, 4.6))


def _weights_chart(found: Explanation) -> Chart:
    """Densities of the weights of edges, by whether both ends have one class."""
    marks: list[Mark] = []
    for alike, who, colour in ((True, "same class", BLUE), (False, "different class", RED)):
        values = np.concatenate([c.weight[c.alike == alike] for c in found.clients])
        if values.size:
            name = f"{who} (median {np.median(values):.2f})"
            density, edges = np.histogram(values, bins=40, range=(0, 1), density=True)
            outline = steps([0.0, *edges], [0.0, *density, 0.0])
            marks.append(Line(*outline, colour, name, width=2))
    x, y = Axis("causal weight of the edge"), Axis("density", 0.0)
    return Chart("Which edges count", x, y, tuple(marks), legend="below")


def _norms_chart(found: Explanation) -> Chart:
    place = np.arange(len(found.clients))
    marks = (
        Bars(place - 0.2, [c.norm_plain for c in found.clients], 0.0, 0.4, GREY, "all edges"),
        Bars(place + 0.2, [c.norm for c in found.clients], 0.0, 0.4, BLUE, "causal edges"),
    )
    x, y = named("client", place.tolist()), Axis("Frobenius norm")
    return Chart("Size of the propagation matrix", x, y, marks, legend="below")


def _distance_chart(found: Explanation) -> Chart:
    values = list(found.distance.values())
    colours = (GREY, BLUE)
    bars = [Bars([i], [v], 0.0, 0.6, colours[i % 2]) for i, v in enumerate(values)]
    words = Texts(range(len(values)), values, [f"{value:.2f}" for value in values])
    y = Axis("average Wasserstein distance", room=0.12)
    title = "How far apart same-class nodes\nof different clients are"
    return Chart(title, named("", list(found.distance)), y, (*bars, words))
