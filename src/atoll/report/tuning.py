"""What a tuning tried and found: the section of `atoll tune`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from atoll.core.space import Value
from atoll.present.tables import Number, ResultTable, number_of
from atoll.present.terminal import counted
from atoll.report import charts
from atoll.report.collect import METRIC_NAMES, Collection
from atoll.report.dots import Axis, Dot, axis, dot_chart, mark_key, short, words_axis
from atoll.studies.tune.read import Tried
from atoll.studies.tune.search import Trial

SHOWN = 10
"""Best trials that the table lists."""


def tuning(found: Collection) -> str:
    """Each method's trials: what was best, how it was found, and what made the difference."""
    if not found.tried:
        return ""
    text = (
        "Validation scores; trials have no test data. The best of many flatters: the number to "
        "report is that of the final test, with fresh seeds, in the table of results."
    )
    return f"<p>{text}</p>" + "".join(_method(found, one) for one in found.tried)


def states(tried: Tried) -> str:
    """`12 trials: 7 complete, 5 pruned`."""
    kinds = [f"{tried.count(s)} {s}" for s in ("complete", "pruned", "failed") if tried.count(s)]
    left = tried.budget - len(tried.trials)
    kinds += [f"{left} left"] if left else []
    return f"{counted(tried.budget, 'trial')}: {', '.join(kinds)}"


def _method(found: Collection, tried: Tried) -> str:
    head = f"<h3>{escape(tried.method)}</h3><p>{escape(states(tried))}.</p>"
    best = tried.best
    if best is None:
        return f"{head}<p>No trial has come to its end yet.</p>"
    metric = METRIC_NAMES.get(best.metric, best.metric)
    y = _scores(tried, metric)
    key = mark_key(
        ("dot", "c0", "complete"),
        ("dot", "c1", "best"),
        *(
            (("cross", "soft", "pruned, failed: the best it had reached"),)
            if len(tried.trials) > len(tried.complete)
            else ()
        ),
    )
    panels = [_history(tried, y), *_parameters(tried, y)]
    cut = any(100 * _reached(trial) < y.low for trial in tried.trials if trial.curve)
    note = '<p class="note">Marks on the lower edge lie below it.</p>' if cut else ""
    return (
        f"{head}{_best(found, tried)}{_table(tried)}{key}"
        f'<div class="charts small">{"".join(panels)}</div>{note}'
    )


def _best(found: Collection, tried: Tried) -> str:
    """The chosen settings, and what the final test says of them."""
    best = tried.best
    assert best is not None
    words = " ".join(f"--set {key}={value}" for key, value in best.settings.items())
    text = (
        f"Best: trial {best.number} with {100 * (best.value or 0):.1f} percent on validation data"
    )
    tests = [
        one
        for one in found.shown
        if one.labels.get("role") == "test" and one.labels.get("method") == tried.method
    ]
    if tests:
        number = number_of(tests[0].run.summary["metrics"], f"test_{tests[0].metric}")
        spread = f" ± {100 * number.std:.1f}" if number.std is not None else ""
        seeds = counted(len(number.values), "fresh seed")
        text += f"; on test data <b>{100 * number.mean:.1f}</b>{spread}, {seeds}"
    return f"<p>{text}.</p><pre tabindex=0><code>{escape(words)}</code></pre>"


def _table(tried: Tried) -> str:
    ranked = sorted(tried.complete, key=lambda t: (-(t.value or 0.0), t.number))[:SHOWN]
    keys = _keys(tried)
    rows = [
        [str(t.number), f"{100 * (t.value or 0):.2f}", *(str(t.settings.get(k, "–")) for k in keys)]
        for t in ranked
    ]
    every = len(ranked) == len(tried.complete)
    which = (
        f"{'all' if every else f'the best {len(ranked)} of'} {len(tried.complete)} complete trials"
    )
    what = "validation " + METRIC_NAMES.get(ranked[0].metric, ranked[0].metric)
    return charts.table(
        f"{tried.method}: {which}, in percent",
        ["trial", what, *keys],
        rows,
        label=f"{tried.method}: best trials",
    )


def _keys(tried: Tried) -> list[str]:
    return list(dict.fromkeys(key for trial in tried.trials for key in trial.settings))


def _reached(trial: Trial) -> float:
    return trial.value if trial.value is not None else max(trial.curve, default=0.0)


def _scores(tried: Tried, metric: str) -> Axis:
    """The common axis of scores; what is far below the middle lies on its lower edge."""
    values = 100 * np.array([_reached(t) for t in tried.trials if t.value is not None or t.curve])
    quarter = float(np.quantile([100 * (t.value or 0) for t in tried.complete], 0.25))
    top = float(values.max())
    low = max(float(values.min()), quarter - max(top - quarter, 1.0))
    return axis(f"validation {metric}, %", [low, top])


