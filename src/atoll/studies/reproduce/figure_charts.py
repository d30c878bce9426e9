"""Draw each kind of figure: from the runs of a `Drawing` to named charts and rows."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from atoll.analyses import clusters_charts
from atoll.analyses.clusters import ClusterStudy, study_clusters
from atoll.analyses.clusters import title as cluster_title
from atoll.analyses.contribution import chart as contribution_chart
from atoll.analyses.contribution import contribution, mean
from atoll.analyses.similarity import read_similarities, similarity_charts
from atoll.core.graph import with_views
from atoll.data.measure.heterogeneity import compare_graphs, embedding_distance
from atoll.engines.codec import load_checkpoint, unpack_states
from atoll.experiment.folder import FinishedRun, RunFolder, read_run
from atoll.experiment.metrics import spread as spread_of
from atoll.present import chart as charts
from atoll.present.chart import Axis, Bars, Chart, Dots, Line, Mark, Panels, Rule, Texts, named
from atoll.present.tables import Table, make_table, record_table
from atoll.studies.reproduce.table import Ours, ours_of

if TYPE_CHECKING:
    from atoll.studies.reproduce.figures import Drawing, Point

Illustration = tuple[Mapping[str, Panels], Table]
"""Pictures by the suffix of their file's name, and their numbers."""
COLUMNS = {
    "rounds": "dataset method round mean protocol",
    "similarity": "dataset of client other similarity",
    "distance": "dataset method distance std seeds protocol",
    "contribution": (
        "dataset variation class train_nodes_of_client homophily_at_client with without"
    ),
    "norms": "dataset method client round norm norm_of_cluster_mean cluster",
    "heterogeneity": "dataset method after_round structure features",
    "losses": "dataset method round mean std_over_clients",
    "pairs": "dataset X structure_heterogeneity mean std seeds protocol cell",
    "violins": "dataset method X client gain protocol",
}
"""Columns of the CSV, for figures without `_scores`. X is the name of the recipe's first axis."""


def _table(drawing: Drawing, rows: Sequence[Sequence[object]]) -> Table:
    names = COLUMNS[drawing.recipe.draw].split()
    return make_table([drawing.recipe.x_name if n == "X" else n for n in names], rows)


def _ours(point: Point, drawing: Drawing) -> Ours:
    assert point.outcome is not None
    return ours_of(point.outcome, f"test_{drawing.metric(point.dataset)}")


def _folder(point: Point) -> Path:
    assert point.outcome is not None
    return point.outcome.folder


def _scores(drawing: Drawing) -> Table:
    """Return the score of every run as a line of the CSV."""
    recipe, rows = drawing.recipe, list[dict[str, object]]()
    for point in drawing.points:
        own, axes = _ours(point, drawing), {recipe.x_name: point.x.label}
        axes[recipe.y_name] = point.y.label
        start = {"dataset": point.dataset, "clients": point.run.config.clients}
        varied = {name: label for name, label in axes.items() if name and name != "clients"}
        std = None if own.std is None else round(own.std, 3)
        found = {"mean": round(own.mean, 3), "std": std, "seeds": own.seeds}
        row = {**start, "method": point.method, **varied, "metric": drawing.metric(point.dataset)}
        rows.append({**row, **found, "protocol": drawing.rules, "cell": point.run.name})
    return record_table(rows)


def _panels(
    drawing: Drawing,
    panels: Sequence[Chart],
    size: tuple[float, float] = (5.4, 4.4),
    *,
    legend: bool = False,
) -> dict[str, Panels]:
    """Make the only picture of a figure, with panels of a size in inches."""
    rows, (width, height) = charts.in_rows(panels), size
    wide = len(rows[0])
    room = int(13 * width * wide)
    title = "\n".join(textwrap.fill(line, room) for line in drawing.title().splitlines())
    return {"": Panels(title, rows, (width * wide, height * len(rows) + 0.9), legend=legend)}


