"""Public tables with graphs that no class of PyG reads: amlsim-20k, german, bail and twitch.

Each loader takes the folder of the raw files, and its options as keyword-only arguments. Columns
are standardised over all nodes, except for Twitch, whose features are 0 or 1. A column that leaks
the label is excluded unless the option `leaking` of its loader is true.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from atoll.core.errors import check_name
from atoll.data.source import Source, both_directions
from atoll.data.spec import check_flag

COUNTRIES = ("DE", "ENGB", "ES", "FR", "PTBR", "RU")
GAMES = 3170  # number of features of Twitch users: games, location and habits
SECOND_COHORT = 9327  # the first row of bail's 1980 cohort
NEAR = 0.6  # NIFTY's threshold for bail

Table = dict[str, np.ndarray]


def _read(path: Path) -> Table:
    import pyarrow.csv

    table = pyarrow.csv.read_csv(path)
    return {name: table[name].to_numpy() for name in table.column_names}


def _standardised(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Standardise columns to mean 0 and standard deviation 1. Constant columns become 0."""
    x = np.stack(columns, axis=1).astype(np.float64)
    spread = x.std(axis=0)
    scaled: np.ndarray = (x - x.mean(axis=0)) / np.where(spread > 0, spread, 1)
    return scaled.astype(np.float32)


def amlsim(home: Path, *, features: str = "own", leaking: bool = False) -> Source:
    """Load accounts of IBM's simulator with their timed transfers. Class 1 is fraud.

    With `features` "own" the feature is the initial balance. "transfers" adds the counts and sums
    of an account's transfers of all times. The column `first`, the time of the first transfer, is
    then excluded, because these features disclose the future of a split in time. `leaking` adds
    the feature fraudStep.
    """
    check_name("value of features", features, ("own", "transfers"))
    check_flag("leaking", leaking)
    nodes, moves = _read(home / "raw/nodes.csv"), _read(home / "raw/transactions.csv")
    rows, count = np.argsort(nodes["nodeid"]), len(nodes["nodeid"])
    edges = np.stack([moves["sourceNodeId"], moves["targetNodeId"]]).astype(np.int64)
    amount, time = moves["value"], moves["time"]
    first = np.full(count, np.iinfo(np.int64).max)
    for ends in edges:
        np.minimum.at(first, ends, time)
    own = [nodes["init_balance"][rows]] + [nodes["fraudStep"][rows]] * leaking
    columns = {"first": np.where(first > time.max(), 0, first)}  # 0 for accounts without a transfer
    if features == "transfers":
        columns = {}
        sums = (np.bincount(ends, by, count) for ends in edges for by in (None, amount))
        own += [np.log1p(values) for values in sums]
    return Source(
        name="amlsim-20k",
        x=_standardised(own),
        edges=edges,
        y=nodes["isFraud"][rows].astype(np.int64),
        classes=2,
        weight=(amount / amount.mean()).astype(np.float32),
        columns=columns,
        metric="auc",
        class_names=("normal", "fraud"),
        edge_time=time.astype(np.float64),
    )


def german(home: Path) -> Source:
    """Load loans of a German bank, joined if amount, age and duration are alike. Class 1 is bad."""
    table = _read(home / "raw/german.csv")
    good, gender = table.pop("GoodCustomer"), table.pop("Gender")
    purpose = table.pop("PurposeOfLoan").astype(str)
    kinds = [purpose == kind for kind in np.unique(purpose)]
    return Source(
        name="german",
        x=_standardised([gender == "Male", *table.values(), *kinds]),
        edges=_published_edges(home / "raw/german_edges.txt", len(good)),
        y=(good < 0).astype(np.int64),
        classes=2,
        columns={"gender": gender.astype(str), "purpose": purpose},
        metric="auc",
        class_names=("good", "bad"),
    )


def bail(home: Path, *, leaking: bool = False) -> Source:
    """Load released prisoners, joined by similarity. Class 1 returned to prison.

    The published edges are built from distances that include TIME, which leaks the label. By
    default `similar` builds the edges by the same rule without TIME. `leaking` keeps TIME and the
    published edges.
    """
    check_flag("leaking", leaking)
    table = _read(home / "raw/bail.csv")
    y = table.pop("RECID").astype(np.int64)
    if not leaking:
        del table["TIME"]
    raw = np.stack(list(table.values()), axis=1).astype(np.float64)
    file = home / "raw/bail_edges.txt"
    return Source(
        name="bail",
        x=_standardised(list(table.values())),
        edges=_published_edges(file, y.size) if leaking else similar(raw, NEAR),
        y=y,
        classes=2,
        columns={"cohort": np.where(np.arange(y.size) < SECOND_COHORT, 1978, 1980)},
        metric="auc",
        class_names=("stayed free", "returned"),
    )


def _published_edges(path: Path, nodes: int) -> np.ndarray:
    return both_directions(np.loadtxt(path, dtype=np.int64, ndmin=2).T, nodes)[0]


def similar(rows: np.ndarray, near: float) -> np.ndarray:
    """Join similar rows as NIFTY does, and return the edges in both directions.

    The similarity of two rows is 1 / (1 + distance). A row is joined to each other row with more
    than `near` times the similarity of the row's nearest neighbour.
    """
    from sklearn.neighbors import KDTree  # SciPy's crashed on this table on one machine

    tree = KDTree(rows)
    best = tree.query(rows, k=2)[0][:, 1]
    found = tree.query_radius(rows, (1 + best) / near - 1 + 1e-9)
    begins = np.repeat(np.arange(len(rows)), [len(some) for some in found])
    ends = np.concatenate(found)
    distance = np.sqrt(((rows[begins] - rows[ends]) ** 2).sum(axis=1))
    close = 1 / (1 + distance) > near / (1 + best[begins])
    return both_directions(np.stack([begins, ends])[:, close], len(rows))[0]


def twitch(home: Path) -> Source:
    """Load Twitch users. Their country is the column `client`. Class 1 streams mature content."""
    import scipy.sparse as sp

    labels, edges, users, games, start = [], [], [], [], 0
    for country in COUNTRIES:
        table = _read(home / country / f"raw/{country}_target.csv")
        numbers, first = np.unique(table["new_id"], return_index=True)  # two users occur twice
        links = _read(home / country / f"raw/{country}_edges.csv")
        text = (home / country / f"raw/{country}.json").read_text(encoding="utf-8")
        chosen = {int(user): some for user, some in json.loads(text).items()}
        labels.append(table["mature"].astype(bool)[first])
        edges.append(np.stack([links["from"], links["to"]]) + start)
        users.append(start + np.repeat(numbers, [len(chosen[user]) for user in numbers.tolist()]))
        games += [game for user in numbers.tolist() for game in chosen[user]]
        start += numbers.size
    place = np.concatenate(users), np.asarray(games)
    # A game that a user has twice counts once.
    x = sp.csr_array(
        sp.coo_array((np.ones(place[0].size), place), (start, GAMES)), dtype=np.float32
    )
    x.data[:] = 1
    return Source(
        name="twitch",
        x=x,
        edges=both_directions(np.concatenate(edges, axis=1), start)[0],
        y=np.concatenate(labels).astype(np.int64),
        classes=2,
        columns={"client": np.repeat(COUNTRIES, [own.size for own in labels])},
        metric="auc",
        class_names=("all ages", "mature"),
    )


TABLES: dict[str, Callable[..., Source]] = {
    "amlsim-20k": amlsim,
    "german": german,
    "bail": bail,
    "twitch": twitch,
}
"""The loaders by the names of the sets."""
