"""Commands for keys: create a federation, request a certificate, approve, join, renew, remove."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from atoll.cli.federate.session import HOST, KIT, PORT, open_admin, open_kit, stop_jobs, stopping
from atoll.cli.options import PATH, command, option
from atoll.core.errors import ConfigError, check_name
from atoll.deploy import keys
from atoll.deploy.kits import PASSPHRASE, ROOT_DAYS, certificate_days, write_about

PASSPHRASE_FILE = option(
    "--passphrase-file FILE",
    f"Read the passphrase of the root's key from FILE.  [default: {PASSPHRASE}, else a prompt]",
    PATH,
)
FEDERATION = option(
    "--federation DIR", "Use the folder that `atoll federate init` created.", PATH, required=True
)
KIND = click.Option(
    ["--kind"],
    type=click.Choice(["site", "server", "admin"]),
    default="site",
    help="Set the role of the party; use server or admin only for kits that you control.",
    show_default=True,
)


def fingerprint_option(whose: str) -> click.Option:
    """Define `--fingerprint`, which replaces the interactive comparison."""
    text = f"Compare with the fingerprint that {whose} gave you, for example by phone."
    return option("--fingerprint TEXT", text)


def read_passphrase(file: Path | None, *, new: bool = False) -> str:
    """Read the passphrase of the root's key from a file, the environment or the keyboard."""
    if file is not None:
        try:
            return file.read_text().strip()
        except (OSError, ValueError):
            problem = f"'{file}' contains no readable passphrase; give a text file"
            raise ConfigError(problem) from None
    if PASSPHRASE in os.environ:
        return os.environ[PASSPHRASE]
    if not sys.stdin.isatty():
        raise ConfigError(f"the root's key needs a passphrase; give a file or set {PASSPHRASE}")
    asked = "passphrase of the root's key"
    return str(click.prompt(asked, hide_input=True, confirmation_prompt=new))


def compare(found: str, given: str | None, whose: str) -> None:
    """Continue only if the fingerprint equals the one that the other party reads out."""
    if given is not None:
        if not keys.same_fingerprint(given, found):
            raise ConfigError(f"the fingerprint is {found}, not {given}; do not use this file")
    elif sys.stdin.isatty():
        click.confirm(f"does {whose} read the same fingerprint to you?", abort=True)
    else:
        raise ConfigError(f"give --fingerprint, as {whose} read it to you")


@command(
    "Create a federation with its root certificate.",
    option("--host TEXT", HOST, required=True),
    PORT,
    option("--out DIR", "Write the coordinator's files into this folder.", PATH, required=True),
    PASSPHRASE_FILE,
)
def init(host: str, port: int, out: Path, passphrase_file: Path | None) -> None:
    """Create the root certificate of a federation, and the kits of server and administrator.

    The root's key signs every certificate. It stays in DIR/root, encrypted with a passphrase.
    """
    passphrase = read_passphrase(passphrase_file, new=True)
    with stopping(signal.SIGHUP):  # no key in clear text may stay behind
        made = keys.found(out, passphrase, host=host, port=port)
    for name, kit in made.items():
        click.echo(f"{name:28} {kit}")
    click.echo(f"{'root (keep it, with a copy)':28} {out / keys.ROOT}, valid for {ROOT_DAYS} days")


@command(
    "Create a key and a request to join a federation.",
    option("--name NAME", "Set the name of your site.", required=True),
    option("--out DIR", "Write your kit into this folder.", PATH, required=True),
)
def request(name: str, out: Path) -> None:
    """Create a key, which does not leave this machine, and a request for its certificate."""
    _show_request(keys.make_request(out, name))


@command("Request a new certificate before the old one expires.", KIT)
def renew(kit: Path) -> None:
    """Create a new key for a kit, and a request for its certificate.

    The kit keeps its old key until you run `atoll federate join` with the new certificate.
    """
    _show_request(keys.make_request(kit))


def _show_request(file: Path) -> None:
    click.echo(f"send to the coordinator: {file}")
    click.echo(f"fingerprint to read out: {keys.read_request(file).fingerprint}")


@command(
    "Sign the certificate request of a site.",
    click.Argument(["file"], type=PATH),
    FEDERATION,
    option("--days N", "Make the certificate valid for N days.", int, default=keys.DAYS),
    fingerprint_option("the site"),
    option("--renew", "Sign a new key for a member, which asked for it."),
    KIND,
    PASSPHRASE_FILE,
)
def approve(
    file: Path, federation: Path, fingerprint: str | None, passphrase_file: Path | None, **how: Any
) -> None:
    """Sign the request in FILE. A site then becomes, or remains, a member of the federation."""
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
    "Install the signed certificate in your kit.",
    click.Argument(["file"], type=PATH),
    KIT,
    fingerprint_option("the coordinator"),
)
def join(file: Path, kit: Path, fingerprint: str | None) -> None:
    """Complete or renew a kit with the certificate in FILE, which the coordinator signed."""
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
    """Block the site NAME at the server permanently, also after a restart.

    You cannot use its name again, because its certificate cannot be revoked. The site keeps its
    data, its private states, its audit log and the models that it received. The command stops all
    unfinished jobs, because a job cannot change its sites. An `atoll federate run` that still
    waits in a terminal then continues without NAME. For other runs use `run --resume`.
    """
    about = open_kit(kit, "admin")
    with open_admin(kit, about["name"]) as admin:
        check_name("site", name, {*about["sites"], *admin.connected()})
        if not yes:
            click.confirm(f"remove {name}? you cannot use its name again", abort=True)
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
