"""The section of `atoll tune`: the trials and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from atoll.core.errors import counted
from atoll.core.space import Value
from atoll.experiment.metrics import label_of
from atoll.present.chart import Axis, Chart, Dots, Line, Mark, named, numbers_axis, short, steps
from atoll.present.chart_svg import chart_html, key_html, thinned
from atoll.present.tables import Number, ResultTable, html, make_table, number_of
from atoll.report.collect import Collection
from atoll.report.results import code, notes
from atoll.studies.tune.result import Trial, Tried

SHOWN = 10  # number of best trials in the table
COMPLETE, BEST, ENDED = ("c0", "dot"), ("c1", "dot"), ("soft", "cross")
"""Colour and shape of a trial."""


def tuning(found: Collection) -> str:
    """Show each method's trials, its best settings, and the effect of each hyper-parameter."""
    if not found.tried:
        return ""
    text = (
        "These are validation scores, because trials have no test data. The best of many trials is "
        "optimistic: report the score of the final test, with new seeds, in the table of results."
    )
    return f"<p>{text}</p>" + "".join(_method(found, one) for one in found.tried)


def states(tried: Tried) -> str:
    """Format the states of the trials: `12 trials: 7 complete, 5 pruned`."""
    kinds = [f"{tried.count(s)} {s}" for s in ("complete", "pruned", "failed") if tried.count(s)]
    left = tried.budget - len(tried.trials)
    kinds += [f"{left} left"] if left else []
    return f"{counted(tried.budget, 'trial')}: {', '.join(kinds)}"


def _method(found: Collection, tried: Tried) -> str:
    head = f"<h3>{escape(tried.method)}</h3><p>{escape(states(tried))}.</p>"
    if (best := tried.best) is None:
        return f"{head}<p>No trial is complete yet.</p>"
    # A score far below the lower quartile is drawn at the lower edge of the common axis.
    values = [_reached(t) for t in tried.trials if t.value is not None or t.curve]
    quarter, top = float(np.quantile([_reached(t) for t in tried.complete], 0.25)), max(values)
    low = max(min(values), quarter - max(top - quarter, 1.0))
    y = numbers_axis(f"validation {label_of(best.metric)}, %", [low, top])
    words = {COMPLETE: "complete", BEST: "best"}
    if len(tried.trials) > len(tried.complete):
        words[ENDED] = "pruned or failed: the best score before the end"
    key = key_html(Dots((), (), colour, name, shape) for (colour, shape), name in words.items())
    done, so_far = tried.complete, _so_far(tried)
    places = thinned(len(done), 8).tolist()
    heads = ["after trial", *(str(done[i].number) for i in places)]
    row = ["best so far", *(f"{so_far[i]:.1f}" for i in places)]
    title = f"{tried.method}: best validation score so far, in percent"
    numbers = make_table(heads, [row], title=title)
    history = chart_html(history_chart(tried, y), numbers=numbers)
    panels = [history, *(chart_html(chart) for chart in parameter_charts(tried, y))]
    cut = any(_reached(t) < (y.low or 0) for t in tried.trials if t.curve)
    note = notes(["Marks on the lower edge have lower scores."] if cut else [])
    charts = f'<div class="charts small">{"".join(panels)}</div>'
    return f"{head}{_best(found, tried)}{_best_trials(tried)}{key}{charts}{note}"


def _best(found: Collection, tried: Tried) -> str:
    """Show the selected settings, and their score in the final test."""
    best = tried.best
    assert best is not None
    words = " ".join(f"--set {key}={value}" for key, value in best.settings.items())
    score = f"{100 * (best.value or 0):.1f} percent on validation data"
    text = f"Best: trial {best.number} with {score}"
    of = [one for one in found.shown if one.labels.get("method") == tried.method]
    for one in [one for one in of if one.labels.get("role") == "test"][:1]:
        number = number_of(one.run.summary["metrics"], f"test_{one.metric}")
        spread = f" ± {100 * number.std:.1f}" if number.std is not None else ""
        seeds = counted(len(number.values), "new seed")
        text += f"; on test data <b>{100 * number.mean:.1f}</b>{spread}, {seeds}"
    return f"<p>{text}.</p>{code(words)}"


def _best_trials(tried: Tried) -> str:
    ranked = sorted(tried.complete, key=lambda t: (-(t.value or 0.0), t.number))[:SHOWN]
    keys = _keys(tried)
    scores = [f"{100 * (trial.value or 0):.2f}" for trial in ranked]
    settings = [[trial.settings.get(key, "–") for key in keys] for trial in ranked]
    rows = [[t.number, s, *own] for t, s, own in zip(ranked, scores, settings, strict=True)]
    every = len(ranked) == len(tried.complete)
    which = f"{'all' if every else f'the best {len(ranked)} of'} {len(tried.complete)} complete"
    heads = ["trial", "validation " + label_of(ranked[0].metric), *keys]
    table = make_table(heads, rows, title=f"{tried.method}: {which} trials, in percent")
    return html(table, label=f"{tried.method}: best trials")


