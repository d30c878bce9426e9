"""Commands of the parties of a federation: make kits, divide data, serve, take part, predict."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from atoll.cli import options
from atoll.cli.common import config_of, make_console, pop
from atoll.cli.federate import session
from atoll.cli.federate.session import AS_JSON, KIT, METRICS
from atoll.cli.options import PATH, Strings, command, option
from atoll.cli.predict import BLOCK, TABLE, THRESHOLD, write
from atoll.deploy.kits import (
    PORT,
    about_kit,
    read_settings,
    server_command,
    site_command,
    write_settings,
)
from atoll.deploy.kits import provision as make

DATA = "Your graph: tables, .pt, .graphml, or a client file."
POLICY = (
    "What you allow (TOML), or none: every method, no disclosures.  [default: the last start's]"
)
SPLIT = "How your nodes become training, validation and test nodes."
DEVICE = "Where your steps run: cpu, cuda or auto."
JOINED = "NEW holds new nodes of this site's graph; its edges may name old nodes."
DRY_RUN = "Show what METHOD would send from here, and do not join."


@command(
    "Make the kits of a federation.",
    options.repeatable(
        "--site NAME", "An organisation that takes part; repeatable.", name="sites", required=True
    ),
    option("--host TEXT", "The name by which the sites reach the server.", default="localhost"),
    option("--port INTEGER", "The port of the server.", int, default=PORT),
    option("--out DIR", "Folder for the kits.", PATH, required=True),
)
def provision(sites: Strings, host: str, port: int, out: Path) -> None:
    """Make one kit for the server, one for the administrator and one for each site.

    For trials: all private keys are made here, and no site can be added or renewed later. A real
    federation begins with `atoll federate init`, where each party makes its own key.
    """
    for name, kit in make(out, sites, host=host, port=port).items():
        click.echo(f"{name:28} {kit}")
    click.echo("for trials: all private keys were made here, and the root's key is gone", err=True)


@command(
    "Divide a data set into one file per site, for a trial.",
    *options.FEDERATION,
    options.SEED,
    option("--out DIR", "Folder for the files.", PATH, required=True),
)
def split(out: Path, **given: object) -> None:
    """Divide a data set as `atoll run` would, and write one file per client."""
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
    "Take part with your own data.",
    KIT,
    option("--data PATH", DATA, PATH, required=True),
    option("--policy FILE", POLICY, PATH),
    option("--schema FILE", "Column roles of your own tables (TOML).", PATH),
    option("--classes A,B,...", "All classes of the federation, where you may lack some."),
    option("--split NAME", SPLIT, default="stratified"),
    options.SEED,
    option("--device NAME", DEVICE, default="cpu"),
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
    """Take part with your own data until Ctrl-C."""
    from atoll.deploy.policy import read_policy
    from atoll.deploy.site_data import read_site_data
    from atoll.experiment.hardware import choose_device

    about, device = about_kit(kit), given.pop("device")
    choose_device(device)  # a missing GPU is reported here and not in a log
    chosen = pop(given, "schema", "classes", "split", "seed")
    chosen |= {"classes": session.names(chosen["classes"]), "seed": chosen["seed"] or 0}
    policy, known = given.pop("policy"), read_settings(kit).get("policy")
    if policy is None and known is not None:
        policy = Path(known)
        click.echo(f"policy {policy}, as at the last start (--policy none: without one)", err=True)
    policy = None if policy == Path("none") else policy
    rules = read_policy(policy)
    # Reading the data now reports their faults here and not in a log.
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
    """Check the server's signature of the MODEL folder, and every file in it."""
    name = session.open_kit(kit, "site")["name"]
    from atoll.deploy.delivery import verify_model

    manifest = verify_model(folder, kit)
    seeds = manifest.rounds.items()
    rounds = ", ".join(f"seed {seed}: round {number + 1}" for seed, number in seeds)
    other = "" if name == manifest.site else f"; this kit is {name}'s"
    click.echo(f"signed by the server: run {manifest.run} for {manifest.site} ({rounds}){other}")


@command(
    "Predict your nodes with a model that the server delivered.",
    click.Argument(["model"], metavar="MODEL", type=PATH),
    KIT,
    option("--data NEW", "Tables like those that you took part with.", PATH, required=True),
    TABLE,
    option("--joined", JOINED),
    options.SEED_OF_RUN,
    option("--device NAME", "Where to predict: cpu, cuda or auto.", default="cpu"),
    BLOCK,
    THRESHOLD,
    options.QUIET,
    example="atoll federate predict bank-a/atoll/runs/RUN/model --kit bank-a --data new/ "
    "--out scores.csv",
)
def predict(model: Path, kit: Path, data: Path, out: Path, quiet: bool, **given: Any) -> None:
    """Verify the delivered MODEL and write its predictions for NEW. Nothing leaves the site."""
    session.open_kit(kit, "site")
    from atoll.deploy.predict import predict_at_site
    from atoll.experiment.predictions import check_table

    check_table(out)
    write(predict_at_site(model, kit, data, **given), out, quiet=quiet)
