"""The public data sets: what they are, where they lie, and how to load one.

PyG's and OGB's own classes read the raw files; this module knows their names, checks that the files
are there (loading never downloads; `data/public/fetch.py` does), and turns the result into a
`Source` or a `GraphSet`. Edges stay as published: a protocol that wants them undirected asks
`Source.undirected_simple`.
"""

from __future__ import annotations

import csv
import os
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import scipy.sparse as sp

from atoll.core.errors import AtollError, ConfigError, DataError, unknown
from atoll.core.task import GRAPHS, NODES
from atoll.data.public.untrusted import OGB_CLASS, open_raw
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
from atoll.data.spec import Value, parse_recipe

if TYPE_CHECKING:
    from torch_geometric.data import InMemoryDataset

SPARSE_BELOW = 0.1
"""Features with a smaller share of non-zero entries are kept sparse."""

FEATURES = ("own", "degree")
"""What the nodes of a set of graphs are described by."""

MAX_DEGREE_BYTES = 4 * 2**30
"""The largest one-hot degree matrix that is made without being asked for."""

_FILES = resources.files("atoll.data.public")


class Loader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a class of PyG or OGB finds its raw files; `loaders.toml` explains the fields."""

    origin: str
    licence: str
    home: str
    files: tuple[str, ...]
    arguments: dict[str, str | bool]
    folder: str | None = None


_LOADERS = msgspec.convert(
    tomllib.loads(_FILES.joinpath("loaders.toml").read_text(encoding="utf-8")), dict[str, Loader]
)


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
        """What is predicted, by its name in `TASKS`."""
        return (GRAPHS if self.loader == "TUDataset" else NODES).name

    @property
    def _loader(self) -> Loader:
        return _LOADERS[self.loader]

    @property
    def arguments(self) -> dict[str, str | bool]:
        """Keyword arguments of the loader class, besides `root`."""
        given = self._loader.arguments.items()
        return {k: self._fill(v) if isinstance(v, str) else v for k, v in given}

    @property
    def folder(self) -> str:
        """The loader class's `root`, below the data root."""
        return self._loader.folder or self.loader

    @property
    def home(self) -> str:
        """The set's own folder below the data root: the one that holds `raw/`."""
        return str(PurePosixPath(self.folder) / self._fill(self._loader.home))

    @property
    def files(self) -> tuple[str, ...]:
        """The files that must be there, below `home`."""
        return tuple(map(self._fill, self._loader.files))

    @property
    def archive(self) -> str:
        """Name of this set's archive in a mirror."""
        return f"{self.name.removeprefix('tu:')}.tar.xz"

    @property
    def licence(self) -> str:
        """Terms of use, in a few words."""
        return self._loader.licence

    @property
    def origin(self) -> str:
        """Who published it."""
        return self._loader.origin

    def _fill(self, pattern: str) -> str:
        low = self.label.lower()
        return pattern.format(label=self.label, low=low, short=low[:3], under=low.replace("-", "_"))


def _read_datasets() -> dict[str, DatasetInfo]:
    lines = _FILES.joinpath("datasets.csv").read_text(encoding="utf-8").splitlines()
    rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(lines)]
    return {row["name"]: msgspec.convert(row, DatasetInfo, strict=False) for row in rows}


DATASETS = _read_datasets()
"""Every set with published counts; any other TUDataset is `tu:NAME`.

An accuracy on `ogbn-arxiv-structure` means nothing: it has no features.
"""

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
    sets = tuple(one.name for one in parts if one is not None and one.task == GRAPHS.name)
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


def parse_name(text: str) -> tuple[str, dict[str, Value]]:
    """A set's or a group's name and its options: "PROTEINS:features=degree", "tu:NAME"."""
    prefix = text[:3] if text.lower().startswith("tu:") else ""
    name, options = parse_recipe(text[len(prefix) :])
    return prefix + name, options


def plain_name(text: str) -> str:
    """A name without its options, whether or not it is one that Atoll knows."""
    return text if text.lower().startswith("tu:") else text.partition(":")[0]


def task_of_data(text: str) -> str:
    """What is predicted in the data of this name, as a user types it."""
    name = plain_name(text).lower()
    if name.startswith("tu:") or sets_of_group(name):
        return GRAPHS.name
    return _BY_LOWER[name].task if name in _BY_LOWER else NODES.name


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
            if info.task == GRAPHS.name:
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


def load_group(
    name: str,
    root: str | Path | None = None,
    *,
    features: str = "own",
    max_degree: int | None = None,
) -> GraphGroup:
    """Load GCFL's group of data sets with this name, or sets joined by "+"; options as for each."""
    sets, base = sets_of_group(name), data_root(root)
    absent = [one for one in sets if not is_present(one, base)]
    if absent:
        raise DataError(
            f"group '{name.lower()}' needs data sets that are not in {base}: {', '.join(absent)}; "
            f"get them with: atoll data fetch {' '.join(absent)}"
        )
    loaded = (load_dataset(one, base, features=features, max_degree=max_degree) for one in sets)
    return GraphGroup(name.lower(), tuple(one for one in loaded if isinstance(one, GraphSet)))


def _source(info: DatasetInfo, dataset: InMemoryDataset, split_index: int) -> Source:
    """One graph of PyG or OGB as a `Source`."""
    data = dataset[0]
    y = data.y.reshape(-1).numpy().astype(np.int64)
    x = data.x.numpy().astype(np.float32, copy=False)
    if np.count_nonzero(x) < SPARSE_BELOW * x.size:
        x = sp.csr_array(x)
    masks: list[np.ndarray] = []
    if info.loader == OGB_CLASS:
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


def _graph_set(
    info: DatasetInfo, dataset: InMemoryDataset, features: str, max_degree: int | None
) -> GraphSet:
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
