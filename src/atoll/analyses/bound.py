"""FedATH's Corollary 5.2 in numbers: both sides of Eq. 14, and of the steps of its proof.

    d(k, l) <= 1 + B_W² B_X (1 / (D_min m) + 1 / D_min²) (‖A_k‖ + ‖A_l‖) + B_W² / m ‖X_k - X_l‖

The paper concludes that edge weights below one shrink the bound. So every side is computed twice
after a round: with all edges (raw), and with the client's own edge weights (causal).

m is the smallest client's size; a larger client is represented by m of its nodes, with the degrees
that they have there. A has its self-loops, because Eq. 26 writes P = D^-1/2 A D^-1/2. B_W and B_X
are the largest Frobenius norms among the networks' matrices and the clients' features. The supremum
in d is over infinitely many networks. Here it is over the K networks that the clients train in the
next round, which is a lower estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import msgspec
import numpy as np
import torch
from torch import Tensor

from atoll.analyses.claim import Claim, wrapped_table
from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, with_views
from atoll.core.random import fold, make_key
from atoll.core.tree import Tree
from atoll.data.measure.heterogeneity import plain_features
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig
from atoll.experiment.hardware import tuned_process
from atoll.experiment.problem import Problem, need_one_graph
from atoll.experiment.rounds import Experiment, Run
from atoll.methods.fedath import FedATH
from atoll.present.chart import BLUE, RED, Axis, Chart, Line, Panels
from atoll.present.terminal import counted

GRAPHS = ("raw", "causal")
STEPS = {
    "Eq. 14": "divergence of two clients, and its bound",
    "Eq. 21": "outputs of one network on two clients",
    "Eq. 25": "entrywise 1-norm, and √rank times ‖·‖_F",
    "Eq. 35": "squared differences of degrees, and m",
    "Eq. 38": "T2 of the proof",
    "Eq. 39": "‖P_k - P_l‖_F",
}
"""The inequalities that are computed."""
Part = tuple[Tensor, Tensor, Tensor, Tensor]  # A, degrees, P and X of some nodes
SIZES = ("‖A‖_F", "D_min", "‖P_k - P_l‖_F")
Numbers = dict[str, np.ndarray]


@tuned_process()
def follow_bound(
    config: RunConfig, *, every: int = 20, on_round: Callable[[int], None] | None = None
) -> Claim:
    """Run fedath, and compute the sides of Eq. 14 before training and after every few rounds."""
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
        while True:
            number = run.history.rounds
            if number % every == 0 or run.finished:
                found.setdefault(number, []).append(_measure(method, run, graphs))
            if run.finished:
                break
            run.advance()
            if on_round is not None:
                on_round(run.history.rounds)
    return _claim(config, found)


def _measure(method: FedATH, run: Run, graphs: Sequence[Graph]) -> Numbers:
    """Sides of all inequalities for every pair of clients, by "Eq. 14 raw left", and sizes."""
    states = run.simulation.engine.export_states()
    message = method.deploy(run.server).tree
    key = fold(make_key(run.experiment.seed), "bound", run.history.rounds)
    trained = [
        method.train(graph, message, states[n], fold(key, n))[0].model["causal"]
        for n, graph in enumerate(graphs)
    ]
    size = min(graph.num_nodes for graph in graphs)
    found: Numbers = {}
    for kind in GRAPHS:
        parts = []
        for n, graph in enumerate(graphs):
            own = {} if states[n] is None else states[n].networks
            networks = {} if kind == "raw" else {**own, **message}
            nodes = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(n))
            parts.append(_matrices(method, graph, networks, nodes[:size].sort().values))
        for name, values in _sides(parts, message["causal"], trained).items():
            found[f"{name} {kind}"] = values
    return found


def _matrices(method: FedATH, graph: Graph, networks: Tree, nodes: Tensor) -> Part:
    """A with self-loops, degrees, P and X of some nodes, in double precision."""
    loops = graph.sparse_view("loops")
    with torch.no_grad():
        weight = method.edge_weights(networks, graph)
    loop = loops.rows == loops.columns
    whole = torch.zeros(loops.shape, dtype=torch.float64)
    place = loops.rows.long(), loops.columns.long()
    whole[place] = torch.where(loop, 1.0, weight).double()
    a, degrees = whole[nodes][:, nodes], whole.sum(1)[nodes]
    scale = degrees.rsqrt()
    x = plain_features(graph.x)[nodes.numpy()]
    dense = x if isinstance(x, np.ndarray) else x.toarray()
    return a, degrees, scale[:, None] * a * scale, torch.from_numpy(dense).double()


def _sides(parts: Sequence[Part], shared: Tree, trained: Sequence[Tree]) -> Numbers:
    """Left and right sides over the pairs of clients, (P,) each, and the sizes in them."""
    size = len(parts[0][0])
    b_w = max(float(layer["weight"].norm()) for model in (shared, *trained) for layer in model)
    b_x = max(float(x.norm()) for *_, x in parts)
    outputs = [torch.sigmoid(_gcn(p, x, shared, bias=False)) for *_, p, x in parts]
    classes = torch.stack(
        [torch.stack([_gcn(p, x, one).argmax(1) for one in trained]) for *_, p, x in parts]
    )
    differ = (classes[:, :, None] != classes[:, None]).double().mean(-1)  # (K, networks, networks)
    sides: dict[str, list[tuple[float, float]]] = {name: [] for name in STEPS}
    rows: dict[str, list[float]] = {name: [] for name in SIZES}
    for k, j in combinations(range(len(parts)), 2):
        (a_k, d_k, p_k, x_k), (a_j, d_j, p_j, x_j) = parts[k], parts[j]
        least, gap = float(torch.cat([d_k, d_j]).min()), float((a_k - a_j).norm())
        norms, apart = float(a_k.norm() + a_j.norm()), float((x_k - x_j).norm())
        p_gap, output = float((p_k - p_j).norm()), outputs[k] - outputs[j]
        scale = d_k.rsqrt()
        second = scale[:, None] * a_j * scale - p_j
        bound = 1 + b_w**2 * b_x * (1 / (least * size) + 1 / least**2) * norms
        rank = float(torch.linalg.matrix_rank(output))
        sides["Eq. 14"].append(
            (2 * float((differ[k] - differ[j]).abs().max()), bound + b_w**2 / size * apart)
        )
        right = b_w**2 * (apart + b_x * p_gap)
        sides["Eq. 21"].append((float(output.norm()), right))
        sides["Eq. 25"].append((float(output.abs().sum()), rank**0.5 * float(output.norm())))
        sides["Eq. 35"].append((float((d_k - d_j).square().sum()), size))
        sides["Eq. 38"].append((float(second.norm()), size / least**2 * gap))
        sides["Eq. 39"].append((p_gap, (least + size) / least**2 * gap))
        for name, value in zip(SIZES, (norms / 2, least, p_gap), strict=True):
            rows[name].append(value)
    both = {name: np.array(pairs).T for name, pairs in sides.items()}
    return both | {name: np.array(values) for name, values in rows.items()}


def _gcn(p: Tensor, x: Tensor, model: Tree, *, bias: bool = True) -> Tensor:
    """Logits of a two-layer GCN; the proof's network has no biases."""
    first, second = ({k: v.double() for k, v in layer.items()} for layer in model)
    hidden = p @ (x @ first["weight"]) + (first["bias"] if bias else 0)
    logits: Tensor = p @ (hidden.relu() @ second["weight"]) + (second["bias"] if bias else 0)
    return logits