def _marks(tried: Tried, y: Axis, place: dict[int, float], words: dict[int, str]) -> list[Dot]:
    """A mark for each trial, the best on top."""
    best, dots = tried.best, []
    for trial in sorted(tried.trials, key=lambda t: (t is best, t.value is not None, t.number)):
        if trial.number not in place or (trial.value is None and not trial.curve):
            continue
        score = 100 * _reached(trial)
        text = f"trial {trial.number}{words.get(trial.number, '')}: {score:.1f} %, {trial.state}"
        kind, mark = ("c0", "dot") if trial.value is not None else ("soft", "cross")
        dots.append(Dot(place[trial.number], score, "c1" if trial is best else kind, mark, text))
    return dots


def _history(tried: Tried, y: Axis) -> str:
    """Every trial, and the best so far."""
    done = tried.complete
    so_far = np.maximum.accumulate([100 * (trial.value or 0) for trial in done])
    xs, ys = [float(done[0].number)], [float(so_far[0])]
    for trial, value in zip(done[1:], so_far[1:], strict=True):
        xs += [float(trial.number)] * 2
        ys += [ys[-1], float(value)]
    last = max(trial.number for trial in tried.trials)
    xs, ys = [*xs, float(last)], [*ys, ys[-1]]
    numbers = {trial.number: float(trial.number) for trial in tried.trials}
    x = axis("trial", [0.0, max(last, 1)], room=0.03)
    ticks = [(t, text) for t, text in x.ticks if t == int(t)]
    x = Axis(x.name, x.low, x.high, ticks)
    marks = np.unique(np.linspace(0, len(done) - 1, 8).round().astype(int)).tolist()
    rows = [["best so far", *(f"{so_far[i]:.1f}" for i in marks)]]
    table = charts.table(
        f"{tried.method}: best validation score so far, in percent",
        ["after trial", *(str(done[i].number) for i in marks)],
        rows,
    )
    best = tried.best
    assert best is not None
    alt = (
        f"{tried.method}: scores of {len(tried.trials)} trials; the best so far climbs from "
        f"{so_far[0]:.1f} to {so_far[-1]:.1f} percent, in trial {best.number}."
    )
    return dot_chart(
        "Trials and the best so far",
        _marks(tried, y, numbers, {}),
        x,
        y,
        alt=alt,
        lines=[("c1", xs, ys)],
        numbers=table,
    )


def _parameters(tried: Tried, y: Axis) -> list[str]:
    """For each hyper-parameter that varied: its values against the scores."""
    panels = []
    for key in _keys(tried):
        values = {t.number: t.settings[key] for t in tried.trials if key in t.settings}
        if len(set(map(str, values.values()))) < 2:
            continue
        x, place = _axis_of(key, values)
        words = {number: f", {key} {value}" for number, value in values.items()}
        best = tried.best
        assert best is not None
        top = sorted(tried.complete, key=lambda t: -(t.value or 0.0))[:3]
        alt = (
            f"{tried.method}: {key} against the validation score of {len(values)} trials; best "
            f"at {values.get(best.number)}, the best three at "
            f"{', '.join(str(t.settings.get(key)) for t in top)}."
        )
        panels.append(dot_chart(key, _marks(tried, y, place, words), x, y, alt=alt))
    return panels


def _axis_of(key: str, values: dict[int, Value]) -> tuple[Axis, dict[int, float]]:
    """Numbers on a scale; words, and a few numbers that come again and again, side by side."""
    known = list(values.values())
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in known)
    different = set(known)
    if numbers and (len(different) > 6 or len(different) > len(known) / 2):
        place = {number: float(value) for number, value in values.items()}
        return axis(key, list(place.values())), place
    order = sorted(different) if numbers else sorted(different, key=str)
    names = [short(float(v)) if numbers else str(v) for v in order]
    return words_axis(key, names), {n: float(order.index(value)) for n, value in values.items()}


def tuned_tables(found: Sequence[Tried]) -> list[ResultTable]:
    """The best validation score of each method, for a paper, a README or a program."""
    if not any(tried.best for tried in found):
        return []
    cells: dict[tuple[str, str], Number] = {}
    for tried in found:
        if tried.best is not None:
            cells[tried.method, "best validation"] = Number(tried.best.value or 0.0)
            settings = ", ".join(f"{k}={v}" for k, v in tried.best.settings.items())
            cells[tried.method, "settings"] = Number(why=settings)
        cells[tried.method, "trials"] = Number(why=states(tried))
    return [
        ResultTable(
            "Tuning: the best validation score, in percent",
            tuple(t.method for t in found),
            ("best validation", "settings", "trials"),
            cells,
            metric="best_validation",
            higher=None,
            caption="Validation scores of single trials; the best of many flatters.",
        )
    ]
