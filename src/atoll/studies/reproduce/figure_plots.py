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
    COLOURS,
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
from atoll.present.plots import GREY, empty_figure, heat_map, name_ticks, number_text
from atoll.studies.reproduce.figures import Drawing, Point
from atoll.studies.reproduce.table import Ours, ours_of

Pictures = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
LINES = ("-", "--", "-.", ":")
MARKS = "osD^vP*Xd<>"


def _style(method: str, methods: Sequence[str]) -> dict[str, Any]:
    """Colour, line and mark of a method; the paper's own, the last, is black and thick."""
    place = list(methods).index(method)
    if place == len(methods) - 1:
        return {"color": "black", "linewidth": 2.4, "marker": "o", "zorder": 4}
    colour = COLOURS[place % (len(COLOURS) - 1)]
    line = LINES[place // (len(COLOURS) - 1) % len(LINES)]
    return {"color": colour, "linewidth": 1.5, "linestyle": line, "marker": MARKS[place % 11]}


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


def _panels(drawing: Drawing, count: int, *, width: float = 5.4, height: float = 4.4) -> Any:
    """A figure with so many panels side by side, and its axes."""
    wide = min(count, 3)
    high = -(-count // wide)
    figure = empty_figure(width * wide, height * high + 0.9)
    figure.suptitle(_wrapped(drawing.title(), int(13 * width * wide)), fontsize=11)
    axes = figure.subplots(high, wide, squeeze=False).ravel()
    for one in axes[count:]:
        one.set_axis_off()
    for one in axes[:count]:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes[:count]


def _wrapped(text: str, width: int) -> str:
    """Lines that a picture is wide enough for."""
    return "\n".join(part for line in text.splitlines() for part in textwrap.wrap(line, width))


def _methods(drawing: Drawing) -> list[str]:
    return list(dict.fromkeys(point.method for point in drawing.points))


def _label(drawing: Drawing, dataset: str) -> str:
    return "test AUC, %" if drawing.metric(dataset) == "auc" else "test accuracy, %"


def _legend(figure: Any, axes: Any, methods: Sequence[str]) -> None:
    if len(methods) > 1:
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False
        )


def draw_lines(drawing: Drawing) -> tuple[Pictures, Rows]:
    """A score against something that is varied: a line for each method, a panel for each set."""
    datasets, methods = drawing.datasets(), _methods(drawing)
    figure, panels = _panels(drawing, len(datasets))
    for axes, dataset in zip(panels, datasets, strict=True):
        for method in methods:
            own = [p for p in drawing.points if (p.dataset, p.method) == (dataset, method)]
            at = np.array([float(point.x.label) for point in own])
            found = [_of(point, drawing) for point in own]
            mean = np.array([one.mean for one in found])
            axes.plot(at, mean, label=method, markersize=5, **_style(method, methods))
            if len(methods) == 1 and found[0].std is not None:
                spread = np.array([one.std for one in found])
                axes.fill_between(at, mean - spread, mean + spread, color=GREY, alpha=0.4)
        _horizontal(axes, drawing)
        axes.set(title=dataset, xlabel=drawing.recipe.x_name, ylabel=_label(drawing, dataset))
    _legend(figure, panels[0], methods)
    return {"": figure}, [_row(point, drawing) for point in drawing.points]


def _horizontal(axes: Any, drawing: Drawing) -> None:
    """Ticks at the values; a logarithmic axis where they span decades."""
    values = sorted({float(variant.label) for variant in drawing.recipe.x})
    if values[0] > 0 and values[-1] / values[0] > 50:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def draw_rounds(drawing: Drawing) -> tuple[Pictures, Rows]:
    """A score after every round: mean over seeds, a line for each method."""
    datasets, methods, rows = drawing.datasets(), _methods(drawing), []
    figure, panels = _panels(drawing, len(datasets))
    for axes, dataset in zip(panels, datasets, strict=True):
        first: FinishedRun | None = None
        for point in (p for p in drawing.points if p.dataset == dataset):
            run = read_run(_folder(point), like=first)
            first = first or run
            curve = 100 * run.result.curve(drawing.metric(dataset)).mean(0)
            style = {**_style(point.method, methods), "marker": ""}
            axes.plot(np.arange(1, len(curve) + 1), curve, label=point.method, **style)
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
        axes.set(title=dataset, xlabel="round", ylabel=_label(drawing, dataset))
        axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, panels[0], methods)
    return {"": figure}, rows


