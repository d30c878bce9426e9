"""The sections of the page, each from what `collect` found."""

from __future__ import annotations

from html import escape
from urllib.parse import quote

import numpy as np

from atoll.engines.ledger import SCORE
from atoll.study.config import config_text
from atoll.study.report import charts
from atoll.study.report.charts import Line, Wide, key, style_class
from atoll.study.report.collect import METRIC_NAMES, Collection, Shown, main_table
from atoll.study.report.wire import Declared, declared
from atoll.study.show import counted
from atoll.study.tables import ResultTable, result_csv


def chip(name: str, style: int) -> str:
    """A row's name with its colour beside it."""
    return f'<span class="chip {style_class(style)}"></span>{escape(name)}'


def overview(found: Collection) -> str:
    """What was run, in a few sentences, and what is missing."""
    seeds = sorted({one.config.seeds for one in found.shown})
    rounds = sorted({one.config.rounds or 0 for one in found.shown})
    methods = {one.config.method for one in found.shown}
    facts = [
        counted(len(methods), "method"), counted(len(found.columns), "federation"),
        counted(len(found.shown), "run"), _span(seeds, "seed"), _span(rounds, "round"),
    ]  # fmt: skip
    tiles = "".join(
        f"<li><b>{number}</b> {escape(word)}</li>"
        for number, _, word in (fact.partition(" ") for fact in facts)
    )
    lines = [f"<p>{line}</p>" for line in _findings(found)]
    return f'<ul class="tiles">{tiles}</ul>{_gaps(found)}{"".join(lines)}{_settings(found)}'


def _span(numbers: list[int], thing: str) -> str:
    if len(numbers) == 1:
        return counted(numbers[0], thing)
    return f"{numbers[0]}–{numbers[-1]} {thing}s"


def _findings(found: Collection) -> list[str]:
    """Who is best where, and by how much over Local."""
    table = main_table(found)
    lines = []
    for column, head in zip(found.columns, table.columns, strict=True):
        best = [row for row in table.rows if row in table.best(head)]
        if not best:
            continue
        mean, spread = table.texts(best[0], head)
        names = " and ".join(f"<b>{escape(name)}</b>" for name in best)
        line = f"<b>{escape(head)}</b>: best is {names} with {mean}"
        line += f" ± {spread}" if spread else ""
        alone = [one for one in found.group(column) if one.config.method == "local"]
        if alone and alone[0].row not in best:
            gain = 100 * (table.cell(best[0], head).mean - table.cell(alone[0].row, head).mean)
            line += f", {gain:.1f} points above working alone"
        lines.append(line + ".")
    return lines


def _gaps(found: Collection) -> str:
    """What was asked for and is not on the page, and what folders lack."""
    notes = [
        f"<li><b>{escape(gap.name)}</b>: {escape(gap.kind)}"
        + (f" ({escape(gap.why)})" if gap.why != gap.kind else "")
        + "</li>"
        for gap in found.missing
    ]
    if notes:
        total = len(notes) + len(found.shown)
        head = (
            f"{len(notes)} of {counted(total, 'run')} {'is' if len(notes) == 1 else 'are'} not here"
        )
        notes = [f'<div class="alert" role="note"><h3>{head}</h3><ul>{"".join(notes)}</ul></div>']
    lacking = [(one, note) for one in found.shown for note in one.run.notes]
    if lacking:
        text = "".join(f"<li><b>{escape(one.row)}</b>, {escape(one.column)}: {escape(note)}</li>"
                       for one, note in lacking)  # fmt: skip
        notes.append(f'<div class="alert" role="note"><h3>Older runs</h3><ul>{text}</ul></div>')
    return "".join(notes)


def _settings(found: Collection) -> str:
    """One line for each federation: how it was made and how it was trained."""
    rows = []
    for column in found.columns:
        group = found.group(column)
        config, result = group[0].config, group[0].run.result
        rows.append([
            column, str(result.clients), str(config.partition), str(config.split),
            config.protocol, f"{config.fraction:.0%}",
            ", ".join(sorted({str(one.config.epochs) for one in group})),
        ])  # fmt: skip
    heads = ["federation", "clients", "partition", "split", "protocol", "in a round", "epochs"]
    return charts.table("How the federations were made", heads, rows, left=9)


def results(found: Collection) -> str:
    """The table, and for each federation every method with its spread."""
    table = main_table(found)
    link = "data:text/csv;charset=utf-8," + quote(result_csv([table]))
    download = f'<p><a download="results.csv" href="{link}">This table as CSV</a></p>'
    return result_table(table, found) + download + "".join(
        _details(found, column) for column in found.columns
    )  # fmt: skip


