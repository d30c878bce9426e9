"""What `atoll tune-clusters` shows: the proposal and its reasons, files and the picture."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from atoll.analyses.cluster_thresholds import STEPS, ThresholdProposal
from atoll.experiment.command import run_command
from atoll.present.chart import (
    BLUE,
    DASHED,
    GREY,
    MAX_ROWS,
    RED,
    SHADE,
    Axis,
    Chart,
    Heat,
    Line,
    Mark,
    Panels,
    Rule,
    named,
    number_text,
    number_words,
)
from atoll.present.layout import Part, Words, heading, quiet
from atoll.present.tables import Column, Table, make_table


def threshold_parts(found: ThresholdProposal, *, grid: bool) -> list[Part]:
    """Norms, proposal and doubts; the command that uses it belongs below, unwrapped."""
    parts: list[Part] = [heading(title(found)), "", _norm_table(found), "", *reasons(found)]
    parts += [Words(f"But {line}.", "yellow") for line in found.warnings()]
    if grid:
        parts += ["", _grid_table(found), quiet(_GRID)]
    return parts


_GRID = (
    "Rounds, counted from 0, in which the first split would come; – in none of these. The "
    "proposal is the fourth row and column."
)


def title(found: ThresholdProposal) -> str:
    """The run behind the proposal."""
    config = found.config
    return (
        f"{config.method} without splits: {config.data}, {len(found.clients)} clients, "
        f"{config.partition}, {len(found.together)} rounds, protocol {config.protocol}"
    )


def reasons(found: ThresholdProposal) -> list[str]:
    """One line for each of the two numbers, and one for their effect."""
    first = found.first_split(found.eps1, found.eps2)
    when = f"in round {first:.0f}" if np.isfinite(first) else "in none of these rounds"
    return [
        f"eps1 = {found.eps1:g}: the mean update is shorter in one round of ten, in the second "
        f"half (median {found.calm:.3g})",
        f"eps2 = {found.eps2:g}: the largest update is longer in all those rounds (median of the "
        f"second half {found.restless:.3g})",
        f"The first split would come {when} (earliest: {found.may_split}).",
    ]


def command(found: ThresholdProposal) -> str:
    """The command that runs the method with the proposal and the user's other options."""
    settings = {**found.asked.set, "eps1": found.eps1, "eps2": found.eps2}
    # The rounds were for tuning; a run takes the protocol's.
    return run_command(msgspec.structs.replace(found.asked, rounds=None, set=settings))


def _norm_table(found: ThresholdProposal) -> Table:
    rows = [("mean of all", found.together), ("largest", found.largest)]
    clients = zip((f"client {name}" for name in found.clients), found.norms.T, strict=True)
    lines = []
    for name, values in [*rows, *clients][: MAX_ROWS + len(rows)]:
        tail = values[found.tail :]
        numbers = (values[0], np.median(tail), tail.min(), tail.max())
        lines.append([name, *(f"{number:.3g}" for number in numbers)])
    names = ("first round", "median, second half", "lowest", "highest")
    columns = [Column("norm of the update", "left"), *(Column(n, wrap=True) for n in names)]
    return make_table(columns, lines, sections=[len(rows)])


def _grid_table(found: ThresholdProposal) -> Table:
    first, second, rounds = found.grid()
    lines = [
        [f"{value:g}", *(number_text(number, 0) for number in line)]
        for value, line in zip(first, rounds, strict=True)
    ]
    return make_table(["eps1 | eps2", *(f"{value:g}" for value in second)], lines, left=0)


def threshold_files(found: ThresholdProposal) -> dict[str, object]:
    """norms.csv, tune-clusters.json and tune-clusters.png, for `write_all`."""
    names = ["round", "mean", "largest", *(f"client {name}" for name in found.clients)]
    norms = np.column_stack([found.together, found.largest, found.norms])
    lines = [[n, *(f"{value:.6g}" for value in line)] for n, line in enumerate(norms)]
    return {
        "norms.csv": make_table(names, lines),
        "tune-clusters.json": summary(found),
        "tune-clusters.png": chart(found),
    }


def summary(found: ThresholdProposal) -> dict[str, object]:
    """The object that `--json` prints; rounds count from 0, null is never."""
    config = found.config
    first, second, rounds = found.grid()
    return {
        "method": config.method,
        "data": config.data,
        "clients": list(found.clients),
        "partition": config.partition,
        "protocol": config.protocol,
        "seed": config.seed,
        "rounds": len(found.together),
        **{name: getattr(found, name) for name in ("eps1", "eps2", "calm", "restless", "falling")},
        "first_split": found.first_split(found.eps1, found.eps2),
        "may_split": found.may_split,
        "warnings": found.warnings(),
        "command": command(found),
        "grid": {"eps1": first, "eps2": second, "first_split": rounds},
    }


def chart(found: ThresholdProposal) -> Panels:
    """The norms and the two lines through them; the first split for other choices."""
    panels = (_norm_chart(found), _grid_chart(found))
    return Panels(title(found), (panels,), (14, 5.6), widths=(1.25, 1))


def _norm_chart(found: ThresholdProposal) -> Chart:
    rounds = np.arange(len(found.together))
    marks: list[Mark] = [Rule(found.tail, upright=True, to=rounds[-1], colour=SHADE)]
    clients = [Line(rounds, norms, GREY, width=0.8, opacity=0.7) for norms in found.norms.T]
    marks += [replace(clients[0], name="each client"), *clients[1:]]
    marks.append(Line(rounds, found.largest, RED, "largest", width=1.6))
    marks.append(Line(rounds, found.together, BLUE, "mean update", width=2.2))
    for name, value, colour in (("ε1", found.eps1, BLUE), ("ε2", found.eps2, RED)):
        words = f"{name} = {value:g}"
        marks.append(Rule(value, colour=colour, dash=DASHED, width=1.2, text=words))
    return Chart(
        "Norms while nothing is split (shaded: what the proposal reads)",
        Axis("round", 0, rounds[-1]),
        Axis("norm of the update", log=True),
        tuple(marks),
        legend="below",
    )


def _grid_chart(found: ThresholdProposal) -> Chart:
    first, second, rounds = found.grid()
    place = STEPS.index(0)
    heat = Heat(
        rounds,
        number_words(rounds, 0),
        high=max(len(found.together) - 1.0, 1.0),
        frame=(place, place, 1, 1),
    )
    return Chart(
        "Round of the first split (grey: none; frame: the proposal)",
        named("ε2", [f"{value:g}" for value in second]),
        named("ε1", [f"{value:g}" for value in first]),
        (heat,),
    )
