"""`atoll claim`: check a claim of a paper numerically."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli import options
from atoll.cli.analyses import checked_console
from atoll.cli.common import AtollSubgroup, config_of, print_notes, print_written
from atoll.cli.options import PATH, option

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.analyses.claim import Claim

OUT = option("--out DIR", "Write table, numbers and plot into this folder.", PATH)


@click.group(cls=AtollSubgroup)
def claim() -> None:
    """Check claims of published papers numerically."""


@claim.command(
    short_help="Check FedATH's bound on divergence (Corollary 5.2).",
    params=[
        *options.FEDERATION,
        *(options.ROUNDS, options.EPOCHS, options.SETTINGS, options.SEEDS, options.SEED),
        option("--every N", "Measure every N rounds.", click.IntRange(min=1), default=20),
        OUT,
    ],
)
def bound(out: Path | None, every: int, **given: Any) -> None:
    """Check Corollary 5.2 of FedATH: do edge weights reduce the bound on clients' divergence?"""
    from atoll.analyses.bound import follow_bound
    from atoll.experiment.config import resolve
    from atoll.present.terminal import progress

    config, console = config_of(given, method="fedath"), checked_console(out)
    with progress(console, config.seeds * (resolve(config)[0].rounds or 1)) as move:
        found = follow_bound(config, every=every, on_round=lambda done: move(1))
    show_claim(console, found, out)


@claim.command(
    short_help="Check GCFL's Propositions 4.1 to 4.3 on weights.",
    params=[*options.FEDERATION, options.SEED_OF_DATA, OUT],
)
def weights(out: Path | None, **given: Any) -> None:
    """Check Propositions 4.1 to 4.3 of GCFL: do weights follow structure, features and task?"""
    from atoll.analyses.linear_weights import weight_claim
    from atoll.experiment.problem import Problem

    config, console = config_of(given), checked_console(out)
    made = Problem.of(config).divide(config.seed)
    print_notes(console, made.notes)
    show_claim(console, weight_claim(made.federation, seed=config.seed), out)


@claim.command(
    short_help="Check FedTAD's cost formula (Result 6).",
    params=[
        option("--doublings N", "Double each size N times.", click.IntRange(min=1), default=4),
        OUT,
    ],
)
def cost(out: Path | None, doublings: int) -> None:
    """Check Result 6 of FedTAD: how does the cost grow with each size in its formula?"""
    from atoll.analyses.distillation_cost import cost_claim

    console = checked_console(out)
    show_claim(console, cost_claim(doublings=doublings), out)


def show_claim(console: Console, found: Claim, out: Path | None) -> None:
    """Print tables and sentences, and write the files if `out` is given."""
    from atoll.present.files import write_all
    from atoll.present.tables import layout

    console.print(layout(found.parts()))
    if out is not None:
        print_written(console, write_all(out, found.files()))