def result_table(table: ResultTable, found: Collection) -> str:
    """A table with the best in bold."""
    styles = {one.row: one.style for one in found.shown}
    rows = []
    for row in table.rows:
        cells = [chip(row, styles[row]) if row in styles else escape(row)]
        for column in table.columns:
            mean, spread = table.texts(row, column)
            text = f"<b>{escape(mean)}</b>" if row in table.best(column) else escape(mean)
            cells.append(text + (f' <span class="pm">± {spread}</span>' if spread else ""))
        rows.append(cells)
    body = charts.table(table.title, [table.corner, *table.columns], rows, raw=True)
    return f'{body}<p class="note">{escape(table.caption)} Best in bold.</p>'


def _details(found: Collection, column: str) -> str:
    group = found.group(column)
    metric = group[0].metric
    values = {one.row: _percents(one, f"test_{metric}") for one in group}
    every = [v for seeds in values.values() for v in seeds]
    if not every:
        return ""
    low, high = min(every), max(every)
    room = max(0.08 * (high - low), 0.5)
    low, high = low - room, high + room
    rows = [
        [
            chip(one.row, one.style), charts.whisker(values[one.row], low, high, one.style),
            _text(one, f"test_{metric}"), escape(one.run.result.scored),
            _text(one, "local_test_accuracy"), _text(one, "test_macro_f1"),
            _text(one, "best_round", 1.0, 0),
        ]
        for one in group if values[one.row]
    ]  # fmt: skip
    heads = [
        "method", Wide("seeds, mean ± std", charts.scale(low, high)), METRIC_NAMES[metric], "scored model", "after training", "macro F1",
        "best round",
    ]  # fmt: skip
    body = charts.table(f"{column}: every method", heads, rows, raw=True)
    return f"<h3>{escape(column)}</h3>{body}"


def _percents(one: Shown, name: str) -> list[float]:
    return [100 * v for v in one.run.summary["metrics"].get(name, {}).get("per_seed", [])]


def _text(one: Shown, name: str, scale: float = 100.0, digits: int = 1) -> str:
    seeds = one.run.summary["metrics"].get(name, {}).get("per_seed", [])
    if not seeds:
        return "–"
    mean = f"{scale * np.mean(seeds):.{digits}f}"
    if len(seeds) < 2:
        return mean
    return f'{mean} <span class="pm">± {scale * np.std(seeds, ddof=1):.{digits}f}</span>'


def convergence(found: Collection) -> str:
    """A chart for each federation: the mean over clients after each round."""
    figures = []
    for column in found.columns:
        group = found.group(column)
        name = METRIC_NAMES[group[0].metric]
        if len(group) == 1:
            lines = _one_run_lines(group[0])
        else:
            lines = [seed_line(one) for one in group]
        figures.append(charts.line_chart(column, lines, x_name="round", y_name=f"test {name}"))
    several = any(one.config.seeds > 1 for one in found.shown)
    text = (
        "Mean over clients of the scored model on test nodes (or graphs) after each round"
        + ("; line: mean over seeds, band: lowest to highest seed" if several else "")
        + ". The first climb may be cut off below. "
        "Nobody trains or picks a round with these numbers."
    )
    if len(found.shown) == 1:
        text = "Mean over clients after each round" + (
            "; line: mean over seeds, band: lowest to highest seed." if several else "."
        )
    return f'<p>{text}</p><div class="charts">{"".join(figures)}</div>'


def seed_line(
    one: Shown, name: str = "", scored: str = "", role: str = "test", style: int | None = None
) -> Line:
    """A run's line with its band of seeds."""
    result = one.run.result
    seeds = 100 * result.curve(one.metric, role, scored or None)
    return Line(
        name or one.row, one.style if style is None else style, np.arange(1, seeds.shape[1] + 1),
        seeds.mean(0), seeds.min(0), seeds.max(0),
    )  # fmt: skip


def _one_run_lines(one: Shown) -> list[Line]:
    """For a run alone: what is scored, on three parts of the data, and the local model."""
    scored = one.config.evaluate or "deployed"
    other = "local" if scored == "deployed" else "deployed"
    lines = [
        seed_line(one, name, scored, role, style)
        for style, (name, role) in enumerate(
            (("test", "test"), ("validation", "val"), ("training", "train"))
        )
    ]
    name = "local model, test" if other == "local" else "deployed, test"
    return [line for line in [*lines, seed_line(one, name, other, "test", 3)]
            if np.isfinite(line.mean).all()]  # fmt: skip


