"""The printed tables, the picture and the files of a tuning, as values of `atoll.present`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from atoll.experiment.command import run_command
from atoll.experiment.config import config_text
from atoll.present import chart
from atoll.present.files import plain_json, write_all
from atoll.present.layout import Part, heading, quiet
from atoll.present.tables import DASH, Column, Table, make_table
from atoll.present.terminal import counted, percent
from atoll.studies.study_run import Json
from atoll.studies.tune.plan import safe_name
from atoll.studies.tune.result import Tuned, TuningResult, ranking

SHOWN = 5  # best trials that the table lists; trials.csv has all


def trials_table(tuned: Tuned) -> Table:
    """A method's best trials, and its defaults."""
    ranked = ranking(tuned.trials)
    best = ranked[:SHOWN]
    first = [t for t in ranked if t.number == 0 and t not in best and tuned.defaults]
    rows = []
    for trial in [*best, *first]:
        note = "  (its own defaults)" if trial.number == 0 and tuned.defaults else ""
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
        notes=["What made the difference: " + ", ".join(shares)] if shares else [],
    )


def final_table(found: TuningResult) -> Table:
    """All methods: their defaults, their best trial, and the final test."""
    tested = bool(found.request.seeds)
    names = ["trials", "validation, defaults", "validation, tuned", "test, tuned"]
    columns = [Column(name, wrap=True) for name in (names if tested else names[:-1])]
    rows = []
    for tuned in found.methods.values():
        first = tuned.trials[0].value
        row = [
            tuned.method,
            len(tuned.trials),
            DASH if first is None or not tuned.defaults else f"{100 * first:.1f}",
            f"{100 * (tuned.best.value or 0):.1f}",
        ]
        if tested:
            metrics = {} if tuned.test is None else tuned.test["metrics"]
            row.append(percent(metrics, f"test_{tuned.metric}"))
        rows.append(row)
    columns = [Column("method", "left", wrap=True), *columns]
    return make_table(columns, rows, caption=_caption(found), notes=found.notes)


def _caption(found: TuningResult) -> str:
    first = next(iter(found.methods.values()))
    words = f"In percent {first.metric}. Validation: the best of many, so it flatters. "
    if found.request.seeds:
        fresh = counted(found.request.seeds, "fresh seed")
        words += (
            f"Test: the best configuration, run once, with {fresh} from {first.config.seed}; the "
            "trials had no test data. "
        )
    if found.request.seeds and first.redivided:
        words += (
            "Each seed divides the data anew, so some nodes that are tested were training or "
            "validation nodes of the trials; `atoll partition` makes a file that keeps them apart. "
        )
    return words + f"Budget of each method: {counted(found.request.trials, 'trial')}."


def commands(found: TuningResult) -> list[str]:
    """For each method the command that runs its best configuration."""
    return [run_command(tuned.config) for tuned in found.methods.values()]


def write_tuning(found: TuningResult, out: Path) -> list[Path]:
    """trials.csv, tune.json, history.png, and a configuration for each method."""
    files: dict[str, object] = {
        "trials.csv": all_trials(found),
        "tune.json": json.dumps(summary(found), indent=2),
        "history.png": history_chart(list(found.methods.values())),
    }
    for tuned in found.methods.values():
        files[f"best-{safe_name(tuned.method)}.toml"] = config_text(tuned.config)
    return write_all(out, files)


def summary(found: TuningResult) -> Json:
    """The object that `--json` prints."""
    tests = {name: (tuned.test or {}).get("metrics", {}) for name, tuned in found.methods.items()}
    methods = {
        tuned.method: {
            "space": {key: str(wanted) for key, wanted in tuned.space.items()},
            "trials": len(tuned.trials),
            "best_trial": tuned.best.number,
            "settings": dict(tuned.best.settings),
            "metric": tuned.metric,
            "validation": tuned.best.value,
            "importance": dict(tuned.importance),
            "test": tests[tuned.method].get(f"test_{tuned.metric}"),
            "command": command,
        }
        for tuned, command in zip(found.methods.values(), commands(found), strict=True)
    }
    about = {
        "methods": methods,
        "trials": found.request.trials,
        "seeds": found.request.seeds,
        "out": None if found.folder is None else str(found.folder),
        "notes": list(found.notes),
    }
    return dict(plain_json(about))


def all_trials(found: TuningResult) -> Table:
    """Every trial with its settings, for trials.csv."""
    keys = list(dict.fromkeys(key for t in found.methods.values() for key in t.space))
    rows = []
    for tuned in found.methods.values():
        for t in tuned.trials:
            value = "" if t.value is None else f"{t.value:.6g}"
            start = (tuned.method, t.number, t.state, value, len(t.curve), f"{t.seconds:.3f}")
            rows.append((*start, *(t.settings.get(key) for key in keys)))
    return make_table(["method", "trial", "state", "validation", "rounds", "seconds", *keys], rows)


def history_chart(all_tuned: Sequence[Tuned]) -> chart.Panels:
    """The score of each trial and the best so far, a panel for each method, one scale for all."""
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
    """The tables of all methods, and their final tests, for `layout`."""
    parts: list[Part] = []
    for table in map(trials_table, found.methods.values()):
        parts += [heading(table.title), "", table, *table.notes, ""]
    final = final_table(found)
    return [*parts, final, "", *map(quiet, [final.caption, *final.notes])]