def _claim(config: RunConfig, found: dict[int, list[Numbers]]) -> Claim:
    """Tables, sentences and picture; numbers are means over pairs and seeds."""
    last, names = max(found), ("d", "bound", *SIZES)
    keys = [
        ("Eq. 14", slice(0, 1)),
        ("Eq. 14", slice(1, 2)),
        *((one, slice(None)) for one in SIZES),
    ]
    means = {  # (rounds, raw and causal) each
        name: np.array(
            [
                [np.mean([one[f"{key} {kind}"][side] for one in found[n]]) for kind in GRAPHS]
                for n in sorted(found)
            ]
        )
        for name, (key, side) in zip(names, keys, strict=True)
    }
    about = f"{config.data}, fedath, {counted(config.seeds, 'seed')}"
    rows = [
        [number, *(_both(*means[name][row]) for name in names)]
        for row, number in enumerate(sorted(found))
    ]
    note = "With all edges | with each client's own edge weights. Means over pairs of clients."
    title = f"Corollary 5.2 along training: {about}"
    along = wrapped_table(("round", *names), rows, title, note, left=0)
    lines, holds = [], dict[str, float]()
    for name, words in STEPS.items():
        sides = [np.concatenate([one[f"{name} {k}"] for one in found[last]], 1) for k in GRAPHS]
        shares = [float((left <= right + 1e-9).mean()) for left, right in sides]
        holds[name] = min(shares)
        cells = [_both(*(both[side].mean() for both in sides)) for side in (0, 1)]
        lines.append([name, words, *cells, " | ".join(f"{share:.0%}" for share in shares)])
    columns = ("inequality", "of", "left", "right", "holds for")
    title = "The corollary and the steps of its proof, after the last round"
    proof = wrapped_table(columns, lines, title, "All edges | own edge weights.", left=2)
    below = np.mean([one["Eq. 14 causal"][1] < one["Eq. 14 raw"][1] for one in found[last]])
    change = {name: values[-1, 1] / values[-1, 0] - 1 for name, values in means.items()}
    least = min(one["Eq. 14 causal"][1].min() for one in found[last])
    failing = ", ".join(name for name, share in holds.items() if share < 1) or "none"
    sentences = (
        f"Eq. 14 holds for {holds['Eq. 14']:.0%} of the pairs, but it says nothing: its right side "
        f"is at least {least:.3g}, and no divergence exceeds 2.",
        f"Edge weights change ‖A‖_F by {change['‖A‖_F']:+.0%} and D_min by {change['D_min']:+.0%}. "
        f"The bound changes by {change['bound']:+.0%} and is smaller for {below:.0%} of the pairs. "
        f"‖P_k - P_l‖_F, which the bound stands for, changes by {change['‖P_k - P_l‖_F']:+.0%}.",
        f"Steps of the proof that fail for some pair: {failing}.",
    )
    charts = [
        Chart(
            name,
            Axis("round"),
            Axis(),
            tuple(
                Line(sorted(found), means[name][:, n], colour, GRAPHS[n], shape="dot")
                for n, colour in enumerate((BLUE, RED))
            ),
            legend="inside",
        )
        for name in ("bound", "‖A‖_F", "D_min", "d")
    ]
    picture = Panels(f"FedATH, Corollary 5.2: {about}", tuple(pairwise(charts))[::2], (11, 8))
    numbers: dict[str, object] = {"rounds": {str(n): one for n, one in found.items()}}
    return Claim("bound", (along, proof), sentences, picture, numbers)


def _both(raw: float, causal: float) -> str:
    return f"{raw:.3g} | {causal:.3g}"
