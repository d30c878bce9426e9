"""`atoll clusters` for people: the tree, what clusters have in common, who gains, and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.analyses.clusters import ClusterStudy, Gain, run_name
from atoll.methods.gcfl import Split
from atoll.present.chart import (
    MAX_ROWS,
    number_text,
)
from atoll.present.files import write_all
from atoll.present.plots import plain_json
from atoll.present.terminal import counted

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.tree import Tree


def clusters_text(found: ClusterStudy) -> Group:
    """Everything that fits a terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(heading(found), style="bold"), Text(), _tree(found), Text()]
    if found.splits:
        parts += [_heterogeneity_table(found), Text(_CHANCE, style="dim"), Text()]
    parts += [_gain_table(found), Text(_gain_caption(found), style="dim")]
    return Group(*parts)


_CHANCE = (
    "Mean over pairs of clients in one cluster, of GCFL's measures between their graphs (nats). "
    "chance: share of random clusters of the same sizes that are at least as alike."
)


def heading(found: ClusterStudy) -> str:
    """Which run this is."""
    config = found.run.config
    return (
        f"{run_name(found.run)} on {config.data}, {counted(len(found.names), 'client')}, "
        f"{config.partition}, {counted(found.rounds, 'round')}, seed {found.seed}: "
        f"{counted(len(found.splits), 'split')}, {counted(len(found.members), 'cluster')}"
    )


def _tree(found: ClusterStudy) -> Tree:
    """Who left whom, when and why. The larger side goes on, so that a tree never gets deep."""
    from rich.text import Text
    from rich.tree import Tree

    everyone = tuple(range(len(found.names)))
    root = Tree(
        Text(
            f"all {len(everyone)} clients, eps1 {found.eps('eps1'):g}, eps2 {found.eps('eps2'):g}"
        ),
        guide_style="dim",
    )
    splits = {tuple(sorted((*split.stay, *split.leave))): split for split in found.splits}
    _grow(root, everyone, splits, found)
    return root


def _grow(
    branch: Tree,
    members: tuple[int, ...],
    splits: Mapping[tuple[int, ...], Split],
    found: ClusterStudy,
) -> None:
    """A line for everybody who leaves these members, and one for who is left at the end."""
    from rich.text import Text

    while members in splits:
        split = splits[members]
        members, leaving = sorted((split.stay, split.leave), key=len, reverse=True)
        verb = "leaves" if len(leaving) == 1 else "leave"
        line = Text(f"round {split.round}: {_clients(leaving, found)} {verb} ")
        line.append(
            f"(mean {split.mean_norm:.4g}, largest {split.max_norm:.4g}, cut {split.cut:.3g})",
            style="dim",
        )
        twig = branch.add(line)
        if leaving in splits:
            _grow(twig, leaving, splits, found)
    branch.add(Text(f"at the end: {_clients(members, found)}"))


def _clients(members: Sequence[int], found: ClusterStudy) -> str:
    names = ", ".join(found.names[member] for member in members)
    return f"client{'s' if len(members) > 1 else ''} {names}"


def _plain_table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=place > 0)
    return table


def _heterogeneity_table(found: ClusterStudy) -> Table:
    table = _plain_table("heterogeneity inside clusters", "structure", "features")
    for number, structure, features in found.within():
        when = "all clients in one" if number < 0 else f"after the splits of round {number}"
        table.add_row(when, number_text(structure, 3), number_text(features, 3))
    chances = [found.chance(matrix) for matrix in (found.pairs.structure, found.pairs.features)]
    table.add_row("chance", *(number_text(value, 3) for value in chances))
    table.add_section()
    several = [members for members in found.members if len(members) > 1]
    for members in several[:MAX_ROWS]:
        label = _clients(members, found)
        short = label if len(label) <= 46 else label[:45] + "…"
        table.add_row(short, *(number_text(value, 3) for value in found.of_cluster(members)))
    return table


def _gain_table(found: ClusterStudy) -> Table:
    compared = found.baseline is not None
    more = ("mean gain", "least gain", "better", "not worse") if compared else ()
    table = _plain_table("run", "accuracy", "±", *more)
    for gain in found.gains:
        spread = "–" if gain.spread is None else f"{100 * gain.spread:.1f}"
        cells = [f"{100 * gain.mean:.1f}", spread]
        if compared:
            cells += _gain_cells(gain)
        table.add_row(gain.name, *cells)
    return table


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


def summary(found: ClusterStudy) -> dict[str, Any]:
    """The object that `--json` prints and `clusters.json` holds; rounds count from 0."""
    config = found.run.config
    matrices = {"structure": found.pairs.structure, "features": found.pairs.features}
    whole = {
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
            {
                "members": members,
                **dict(zip(("structure", "features"), found.of_cluster(members), strict=True)),
            }
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
    plain: dict[str, Any] = plain_json(whole)
    return plain


def _gain_summary(gain: Gain) -> dict[str, Any]:
    compared: dict[str, Any] = {}
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


def write_clusters(found: ClusterStudy, out: Path) -> list[Path]:
    """Write clusters.json and the plots into a folder."""
    from atoll.analyses.clusters_plots import pictures

    files = {"clusters.json": summary(found), **pictures(found)}
    if "gains.png" not in files:
        (out / "gains.png").unlink(missing_ok=True)  # of an earlier comparison with another run
    return write_all(out, files)
