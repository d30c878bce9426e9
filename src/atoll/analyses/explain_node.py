"""Why a model predicts what it does for one node: `atoll explain RUN --node ID`.

PyG's GNNExplainer makes a shortlist of features and neighbours on the exported network. Its masks
saturate, so they are a poor ranking. For each on the shortlist the prediction is computed again
without it, and the change of the probability ranks them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.data.divide import InducedSubgraphs
from atoll.data.source import Source
from atoll.experiment.export import module
from atoll.experiment.exported import Network
from atoll.experiment.folder import RunFolder
from atoll.experiment.predict import Trained, load_data, prepare
from atoll.experiment.problem import Problem
from atoll.present.tables import Table, make_table

STEPS = 200  # of the explainer's optimizer
SHORTLIST = 4  # candidates for each one that is shown
Tensors = tuple[Tensor, Tensor, Tensor | None]  # features, edges, weights
Without = Callable[[Tensors, int], Tensors]
Members = list[tuple[str, np.ndarray]]
"""The name and the nodes of each client."""


@dataclass(frozen=True)
class Reason:
    """A feature or a neighbour, and how much it counts."""

    name: str
    value: float | None  # of the feature at the node, as the network sees it; None: a neighbour
    importance: float  # by the explainer, 0 to 1 relative to the most important one
    without: float  # the probability of the predicted class without it


@dataclass(frozen=True)
class NodeExplanation:
    """The reasons for the prediction of one node, those that speak most for it first."""

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
    """Explain the prediction of a node of the training data, or of new `data`."""
    trained = Trained.of(folder, seed, "cpu", None)
    source, start, members = _nodes(trained, data, joined, client)
    found, place, own = _find(source, start, members, node, client)
    net = module(trained, found)
    part = InducedSubgraphs(source).part(own)
    at = int(np.flatnonzero(own == place)[0])
    near = _near(part, at, (trained.method.reach or 0) + 1)  # degrees of the last nodes count, too
    part, at = InducedSubgraphs(part).part(near), int(np.flatnonzero(near == at)[0])
    graph = _tensors(part)
    with torch.no_grad():
        chances = net(*graph)[at].softmax(-1)
    chosen = int(chances.argmax())
    by_feature, by_node = _masks(net, graph, at)
    encoder, x, ids = trained.encoder, graph[0], _ids(source, start)[own][near]
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
    """The graph, the number of nodes before the new ones, and the clients."""
    if data is None:
        if joined:
            raise ConfigError("--joined is for new data; give them with --data NEW")
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
    raise ConfigError(f"'{found.name}' is no undivided graph; explain needs one with --data")


def _ids(source: Source, start: int) -> np.ndarray:
    known = source.columns.get("id")
    return (np.arange(source.num_nodes) - start if known is None else known).astype(str)


def _find(
    source: Source, start: int, members: Members, node: str, client: str | None
) -> tuple[str, int, np.ndarray]:
    """The client that has a node, the node's number, and all nodes of that client."""
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


def _near(part: Source, at: int, hops: int) -> np.ndarray:
    """The nodes that are at most some edges before a node."""
    n, (begins, ends) = part.num_nodes, part.edges
    before = sp.csr_array((np.ones(len(ends), np.int8), (ends, begins)), shape=(n, n))
    seen = np.array([at])
    for _ in range(hops):
        seen = np.union1d(seen, before[seen].indices)
    return seen


def _tensors(part: Source) -> Tensors:
    x = part.x.toarray() if isinstance(part.x, sp.csr_array) else part.x
    weight = None if part.weight is None else torch.from_numpy(part.weight)
    return torch.from_numpy(x), torch.from_numpy(part.edges), weight


def _masks(net: Network, graph: Tensors, at: int) -> tuple[Tensor, Tensor]:
    """The importance of each feature, (D,), and of each node as a neighbour, (N,)."""
    from torch_geometric.explain import Explainer, GNNExplainer

    x, edges, weight = graph
    looks = set(net.kinds) != {"linear"} and bool((edges[1] == at).any())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = Explainer(
            net,
            GNNExplainer(epochs=STEPS),
            explanation_type="model",
            node_mask_type="attributes",
            edge_mask_type="object" if looks else None,
            model_config={
                "mode": "multiclass_classification",
                "task_level": "node",
                "return_type": "raw",
            },
        )(x, edges, weight=weight, index=at)
    per_node = torch.zeros(len(x))
    if looks:
        per_node = per_node.scatter_reduce(0, edges[0], found.edge_mask, "amax")
    per_node[at] = 0
    return (found.node_mask * (x != 0)).sum(0), per_node


def _tried(
    net: Network, graph: Tensors, at: int, chosen: int, mask: Tensor, without: Without, top: int
) -> list[tuple[int, float, float]]:
    """Place, importance and the chosen class's probability without it, the lowest first."""
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
    """The features and the neighbours that decided."""
    p, name = found.probability, found.label
    title = f"Node {found.node} of client {found.client or 'unknown'}: {name}, probability {p:.3f}"
    rows = [(r.name, f"{r.value:.3g}", *_numbers(r, p)) for r in found.features]
    caption = "value: as the network sees it. change: of the probability, if it is zero nearby."
    columns = ("feature", "value", "importance", "change")
    first = make_table(columns, rows, title=title, caption=caption)
    others = [(r.name, *_numbers(r, p)) for r in found.neighbours]
    caption = "change: of the probability, if the neighbour's edges are removed."
    if not others:
        caption = "No neighbour counts: the node has none, or the network looks at none."
    second = make_table(("neighbour", "importance", "change"), others, caption=caption)
    return [first, second]


def _numbers(reason: Reason, probability: float) -> tuple[str, str]:
    return f"{reason.importance:.2f}", f"{reason.without - probability:+.3f}"
