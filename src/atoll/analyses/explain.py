"""Explain the predicted class of a node, and the edge weights of a method: `atoll explain`.

PyG's GNNExplainer selects a shortlist of features and neighbours on the exported network. Its masks
saturate, so they do not rank well. For each candidate we compute the prediction again without it,
and rank by the change of the probability.

Edge weights (`--edges`) are private. This module computes them from a client's graph and private
state, and writes them to one folder per client. The summary compares the bytes that a client sent
with the bytes of the shared networks, so it would show edge weights that were sent.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, Sparse, with_views
from atoll.core.tree import num_bytes
from atoll.data.divide import InducedSubgraphs
from atoll.data.measure.heterogeneity import embedding_distance
from atoll.data.source import Source
from atoll.engines.codec import load_checkpoint, unpack_states
from atoll.engines.ledger import Ledger
from atoll.experiment.build import build_method
from atoll.experiment.export import module
from atoll.experiment.exported import Network
from atoll.experiment.folder import RunFolder
from atoll.experiment.predict import Trained, edges_before, load_data, near, prepare
from atoll.experiment.problem import Problem
from atoll.present import chart as plot
from atoll.present.chart import Axis, Bars, Chart, Panels
from atoll.present.tables import Table, make_table

STEPS = 200  # steps of the explainer's optimizer
SHORTLIST = 4  # candidates per shown feature or neighbour
Tensors = tuple[Tensor, Tensor, Tensor | None]  # features, edges, weights
Without = Callable[[Tensors, int], Tensors]
Members = list[tuple[str, np.ndarray]]  # the name and the nodes of each client


@dataclass(frozen=True, eq=False)
class ClientEdges:
    """The E edges of one client between nodes with a known label, and their weights."""

    source: np.ndarray  # node ids, (E,)
    target: np.ndarray  # node ids, (E,)
    weight: np.ndarray  # causal weight, (E,)
    alike: np.ndarray  # whether both ends have the same label, (E,) bool
    norm: float  # Frobenius norm of the weighted, normalised adjacency
    norm_plain: float  # the same with weight one for every edge


@dataclass(frozen=True, eq=False)
class Explanation:
    """The edges of all clients, and the distance of same-class nodes of different clients."""

    clients: tuple[ClientEdges, ...]
    distance: dict[str, float]  # average Wasserstein, for "all edges" (plain graph), "causal edges"
    bytes_up: int  # maximum bytes that a client sends in one training round, from the ledger
    bytes_shared: int  # bytes of the shared networks and of the client's weight in the average

    def weights(self, *, alike: bool) -> np.ndarray:
        """Return the weights of all edges inside classes (`alike`), or between classes."""
        return np.concatenate([c.weight[c.alike == alike] for c in self.clients])


def explain(folder: Path, seed: int | None = None) -> Explanation:
    """Read a finished run and compute the edge weights of its clients."""
    run = RunFolder(folder)
    config = run.located_config
    number = config.seed if seed is None else seed
    made = Problem.of(config).divide(number)
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
            if (weight := method.explain_edges(graph, model, state)) is None:
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
    weight_bytes = federation.graphs[0].real.element_size()  # of the client's weight in the average
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
    """Return ‖D^-1/2 (W + I) D^-1/2‖_F for edge weights W: FedATH's ‖P‖ (Corollary 5.2)."""
    rows, columns = loops.rows.long(), loops.columns.long()
    degree = torch.zeros(loops.shape[0], dtype=weight.dtype).index_add(0, rows, weight)
    return float((weight / (degree[rows] * degree[columns]).sqrt()).square().sum().sqrt())


def explanation_files(found: Explanation, form: str = "csv") -> dict[str, object]:
    """Return each client's edges, in its own folder, a summary and the picture, for `write_all`."""
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
    """Make a table of the median edge weights and the norms of each client."""
    plain, causal = found.distance["all edges"], found.distance["causal edges"]
    names = ("client", "edges", "same class", "different class", "norm", "norm, all edges")
    lines = []
    for number, client in enumerate(found.clients):
        picked = [client.weight[client.alike == alike] for alike in (True, False)]
        medians = [f"{np.median(weights):.2f}" if weights.size else "-" for weights in picked]
        norms = (f"{client.norm:.2f}", f"{client.norm_plain:.2f}")
        lines.append([number, client.weight.size, *medians, *norms])
    caption = (
        f"The distance of same-class nodes of different clients is {plain:.3f} with all edges and "
        f"{causal:.3f} with causal weights (Wasserstein). A client sent {found.bytes_up:,} bytes "
        f"per round; the shared networks explain {found.bytes_shared:,}."
    )
    title = "Median causal weight of edges, and size of the propagation matrix"
    return make_table(names, lines, left=0, wrap=True, title=title, caption=caption)