def clients(found: Collection) -> str:
    """How the clients fare with each method."""
    parts = []
    for column in found.columns:
        group = found.group(column)
        metric = group[0].metric
        each = {one.row: 100 * _of_clients(one) for one in group}
        known = np.concatenate([v[np.isfinite(v)] for v in each.values()])
        if not known.size:
            continue
        low, high = float(known.min()), float(known.max())
        room = max(0.04 * (high - low), 0.5)
        low, high = low - room, high + room
        alone = next((one for one in group if one.config.method == "local"), None)
        rows = []
        for one in group:
            own = each[one.row]
            gain = "–"
            if alone is not None and one is not alone and len(own) == len(each[alone.row]):
                better = int((own > each[alone.row] + 1e-9).sum())
                gain = f"{better} of {int(np.isfinite(own).sum())}"
            least, middle, most = (np.nanquantile(own, q) for q in (0, 0.5, 1))
            rows.append([
                chip(one.row, one.style), charts.strip(own, low, high, one.style),
                f"{least:.1f}", f"{middle:.1f}", f"{most:.1f}", f"{np.nanstd(own):.1f}", gain,
            ])  # fmt: skip
        wide = Wide("clients, quartiles, median", charts.scale(low, high))
        heads = ["method", wide, "worst", "median", "best", "std", "gain over local"]
        if alone is None:
            heads, rows = heads[:-1], [row[:-1] for row in rows]
        body = charts.table(
            f"{column}: test {METRIC_NAMES[metric]} of each client, in percent", heads, rows,
            raw=True,
        )  # fmt: skip
        parts.append(f"<h3>{escape(column)}</h3>{body}")
    text = (
        "Each dot is a client: its score at the round that the protocol picks, mean over seeds. "
        "Where every seed divides the data anew, client 3 of one seed is not client 3 of another; "
        "the spread still shows how unequal clients fare."
    )
    return f"<p>{text}</p>{''.join(parts)}"


def _of_clients(one: Shown) -> np.ndarray:
    values = one.run.result.of_clients(one.metric)
    counts = np.isfinite(values).sum(0)
    total = np.where(np.isfinite(values), values, 0.0).sum(0)
    return np.asarray(
        np.divide(total, counts, out=np.full(values.shape[1], np.nan), where=counts > 0)
    )


def relations(found: Collection) -> str:
    """How alike clients seemed to the methods that compare them, and how models were mixed."""
    parts = []
    for column in found.columns:
        figures = [figure for one in found.group(column) for figure in _relation(one)]
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
            figures.append(charts.heat_map(
                f"{one.row}: similarity", alike, low=low, note=_factors(known["similarity"]),
            ))  # fmt: skip
    if "mixing" in known:
        share = _mean_factor(known["mixing"])
        if np.isfinite(share).any():
            figures.append(charts.heat_map(
                f"{one.row}: mixture", share, columns="whose weights", low=0.0,
                note=_factors(known["mixing"]),
            ))  # fmt: skip
    if "cluster" in known:
        label = known["cluster"].astype(int)
        lines = "".join(
            f"<li>{', '.join(map(str, np.flatnonzero(label == number)))}</li>"
            for number in range(label.max() + 1)
        )
        figures.append(
            f'<figure class="heat"><figcaption>{escape(one.row)}: clusters of clients</figcaption>'
            f'<ol start="0" class="clusters">{lines}</ol><p class="note">Members of a cluster share '
            "a model.</p></figure>"
        )
    return figures


def _mean_factor(matrix: np.ndarray) -> np.ndarray:
    return matrix if matrix.ndim == 2 else np.asarray(matrix.mean(0))


def _factors(matrix: np.ndarray) -> str:
    return f"Mean of {len(matrix)} factors." if matrix.ndim == 3 else ""


def heterogeneity(found: Collection) -> str:
    """How the clients of each federation differ."""
    parts = []
    for column in found.columns:
        one = next((o for o in found.group(column) if o.run.federation), None)
        body = (
            _federation(one) if one else f"<p>{escape(_not_measured(found.group(column)[0]))}</p>"
        )
        parts.append(f"<h3>{escape(column)}</h3>{body}")
    text = (
        "The first seed's clients, measured when the run was saved. Divergences are "
        "Jensen-Shannon's, from 0 (alike) to 1 (nothing in common). Only a simulation knows all "
        "this: nothing of it was sent."
    )
    return f"<p>{text}</p>{''.join(parts)}"


