"""What one site has: its graph, with roles, and what must agree between the sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.data.client_graph import InducedSubgraphs
from atoll.data.divide import check_client
from atoll.data.split import split as assign_roles
from atoll.engines.checkpoint import load_checkpoint, save_checkpoint

KIND = "atoll client"
SUFFIX = ".atoll"


@dataclass(frozen=True)
class SiteData:
    """One client's data.

    Attributes:
        graph: Its graph.
        classes: Number of classes.
        name: Of the data set, for tables.
        metric: "accuracy" or "auc".
        words: Names of classes and of feature columns, where the data have names; they must be
            the same at every site.
    """

    graph: Graph
    classes: int
    name: str
    metric: str = "accuracy"
    words: tuple[str, ...] = ()

    def summary(self, *, sizes: bool = True) -> dict[str, object]:
        """What the server learns before the first step; zeros in place of sizes, if they stay."""
        graph = self.graph
        masks = torch.stack([graph.train, graph.val, graph.test]).sum(1) * sizes
        return {
            "features": graph.num_features,
            "classes": self.classes,
            "task": graph.task.name,
            "counts": [int(n) for n in masks],
            "nodes": int(graph.size("nodes")) * sizes,
            "metric": self.metric,
            "words": list(self.words),
        }


def write_clients(federation: Federation, folder: Path) -> list[Path]:
    """One file for each client of a federation, to hand to the sites of a trial."""
    paths = []
    for number, graph in enumerate(federation.graphs):
        path = folder / f"client-{number + 1}{SUFFIX}"
        content = {
            "kind": KIND,
            "graph": graph,
            "classes": federation.classes,
            "name": federation.name,
            "metric": federation.metric,
        }
        save_checkpoint(path, content)
        paths.append(path)
    return paths


def read_site_data(
    path: Path,
    *,
    schema: Path | None = None,
    classes: Sequence[str] = (),
    split: str = "stratified",
    seed: int = 0,
) -> SiteData:
    """A site's data: a client file, or a graph of the owner's own.

    Args:
        path: What `write_clients` wrote, or anything that `--data PATH` can be.
        schema: Column roles of tables.
        classes: All classes of the federation, where this site may lack some.
        split: How nodes become training, validation and test nodes; a given split wins.
        seed: Of the split.
    """
    if path.suffix == SUFFIX:
        content = load_checkpoint(path)
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise DataError(
                f"'{path}' is not a client's data; give what `atoll federate split` wrote"
            )
        return SiteData(content["graph"], content["classes"], content["name"], content["metric"])
    from atoll.data.own.reader import load_own

    source, report = load_own(path, schema)
    source = source.undirected_simple()
    labels, count = source.y, source.classes
    names = tuple(map(str, report.classes))
    if classes:
        lacking = [name for name in names if name not in classes]
        if lacking:
            raise ConfigError(f"'{path}' has class '{lacking[0]}', which --classes does not name")
        place = np.array([list(classes).index(name) for name in names], dtype=np.int64)
        labels = np.where(labels >= 0, place[labels.clip(min=0)], -1)
        names, count = tuple(classes), len(classes)
    source = replace(source, y=labels, classes=count)
    everyone = np.arange(source.num_nodes)
    recipe = "given" if source.split is not None else split
    roles = assign_roles(source, [everyone], recipe, seed=seed)[0]
    graph = InducedSubgraphs(source).graph(everyone, roles)
    check_client(f"'{path}'", graph, labels, ("no-edge", "single-class"))
    words = (*(f"class {n}" for n in names), *(f"column {n}" for n in report.features))
    return SiteData(graph, count, path.resolve().name, words=words)
