"""The options that several commands of `atoll federate` share."""

from __future__ import annotations

import click

from atoll.cli.options import DP, EPOCHS, PATH, ROUNDS, SEED, SEEDS, SETTINGS, option

KIT = option("--kit DIR", "The kit of this party.", PATH, required=True)
OUT = option("--out DIR", "Folder for the result.", PATH)
AS_JSON = option("--json", "Print one JSON object at the end.", name="as_json")
FAULTS = (
    option("--quorum N", "Fewest sites that a round may have.  [default: more than half]", int),
    option(
        "--deadline S",
        "Seconds that a step may take; a slower site is left out until it is back.",
        float,
        default=600.0,
    ),
    option(
        "--wait S",
        "Seconds to wait for sites that are not connected.",
        float,
        name="patience",
        default=60.0,
    ),
    click.option(
        "--rejoin/--no-rejoin",
        default=True,
        show_default=True,
        help="Whether a site that comes back is taken in at once.",
    ),
)
TRAINING = (
    ROUNDS,
    EPOCHS,
    SEEDS,
    SEED,
    SETTINGS,
    DP,
    option("--fraction F", "Share of sites in each round.  [default: 1]", float),
    option("--protocol NAME", "As for `atoll run`.  [default: strict]"),
)
