"""The output of `atoll contribution`: the table and its reading, files and the picture."""

from __future__ import annotations

import msgspec
import numpy as np

from atoll.analyses.contribution import Contribution, Effect, mean, std
from atoll.present import chart as plot
from atoll.present.chart import Axis, Bars, Chart, Panels, named, number_text, number_words
from atoll.present.layout import Part, heading, quiet
from atoll.present.tables import Table, make_table

_VARIED = {"nodes": "node", "topology": "topology", "class-topology": "class-wise topology"}
_MEASURES = ("train", "train_all", "test", "homophily", "homophily_others")


def contribution_parts(found: Contribution) -> list[Part]:
    """The table and its reading, for the terminal."""
    several = "; mean ± standard deviation over seeds, differences by seed"
    caption = (
        "Test nodes of all clients that the global model labels right, in percent (a class: its "
        "recall), at the best validation round of those who took part"
        + (several if found.config.seeds > 1 else "")
        + f". train: training nodes of client {found.client} | of all clients; φ: homophily of the "
        f"class (row all: of all edges) at client {found.client} | mean of the others."
    )
    return [heading(title(found)), "", _table(found), "", reading_of(found), quiet(caption)]


def title(found: Contribution) -> str:
    """The question that was asked."""
    config = found.config
    extra = f", {_VARIED[found.vary]} variation alone" if found.vary != "none" else ""
    return (
        f"What client {found.client} of {found.clients} does to each class: {config.data}, "
        f"{config.partition}{extra}, {config.method}, rounds {config.rounds}, seeds {config.seeds}"
    )


def reading_of(found: Contribution) -> str:
    """One sentence: do the gains follow labels, or homophily?"""
    names = ("its share of the labels", "its homophily", "its homophily less the others'")
    parts = []
    for name, values in zip(names, found.correlations().values(), strict=True):
        rho, p = values["rho"], values["p"]
        chance = f"p = {p:.2f}" if p >= 0.01 else "p < 0.01"
        value = f"{rho:+.2f} ({chance})" if np.isfinite(rho) else "– (not defined)"
        parts.append(f"{name} {value}")
    who = f"Do classes gain where client {found.client} is strong? Spearman's ρ of the gain with "
    return who + ", ".join(parts) + "."


def _table(found: Contribution) -> Table:
    edges = np.isfinite(found.class_homophily).any()
    names = ["class", "train\nown | all", "test", "φ\nown | others", "with", "without"]
    rows = []
    for row in (*found.classes(), *found.groups()):
        both = f"{number_text(row.homophily, 2)} | {number_text(row.homophily_others, 2)}"
        cells = [row.name, f"{row.train:.0f} | {row.train_all:.0f}", f"{row.test:.0f}"]
        cells += [both.replace("– | –", "")] if edges else []
        cells += [_percent(row.present), _percent(row.absent), _percent(row.gain, sign="+")]
        rows.append(cells)
    columns = [name for name in (*names, "difference") if edges or not name.startswith("φ")]
    return make_table(columns, rows, left=0, sections=[len(found.classes())])


def _percent(values: np.ndarray, *, sign: str = "", spread: bool = True) -> str:
    value, deviation = 100 * mean(values), std(values)
    if not np.isfinite(value):
        return "–"
    # Rounded first: a loss of a thousandth is not "-0.0".
    text = f"{round(value, 1) + 0.0:{sign}.1f}"
    return text if deviation is None or not spread else f"{text} ± {100 * deviation:.1f}"


def contribution_files(found: Contribution) -> dict[str, object]:
    """contribution.csv (by seed), contribution.json and contribution.png, for `write_all`."""
    lines = []
    for place in range(found.config.seeds):
        for row in (*found.classes(), *found.groups()):
            scores = [row.present[place], row.absent[place], row.gain[place]]
            numbers = [getattr(row, name) for name in _MEASURES] + scores
            cells = [f"{value:.6g}" if np.isfinite(value) else "" for value in numbers]
            lines.append([found.config.seed + place, row.name, *cells])
    names = ["seed", "class", *_MEASURES, "with", "without", "difference"]
    more = {"about": found.about, "config": msgspec.to_builtins(found.config)}
    return {
        "contribution.csv": make_table(names, lines),
        "contribution.json": summary(found) | more,
        "contribution.png": chart(found),
    }


