"""The clusters of a GCFL run, and the clients' gains: `atoll clusters`.

- The splits with round and reason, and the clusters in each round.
- The heterogeneity of the graphs inside a cluster, before and after each split (Fig. 3). It is the
  mean of `compare_graphs` over the pairs of clients in one cluster. `chance` is the fraction of
  random clusters of the same sizes that are at least as similar, because single similar pairs are
  no evidence.
- Each client's gain over another run, usually Local (Tables 3 and 4, Figs. 6 to 8). It is the mean
  over seeds of the difference of its accuracies.

Rounds count from 0, as in metrics.csv. Tree and heterogeneity belong to one seed, because every
seed has other clusters. Gains and losses cover all seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.core.errors import ConfigError, counted
from atoll.data.measure.heterogeneity import PairHeterogeneity, compare_graphs
from atoll.experiment.folder import FinishedRun, read_run
from atoll.experiment.problem import Data
from atoll.methods.gcfl import Split
from atoll.present.chart import MAX_ROWS, number_text
from atoll.present.tables import Branch, Column, Part, Table, heading, make_table, quiet

SHUFFLES = 2000  # random clusters for the comparison


@dataclass(frozen=True, eq=False)
class Gain:
    """One run compared with the baseline. S seeds, K clients."""

    name: str  # method and preset, if any
    accuracy: np.ndarray  # test accuracy as reported, (S, K)
    gain: np.ndarray | None  # mean over seeds minus the mean of the baseline, (K,)

    @property
    def mean(self) -> float:
        """Mean over clients and seeds."""
        return float(np.nanmean(self.accuracy))

    @property
    def spread(self) -> float | None:
        """The paper's ±: mean over clients of the standard deviation over seeds, or None."""
        seeds = len(self.accuracy)
        return float(np.nanmean(self.accuracy.std(0, ddof=1))) if seeds > 1 else None

    def improved(self, *, ties: bool) -> int:
        """Count clients that gain, with `ties` also those without a loss (the paper's ratio)."""
        # Means of the same accuracies in another order differ in the last digit.
        return 0 if self.gain is None else int((self.gain > (-1e-9 if ties else 1e-9)).sum())

    def summary(self) -> dict[str, object]:
        """Return the object for JSON."""
        names = ("accuracy", "mean", "spread")
        found = {"run": self.name, **{name: getattr(self, name) for name in names}}
        if self.gain is None:
            return found
        ends = {"mean_gain": np.nanmean(self.gain), "min_gain": np.nanmin(self.gain)}
        counts = {"better": self.improved(ties=False), "not_worse": self.improved(ties=True)}
        return {**found, "gain": self.gain, **ends, **counts}


@dataclass(frozen=True, eq=False)
class ClusterStudy:
    """The result of `study_clusters`. R rounds, K clients."""

    run: FinishedRun
    seed: int  # of the tree, the norms and the heterogeneity
    names: tuple[str, ...]  # of the clients
    splits: list[Split]  # in chronological order
    label: np.ndarray  # every client's cluster after each round, (R, K)
    norms: np.ndarray  # of each client's update, (R, K); NaN in rounds without an update
    together: np.ndarray  # norm of its cluster's mean update, before this round's splits, (R, K)
    pairs: PairHeterogeneity  # heterogeneity of every two clients' graphs
    gains: list[Gain]  # the run, the other runs, and the baseline last
    others: list[FinishedRun]  # the runs of the gains after the first
    baseline: str | None = None  # name of the run that gains are measured against

    @property
    def rounds(self) -> int:
        return len(self.label)

    @property
    def members(self) -> list[list[int]]:
        """The clients of every final cluster, by its number."""
        last = self.label[-1]
        return [np.flatnonzero(last == number).tolist() for number in range(last.max() + 1)]

    def eps(self, name: str) -> float:
        """Return a hyper-parameter of the run."""
        return float(self.run.result.hyperparameters[name])

    @property
    def several(self) -> list[list[int]]:
        """The final clusters of more than one client."""
        return [members for members in self.members if len(members) > 1]

    def within(self) -> list[tuple[int, float, float]]:
        """Return (round, structure, features): the heterogeneity after each round with splits.

        The first triple has the round -1, and all clients in one cluster.
        """
        lines = [(-1, np.zeros(self.label.shape[1], dtype=np.int64))]
        lines += [(round_, self.label[round_]) for round_ in sorted({s.round for s in self.splits})]
        return [(number, *self._inside(label)) for number, label in lines]

    def _inside(self, label: np.ndarray) -> tuple[float, float]:
        return inside(self.pairs.structure, label), inside(self.pairs.features, label)

    def of_cluster(self, members: Sequence[int]) -> tuple[float, float]:
        """Return structure and feature heterogeneity between the clients of one cluster."""
        own = np.arange(self.label.shape[1])
        return self._inside(np.where(np.isin(own, members), 0, own + 1))

    def company(self) -> np.ndarray:
        """Return each client's mean structure heterogeneity to the others in its cluster, (K,)."""
        last = self.label[-1]
        mates = (last[:, None] == last) & ~np.eye(len(last), dtype=bool)
        known = mates & np.isfinite(self.pairs.structure)
        total, count = np.where(known, self.pairs.structure, 0.0).sum(1), known.sum(1)
        return np.asarray(np.divide(total, count, out=np.full(len(last), np.nan), where=count > 0))

    def chance(self, matrix: np.ndarray) -> float:
        """Return the fraction of random clusters of the same sizes that are at least as similar.

        The `matrix` contains the heterogeneity of pairs. Without splits, the result is NaN.
        """
        found, rng = inside(matrix, self.label[-1]), np.random.default_rng(0)
        if not np.isfinite(found) or not self.splits:
            return float("nan")
        random = [inside(matrix, rng.permutation(self.label[-1])) for _ in range(SHUFFLES)]
        return float((1 + np.sum(np.array(random) <= found + 1e-12)) / (1 + SHUFFLES))


