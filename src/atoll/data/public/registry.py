"""The public data sets: what they are, where they lie, and how to load one.

PyG's and OGB's own classes read the raw files; this module knows their names, checks that the files
are there (loading never downloads; `data/public/fetch.py` does), and turns the result into a
`Source` or a `GraphSet`. Edges stay as published: a protocol that wants them undirected asks
`Source.undirected_simple`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import scipy.sparse as sp

from atoll.core.errors import AtollError, ConfigError, DataError, unknown
from atoll.data.public.untrusted import open_raw
from atoll.data.source import (
    TEST,
    TRAIN,
    UNUSED,
    VAL,
    GraphGroup,
    GraphSet,
    Source,
    check_graph_set,
    check_source,
)
from atoll.data.spec import parse_recipe

SPARSE_BELOW = 0.1
"""Features with a smaller share of non-zero entries are kept sparse."""

FEATURES = ("own", "degree")
"""What the nodes of a set of graphs are described by."""

MAX_DEGREE_BYTES = 4 * 2**30
"""The largest one-hot degree matrix that is made without being asked for."""

_PLANETOID = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
_GEOM_GCN = (
    "raw/out1_node_feature_label.txt",
    "raw/out1_graph_edges.txt",
    *(f"raw/{{stem}}_split_0.6_0.2_{i}.npz" for i in range(10)),
)
_OGB = (
    "RELEASE_v1.txt",  # without it OGB asks a question on the terminal
    *(f"raw/{part}.csv.gz" for part in ("edge", "node-label", "node_year")),
    *(f"raw/num-{part}-list.csv.gz" for part in ("node", "edge")),
    *(f"split/time/{part}.csv.gz" for part in ("train", "valid", "test")),
)
_TU = tuple(f"raw/{{arg}}_{part}.txt" for part in ("A", "graph_indicator", "graph_labels"))

_LAYOUT: dict[str, tuple[str, tuple[str, ...]]] = {
    "Planetoid": ("{arg}", tuple(f"raw/ind.{{low}}.{part}" for part in _PLANETOID)),
    "Amazon": ("{arg}", ("raw/amazon_electronics_{low}.npz",)),
    "Coauthor": ("{arg}", ("raw/ms_academic_{short}.npz",)),
    "WikiCS": (".", ("raw/data.json",)),
    "HeterophilousGraphDataset": ("{under}", ("raw/{under}.npz",)),
    "WikipediaNetwork": ("{low}/geom_gcn", _GEOM_GCN),
    "Actor": (".", _GEOM_GCN),
    "WebKB": ("{low}", _GEOM_GCN),
    "TUDataset": ("{arg}", _TU),
    "PygNodePropPredDataset": ("{under}", ("raw/node-feat.csv.gz", *_OGB)),
    "structure": ("{under}", _OGB),
}
"""By loader class: the folder that holds `raw/`, below the class's root, and what must be in it."""

_UNSTATED = "not stated by its authors"
_ORIGIN: dict[str, tuple[str, str]] = {
    "Planetoid": ("Planetoid (Yang et al., 2016)", _UNSTATED),
    "Amazon": ("Shchur et al., 2018", "MIT (gnn-benchmark)"),
    "Coauthor": ("Shchur et al., 2018", "MIT (gnn-benchmark)"),
    "WikiCS": ("Mernyei and Cangea, 2020", "MIT (wiki-cs-dataset)"),
    "HeterophilousGraphDataset": ("Platonov et al., 2023", "MIT (heterophilous-graphs)"),
    "WikipediaNetwork": ("Geom-GCN (Pei et al., 2020)", _UNSTATED),
    "Actor": ("Geom-GCN (Pei et al., 2020)", _UNSTATED),
    "WebKB": ("Geom-GCN (Pei et al., 2020)", _UNSTATED),
    "TUDataset": ("TUDataset (Morris et al., 2020)", _UNSTATED),
    "PygNodePropPredDataset": ("Open Graph Benchmark (Hu et al., 2020)", "ODC-BY"),
    "structure": ("Open Graph Benchmark, without the node features", "ODC-BY"),
}


