"""Compare designs of a method on validation nodes only.

Each client's validation nodes are cut in halves. One half selects the round and is all that a
method may see. The other half is scored. No test node is read, so the numbers may decide a design.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import numpy as np

from atoll.experiment.problem import FederationCache
from atoll.studies.advise import halved
from atoll.studies.compare.plan import ComparisonRequest, make_runs, named_arms
from atoll.studies.leaderboard.leagues import read_leagues
from atoll.studies.study import run_study
from atoll.studies.study_run import StudyRun

SETS = "cora,citeseer,pubmed,photo,cs,actor,chameleon,minesweeper"
PARTITIONS = "Comma-separated partitions of recipes/leaderboard.toml."
DESIGNS = "fedavg;fedprox:mu=0.1;fedprox:net=duo,mu=0.1;reef:prior=0;reef"


@click.command()
@click.option("--data-root", required=True, help="Folder that contains the data sets.")
@click.option("--sets", default=SETS, show_default=True, help="Comma-separated data sets.")
@click.option("--designs", default=DESIGNS, show_default=True, help="Methods, separated by `;`.")
@click.option("--partitions", default="louvain-10", show_default=True, help=PARTITIONS)
@click.option("--rounds", default=100, show_default=True)
@click.option("--seeds", default=5, show_default=True)
@click.option("--seed", default=1000, show_default=True, help="First seed. No table uses it.")
@click.option("--device", default="auto", show_default=True)
@click.option("--jobs", default="auto", show_default=True, help="Processes.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("design"), show_default=True)
def design(
    data_root: str,
    sets: str,
    designs: str,
    partitions: str,
    rounds: int,
    seeds: int,
    seed: int,
    device: str,
    jobs: str,
    out: Path,
) -> None:
    """Score designs of a method on halves of the validation nodes, and write design.csv."""
    options = {"data_root": data_root, "rounds": rounds, "seeds": seeds, "seed": seed}
    arms = {label: str(name) for label, name in named_arms(designs.split(";")).items()}
    runs = list[StudyRun]()
    for part in partitions.split(","):
        how = dict(read_leagues().partitions[part].run)
        clients = (how.pop("clients", None),)
        request = ComparisonRequest(
            methods=arms,
            data=tuple(sets.split(",")),
            clients=clients,
            options={**options, **how, "device": device},
        )
        for run in make_runs(request, {}, {}):
            labels = {**run.labels, "partition": part}
            runs.append(replace(run, name=f"{part}-{run.name}", labels=labels, light=True))
    halves = FederationCache(make=partial(halved, swapped=False))
    study = run_study(out, runs, about={"kind": "design"}, federations=halves, jobs=jobs)
    found: dict[str, dict[tuple[str, str], float]] = {}
    with (out.with_suffix(".csv")).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        names = ["design", "data", "partition", "metric", "mean", "std", "seeds", "per_seed"]
        table.writerow(names)
        for one in study:
            if one.summary is None:
                raise click.ClickException(f"{one.run.name}: {one.error}")
            label, data = one.run.labels["method"], one.run.config.data
            metric, part = one.summary["metric"], one.run.labels["partition"]
            scores = 100 * np.array(one.summary["metrics"][f"test_{metric}"]["per_seed"])
            spread = float(scores.std(ddof=1)) if len(scores) > 1 else 0.0
            numbers = [f"{scores.mean():.2f}", f"{spread:.2f}", len(scores)]
            each = " ".join(f"{score:.2f}" for score in scores)
            table.writerow([label, data, part, metric, *numbers, each])
            found.setdefault(label, {})[data, part] = float(scores.mean())
    parts = partitions.split(",")
    click.echo(f"{'design':40} {'all':>6} " + " ".join(f"{part:>12}" for part in parts))
    for label, scored in sorted(found.items(), key=lambda item: -np.mean([*item[1].values()])):
        means = [
            np.mean([score for (_, own), score in scored.items() if own == part]) for part in parts
        ]
        every = np.mean([*scored.values()])
        click.echo(f"{label:40} {every:6.2f} " + " ".join(f"{mean:12.2f}" for mean in means))