def summary(found: Contribution) -> dict[str, object]:
    """The object that `--json` prints and `contribution.json` holds; null for undefined."""
    config = found.config
    names = ("partition", "split", "protocol", "rounds", "seeds", "seed")
    return {
        "method": config.method,
        "data": config.data,
        "clients": found.clients,
        **{name: getattr(config, name) for name in names},
        "client": found.client,
        "vary": found.vary,
        "ratio": found.ratio,
        "classes": [_row_summary(row) for row in found.classes()],
        "groups": [_row_summary(row) for row in found.groups()],
        "correlations": found.correlations(),
        "best_round": found.best,
    }


def _row_summary(row: Effect) -> dict[str, object]:
    scores = {"with": row.present, "without": row.absent, "difference": row.gain}
    return {
        "name": row.name,
        **{name: getattr(row, name) for name in _MEASURES},
        **{k: {"mean": mean(v), "std": std(v), "per_seed": v} for k, v in scores.items()},
    }


def chart(found: Contribution) -> Panels:
    """Labels and homophily of each client, and the client's effect on each class."""
    classes = found.train.shape[2]
    maps = 1.4 + 0.36 * min(max(found.clients, 3), plot.MAX_ROWS)
    frame = (found.client, 0, 1, classes)  # around the client in question
    x, y = named("class", range(classes)), named("client", range(found.clients), down=True)
    counts, phi = found.train.mean(0), found.class_homophily
    heat = plot.Heat(counts, number_words(counts, 0), frame=frame)
    above = [Chart("Training nodes", x, y, (heat,))]
    if np.isfinite(phi).any():
        heat = plot.Heat(phi, number_words(phi, 2), high=1.0, frame=frame)
        text = "Class-wise homophily (grey: no edge touches the class)"
        above.append(Chart(text, x, y, (heat,)))
    rows, size = (tuple(above), (_bars(found),)), (min(max(11, 5 + 0.9 * classes), 20), maps + 4.6)
    return Panels(title(found).replace(": ", "\n", 1), rows, size, heights=(maps, 4))


def _bars(found: Contribution) -> Chart:
    rows = [*found.classes(), found.groups()[0]]
    at = np.arange(len(rows), dtype=float)
    at[-1] += 0.4  # the last pair is no class
    several = found.config.seeds > 1
    top = np.zeros(len(rows))
    marks: list[plot.Mark] = []
    sides = ((-0.2, "present", plot.BLUE, "with"), (0.2, "absent", plot.ORANGE, "without"))
    for side, name, colour, word in sides:
        scores = [getattr(row, name) for row in rows]
        height = np.nan_to_num([100 * mean(values) for values in scores])
        spread = np.array([100 * (std(values) or 0.0) for values in scores])
        label, whiskers = f"{word} client {found.client}", spread if several else None
        marks.append(Bars(at + side, height, 0.0, 0.38, colour, label, whiskers))
        top = np.maximum(top, height + spread)
    for x, y, row in zip(at, top, rows, strict=True):
        text = _percent(row.gain, sign="+", spread=False)
        usual = plot.SOFT if text in ("+0.0", "–") else plot.GREEN
        colour = plot.RED if text.startswith("-") else usual
        size = 7 if len(rows) > 16 else 10
        marks.append(plot.Texts([x], [y], [text], colour=colour, size=size, bold=True))
    over = "; whiskers: standard deviation over seeds" if several else ""
    ticks = [(float(x), row.name) for x, row in zip(at, rows, strict=True)]
    words = "Accuracy of the global model on all clients' test nodes (numbers: points gained"
    wide = Axis("class", at[0] - 0.6, at[-1] + 0.6, ticks=ticks)
    high = Axis("test nodes labelled right, %", 0, max(float(top.max()), 1.0) * 1.12)
    return Chart(f"{words}{over})", wide, high, tuple(marks), legend="above")
