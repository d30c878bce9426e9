"""How clients differ in their data, and how alike they seemed to the methods."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import numpy as np

from atoll.report import charts
from atoll.report.charts import Wide, key
from atoll.report.collect import Collection, Shown
from atoll.report.matrices import heat_map

Facts = Mapping[str, np.ndarray]
MAX_CLIENT_ROWS = 40
MAX_MAPS = 12
"""Matrices of one federation that are drawn."""
MAX_FEDERATIONS = 24
"""Federations that are drawn with all their matrices."""


def relations(found: Collection) -> str:
    """How alike clients seemed to the methods that compare them, and how models were mixed."""
    parts = []
    for column in found.columns:
        figures = [figure for one in found.group(column) for figure in _relation(one)]
        left_out = len(figures) - MAX_MAPS
        figures = figures[:MAX_MAPS]
        if left_out > 0:
            figures.append(f"<p>{left_out} more are left out: atoll similarity draws them.</p>")
        if figures:
            parts.append(f'<h3>{escape(column)}</h3><div class="maps">{"".join(figures)}</div>')
    if not parts:
        return (
            "<p>None of these methods compares clients: everybody gets the same mixture of models, "
            "or nobody gets any.</p>"
        )
    text = (
        "From the server, after the last round of the first seed. Similarity is what the method "
        "computes from what clients send; its diagonal is left out. A row of a mixture says whose "
        "weights a client (row) got, by share; rows add up to one."
    )
    return f"<p>{text}</p>{''.join(parts)}"


def _relation(one: Shown) -> list[str]:
    known = one.run.relations[0] if one.run.relations else {}
    figures = []
    if "similarity" in known:
        alike = _mean_factor(known["similarity"])
        alike = np.where(np.eye(len(alike), dtype=bool), np.nan, alike)
        if np.isfinite(alike).any():
            low = float(np.nanmin(alike))
            figures.append(
                heat_map(
                    f"{one.row}: similarity",
                    alike,
                    low=low,
                    note=_factors(known["similarity"]),
                )
            )
    if "mixing" in known:
        share = _mean_factor(known["mixing"])
        if np.isfinite(share).any():
            figures.append(
                heat_map(
                    f"{one.row}: mixture",
                    share,
                    columns="whose weights",
                    low=0.0,
                    note=_factors(known["mixing"]),
                )
            )
    if "cluster" in known:
        label = known["cluster"].astype(int)
        lines = "".join(
            f"<li>{', '.join(map(str, np.flatnonzero(label == number)))}</li>"
            for number in range(label.max() + 1)
        )
        figures.append(
            f'<figure class="heat"><figcaption>{escape(one.row)}: clusters of clients</figcaption>'
            f'<ul class="clusters">{lines}</ul><p class="note">Clients in one box share a model.'
            "</p></figure>"
        )
    return figures


def _mean_factor(matrix: np.ndarray) -> np.ndarray:
    return matrix if matrix.ndim == 2 else np.asarray(matrix.mean(0))


def _factors(matrix: np.ndarray) -> str:
    return f"Mean of {len(matrix)} factors." if matrix.ndim == 3 else ""


def heterogeneity(found: Collection) -> str:
    """How the clients of each federation differ."""
    parts = []
    for number, column in enumerate(found.columns):
        one = next((o for o in found.group(column) if o.run.measures), None)
        if one is None:
            body = f"<p>{escape(_not_measured(found.group(column)[0]))}</p>"
        else:
            body = _federation(one, maps=number < MAX_FEDERATIONS)
        parts.append(f"<h3>{escape(column)}</h3>{body}")
    text = (
        "The first seed's clients, measured when the run was saved. Divergences are "
        "Jensen-Shannon's, from 0 (alike) to 1 (nothing in common). A simulation has all data and "
        "can measure this; no method sees it."
    )
    return f"<p>{text}</p>{''.join(parts)}"


def _not_measured(one: Shown) -> str:
    if "data" in one.config.objects and one.config.partition == "given":
        return "Not known: the data are at their owners', or were given as an object and are large."
    if "graphs" in one.run.result.federation:
        return "Not measured for sets of graphs; atoll clusters compares the graphs of two clients."
    return (
        "Not measured: the run was saved by an earlier version, or the federation is too large to "
        "measure in passing; atoll inspect does."
    )


def _federation(one: Shown, *, maps: bool) -> str:
    facts = one.run.measures
    if not maps:
        return _lost(facts) + _sizes(facts)
    labels = facts["labels"]
    total = labels.sum(1, keepdims=True)
    shares = np.divide(labels, total, out=np.zeros(labels.shape), where=total > 0)
    figures = [
        heat_map(
            "Share of each class among a client's nodes",
            shares,
            columns="class",
            low=0.0,
            texts=np.array([[f"{100 * v:.0f}" for v in row] for row in shares]),
            note="In percent.",
        )
    ]
    for name, words in (
        ("label", "labels"),
        ("feature", "features of linked nodes"),
        ("structure", "structure (anonymous walks)"),
    ):
        matrix = facts[f"{name}_divergence"]
        upper = matrix[np.triu_indices(len(matrix), 1)]
        upper = upper[np.isfinite(upper)]
        if not upper.size:
            continue
        note = f"Mean {upper.mean():.3f}, largest {upper.max():.3f}. Shades are this map's own."
        off = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
        figures.append(
            heat_map(
                f"Divergence of {words}",
                off,
                low=0.0,
                note=note,
                digits=2 if upper.max() >= 0.1 else 3,
            )
        )
    return _lost(facts) + _sizes(facts) + f'<div class="maps">{"".join(figures)}</div>'


def _lost(facts: Facts) -> str:
    lost, total = (float(facts[name]) for name in ("edges_lost", "edges_total"))
    if not np.isfinite(lost) or not total:
        return ""
    return (
        f"<p>{lost:,.0f} of {total:,.0f} edges ({lost / total:.1%}) lie between clients: nobody "
        "has them.</p>"
    )


def _sizes(facts: Facts) -> str:
    nodes = facts["nodes"]
    top = float(nodes.max())
    rows = []
    for k in range(min(len(nodes), MAX_CLIENT_ROWS)):
        roles = facts["roles"][k]
        rest = nodes[k] - roles.sum()
        parts = [(float(n), f"role{i}") for i, n in enumerate([*roles, rest])]
        homophily = facts["homophily"][k]
        rows.append(
            [
                str(facts["clients"][k]),
                charts.bars(parts, top),
                f"{nodes[k]:,}",
                " / ".join(f"{n:,}" for n in roles),
                f"{facts['edges'][k]:,}",
                f"{facts['mean_degree'][k]:.1f}",
                f"{facts['isolated'][k]:,}",
                f"{homophily:.2f}" if np.isfinite(homophily) else "–",
            ]
        )
    heads: list[str | Wide] = [
        "client",
        Wide("size", key(role0="training", role1="validation", role2="test")),
        "nodes",
        "train / val / test",
        "edges",
        "degree",
        "isolated",
        "homophily",
    ]
    cut = f" (the first {MAX_CLIENT_ROWS} of {len(nodes)})" if len(nodes) > MAX_CLIENT_ROWS else ""
    return charts.table(f"Clients{cut}", heads, rows, raw=True)
