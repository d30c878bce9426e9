"""GCFL's Tables 1 and 2: properties of graphs compared with random graphs, and their distances.

The paper does not describe its computation. We inferred it from its public code and its numbers:

- Random graphs have the same nodes and density as a graph, so their number of edges varies. An
  undefined kurtosis counts as zero. The p-value of kurtosis is one-sided. The paper does not name
  the test, and we use Welch's.
- An embedding joins anonymous walks of 3 to 7 steps, only 100 of each length. With so few walks,
  embeddings of the same graph differ by chance. `enough_walks` returns a sufficient number.
- The "divergence" of features is the Jensen-Shannon distance, the square root of the divergence.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from atoll.analyses.claim import Claim
from atoll.core.errors import ConfigError, DataError, check_name
from atoll.data.measure.heterogeneity import (
    FEATURE_BINS,
    NATS,
    PlainGraph,
    jensen_shannon,
    similarity_histogram,
)
from atoll.data.measure.structure import (
    STATISTICS,
    anonymous_walks,
    random_pairs,
    structure_statistics,
    walk_patterns,
)
from atoll.data.public.registry import is_present, load_dataset
from atoll.data.source import GraphSet, undirected_pairs
from atoll.experiment.config import RECIPES
from atoll.present.chart import GREY, Axis, Chart, Dots, Line, number_text, titled
from atoll.present.tables import Table, make_table

STEPS = range(3, 8)
PAPER_WALKS = 100  # of each length, in the paper's code
GRAPHS = 100  # graphs per set whose pairs are compared
Row = dict[str, str]


def enough_walks(steps: int, *, eps: float = 0.1, delta: float = 0.01) -> int:
    """Return the number of walks for an L1 error below `eps` with probability 1 - `delta`."""
    patterns = len(walk_patterns(steps))
    return math.ceil(2 * (math.log(2) * patterns - math.log(delta)) / eps**2)


def plain_graphs(source: GraphSet, most: int | None = None, seed: int = 0) -> list[PlainGraph]:
    """Return the graphs of a set, or a random sample of `most` graphs."""
    owner, chosen = source.graph_of_node()[source.edges[0]], np.arange(source.num_graphs)
    order = np.argsort(owner, kind="stable")
    ends = np.split(source.edges[:, order], np.searchsorted(owner[order], chosen[1:]), axis=1)
    if most is not None and most < len(chosen):
        chosen = np.sort(np.random.default_rng(seed).choice(len(chosen), most, replace=False))
    found = []
    for one in chosen:
        first, end = source.node_ptr[one : one + 2]
        nodes = int(end - first)
        pairs, _ = undirected_pairs(ends[one] - first, nodes)
        found.append(PlainGraph(nodes, pairs, source.x[first:end], np.zeros(nodes)))
    return found


class Properties(NamedTuple):
    """Means over a set's graphs and over as many random graphs, and p-values, by `STATISTICS`."""

    real: ndarray
    random: ndarray
    p: ndarray


def properties(graphs: list[PlainGraph], seed: int = 0) -> Properties:
    """Compute `STATISTICS` of graphs and of random graphs of equal nodes and density (Table 1)."""
    from scipy.stats import ttest_ind_from_stats

    rng = np.random.default_rng(seed)
    values = np.zeros((2, len(graphs), len(STATISTICS)))
    for row, graph in enumerate(graphs):
        places, edges = graph.nodes * (graph.nodes - 1) // 2, graph.pairs.shape[1]
        drawn = rng.binomial(places, edges / places) if places else 0
        for which, pairs in enumerate((graph.pairs, random_pairs(graph.nodes, drawn, rng))):
            values[which, row] = structure_statistics(pairs, graph.nodes, path_sources=512, rng=rng)
    values = np.nan_to_num(values)
    means, spreads = values.mean(1), values.std(1, ddof=1)
    both = means[0], spreads[0], len(graphs), means[1], spreads[1], len(graphs)
    greater, other = (
        ttest_ind_from_stats(*both, equal_var=False, alternative=side).pvalue
        for side in ("greater", "two-sided")
    )
    p = np.where(spreads.any(0), [greater[0], *other[1:]], 1.0)
    return Properties(means[0], means[1], p)


def embedding(graph: PlainGraph, rng: np.random.Generator, walks: int | None) -> ndarray:
    """Return the joined frequencies of anonymous walks of 3 to 7 steps.

    Each length has `walks` walks, or `enough_walks` with None.
    """
    parts = [
        anonymous_walks(graph.pairs, graph.nodes, walks=walks or enough_walks(n), steps=n, rng=rng)
        for n in STEPS
    ]
    return np.concatenate(parts) / len(STEPS)


def distances(rows: ndarray, others: ndarray, *, same: bool) -> ndarray:
    """Return the roots of Jensen-Shannon divergences in nats between `rows` and `others`.

    With `same`, both are the same graphs, and each pair of different graphs counts once.
    """
    matrix = np.sqrt(NATS * jensen_shannon(np.concatenate([rows, others])))
    found = matrix[: len(rows), len(rows) :]
    found = found[np.triu_indices(len(rows), 1)] if same else found.ravel()
    return np.asarray(found[np.isfinite(found)])