@dataclass(frozen=True)
class DatasetInfo:
    """One public data set; counts are the published ones, as its loader gives them.

    Attributes:
        name: The name that users type; matched without regard to case.
        loader: Name of the PyG or OGB class, or "structure" for the one set that has none.
        label: What the authors, and that class, call the set.
        nodes: Nodes, over all graphs; this and the next four are None outside the table.
        edges: Directed edges, over all graphs.
        features: Columns of the node features.
        classes: Classes of nodes, or of graphs.
        graphs: Number of graphs, 1 for a node set.
        max_degree: Where degrees stand in for missing features, the largest that has a column.
        metric: "accuracy" or "auc".
    """

    name: str
    loader: str
    label: str
    nodes: int | None = None
    edges: int | None = None
    features: int | None = None
    classes: int | None = None
    graphs: int | None = 1
    max_degree: int | None = None
    metric: str = "accuracy"

    @property
    def task(self) -> str:
        """What is classified: "node" or "graph"."""
        return "graph" if self.loader == "TUDataset" else "node"

    @property
    def arguments(self) -> Mapping[str, Any]:  # whatever the third-party constructor takes
        """What the loader class is called with, besides `root`."""
        if self.loader == "WikiCS":
            return {"is_undirected": False}  # as published; PyG would symmetrise
        if self.loader == "TUDataset":
            return {"name": self.label, "use_node_attr": True}  # `_graph_set` chooses the columns
        return {} if self.loader == "Actor" else {"name": self.label}

    @property
    def folder(self) -> str:
        """The loader class's `root`, below the data root."""
        special = {_OGBN: ".", "structure": "ogbn_arxiv_NO_FEATURES"}
        return special.get(self.loader, self.loader)

    @property
    def home(self) -> str:
        """The set's own folder below the data root: the one that holds `raw/`."""
        return str(PurePosixPath(self.folder) / self._fill(_LAYOUT[self.loader][0]))

    @property
    def files(self) -> tuple[str, ...]:
        """The files that must be there, below `home`."""
        return tuple(self._fill(file) for file in _LAYOUT[self.loader][1])

    @property
    def archive(self) -> str:
        """Name of this set's archive in a mirror."""
        return f"{self.name.removeprefix('tu:')}.tar.xz"

    @property
    def licence(self) -> str:
        """Terms of use, in a few words."""
        return _ORIGIN[self.loader][1]

    @property
    def origin(self) -> str:
        """Who published it."""
        return _ORIGIN[self.loader][0]

    def _fill(self, pattern: str) -> str:
        low = self.label.lower()
        words = {"arg": self.label, "low": low, "short": low[:3], "under": low.replace("-", "_")}
        return pattern.format(stem="film" if self.loader == "Actor" else low, **words)


