"""Command of a site: check a model that the server delivered."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.cli.federate.session import KIT, open_kit
from atoll.cli.options import PATH, command


@command(
    "Check a model that the server delivered.",
    click.Argument(["folder"], metavar="MODEL", type=PATH),
    KIT,
)
def verify(folder: Path, kit: Path) -> None:
    """Check the server's signature of the MODEL folder, and every file in it."""
    open_kit(kit, "site")
    from atoll.deploy.delivery import verify_model

    manifest = verify_model(folder, kit)
    seeds = manifest.rounds.items()
    rounds = ", ".join(f"seed {seed}: round {number + 1}" for seed, number in seeds)
    click.echo(f"signed by the server: run {manifest.run} for {manifest.site} ({rounds})")
