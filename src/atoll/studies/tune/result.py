"""The request, the trials and the result of a tuning; a folder's trials are read without Optuna."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.core.space import Range, Value
from atoll.experiment.config import RunConfig, read_config
from atoll.experiment.events import read_events
from atoll.experiment.folder import read_json
from atoll.studies.study_run import Json

TRIALS, SEEDS = 30, 5
STATES = {"end": "complete", "pruned": "pruned", "failed": "failed"}
"""A trial's state by the last event of its run."""


class TuningRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tuning's options, as `study.json` keeps them; only `trials` may grow in a later call."""

    methods: tuple[str, ...]  # names, each tuned for itself
    config: RunConfig  # everything else that decides a run; its `seeds` are those of one trial
    trials: int = TRIALS  # budget of each method
    seeds: int = SEEDS  # of the final test; 0 leaves it out
    preset: str | None = None  # one of the methods' `grids`
    search: dict[str, str] = {}  # ranges by the user, as text
    pruner: str = "median"  # one of `PRUNERS`


@dataclass(frozen=True)
class Trial:
    """One configuration that was tried."""

    number: int  # from 0, in the order of trying
    settings: Mapping[str, Value]  # the sampled values
    state: str  # "complete", "pruned", "diverged" (its loss was not finite) or "failed"
    value: float | None  # the validation score by the protocol's rule; None unless complete
    curve: Sequence[float]  # mean validation score after each round that was reported
    seconds: float = 0.0  # how long it took, in this call
    problem: str = ""  # why it failed or diverged
    metric: str = "accuracy"  # the score's name: "accuracy" or "auc"


def ranking(trials: Sequence[Trial]) -> list[Trial]:
    """Complete trials, best first; of equals the earlier."""
    complete = [trial for trial in trials if trial.value is not None]
    return sorted(complete, key=lambda trial: -(trial.value or 0))


@dataclass(frozen=True)
class Tuned:
    """The best configuration that the search found for one method."""

    method: str
    space: Mapping[str, Range]  # the ranges that were searched
    trials: Sequence[Trial]
    config: RunConfig  # the best configuration, with the seeds of its test
    test: Json | None  # content of the final test's result.json; None without one
    importance: Mapping[str, float]  # share of each hyper-parameter in how far scores differ
    redivided: bool  # whether the final test's seeds divided the data anew
    defaults: bool  # whether the first trial has the method's own defaults

    @property
    def best(self) -> Trial:
        return ranking(self.trials)[0]

    @property
    def metric(self) -> str:
        """The name of the validation scores: "accuracy" or "auc"."""
        return self.best.metric


@dataclass(frozen=True)
class TuningResult:
    """The result of `tune`: one `Tuned` for each method, and the folder of the study.

    A method without a complete trial is not there; `notes` say why.
    """

    request: TuningRequest
    methods: Mapping[str, Tuned]
    notes: Sequence[str]
    folder: Path | None

    @property
    def failed(self) -> list[str]:
        """Methods without a complete trial, or without the requested test; the notes say why."""
        tested = [n for n, tuned in self.methods.items() if tuned.test or not self.request.seeds]
        return [name for name in self.request.methods if name not in tested]


@dataclass(frozen=True)
class Tried:
    """The trials of one method so far, in order; `budget` is the number of them in the end."""

    method: str
    trials: Sequence[Trial]
    budget: int

    @property
    def complete(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.value is not None]

    @property
    def best(self) -> Trial | None:
        return next(iter(ranking(self.trials)), None)

    def count(self, state: str) -> int:
        """The number of trials in a state."""
        return sum(trial.state == state for trial in self.trials)


def read_tried(folder: Path) -> list[Tried]:
    """The trials of the tuning in a folder so far, method by method."""
    about = read_json(folder / "study.json")
    last = {event["cell"]: event for event in read_events(folder)}
    fixed = about.get("asked", {}).get("config", {}).get("set", {})
    trials: dict[str, list[Trial]] = {}
    budget: Counter[str] = Counter()
    for cell in about.get("cells", []):
        labels = cell.get("labels", {})
        if labels.get("role") != "trial":
            continue
        method, event = str(labels.get("method", "?")), last.get(cell["name"], {})
        budget[method] += 1
        if event.get("event") in STATES:
            found = _trial(folder / "cells" / cell["name"], int(labels["trial"]), event, fixed)
            trials.setdefault(method, []).append(found)
    return [Tried(name, trials.get(name, []), count) for name, count in budget.items()]


def _trial(folder: Path, number: int, event: Json, fixed: Json) -> Trial:
    path = folder / "asked.toml"
    settings = read_config(path).get("set", {}) if path.exists() else {}
    sampled = {key: value for key, value in settings.items() if key not in fixed}
    state, value, metric = STATES[event["event"]], None, "accuracy"
    result, progress = folder / "result.json", folder / "progress.json"
    curve: list[float] = []
    if result.exists():
        summary = read_json(result)
        metric = summary.get("metric", "accuracy")
        # As in `runner.TrialObserver`, where no client has the data set's own.
        metric = metric if f"val_{metric}" in summary["metrics"] else "accuracy"
        score = float(summary["metrics"][f"val_{metric}"]["mean"])
        value, curve = (score if state == "complete" else None), [score]
    elif progress.exists():
        curve = [one for one in read_json(progress).get("validation", []) if one is not None]
    if state == "complete" and value is None:
        state = "failed"  # its result was deleted
    problem = str(event.get("error", ""))
    return Trial(number, sampled, state, value, curve, problem=problem, metric=metric)