_HET, _TUD, _WIKI = "HeterophilousGraphDataset", "TUDataset", "WikipediaNetwork"
_OGBN = "PygNodePropPredDataset"
DATASETS: dict[str, DatasetInfo] = {
    "cora": DatasetInfo("cora", "Planetoid", "Cora", 2708, 10556, 1433, 7),
    "citeseer": DatasetInfo("citeseer", "Planetoid", "CiteSeer", 3327, 9104, 3703, 6),
    "pubmed": DatasetInfo("pubmed", "Planetoid", "PubMed", 19717, 88648, 500, 3),
    "photo": DatasetInfo("photo", "Amazon", "Photo", 7650, 238162, 745, 8),
    "computers": DatasetInfo("computers", "Amazon", "Computers", 13752, 491722, 767, 10),
    "cs": DatasetInfo("cs", "Coauthor", "CS", 18333, 163788, 6805, 15),
    "physics": DatasetInfo("physics", "Coauthor", "Physics", 34493, 495924, 8415, 5),
    "wikics": DatasetInfo("wikics", "WikiCS", "WikiCS", 11701, 297110, 300, 10),
    "ogbn-arxiv": DatasetInfo("ogbn-arxiv", _OGBN, "ogbn-arxiv", 169343, 1166243, 128, 40),
    "roman-empire": DatasetInfo("roman-empire", _HET, "Roman-empire", 22662, 65854, 300, 18),
    "amazon-ratings": DatasetInfo("amazon-ratings", _HET, "Amazon-ratings", 24492, 186100, 300, 5),
    "minesweeper": DatasetInfo(
        "minesweeper", _HET, "Minesweeper", 10000, 78804, 7, 2, metric="auc"
    ),
    "tolokers": DatasetInfo("tolokers", _HET, "Tolokers", 11758, 1038000, 10, 2, metric="auc"),
    "questions": DatasetInfo("questions", _HET, "Questions", 48921, 307080, 301, 2, metric="auc"),
    "chameleon": DatasetInfo("chameleon", _WIKI, "chameleon", 2277, 36101, 2325, 5),
    "squirrel": DatasetInfo("squirrel", _WIKI, "squirrel", 5201, 217073, 2089, 5),
    "actor": DatasetInfo("actor", "Actor", "Actor", 7600, 30019, 932, 5),
    "cornell": DatasetInfo("cornell", "WebKB", "Cornell", 183, 298, 1703, 5),
    "texas": DatasetInfo("texas", "WebKB", "Texas", 183, 325, 1703, 5),
    "wisconsin": DatasetInfo("wisconsin", "WebKB", "Wisconsin", 251, 515, 1703, 5),
    "MUTAG": DatasetInfo("MUTAG", _TUD, "MUTAG", 3371, 7442, 7, 2, 188),
    "BZR": DatasetInfo("BZR", _TUD, "BZR", 14479, 31070, 53, 2, 405),
    "COX2": DatasetInfo("COX2", _TUD, "COX2", 19252, 40578, 35, 2, 467),
    "DHFR": DatasetInfo("DHFR", _TUD, "DHFR", 32075, 67352, 53, 2, 756),
    "PTC_MR": DatasetInfo("PTC_MR", _TUD, "PTC_MR", 4915, 10108, 18, 2, 344),
    "AIDS": DatasetInfo("AIDS", _TUD, "AIDS", 31385, 64780, 38, 2, 2000),
    "NCI1": DatasetInfo("NCI1", _TUD, "NCI1", 122747, 265506, 37, 2, 4110),
    "ENZYMES": DatasetInfo("ENZYMES", _TUD, "ENZYMES", 19580, 74564, 3, 6, 600),
    "DD": DatasetInfo("DD", _TUD, "DD", 334925, 1686092, 89, 2, 1178),
    "PROTEINS": DatasetInfo("PROTEINS", _TUD, "PROTEINS", 43471, 162088, 3, 2, 1113),
    "COLLAB": DatasetInfo("COLLAB", _TUD, "COLLAB", 372474, 24572158, 492, 3, 5000, 491),
    "IMDB-BINARY": DatasetInfo(
        "IMDB-BINARY", _TUD, "IMDB-BINARY", 19773, 193062, 136, 2, 1000, 135
    ),
    "IMDB-MULTI": DatasetInfo("IMDB-MULTI", _TUD, "IMDB-MULTI", 19502, 197806, 89, 3, 1500, 88),
    # Real topology, labels, years and split; an accuracy on it means nothing.
    "ogbn-arxiv-structure": DatasetInfo(
        "ogbn-arxiv-structure", "structure", "ogbn-arxiv", 169343, 1166243, 0, 40
    ),
}
"""Every set with published counts; any other TUDataset is `tu:NAME`."""

_MOLECULES = ("MUTAG", "BZR", "COX2", "DHFR", "PTC_MR", "AIDS", "NCI1")
_BIOCHEM = (*_MOLECULES, "ENZYMES", "DD", "PROTEINS")
GROUPS: dict[str, tuple[str, ...]] = {
    "molecules": _MOLECULES,
    "biochem": _BIOCHEM,
    "mix": (*_BIOCHEM, "COLLAB", "IMDB-BINARY", "IMDB-MULTI"),
}
"""GCFL's groups: one data set per client."""

_BY_LOWER = {name.lower(): info for name, info in DATASETS.items()}


def sets_of_group(name: str) -> tuple[str, ...]:
    """The data sets of a group, by its name or as "PROTEINS+MUTAG"; none if it is no group."""
    if name.lower() in GROUPS:
        return GROUPS[name.lower()]
    parts = [_BY_LOWER.get(part) for part in name.lower().split("+")]
    sets = tuple(one.name for one in parts if one is not None and one.task == "graph")
    return sets if len(sets) == len(parts) > 1 else ()


def dataset_info(name: str) -> DatasetInfo:
    """The entry for a name as a user types it: any case, or `tu:NAME` for any other TUDataset."""
    given = name.strip()
    plain = given[3:] if given.lower().startswith("tu:") else given
    info = _BY_LOWER.get(plain.lower())
    if info is not None and (plain == given or info.loader == "TUDataset"):
        return info
    # The name becomes a folder and a file name, so it must not be able to leave the data root.
    if plain != given and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_+-]*", plain):
        return DatasetInfo(f"tu:{plain}", "TUDataset", plain, graphs=None)
    sentence = str(unknown("data set", given, _BY_LOWER))
    raise ConfigError(f"{sentence} (any other TUDataset is written 'tu:NAME')")


def parse_name(text: str) -> tuple[str, dict[str, Any]]:
    """A set's or a group's name and its options: "PROTEINS:features=degree", "tu:NAME"."""
    prefix = text[:3] if text.lower().startswith("tu:") else ""
    name, options = parse_recipe(text[len(prefix) :])
    return prefix + name, options


