"""The request and the result of a tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.core.space import Range
from atoll.experiment.config import RunConfig
from atoll.studies.study_run import Json
from atoll.studies.tune.search import Trial

TRIALS, SEEDS = 30, 5


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was asked for, as `study.json` keeps it; only `trials` may change when a tuning goes on.

    Attributes:
        methods: Names, each tuned for itself.
        config: Everything else that decides a run; its `seeds` are those of one trial.
        trials: Budget of each method.
        seeds: Of the final test; 0 leaves it out.
        preset: One of the methods' `grids`.
        search: Ranges by the user, as text.
        pruner: One of `PRUNERS`.
    """

    methods: tuple[str, ...]
    config: RunConfig
    trials: int = TRIALS
    seeds: int = SEEDS
    preset: str | None = None
    search: dict[str, str] = {}
    pruner: str = "median"


@dataclass(frozen=True)
class Tuned:
    """What the search found for one method.

    Attributes:
        method: Its name.
        space: What was searched.
        trials: All, in order.
        config: The best configuration, as it is tested.
        test: What result.json of the final test holds; None without one.
        importance: Share of each hyper-parameter in how far scores differ.
        whole: Whether every point of the space was tried.
        redivided: Whether the final test's seeds divided the data anew.
        defaults: Whether the first trial is the method as it is by itself; not so where the ranges
            leave a default out, or where all points are tried.
    """

    method: str
    space: Mapping[str, Range]
    trials: Sequence[Trial]
    config: RunConfig
    test: Json | None
    importance: Mapping[str, float]
    whole: bool
    redivided: bool
    defaults: bool

    @property
    def ranking(self) -> list[Trial]:
        """Complete trials, best first; of equals the earlier."""
        complete = [trial for trial in self.trials if trial.value is not None]
        return sorted(complete, key=lambda trial: -(trial.value or 0))

    @property
    def best(self) -> Trial:
        return self.ranking[0]

    @property
    def metric(self) -> str:
        """What validation scores are: "accuracy" or "auc"."""
        return self.best.metric


@dataclass(frozen=True)
class TuningResult:
    """What `tune` returns: one `Tuned` for each method, and where everything is saved.

    A method of which no trial came to its end is not there; `notes` say why.
    """

    asked: Asked
    methods: Mapping[str, Tuned]
    notes: Sequence[str]
    folder: Path | None

    @property
    def failed(self) -> list[str]:
        """Methods without the requested number: without a complete trial, or without a test.

        The notes give the reasons.
        """
        return [
            name
            for name in self.asked.methods
            if name not in self.methods or (self.asked.seeds and self.methods[name].test is None)
        ]
