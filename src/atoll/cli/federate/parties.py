"""Commands of the parties of a federation: create kits, divide data, serve, train, predict."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from atoll.cli import options
from atoll.cli.common import config_of, make_console, pop
from atoll.cli.federate import session
from atoll.cli.federate.session import AS_JSON, HOST, KIT, METRICS, PORT
from atoll.cli.options import PATH, Strings, command, option
from atoll.cli.predict import BLOCK, JOINED, NEW, TABLE, THRESHOLD, write
from atoll.deploy.kits import (
    about_kit,
    read_settings,
    server_command,
    site_command,
    write_settings,
)
from atoll.deploy.kits import provision as make

DATA = "Read your graph from tables, .pt, .graphml, or a client file."
POLICY = (
    "Follow this policy (TOML); none allows Atoll's methods but no disclosures.  "
    "[default: the policy of the previous start]"
)
CLASSES = "Name all classes of the federation if your data do not contain every class."
SPLIT = "Split your nodes into training, validation and test nodes by this rule."
SEED = option("--seed S", "Set the seed of the split.  [default: 0]", int)
DEVICE = option("--device NAME", "Compute on cpu, cuda or auto.", default="cpu")
DRY_RUN = "List the data that METHOD would send from this site, and exit."


@command(
    "Create all kits of a trial federation.",
    options.repeatable(
        "--site NAME",
        "Create a kit for this organisation; repeatable.",
        name="sites",
        required=True,
    ),
    option("--host TEXT", HOST, default="localhost"),
    PORT,
    option("--out DIR", "Write the kits into this folder.", PATH, required=True),
)
def provision(sites: Strings, host: str, port: int, out: Path) -> None:
    """Create one kit for the server, one for the administrator and one for each site.

    Use this only for trials: it creates all private keys here, and you cannot add or renew a site
    later. A real federation begins with `atoll federate init`, and each site creates its own key.
    """
    for name, kit in make(out, sites, host=host, port=port).items():
        click.echo(f"{name:28} {kit}")
    text = "only for trials: all private keys were created here, and the root's key is deleted"
    click.echo(text, err=True)


@command(
    "Divide a data set into one file per site, for a trial.",
    *options.FEDERATION,
    options.SEED_OF_DATA,
    option("--out DIR", "Write the files into this folder.", PATH, required=True),
)
def split(out: Path, **given: object) -> None:
    """Divide a data set as `atoll run` does, and write one file per client."""
    from atoll.deploy.site_data import write_clients
    from atoll.experiment.problem import Problem

    config = config_of(given)
    for path in write_clients(Problem.of(config).federation(config.seed), out):
        click.echo(path)


@command("Run the server of a federation.", KIT, METRICS)
def server(kit: Path, metrics: int | None) -> None:
    """Run the server until Ctrl-C."""
    from atoll.deploy.local import check_port, locked

    about = session.open_kit(kit, "server")
    session.warn_of_end(kit)
    with locked(kit):
        check_port(about)
    click.echo(f"server at {about['host']}:{about['port']}")
    session.foreground("server", server_command(kit), kit, metrics)


@command(
    "Start a site that trains on your own data.",
    KIT,
    option("--data PATH", DATA, PATH, required=True),
    option("--policy FILE", POLICY, PATH),
    option("--schema FILE", options.SCHEMA, PATH),
    option("--classes A,B,...", CLASSES),
    option("--split NAME", SPLIT, default="stratified"),
    SEED,
    DEVICE,
    option("--dry-run METHOD", DRY_RUN, name="method"),
    options.SETTINGS,
    options.DP,
    options.ENCODER,
    options.METRIC,
    options.THRESHOLD,
    METRICS,
    AS_JSON,
)
def site(kit: Path, data: Path, metrics: int | None, as_json: bool, **given: Any) -> None:
    """Start a site that trains on your own data until you press Ctrl-C."""
    from atoll.deploy.policy import read_policy
    from atoll.deploy.site_data import read_site_data
    from atoll.experiment.hardware import choose_device

    about, device = about_kit(kit), given.pop("device")
    choose_device(device)  # reports a missing GPU here and not in a log
    chosen = pop(given, "schema", "classes", "split", "seed")
    chosen |= {"classes": session.names(chosen["classes"]), "seed": chosen["seed"] or 0}
    policy, known = given.pop("policy"), read_settings(kit).get("policy")
    if policy is None and known is not None:
        policy = Path(known)
        hint = "as at the previous start (--policy none starts without a policy)"
        click.echo(f"policy {policy}, {hint}", err=True)
    policy = None if policy == Path("none") else policy
    rules = read_policy(policy)
    # Reading the data now reports their problems here and not in a log.
    own = read_site_data(data, rare=rules.rare_categories, **chosen)
    if given["method"] is not None:
        from atoll.deploy.disclosure import disclosure, disclosure_table

        found = disclosure(config_of(given), own, rules)
        if as_json:
            click.echo(json.dumps(found))
        else:
            make_console().print(disclosure_table(found))
        return
    session.open_kit(kit, "site")
    session.warn_of_end(kit)
    prepare = partial(write_settings, kit, data, policy=policy, device=device, **chosen)
    click.echo(f"{about['name']}: joining {about['host']}:{about['port']} with {data}")
    session.foreground(about["name"], site_command(kit), kit, metrics, prepare)


@command(
    "Check a model that the server delivered.",
    click.Argument(["folder"], metavar="MODEL", type=PATH),
    KIT,
)
def verify(folder: Path, kit: Path) -> None:
    """Check the server's signature of the MODEL folder, and each of its files."""
    name = session.open_kit(kit, "site")["name"]
    from atoll.deploy.delivery import verify_model

    manifest = verify_model(folder, kit)
    seeds = manifest.rounds.items()
    rounds = ", ".join(f"seed {seed}: round {number + 1}" for seed, number in seeds)
    other = "" if name == manifest.site else f"; this kit belongs to {name}"
    click.echo(f"signed by the server: run {manifest.run} for {manifest.site} ({rounds}){other}")


@command(
    "Predict your nodes with a model that the server delivered.",
    click.Argument(["model"], metavar="MODEL", type=PATH),
    KIT,
    option("--data NEW", NEW, PATH, required=True),
    TABLE,
    option("--joined", JOINED),
    options.SEED_OF_RUN,
    DEVICE,
    BLOCK,
    THRESHOLD,
    options.QUIET,
    example="atoll federate predict bank-a/atoll/runs/RUN/model --kit bank-a --data new/ "
    "--out scores.csv",
)
def predict(model: Path, kit: Path, data: Path, out: Path, quiet: bool, **given: Any) -> None:
    """Verify the delivered MODEL and write its predictions for NEW. No data leave the site."""
    session.open_kit(kit, "site")
    from atoll.deploy.predict import predict_at_site
    from atoll.experiment.predictions import check_table

    check_table(out)
    write(predict_at_site(model, kit, data, **given), out, quiet=quiet)
