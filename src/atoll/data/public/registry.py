"""The registry of public data sets: descriptions, folders and loading."""

from __future__ import annotations

import csv
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from atoll.core.errors import AtollError, ConfigError, DataError, check_name, unknown
from atoll.core.task import GRAPHS, NODES
from atoll.data.public.raw import READERS, tu_dataset
from atoll.data.public.tables import TABLES
from atoll.data.public.untrusted import OGB_CLASS, open_raw
from atoll.data.source import TEST, TRAIN, UNUSED, VAL, GraphGroup, GraphSet, Source, compact
from atoll.data.spec import Value, parse_recipe

if TYPE_CHECKING:
    from torch_geometric.data import InMemoryDataset

SPARSE_BELOW = 0.1  # features with a smaller share of non-zero entries are stored as sparse
FEATURES = ("own", "degree")
"""Node features of graph sets. "own": labels, attributes or degrees. "degree": only degrees."""
MAX_DEGREE_BYTES = 4 * 2**30  # the largest one-hot degree matrix without an explicit `max_degree`
_FILES = resources.files("atoll.data.public")


@dataclass(frozen=True)
class DatasetInfo:
    """One public data set. Published counts are over all graphs, or None if not published."""

    name: str  # the name that users type, in upper or lower case
    loader: str  # name of the PyG or OGB class, or of a loader of Atoll (`by_atoll`)
    label: str  # the name used by the authors and by that class
    origin: str  # the publisher
    licence: str  # terms of use, in a few words
    folder: str  # the loader class's `root`, below the data root
    home: str  # the folder that holds `raw/`, below the data root
    files: tuple[str, ...]  # required files, below `home`
    arguments: dict[str, str | bool]  # of the loader class, besides `root`
    nodes: int | None = None
    edges: int | None = None  # directed
    features: int | None = None
    classes: int | None = None  # of nodes, or of graphs
    graphs: int | None = None  # 1 for a node set
    max_degree: int | None = None  # largest degree with a column, if degrees are the features
    metric: str = "accuracy"  # or "auc"
    note: str = ""  # a note for users, for example about an excluded column

    @property
    def by_atoll(self) -> bool:
        """Whether only a loader of Atoll, and no class of PyG or OGB, reads the set."""
        return self.loader == "structure" or self.name in TABLES

    @property
    def task(self) -> str:
        """The name of the task in `TASKS`."""
        return (GRAPHS if self.loader == "TUDataset" else NODES).name

    @property
    def archive(self) -> str:
        """The name of this set's archive in a mirror."""
        return f"{self.name.removeprefix('tu:')}.tar.xz"


def _read_text(name: str) -> str:
    return _FILES.joinpath(name).read_text(encoding="utf-8")


_LOADERS = tomllib.loads(_read_text("loaders.toml"))
"""How each loader finds its raw files, by its name. `loaders.toml` explains the fields."""


def _make_info(row: Mapping[str, str]) -> DatasetInfo:
    """Make an entry from a row of the table and its loader's patterns."""
    label, low = row["label"], row["label"].lower()

    def fill(value: object) -> object:
        if isinstance(value, str):
            under = low.replace("-", "_")
            return value.format(label=label, low=low, short=low[:3], under=under)
        if isinstance(value, list):
            return [fill(one) for one in value]
        return {key: fill(one) for key, one in value.items()} if isinstance(value, dict) else value

    filled = {"folder": row["loader"]} | {k: fill(v) for k, v in _LOADERS[row["loader"]].items()}
    home = str(PurePosixPath(str(filled["folder"])) / str(filled["home"]))
    return msgspec.convert({**filled, **row, "home": home}, DatasetInfo, strict=False)


_ROWS = csv.DictReader(_read_text("datasets.csv").splitlines())
DATASETS = {row["name"]: _make_info({k: v for k, v in row.items() if v}) for row in _ROWS}
"""Every set with published counts. Any other TUDataset is `tu:NAME`.

An accuracy on `ogbn-arxiv-structure` means nothing, because this set has no features.
"""

_MOLECULES = ("MUTAG", "BZR", "COX2", "DHFR", "PTC_MR", "AIDS", "NCI1")
_BIOCHEM = (*_MOLECULES, "ENZYMES", "DD", "PROTEINS")
GROUPS: dict[str, tuple[str, ...]] = {
    "molecules": _MOLECULES,
    "biochem": _BIOCHEM,
    "mix": (*_BIOCHEM, "COLLAB", "IMDB-BINARY", "IMDB-MULTI"),
}
"""GCFL's groups of data sets. In a federation each set is one client."""

_BY_LOWER = {name.lower(): info for name, info in DATASETS.items()}


def sets_of_group(name: str) -> tuple[str, ...]:
    """Return the sets of a group, named as in `GROUPS` or as "PROTEINS+MUTAG". Otherwise ()."""
    if name.lower() in GROUPS:
        return GROUPS[name.lower()]
    parts = [_BY_LOWER.get(part) for part in name.lower().split("+")]
    sets = tuple(one.name for one in parts if one is not None and one.task == GRAPHS.name)
    return sets if len(sets) == len(parts) > 1 else ()


