"""What crossed the wire, what never did, and what it all cost."""

from __future__ import annotations

from html import escape

import numpy as np

from atoll.engines.ledger import SCORE
from atoll.report import charts
from atoll.report.charts import Line, Wide, chip, key
from atoll.report.collect import METRIC_NAMES, Collection, Shown
from atoll.report.results import MAX_LINES, points_for, seed_line
from atoll.report.wire import Declared, declared


def traffic_by_round(one: Shown) -> np.ndarray:
    """Bytes of training in each round, down and up, mean over seeds, (2, R)."""
    rounds = one.config.rounds or 1
    each = [seed.ledger.by_round(rounds) for seed in one.run.result.seeds]
    return np.asarray(np.mean(each, axis=0))


def crossed(found: Collection) -> str:
    """What crossed the wire, counted, and what each method says it sends and keeps."""
    parts = []
    for column in found.columns:
        group = found.group(column)
        by_round = {one.row: traffic_by_round(one) for one in group}
        top = max(float(found.sum(0).mean()) for found in by_round.values())
        rows = [row for one in group for row in _traffic_rows(one, by_round[one.row], top)]
        heads: list[str | Wide] = [
            "method",
            Wide("MB in a round", key(down="down", up="up")),
            "step",
            "messages",
            "MB down",
            "MB up",
            "each round",
        ]
        body = charts.table(
            "In a round, all clients together, mean over rounds and seeds",
            heads,
            rows,
            raw=True,
            left=3,
            label=f"{column}: traffic",
        )
        parts.append(f"<h3>{escape(column)}</h3>{body}")
    return (
        "<p>Counted by the ledger, message by message. Scoring is kept apart: it is how this page "
        "got its numbers, not part of a method.</p>" + "".join(parts) + _stayed(found)
    )


def _traffic_rows(one: Shown, by_round: np.ndarray, top: float) -> list[list[str]]:
    rounds = max(1, (one.config.rounds or 1) * len(one.run.result.seeds))
    steps: dict[str, np.ndarray] = {}
    for seed in one.run.result.seeds:
        for step, row in seed.ledger.by_step().items():
            amounts = np.array([row["messages"], row["down"], row["up"]], dtype=float)
            steps[step] = steps.get(step, np.zeros(3)) + amounts
    mean = by_round.mean(1)
    alt = f"{one.row}: {by_round.sum(0)[0] / 1e6:.2f} MB in the first round, "
    alt += f"{by_round.sum(0)[-1] / 1e6:.2f} in the last"
    each = by_round.sum(0)
    line = "the same" if np.ptp(each) <= 0.01 * each.max() else charts.spark(each, alt)
    lines = []
    for number, (step, (messages, down, up)) in enumerate(
        sorted(steps.items(), key=lambda item: item[0] == SCORE)
    ):
        first = number == 0
        label = "score (apart)" if step == SCORE else step
        bar = charts.bars([(float(mean[0]), "down"), (float(mean[1]), "up")], top) if first else ""
        lines.append(
            [
                chip(one.row, one.style)
                if first
                else f'<span class="hidden">{escape(one.row)}</span>',
                bar,
                f'<span class="{"quiet" if step == SCORE else ""}">{escape(label)}</span>',
                f"{messages / rounds:,.0f}",
                _megabytes(down / rounds),
                _megabytes(up / rounds),
                line if first else "",
            ]
        )
    return lines


def _megabytes(amount: float) -> str:
    if amount and amount < 5000:
        return f"{amount:,.0f} B"
    return f"{amount / 1e6:,.2f}"


def _stayed(found: Collection) -> str:
    """By the method's own declarations: what it sends, what it keeps, what it discloses."""
    seen: dict[str, str] = {}
    for one in found.shown:
        if one.config.method in seen:
            continue
        task = "graph" if "graphs" in one.run.result.federation else "node"
        words = declared(one.config, task)
        seen[one.config.method] = _card(one, words)
    rule = (
        "<h3>What never crossed</h3><p>Unless a method declares otherwise below, <b>features, "
        "edges and labels of single nodes stay with their client</b>, and so does the private "
        "state. A reply is a record of tensors; one with a row for each node or edge is refused by "
        "the wire engine and by real sites unless the method declares it with its reason, and the "
        "contract tests hold every "
        "method to that on every engine. Scoring does send counts (true by predicted class, on "
        "training, validation and test nodes): they tell how many nodes of each class a client "
        "has.</p>"
    )
    return f'{rule}<div class="cards">{"".join(seen.values())}</div>'


def _card(one: Shown, words: Declared | str) -> str:
    head = f"<h4>{escape(one.config.method)}</h4>"
    if isinstance(words, str):
        return f'<article class="card">{head}<p>{escape(words)}</p></article>'
    rows = [
        ("Crosses, per client and round", words.wire),
        ("Stays", words.private),
        ("Amount", words.floats),
    ]
    body = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows if text)
    if words.discloses:
        told = "".join(
            f"<li><code>{escape(step)}.{escape(name)}</code>: {escape(why)}</li>"
            for step, name, why in words.discloses
        )
        body += f"<dt>Declared: may have a row per node or edge</dt><dd><ul>{told}</ul></dd>"
    else:
        body += "<dt>Declared</dt><dd>nothing with a row per node or edge</dd>"
    return (
        f'<article class="card">{head}<p>{escape(words.about.partition(": ")[2] or words.about)}'
        f"</p><dl>{body}</dl></article>"
    )


def cost(found: Collection) -> str:
    """Seconds and megabytes, and what a megabyte bought."""
    parts, figures = [], []
    for column in found.columns:
        group = found.group(column)
        rows, lines, speeds = [], [], []
        for one in group:
            seconds, summary = one.run.summary["seconds"], one.run.summary
            each = traffic_by_round(one).sum(0) / 1e6
            total = sum(summary["bytes"].values()) / 1e6
            rows.append(
                [
                    chip(one.row, one.style),
                    f"{seconds['per_round']:.3f}",
                    f"{seconds['train']:.1f}",
                    f"{seconds['setup']:.1f}",
                    f"{each.mean():,.2f}",
                    f"{total:,.1f}",
                    escape(f"{summary['engine']} on {summary['device']}"),
                ]
            )
            if each.sum() > 0.01:
                line = seed_line(one)
                speeds += [each.min(), each.max()]
                lines.append(
                    Line(line.name, line.style, each.cumsum(), line.mean, line.low, line.high)
                )
        heads = [
            "method",
            "s / round",
            "s training",
            "s set-up",
            "MB / round",
            "MB in all",
            "ran",
        ]
        parts.append(
            f"<h3>{escape(column)}</h3>"
            + charts.table(
                "All seeds together; a round of one seed",
                heads,
                rows,
                raw=True,
                label=f"{column}: cost",
            )
        )
        # Where all send alike, the chart would be that of the rounds once more.
        if len(lines) > 1 and max(speeds) > 1.1 * min(speeds):
            figures.append(
                charts.line_chart(
                    f"{column}: what traffic buys",
                    lines[:MAX_LINES],
                    x_name="MB moved so far, one seed",
                    y_name=f"test {METRIC_NAMES[group[0].metric]}",
                    points=points_for(len(found.columns)),
                )
            )
    text = (
        "Seconds of a round are the median, with scoring; they depend on the machine and on what "
        "else ran there. Megabytes are training traffic of all clients, up and down, without "
        "scoring; they do not."
    )
    return f'<p>{text}</p>{"".join(parts)}<div class="charts">{"".join(figures)}</div>'
