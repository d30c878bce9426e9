"""Check FedTAD's complexity numerically: the growth of its cost with every size in its formula.

The paper (Result 6) states two costs for walks of p steps, B pseudo nodes, N clients, f features,
c classes and noise of width z. Each of I iterations has I_g steps of the generator and I_d steps
of the model:

    client  O(p B) for the walks, O(m) for the reliability of m edges
    server  O(I (I_g B f (z + B + N c) + I_d B f N c))

One size at a time doubles from a small base. We measure the cost in operations of dense matrix
products, which are deterministic, and in CPU seconds, which are not.
"""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from atoll.analyses.claim import Claim, exponent
from atoll.core.graph import Graph, make_graph
from atoll.core.random import fold, make_key
from atoll.core.tree import tree_map
from atoll.methods.fedtad import FedTAD, Lesson
from atoll.nn.fedtad import walk_returns
from atoll.nn.nets import GCN
from atoll.present.chart import Axis, Chart, Line, Panels, in_rows, number_text
from atoll.present.tables import make_table


@dataclass(frozen=True)
class Sizes:
    """The sizes in the formula, with their base values."""

    walk: int = 4  # p
    nodes: int = 800  # of a client, for the walks
    degree: int = 6
    pseudo: int = 128  # B
    clients: int = 8  # N
    features: int = 512  # f
    classes: int = 8  # c
    noise: int = 32  # z
    iterations: int = 2  # I
    hidden: int = 64


STATED = {
    "walk": ("p", "client", 1.0),
    "nodes": ("nodes", "client", 1.0),
    "pseudo": ("B", "server", 2.0),
    "clients": ("N", "server", 1.0),
    "features": ("f", "server", 1.0),
    "classes": ("c", "server", 1.0),
    "noise": ("z", "server", 1.0),
    "iterations": ("I", "server", 1.0),
}
"""The letter of each size, the party that pays, and the largest exponent in the formula."""


def client_work(sizes: Sizes) -> Callable[[], object]:
    """Make a task that computes walk returns of a random graph (Eq. 3)."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, sizes.nodes * sizes.degree // 2)
    edges = torch.randint(sizes.nodes, shape, generator=generator)
    graph: Graph = make_graph(torch.ones(sizes.nodes, 1), edges, torch.zeros(sizes.nodes).long())
    return lambda: walk_returns(graph, sizes.walk)


def server_work(sizes: Sizes) -> Callable[[], object]:
    """Make a task that distils for one round with untrained networks."""
    net = GCN(sizes.features, sizes.classes, hidden=sizes.hidden)
    method = FedTAD(net, pseudo_nodes=sizes.pseudo, noise_size=sizes.noise)
    method = replace(method, iterations=sizes.iterations)
    key = make_key(0)
    models = [net.init(fold(key, n)) for n in range(sizes.clients)]
    teachers = tree_map(lambda *parts: torch.stack(parts), *models)
    share = torch.full((sizes.clients, sizes.classes), 1 / sizes.clients)
    lesson, generator = Lesson(method, teachers, share, personal=False), method.generator.init(key)
    moments = method.generator_optimizer.init(generator), method.distil_optimizer.init(models[0])
    return lambda: lesson.play(generator, moments[0], models[0], moments[1], key)


REPEATS = 3
WORK = {"client": client_work, "server": server_work}


def operations(work: Callable[[], object]) -> int:
    """Count multiplications and additions in products of dense matrices."""

    def of_onednn(x: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
        return 2 * math.prod(x) * weight[0]

    # Large products on a CPU use this operator (`nn.dense`), which torch does not count.
    onednn = {getattr(torch.ops.mkldnn, "_linear_pointwise", None): of_onednn}
    with FlopCounterMode(display=False, custom_mapping=onednn) as counter:
        work()
    return int(counter.get_total_flops())


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the minimum CPU seconds of several calls, after one warm-up call."""
    return min(timeit.repeat(work, timer=time.process_time, number=1, repeat=1 + repeats)[1:])


def cost_claim(
    names: Sequence[str] = tuple(STATED), base: Sizes | None = None, *, doublings: int = 4
) -> Claim:
    """Double one size after the other, and fit the exponents of operations and seconds."""
    base = base or Sizes()
    lines, charts, numbers, above = [], [], dict[str, object](), []
    for name in names:
        letter, who, stated = STATED[name]
        values = [getattr(base, name) * 2**step for step in range(doublings + 1)]
        works = [WORK[who](replace(base, **{name: value})) for value in values]
        counts = np.array([operations(work) for work in works])
        spent = np.array([seconds(work, REPEATS) for work in works])
        both = (counts, spent)  # sparse products are not counted, and zeros have no exponent
        powers = [exponent(np.array(values), y)[0] if y.all() else np.nan for y in both]
        words = (number_text(power, 2) for power in powers)
        lines.append([letter, who, f"{values[0]} to {values[-1]}", f"{stated:g}", *words])
        above += [letter] if powers[-1] > stated + 0.25 else []
        numbers[name] = {"values": values, "operations": counts, "seconds": spent}
        line = Line(values, spent / spent[0], name="seconds", shape="dot")
        ideal = Line(values, (np.array(values) / values[0]) ** stated, "grey", "stated", dash=1)
        x, y = Axis(letter, log=True), Axis("times the base", log=True)
        charts.append(Chart(f"{letter} ({who})", x, y, (ideal, line), legend="inside"))
    columns = ("size", "paid by", "range", "stated", "operations", "seconds")
    caption = (
        "Exponents: if a size doubles, the cost grows by 2 to this power. Stated: the formula's "
        "largest. Fixed costs reduce the exponents of small sizes."
    )
    table = make_table(columns, lines, left=2, wrap=True, title="FedTAD's cost", caption=caption)
    text = f"The cost grows faster than the paper states with: {', '.join(above) or 'no size'}."
    rows = in_rows(charts)
    picture = Panels("FedTAD's cost against each size", rows, (12, 3.6 * len(rows)))
    return Claim("cost", (table,), (text,), picture, numbers)