def dataset_info(name: str) -> DatasetInfo:
    """Return the entry for a typed name: upper or lower case, or `tu:NAME` for a TUDataset."""
    given = name.strip()
    plain = given[3:] if given.lower().startswith("tu:") else given
    info = _BY_LOWER.get(plain.lower())
    if info is not None and (plain == given or info.loader == "TUDataset"):
        return info
    # The name becomes a folder and a file name, so it must not leave the data root.
    if plain != given and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_+-]*", plain):
        return _make_info({"name": f"tu:{plain}", "loader": "TUDataset", "label": plain})
    sentence = str(unknown("data set", given, _BY_LOWER))
    raise ConfigError(
        f"{sentence} (a path must exist, and any other TUDataset is written 'tu:NAME')"
    )


def parse_name(text: str) -> tuple[str, dict[str, Value]]:
    """Return the name and options of a set or group: "PROTEINS:features=degree", "tu:NAME"."""
    prefix = text[:3] if text.lower().startswith("tu:") else ""
    name, options = parse_recipe(text[len(prefix) :])
    return prefix + name, options


def plain_name(text: str) -> str:
    """Return a known or unknown name without its options. A `tu:` name keeps its options."""
    return text if text.lower().startswith("tu:") else text.partition(":")[0]


def task_of_data(text: str) -> str:
    """Return the name of the task of data with this name, as typed by a user."""
    name = plain_name(text).lower()
    if name.startswith("tu:") or sets_of_group(name):
        return GRAPHS.name
    return _BY_LOWER[name].task if name in _BY_LOWER else NODES.name


def data_root(given: str | Path | None = None) -> Path:
    """Return the folder of data sets: given, else `ATOLL_DATA`, else `~/.cache/atoll/data`."""
    return Path(given or os.environ.get("ATOLL_DATA") or "~/.cache/atoll/data").expanduser()


def missing_files(info: DatasetInfo, root: str | Path | None = None) -> list[str]:
    """Return the missing raw files of a set, relative to its folder."""
    home = data_root(root) / info.home
    return [file for file in info.files if not (home / file).is_file()]


def homes_of_data(text: str, root: str | Path | None = None) -> list[Path]:
    """Return the folders of the sets that belong to the name of a set or a group."""
    plain = parse_name(text)[0]
    return [data_root(root) / dataset_info(one).home for one in sets_of_group(plain) or (plain,)]


def is_present(name: str, root: str | Path | None = None) -> bool:
    """Return whether all raw files of a set exist."""
    return not missing_files(dataset_info(name), root)


def load_dataset(
    name: str,  # in `DATASETS` in any case, or `tu:NAME`
    root: str | Path | None = None,
    *,
    split_index: int = 0,  # the number of a published split, if there are several
    features: str = "own",
    max_degree: int | None = None,
    options: Mapping[str, Value] = MappingProxyType({}),  # of a loader in `TABLES`
) -> Source | GraphSet:
    """Load a public data set (one graph, or a set of graphs) from its raw files. Never download.

    Edges stay as PyG, OGB or the loader in `TABLES` returns them, directed or not. The features of
    a set of graphs are node labels, else attributes, else degrees ("own"), or always degrees
    ("degree"). Degrees are one-hot, and all degrees from `max_degree` on share a column. The
    default of `max_degree` is that of `DatasetInfo`, else the set's largest degree.
    """
    info, base = dataset_info(name), data_root(root)
    check_name("value of features", features, FEATURES)
    absent = missing_files(info, base)
    if absent:
        problem = f"data set '{info.name}' is not in {base} (no {info.home}/{absent[0]})"
        raise DataError(f"{problem}; get it with: atoll data fetch {info.name}")
    try:
        if info.name in TABLES:
            _roles(info, [], split_index)  # these sets have no published splits
            return TABLES[info.name](base / info.home, **options).checked()
        if info.loader == "structure":
            return _structure(info, base / info.home, split_index).checked()
        if info.task == GRAPHS.name:
            _roles(info, [], split_index)  # graph sets have no published splits
            return _graph_set(info, base / info.home, features, max_degree).checked()
        if info.loader in READERS:
            x, edges, y, masks = READERS[info.loader](base / info.home, info.label)
            x, split = compact(x, SPARSE_BELOW), _roles(info, masks, split_index)
            size = int(y.max()) + 1
            return Source(info.name, x, edges, y, size, split=split, metric=info.metric).checked()
        with open_raw(info.loader, info.arguments, base / info.folder, base / info.home) as dataset:
            return _source(info, dataset, split_index).checked()
    except AtollError:
        raise
    except MemoryError as error:  # a damaged file may request any amount
        problem = f"data set '{info.name}' needs more memory than there is, or is damaged"
        hint = f"free memory, or remove {base / info.home} and run: atoll data fetch {info.name}"
        raise DataError(f"{problem}; {hint}") from error
    except Exception as error:  # other packages may raise any error on a damaged file
        reason = str(error).splitlines()[0] if str(error) else "no reason"
        raise DataError(
            f"data set '{info.name}' in {base / info.home} cannot be read ({type(error).__name__}: "
            f"{reason}); remove that folder and run: atoll data fetch {info.name}"
        ) from error


