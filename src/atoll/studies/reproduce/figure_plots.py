"""How each kind of figure is drawn: from a `Drawing` to pictures by name, and rows of numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.analyses.clusters import ClusterStudy, study_clusters
from atoll.analyses.clusters_plots import (
    plot_heterogeneity,
    plot_losses,
    plot_norms,
    plot_tree,
)
from atoll.analyses.contribution import contribution, mean
from atoll.analyses.contribution_show import plot as plot_contribution
from atoll.analyses.similarity import plot_similarities, read_similarities
from atoll.core.graph import with_views
from atoll.data.measure.graph_pairs import compare_graphs
from atoll.data.measure.heterogeneity import embedding_distance
from atoll.engines.checkpoint import load_checkpoint, unpack_states
from atoll.experiment.folder import CHECKPOINT, FinishedRun, read_run
from atoll.present.chart import (
    BLACK,
    DASHED,
    GREY,
    PALETTE,
    SHAPES,
    Area,
    Axis,
    Bars,
    Chart,
    Dots,
    Heat,
    Line,
    Mark,
    Panels,
    Rule,
    Texts,
    colour_of,
    in_rows,
    named,
    number_text,
    number_words,
    violin,
)
from atoll.studies.reproduce.figures import Drawing, Point
from atoll.studies.reproduce.table import Ours, ours_of

Pictures = Mapping[str, Panels]
Rows = Sequence[Mapping[str, Any]]


def _line(x: np.ndarray, y: np.ndarray, method: str, methods: Sequence[str], shape: str) -> Line:
    """A method's line in its colour and dash; the paper's own, the last, is black and thick."""
    place, colours = list(methods).index(method), len(PALETTE) - 1
    if place == len(methods) - 1:
        return Line(x, y, BLACK, method, width=2.4, shape=shape)
    dash = place // colours % 4
    return Line(x, y, PALETTE[place % colours], method, dash=dash, width=1.5, shape=shape)


def _of(point: Point, drawing: Drawing) -> Ours:
    assert point.outcome is not None
    return ours_of(point.outcome, f"test_{drawing.metric(point.dataset)}")


def _row(point: Point, drawing: Drawing) -> dict[str, Any]:
    """A run's numbers as a line of the CSV."""
    recipe, own = drawing.recipe, _of(point, drawing)
    axes = {recipe.x_name: point.x.label, recipe.y_name: point.y.label}
    return {
        "dataset": point.dataset,
        "clients": point.cell.config.clients,
        "method": point.method,
        **{name: label for name, label in axes.items() if name and name != "clients"},
        "metric": drawing.metric(point.dataset),
        "mean": round(own.mean, 3),
        "std": "" if own.std is None else round(own.std, 3),
        "seeds": own.seeds,
        "protocol": drawing.rules,
        "cell": point.cell.name,
    }


def _panels(
    drawing: Drawing,
    charts: Sequence[Chart],
    names: int = 1,
    *,
    width: float = 5.4,
    height: float = 4.4,
) -> Panels:
    """Charts in rows below the figure's title; with several names one legend below all."""
    rows = in_rows(charts)
    wide = width * len(rows[0])
    title = _wrapped(drawing.title(), int(13 * wide))
    return Panels(title, rows, (wide, height * len(rows) + 0.9), legend=names > 1)


def _wrapped(text: str, width: int) -> str:
    """Lines that a picture is wide enough for."""
    return "\n".join(part for line in text.splitlines() for part in textwrap.wrap(line, width))


def _methods(drawing: Drawing) -> list[str]:
    return list(dict.fromkeys(point.method for point in drawing.points))


def _label(drawing: Drawing, dataset: str) -> str:
    return "test AUC, %" if drawing.metric(dataset) == "auc" else "test accuracy, %"