def _edges(client: ClientEdges, form: str) -> Table | bytes:
    """Return the edges as a table, or as the bytes of a parquet file."""
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
    """Plot edge weights, sizes of the propagation matrices, and distances between clients."""
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
    title = "Distance of same-class nodes\nof different clients"
    weight, norm = Axis("causal weight of the edge"), Axis("Frobenius norm")
    distance = Axis("average Wasserstein distance", room=0.12)
    clients = plot.named("client", place)
    charts = (
        Chart("Weights of the edges", weight, Axis("density"), tuple(weights), legend="below"),
        Chart("Size of the propagation matrix", clients, norm, tuple(norms), legend="below"),
        Chart(title, plot.named("", list(found.distance)), distance, tuple(distances)),
    )
    return Panels("", (charts,), (13, 4.6))


@dataclass(frozen=True)
class Reason:
    """A feature or a neighbour, and its effect."""

    name: str
    value: float | None  # of the feature at the node, as the network sees it; None for a neighbour
    importance: float  # by the explainer, from 0 to 1, relative to the maximum
    without: float  # the probability of the predicted class without it


@dataclass(frozen=True)
class NodeExplanation:
    """The reasons for the prediction of one node, the largest decrease of probability first."""

    node: str
    client: str
    label: str
    probability: float
    features: tuple[Reason, ...]
    neighbours: tuple[Reason, ...]


def explain_node(
    folder: Path,
    node: str,
    *,
    data: Path | None = None,
    joined: bool = False,
    client: str | None = None,
    seed: int | None = None,
    top: int = 10,
) -> NodeExplanation:
    """Explain the prediction of a node in the training data, or in new `data`.

    With `joined`, new nodes join the training graph. `top` limits features and neighbours.
    """
    trained = Trained.of(folder, seed, "cpu", None)
    source, start, members = _nodes(trained, data, joined, client)
    found, place, own = _find(source, start, members, node, client)
    net = module(trained, found)
    part = InducedSubgraphs(source).part(own)
    at = int(np.flatnonzero(own == place)[0])
    hops = (trained.method.reach or 0) + 1  # the degrees of the last nodes also matter
    around = near(edges_before(part), np.array([at]), hops)
    part, at = InducedSubgraphs(part).part(around), int(np.flatnonzero(around == at)[0])
    dense = part.x.toarray() if isinstance(part.x, sp.csr_array) else part.x
    weight = None if part.weight is None else torch.from_numpy(part.weight)
    graph = x, *_ = torch.from_numpy(dense), torch.from_numpy(part.edges), weight
    with torch.no_grad():
        chances = net(*graph)[at].softmax(-1)
    chosen = int(chances.argmax())
    by_feature, by_node = _masks(net, graph, at)
    encoder, ids = trained.encoder, _ids(source, start)[own][around]
    names = encoder.names if encoder else [f"feature {i}" for i in range(x.shape[1])]
    columns = _tried(net, graph, at, chosen, by_feature, _without_feature, top)
    nodes = _tried(net, graph, at, chosen, by_node, _without_neighbour, top)
    return NodeExplanation(
        node=node,
        client=found,
        label=trained.classes[chosen],
        probability=float(chances[chosen]),
        features=tuple(Reason(names[i], float(x[at, i]), *rest) for i, *rest in columns),
        neighbours=tuple(Reason(str(ids[i]), None, *rest) for i, *rest in nodes),
    )


def _nodes(
    trained: Trained, data: Path | None, joined: bool, client: str | None
) -> tuple[Source, int, Members]:
    """Return the graph, the number of nodes before the new nodes, and the clients."""
    if data is None:
        if joined:
            raise ConfigError("--joined needs new data; give them with --data NEW")
        if "data" in trained.config.objects:
            raise ConfigError("the run was started in Python with data; give them with --data")
        found, start, _ = load_data(trained, trained.config.data, None, joined=False)
        if isinstance(found, Source):
            source, _ = Problem.of(trained.config).prepare(found)
            parts = RunFolder(trained.path).partition(trained.seed)
            return source, 0, list(zip(trained.names, parts, strict=True))
    else:
        found, start, _ = load_data(trained, data, client, joined=joined)
        if isinstance(found, Source):
            source, owner = prepare(trained, found, start, client)
            own = [(str(name), np.flatnonzero(owner == name)) for name in np.unique(owner)]
            return source, start, own
    raise ConfigError(f"'{found.name}' is already divided; give one whole graph with --data")