def plain_name(text: str) -> str:
    """A name without its options, whether or not it is one that Atoll knows."""
    return text if text.lower().startswith("tu:") else text.partition(":")[0]


def task_of_data(text: str) -> str:
    """What is classified in the data of this name, as a user types it: "node" or "graph"."""
    name = plain_name(text).lower()
    if name.startswith("tu:") or sets_of_group(name):
        return "graph"
    return _BY_LOWER[name].task if name in _BY_LOWER else "node"


def data_root(given: str | Path | None = None) -> Path:
    """Where data sets lie: the folder given, else `ATOLL_DATA`, else `~/.cache/atoll/data`."""
    chosen = given or os.environ.get("ATOLL_DATA") or Path("~/.cache/atoll/data")
    return Path(chosen).expanduser()


def missing_files(info: DatasetInfo, root: str | Path | None = None) -> list[str]:
    """The raw files of a set that are not there, relative to its folder."""
    home = data_root(root) / info.home
    return [file for file in info.files if not (home / file).is_file()]


def is_present(name: str, root: str | Path | None = None) -> bool:
    """Whether all raw files of a set are there."""
    return not missing_files(dataset_info(name), root)


def load_dataset(
    name: str,
    root: str | Path | None = None,
    *,
    split_index: int = 0,
    features: str = "own",
    max_degree: int | None = None,
) -> Source | GraphSet:
    """Load a public data set from its raw files; never downloads.

    Args:
        name: A name in `DATASETS` in any case, or `tu:NAME`.
        root: The data root; see `data_root`.
        split_index: Which of the published splits, where there are several.
        features: For a set of graphs "own", its node labels (else attributes, else degrees), or
            "degree", one-hot degrees whatever else there is.
        max_degree: Where degrees are the features, the largest with a one-hot column of its own;
            larger ones share it. Default: the published value, else the set's largest degree.

    Returns:
        A `Source` (one graph) or a `GraphSet` (many graphs with one label each).

    Raises:
        ConfigError: No such set, split or package.
        DataError: The raw files are absent or cannot be read.
    """
    info, base = dataset_info(name), data_root(root)
    if features not in FEATURES:
        raise unknown("value of features", features, FEATURES)
    absent = missing_files(info, base)
    if absent:
        raise DataError(
            f"data set '{info.name}' is not in {base} (no {info.home}/{absent[0]}); "
            f"get it with: atoll data fetch {info.name}"
        )
    try:
        if info.loader == "structure":
            return check_source(_structure(info, base / info.home, split_index))
        paths = base / info.folder, base / info.home
        with open_raw(info.loader, info.arguments, *paths) as dataset:
            if info.task == "graph":
                _roles(info, [], split_index)  # graph sets come without splits
                return check_graph_set(_graph_set(info, dataset, features, max_degree))
            return check_source(_source(info, dataset, split_index))
    except (AtollError, MemoryError):
        raise
    except Exception as error:  # other packages raise anything at all on a damaged file
        raise DataError(
            f"data set '{info.name}' in {base / info.home} cannot be read "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'})"
            f"; remove that folder and run: atoll data fetch {info.name}"
        ) from error


def load_group(name: str, root: str | Path | None = None, **options: Any) -> GraphGroup:
    """Load GCFL's group of data sets with this name, or sets joined by "+"; options as for each."""
    sets, base = sets_of_group(name), data_root(root)
    absent = [one for one in sets if not is_present(one, base)]
    if absent:
        raise DataError(
            f"group '{name.lower()}' needs data sets that are not in {base}: {', '.join(absent)}; "
            f"get them with: atoll data fetch {' '.join(absent)}"
        )
    loaded = (load_dataset(one, base, **options) for one in sets)
    return GraphGroup(name.lower(), tuple(one for one in loaded if isinstance(one, GraphSet)))


def _source(info: DatasetInfo, dataset: Any, split_index: int) -> Source:
    """One graph of PyG or OGB as a `Source`."""
    data = dataset[0]
    y = data.y.reshape(-1).numpy().astype(np.int64)
    x = data.x.numpy().astype(np.float32, copy=False)
    if np.count_nonzero(x) < SPARSE_BELOW * x.size:
        x = sp.csr_array(x)
    masks: list[np.ndarray] = []
    if info.loader == _OGBN:
        order = dataset.get_idx_split()
        masks = [np.isin(np.arange(y.size), order[part]) for part in ("train", "valid", "test")]
    elif "train_mask" in data:
        masks = [data[f"{part}_mask"].numpy() for part in ("train", "val", "test")]
    columns = {"year": data.node_year.reshape(-1).numpy()} if "node_year" in data else {}
    return Source(
        name=info.name,
        x=x,
        edges=data.edge_index.numpy().astype(np.int64, copy=False),
        y=y,
        classes=int(y.max()) + 1,
        split=_roles(info, masks, split_index),
        columns=columns,
        metric=info.metric,
    )


