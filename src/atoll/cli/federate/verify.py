"""Command of a site: check a model that the server delivered."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.cli.federate.session import KIT, check_kind
from atoll.cli.options import PATH, command
from atoll.deploy.kits import about_kit, need_nvflare


@command(
    "Check a model that the server delivered.",
    click.Argument(["folder"], metavar="MODEL", type=PATH),
    KIT,
)
def verify(folder: Path, kit: Path) -> None:
    """Check the server's signature of the MODEL folder, and every file in it."""
    need_nvflare()
    from atoll.deploy.delivery import verify_model

    check_kind(kit, about_kit(kit), "site")
    manifest = verify_model(folder, kit)
    rounds = ", ".join(
        f"seed {seed}: round {number + 1}" for seed, number in manifest.rounds.items()
    )
    click.echo(f"signed by the server: run {manifest.run} for {manifest.site} ({rounds})")
