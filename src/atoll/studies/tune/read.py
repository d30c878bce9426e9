"""The trials of a tuning, read from its folder alone: finished or not, without Optuna."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.experiment.config import read_config
from atoll.experiment.events import read_events
from atoll.experiment.folder import read_json
from atoll.studies.study_run import Json
from atoll.studies.tune.search import Trial

STATES = {"end": "complete", "pruned": "pruned", "failed": "failed"}


@dataclass(frozen=True)
class Tried:
    """What was tried for one method.

    Attributes:
        method: Its name.
        trials: Those that have ended, in order.
        budget: How many there will be.
        command: How the tuning was asked for.
    """

    method: str
    trials: Sequence[Trial]
    budget: int
    command: str

    @property
    def complete(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.value is not None]

    @property
    def best(self) -> Trial | None:
        """The complete trial with the best score, the earliest of equals."""
        return max(self.complete, key=lambda t: (t.value or 0.0, -t.number), default=None)

    def count(self, state: str) -> int:
        """How many trials ended so."""
        return sum(trial.state == state for trial in self.trials)


def read_tried(folder: Path) -> list[Tried]:
    """What the tuning in a folder has tried so far, method by method."""
    about = read_json(folder / "study.json")
    last = {event["cell"]: event for event in read_events(folder)}
    fixed = about.get("asked", {}).get("config", {}).get("set", {})
    trials: dict[str, list[Trial]] = {}
    budget: dict[str, int] = {}
    for cell in about.get("cells", []):
        labels = cell.get("labels", {})
        if labels.get("role") != "trial":
            continue
        method = str(labels.get("method", "?"))
        budget[method] = budget.get(method, 0) + 1
        event = last.get(cell["name"], {})
        if event.get("event") in STATES:
            path = folder / "cells" / cell["name"]
            found = _trial(path, int(labels["trial"]), event, fixed)
            trials.setdefault(method, []).append(found)
    command = str(about.get("command", ""))
    return [Tried(name, trials.get(name, []), count, command) for name, count in budget.items()]


def _trial(folder: Path, number: int, event: Json, fixed: Json) -> Trial:
    asked = folder / "asked.toml"
    settings = read_config(asked).get("set", {}) if asked.exists() else {}
    drawn = {key: value for key, value in settings.items() if key not in fixed}
    state, value, metric = STATES[event["event"]], None, "accuracy"
    result, progress = folder / "result.json", folder / "progress.json"
    curve: list[float] = []
    if result.exists():
        summary = read_json(result)
        metric = summary.get("metric", "accuracy")
        # As in `trials.Pruning`, where nobody has the data set's own.
        metric = metric if f"val_{metric}" in summary["metrics"] else "accuracy"
        score = float(summary["metrics"][f"val_{metric}"]["mean"])
        value, curve = (score if state == "complete" else None), [score]
    elif progress.exists():
        curve = [one for one in read_json(progress).get("validation", []) if one is not None]
    if state == "complete" and value is None:
        state = "failed"  # somebody took its result away
    return Trial(number, drawn, state, value, curve, 0.0, str(event.get("error", "")), metric)
