"""Graphs that grow: nodes and edges that are absent in training and present when clients score.

`Graph.since` and `Graph.edge_since` give the first stage in which a node or an edge exists: 0 is
training, 1 is the scoring of validation nodes, 2 is the scoring of test nodes. Nodes of later
stages (split `unseen`) appear after the run. Engines train on the graph of stage 0. Its field
`later` refers to the graph of the next stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from atoll.core.federation import LazyGraphs, each
from atoll.core.graph import Graph, Sparse, pick
from atoll.core.minibatch import cut_sparse, of_nodes
from atoll.core.task import ROLES

STAGES = range(len(ROLES))  # each role is scored in its own stage


def at_stage(graph: Graph, stage: int) -> Graph:
    """Keep the nodes and edges that exist in a stage. A graph that does not grow is unchanged."""
    if graph.since is None or graph.edge_since is None:
        return graph
    nodes = (graph.since <= stage).nonzero().squeeze(1)
    place = torch.full_like(graph.y, -1)
    place[nodes] = torch.arange(len(nodes), device=nodes.device)
    kept = (graph.edge_since <= stage).nonzero().squeeze(1)
    x = graph.x
    return replace(
        graph,
        **of_nodes(graph, nodes),
        x=cut_sparse(x, nodes, place) if isinstance(x, Sparse) else pick(x, nodes),
        edges=place[graph.edges[:, kept]],
        edge_weight=graph.edge_weight[kept],
        since=None,
        edge_since=None,
    )


def rows_by_stage(graph: Graph, rows: Callable[[Graph], Tensor]) -> Tensor:
    """Compute a row per node, from the graph of the stage in which the node's role is scored.

    A node without a role gets its row from the last stage.
    """
    found = rows(at_stage(graph, STAGES[-1]))
    if graph.since is not None:
        for stage, role in enumerate((graph.train, graph.val)):
            there = graph.since <= stage
            found[role > 0] = rows(at_stage(graph, stage))[role[there] > 0]
    return found


def staged(
    graphs: Sequence[Graph], prepared: Callable[[Sequence[Graph]], Sequence[Graph]]
) -> Sequence[Graph]:
    """Return the clients' prepared training graphs, each linked to its later stages."""
    train, val, test = (prepared(each(partial(at_stage, stage=s), graphs)) for s in STAGES)

    def one(client: int) -> Graph:
        return replace(train[client], later=replace(val[client], later=test[client]))

    chain = LazyGraphs(len(graphs), one)
    return chain if isinstance(graphs, LazyGraphs) else tuple(chain)


def when_scored(graph: Graph) -> list[Graph]:
    """Return the graphs that score `ROLES`, in this order, or one graph if all roles share it."""
    return [graph] if graph.later is None else [graph, *when_scored(graph.later)]
