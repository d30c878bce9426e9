"""The request, the trials (read without Optuna) and the result of a tuning, with its files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from atoll.core.errors import counted
from atoll.core.space import Range, Value
from atoll.experiment.config import RunConfig, config_text, read_config, run_command
from atoll.experiment.folder import read_json
from atoll.experiment.status import read_events
from atoll.present import chart
from atoll.present.files import plain_json, write_all
from atoll.present.tables import DASH, Column, Part, Table, heading, make_table, quiet
from atoll.present.terminal import percent
from atoll.studies.study_run import Json

TRIALS, SEEDS = 30, 5
SHOWN = 5  # best trials in the table; trials.csv contains all
STATES = {"end": "complete", "pruned": "pruned", "failed": "failed"}  # by a run's last event


class TuningRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of a tuning, as stored in `study.json`. A later call may increase `trials`."""

    methods: tuple[str, ...]  # names; each method is tuned separately
    config: RunConfig  # all other options of a run; `seeds` are the seeds of one trial
    trials: int = TRIALS  # budget of each method
    seeds: int = SEEDS  # seeds of the final test; 0 skips it
    preset: str | None = None  # one of the methods' `grids`
    search: dict[str, str] = {}  # the user's ranges, as text
    pruner: str = "median"  # one of `PRUNERS`


@dataclass(frozen=True)
class Trial:
    """One configuration that was tried."""

    number: int  # from 0, in chronological order
    settings: Mapping[str, Value]  # the sampled values
    state: str  # "complete", "pruned", "diverged" (its loss was not finite) or "failed"
    value: float | None  # the validation score by the protocol's rule, or None unless complete
    curve: Sequence[float]  # mean validation score after each reported round
    seconds: float = 0.0  # duration in the call that ended it
    problem: str = ""  # the reason if it failed or diverged
    metric: str = "accuracy"  # the score's name, such as "auc"


def ranking(trials: Sequence[Trial]) -> list[Trial]:
    """Sort the complete trials, best first. Earlier trials win ties."""
    complete = [trial for trial in trials if trial.value is not None]
    return sorted(complete, key=lambda trial: -(trial.value or 0))


@dataclass(frozen=True)
class Tuned:
    """The best configuration that the search found for one method."""

    method: str
    space: Mapping[str, Range]  # the ranges that were searched
    trials: Sequence[Trial]
    config: RunConfig  # the best configuration, with the seeds of its test
    test: Json | None  # content of the final test's result.json, or None without a test
    importance: Mapping[str, float]  # share of each hyper-parameter in the variance of the scores
    redivided: bool  # whether the seeds of the final test partition the data again
    defaults: bool  # whether the first trial uses the method's defaults

    @property
    def best(self) -> Trial:
        return ranking(self.trials)[0]

    @property
    def metric(self) -> str:
        """The name of the validation metric, such as "accuracy" or "auc"."""
        return self.best.metric


@dataclass(frozen=True)
class TuningResult:
    """The result of `tune`."""

    request: TuningRequest
    methods: Mapping[
        str, Tuned
    ]  # without methods that have no complete trial; `notes` contains the reasons
    notes: Sequence[str]
    folder: Path | None

    @property
    def failed(self) -> list[str]:
        """Methods without a complete trial or the requested test. `notes` contains the reasons."""
        tested = [n for n, tuned in self.methods.items() if tuned.test or not self.request.seeds]
        return [name for name in self.request.methods if name not in tested]


@dataclass(frozen=True)
class Tried:
    """The trials of one method so far, in order. `budget` is their final number."""

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
        """Return the number of trials in a state."""
        return sum(trial.state == state for trial in self.trials)


