"""Transmitted data: measured traffic, the declarations of each method, and the cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np

from atoll.core.errors import AtollError
from atoll.core.task import NODES, TASKS
from atoll.engines.fleet import owners_of, steps_of
from atoll.engines.ledger import SCORE
from atoll.experiment.baseline import NOT_FEDERATED, POOLED
from atoll.experiment.build import build_method
from atoll.experiment.card import paragraph
from atoll.experiment.config import RunConfig
from atoll.experiment.metrics import ONE_IN_A_BIN, SENT, label_of
from atoll.present.catalogue import module_doc
from atoll.present.chart import BLUE, Axis, Line
from atoll.present.chart_svg import spark_svg, strip_svg, swatches
from atoll.present.result_plots import traffic_by_round
from atoll.present.tables import Cell, Column, html, make_table
from atoll.report import results
from atoll.report.collect import Collection, ReportedRun
from atoll.report.maps import stacked
from atoll.report.results import by_federation, name_cell

BASELINES = {
    NOT_FEDERATED: "Not federated: each client fitted a model to its own data. No data were sent.",
    POOLED: "Not federated: all data were pooled in one place. No data stayed private.",
}
DIRECTIONS = (("down", BLUE, 1.0), ("up", BLUE, 0.5))
"""Name, colour and opacity of the two parts of a bar."""


def crossed(found: Collection) -> str:
    """Show the measured traffic, and the data that each method declares to send and keep."""
    text = (
        "The ledger counts every message. The traffic of evaluation is shown separately, because "
        "it is not part of a method."
    )
    return f"<p>{text}</p>{by_federation(found, _crossed)}{_stayed(found)}"


def _crossed(group: Sequence[ReportedRun]) -> str:
    by_round = {one.row: traffic_by_round(one.run.result) for one in group}
    top = max(float(each.sum(0).mean()) for each in by_round.values())
    rows = [row for one in group for row in _traffic_rows(one, by_round[one.row], top)]
    bars = Column("MB in a round", "left", below=swatches(stacked([0.0, 0.0], DIRECTIONS)))
    step = Column("step", "left")
    heads: list[str | Column] = ["method", bars, step, "messages", "down", "up", "each round"]
    title = "Per round, all clients together, mean over rounds and seeds"
    return html(make_table(heads, rows, title=title), label=f"{group[0].column}: traffic")


def _traffic_rows(one: ReportedRun, by_round: np.ndarray, top: float) -> list[list[Cell | str]]:
    """Make a row for each step of a method. The first row contains the bar and the history."""
    rounds = max(1, (one.config.rounds or 1) * len(one.run.result.seeds))
    steps: dict[str, np.ndarray] = {}
    for seed in one.run.result.seeds:
        for step, row in seed.ledger.by_step().items():
            amounts = np.array([row["messages"], row["down"], row["up"]], dtype=float)
            steps[step] = steps.get(step, np.zeros(3)) + amounts
    each = by_round.sum(0)
    alt = f"{one.row}: {each[0] / 1e6:.2f} MB in the first round, {each[-1] / 1e6:.2f} in the last"
    same = np.ptp(each) <= 0.01 * each.max()
    axis = Axis("", 0.0, top, ticks=())
    bar = strip_svg("strip", axis, stacked(by_round.mean(1).tolist(), DIRECTIONS))
    course = Cell("the same") if same else Cell(html=spark_svg(each, alt))
    first = (name_cell(one), Cell(html=bar), course)
    rest = (Cell(html=f'<span class="hidden">{escape(one.row)}</span>'), Cell(), Cell())
    rows: list[list[Cell | str]] = []
    for step, (messages, down, up) in sorted(steps.items(), key=lambda item: item[0] == SCORE):
        name, bars, course = rest if rows else first
        apart = '<span class="quiet">evaluation (separate)</span>' if step == SCORE else ""
        each_way = down / rounds, up / rounds
        sizes = [f"{n:,.0f} B" if n < 5000 else f"{n / 1e6:,.2f} MB" for n in each_way]
        count, cell = f"{messages / rounds:,.0f}", Cell(step, html=apart)
        rows.append([name, bars, cell, count, *sizes, course])
    return rows


def _stayed(found: Collection) -> str:
    """Show the declarations of the methods: sent, private and disclosed data."""
    cards: dict[str, str] = {}
    for one in found.shown:
        if one.config.method not in cards:
            counted = one.run.result.federation
            # A set of graphs also counts its nodes. A federation made in Python has no counts.
            tasks = [task for task in TASKS.values() if task.plural in counted] or [NODES]
            alone = BASELINES.get(one.run.result.scored)
            cards[one.config.method] = _card(one, alone or declared(one.config, tasks[-1].name))
    rule = (
        "<h3>Data that stay private</h3><p>Unless a method declares otherwise below, <b>features, "
        "edges and labels of single nodes stay with their client</b>, and so does the private "
        "state. A reply is a record of tensors. The wire engine and real sites reject a reply with "
        "a row for each node or edge, unless the method declares it with its reason. The contract "
        "tests check this for every method on every engine. "
        f"Evaluation does send numbers, for training, validation and "
        f"test nodes: {_scoring(found)}.</p>"
    )
    return f'{rule}<div class="cards">{"".join(cards.values())}</div>'


def _scoring(found: Collection) -> str:
    """Describe the data that evaluation sends in these runs."""
    seeds = [seed.history for one in found.shown for seed in one.run.result.seeds]
    shows = {"confusion": "how many nodes of each class a client has", "bins": ONE_IN_A_BIN}
    sent = {k: v for k, v in SENT.items() if k != "bins" or any(h.bins_known for h in seeds)}
    return ", ".join(f"{v} ({shows[k]})" if k in shows else v for k, v in sent.items())


def _card(one: ReportedRun, words: Declared | str) -> str:
    head = f"<h4>{escape(one.config.method)}</h4>"
    if isinstance(words, str):
        return f'<article class="card">{head}<p>{escape(words)}</p></article>'
    names = ("Sent, per client and round", "Private", "Amount")
    rows = zip(names, (words.wire, words.private, words.floats), strict=True)
    body = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows if text)
    discloses = (map(escape, reply) for reply in words.discloses)
    lines = "".join(f"<li><code>{step}.{name}</code>: {why}</li>" for step, name, why in discloses)
    if lines:
        body += f"<dt>Declared: may have a row per node or edge</dt><dd><ul>{lines}</ul></dd>"
    else:
        body += "<dt>Declared</dt><dd>nothing with a row per node or edge</dd>"
    about = escape(words.about.partition(": ")[2] or words.about)
    return f'<article class="card">{head}<p>{about}</p><dl>{body}</dl></article>'


@dataclass(frozen=True)
class Declared:
    """Paragraphs from the docstring of a method's module, and the disclosures of its steps."""

    about: str  # its first line
    wire: str  # sent data, per client and round
    private: str  # data that stay at the client
    floats: str  # amount of sent data
    discloses: tuple[tuple[str, str, str], ...]  # step, field, reason of replies by node or edge