def _roles(info: DatasetInfo, masks: list[np.ndarray], index: int) -> np.ndarray | None:
    """Train, validation and test masks, one column per split, as one array of roles."""
    count = max((mask.shape[1] if mask.ndim == 2 else 1 for mask in masks), default=1)
    if not 0 <= index < count:
        raise ConfigError(
            f"data set '{info.name}' has no split {index}; its splits are 0 to {count - 1}"
        )
    if not masks:
        return None
    split = np.full(masks[0].shape[0], UNUSED, dtype=np.int8)
    for mask, role in zip(masks, (TRAIN, VAL, TEST), strict=True):
        # WikiCS has twenty training masks and one test mask.
        split[(mask[:, index] if mask.ndim == 2 else mask).astype(bool)] = role
    return split


def _structure(info: DatasetInfo, home: Path, split_index: int) -> Source:
    """The topology of ogbn-arxiv, which OGB's class refuses without its features."""

    def column(file: str) -> np.ndarray:
        return np.loadtxt(home / file, dtype=np.int64, delimiter=",", ndmin=2)

    y = column("raw/node-label.csv.gz")[:, 0]
    parts = [column(f"split/time/{part}.csv.gz") for part in ("train", "valid", "test")]
    return Source(
        name=info.name,
        x=np.zeros((y.size, 0), dtype=np.float32),
        edges=np.ascontiguousarray(column("raw/edge.csv.gz").T),
        y=y,
        classes=int(y.max()) + 1,
        split=_roles(info, [np.isin(np.arange(y.size), part) for part in parts], split_index),
        columns={"year": column("raw/node_year.csv.gz")[:, 0]},
    )


def _graph_set(info: DatasetInfo, dataset: Any, features: str, max_degree: int | None) -> GraphSet:
    """A TUDataset, which PyG stores end to end already, as a `GraphSet`."""
    data, slices = dataset._data, dataset.slices  # the storage itself; iterating would copy it
    if data.y is None or data.y.is_floating_point() or data.y.dim() != 1:
        raise DataError(f"data set '{info.name}' has no single class per graph; choose another set")
    own = "x" in slices  # without features PyG keeps the sizes instead
    node_ptr = slices["x"].numpy() if own else np.cumsum([0, *data._num_nodes])
    # Trailing graphs without an edge are left out of PyG's edge slices.
    edge_ptr = np.full(node_ptr.size, data.edge_index.shape[1])
    edge_ptr[: slices["edge_index"].numel()] = slices["edge_index"].numpy()
    edges = data.edge_index.numpy() + np.repeat(node_ptr[:-1], np.diff(edge_ptr))
    attributes = dataset.num_node_attributes
    if features == "degree":
        x = _degree_one_hot(info, edges, int(node_ptr[-1]), max_degree)
    elif dataset.num_node_labels:
        x = data.x.numpy()[:, attributes:]  # GCFL's choice: one-hot labels without attributes
    elif attributes:
        x = data.x.numpy()
    else:
        x = _degree_one_hot(info, edges, int(node_ptr[-1]), max_degree)
    return GraphSet(
        name=info.name,
        x=np.ascontiguousarray(x, dtype=np.float32),
        edges=edges.astype(np.int64, copy=False),
        node_ptr=node_ptr.astype(np.int64, copy=False),
        y=data.y.numpy().astype(np.int64, copy=False),
        classes=int(data.y.max()) + 1,
        metric=info.metric,
    )


def _degree_one_hot(
    info: DatasetInfo, edges: np.ndarray, nodes: int, max_degree: int | None
) -> np.ndarray:
    degree = np.bincount(edges[0], minlength=nodes)
    top = info.max_degree or int(degree.max(initial=0)) if max_degree is None else max_degree
    if top < 0:
        raise ConfigError(f"max_degree is {top}; give a number from 0 on")
    if max_degree is None and nodes * (top + 1) * 4 > MAX_DEGREE_BYTES:
        raise DataError(
            f"data set '{info.name}' has degrees up to {top}, which one-hot would "
            f"take {nodes * (top + 1) * 4 / 2**30:.0f} GiB; give a smaller max_degree"
        )
    x = np.zeros((nodes, top + 1), dtype=np.float32)
    x[np.arange(nodes), np.minimum(degree, top)] = 1
    return x