def _not_measured(one: Shown) -> str:
    if "data" in one.config.objects and one.config.partition == "given" and not one.run.federation:
        return "Not known: the data are their owners', or were given as an object too large to measure."
    if "graphs" in one.run.result.federation:
        return "Not measured for sets of graphs; atoll clusters compares the graphs of two clients."
    return (
        "Not measured: the run was saved by an earlier version, or the federation is too large to "
        "measure in passing; atoll inspect does."
    )


def _federation(one: Shown) -> str:
    facts = one.run.federation
    labels, nodes = facts["labels"], facts["nodes"]
    total = labels.sum(1, keepdims=True)
    shares = np.divide(labels, total, out=np.zeros(labels.shape), where=total > 0)
    figures = [charts.heat_map(
        "Share of each class among a client's nodes", shares, columns="class", low=0.0,
        texts=np.array([[f"{100 * v:.0f}" for v in row] for row in shares]), note="In percent.",
    )]  # fmt: skip
    for name, words in (
        ("label", "labels"), ("feature", "features of linked nodes"),
        ("structure", "structure (anonymous walks)"),
    ):  # fmt: skip
        matrix = facts[f"{name}_divergence"]
        upper = matrix[np.triu_indices(len(matrix), 1)]
        upper = upper[np.isfinite(upper)]
        if not upper.size:
            continue
        note = f"Mean {upper.mean():.3f}, largest {upper.max():.3f}. Shades are this map's own."
        off = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
        figures.append(charts.heat_map(f"Divergence of {words}", off, low=0.0, note=note))
    return _lost(facts) + _sizes(facts, nodes) + f'<div class="maps">{"".join(figures)}</div>'


def _lost(facts: object) -> str:
    lost, total = (float(facts[key]) for key in ("edges_lost", "edges_total"))  # type: ignore[index]
    if not np.isfinite(lost) or not total:
        return ""
    return (
        f"<p>{lost:,.0f} of {total:,.0f} edges ({lost / total:.1%}) lie between clients: nobody "
        "has them.</p>"
    )


MAX_CLIENT_ROWS = 40


def _sizes(facts: object, nodes: np.ndarray) -> str:
    get = facts.__getitem__  # type: ignore[attr-defined]
    top = float(nodes.max())
    rows = []
    for k in range(min(len(nodes), MAX_CLIENT_ROWS)):
        roles = get("roles")[k]
        rest = nodes[k] - roles.sum()
        parts = [(float(n), f"role{i}") for i, n in enumerate([*roles, rest])]
        homophily = get("homophily")[k]
        rows.append([
            str(get("clients")[k]), charts.bars(parts, top), f"{nodes[k]:,}",
            " / ".join(f"{n:,}" for n in roles), f"{get('edges')[k]:,}",
            f"{get('mean_degree')[k]:.1f}", f"{get('isolated')[k]:,}",
            f"{homophily:.2f}" if np.isfinite(homophily) else "–",
        ])  # fmt: skip
    heads = [
        "client", Wide("size", key(role0="training", role1="validation", role2="test")), "nodes", "train / val / test", "edges", "degree", "isolated", "homophily",
    ]  # fmt: skip
    cut = f" (the first {MAX_CLIENT_ROWS} of {len(nodes)})" if len(nodes) > MAX_CLIENT_ROWS else ""
    body = charts.table(f"Clients{cut}", heads, rows, raw=True)
    return body


def traffic_by_round(one: Shown) -> np.ndarray:
    """Bytes of training in each round, down and up, mean over seeds, (2, R)."""
    rounds = one.config.rounds or 1
    found = np.zeros((2, rounds))
    for seed in one.run.result.seeds:
        for entry in seed.ledger.entries:
            if entry.step != SCORE:  # what `init` asks for is counted with the first round
                place = max(0, entry.round)
                found[:, place] += np.array([entry.down, entry.up]) * entry.size
    return found / max(1, len(one.run.result.seeds))