def draw_lines(drawing: Drawing) -> tuple[Pictures, Rows]:
    """A score against something that is varied: a line for each method, a panel for each set."""
    methods, charts = _methods(drawing), []
    for dataset in drawing.datasets():
        marks: list[Mark] = []
        for place, method in enumerate(methods):
            own = [p for p in drawing.points if (p.dataset, p.method) == (dataset, method)]
            at = np.array([float(point.x.label) for point in own])
            found = [_of(point, drawing) for point in own]
            mean = np.array([one.mean for one in found])
            if len(methods) == 1 and found[0].std is not None:
                spread = np.array([one.std for one in found])
                marks.append(Area(at, mean - spread, mean + spread, GREY, opacity=0.4))
            shape = SHAPES[place % 10] if place < len(methods) - 1 else "dot"
            marks.append(_line(at, mean, method, methods, shape))
        charts.append(
            Chart(dataset, _horizontal(drawing), Axis(_label(drawing, dataset)), tuple(marks))
        )
    rows = [_row(point, drawing) for point in drawing.points]
    return {"": _panels(drawing, charts, len(methods))}, rows


def _horizontal(drawing: Drawing) -> Axis:
    """Ticks at the values; a logarithmic axis where they span decades."""
    values = sorted({float(variant.label) for variant in drawing.recipe.x})
    log = values[0] > 0 and values[-1] / values[0] > 50
    return Axis(drawing.recipe.x_name, log=log, ticks=[(value, f"{value:g}") for value in values])


def draw_rounds(drawing: Drawing) -> tuple[Pictures, Rows]:
    """A score after every round: mean over seeds, a line for each method."""
    methods, rows, charts = _methods(drawing), [], []
    for dataset in drawing.datasets():
        first: FinishedRun | None = None
        lines = []
        for point in (p for p in drawing.points if p.dataset == dataset):
            run = read_run(_folder(point), like=first)
            first = first or run
            curve = 100 * run.result.curve(drawing.metric(dataset)).mean(0)
            lines.append(_line(np.arange(1, len(curve) + 1), curve, point.method, methods, ""))
            rows += [
                {
                    "dataset": dataset,
                    "method": point.method,
                    "round": number,
                    "mean": round(float(value), 3),
                    "protocol": drawing.rules,
                }
                for number, value in enumerate(curve, start=1)
            ]
        x, y = Axis("round", whole=True), Axis(_label(drawing, dataset))
        charts.append(Chart(dataset, x, y, tuple(lines)))
    return {"": _panels(drawing, charts, len(methods))}, rows


def _folder(point: Point) -> Path:
    assert point.outcome is not None
    return point.outcome.folder


def draw_bars(drawing: Drawing) -> tuple[Pictures, Rows]:
    """A group of bars for each place on the axis."""
    groups = list(dict.fromkeys(point.group for point in drawing.points))
    several = len({p.x.methods for p in drawing.points}) > 1
    names = _methods(drawing)
    marks: list[Mark] = []
    seen: set[str] = set()
    ticks, low = [], 100.0
    for group in groups:
        own = [point for point in drawing.points if point.group == group]
        for place, point in enumerate(own):
            found, name = _of(point, drawing), "" if point.method in seen else point.method
            seen.add(point.method)
            at, spread = group + 0.8 * (place + 0.5) / len(own) - 0.4, found.std or 0.0
            colour = colour_of(names.index(point.method))
            whisker = None if found.std is None else [spread]
            marks.append(Bars([at], [found.mean], 0.0, 0.76 / len(own), colour, name, whisker))
            marks.append(Texts([at], [found.mean + spread], [f"{found.mean:.1f}"], size=8))
            low = min(low, found.mean - spread)
        label = f"{own[0].x.label} {drawing.recipe.x_name}"
        ticks.append(
            (float(group), f"{label}\n(losses)" if several and own[0].x.methods else label)
        )
    y = Axis(_label(drawing, drawing.points[0].dataset), max(0.0, low - 8), room=0.12)
    chart = Chart("", Axis(ticks=ticks), y, tuple(marks))
    width = max(8.0, 2.2 * len(groups))
    picture = _panels(drawing, [chart], len(names), width=width, height=4.8)
    return {"": picture}, [_row(point, drawing) for point in drawing.points]