def _ids(source: Source, start: int) -> np.ndarray:
    known = source.columns.get("id")
    return (np.arange(source.num_nodes) - start if known is None else known).astype(str)


def _find(
    source: Source, start: int, members: Members, node: str, client: str | None
) -> tuple[str, int, np.ndarray]:
    """Find the client of a node, the node's number, and all nodes of that client."""
    ids = _ids(source, start)
    places = np.flatnonzero(ids == node)
    if not places.size:
        like = ", ".join(f"'{name}'" for name in ids[start : start + 3])
        raise ConfigError(f"'{source.name}' has no node '{node}'; its ids are like {like}")
    wanted = [one for one in members if client in (None, one[0])]
    found = [(name, int(p), own) for name, own in wanted for p in places if p in own]
    if len(found) != 1:
        has = ", ".join(sorted({name for name, *_ in found})) or "none of the chosen clients"
        raise ConfigError(f"node '{node}' belongs to {has}; choose its client with --client NAME")
    return found[0]


def _masks(net: Network, graph: Tensors, at: int) -> tuple[Tensor, Tensor]:
    """Return the importance of each feature, (D,), and of each node as a neighbour, (N,)."""
    from torch_geometric.explain import Explainer, GNNExplainer

    x, edges, weight = graph
    kind = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    looks = set(net.kinds) != {"linear"} and bool((edges[1] == at).any())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = Explainer(
            net,
            GNNExplainer(epochs=STEPS),
            explanation_type="model",
            node_mask_type="attributes",
            edge_mask_type="object" if looks else None,
            model_config=kind,
        )(x, edges, weight=weight, index=at)
    per_node = torch.zeros(len(x))
    if looks:
        per_node = per_node.scatter_reduce(0, edges[0], found.edge_mask, "amax")
    per_node[at] = 0
    return (found.node_mask * (x != 0)).sum(0), per_node


def _tried(
    net: Network, graph: Tensors, at: int, chosen: int, mask: Tensor, without: Without, top: int
) -> list[tuple[int, float, float]]:
    """Return (position, importance, probability without it) of `top` candidates.

    The candidate with the lowest probability is first.
    """
    order, found = mask.argsort(descending=True, stable=True).tolist(), []
    for place in order[: SHORTLIST * top]:
        if mask[place] > 0:
            with torch.no_grad():
                chances = net(*without(graph, place))[at].softmax(-1)
            found.append((place, float(mask[place] / mask.max()), float(chances[chosen])))
    return sorted(found, key=lambda one: one[2])[:top]


def _without_feature(graph: Tensors, place: int) -> Tensors:
    x, edges, weight = graph
    kept = torch.arange(x.shape[1]) != place
    return x * kept, edges, weight


def _without_neighbour(graph: Tensors, place: int) -> Tensors:
    x, edges, weight = graph
    kept = (edges != place).all(0)
    return x, edges[:, kept], None if weight is None else weight[kept]


def node_tables(found: NodeExplanation) -> list[Table]:
    """Make tables of the found features and neighbours, in order of the change in probability."""
    p, name = found.probability, found.label
    title = f"Node {found.node} of client {found.client or 'unknown'}: {name}, probability {p:.3f}"
    rows = [(r.name, f"{r.value:.3g}", *_numbers(r, p)) for r in found.features]
    caption = "value: after encoding. change: of the probability, if the feature is zero nearby."
    columns = ("feature", "value", "importance", "change")
    features = make_table(columns, rows, title=title, caption=caption)
    others = [(r.name, *_numbers(r, p)) for r in found.neighbours]
    caption = "change: of the probability, if the neighbour's edges are removed."
    if not others:
        caption = "No neighbour matters: the node has no neighbours, or the network ignores them."
    return [features, make_table(("neighbour", *columns[2:]), others, caption=caption)]


def _numbers(reason: Reason, probability: float) -> tuple[str, str]:
    return f"{reason.importance:.2f}", f"{reason.without - probability:+.3f}"