def inside(matrix: np.ndarray, label: np.ndarray) -> float:
    """Average a matrix over the pairs of different clients with the same label."""
    pairs = np.triu(label[:, None] == label, 1) & np.isfinite(matrix)
    return float(matrix[pairs].mean()) if pairs.any() else float("nan")


def labels_by_round(splits: Sequence[Split], rounds: int, clients: int) -> np.ndarray:
    """Return each client's cluster after each round, (R, K), by the server's cluster numbers."""
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
    """Read a GCFL run, and other runs on the same clients for comparison.

    Gains are relative to the run in the folder `against`, usually Local. The runs in `beside` get
    gains and losses too. Without a `seed`, the tree belongs to the first seed.
    """
    run = read_run(folder, data)
    config = run.config
    number = config.seed if seed is None else seed
    if number not in config.all_seeds:
        last = config.all_seeds[-1]
        raise ConfigError(f"seed is {number}, but the run has the seeds {config.seed} to {last}")
    if run.method is None:
        problem = f"the run in '{folder}' was started in Python with a method object"
        hint = "run the method by its name"
        raise ConfigError(f"{problem}, which its folder does not contain; {hint}")
    found = run.method.diagnostics(run.servers[number - config.seed])
    if "splits" not in found:
        raise ConfigError(f"{config.method} does not split clusters; this command needs gcfl")
    federation = run.federations[number - config.seed]
    splits, trace = found["splits"], found["trace"].double().numpy()
    trace = np.where(trace < 0, np.nan, trace)
    others = [read_run(path, data, like=run) for path in beside]
    baseline = None if against is None else read_run(against, data, like=run)
    runs = [run, *others, *([baseline] if baseline else [])]
    walks = 2000 if federation.task.many_graphs else 20_000
    names, label = federation.client_names, labels_by_round(splits, len(trace), len(federation))
    norms, pairs = (trace[:, 0], trace[:, 1]), compare_graphs(federation, walks=walks, seed=number)
    over = None if baseline is None else run_name(baseline)
    gains = gains_of(runs, baseline)
    return ClusterStudy(run, number, names, splits, label, *norms, pairs, gains, runs[1:], over)


def gains_of(runs: Sequence[FinishedRun], baseline: FinishedRun | None) -> list[Gain]:
    """Return every run's accuracies, and its clients' gains over the baseline."""
    found, plain = [], [run_name(run) for run in runs]
    for run, name in zip(runs, plain, strict=True):
        accuracy, gain = run.result.of_clients(), None
        if baseline is not None and run is not baseline:
            gain = accuracy.mean(0) - baseline.result.of_clients().mean(0)
        folder = run.result.out.name if run.result.out else "?"
        shown = f"{name} ({folder})" if plain.count(name) > 1 else name
        found.append(Gain(shown, accuracy, gain))
    return found


def run_name(run: FinishedRun) -> str:
    """Return method and preset, such as "gcfl plus"."""
    preset = run.config.set.get("preset", "")
    return f"{run.config.method} {preset}".strip()


def cluster_parts(found: ClusterStudy) -> list[Part]:
    """Return the tables and the tree for a terminal."""
    parts: list[Part] = [heading(title(found)), "", _tree(found), ""]
    if found.splits:
        caption = (
            "Mean of GCFL's measures between graphs, over pairs of clients in one cluster "
            "(nats). chance: share of random clusters of equal sizes that are at least as similar."
        )
        parts += [_heterogeneity_table(found), quiet(caption), ""]
    caption = (
        "Test accuracy in percent, equal weight per client. ±: mean over clients of the standard "
        "deviation over seeds."
    )
    if found.baseline is None:
        caption += " For gains, give the folder of a run of local with --against."
    else:
        caption += (
            " A client's gain is the difference of means over seeds, in points over "
            f"{found.baseline}; the paper's ratio counts clients that are not worse."
        )
    return [*parts, _gain_table(found), quiet(caption)]


