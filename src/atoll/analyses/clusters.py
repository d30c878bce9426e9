"""What the clusters of a GCFL run are and what they gain: `atoll clusters`.

- Who split from whom, when and why, and which clusters there were in each round.
- How different the graphs inside a cluster are, before and after each split (Fig. 3), by the
  measure of `atoll.data.measure.graph_pairs`: means over the pairs of clients that share a cluster.
  A client on its own has no such pair. `chance` is the share of random clusters of the same sizes
  that are at least as alike: that some pairs are alike is no evidence.
- What each client gains over another run, usually Local (Tables 3 and 4, Figs. 6 to 8): means over
  seeds of its accuracy here less its accuracy there.

Rounds count from 0, as in metrics.csv. Tree and heterogeneity are those of one seed, because every
seed has clusters of its own; gains and losses are those of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.analyses.cluster_thresholds import client_names
from atoll.core.errors import ConfigError
from atoll.data.measure.graph_pairs import PairHeterogeneity, compare_graphs
from atoll.experiment.folder import FinishedRun, read_run
from atoll.experiment.problem import Data
from atoll.methods.gcfl import Split

SHUFFLES = 2000
"""Random clusters that the found ones are compared with."""


@dataclass(frozen=True, eq=False)
class Gain:
    """One run next to the one it is compared with. S seeds, K clients.

    Attributes:
        name: Method and, if there is one, preset.
        accuracy: Test accuracy as reported, (S, K).
        gain: Mean over seeds less that of the baseline, (K,); None for want of a baseline.
    """

    name: str
    accuracy: np.ndarray
    gain: np.ndarray | None

    @property
    def mean(self) -> float:
        """Mean over clients and seeds."""
        return float(np.nanmean(self.accuracy))

    @property
    def spread(self) -> float | None:
        """The paper's ±: mean over clients of the standard deviation over seeds; None for one."""
        if len(self.accuracy) < 2:
            return None
        return float(np.nanmean(self.accuracy.std(0, ddof=1)))

    def improved(self, *, ties: bool) -> int:
        """Clients that gain; with `ties` also those that lose nothing, the paper's ratio."""
        if self.gain is None:
            return 0
        # Means of the same accuracies in another order differ in the last digit.
        return int((self.gain > (-1e-9 if ties else 1e-9)).sum())


@dataclass(frozen=True, eq=False)
class ClusterStudy:
    """What `study_clusters` finds. R rounds, K clients.

    Attributes:
        run: The run in question.
        seed: Whose tree, norms and heterogeneity these are.
        names: What each client is called.
        splits: In the order in which they happened.
        label: Every client's cluster after each round, (R, K).
        norms: Norm of each client's update, (R, K); NaN in rounds without it.
        together: Norm of the mean update of its cluster, before this round's splits, (R, K).
        pairs: How different the graphs of every two clients are.
        gains: The run, those beside it, and the baseline last.
        others: The runs behind the gains after the first.
        baseline: Name of the one that gains are over; None for want of one.
    """

    run: FinishedRun
    seed: int
    names: tuple[str, ...]
    splits: list[Split]
    label: np.ndarray
    norms: np.ndarray
    together: np.ndarray
    pairs: PairHeterogeneity
    gains: list[Gain]
    others: list[FinishedRun]
    baseline: str | None = None

    @property
    def rounds(self) -> int:
        return len(self.label)

    @property
    def members(self) -> list[list[int]]:
        """The clients of every final cluster, by its number."""
        last = self.label[-1]
        return [np.flatnonzero(last == number).tolist() for number in range(last.max() + 1)]

    def eps(self, name: str) -> float:
        """A hyper-parameter of the run."""
        return float(self.run.result.hyperparameters[name])

    def within(self) -> list[tuple[int, float, float]]:
        """After which round, and how different the graphs inside clusters then are: (t, s, f).

        The first line is that of one cluster of all, with the round -1.
        """
        lines = [(-1, np.zeros(self.label.shape[1], dtype=np.int64))]
        for number in sorted({split.round for split in self.splits}):
            lines.append((number, self.label[number]))
        return [
            (number, inside(self.pairs.structure, label), inside(self.pairs.features, label))
            for number, label in lines
        ]

    def of_cluster(self, members: Sequence[int]) -> tuple[float, float]:
        """Structure and feature heterogeneity between the clients of one cluster."""
        own = np.arange(self.label.shape[1])
        own = np.where(np.isin(own, members), 0, own + 1)
        return inside(self.pairs.structure, own), inside(self.pairs.features, own)

    def company(self) -> np.ndarray:
        """Each client's mean structure heterogeneity to the others of its final cluster, (K,)."""
        last = self.label[-1]
        mates = (last[:, None] == last) & ~np.eye(len(last), dtype=bool)
        known = mates & np.isfinite(self.pairs.structure)
        total = np.where(known, self.pairs.structure, 0.0).sum(1)
        count = known.sum(1)
        nothing = np.full(len(last), np.nan)
        return np.asarray(np.divide(total, count, out=nothing, where=count > 0))

    def chance(self, matrix: np.ndarray) -> float:
        """Share of random clusters of the same sizes that are at least as alike inside."""
        found, rng = inside(matrix, self.label[-1]), np.random.default_rng(0)
        if not np.isfinite(found) or not self.splits:
            return float("nan")
        drawn = [inside(matrix, rng.permutation(self.label[-1])) for _ in range(SHUFFLES)]
        return float((1 + np.sum(np.array(drawn) <= found + 1e-12)) / (1 + SHUFFLES))


