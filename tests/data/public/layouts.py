"""Raw files of public sets in their published layout, with made-up content of a few hundred nodes.

With the real files the same commands give real numbers. Here only the layout is real.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from atoll.data.public.registry import DatasetInfo, dataset_info

PARTS = ("train", "val", "test")


class Content:
    """A ring with short chords, whose nodes have features that show the class."""

    def __init__(self, classes: int, nodes: int = 360, features: int = 12) -> None:
        rng = np.random.default_rng(0)
        self.y = np.arange(nodes) % classes
        steps = rng.integers(1, 7, 4 * nodes)  # along a ring: every stretch has all classes
        first = np.arange(4 * nodes) % nodes
        ends = np.unique(np.sort(np.stack([first, (first + steps) % nodes]), axis=0), axis=1)
        self.pairs = ends
        self.both = np.concatenate([ends, ends[::-1]], axis=1)
        noise = rng.random((nodes, features)) < 0.1
        self.x = (noise | (self.y[:, None] == np.arange(features))).astype(np.float32)
        roles = rng.permutation(nodes) % 4
        self.masks = [roles < 2, roles == 2, roles == 3]


def write(home: Path, file: str, text: str) -> None:
    path = home / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if file.endswith(".gz") else text.encode())


def lines(rows: np.ndarray, separator: str = ",") -> str:
    return "".join(f"{separator.join(map(str, np.atleast_1d(row)))}\n" for row in rows.tolist())


def write_npz(home: Path, file: str, **arrays: np.ndarray) -> None:
    (home / file).parent.mkdir(parents=True, exist_ok=True)
    np.savez(home / file, **arrays)


def wikics(info: DatasetInfo, home: Path, made: Content) -> None:
    links: list[list[int]] = [[] for _ in made.y]
    for source, target in made.both.T.tolist():
        links[source].append(target)
    raw = {"features": made.x.tolist(), "labels": made.y.tolist(), "links": links}
    train, val, test = (mask.tolist() for mask in made.masks)
    raw |= {"train_masks": [train], "val_masks": [val], "stopping_masks": [val], "test_mask": test}
    write(home, info.files[0], json.dumps(raw))


def heterophilous(info: DatasetInfo, home: Path, made: Content) -> None:
    masks = {f"{part}_masks": mask[None] for part, mask in zip(PARTS, made.masks, strict=True)}
    arrays = {"node_features": made.x, "node_labels": made.y, "edges": made.pairs.T}
    write_npz(home, info.files[0], **arrays, **masks)


def shchur(info: DatasetInfo, home: Path, made: Content) -> None:
    size, ones = len(made.y), np.ones(made.both.shape[1])
    arrays = {"labels": made.y}
    matrices = {"attr": sp.csr_array(made.x), "adj": sp.csr_array((ones, made.both), (size, size))}
    for name, matrix in matrices.items():
        for part in ("data", "indices", "indptr", "shape"):
            arrays[f"{name}_{part}"] = np.asarray(getattr(matrix, part))
    write_npz(home, info.files[0], **arrays)


def geom_gcn(info: DatasetInfo, home: Path, made: Content) -> None:
    rows = (
        f"{node}\t{','.join(str(int(v)) for v in x)}\t{label}\n"
        for node, (x, label) in enumerate(zip(made.x, made.y, strict=True))
    )
    write(home, info.files[0], "node_id\tfeature\tlabel\n" + "".join(rows))
    write(home, info.files[1], "node_id\tnode_id\n" + lines(made.pairs.T, "\t"))
    for file in info.files[2:]:
        masks = zip(PARTS, made.masks, strict=True)
        write_npz(home, file, **{f"{part}_mask": mask for part, mask in masks})


def ogb(info: DatasetInfo, home: Path, made: Content) -> None:
    write(home, "raw/node-label.csv.gz", lines(made.y))
    write(home, "raw/node_year.csv.gz", lines(2010 + made.y))
    write(home, "raw/num-node-list.csv.gz", f"{len(made.y)}\n")
    write(home, "raw/num-edge-list.csv.gz", f"{made.pairs.shape[1]}\n")
    write(home, "raw/edge.csv.gz", lines(made.pairs.T))
    write(home, "raw/node-feat.csv.gz", lines(made.x))
    write(home, "RELEASE_v1.txt", "")
    for part, mask in zip(("train", "valid", "test"), made.masks, strict=True):
        write(home, f"split/time/{part}.csv.gz", lines(np.flatnonzero(mask)))


def tu(info: DatasetInfo, home: Path, made: Content) -> None:
    size = 9  # nodes of a graph: a ring with a chord, whose ends tell the class
    graphs = 12 * int(made.y.max() + 1)
    ring = np.array([(i, (i + 1) % size) for i in range(size)])
    edges, labels = [], []
    for graph in range(graphs):
        label = graph % int(made.y.max() + 1)
        labels.append(label)
        inside = np.concatenate([ring, [(0, 2 + label % (size - 3))]]) + graph * size + 1
        edges += [inside, inside[:, ::-1]]
    write(home, f"raw/{info.label}_A.txt", lines(np.concatenate(edges), ", "))
    write(
        home, f"raw/{info.label}_graph_indicator.txt", lines(1 + np.arange(graphs * size) // size)
    )
    write(home, f"raw/{info.label}_graph_labels.txt", lines(np.array(labels)))
    node_labels = (np.arange(graphs * size) % size + np.repeat(labels, size)) % 3
    write(home, f"raw/{info.label}_node_labels.txt", lines(node_labels))


WRITERS = {
    "WikiCS": wikics,
    "HeterophilousGraphDataset": heterophilous,
    "Amazon": shchur,
    "Coauthor": shchur,
    "WebKB": geom_gcn,
    "WikipediaNetwork": geom_gcn,
    "PygNodePropPredDataset": ogb,
    "TUDataset": tu,
}


def write_raw(name: str, root: Path) -> None:
    """Write the raw files of a set, with its number of classes."""
    info = dataset_info(name)
    assert info.classes is not None
    WRITERS[info.loader](info, root / info.home, Content(min(info.classes, 8)))
