"""Compare the client similarities of methods with those of the data: `atoll similarity`.

FedIIH, FED-PUB, FedGTA and FedAux mix models by the similarity of the clients' messages. The
server's tree stores the last values (`similarity`). In a simulation we also know the data, and can
compare the two. The similarity of the data is one minus the Jensen-Shannon divergence of labels, of
connected nodes' features, or of anonymous walks (`atoll inspect`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from atoll.core.errors import ConfigError
from atoll.data.measure.heterogeneity import describe
from atoll.experiment.folder import RunFolder, read_run
from atoll.present.chart import Chart, Heat, Panels, in_rows, named, number_text
from atoll.present.tables import Table, make_table


@dataclass(frozen=True, eq=False)
class Similarities:
    """Similarities of all pairs of N clients."""

    clients: np.ndarray  # their names, (N,)
    data: dict[str, np.ndarray]  # of "labels", "features", "structure": (N, N) from 0 to 1
    methods: dict[str, np.ndarray]  # by the run's name, (N, N), or (K, N, N) with K factors

    def agreement(self, method: str, kind: str) -> float:
        """Return the rank correlation of a method's and the data's similarity over client pairs."""
        pairs = np.triu_indices(len(self.clients), 1)
        return rank_correlation(_mean(self.methods[method])[pairs], self.data[kind][pairs])[0]


def read_similarities(folders: Sequence[Path], seed: int | None = None) -> Similarities:
    """Read the similarities of finished runs on the same clients, and measure their data."""
    first = read_run(folders[0])
    runs = [first, *[read_run(folder, like=first) for folder in folders[1:]]]
    number = 0 if seed is None else seed - first.config.seed
    if not 0 <= number < len(first.servers):
        raise ConfigError(f"the run in '{folders[0]}' has no seed {seed}")
    federation = first.federations[number]
    if federation.task.many_graphs:
        raise ConfigError("similarity needs runs of node classification; choose other runs")
    found = describe(federation, shape=False)
    names = {"labels": "label", "features": "feature", "structure": "structure"}
    data = {kind: 1 - getattr(found, f"{name}_divergence") for kind, name in names.items()}
    methods: dict[str, np.ndarray] = {}
    for run, folder in zip(runs, folders, strict=True):
        name = run.config.method
        if run.method is None:  # Python passed an object, but the folder contains the matrix
            known: Mapping[str, object] = RunFolder(folder).relations[number]
        else:
            known = run.method.diagnostics(run.servers[number])
        if "similarity" not in known:
            which = f"{name} in '{folder}'"
            raise ConfigError(
                f"{which} does not compare clients; use fediih, fedpub, fedgta or fedaux"
            )
        matrix = np.asarray(known["similarity"], dtype=np.float64)
        methods[name if name not in methods else str(folder)] = matrix
    return Similarities(found.names, data, methods)


def _mean(matrix: np.ndarray) -> np.ndarray:
    """Return one matrix, the mean over factors if there are several."""
    return matrix if matrix.ndim == 2 else np.asarray(matrix.mean(0))


def rank_correlation(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return Spearman's ρ and its p-value, both NaN for fewer than three pairs or a constant."""
    known = np.isfinite(one) & np.isfinite(other)
    one, other = one[known], other[known]
    if one.size < 3 or not (np.ptp(one) and np.ptp(other)):
        return float("nan"), float("nan")
    found = spearmanr(one, other)
    return float(found.statistic), float(found.pvalue)


def similarity_table(found: Similarities) -> Table:
    """Make a table of the agreement between each method and the data."""
    lines = []
    for name, matrix in found.methods.items():
        pairs = _mean(matrix)[np.triu_indices(len(found.clients), 1)]
        pairs = pairs[np.isfinite(pairs)]  # with partial participation, some pairs never meet
        between = f"{pairs.min():.2f} to {pairs.max():.2f}" if pairs.size else "–"
        lines.append([name, *_agreements(found, name).values(), between])
    names = ("method", *found.data, "range")
    title = "Similarity of clients: rank correlation with the data, over all pairs"
    caption = (
        "1: the same order of pairs; 0: no correlation. Range: the smallest and the "
        "largest similarity that the method saw between two clients."
    )
    return make_table(names, lines, wrap=True, title=title, caption=caption)


def _agreements(found: Similarities, method: str) -> dict[str, str]:
    return {kind: number_text(found.agreement(method, kind), 2) for kind in found.data}


def similarity_files(found: Similarities) -> dict[str, object]:
    """Return `similarity.json` and `similarity.png`, for `write_all`."""
    kinds, methods = found.data, found.methods
    ranks = {name: {kind: found.agreement(name, kind) for kind in kinds} for name in methods}
    numbers = {**vars(found), "rank correlation": ranks}
    return {"similarity.json": numbers, "similarity.png": similarity_charts(found)}


def similarity_charts(found: Similarities) -> Panels:
    """Plot a heat map for each kind of data and each method (FedIIH, Fig. 3)."""
    charts = [_map(found, f"data: {kind}", matrix) for kind, matrix in found.data.items()]
    for name, matrix in found.methods.items():
        values = ", ".join(f"{kind} {text}" for kind, text in _agreements(found, name).items())
        factors = f" (mean of {len(matrix)} factors)" if matrix.ndim == 3 else ""
        words = f"{name}{factors}\nrank correlation with the data:\n{values}"
        charts.append(_map(found, words, _mean(matrix)))
    arranged = in_rows(charts)
    title = (
        "Similarity of every two clients, in the data and in the methods "
        "(each panel has its own scale; grey: never met, or the same client)"
    )
    return Panels(title, arranged, (4.8 * len(arranged[0]), 4.9 * len(arranged)))


def _map(found: Similarities, title: str, matrix: np.ndarray) -> Chart:
    # The diagonal is always one; without it, the colours distinguish the pairs.
    pairs = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
    if not np.isfinite(pairs).any():
        pairs = np.zeros_like(pairs)
    low, high = float(np.nanmin(pairs)), float(np.nanmax(pairs))
    form = "{x:.2f}" if high - low > 0.06 else "{x:.3f}"
    heat = Heat(pairs, low=low, high=high, scale="", scale_form=form)
    every = 1 + len(found.clients) // 13  # as many names as fit
    names = [name if i % every == 0 else "" for i, name in enumerate(found.clients)]
    x, y = named("client", names), named("client", names, down=True)
    return Chart(title, x, y, (heat,), square=True)