def title(found: ClusterStudy) -> str:
    """Describe the run."""
    config = found.run.config
    return (
        f"{run_name(found.run)} on {config.data}, {counted(len(found.names), 'client')}, "
        f"{config.partition}, {counted(found.rounds, 'round')}, seed {found.seed}: "
        f"{counted(len(found.splits), 'split')}, {counted(len(found.members), 'cluster')}"
    )


def _tree(found: ClusterStudy) -> Branch:
    """Draw each split with its round and reason. Only its smaller side starts a new branch."""
    splits = {tuple(sorted((*split.stay, *split.leave))): split for split in found.splits}

    def grow(branch: Branch, members: tuple[int, ...]) -> Branch:
        """Add a line for every group that leaves these members, and one for the rest."""
        while members in splits:
            split = splits[members]
            members, leaving = sorted((split.stay, split.leave), key=len, reverse=True)
            verb = "leaves" if len(leaving) == 1 else "leave"
            why = f"(mean {split.mean_norm:.4g}, largest {split.max_norm:.4g}, cut {split.cut:.3g})"
            twig = Branch(f"round {split.round}: {_clients(leaving, found)} {verb} ", why)
            branch.below.append(grow(twig, leaving) if leaving in splits else twig)
        branch.below.append(Branch(f"at the end: {_clients(members, found)}"))
        return branch

    everyone, eps1, eps2 = len(found.names), found.eps("eps1"), found.eps("eps2")
    root = Branch(f"all {everyone} clients, eps1 {eps1:g}, eps2 {eps2:g}")
    return grow(root, tuple(range(everyone)))


def _clients(members: Sequence[int], found: ClusterStudy) -> str:
    names = ", ".join(found.names[member] for member in members)
    return f"client{'s' if len(members) > 1 else ''} {names}"


def _heterogeneity_table(found: ClusterStudy) -> Table:
    lines: list[tuple[str, Sequence[float]]] = []
    for number, *values in found.within():
        name = "all clients in one cluster" if number < 0 else f"after the splits of round {number}"
        lines.append((name, values))
    kinds = found.pairs.structure, found.pairs.features
    lines.append(("chance", [found.chance(matrix) for matrix in kinds]))
    above = len(lines)
    for members in found.several[:MAX_ROWS]:
        label = _clients(members, found)
        label = label if len(label) <= 46 else label[:45] + "…"
        lines.append((label, found.of_cluster(members)))
    names = (Column("heterogeneity inside clusters", "left", wrap=True), "structure", "features")
    rows = [(name, *(number_text(value, 3) for value in values)) for name, values in lines]
    return make_table(names, rows, sections=[above])


def _gain_table(found: ClusterStudy) -> Table:
    compared = found.baseline is not None
    more = ("mean gain", "least gain", "better", "not worse") if compared else ()
    lines = []
    for gain in found.gains:
        spread = "–" if gain.spread is None else f"{100 * gain.spread:.1f}"
        cells = [gain.name, f"{100 * gain.mean:.1f}", spread]
        if gain.gain is not None:
            cells += [f"{100 * least(gain.gain):+.1f}" for least in (np.nanmean, np.nanmin)]
            cells += [f"{gain.improved(ties=ties)}/{len(gain.gain)}" for ties in (False, True)]
        lines.append([*cells, *[""] * (3 + len(more) - len(cells))])
    return make_table((Column("run", "left", wrap=True), "accuracy", "±", *more), lines)


def summary(found: ClusterStudy) -> dict[str, object]:
    """Return the object of `--json` and `clusters.json`. Rounds count from 0."""
    config = found.run.config
    kinds = ("structure", "features")
    matrices = {name: getattr(found.pairs, name) for name in kinds}
    return {
        **{name: getattr(config, name) for name in ("method", "data", "protocol", "partition")},
        "rounds": found.rounds,
        "seed": found.seed,
        "clients": list(found.names),
        "eps1": found.eps("eps1"),
        "eps2": found.eps("eps2"),
        "splits": [split._asdict() for split in found.splits],
        "clusters": [
            {"members": members, **dict(zip(kinds, found.of_cluster(members), strict=True))}
            for members in found.members
        ],
        "heterogeneity": [
            {"after_round": number, **dict(zip(kinds, values, strict=True))}
            for number, *values in found.within()
        ],
        "company": found.company(),
        "chance": {name: found.chance(matrix) for name, matrix in matrices.items()},
        "pairs": matrices,
        "baseline": found.baseline,
        "gains": [gain.summary() for gain in found.gains],
        "norms": found.norms,
        "mean_norms": found.together,
        "cluster_of_client": found.label,
    }