def draw_grid(drawing: Drawing) -> tuple[Pictures, Rows]:
    """A heat map over two things that are varied, for each data set and method."""
    keys = list(dict.fromkeys((p.dataset, p.method) for p in drawing.points))
    x = [float(variant.label) for variant in drawing.recipe.x]
    y = [float(variant.label) for variant in drawing.recipe.y]
    charts = []
    for key in keys:
        values = np.full((len(y), len(x)), np.nan)
        for point in (p for p in drawing.points if (p.dataset, p.method) == key):
            place = y.index(float(point.y.label)), x.index(float(point.x.label))
            values[place] = _of(point, drawing).mean
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        # From the least value on: the differences are what the picture is for.
        high = max(high, low + 1.0)
        words = number_words(values, 1)
        heat = Heat(values, words, low=low, high=high, scale="", scale_form="{x:.1f}")
        across = named(drawing.recipe.x_name, [f"{label:g}" for label in x])
        down = named(drawing.recipe.y_name, [f"{label:g}" for label in y], down=True)
        title = f"{', '.join(key)}\n{_label(drawing, key[0])}"
        charts.append(Chart(title, across, down, (heat,)))
    return {"": _panels(drawing, charts)}, [_row(point, drawing) for point in drawing.points]


def draw_similarity(drawing: Drawing) -> tuple[Pictures, Rows]:
    """How alike clients seem to each method, beside the data's own similarity."""
    pictures, rows = {}, []
    for dataset in drawing.datasets():
        own = [point for point in drawing.points if point.dataset == dataset]
        found = read_similarities([_folder(point) for point in own])
        figure = plot_similarities(found)
        pictures[dataset.lower()] = figure
        matrices = {**{f"data: {kind}": m for kind, m in found.data.items()}, **found.methods}
        for name, matrix in matrices.items():
            mean = matrix if matrix.ndim == 2 else matrix.mean(0)
            rows += [
                {
                    "dataset": dataset,
                    "of": name,
                    "client": int(found.clients[i]),
                    "other": int(found.clients[j]),
                    "similarity": round(float(mean[i, j]), 5),
                }
                for i, j in zip(*np.triu_indices(len(mean), 1), strict=True)
            ]
    return pictures, rows


def draw_distance(drawing: Drawing) -> tuple[Pictures, Rows]:
    """How far apart same-class nodes of different clients are, a bar for each method."""
    charts, rows, methods = [], [], _methods(drawing)
    for dataset in drawing.datasets():
        marks: list[Mark] = []
        for place, point in enumerate(p for p in drawing.points if p.dataset == dataset):
            values = np.array(_distances(_folder(point)))
            mean, spread = (
                float(values.mean()),
                float(values.std(ddof=1)) if values.size > 1 else 0.0,
            )
            marks.append(Bars([place], [mean], 0.0, 0.6, colour_of(place), "", [spread]))
            marks.append(Texts([place], [mean + spread], [f"{mean:.2f}"]))
            rows.append(
                {
                    "dataset": dataset,
                    "method": point.method,
                    "distance": round(values.mean(), 4),
                    "std": round(spread, 4),
                    "seeds": values.size,
                    "protocol": drawing.rules,
                }
            )
        y = Axis("average Wasserstein distance of the outputs", room=0.12)
        charts.append(Chart(dataset, named("", methods), y, tuple(marks)))
    return {"": _panels(drawing, charts)}, rows


def _distances(folder: Path) -> list[float]:
    """Of every seed: the distance between same-class outputs of two clients, mean over pairs."""
    run, found = read_run(folder), []
    method = run.method
    assert method is not None
    for number, (server, federation) in enumerate(zip(run.servers, run.federations, strict=True)):
        seed = run.config.seed + number
        states = unpack_states(load_checkpoint(folder / f"seed-{seed}" / CHECKPOINT)["states"])
        message, outputs = method.deploy(server), []
        for position, bare in enumerate(federation.graphs):
            graph = with_views(bare, method.views)
            with torch.no_grad():
                own = method.predict(graph, message.for_one(position), states[position])
            outputs.append(own.numpy())
        labels = [graph.y.numpy() for graph in federation.graphs]
        found.append(embedding_distance(outputs, labels, seed=seed))
    return found