def inside(matrix: np.ndarray, label: np.ndarray) -> float:
    """Mean of a matrix of pairs over the pairs of different clients with one label."""
    pairs = np.triu(label[:, None] == label, 1) & np.isfinite(matrix)
    return float(matrix[pairs].mean()) if pairs.any() else float("nan")


def labels_by_round(splits: Sequence[Split], rounds: int, clients: int) -> np.ndarray:
    """Every client's cluster after each round, (R, K), numbered as the server does."""
    label = np.zeros((rounds, clients), dtype=np.int64)
    for number, split in enumerate(splits, start=1):
        label[split.round :, list(split.leave)] = number
    return label


def study_clusters(
    folder: Path,
    *,
    seed: int | None = None,
    against: Path | None = None,
    beside: Sequence[Path] = (),
    data: Data | None = None,
) -> ClusterStudy:
    """Read a GCFL run, and others on the same clients to compare it with.

    Args:
        folder: Of the run.
        seed: Which of its seeds; None is the first.
        against: Folder of the run over which clients gain, usually Local.
        beside: Folders of more runs to show next to it.
        data: What Python gave in place of a name.
    """
    run = read_run(folder, data)
    config = run.config
    number = config.seed if seed is None else seed
    if not config.seed <= number < config.seed + config.seeds:
        last = config.seed + config.seeds - 1
        raise ConfigError(f"seed is {number}, but the run has the seeds {config.seed} to {last}")
    if run.method is None:
        raise ConfigError(
            f"the run in '{folder}' was started in Python with a method object, which its folder "
            "does not hold; run the method by its name"
        )
    found = run.method.diagnostics(run.servers[number - config.seed])
    if "splits" not in found:
        raise ConfigError(f"{config.method} does not split clusters; this command needs gcfl")
    federation = run.federations[number - config.seed]
    splits, trace = found["splits"], found["trace"].double().numpy()
    trace = np.where(trace < 0, np.nan, trace)
    label = labels_by_round(splits, len(trace), len(federation))
    others = [read_run(path, data, like=run) for path in beside]
    baseline = None if against is None else read_run(against, data, like=run)
    runs = [run, *others, *([baseline] if baseline else [])]
    walks = 2000 if federation.task.many_graphs else 20_000
    return ClusterStudy(
        run,
        number,
        client_names(federation),
        splits,
        label,
        trace[:, 0],
        trace[:, 1],
        compare_graphs(federation, walks=walks, seed=number),
        gains_of(runs, baseline),
        runs[1:],
        None if baseline is None else run_name(baseline),
    )


def gains_of(runs: Sequence[FinishedRun], baseline: FinishedRun | None) -> list[Gain]:
    """Every run's accuracies, and what its clients gain over the baseline's."""
    found, plain = [], [run_name(run) for run in runs]
    for run, name in zip(runs, plain, strict=True):
        accuracy = run.result.of_clients()
        gain = None
        if baseline is not None and run is not baseline:
            gain = accuracy.mean(0) - baseline.result.of_clients().mean(0)
        folder = run.result.out.name if run.result.out else "?"
        shown = f"{name} ({folder})" if plain.count(name) > 1 else name
        found.append(Gain(shown, accuracy, gain))
    return found


def run_name(run: FinishedRun) -> str:
    """Method and preset, as in "gcfl plus"."""
    preset = run.config.set.get("preset", "")
    return f"{run.config.method} {preset}".strip()