def read_tried(folder: Path) -> list[Tried]:
    """Read the trials that have ended in the folder of a tuning, by method."""
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
    result, progress, curve = folder / "result.json", folder / "progress.json", list[float]()
    if result.exists():
        summary = read_json(result)
        metric = summary.get("metric", "accuracy")
        # Accuracy, as in `runner.TrialObserver`, if no client has the requested metric.
        metric = metric if f"val_{metric}" in summary["metrics"] else "accuracy"
        score = float(summary["metrics"][f"val_{metric}"]["mean"])
        value, curve = (score if state == "complete" else None), [score]
    elif progress.exists():
        curve = [one for one in read_json(progress).get("validation", []) if one is not None]
    if state == "complete" and value is None:
        state = "failed"  # its result was deleted
    problem = str(event.get("error", ""))
    return Trial(number, sampled, state, value, curve, problem=problem, metric=metric)


def safe_name(name: str) -> str:
    """Return a method's name as a folder name. A custom method's name may be a path."""
    return "".join(c if c.isalnum() or c in "-_.+" else "-" for c in name)


def trials_table(tuned: Tuned) -> Table:
    """Make a table of a method's best trials and its defaults."""
    ranked = ranking(tuned.trials)
    best = ranked[:SHOWN]
    first = [t for t in ranked if t.number == 0 and t not in best and tuned.defaults]
    rows = []
    for trial in [*best, *first]:
        note = "   (default settings)" if trial.number == 0 and tuned.defaults else ""
        words = "  ".join(f"{key}={value}" for key, value in trial.settings.items())
        rows.append((trial.number, f"{100 * (trial.value or 0):.2f}", words + note))
    shares = [f"{key} {share:.0%}" for key, share in tuned.importance.items()]
    states = Counter(trial.state for trial in tuned.trials)
    kinds = ", ".join(f"{count} {state}" for state, count in states.items())
    rounds = counted(sum(len(trial.curve) for trial in tuned.trials), "round")
    seconds = sum(trial.seconds for trial in tuned.trials)
    return make_table(
        ("trial", "validation", Column("settings", "left", wrap=True)),
        rows,
        left=0,
        title=f"{tuned.method} on {tuned.config.data}: {counted(len(tuned.trials), 'trial')} "
        f"({kinds}), {rounds}, {seconds:.0f} s",
        notes=["Importance of hyper-parameters: " + ", ".join(shares)] if shares else [],
    )


def final_table(found: TuningResult) -> Table:
    """Make a table of all methods: defaults, best trial and final test."""
    tested = bool(found.request.seeds)
    names = ["method", "trials", "validation, defaults", "validation, tuned", "test, tuned"]
    rows = []
    for tuned in found.methods.values():
        first, metrics = tuned.trials[0].value, (tuned.test or {"metrics": {}})["metrics"]
        defaults = DASH if first is None or not tuned.defaults else f"{100 * first:.1f}"
        best = f"{100 * (tuned.best.value or 0):.1f}"
        numbers = defaults, best, percent(metrics, f"test_{tuned.metric}")
        row = [tuned.method, len(tuned.trials), *numbers]
        rows.append(row if tested else row[:-1])
    names = names if tested else names[:-1]
    return make_table(names, rows, wrap=True, caption=_caption(found), notes=found.notes)


def _caption(found: TuningResult) -> str:
    first, seeds = next(iter(found.methods.values())), found.request.seeds
    sentences = {
        f"In percent {first.metric}. Validation: the best of many, so it is optimistic.": True,
        f"Test: the best configuration, run once, with {counted(seeds, 'new seed')} from "
        f"{first.config.seed}; the trials had no test data.": seeds,
        "Each seed partitions the data again, so some test nodes were training or validation "
        "nodes of the trials; `atoll partition` makes a file that keeps them "
        "apart.": seeds and first.redivided,
        f"Budget of each method: {counted(found.request.trials, 'trial')}.": True,
    }
    return " ".join(sentence for sentence, applies in sentences.items() if applies)


def commands(found: TuningResult) -> list[str]:
    """Return the command that runs the best configuration of each method."""
    return [run_command(tuned.config) for tuned in found.methods.values()]