def _score_axis(drawing: Drawing, dataset: str) -> Axis:
    return Axis(f"test {drawing.metric(dataset).replace('auc', 'AUC')}, %")


def _line(
    method: str, methods: Sequence[str], x: np.ndarray, y: np.ndarray, **more: object
) -> Line:
    """Make a method's line. The paper's own method, the last, is black and thick."""
    place, colours = list(methods).index(method), len(charts.PALETTE) - 1
    style: dict[str, object] = {"colour": charts.BLACK, "width": 2.4, "shape": "dot"}
    if place < len(methods) - 1:
        shape = charts.SHAPES[place % len(charts.SHAPES)]
        style = {"colour": charts.colour_of(place % colours), "width": 1.5, "shape": shape}
        style["dash"] = (place // colours) % 4
    return Line(x, y, name=method, **{**style, **more})  # type: ignore[arg-type]


def draw_lines(drawing: Drawing) -> Illustration:
    """Plot a score against a varied quantity: a line per method, a panel per data set."""
    methods, panels = drawing.methods(), []
    values = sorted({float(variant.label) for variant in drawing.recipe.x})
    log = values[0] > 0 and values[-1] / values[0] > 50
    x = Axis(drawing.recipe.x_name, log=log, ticks=[(value, f"{value:g}") for value in values])
    for dataset in drawing.datasets():
        lines = []
        for method in methods:
            own = [p for p in drawing.of(dataset) if p.method == method]
            at = np.array([float(point.x.label) for point in own])
            found = [_ours(point, drawing) for point in own]
            mean, band = np.array([one.mean for one in found]), {}
            if len(methods) == 1 and found[0].std is not None:
                spread = np.array([one.std for one in found])
                band = {"low": mean - spread, "high": mean + spread}
            lines.append(_line(method, methods, at, mean, **band))
        panels.append(Chart(dataset, x, _score_axis(drawing, dataset), tuple(lines)))
    return _panels(drawing, panels, legend=len(methods) > 1), _scores(drawing)


def draw_rounds(drawing: Drawing) -> Illustration:
    """Plot a score after every round: mean over seeds, a line per method."""
    methods, panels, rows = drawing.methods(), [], []
    for dataset in drawing.datasets():
        first: FinishedRun | None = None
        lines = []
        for point in drawing.of(dataset):
            run = read_run(_folder(point), like=first)
            first = first or run
            curve = 100 * run.result.curve(drawing.metric(dataset)).mean(0)
            rounds = np.arange(1, len(curve) + 1)
            lines.append(_line(point.method, methods, rounds, curve, shape=""))
            for number, value in enumerate(curve.tolist(), start=1):
                rows.append((dataset, point.method, number, round(value, 3), drawing.rules))
        x = Axis("round", whole=True)
        panels.append(Chart(dataset, x, _score_axis(drawing, dataset), tuple(lines)))
    return _panels(drawing, panels, legend=len(methods) > 1), _table(drawing, rows)


def draw_bars(drawing: Drawing) -> Illustration:
    """Plot a group of bars for each position on the axis, with a bar per method."""
    groups = list(dict.fromkeys(point.group for point in drawing.points))
    several = len({p.x.methods for p in drawing.points}) > 1
    methods, ticks, low = drawing.methods(), [], 100.0
    marks, shown = list[Mark](), set[str]()
    for group in groups:
        own = [point for point in drawing.points if point.group == group]
        for place, point in enumerate(own):
            found, method = _ours(point, drawing), point.method
            at, std = group + 0.8 * (place + 0.5) / len(own) - 0.4, found.std or 0.0
            colour = charts.colour_of(methods.index(method))
            name = "" if method in shown else method
            shown.add(method)
            marks += [
                Bars([at], [found.mean], 0.0, 0.76 / len(own), colour, name, [std]),
                Texts([at], [found.mean + std], [f"{found.mean:.1f}"], size=8),
            ]
            low = min(low, found.mean - std)
        label = f"{own[0].x.label} {drawing.recipe.x_name}"
        losses = several and bool(own[0].x.methods)
        ticks.append((float(group), f"{label}\n(losses)" if losses else label))
    score = _score_axis(drawing, drawing.points[0].dataset)
    y = replace(score, low=max(0.0, low - 8), room=0.12)
    chart, width = Chart("", Axis(ticks=ticks), y, tuple(marks)), max(8.0, 2.2 * len(groups))
    picture = _panels(drawing, [chart], (width, 4.8), legend=len(methods) > 1)
    return picture, _scores(drawing)


def draw_grid(drawing: Drawing) -> Illustration:
    """Plot a heat map over two varied quantities, for each data set and method."""
    x = [float(variant.label) for variant in drawing.recipe.x]
    y = [float(variant.label) for variant in drawing.recipe.y]
    across = named(drawing.recipe.x_name, [f"{label:g}" for label in x])
    down = named(drawing.recipe.y_name, [f"{label:g}" for label in y], down=True)
    panels = []
    for dataset, method in dict.fromkeys((p.dataset, p.method) for p in drawing.points):
        values = np.full((len(y), len(x)), np.nan)
        for point in (p for p in drawing.of(dataset) if p.method == method):
            place = y.index(float(point.y.label)), x.index(float(point.x.label))
            values[place] = _ours(point, drawing).mean
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        words = np.array([[f"{value:.1f}" for value in row] for row in values])
        # The scale begins at the lowest value, because the figure shows differences.
        top = max(high, low + 1.0)
        heat = charts.Heat(values, words, low, top, scale="", scale_form="{x:.1f}")
        title = f"{dataset}, {method}\n{_score_axis(drawing, dataset).name}"
        panels.append(Chart(title, across, down, (heat,)))
    return _panels(drawing, panels), _scores(drawing)


def draw_similarity(drawing: Drawing) -> Illustration:
    """Plot the client similarities of each method next to the similarities of the data."""
    pictures, rows = {}, []
    for dataset in drawing.datasets():
        found = read_similarities([_folder(point) for point in drawing.of(dataset)])
        pictures[dataset.lower()] = similarity_charts(found)
        matrices = {**{f"data: {kind}": m for kind, m in found.data.items()}, **found.methods}
        clients = list(map(int, found.clients))
        for name, matrix in matrices.items():
            mean = matrix if matrix.ndim == 2 else matrix.mean(0)
            rows += [
                (dataset, name, clients[i], clients[j], round(float(mean[i, j]), 5))
                for i, j in zip(*np.triu_indices(len(mean), 1), strict=True)
            ]
    return pictures, _table(drawing, rows)


def draw_distance(drawing: Drawing) -> Illustration:
    """Plot the distance of two clients' outputs for nodes of the same class, a bar per method."""
    methods, panels, rows = drawing.methods(), [], []
    for dataset in drawing.datasets():
        marks: list[Mark] = []
        for place, point in enumerate(drawing.of(dataset)):
            values = np.array(_distances(_folder(point)))
            middle, spread = values.mean(), spread_of(values) or 0.0
            colour = charts.colour_of(place)
            marks.append(Bars([place], [middle], 0.0, 0.6, colour, spread=[spread]))
            marks.append(Texts([place], [middle + spread], [f"{middle:.2f}"]))
            numbers = round(middle, 4), round(spread, 4), values.size
            rows.append((dataset, point.method, *numbers, drawing.rules))
        y = Axis("average Wasserstein distance of the outputs", low=0.0, room=0.12)
        panels.append(Chart(dataset, named("", methods), y, tuple(marks)))
    return _panels(drawing, panels), _table(drawing, rows)


def _distances(folder: Path) -> list[float]:
    """Return `embedding_distance` of the deployed models' outputs, for every seed."""
    run, found = read_run(folder), []
    method = run.method
    assert method is not None
    pairs = zip(run.servers, run.federations, strict=True)
    for seed, (server, federation) in enumerate(pairs, start=run.config.seed):
        states = unpack_states(load_checkpoint(RunFolder(folder).checkpoint(seed))["states"])
        message = method.deploy(server)
        with torch.no_grad():
            outputs = [
                method.predict(with_views(graph, method.views), message.for_one(n), states[n])
                for n, graph in enumerate(federation.graphs)
            ]
        labels = [graph.y.numpy() for graph in federation.graphs]
        found.append(embedding_distance([one.numpy() for one in outputs], labels, seed=seed))
    return found


def draw_contribution(drawing: Drawing) -> Illustration:
    """Plot the effect of the first client on each class, for each `vary` of `contribution`."""
    pictures, rows = {}, []
    for point in drawing.points:
        found = contribution(point.run.config, client=0, vary=str(point.x.label))
        pictures[f"{point.dataset.lower()}-{point.x.label}"] = contribution_chart(found)
        for row in found.classes():
            accuracy = [charts.number_text(100 * mean(p), 3) for p in (row.present, row.absent)]
            own = row.name, row.train, charts.number_text(row.homophily, 4)
            rows.append((point.dataset, point.x.label, *own, *accuracy))
    return pictures, _table(drawing, rows)


def _cluster_studies(drawing: Drawing) -> Iterator[tuple[Point, str, ClusterStudy]]:
    """Yield the point, the file name and the `ClusterStudy` of every GCFL run.

    In a figure of losses, the study also contains the data set's other runs for comparison.
    """
    for point in drawing.points:
        if point.run.config.method != "gcfl":
            continue
        others = [_folder(other) for other in drawing.of(point.dataset) if other is not point]
        beside = others if drawing.recipe.draw == "losses" else ()
        name = f"{point.dataset}-{point.method}".lower().replace("+", "-plus")
        yield point, name, study_clusters(_folder(point), beside=beside)


def draw_norms(drawing: Drawing) -> Illustration:
    """Plot norms of updates and the tree of clusters, for each GCFL run."""
    pictures, rows = {}, []
    for point, name, study in _cluster_studies(drawing):
        pictures[f"{name}-norms"] = clusters_charts.norm_charts(study, cluster_title(study))
        pictures[f"{name}-tree"] = clusters_charts.tree_chart(study, cluster_title(study))
        for at in np.ndindex(study.rounds, len(study.names)):
            norms = round(float(study.norms[at]), 6), round(float(study.together[at]), 6)
            where = point.dataset, point.method, study.names[at[1]], at[0]
            rows.append((*where, *norms, int(study.label[at])))
    return pictures, _table(drawing, rows)


def draw_heterogeneity(drawing: Drawing) -> Illustration:
    """Plot the heterogeneity of the graphs inside clusters, for each GCFL run."""
    pictures, rows = {}, []
    for point, name, study in _cluster_studies(drawing):
        pictures[name] = clusters_charts.heterogeneity_charts(study, cluster_title(study))
        for number, structure, features in study.within():
            after = "start" if number < 0 else int(number)
            gaps = round(structure, 5), round(features, 5)
            rows.append((point.dataset, point.method, after, *gaps))
    return pictures, _table(drawing, rows)


def draw_losses(drawing: Drawing) -> Illustration:
    """Plot test losses over the rounds, with one picture per data set."""
    pictures, rows = {}, []
    last = {point.dataset: study for point, _, study in _cluster_studies(drawing)}
    for dataset in (name for name in drawing.datasets() if name in last):
        study = last[dataset]
        pictures[dataset.lower()] = clusters_charts.loss_chart(study, cluster_title(study))
        for run, gain in zip((study.run, *study.others), study.gains, strict=True):
            by_seed = [one.history.array("deployed", "loss", "test") for one in run.result.seeds]
            for number, line in enumerate(np.concatenate(by_seed, axis=1)):
                numbers = round(float(np.nanmean(line)), 5), round(float(np.nanstd(line)), 5)
                rows.append((dataset, gain.name, number, *numbers))
    return pictures, _table(drawing, rows)


def draw_pairs(drawing: Drawing) -> Illustration:
    """Plot client 0's accuracy against its structural distance to client 1 (GCFL, Fig. 5)."""
    marks: list[Mark] = []
    rows = []
    for point in drawing.points:
        run = read_run(_folder(point))
        own = 100 * run.result.of_clients()[:, 0]
        spread = spread_of(own) or 0.0
        gap, middle = float(compare_graphs(run.federations[0]).structure[0, 1]), float(own.mean())
        alone = run.config.method == "local"
        numbers = "" if alone else round(gap, 5), round(middle, 3), round(spread, 3), own.size
        rows.append((point.dataset, point.x.label, *numbers, drawing.rules, point.run.name))
        if alone:
            marks.append(Rule(middle, dash=1, width=1.4, name="alone"))
        else:
            marks.append(Dots([gap], [middle], charts.BLUE, spread=[spread]))
            marks.append(Texts([gap], [middle], [str(point.x.label)], "corner"))
    x = Axis("structure heterogeneity to the other data set (nats)", room=0.15)
    y = Axis(f"test accuracy on {drawing.points[0].dataset}, %", room=0.15)
    chart = Chart("", x, y, tuple(marks), legend="inside")
    return _panels(drawing, [chart], (7.4, 4.8)), _table(drawing, rows)


def draw_violins(drawing: Drawing) -> Illustration:
    """Plot the clients' gains over local training: a violin per method, each half one variant."""
    methods, panels, rows = drawing.methods(), [], []
    sides = [variant.label for variant in drawing.recipe.x]
    for dataset in drawing.datasets():
        marks: list[Mark] = [Rule(0.0, colour=charts.SOFT)]
        bases: dict[object, FinishedRun] = {}
        for point in drawing.of(dataset):
            label = point.x.label
            if (base := drawing.baseline_runs.get((dataset, label))) is None:
                continue
            name = "" if label in bases else str(label)
            bases[label] = bases.get(label) or read_run(base.folder)
            run = read_run(_folder(point), like=bases[label])
            alone = bases[label].result.of_clients().mean(0)
            gain = 100 * (run.result.of_clients().mean(0) - alone)
            values, place = gain[np.isfinite(gain)], methods.index(point.method)
            half = sides.index(label)  # 0: left half, 1: right half
            side, colour = (-1, 1)[half], charts.colour_of(half)
            at = place + side * np.random.default_rng(half).uniform(0.04, 0.14, values.size)
            ends, middle = [place, place + 0.3 * side], [values.mean()] * 2
            marks += charts.violin(values, place, colour=colour, side=side, width=0.85)
            marks.append(Dots(at, values, colour, name, size=3.5, opacity=0.8))
            marks.append(Line(ends, middle, charts.BLACK, width=2.0))
            for client, value in enumerate(gain.tolist()):
                rows.append((dataset, point.method, label, client, round(value, 4), drawing.rules))
        y = Axis("points gained over local training (line: mean)")
        panels.append(Chart(dataset, named("", methods), y, tuple(marks)))
    width = max(4.6, 1.5 * len(methods))
    return _panels(drawing, panels, (width, 4.4), legend=len(sides) > 1), _table(drawing, rows)


_SCORES = (draw_lines, draw_rounds, draw_bars, draw_grid, draw_similarity, draw_distance)
_CLUSTERS = (draw_norms, draw_heterogeneity, draw_losses, draw_violins, draw_pairs)
DRAW: dict[str, Callable[[Drawing], Illustration]] = {
    draw.__name__.removeprefix("draw_"): draw for draw in (*_SCORES, draw_contribution, *_CLUSTERS)
}
"""All drawing functions that a recipe can name."""
