"""A user's own graph on disk, and how a run divides one."""

from __future__ import annotations

import numpy as np

import atoll


def write_own(folder, owner="owner"):
    owners = ["a" if i < 30 else "b" for i in range(60)]
    lines = [f"{i},{'xy'[i % 2]},{i % 3},{owner}" for i, owner in enumerate(owners)]
    (folder / "nodes.csv").write_text("\n".join([f"id,label,kind,{owner}", *lines]))
    edges = [f"{i},{(i + step) % 60}" for i in range(60) for step in (1, 2)]
    (folder / "edges.csv").write_text("\n".join(["source,target", *edges]))
    return str(folder)


def ids(federation):
    return [graph.ids.tolist() for graph in federation.graphs]


def divided_by_run(folder, source, **options):
    atoll.run("fedavg", source, rounds=1, out=folder, **options)
    with np.load(folder / "seed-0" / "partition.npz") as found:
        return [found[name].tolist() for name in found.files]