def _folder(point: Point) -> Path:
    assert point.outcome is not None
    return point.outcome.folder


def draw_bars(drawing: Drawing) -> tuple[Pictures, Rows]:
    """A group of bars for each place on the axis."""
    groups = list(dict.fromkeys(point.group for point in drawing.points))
    several = len({p.x.methods for p in drawing.points}) > 1
    figure, (axes,) = _panels(drawing, 1, width=max(8.0, 2.2 * len(groups)), height=4.8)
    names, ticks, low = list(dict.fromkeys(p.method for p in drawing.points)), [], 100.0
    for group in groups:
        own = [point for point in drawing.points if point.group == group]
        for place, point in enumerate(own):
            found = _of(point, drawing)
            at = group + 0.8 * (place + 0.5) / len(own) - 0.4
            colour = COLOURS[names.index(point.method) % len(COLOURS)]
            axes.bar(at, found.mean, 0.76 / len(own), color=colour, yerr=found.std, capsize=3)
            axes.annotate(
                f"{found.mean:.1f}",
                (at, found.mean + (found.std or 0)),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
            low = min(low, found.mean - (found.std or 0))
        label = f"{own[0].x.label} {drawing.recipe.x_name}"
        ticks.append(f"{label}\n(losses)" if several and own[0].x.methods else label)
    for place, name in enumerate(names):
        axes.bar(0, 0, color=COLOURS[place % len(COLOURS)], label=name)
    axes.set_xticks(groups, ticks)
    axes.set(ylabel=_label(drawing, drawing.points[0].dataset), ylim=(max(0.0, low - 8), None))
    axes.margins(y=0.12)
    _legend(figure, axes, names)
    return {"": figure}, [_row(point, drawing) for point in drawing.points]


def draw_grid(drawing: Drawing) -> tuple[Pictures, Rows]:
    """A heat map over two things that are varied, for each data set and method."""
    keys = list(dict.fromkeys((p.dataset, p.method) for p in drawing.points))
    figure, panels = _panels(drawing, len(keys))
    x = [float(variant.label) for variant in drawing.recipe.x]
    y = [float(variant.label) for variant in drawing.recipe.y]
    for axes, key in zip(panels, keys, strict=True):
        values = np.full((len(y), len(x)), np.nan)
        for point in (p for p in drawing.points if (p.dataset, p.method) == key):
            place = y.index(float(point.y.label)), x.index(float(point.x.label))
            values[place] = _of(point, drawing).mean
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        text = np.array([[f"{value:.1f}" for value in row] for row in values])
        # From the least value on: the differences are what the picture is for.
        top = max(high - low, 1.0)
        image = heat_map(axes, values - low, text, top=top)
        bar = figure.colorbar(image, ax=axes, shrink=0.8)
        ticks = np.linspace(0, top, 4)
        bar.set_ticks(ticks, labels=[f"{low + tick:.1f}" for tick in ticks])
        name_ticks(axes.xaxis, np.array([f"{label:g}" for label in x]))
        name_ticks(axes.yaxis, np.array([f"{label:g}" for label in y]))
        axes.set(xlabel=drawing.recipe.x_name, ylabel=drawing.recipe.y_name)
        axes.set_title(f"{', '.join(key)}\n{_label(drawing, key[0])}", fontsize=10)
    return {"": figure}, [_row(point, drawing) for point in drawing.points]


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
    datasets, methods = drawing.datasets(), _methods(drawing)
    figure, panels = _panels(drawing, len(datasets))
    rows = []
    for axes, dataset in zip(panels, datasets, strict=True):
        for place, point in enumerate(p for p in drawing.points if p.dataset == dataset):
            values = np.array(_distances(_folder(point)))
            spread = float(values.std(ddof=1)) if values.size > 1 else 0.0
            colour = COLOURS[place % len(COLOURS)]
            bar = axes.bar(place, values.mean(), 0.6, color=colour, yerr=spread, capsize=4)
            axes.bar_label(bar, fmt="%.2f", padding=3)
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
        axes.set_xticks(range(len(methods)), methods)
        axes.set(title=dataset, ylabel="average Wasserstein distance of the outputs")
        axes.margins(y=0.12)
    return {"": figure}, rows


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
    figure, (axes,) = _panels(drawing, 1, width=7.4, height=4.8)
    rows = []
    for point in drawing.points:
        run = read_run(_folder(point))
        own = 100 * run.result.of_clients()[:, 0]
        gap = float(compare_graphs(run.federations[0]).structure[0, 1])
        spread = float(own.std(ddof=1)) if own.size > 1 else 0.0
        alone = run.config.method == "local"
        rows.append(
            {
                "dataset": point.dataset,
                drawing.recipe.x_name: point.x.label,
                "structure_heterogeneity": "" if alone else round(gap, 5),
                "mean": round(float(own.mean()), 3),
                "std": round(spread, 3),
                "seeds": own.size,
                "protocol": drawing.rules,
                "cell": point.cell.name,
            }
        )
        if alone:
            axes.axhline(own.mean(), color="#555555", linestyle="--", linewidth=1.4, label="alone")
            continue
        axes.errorbar(gap, own.mean(), spread or None, fmt="o", color=COLOURS[0], capsize=3)
        axes.annotate(
            str(point.x.label), (gap, own.mean()), xytext=(7, 5), textcoords="offset points"
        )
    axes.set(xlabel="structure heterogeneity to the other data set (nats)")
    axes.set(ylabel=f"test accuracy on {drawing.points[0].dataset}, %")
    axes.margins(0.15)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    return {"": figure}, rows


def draw_violins(drawing: Drawing) -> tuple[Pictures, Rows]:
    """What clients gain over training alone: two halves of a violin for each method."""
    datasets, methods, rows = drawing.datasets(), _methods(drawing), []
    figure, panels = _panels(drawing, len(datasets), width=max(4.6, 1.5 * len(methods)))
    sides = [variant.label for variant in drawing.recipe.x]
    for axes, dataset in zip(panels, datasets, strict=True):
        axes.axhline(0, color="#555555", linewidth=1)
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
            _half_violin(axes, gain[np.isfinite(gain)], place, side)
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
            axes.plot([], [], color=COLOURS[side], linewidth=6, alpha=0.5, label=str(label))
        axes.set_xticks(range(len(methods)), methods)
        axes.set(title=dataset, ylabel="points gained over training alone (line: mean)")
        axes.set_xlim(-0.6, len(methods) - 0.4)
    _legend(figure, panels[0], [str(label) for label in sides])
    return {"": figure}, rows


def _half_violin(axes: Any, values: np.ndarray, place: int, side: int) -> None:
    """The left (0) or right (1) half, with a point for each client and a line at the mean."""
    sign, colour = (-1, 1)[side], COLOURS[side]
    if np.ptp(values) > 0:
        (body,) = axes.violinplot(values, [place], widths=0.85, showextrema=False)["bodies"]
        corners = body.get_paths()[0].vertices
        low, high = sorted((place, place + sign))
        corners[:, 0] = np.clip(corners[:, 0], low, high)
        body.set(facecolor=colour, alpha=0.35, edgecolor=colour)
    at = place + sign * np.random.default_rng(side).uniform(0.04, 0.14, values.size)
    axes.plot(at, values, "o", color=colour, markersize=3.5, alpha=0.8)
    axes.plot([place, place + 0.3 * sign], [values.mean()] * 2, color="black", linewidth=2)


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
