"""Check FedATH's Corollary 5.2 numerically: both sides of Eq. 14, and of the steps of its proof.

    d(k, l) <= 1 + B_W² B_X (1 / (D_min m) + 1 / D_min²) (‖A_k‖ + ‖A_l‖) + B_W² / m ‖X_k - X_l‖

The paper concludes that edge weights below one reduce the bound. Therefore we compute every side
twice after a round: with all edges (raw), and with the client's own edge weights (causal).

Here d(k, l) is the divergence of clients k and l. Two networks disagree on a fraction of a client's
nodes. d is twice the largest difference of this fraction between k and l, over all pairs of
networks. We use only the networks of the next round's clients, so our d is a lower estimate.

m is the size of the smallest client. A larger client is represented by m random nodes, with their
degrees in its whole graph. A is the adjacency and X the features of the m nodes. A includes
self-loops, because Eq. 26 writes P = D^-1/2 A D^-1/2 with the degrees D. D_min is the smallest
degree in both clients. Norms are Frobenius norms. B_W is the largest norm of a network's weight
matrix, and B_X the largest norm of a client's X.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import msgspec
import numpy as np
import torch
from torch import Tensor

from atoll.analyses.claim import Claim
from atoll.core.errors import ConfigError, counted
from atoll.core.graph import Graph, with_views
from atoll.core.random import fold, make_key
from atoll.core.tree import Tree
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig
from atoll.experiment.hardware import tuned_process
from atoll.experiment.problem import Problem, need_one_graph
from atoll.experiment.rounds import Experiment, Run
from atoll.methods.fedath import FedATH
from atoll.present.chart import BLUE, RED, Axis, Chart, Line, Panels
from atoll.present.tables import Table, make_table

GRAPHS = ("raw", "causal")
STEPS = {
    "Eq. 14": "divergence of two clients, and its bound",
    "Eq. 21": "outputs of one network on two clients",
    "Eq. 25": "entrywise 1-norm, and √rank times ‖·‖_F",
    "Eq. 35": "squared differences of degrees, and m",
    "Eq. 38": "T2 of the proof",
    "Eq. 39": "‖P_k - P_l‖_F",
}
"""The inequalities that we compute."""
SIZES = ("‖A‖_F", "D_min", "‖P_k - P_l‖_F")
Part = tuple[Tensor, Tensor, Tensor, Tensor]  # A, degrees, P and X of the selected nodes
Numbers = dict[str, np.ndarray]


@tuned_process()
def follow_bound(
    config: RunConfig, *, every: int = 20, on_round: Callable[[int], None] | None = None
) -> Claim:
    """Train FedATH. Compute both sides of `STEPS` at the start, each `every` rounds and the end."""
    found: dict[int, list[Numbers]] = {}
    for seed in range(config.seed, config.seed + config.seeds):
        made = Problem.of(msgspec.structs.replace(config, seed=seed)).divide(seed)
        need_one_graph(made.federation)
        federation, full = made.federation, made.config
        method = build_method(full, federation.features, federation.classes)
        if not isinstance(method, FedATH) or method.net.layers != 2:
            raise ConfigError(f"Corollary 5.2 is about fedath with two layers, not {full.method}")
        if len(federation) < 2:
            raise ConfigError("the corollary compares two clients; give --clients 2 or more")
        run = Experiment(method, federation, rounds=full.rounds or 100, seed=seed).begin()
        run.start()
        graphs = [with_views(graph, method.views) for graph in federation.graphs]
        found.setdefault(0, []).append(_measure(method, run, graphs))
        while not run.finished:
            run.advance()
            number = run.history.rounds
            if number % every == 0 or run.finished:
                found.setdefault(number, []).append(_measure(method, run, graphs))
            if on_round is not None:
                on_round(number)
    return _claim(config, found)


def _measure(method: FedATH, run: Run, graphs: Sequence[Graph]) -> Numbers:
    """Return `_sides` with all edges and with edge weights, under names such as "Eq. 14 raw"."""
    message, clients = method.deploy(run.server).tree, list(enumerate(graphs))
    states = run.simulation.engine.export_states()
    key = fold(make_key(run.experiment.seed), "bound", run.history.rounds)
    replies = [method.train(graph, message, states[n], fold(key, n))[0] for n, graph in clients]
    trained, size = [reply.model["causal"] for reply in replies], min(g.num_nodes for g in graphs)
    found: Numbers = {}
    for kind in GRAPHS:
        parts = []
        for n, graph in clients:
            with torch.no_grad():
                own = method.explain_edges(graph, message, states[n])
            nodes = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(n))
            weight = own if kind == "causal" else torch.ones_like(own)
            parts.append(_matrices(graph, weight, nodes[:size].sort().values))
        sides = _sides(parts, message["causal"], trained)
        found |= {f"{name} {kind}": values for name, values in sides.items()}
    return found


def _matrices(graph: Graph, weight: Tensor, nodes: Tensor) -> Part:
    """Return A with self-loops, degrees, P and X of these nodes, in double precision."""
    loops = graph.sparse_view("loops")
    values = torch.where(loops.rows == loops.columns, 1.0, weight).double()
    whole = replace(loops, values=values).to_dense()
    a, degrees = whole[nodes][:, nodes], whole.sum(1)[nodes]
    scale = degrees.rsqrt()
    return a, degrees, scale[:, None] * a * scale, graph.x.to_dense()[nodes].double()


def _sides(parts: Sequence[Part], shared: Tree, trained: Sequence[Tree]) -> Numbers:
    """Return both sides of each inequality, (2, pairs of clients), and `SIZES`, (pairs,)."""
    size = len(parts[0][0])
    b_w = max(float(layer["weight"].norm()) for model in (shared, *trained) for layer in model)
    b_x = max(float(x.norm()) for *_, x in parts)
    outputs = [torch.sigmoid(_gcn(p, x, shared, bias=False)) for *_, p, x in parts]
    classes = torch.stack(
        [torch.stack([_gcn(p, x, one).argmax(1) for one in trained]) for *_, p, x in parts]
    )
    differ = (classes[:, :, None] != classes[:, None]).double().mean(-1)  # by client
    rows = []
    for k, j in combinations(range(len(parts)), 2):
        (a_k, d_k, p_k, x_k), (a_j, d_j, p_j, x_j) = parts[k], parts[j]
        least, gap = float(torch.cat([d_k, d_j]).min()), float((a_k - a_j).norm())
        norms, apart = float(a_k.norm() + a_j.norm()), float((x_k - x_j).norm())
        p_gap, output = float((p_k - p_j).norm()), outputs[k] - outputs[j]
        rank, scale = float(torch.linalg.matrix_rank(output)), d_k.rsqrt()
        second = scale[:, None] * a_j * scale - p_j
        bound = 1 + b_w**2 * b_x * (1 / (least * size) + 1 / least**2) * norms
        bound += b_w**2 / size * apart
        pair: dict[str, object] = {
            "Eq. 14": (2 * float((differ[k] - differ[j]).abs().max()), bound),
            "Eq. 21": (float(output.norm()), b_w**2 * (apart + b_x * p_gap)),
            "Eq. 25": (float(output.abs().sum()), rank**0.5 * float(output.norm())),
            "Eq. 35": (float((d_k - d_j).square().sum()), size),
            "Eq. 38": (float(second.norm()), size / least**2 * gap),
            "Eq. 39": (p_gap, (least + size) / least**2 * gap),
        }
        rows.append(pair | dict(zip(SIZES, (norms / 2, least, p_gap), strict=True)))
    return {name: np.array([row[name] for row in rows]).T for name in rows[0]}


def _gcn(p: Tensor, x: Tensor, model: Tree, *, bias: bool = True) -> Tensor:
    """Return the logits of a two-layer GCN. The network of the proof has no biases."""
    first, second = ({k: v.double() for k, v in layer.items()} for layer in model)
    hidden = p @ (x @ first["weight"]) + (first["bias"] if bias else 0)
    logits: Tensor = p @ (hidden.relu() @ second["weight"]) + (second["bias"] if bias else 0)
    return logits


def _claim(config: RunConfig, found: dict[int, list[Numbers]]) -> Claim:
    """Make tables, sentences and picture. Numbers are means over pairs and seeds."""
    rounds = sorted(found)
    pairs = [  # of all seeds, by round
        {name: np.concatenate([one[name] for one in found[n]], -1) for name in found[n][0]}
        for n in rounds
    ]
    keys = {"d": ("Eq. 14", slice(0, 1)), "bound": ("Eq. 14", slice(1, 2))}
    keys |= {name: (name, slice(None)) for name in SIZES}
    means = {  # (rounds, raw and causal) each
        name: np.array([[one[f"{key} {k}"][side].mean() for k in GRAPHS] for one in pairs])
        for name, (key, side) in keys.items()
    }
    about = f"{config.data}, fedath, {counted(config.seeds, 'seed')}"
    rows = [[n, *(_both(*means[name][at]) for name in keys)] for at, n in enumerate(rounds)]
    note = "With all edges | with each client's own edge weights. Means over pairs of clients."
    title = f"Corollary 5.2 along training: {about}"
    along = make_table(("round", *keys), rows, left=0, wrap=True, title=title, caption=note)
    proof, holds = _proof(pairs[-1])
    raw, causal = (pairs[-1][f"Eq. 14 {kind}"][1] for kind in GRAPHS)
    change = {name: values[-1, 1] / values[-1, 0] - 1 for name, values in means.items()}
    failing = ", ".join(name for name, share in holds.items() if share < 1) or "none"
    sentences = (
        f"Eq. 14 holds for {holds['Eq. 14']:.0%} of the pairs, but it is vacuous: its right side "
        f"is at least {causal.min():.3g}, and no divergence exceeds 2.",
        f"Edge weights change ‖A‖_F by {change['‖A‖_F']:+.0%} and D_min by {change['D_min']:+.0%}. "
        f"The bound changes by {change['bound']:+.0%} and is smaller for "
        f"{(causal < raw).mean():.0%} of the pairs. "
        f"‖P_k - P_l‖_F, which the bound replaces, changes by {change['‖P_k - P_l‖_F']:+.0%}.",
        f"Steps of the proof that fail for at least one pair: {failing}.",
    )
    charts = []
    for name in ("bound", "‖A‖_F", "D_min", "d"):
        each = zip(means[name].T, (BLUE, RED), GRAPHS, strict=True)
        lines = tuple(Line(rounds, *values, shape="dot") for values in each)
        charts.append(Chart(name, Axis("round", whole=True), Axis(), lines, legend="inside"))
    grid = tuple(charts[:2]), tuple(charts[2:])
    picture = Panels(f"FedATH, Corollary 5.2: {about}", grid, (11, 8))
    numbers: dict[str, object] = {"rounds": {str(n): one for n, one in found.items()}}
    return Claim("bound", (along, proof), sentences, picture, numbers)


def _proof(pairs: Numbers) -> tuple[Table, dict[str, float]]:
    """Return a table of both sides, and the fraction of pairs for which each inequality holds.

    This is the smaller one of two fractions: with all edges, and with edge weights.
    """
    lines, holds = [], dict[str, float]()
    for name, words in STEPS.items():
        sides = [pairs[f"{name} {kind}"] for kind in GRAPHS]
        shares = [float((left <= right + 1e-9).mean()) for left, right in sides]
        holds[name] = min(shares)
        cells = [_both(*(both[side].mean() for both in sides)) for side in (0, 1)]
        lines.append([name, words, *cells, " | ".join(f"{share:.0%}" for share in shares)])
    columns = ("inequality", "of", "left", "right", "holds for")
    title = "The corollary and the steps of its proof, after the last round"
    note = "All edges | own edge weights."
    return make_table(columns, lines, left=2, wrap=True, title=title, caption=note), holds


def _both(raw: float, causal: float) -> str:
    return f"{raw:.3g} | {causal:.3g}"