def load_group(
    name: str, root: str | Path | None, *, features: str, max_degree: int | None
) -> GraphGroup:
    """Load GCFL's group of this name, or sets joined by "+". The options apply to each set."""
    sets, base = sets_of_group(name), data_root(root)
    absent = [one for one in sets if not is_present(one, base)]
    if absent:
        needed = f"data sets that are not in {base}: {', '.join(absent)}"
        advice = f"get them with: atoll data fetch {' '.join(absent)}"
        raise DataError(f"group '{name.lower()}' needs {needed}; {advice}")
    loaded = (load_dataset(one, base, features=features, max_degree=max_degree) for one in sets)
    return GraphGroup(name.lower(), tuple(one for one in loaded if isinstance(one, GraphSet)))


def _source(info: DatasetInfo, dataset: InMemoryDataset, split_index: int) -> Source:
    """Convert one graph of PyG or OGB to a `Source`."""
    data = dataset[0]
    y = data.y.reshape(-1).numpy().astype(np.int64)
    masks: list[np.ndarray] = []
    if info.loader == OGB_CLASS:
        order = dataset.get_idx_split()
        masks = [np.isin(np.arange(y.size), order[part]) for part in ("train", "valid", "test")]
    elif "train_mask" in data:
        masks = [data[f"{part}_mask"].numpy() for part in ("train", "val", "test")]
    x, classes = compact(data.x.numpy(), SPARSE_BELOW), int(y.max()) + 1
    edges = data.edge_index.numpy().astype(np.int64, copy=False)
    columns = {"year": data.node_year.reshape(-1).numpy()} if "node_year" in data else {}
    split = _roles(info, masks, split_index)
    return Source(info.name, x, edges, y, classes, None, split, columns, info.metric)


def _roles(info: DatasetInfo, masks: list[np.ndarray], index: int) -> np.ndarray | None:
    """Convert train, validation and test masks to an array of roles, or to None without masks.

    Masks with two dimensions have one column per split, and `index` selects it.
    """
    count = max((mask.shape[1] if mask.ndim == 2 else 1 for mask in masks), default=1)
    if not 0 <= index < count:
        advice = f"its splits are 0 to {count - 1}"
        raise ConfigError(f"data set '{info.name}' has no split {index}; {advice}")
    if not masks:
        return None
    split = np.full(masks[0].shape[0], UNUSED, dtype=np.int8)
    for mask, role in zip(masks, (TRAIN, VAL, TEST), strict=True):
        # WikiCS has twenty training masks and one test mask.
        split[(mask[:, index] if mask.ndim == 2 else mask).astype(bool)] = role
    return split


def _structure(info: DatasetInfo, home: Path, split_index: int) -> Source:
    """Load ogbn-arxiv without node features, which OGB's class refuses."""

    def column(file: str) -> np.ndarray:
        return np.loadtxt(home / file, dtype=np.int64, delimiter=",", ndmin=2)

    y = column("raw/node-label.csv.gz")[:, 0]
    parts = [column(f"split/time/{part}.csv.gz") for part in ("train", "valid", "test")]
    split = _roles(info, [np.isin(np.arange(y.size), part) for part in parts], split_index)
    x, classes = np.zeros((y.size, 0), dtype=np.float32), int(y.max()) + 1
    edges = np.ascontiguousarray(column("raw/edge.csv.gz").T)
    columns = {"year": column("raw/node_year.csv.gz")[:, 0]}
    return Source(info.name, x, edges, y, classes, None, split, columns)


def _graph_set(info: DatasetInfo, home: Path, features: str, max_degree: int | None) -> GraphSet:
    """Convert a TUDataset to a `GraphSet`."""
    found = tu_dataset(home, info.label)
    if "y" not in found:
        raise DataError(f"data set '{info.name}' has no single class per graph; choose another set")
    edges, node_ptr, y = found["edges"], found["node_ptr"], found["y"]
    if features == "degree" or "x" not in found:
        nodes = int(node_ptr[-1])
        degree = np.bincount(edges[0], minlength=nodes)
        top = info.max_degree or int(degree.max(initial=0)) if max_degree is None else max_degree
        size = nodes * (top + 1) * 4
        if top < 0:
            raise ConfigError(f"max_degree is {top}; give a number from 0 on")
        if max_degree is None and size > MAX_DEGREE_BYTES:
            problem = f"degrees up to {top}, which one-hot would take {size / 2**30:.0f} GiB"
            raise DataError(f"data set '{info.name}' has {problem}; give a smaller max_degree")
        x = np.zeros((nodes, top + 1), dtype=np.float32)
        x[np.arange(nodes), np.minimum(degree, top)] = 1
    else:
        x = found["x"]
    return GraphSet(info.name, x, edges, node_ptr, y, int(y.max()) + 1, info.metric)