def declared(config: RunConfig, task: str) -> Declared | str:
    """Return the declarations of a run's method, or a sentence on why they are missing."""
    if "method" in config.objects:
        return "The method was a Python object, which the folder does not contain."
    try:
        method = build_method(config, features=1, classes=2, task=task)
    except AtollError as error:
        return f"The method is not available any more: {error}."
    words = module_doc(type(method))
    wire, private = paragraph(words, "Wire,"), paragraph(words, "Private state:")
    for name, owner in list(owners_of(method).items())[1:]:
        # A method that wraps another method also sends the data of that method.
        base = module_doc(type(owner))
        label = f"{type(owner).__name__} ({name.rpartition('.')[2]})"
        wire += f" {label}: {paragraph(base, 'Wire,')}"
        private += f" {label}: {paragraph(base, 'Private state:')}"
    about, floats = words.partition("\n")[0], paragraph(words, "Floats per client")
    replies = [(step.name, step.discloses) for step in steps_of(method)]
    discloses = tuple((step, name, why) for step, of in replies for name, why in of.items())
    return Declared(about, wire, private, floats, discloses)


def cost(found: Collection) -> str:
    """Show seconds and megabytes, and the score as a function of traffic."""
    tables = by_federation(found, _cost_table)
    points = results.points_for(len(found.columns))
    charts = "".join(_cost_chart(found.group(column), points) for column in found.columns)
    text = (
        "Seconds per round are the median, with evaluation; they depend on the machine and its "
        "load. Megabytes are the training traffic of all clients, up and down, without evaluation; "
        "they do not depend on the machine."
    )
    return f'<p>{text}</p>{tables}<div class="charts">{charts}</div>'


def _cost_table(group: Sequence[ReportedRun]) -> str:
    rows = []
    for one in group:
        seconds, summary = one.run.summary["seconds"], one.run.summary
        each = traffic_by_round(one.run.result).sum(0) / 1e6
        times = [f"{seconds['per_round']:.3f}", *(f"{seconds[k]:.1f}" for k in ("train", "setup"))]
        sizes = f"{each.mean():,.2f}", f"{sum(summary['bytes'].values()) / 1e6:,.1f}"
        ran = f"{summary['engine']} on {summary['device']}"
        rows.append([name_cell(one), *times, *sizes, ran])
    heads = "method", "s / round", "s training", "s set-up", "MB / round", "MB in all", "ran"
    table = make_table(heads, rows, title="All seeds together; rounds of one seed")
    return html(table, label=f"{group[0].column}: cost")


def _cost_chart(group: Sequence[ReportedRun], points: int) -> str:
    """Plot scores against traffic, unless all methods send about the same in each round."""
    lines, speeds = list[Line](), list[float]()
    for one in group:
        each = traffic_by_round(one.run.result).sum(0) / 1e6
        if each.sum() > 0.01:
            speeds += [each.min(), each.max()]
            lines.append(replace(results.seed_line(one), x=each.cumsum()))
    if len(lines) < 2 or max(speeds) <= 1.1 * min(speeds):
        return ""
    title, name = f"{group[0].column}: score and traffic", label_of(group[0].metric)
    x_name = "MB sent so far, one seed"
    return results.line_chart(title, lines[: results.MAX_LINES], x_name, f"test {name}", points)
