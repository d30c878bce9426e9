"""`python -m bench tune-tables`: tune the papers' hyper-parameters on validation scores.

A recipe's `search` has stages, which are grids. Each stage starts from the choice of the previous
stage. Trials use two seeds that no table uses, and only their validation scores are read. On a GPU
the points of a grid train at once, and data sets in parallel. Another call continues, also on
another machine: `recipes/tuned.toml` contains the choices of all finished stages. Recipes read a
search only when all its stages are finished.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import tomli_w
from rich.console import Console

from bench.tables import run_all

SEED, SEEDS = 1000, 2
HEADER = """\
# Chosen on validation scores, two seeds that no table scores (1000 and 1001), by
#     python -m bench tune-tables --data-root DATA --minutes 10 --out tune
# Each entry: the paper, the search of its recipe, the data set.

"""


@dataclass
class Tuning:
    """The state of the search for one data set."""

    paper: Any
    name: str
    dataset: str
    root: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    done: int = 0  # stages
    earlier: tuple[int, float] = (0, 0.0)  # trials of an earlier call, and their best score
    scores: dict[str, float] = field(default_factory=dict)  # by the trial's name

    @property
    def stages(self) -> Any:
        return self.paper.recipe.search[self.name].stages

    def trials(self, stage: int) -> list[tuple[dict[str, Any], Any]]:
        """Return every point of a stage with its run. Neighbours differ in the last key."""
        from atoll.studies.reproduce.recipes import Variant
        from atoll.studies.reproduce.table import named_run

        found = []
        keys, values = zip(*self.stages[stage].items(), strict=True)
        for point in itertools.product(*values):
            settings = {**self.settings, **dict(zip(keys, point, strict=True))}
            more = {"seed": SEED, "seeds": SEEDS, "data_root": self.root, "tuned": False}
            config = self.paper.config(
                self.dataset,
                next(iter(self.paper.recipe.settings)),
                self.name,
                clients=self.paper.recipe.search[self.name].clients,
                variants=(Variant(label="", run={"set": settings}),),
                **more,
            )
            found.append((settings, named_run(config, {"method": self.name, "role": "trial"})))
        return found

    def choose(self, folder: Path, stage: int) -> int:
        """Take the first point with the best validation score. Return the missing trials."""
        from atoll.studies.study_run import read_outcome

        trials = self.trials(stage)
        outcomes = [read_outcome(folder, run) for _, run in trials]
        if None not in outcomes:
            for (_, run), outcome in zip(trials, outcomes, strict=True):
                assert outcome is not None
                self.scores[run.name] = validation(outcome.summary)
            best = max(trials, key=lambda trial: self.scores[trial[1].name])
            self.settings, self.done = best[0], stage + 1
        return outcomes.count(None)

    def entry(self) -> dict[str, Any]:
        """Return the entry of the search in the file."""
        trials, before = self.earlier
        best = max([before, *(round(100 * score, 2) for score in self.scores.values())])
        about = {"validation": best, "trials": trials + len(self.scores), "stages": self.done}
        return {"set": self.settings, **about}

    def resume(self, entry: Mapping[str, Any]) -> None:
        """Continue after the finished stages of an entry."""
        self.settings, self.done = entry["set"], entry["stages"]
        self.earlier = entry["trials"], entry["validation"]


def validation(summary: Any) -> float:
    """Return a trial's validation score, the only part of its result that is read."""
    metrics, metric = summary["metrics"], summary.get("metric", "accuracy")
    return float(metrics.get(f"val_{metric}", metrics["val_accuracy"])["mean"])


def searches(papers: str, data_root: Path | None) -> Iterator[Tuning]:
    """Yield every search of the recipes for every data set that is here and in the paper."""
    from atoll.studies.reproduce.recipes import read_paper

    root = None if data_root is None else str(data_root)
    for paper in map(read_paper, papers.split(",")):
        for name in paper.recipe.search:
            sets = dict.fromkeys(one.dataset for one in paper.printed if one.method == name)
            for dataset in sets:
                if not paper.why_not(dataset, name, root):
                    yield Tuning(paper, name, dataset, root)


@click.command("tune-tables")
@click.option("--data-root", envvar="ATOLL_DATA", type=click.Path(path_type=Path),
              help="Folder of the data sets; ATOLL_DATA by default.")  # fmt: skip
@click.option("--papers", default="fedath,fedtad", show_default=True)
@click.option("--only", help="One search and data set, such as FGSSL/Cora.")
@click.option("--jobs", default="auto", show_default=True, help="Processes.")
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(min=0))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path),
              help="Folder of the trials; a second call continues there.")  # fmt: skip
@click.option("--to", type=click.Path(dir_okay=False, path_type=Path),
              help="The file to write; recipes/tuned.toml of the package by default.")  # fmt: skip
def tune_tables(
    data_root: Path | None,
    papers: str,
    only: str | None,
    jobs: str,
    minutes: float,
    out: Path,
    to: Path | None,
) -> None:
    """Choose hyper-parameters of the papers' tables on validation scores."""
    import tomllib

    from atoll.core.files import write_atomically
    from atoll.studies.reproduce.recipes import TUNED

    console, end, to = (
        Console(stderr=True, highlight=False),
        time.time() + 60 * minutes,
        to or TUNED,
    )
    found = [
        one for one in searches(papers, data_root) if only in (None, f"{one.name}/{one.dataset}")
    ]
    chosen = tomllib.loads(to.read_text("utf-8")) if to.exists() else {}
    for one in found:
        if known := chosen.get(one.paper.name, {}).get(one.name, {}).get(one.dataset):
            one.resume(known)
    for stage in range(max((len(one.stages) for one in found), default=0)):
        active = [one for one in found if one.done == stage < len(one.stages)]
        if not active:
            continue
        runs = {run.name: run for one in active for _, run in one.trials(stage)}
        left = end - time.time()
        problems = run_all(out, [*runs.values()], frozenset(), jobs, left, console, at_once=None)
        for problem in problems:
            console.print(problem, markup=False)
        lacking = sum(one.choose(out, stage) for one in active)
        console.print(f"stage {stage + 1}: {len(runs)} trials, {lacking} left")
        if lacking:
            break
    for one in (one for one in found if one.done):
        chosen.setdefault(one.paper.name, {}).setdefault(one.name, {})[one.dataset] = one.entry()
    write_atomically(to, (HEADER + tomli_w.dumps(chosen)).encode())
    for one in found:
        console.print(f"{one.paper.name} {one.name} {one.dataset}: {one.settings}", markup=False)