def _keys(tried: Tried) -> list[str]:
    return list(dict.fromkeys(key for trial in tried.trials for key in trial.settings))


def _reached(trial: Trial) -> float:
    """Return the score of a trial, or the best score of a stopped trial, in percent."""
    return 100 * (trial.value if trial.value is not None else max(trial.curve, default=0.0))


def _marks(tried: Tried, place: dict[int, float], words: dict[int, str]) -> list[Mark]:
    """Make a mark for each trial, with the best on top."""
    best = tried.best
    dots: list[Mark] = []
    for trial in sorted(tried.trials, key=lambda t: (t is best, t.value is not None, t.number)):
        if trial.number not in place or (trial.value is None and not trial.curve):
            continue
        score = _reached(trial)
        text = f"trial {trial.number}{words.get(trial.number, '')}: {score:.1f} %, {trial.state}"
        colour, shape = BEST if trial is best else COMPLETE if trial.value is not None else ENDED
        spot, size = ([place[trial.number]], [score]), 7 if shape == "cross" else 9
        dots.append(Dots(*spot, colour, shape=shape, size=size, tips=[text]))
    return dots


def _so_far(tried: Tried) -> np.ndarray:
    """Return the best score in percent after each complete trial."""
    return np.maximum.accumulate([100 * (trial.value or 0) for trial in tried.complete])


def history_chart(tried: Tried, y: Axis) -> Chart:
    """Plot every trial, and the best score so far."""
    so_far, best = _so_far(tried), tried.best
    assert best is not None
    last = max(trial.number for trial in tried.trials)
    numbers = [trial.number for trial in tried.complete]
    line = Line(*steps([*numbers, last], [*so_far, so_far[-1]]), "c1")
    places = {trial.number: float(trial.number) for trial in tried.trials}
    x = numbers_axis("trial", [0.0, max(last, 1)], room=0.03, whole=True)
    alt = (
        f"{tried.method}: scores of {len(tried.trials)} trials; the best so far climbs from "
        f"{so_far[0]:.1f} to {so_far[-1]:.1f} percent, in trial {best.number}."
    )
    marks = (line, *_marks(tried, places, {}))
    return Chart("Trials and the best so far", x, y, marks, grid=True, alt=alt)


def parameter_charts(tried: Tried, y: Axis) -> list[Chart]:
    """Plot the scores against the values of each hyper-parameter that varied."""
    charts, best = [], tried.best
    assert best is not None
    for key in _keys(tried):
        values = {t.number: t.settings[key] for t in tried.trials if key in t.settings}
        if len(set(map(str, values.values()))) < 2:
            continue
        x, place = _axis_of(key, values)
        words = {number: f", {key} {value}" for number, value in values.items()}
        top = sorted(tried.complete, key=lambda t: -(t.value or 0.0))[:3]
        alt = (
            f"{tried.method}: {key} against the validation score of {len(values)} trials; best "
            f"at {values.get(best.number)}, the best three at "
            f"{', '.join(str(t.settings.get(key)) for t in top)}."
        )
        charts.append(Chart(key, x, y, tuple(_marks(tried, place, words)), grid=True, alt=alt))
    return charts


def _axis_of(key: str, values: dict[int, Value]) -> tuple[Axis, dict[int, float]]:
    """Return an axis (labels for text and few repeated numbers), and each trial's position."""
    known = list(values.values())
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in known)
    different = set(known)
    if numbers and (len(different) > 6 or len(different) > len(known) / 2):
        place = {number: float(value) for number, value in values.items()}
        return numbers_axis(key, list(place.values())), place
    order = sorted(different) if numbers else sorted(different, key=str)
    names = [short(float(v)) if numbers else str(v) for v in order]
    return named(key, names), {n: float(order.index(value)) for n, value in values.items()}


def tuned_tables(found: Sequence[Tried]) -> list[ResultTable]:
    """Make a table of the best validation score of each method."""
    if not any(tried.best for tried in found):
        return []
    cells: dict[tuple[str, str], Number] = {}
    for tried in found:
        if tried.best is not None:
            cells[tried.method, "best validation"] = Number(tried.best.value or 0.0)
            settings = ", ".join(f"{k}={v}" for k, v in tried.best.settings.items())
            cells[tried.method, "settings"] = Number(why=settings)
        cells[tried.method, "trials"] = Number(why=states(tried))
    title = "Tuning: the best validation score, in percent"
    caption = "Validation scores of single trials; the best of many trials is optimistic."
    rows, columns = tuple(t.method for t in found), ("best validation", "settings", "trials")
    metric = "best_validation"
    return [ResultTable(title, rows, columns, cells, caption, metric=metric, higher=None)]
