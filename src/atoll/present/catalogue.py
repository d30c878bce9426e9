"""Pages about methods and data sets, for `atoll methods` and `atoll datasets`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from atoll.core.aggregate import RULES, Rule
from atoll.core.hyper import hypers
from atoll.core.method import Method, task_of
from atoll.core.optim import OPTIMIZERS
from atoll.core.task import NODES
from atoll.data.public import registry
from atoll.data.public.registry import DATASETS, GROUPS, data_root, is_present
from atoll.data.source import Source
from atoll.data.synthetic import BUILT_IN, Lagoon, built_in
from atoll.experiment.card import PARAGRAPHS
from atoll.methods import METHODS, method_class
from atoll.nn import NETS
from atoll.present.terminal import FittedTable as Table

SOURCE_WIDTH = 100  # maximum width of a docstring's lines
_COUNTED = ("graphs", "nodes", "edges", "features", "classes")
_GENERATORS = {
    "lagoon": ("owners' parts of one citation-like graph", "nodes=5000,homophily=0.3"),
    "archipelago": ("any number of owners, each with its own small graph", "least=20,most=40"),
}


def method_table() -> Table:
    """Make the table of all methods, with a summary and the source of each."""
    table = _titled("Methods", padding=(0, 1, 0, 0))
    table.caption = (
        "for: nodes (n), graphs (g). scored: one global model or one per client. new: predicts "
        "nodes outside the training data. Details: atoll methods NAME."
    )
    for column in ("name", "what it does", "for", "scored", "new", "from"):
        table.add_column(column, no_wrap=column not in ("what it does", "from"))
    for name, cls in METHODS.items():
        first = module_doc(cls).splitlines()[0]
        does, _, cited = (first.partition(": ")[2] or first).rstrip(".").partition(" (")
        tasks = " ".join(task[0] for task in cls.tasks)
        scored = "own" if cls.deployed == "personalised" else cls.deployed
        # Authors from "Li et al., 2020)", venue from the end of the paper's line.
        authors = cited.rstrip(").").rpartition(", ")[0]
        origin = f"{authors}, {cls.paper.rpartition(', ')[2]}" if authors else "no paper"
        new = "no" if _smallest(cls).why_bound() else "yes"
        table.add_row(name, escape(does), tasks, scored, new, escape(origin))
    return table


def _smallest(cls: type[Method]) -> Method:
    """Make a method with its default network, for one feature and two classes."""
    return cls(net=NETS[(*cls.nets, "gcn")[0]](features=1, classes=2))


def module_doc(cls: type[object]) -> str:
    """Return the docstring of the module that defines a class."""
    return inspect.getdoc(sys.modules[cls.__module__]) or ""


def _titled(title: str, *columns: str, **how: Any) -> Table:
    lines = box.SIMPLE_HEAD
    table = Table(*columns, title=title, box=lines, show_edge=False, pad_edge=False, **how)
    table.title_justify = table.caption_justify = "left"
    return table


def method_page(name: str) -> RenderableType:
    """Make the page of a method: its docstring, and its hyper-parameters with their ranges."""
    cls = method_class(name)
    title = f"Hyper-parameters (--set KEY=VALUE) of {name}"
    page = _titled(title, "key", "default", "meaning", "takes")
    net = (*cls.nets, "gcn")[0]
    # A method may start with another learning rate than the default of the optimizer.
    optimizer = next((f.default for f in fields(cls) if f.name == "optimizer"), None)
    kind = next((name for name, made in OPTIMIZERS.items() if isinstance(optimizer, made)), None)
    own, plain = hyper_rows(cls), hyper_rows(NETS[net])
    taken = {key for key, *_ in own}
    of_net = [(f"net.{key}" if key in taken else key, *rest) for key, *rest in plain]
    parts_of: dict[str, Sequence[Sequence[str]]] = {"": own, f"network {net}": of_net}
    if kind is not None:
        parts_of[f"optimizer {kind}"] = hyper_rows(type(optimizer), optimizer)
    for title, rows in parts_of.items():
        if title:
            page.add_section()
            page.add_row(Text(title, style="bold"))
        for row in rows:
            page.add_row(*map(escape, row))
    page.add_section()
    nets = [name for name in cls.nets or NETS if task_of(NETS[name]) in cls.tasks]
    page.add_row("net", net, "the network", " or ".join(nets))
    if kind is not None:
        page.add_row("optimizer", kind, "the clients' optimizer", " or ".join(OPTIMIZERS))
    for key, value in cls.for_graphs.items():
        page.add_row(key, str(value), "where graphs are classified", "")
    for preset, settings in cls.presets.items():
        words = ", ".join(f"{key}={value}" for key, value in settings.items())
        page.add_row("preset", preset, "a named set of values", escape(words))
    made = _smallest(cls)
    why, bound = made.why_not_private(), made.why_bound()
    private = f"Differential privacy (--dp): {f'no: {why}' if why else 'yes'}"
    private += f"\nNew nodes (atoll predict): {f'no: {bound}' if bound else 'yes'}"
    if "aggregate" not in hypers(cls):
        private += f"\nAggregation rules (--set aggregate): none, because {cls.not_averaging}"
    about = Text(f"\nPaper: {cls.paper or 'none'}\n{private}\n")
    words = module_doc(cls) or inspect.getdoc(cls) or ""
    parts: list[RenderableType] = [Text(_unwrapped(words)), about, page]
    for option, space in (("", cls.space), *((f" --preset {k}", v) for k, v in cls.grids.items())):
        ranges = ", ".join(f"{key} {wanted}" for key, wanted in space.items())
        parts.append(Text(f"Searched by `atoll tune {name}{option}`: {ranges}"))
    return Group(*parts)


def hyper_rows(cls: type[object], made: object = None) -> list[tuple[str, str, str, str]]:
    """Return key, default (or the value of `made`), meaning and range of each hyper-parameter."""
    skipped = ("net", "optimizer", "features", "classes")
    rows = []
    for key, hyper in hypers(cls).items():
        if key in skipped or hyper.default is MISSING:
            continue
        default = hyper.default if made is None else getattr(made, key)
        takes = hyper.allowed
        if hyper.kind is Rule:
            default, takes = _rule_text(default), " or ".join(RULES)
        elif key == "base":
            takes = "another method"
        rows.append((key, "none" if default is None else str(default), hyper.meaning, takes))
    return rows


def _rule_text(rule: Any) -> str:
    """Write an aggregation rule as for `--set aggregate`: `adaptive:lr=0.1`."""
    name = next((name for name, known in RULES.items() if type(rule) is known), "")
    if not name:
        return str(rule)
    known = hypers(type(rule))
    changed = {key: getattr(rule, key) for key in known if getattr(rule, key) != known[key].default}
    words = ",".join(f"{key}={value}" for key, value in changed.items())
    return f"{name}:{words}" if words else name


def _unwrapped(words: str) -> str:
    """Remove the line breaks that only keep the source lines of a docstring short."""
    text = last = ""
    for line in words.splitlines():
        first_word = re.split(r"\s", line, maxsplit=1)[0]
        full = len(last) + 1 + len(first_word) > SOURCE_WIDTH - 4
        fresh = line.startswith((*PARAGRAPHS, " ")) or last.startswith(" ")
        text += f" {line}" if line and full and not fresh else f"\n{line}"
        last = line
    return text.removeprefix("\n")


def dataset_table(root: str | Path | None) -> Table:
    """Make the table of all data sets, with the published size and whether the files exist."""
    base = data_root(root)
    table = _titled("Data sets", padding=0)
    table.caption = (
        f"Looked for in {escape(str(base))}; get one with: atoll data fetch NAME\n"
        f"Groups, with one set for each client: {', '.join(GROUPS)}"
    )
    for column in ("name", "task", *_COUNTED, "here"):
        right = column in _COUNTED
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for name, made in BUILT_IN.items():
        nodes = f"{made.nodes:,}" if made.nodes else ""
        table.add_row(name, NODES.name, "1", nodes, "", str(made.words), str(made.classes), "yes")
    for name, info in DATASETS.items():
        counts = [getattr(info, column) for column in _COUNTED]
        numbers = ["" if n is None else f"{n:,}" for n in counts]
        table.add_row(name, info.task, *numbers, "yes" if is_present(name, base) else "")
    return table


def _generator_page(name: str, made: type[Lagoon]) -> Table:
    what, example = _GENERATORS[name]
    table = _titled(f"{name}: built in, {what}", "knob", "default", "what it is")
    table.caption = f"Change some with, for example: --data {name}:{example}"
    pages = "\n".join(inspect.getdoc(kind) or "" for kind in (Lagoon, made))
    about = dict(re.findall(r"^ +(\w+): (.*)$", pages, re.MULTILINE))
    for f in fields(made):
        if f.init:
            table.add_row(f.name, str(f.default), about[f.name])
    return table


def _group_page(name: str, root: str | Path | None) -> Table:
    heads = ("client", "data set", "graphs", "features", "classes", "here")
    table = _titled(f"{name}: one data set for each client", *heads)
    for number, one in enumerate(GROUPS[name]):
        info, here = registry.dataset_info(one), "yes" if is_present(one, root) else ""
        counts = map(str, (info.graphs, info.features, info.classes))
        table.add_row(str(number), one, *counts, here)
    return table


def dataset_page(name: str, root: str | Path | None) -> Table:
    """Make the page of a data set (size, source, licence, folder), of a generator or a group."""
    if generator := built_in(name.lower()):
        return _generator_page(generator.__name__.lower(), generator)
    if name.lower() in GROUPS:
        return _group_page(name.lower(), root)
    info, base = registry.dataset_info(name), data_root(root)
    elsewhere = "" if root is None else f" --data-root {root}"
    table, here = _titled(info.name), is_present(name, base)
    table.show_header = False
    rows: dict[str, object] = {
        "task": f"{info.task} classification",
        **{"edges (directed)" if n == "edges" else n: getattr(info, n) for n in _COUNTED},
        "metric": info.metric,
        "source": info.origin,
        "licence": info.licence,
        "note": info.note or None,
        "looked for in": base / info.home,
        "present": "yes" if here else f"no; get it with: atoll data fetch {info.name}{elsewhere}",
    }
    if here:
        source = registry.load_dataset(name, base)
        if isinstance(source, Source):
            rows["edge homophily"] = f"{edge_homophily(source):.3f}"
    for key, value in rows.items():
        if value is not None:
            table.add_row(key, escape(f"{value:,}" if isinstance(value, int) else str(value)))
    return table


def edge_homophily(source: Source) -> float:
    """Return the fraction of equal labels among edges between labelled nodes, or NaN."""
    ends = source.y[source.edges]
    known = (ends >= 0).all(axis=0)
    return float((ends[0] == ends[1])[known].mean()) if known.any() else float("nan")
