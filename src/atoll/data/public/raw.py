"""Readers of raw files of the most used sets, without PyG, whose import takes seconds.

Each reader returns the arrays of PyG's class, bit for bit. Tests compare them. Only the features of
a TUDataset with node attributes differ (`tu_dataset`).
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.data.public.untrusted import check_pickles
from atoll.data.source import both_directions

if TYPE_CHECKING:
    import scipy.sparse as sp

Arrays = tuple["np.ndarray | sp.csr_array", np.ndarray, np.ndarray, list[np.ndarray]]
"""Features, edges, labels, and the masks of training, validation and testing, if any."""


SPARSE = ("data", "indices", "indptr")


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows the few names of Planetoid's pickles, and imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        import scipy.sparse as sp

        rebuild = np.zeros(0).__reduce__()[0]
        known = {"_reconstruct": rebuild, "ndarray": np.ndarray, "dtype": np.dtype}
        known |= {"csr_matrix": sp.csr_matrix, "defaultdict": defaultdict, "list": list}
        return known[name]


def planetoid(home: Path, label: str) -> Arrays:
    """Read Cora, CiteSeer or PubMed with the published split."""
    import scipy.sparse as sp

    check_pickles(home)
    parts, start = dict[str, Any](), f"ind.{label.lower()}."
    for name in ("y", "tx", "allx", "ty", "ally", "graph"):
        with (home / "raw" / f"{start}{name}").open("rb") as file:
            parts[name] = _Unpickler(file, encoding="latin1").load()
    tests = np.loadtxt(home / "raw" / f"{start}test.index", dtype=np.int64)
    # Some numbers of CiteSeer's test nodes are in no file. These nodes get no words, and class 0.
    first, rows = len(parts["ally"]), np.full(int(tests.max()) + 1, -1)
    rows[:first], rows[tests] = np.arange(first), first + np.arange(len(tests))
    empty = sp.csr_matrix((1, parts["tx"].shape[1]))  # the last row, which is index -1
    words = sp.csr_array(sp.vstack([parts["allx"], parts["tx"], empty]))[rows]
    none = np.zeros((1, parts["ty"].shape[1]))
    classes = np.concatenate([parts["ally"], parts["ty"], none])[rows].argmax(axis=1)
    links = parts["graph"].items()
    ends = np.array([(other, node) for node, others in links for other in others]).T
    at, known = np.arange(len(rows)), len(parts["y"])
    masks = [at < known, (at >= known) & (at < known + 500), np.isin(at, tests)]
    return words, np.ascontiguousarray(_simple(ends)[::-1]), classes, masks


def shchur(home: Path, label: str) -> Arrays:
    """Read Computers, Photo, CS or Physics, which have no published split."""
    import scipy.sparse as sp

    (path,) = (home / "raw").glob("*.npz")
    with np.load(path) as file:
        names = [f"{kind}_{part}" for kind in ("attr", "adj") for part in (*SPARSE, "shape")]
        parts = {name: file[name] for name in (*names, "labels")}  # other arrays are pickles
    x, links = (
        sp.csr_array(
            tuple(parts[f"{kind}_{part}"] for part in SPARSE), shape=parts[f"{kind}_shape"]
        )
        for kind in ("attr", "adj")
    )
    y = parts["labels"].astype(np.int64)
    x.data = np.where(x.data > 0, 1, x.data)
    edges = np.stack(links.tocoo().coords).astype(np.int64)
    return x, np.ascontiguousarray(both_directions(edges, len(y))[0]), y, []


def _simple(edges: np.ndarray) -> np.ndarray:
    """Return edges in ascending order without loops and duplicates, (2, E)."""
    edges = edges[:, edges[0] != edges[1]]
    width = int(edges.max(initial=0)) + 1
    return np.stack(np.divmod(np.unique(edges[0] * width + edges[1]), width))


def tu_dataset(home: Path, label: str) -> dict[str, np.ndarray]:
    """Return `edges`, `node_ptr` and, if the set has them, `x` and the graphs' classes `y`.

    Graph g has the nodes node_ptr[g] to node_ptr[g + 1] - 1. The features `x` are one-hot node
    labels, as in GCFL. Node attributes are read only if there are no node labels.
    """

    def read(name: str, dtype: type) -> np.ndarray | None:
        path = home / "raw" / f"{label}_{name}.txt"
        return np.loadtxt(path, dtype=dtype, delimiter=",", ndmin=2) if path.exists() else None

    links, graphs = read("A", np.int64), read("graph_indicator", np.int64)
    assert links is not None
    assert graphs is not None
    sizes = np.bincount(graphs[:, 0] - 1)
    found = {"edges": _simple(links.T - 1), "node_ptr": np.concatenate([[0], np.cumsum(sizes)])}
    if (labels := read("node_labels", np.int64)) is not None:
        columns = (labels - labels.min(axis=0)).T
        blocks = [one[:, None] == np.arange(one.max() + 1) for one in columns]
        found["x"] = np.concatenate(blocks, axis=1).astype(np.float32)
    elif (attributes := read("node_attributes", np.float32)) is not None:
        found["x"] = attributes
    classes = read("graph_labels", np.int64)
    if classes is not None and classes.shape[1] == 1 and read("graph_attributes", float) is None:
        found["y"] = np.unique(classes[:, 0], return_inverse=True)[1]
    return found


READERS: dict[str, Callable[[Path, str], Arrays]] = {
    "Planetoid": planetoid,
    "Amazon": shchur,
    "Coauthor": shchur,
}
"""The readers by the name of PyG's class, for sets of one graph."""