def write_tuning(found: TuningResult, out: Path) -> list[Path]:
    """Write trials.csv, tune.json, history.png and best-METHOD.toml. Return their paths."""
    files: dict[str, object] = {
        "trials.csv": all_trials(found),
        "tune.json": json.dumps(summary(found), indent=2),
        "history.png": history_chart(list(found.methods.values())),
    }
    for tuned in found.methods.values():
        files[f"best-{safe_name(tuned.method)}.toml"] = config_text(tuned.config)
    return write_all(out, files)


def summary(found: TuningResult) -> Json:
    """Return the object that `--json` prints."""
    methods = {
        tuned.method: {
            "space": {key: str(wanted) for key, wanted in tuned.space.items()},
            "trials": len(tuned.trials),
            "best_trial": tuned.best.number,
            "settings": dict(tuned.best.settings),
            "metric": tuned.metric,
            "validation": tuned.best.value,
            "importance": dict(tuned.importance),
            "test": (tuned.test or {"metrics": {}})["metrics"].get(f"test_{tuned.metric}"),
            "command": run_command(tuned.config),
        }
        for tuned in found.methods.values()
    }
    about: Json = {"trials": found.request.trials, "seeds": found.request.seeds}
    about["out"] = None if found.folder is None else str(found.folder)
    return dict(plain_json({"methods": methods, **about, "notes": list(found.notes)}))


def all_trials(found: TuningResult) -> Table:
    """Make a table of every trial with its settings, for trials.csv."""
    keys = list(dict.fromkeys(key for t in found.methods.values() for key in t.space))
    rows = []
    for tuned in found.methods.values():
        for t in tuned.trials:
            value = "" if t.value is None else f"{t.value:.6g}"
            start = (tuned.method, t.number, t.state, value, len(t.curve), f"{t.seconds:.3f}")
            rows.append((*start, *(t.settings.get(key) for key in keys)))
    return make_table(["method", "trial", "state", "validation", "rounds", "seconds", *keys], rows)


def history_chart(all_tuned: Sequence[Tuned]) -> chart.Panels:
    """Plot the score of each trial and the best so far, with one panel per method on one scale."""
    charts = []
    for place, tuned in enumerate(all_tuned):
        done = [(t.number, 100 * t.value) for t in tuned.trials if t.value is not None]
        numbers, values = np.array(done).T
        best = chart.steps(numbers, np.maximum.accumulate(values))
        pruned = [t for t in tuned.trials if t.value is None and t.curve]
        marks: list[chart.Mark] = [
            chart.Dots(numbers, values, chart.BLUE, "complete", size=4),
            chart.Line(*best, chart.ORANGE, "best so far", width=1.5),
        ]
        if pruned:
            at, top = [t.number for t in pruned], [100 * max(t.curve) for t in pruned]
            marks.append(chart.Dots(at, top, chart.GREY, "pruned, best round", "cross", 6))
        spot = [tuned.best.number], [100 * (tuned.best.value or 0)]
        marks.append(chart.Dots(*spot, chart.RED, "chosen", "star", 11))
        x = chart.Axis("trial", whole=True)
        y = chart.Axis(f"validation {all_tuned[0].metric}, percent" if not place else "")
        legend = "inside" if place == len(all_tuned) - 1 else ""
        charts.append(chart.Chart(tuned.method, x, y, tuple(marks), legend=legend))
    size = (max(5.0, 3.6 * len(all_tuned)), 3.6)
    return chart.Panels("", (tuple(charts),), size, shared="y")


def tuning_parts(found: TuningResult) -> list[Part]:
    """Return the tables of all methods and their final tests, for `layout`."""
    parts: list[Part] = []
    for table in map(trials_table, found.methods.values()):
        parts += [heading(table.title), "", table, *table.notes, ""]
    final = final_table(found)
    return [*parts, final, "", *map(quiet, [final.caption, *final.notes])]