def draw_contribution(drawing: Drawing) -> tuple[Pictures, Rows]:
    """What one client does to each class, with one kind of difference at a time."""
    pictures, rows = {}, []
    for point in drawing.points:
        found = contribution(point.cell.config, client=0, vary=str(point.x.label))
        name = f"{point.dataset.lower()}-{point.x.label}"
        pictures[name] = plot_contribution(found)
        rows += [
            {
                "dataset": point.dataset,
                "variation": point.x.label,
                "class": row.name,
                "train_nodes_of_client": row.train,
                "homophily_at_client": number_text(row.homophily, 4),
                "with": number_text(100 * mean(row.present), 3),
                "without": number_text(100 * mean(row.absent), 3),
            }
            for row in found.classes()
        ]
    return pictures, rows


def _studies(drawing: Drawing) -> list[tuple[Point, ClusterStudy]]:
    """The clusters of every gcfl run, with the other methods' runs on the same data beside it."""
    found = []
    for point in drawing.points:
        if point.cell.config.method != "gcfl":
            continue
        beside = [
            _folder(other)
            for other in drawing.points
            if other.dataset == point.dataset and other is not point
        ]
        alone = drawing.recipe.draw != "losses"
        study = study_clusters(_folder(point), beside=() if alone else beside)
        found.append((point, study))
    return found


def draw_norms(drawing: Drawing) -> tuple[Pictures, Rows]:
    """Norms of updates and the tree of clusters, for each run."""
    pictures, rows = {}, []
    for point, study in _studies(drawing):
        name = _name(point)
        pictures[f"{name}-norms"] = plot_norms(study)
        pictures[f"{name}-tree"] = plot_tree(study)
        rows += [
            {
                "dataset": point.dataset,
                "method": point.method,
                "client": study.names[client],
                "round": number,
                "norm": round(float(study.norms[number, client]), 6),
                "norm_of_cluster_mean": round(float(study.together[number, client]), 6),
                "cluster": int(study.label[number, client]),
            }
            for number in range(study.rounds)
            for client in range(len(study.names))
        ]
    return pictures, rows


def _name(point: Point) -> str:
    return f"{point.dataset}-{point.method}".lower().replace("+", "-plus")


def draw_heterogeneity(drawing: Drawing) -> tuple[Pictures, Rows]:
    """How different the graphs inside clusters are, for each run."""
    pictures, rows = {}, []
    for point, study in _studies(drawing):
        pictures[_name(point)] = plot_heterogeneity(study)
        rows += [
            {
                "dataset": point.dataset,
                "method": point.method,
                "after_round": "start" if number < 0 else int(number),
                "structure": round(structure, 5),
                "features": round(features, 5),
            }
            for number, structure, features in study.within()
        ]
    return pictures, rows


def draw_losses(drawing: Drawing) -> tuple[Pictures, Rows]:
    """Test losses over the rounds, a picture for each data set."""
    pictures, rows = {}, []
    for dataset in drawing.datasets():
        own = [pair for pair in _studies(drawing) if pair[0].dataset == dataset]
        if not own:
            continue
        _, study = own[-1]
        pictures[dataset.lower()] = plot_losses(study)
        for run, gain in zip((study.run, *study.others), study.gains, strict=True):
            losses = np.concatenate(
                [one.history.array("deployed", "loss", "test") for one in run.result.seeds], axis=1
            )
            rows += [
                {
                    "dataset": dataset,
                    "method": gain.name,
                    "round": number,
                    "mean": round(float(np.nanmean(line)), 5),
                    "std_over_clients": round(float(np.nanstd(line)), 5),
                }
                for number, line in enumerate(losses)
            ]
    return pictures, rows


