"""Compare designs of a method on validation nodes only.

Each client's validation nodes are cut in halves. One half selects the round and is all that a
method may see. The other half is scored. No test node is read, so the numbers may decide a design.
"""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import click
import numpy as np

from atoll.experiment.problem import FederationCache
from atoll.studies.advise import halved
from atoll.studies.compare.plan import ComparisonRequest, make_runs, named_arms
from atoll.studies.study import run_study

SETS = "cora,citeseer,pubmed,photo,cs,actor,chameleon,minesweeper"
DESIGNS = "fedavg;fedprox:mu=0.1;fedprox:net=duo,mu=0.1;reef:teach=0;reef"


@click.command()
@click.option("--data-root", required=True, help="Folder that contains the data sets.")
@click.option("--sets", default=SETS, show_default=True, help="Comma-separated data sets.")
@click.option("--designs", default=DESIGNS, show_default=True, help="Methods, separated by `;`.")
@click.option("--partition", default="louvain", show_default=True)
@click.option("--clients", default=10, show_default=True)
@click.option("--rounds", default=100, show_default=True)
@click.option("--seeds", default=5, show_default=True)
@click.option("--seed", default=1000, show_default=True, help="First seed. No table uses it.")
@click.option("--device", default="auto", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("design"), show_default=True)
def design(
    data_root: str,
    sets: str,
    designs: str,
    partition: str,
    clients: int,
    rounds: int,
    seeds: int,
    seed: int,
    device: str,
    out: Path,
) -> None:
    """Score designs of a method on halves of the validation nodes, and write design.csv."""
    request = ComparisonRequest(
        methods={label: str(name) for label, name in named_arms(designs.split(";")).items()},
        data=tuple(sets.split(",")),
        clients=(clients,),
        options={
            "data_root": data_root,
            "partition": partition,
            "rounds": rounds,
            "seeds": seeds,
            "seed": seed,
            "device": device,
        },
    )
    halves = FederationCache(make=partial(halved, swapped=False))
    runs = make_runs(request, {}, {})
    found: dict[str, dict[str, float]] = {}
    with (out.with_suffix(".csv")).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["design", "data", "metric", "mean", "std", "seeds", "per_seed"])
        for one in run_study(out, runs, about={"kind": "design"}, federations=halves):
            if one.summary is None:
                raise one.cause or click.ClickException(str(one.error))
            label, data = one.run.labels["method"], one.run.config.data
            metric = one.summary["metric"]
            scores = 100 * np.array(one.summary["metrics"][f"test_{metric}"]["per_seed"])
            spread = float(scores.std(ddof=1)) if len(scores) > 1 else 0.0
            numbers = [f"{scores.mean():.2f}", f"{spread:.2f}", len(scores)]
            each = " ".join(f"{score:.2f}" for score in scores)
            table.writerow([label, data, metric, *numbers, each])
            found.setdefault(label, {})[data] = float(scores.mean())
            click.echo(f"{data:12} {label:30} {metric:10} {scores.mean():6.2f} ± {spread:.2f}")
    for label, scored in sorted(found.items(), key=lambda item: -np.mean([*item[1].values()])):
        click.echo(f"{label:30} mean of {len(scored)} sets {np.mean([*scored.values()]):6.2f}")