def crossed(found: Collection) -> str:
    """What crossed the wire, counted, and what each method says it sends and keeps."""
    parts = []
    for column in found.columns:
        group = found.group(column)
        by_round = {one.row: traffic_by_round(one) for one in group}
        top = max(float(found.sum(0).mean()) for found in by_round.values())
        rows = [row for one in group for row in _traffic_rows(one, by_round[one.row], top)]
        heads = [
            "method",
            Wide("MB in a round", key(down="down", up="up")),
            "step",
            "messages",
            "MB down",
            "MB up",
            "each round",
        ]
        body = charts.table(f"{column}: bytes in a round, mean over rounds and seeds, all clients",
                            heads, rows, raw=True)  # fmt: skip
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
    line = charts.spark(by_round.sum(0), alt) if by_round.shape[1] > 1 else ""
    lines = []
    for number, (step, (messages, down, up)) in enumerate(
        sorted(steps.items(), key=lambda item: item[0] == SCORE)
    ):
        first = number == 0
        label = "score (apart)" if step == SCORE else step
        bar = charts.bars([(float(mean[0]), "down"), (float(mean[1]), "up")], top) if first else ""
        lines.append([
            chip(one.row, one.style) if first else f'<span class="hidden">{escape(one.row)}</span>',
            bar, f'<span class="{"quiet" if step == SCORE else ""}">{escape(label)}</span>',
            f"{messages / rounds:,.0f}", _megabytes(down / rounds), _megabytes(up / rounds),
            line if first else "",
        ])  # fmt: skip
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
        "<h3>What never crossed</h3><p><b>Features, edges and labels of single nodes stay with "
        "their client</b>, and so does the private state named below. A reply is a record of "
        "tensors; one with a row for each node or edge is refused by the wire engine and by real "
        "sites unless the method declares it with its reason, and the contract tests hold every "
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
        ("Crosses, per client and round", words.wire), ("Stays", words.private),
        ("Amount", words.floats),
    ]  # fmt: skip
    body = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows if text)
    if words.discloses:
        told = "".join(f"<li><code>{escape(step)}.{escape(name)}</code>: {escape(why)}</li>"
                       for step, name, why in words.discloses)  # fmt: skip
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
        rows, lines = [], []
        for one in group:
            seconds, summary = one.run.summary["seconds"], one.run.summary
            each = traffic_by_round(one).sum(0) / 1e6
            total = sum(summary["bytes"].values()) / 1e6
            rows.append([
                chip(one.row, one.style), f"{seconds['per_round']:.3f}", f"{seconds['train']:.1f}",
                f"{seconds['setup']:.1f}", f"{each.mean():,.2f}", f"{total:,.1f}",
                escape(f"{summary['engine']} on {summary['device']}"),
            ])  # fmt: skip
            if each.sum() > 0.01:
                line = seed_line(one)
                lines.append(Line(line.name, line.style, each.cumsum(), line.mean, line.low,
                                  line.high))  # fmt: skip
        heads = [
            "method", "s / round", "s training", "s set-up", "MB / round", "MB in all", "ran",
        ]  # fmt: skip
        parts.append(charts.table(f"{column}: what it cost, all seeds together", heads, rows,
                                  raw=True))  # fmt: skip
        if len(lines) > 1:
            figures.append(charts.line_chart(
                f"{column}: what traffic buys", lines, x_name="MB moved so far, one seed",
                y_name=f"test {METRIC_NAMES[group[0].metric]}",
            ))  # fmt: skip
    text = (
        "Seconds of a round are the median, with scoring; they depend on the machine and on what "
        "else ran there. Megabytes are training traffic of all clients, up and down, without "
        "scoring; they do not."
    )
    return f'<p>{text}</p>{"".join(parts)}<div class="charts">{"".join(figures)}</div>'


def environment(found: Collection) -> str:
    """Versions and machines."""
    kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for one in found.shown:
        key = tuple((k, str(v)) for k, v in one.run.result.environment.items())
        kinds.setdefault(key, []).append(f"{one.row} on {one.column}")
    parts = []
    for number, (key, names) in enumerate(kinds.items(), start=1):
        head = "All runs" if len(kinds) == 1 else f"Machine {number}: {', '.join(names[:6])}"
        head += f" and {len(names) - 6} more" if len(kinds) > 1 and len(names) > 6 else ""
        parts.append(charts.table(head, ["what", "version"], [list(pair) for pair in key], left=2))
    return "".join(parts)


def again(found: Collection) -> str:
    """Commands and configurations."""
    parts = []
    for folder, about in found.studies.items():
        if about.get("command"):
            parts.append(
                f"<p>The whole study, in <code>{escape(folder.name)}</code>:</p>"
                f"<pre tabindex=0><code>{escape(str(about['command']))}</code></pre>"
            )
    parts.append(
        "<p>One run: save its configuration below as <code>config.toml</code> (it is also in its "
        "folder), then:</p><pre tabindex=0><code>atoll run --config config.toml --out again</code>"
        "</pre>"
    )
    for one in found.shown:
        note = ""
        if one.config.objects:
            names = " and ".join(one.config.objects)
            note = f"<p>Started in Python with a {escape(names)} object, which no file holds.</p>"
        parts.append(
            f"<details><summary>{escape(one.row)}, {escape(one.column)}</summary>{note}"
            f"<pre tabindex=0><code>{escape(config_text(one.config))}</code></pre></details>"
        )
    return "".join(parts)