def draw_pairs(drawing: Drawing) -> tuple[Pictures, Rows]:
    """The first client's accuracy against how different the other's graphs are (GCFL, Fig. 5)."""
    marks: list[Mark] = []
    rows = []
    for point in drawing.points:
        run = read_run(_folder(point))
        own = 100 * run.result.of_clients()[:, 0]
        gap = float(compare_graphs(run.federations[0]).structure[0, 1])
        mean, spread = float(own.mean()), float(own.std(ddof=1)) if own.size > 1 else 0.0
        alone = run.config.method == "local"
        rows.append(
            {
                "dataset": point.dataset,
                drawing.recipe.x_name: point.x.label,
                "structure_heterogeneity": "" if alone else round(gap, 5),
                "mean": round(mean, 3),
                "std": round(spread, 3),
                "seeds": own.size,
                "protocol": drawing.rules,
                "cell": point.cell.name,
            }
        )
        if alone:
            marks.append(Rule(mean, dash=DASHED, width=1.4, name="alone"))
            continue
        marks.append(Dots([gap], [mean], spread=[spread] if spread else None))
        marks.append(Texts([gap], [mean], [str(point.x.label)], "corner", size=10))
    x = Axis("structure heterogeneity to the other data set (nats)", room=0.15)
    y = Axis(f"test accuracy on {drawing.points[0].dataset}, %", room=0.15)
    chart = Chart("", x, y, tuple(marks), legend="inside")
    return {"": _panels(drawing, [chart], width=7.4, height=4.8)}, rows


def draw_violins(drawing: Drawing) -> tuple[Pictures, Rows]:
    """Each client's gain over training alone: two halves of a violin for each method."""
    datasets, methods, rows, charts = drawing.datasets(), _methods(drawing), [], []
    sides = [variant.label for variant in drawing.recipe.x]
    for dataset in datasets:
        marks: list[Mark] = [Rule(0)]
        bases: dict[Any, FinishedRun] = {}
        for point in (p for p in drawing.points if p.dataset == dataset):
            base = drawing.baselines.get((dataset, point.x.label))
            if base is None:
                continue
            if point.x.label not in bases:
                bases[point.x.label] = read_run(base.folder)
            first = bases[point.x.label]
            run = read_run(_folder(point), like=first)
            gain = 100 * (run.result.of_clients().mean(0) - first.result.of_clients().mean(0))
            place, side = methods.index(point.method), sides.index(point.x.label)
            marks += _half_violin(gain[np.isfinite(gain)], place, side)
            rows += [
                {
                    "dataset": dataset,
                    "method": point.method,
                    drawing.recipe.x_name: point.x.label,
                    "client": client,
                    "gain": round(float(value), 4),
                    "protocol": drawing.rules,
                }
                for client, value in enumerate(gain)
            ]
        for side, label in enumerate(sides):
            marks.append(Line([], [], colour_of(side), str(label), width=6, opacity=0.5))
        x, y = named("", methods), Axis("points gained over training alone (line: mean)")
        charts.append(Chart(dataset, x, y, tuple(marks)))
    width = max(4.6, 1.5 * len(methods))
    return {"": _panels(drawing, charts, len(sides), width=width)}, rows


def _half_violin(values: np.ndarray, place: int, side: int) -> list[Mark]:
    """The left (0) or right (1) half, with a point for each client and a line at the mean."""
    sign, colour, mean = (-1, 1)[side], colour_of(side), float(values.mean())
    at = place + sign * np.random.default_rng(side).uniform(0.04, 0.14, values.size)
    return [
        *violin(values, place, colour=colour, side=sign, width=0.85),
        Dots(at, values, colour, size=3.5, opacity=0.8),
        Line([place, place + 0.3 * sign], [mean, mean], BLACK, width=2),
    ]


DRAW: dict[str, Callable[[Drawing], tuple[Pictures, Rows]]] = {
    "lines": draw_lines,
    "rounds": draw_rounds,
    "bars": draw_bars,
    "grid": draw_grid,
    "similarity": draw_similarity,
    "distance": draw_distance,
    "contribution": draw_contribution,
    "norms": draw_norms,
    "heterogeneity": draw_heterogeneity,
    "losses": draw_losses,
    "violins": draw_violins,
    "pairs": draw_pairs,
}
"""Every way to draw that a recipe can name."""
