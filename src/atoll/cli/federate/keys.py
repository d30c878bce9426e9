"""Commands for keys: found a federation, ask for a certificate, approve, join, renew, remove."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from atoll.cli.federate.session import KIT, open_admin, open_kit, stop_jobs, stopping
from atoll.cli.options import PATH, command, option
from atoll.core.errors import ConfigError, check_name
from atoll.deploy import keys
from atoll.deploy.kits import PASSPHRASE, PORT, ROOT_DAYS, certificate_days, write_about

PASSPHRASE_FILE = option(
    "--passphrase-file FILE",
    f"The passphrase of the root's key.  [default: {PASSPHRASE}, else asked]",
    PATH,
)
FEDERATION = option("--federation DIR", "The folder of `atoll federate init`.", PATH, required=True)
KIND = click.Option(
    ["--kind"],
    type=click.Choice(["site", "server", "admin"]),
    default="site",
    help="The kind of party; choose server or admin only for your own kits.",
    show_default=True,
)


def fingerprint_option(whose: str) -> click.Option:
    """`--fingerprint`, which takes the place of the question whether two are equal."""
    return option("--fingerprint TEXT", f"The fingerprint that {whose} read to you.")


def read_passphrase(file: Path | None, *, new: bool = False) -> str:
    """The passphrase of the root's key, from a file, the environment or the keyboard."""
    if file is not None:
        try:
            return file.read_text().strip()
        except (OSError, ValueError):
            raise ConfigError(f"'{file}' holds no readable passphrase; give a text file") from None
    if PASSPHRASE in os.environ:
        return os.environ[PASSPHRASE]
    if not sys.stdin.isatty():
        raise ConfigError(f"the root's key needs a passphrase; give a file or set {PASSPHRASE}")
    asked = "passphrase of the root's key"
    return str(click.prompt(asked, hide_input=True, confirmation_prompt=new))


def compare(found: str, given: str | None, whose: str) -> None:
    """Continue only if the fingerprint is the one that another person read out."""
    if given is not None:
        if not keys.same_fingerprint(given, found):
            raise ConfigError(f"the fingerprint is {found}, not {given}; do not use this file")
    elif sys.stdin.isatty():
        click.confirm(f"does {whose} read the same fingerprint to you?", abort=True)
    else:
        raise ConfigError(f"give --fingerprint, as {whose} read it to you")


@command(
    "Found a federation: its root, its server, its administrator.",
    option("--host TEXT", "The name by which the sites reach the server.", required=True),
    option("--port INTEGER", "The port of the server.", int, default=PORT),
    option("--out DIR", "Folder of the coordinator.", PATH, required=True),
    PASSPHRASE_FILE,
)
def init(host: str, port: int, out: Path, passphrase_file: Path | None) -> None:
    """Make the root of a federation, and the kits of its server and its administrator.

    The root's key signs every certificate. It stays in DIR/root, encrypted with a passphrase.
    """
    passphrase = read_passphrase(passphrase_file, new=True)
    with stopping(signal.SIGHUP):  # no key in clear text may stay behind
        made = keys.found(out, passphrase, host=host, port=port)
    for name, kit in made.items():
        click.echo(f"{name:28} {kit}")
    click.echo(f"{'root (keep it, with a copy)':28} {out / keys.ROOT}, valid for {ROOT_DAYS} days")


@command(
    "Ask to take part, with a key made here.",
    option("--name NAME", "Name of your site.", required=True),
    option("--out DIR", "Folder of your kit.", PATH, required=True),
)
def request(name: str, out: Path) -> None:
    """Make a key, which stays here, and a request for its certificate."""
    _show_request(keys.make_request(out, name))


@command("Ask for a new certificate before the old one ends.", KIT)
def renew(kit: Path) -> None:
    """Make a new key for a kit, and a request for its certificate; the old one stays until then."""
    _show_request(keys.make_request(kit))


def _show_request(file: Path) -> None:
    click.echo(f"send to the coordinator: {file}")
    click.echo(f"fingerprint to read out: {keys.read_request(file).fingerprint}")


@command(
    "Sign the request of a site.",
    click.Argument(["file"], type=PATH),
    FEDERATION,
    option("--days N", "Days that the certificate is valid.", int, default=keys.DAYS),
    fingerprint_option("the site"),
    option("--renew", "Sign a new key for a member, which asked for it."),
    KIND,
    PASSPHRASE_FILE,
)
def approve(
    file: Path, federation: Path, fingerprint: str | None, passphrase_file: Path | None, **how: Any
) -> None:
    """Sign the request in FILE: its site becomes or stays a member of the federation."""
    asked = keys.read_request(file)
    click.echo(f"{asked.kind} {asked.name}: {asked.fingerprint}")
    compare(asked.fingerprint, fingerprint, asked.name)
    passphrase = read_passphrase(passphrase_file)
    with stopping(signal.SIGHUP):
        how["fingerprint"] = asked.fingerprint
        signed = keys.approve(federation, file, passphrase, **how)
    click.echo(f"send to {asked.name}: {signed}")
    click.echo(f"fingerprint to read out: {keys.read_approval(signed).fingerprint}")


@command(
    "Put the coordinator's answer into your kit.",
    click.Argument(["file"], type=PATH),
    KIT,
    fingerprint_option("the coordinator"),
)
def join(file: Path, kit: Path, fingerprint: str | None) -> None:
    """Complete a kit, or renew it, with the certificate in FILE."""
    given = keys.read_approval(file)
    if not (kit / "kit.json").exists():
        click.echo(f"root of the federation: {given.fingerprint}")
        compare(given.fingerprint, fingerprint, "the coordinator")
    about = keys.join(kit, file, given.fingerprint)
    click.echo(f"{about['name']}: certificate valid for {certificate_days(kit)} days in {kit}")


@command(
    "Remove a site from the federation.",
    click.Argument(["name"]),
    KIT,
    option("--yes", "Do not ask for confirmation."),
)
def remove(name: str, kit: Path, yes: bool) -> None:
    """Let the server refuse the site NAME from now on, also after a restart.

    Its name cannot come back, because its certificate cannot be taken away. The site keeps its
    data, its private states, its audit log and the models it received. Running jobs are stopped,
    because a job keeps its sites. An open `run`, or `run --resume`, continues them without NAME.
    """
    about = open_kit(kit, "admin")
    with open_admin(kit, about["name"]) as admin:
        check_name("site", name, {*about["sites"], *admin.connected()})
        if not yes:
            click.confirm(f"remove {name}? its name cannot come back", abort=True)
        admin.remove(name)
        about["sites"] = [site for site in about["sites"] if site != name]
        about["removed"] = [*about.get("removed", []), name]
        write_about(kit, about)  # before jobs stop, because an open `run` reads it then
        noted = keys.note_removed(kit.resolve().parent, name)
        for job in stop_jobs(admin):
            click.echo(f"stopped {job}; `run --resume` continues it without {name}")
    if not noted:
        click.echo(f"the root is not next to {kit}: the coordinator must not approve {name} again")
    click.echo(f"{name} is removed; it keeps its data, states, audit log and received models")
