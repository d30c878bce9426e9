"""The options of the command line that several commands share, in the order of the help pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from atoll.engines.base import AUTO, ENGINES

DATA_ROOT = click.option(
    "--data-root",
    metavar="DIR",
    help="Where data sets are looked for.  [default: ATOLL_DATA, else ~/.cache/atoll/data]",
)
DATA = click.option(
    "--data",
    metavar="NAME|PATH",
    help="lagoon or archipelago (built in), a data set's name, a group (molecules, or "
    "PROTEINS+MUTAG), a path to your own, or a file of `atoll partition`.  [default: lagoon]",
)
CLIENTS = click.option(
    "--clients",
    type=int,
    metavar="K",
    help="Number of clients.  [default: the protocol's, or one per owner]",
)
DIVISION = (
    click.option(
        "--partition",
        metavar="NAME",
        help="How the graph is divided: louvain, metis, dirichlet:alpha=0.5, column:NAME, ...  "
        "[default: by owner if the data name owners, else the protocol's]",
    ),
    click.option(
        "--split",
        metavar="NAME",
        help="How nodes become training, validation and test nodes: stratified, random, given, "
        "...  [default: the protocol's]",
    ),
    click.option(
        "--protocol",
        metavar="NAME",
        help="strict, fedath, fedtad, fediih, gcfl or openfgl.  [default: strict]",
    ),
    click.option(
        "--allow",
        multiple=True,
        metavar="WHAT",
        help="Accept clients with no-edge or single-class; repeatable.",
    ),
    click.option(
        "--batch-size",
        type=int,
        metavar="B",
        help="Training graphs in one step, for sets of graphs; 0: all.  [default: the protocol's]",
    ),
    click.option("--schema", metavar="FILE", help="Column roles of your own tables (TOML)."),
    click.option(
        "--own",
        multiple=True,
        metavar="KEY=VALUE",
        help="How to treat your own data: dangling=drop, self_loops=keep, ...; repeatable.",
    ),
    DATA_ROOT,
)
FEDERATION = (DATA, CLIENTS, *DIVISION)
"""What decides a federation: the same options for `run` and `inspect`."""
ROUNDS = click.option("--rounds", type=int, metavar="R", help="Rounds.  [default: the protocol's]")
EPOCHS = click.option(
    "--epochs", type=int, metavar="E", help="Local epochs per round.  [default: the protocol's]"
)
SEEDS = click.option("--seeds", type=int, metavar="N", help="How many seeds to run.  [default: 1]")
SEED = click.option("--seed", type=int, metavar="S", help="The first seed.  [default: 0]")
SETTINGS = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="A hyper-parameter of method, net or optimizer (`atoll methods NAME` lists them); "
    "repeatable.",
)
DP = click.option(
    "--dp",
    metavar="KEY=VALUE,...",
    help="Client-level differential privacy: clip=1,noise=1.1,delta=1e-5 clips each client's "
    "update to norm 1 and adds Gaussian noise with σ = 1.1 × clip; the resulting ε is reported.  "
    "[default: none]",
)
*_FIRST, _LAST = AUTO, *ENGINES
_ENGINES = f"{', '.join(_FIRST)} or {_LAST}"
MACHINE = (
    click.option("--engine", metavar="NAME", help=f"{_ENGINES}.  [default: {AUTO}]"),
    click.option("--device", metavar="NAME", help="auto, cpu or cuda.  [default: auto]"),
    click.option(
        "--chunk",
        type=int,
        metavar="K",
        help="Most clients in one program (fused); bounds memory.  [default: chosen]",
    ),
)
FRACTION = click.option(
    "--fraction", type=float, metavar="F", help="Share of clients in each round.  [default: 1]"
)
EVALUATE = click.option(
    "--evaluate",
    metavar="MODEL",
    help="Which model is scored: deployed or local.  [default: the protocol's]",
)
LOG = click.option(
    "--log",
    multiple=True,
    metavar="TOOL",
    help="Send every round's numbers to tensorboard or mlflow as well; repeatable.",
)
TRAINING = (
    ROUNDS,
    EPOCHS,
    FRACTION,
    SEEDS,
    SEED,
    SETTINGS,
    DP,
    EVALUATE,
    click.option(
        "--compat",
        multiple=True,
        metavar="NAME",
        help="Switch on a known fault of a public code (dropout-at-eval, test-selection); "
        "repeatable.",
    ),
    *MACHINE,
)
OUT = click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder for the result.  [default: a new one in atoll-runs]",
)
JOBS = click.option(
    "--jobs",
    metavar="N",
    default="auto",
    show_default=True,
    help="Processes that run cells side by side; auto: one for each core if that gains time, 1 on "
    "a GPU.",
)
AS_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object as the last line."
)
QUIET = click.option("--quiet", is_flag=True, help="No progress, no table.")
FILES = (
    click.option(
        "--config",
        "config_file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="A TOML file of options, for example the config.toml of a saved run.",
    ),
    OUT,
    click.option(
        "--resume",
        "resume_from",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="Continue the stopped run in DIR.",
    ),
    LOG,
    click.option("--save-every", type=float, default=10.0, hidden=True),
    AS_JSON,
    QUIET,
)


def options(*wanted: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator, in the order of the help page."""

    def decorate(command: Any) -> Any:
        for option in reversed(wanted):
            command = option(command)
        return command

    return decorate
