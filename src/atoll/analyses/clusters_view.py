"""What `atoll clusters` shows: the tree, heterogeneity inside clusters, gains, and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from atoll.analyses.clusters import ClusterStudy, Gain, run_name
from atoll.analyses.clusters_charts import cluster_charts
from atoll.methods.gcfl import Split
from atoll.present.chart import MAX_ROWS, number_text
from atoll.present.layout import Branch, Part, heading, quiet
from atoll.present.tables import Column, Table, make_table
from atoll.present.terminal import counted


def cluster_parts(found: ClusterStudy) -> list[Part]:
    """Everything that fits a terminal."""
    parts: list[Part] = [heading(title(found)), "", _tree(found), ""]
    if found.splits:
        parts += [_heterogeneity_table(found), quiet(_CHANCE), ""]
    return [*parts, _gain_table(found), quiet(_gain_caption(found))]


_CHANCE = (
    "Mean over pairs of clients in one cluster, of GCFL's measures between their graphs (nats). "
    "chance: share of random clusters of the same sizes that are at least as alike."
)


def title(found: ClusterStudy) -> str:
    """Which run this is."""
    config = found.run.config
    return (
        f"{run_name(found.run)} on {config.data}, {counted(len(found.names), 'client')}, "
        f"{config.partition}, {counted(found.rounds, 'round')}, seed {found.seed}: "
        f"{counted(len(found.splits), 'split')}, {counted(len(found.members), 'cluster')}"
    )


def _tree(found: ClusterStudy) -> Branch:
    """Each split with its round and its reason.

    The larger side of a split stays on its branch, so that the tree never gets deep.
    """
    everyone = tuple(range(len(found.names)))
    root = Branch(
        f"all {len(everyone)} clients, eps1 {found.eps('eps1'):g}, eps2 {found.eps('eps2'):g}"
    )
    splits = {tuple(sorted((*split.stay, *split.leave))): split for split in found.splits}
    _grow(root, everyone, splits, found)
    return root


def _grow(
    branch: Branch,
    members: tuple[int, ...],
    splits: Mapping[tuple[int, ...], Split],
    found: ClusterStudy,
) -> None:
    """A line for every group that leaves these members, and one for the rest at the end."""
    while members in splits:
        split = splits[members]
        members, leaving = sorted((split.stay, split.leave), key=len, reverse=True)
        verb = "leaves" if len(leaving) == 1 else "leave"
        why = f"(mean {split.mean_norm:.4g}, largest {split.max_norm:.4g}, cut {split.cut:.3g})"
        twig = Branch(f"round {split.round}: {_clients(leaving, found)} {verb} ", why)
        branch.below.append(twig)
        if leaving in splits:
            _grow(twig, leaving, splits, found)
    branch.below.append(Branch(f"at the end: {_clients(members, found)}"))


def _clients(members: Sequence[int], found: ClusterStudy) -> str:
    names = ", ".join(found.names[member] for member in members)
    return f"client{'s' if len(members) > 1 else ''} {names}"


def _heterogeneity_table(found: ClusterStudy) -> Table:
    lines = [
        (
            "all clients in one" if number < 0 else f"after the splits of round {number}",
            (structure, features),
        )
        for number, structure, features in found.within()
    ]
    pairs = found.pairs
    lines.append(("chance", (found.chance(pairs.structure), found.chance(pairs.features))))
    several = [members for members in found.members if len(members) > 1]
    for members in several[:MAX_ROWS]:
        label = _clients(members, found)
        short = label if len(label) <= 46 else label[:45] + "…"
        lines.append((short, found.of_cluster(members)))
    return make_table(
        (Column("heterogeneity inside clusters", "left", wrap=True), "structure", "features"),
        [(name, *(number_text(value, 3) for value in values)) for name, values in lines],
        sections=[len(lines) - len(several[:MAX_ROWS])],
    )


def _gain_table(found: ClusterStudy) -> Table:
    compared = found.baseline is not None
    more = ("mean gain", "least gain", "better", "not worse") if compared else ()
    lines = []
    for gain in found.gains:
        spread = "–" if gain.spread is None else f"{100 * gain.spread:.1f}"
        cells = [gain.name, f"{100 * gain.mean:.1f}", spread]
        lines.append([*cells, *(_gain_cells(gain) if compared else [])])
    return make_table((Column("run", "left", wrap=True), "accuracy", "±", *more), lines)


def _gain_cells(gain: Gain) -> list[str]:
    if gain.gain is None:
        return ["", "", "", ""]
    total = len(gain.gain)
    return [
        f"{100 * np.nanmean(gain.gain):+.1f}",
        f"{100 * np.nanmin(gain.gain):+.1f}",
        f"{gain.improved(ties=False)}/{total}",
        f"{gain.improved(ties=True)}/{total}",
    ]


def _gain_caption(found: ClusterStudy) -> str:
    text = (
        "Test accuracy in percent, every client alike. ±: mean over clients of the standard "
        "deviation over seeds."
    )
    if found.baseline is None:
        return text + " Who gains: give the folder of a run of local with --against."
    return text + (
        f" Gains are points over {found.baseline}, per client, of means over seeds; the paper's "
        "ratio counts those that are not worse."
    )


def summary(found: ClusterStudy) -> dict[str, object]:
    """The object that `--json` prints and `clusters.json` holds; rounds count from 0."""
    config = found.run.config
    kinds = ("structure", "features")
    matrices = {"structure": found.pairs.structure, "features": found.pairs.features}
    return {
        "method": config.method,
        "data": config.data,
        "protocol": config.protocol,
        "partition": config.partition,
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
            {"after_round": number, "structure": structure, "features": features}
            for number, structure, features in found.within()
        ],
        "company": found.company(),
        "chance": {name: found.chance(matrix) for name, matrix in matrices.items()},
        "pairs": matrices,
        "baseline": found.baseline,
        "gains": [_gain_summary(gain) for gain in found.gains],
        "norms": found.norms,
        "mean_norms": found.together,
        "cluster_of_client": found.label,
    }


def _gain_summary(gain: Gain) -> dict[str, object]:
    compared: dict[str, object] = {}
    if gain.gain is not None:
        compared = {
            "gain": gain.gain,
            "mean_gain": np.nanmean(gain.gain),
            "min_gain": np.nanmin(gain.gain),
            "better": gain.improved(ties=False),
            "not_worse": gain.improved(ties=True),
        }
    return {
        "run": gain.name,
        "accuracy": gain.accuracy,
        "mean": gain.mean,
        "spread": gain.spread,
        **compared,
    }


def cluster_files(found: ClusterStudy) -> dict[str, object]:
    """clusters.json and the pictures, for `write_all`."""
    return {"clusters.json": summary(found), **cluster_charts(found, title(found))}