def printed_rows(table: str) -> list[Row]:
    """Return the published numbers of Table 1 or 2."""
    with (RECIPES / "printed" / "gcfl-data.csv").open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["table"] == table]


def gcfl_table(number: str, root: str | None, seed: int = 0) -> Claim:
    """Compare our Table 1 or 2 with the published one. A missing set has a dash and a sentence."""
    check_name("table of gcfl that describes data", number, _TABLES)
    rows = printed_rows(number)
    names = dict.fromkeys(row[key] for row in rows for key in ("first", "second") if row[key])
    absent = [name for name in names if not is_present(name, root)]
    if not any({row["first"], row["second"] or row["first"]}.isdisjoint(absent) for row in rows):
        lacking = f"data of this table are missing: {', '.join(absent)}"
        raise DataError(f"{lacking}; get them with: atoll data fetch {' '.join(absent)}")

    @cache
    def graphs(name: str, most: int | None) -> list[PlainGraph]:
        source = load_dataset(name, root)
        if not isinstance(source, GraphSet):
            raise ConfigError(f"'{name}' is not a set of graphs")
        return plain_graphs(source, most, seed)

    table, pairs = _TABLES[number](rows, set(absent), graphs, seed)
    sentences = [f"{one} is missing; get it with: atoll data fetch {one}" for one in absent]
    printed, ours = np.array(pairs).T
    ends = [min(printed.min(), ours.min()), max(printed.max(), ours.max())]
    marks = Line(ends, ends, GREY, width=1.0), Dots(printed, ours)
    chart = Chart("", Axis("printed", log=True), Axis("here", log=True), marks, square=True)
    picture = titled(table.title, chart, (6, 6))
    return Claim(f"table-{number}", (table,), tuple(sentences), picture, {"printed": rows})


def _first_table(rows: list[Row], absent: set[str], graphs: Graphs, seed: int) -> Made:
    names = [name for name in dict.fromkeys(row["first"] for row in rows) if name not in absent]
    found = {name: properties(graphs(name, None), seed) for name in names}
    lines, pairs = [], []
    for row in rows:
        place, ours = STATISTICS.index(row["measure"]), ["–"] * 3
        if own := found.get(row["first"]):
            ours = [number_text(values[place], 4) for values in own]
            pairs.append((float(row["value"]), own.real[place]))
        cells = zip((row["value"], row["other"], row["p"]), ours, strict=True)
        lines.append([row["first"], row["measure"], *(v for pair in cells for v in pair)])
    heads = [f"{what} {whose}" for what in ("real", "random", "p") for whose in ("print", "here")]
    heads = ["data set", "property", *heads]
    title = "GCFL, Table 1: properties of graphs and of random graphs"
    caption = "p: Welch's t-test over graphs, one-sided for kurtosis. Print: 0 means ~0."
    return make_table(heads, lines, left=2, wrap=True, title=title, caption=caption), pairs


def _second_table(rows: list[Row], absent: set[str], graphs: Graphs, seed: int) -> Made:
    @cache
    def vectors(name: str, kind: str, walks: int | None) -> ndarray:
        some, rng = graphs(name, GRAPHS), np.random.default_rng([seed, walks or 0])
        if kind == "features":
            return np.stack([similarity_histogram(one, FEATURE_BINS) for one in some])
        return np.stack([embedding(one, rng, walks) for one in some])

    lines, pairs = [], []
    for row in rows:
        names, kind, ours = (row["first"], row["second"]), row["measure"], ["–"]
        if not absent.intersection(names):
            each = (PAPER_WALKS, None)[: 1 + (kind == "structure")]
            both = [[vectors(name, kind, walks) for name in names] for walks in each]
            values = [distances(*one, same=names[0] == names[1]) for one in both]
            ours = [f"{one.mean():.4f} ± {one.std():.4f}" for one in values]
            pairs.append((float(row["value"]), values[0].mean()))
        printed = f"{row['value']} ± {row['other']}"
        sets = " – ".join(dict.fromkeys(names))
        lines.append([sets, kind, printed, *ours, *["", ""][len(ours) :]])
    heads = ("data sets", "measure", "print", "here", "with enough walks")
    title = "GCFL, Table 2: distances between the graphs of data sets"
    caption = (
        f"Mean ± std of the Jensen-Shannon distance in nats over pairs of {GRAPHS} graphs of each "
        f"set. Here: {PAPER_WALKS} walks of each length, as in the paper's code; enough walks: an "
        "error of the embedding below 0.1."
    )
    return make_table(heads, lines, left=2, wrap=True, title=title, caption=caption), pairs


Made = tuple[Table, list[tuple[float, float]]]  # a table, and pairs of published and our numbers
Graphs = Callable[[str, int | None], list[PlainGraph]]
_TABLES = {"1": _first_table, "2": _second_table}
