"""Pages about methods and data sets, for `atoll methods` and `atoll datasets`."""

from __future__ import annotations

import inspect
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from atoll.core.optim import OPTIMIZERS
from atoll.data.datasets import DATASETS, data_root, dataset_info, is_present, load_dataset
from atoll.data.source import Source
from atoll.data.synthetic import Lagoon
from atoll.methods import METHODS, method_class
from atoll.nn import NETS


def method_table() -> Table:
    """Every method with one line and its paper."""
    table = Table(title="Methods", title_justify="left", caption="atoll methods NAME says more",
                  caption_justify="left")  # fmt: skip
    for column in ("name", "what it does", "scored", "paper"):
        table.add_column(column)
    for name, cls in METHODS.items():
        table.add_row(name, escape(_first_line(cls)), cls.deployed, escape(cls.paper))
    return table


def method_page(name: str) -> RenderableType:
    """A method's own words, and its hyper-parameters with their defaults."""
    cls = method_class(name)
    page = Table(title=f"Hyper-parameters (--set KEY=VALUE) of {name}", title_justify="left")
    for column in ("key", "default", "belongs to"):
        page.add_column(column)
    net, optimizer = NETS["gcn"], OPTIMIZERS["adam"]
    for part, owner in ((cls, "method"), (net, "net (gcn)"), (optimizer, "optimizer (adam)")):
        for key, default in _defaults(part):
            page.add_row(key, escape(str(default)), owner)
    page.add_row("net", "gcn", f"one of {', '.join(NETS)}")
    page.add_row("optimizer", "adam", f"one of {', '.join(OPTIMIZERS)}")
    words = inspect.getdoc(sys.modules[cls.__module__]) or ""
    return Group(Text(words), Text(f"\nPaper: {cls.paper}\n"), page)


def _first_line(cls: type[Any]) -> str:
    doc = inspect.getdoc(sys.modules[cls.__module__]) or ""
    return doc.splitlines()[0].partition(": ")[2] or doc.splitlines()[0]


def _defaults(cls: type[Any]) -> list[tuple[str, Any]]:
    skipped = ("net", "optimizer", "features", "classes")
    return [
        (f.name, f.default)
        for f in fields(cls)
        if f.name not in skipped and f.default is not MISSING
    ]


def dataset_table(root: str | Path | None) -> Table:
    """Every data set with its published size and whether it is here."""
    base = data_root(root)
    table = Table(title="Data sets", title_justify="left", caption_justify="left",
                  caption=f"looked for in {base}; get one with: atoll data fetch NAME")  # fmt: skip
    for column in (
        "name",
        "task",
        "graphs",
        "nodes",
        "edges",
        "features",
        "classes",
        "metric",
        "here",
    ):
        table.add_column(column, justify="right" if column in _COUNTED else "left")
    table.add_row("lagoon", "node", "1", str(Lagoon.nodes), "", str(Lagoon.words),
                  str(Lagoon.classes), "accuracy", "built in")  # fmt: skip
    for name, info in DATASETS.items():
        counts = (info.graphs, info.nodes, info.edges, info.features, info.classes)
        numbers = ["" if n is None else f"{n:,}" for n in counts]
        table.add_row(
            name, info.task, *numbers, info.metric, "yes" if is_present(name, base) else ""
        )
    return table


_COUNTED = ("graphs", "nodes", "edges", "features", "classes")


def dataset_page(name: str, root: str | Path | None) -> Table:
    """One data set: size, source, licence, and where it is looked for."""
    table = Table(title=name, title_justify="left", show_header=False)
    if name.partition(":")[0] == "lagoon":
        table.add_row("what", "the built-in generator: owners' parts of one citation-like graph")
        for key, default in _defaults(Lagoon):
            table.add_row(key, f"{default}   (--data lagoon:{key}=...)")
        return table
    info, base = dataset_info(name), data_root(root)
    here = is_present(name, base)
    rows: dict[str, Any] = {
        "task": f"{info.task} classification", "graphs": info.graphs, "nodes": info.nodes,
        "edges (directed)": info.edges, "features": info.features, "classes": info.classes,
        "metric": info.metric, "source": info.origin, "licence": info.licence,
        "looked for in": base / info.home,
        "present": "yes" if here else f"no; get it with: atoll data fetch {info.name}",
    }  # fmt: skip
    if here:
        source = load_dataset(name, base)
        if isinstance(source, Source):
            rows["edge homophily"] = f"{edge_homophily(source):.3f}"
    for key, value in rows.items():
        if value is not None:
            table.add_row(key, escape(f"{value:,}" if isinstance(value, int) else str(value)))
    return table


def edge_homophily(source: Source) -> float:
    """Share of edges whose two ends have the same known label."""
    ends = source.y[source.edges]
    known = (ends >= 0).all(axis=0)
    return float((ends[0] == ends[1])[known].mean()) if known.any() else float("nan")
