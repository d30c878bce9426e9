"""The options of the command line that several commands share, in the order of the help pages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from atoll.engines.base import AUTO, ENGINES

Strings = tuple[str, ...]
Kind = type | click.ParamType[object]
PATH = click.Path(path_type=Path)


def command(
    summary: str, *params: click.Parameter, example: str = "", name: str | None = None
) -> Callable[[Callable[..., None]], click.Command]:
    """A command: its line in the list of commands, its options, and the end of its help page."""
    epilog = f"For example: {example}" if example else None
    return click.command(name, short_help=summary, params=list(params), epilog=epilog)


def option(usage: str, text: str, kind: Kind = str, *, name: str = "", **more: Any) -> click.Option:
    """One option: `option("--rounds R", "Rounds.", int)`; a usage without a value is a switch.

    `name` is the parameter of the command if it is not the flag's. `more` holds `required`,
    `multiple` or `default`, which the help page shows.
    """
    words = usage.split()
    flags = [word for word in words if word.startswith("-")]
    value = {"is_flag": True} if flags == words else {"metavar": words[-1], "type": kind}
    names, shown = [*flags, name] if name else flags, "default" in more
    return click.Option(names, help=text, show_default=shown, **value, **more)


def repeatable(usage: str, text: str, **more: Any) -> click.Option:
    """An option that may be given several times."""
    return option(usage, text, multiple=True, **more)


def resume(text: str) -> click.Option:
    """`--resume DIR`, as the parameter `resume_from`."""
    return option("--resume DIR", text, PATH, name="resume_from")


def _without_cache(ctx: click.Context, param: click.Parameter, off: bool) -> None:
    """Switch the cache off in this process and in those that it starts, until the command ends."""
    if off:
        before = os.environ.get("ATOLL_CACHE")
        os.environ["ATOLL_CACHE"] = "off"
        ctx.call_on_close(lambda: _restore("ATOLL_CACHE", before))


def _restore(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    os.environ.update({} if value is None else {name: value})


METHOD = click.Argument(["method"], required=False)
NO_CACHE = option(
    "--no-cache",
    "Load and divide the data anew, and keep nothing (`atoll data cache`).",
    callback=_without_cache,
    expose_value=False,
)
METHODS = click.Argument(["methods"], metavar="METHOD...", nargs=-1)
DATA_ROOT = option(
    "--data-root DIR",
    "Where data sets are looked for.  [default: ATOLL_DATA, else ~/.cache/atoll/data]",
)
DATA = option(
    "--data NAME|PATH",
    "lagoon or archipelago (built in), a data set's name, a group (molecules, or "
    "PROTEINS+MUTAG), a path to your own, or a file of `atoll partition`.  [default: lagoon]",
)
CLIENTS = option(
    "--clients K", "Number of clients.  [default: the protocol's, or one per owner]", int
)
_PROTOCOLS = "strict, fedath, fedtad, fediih, gcfl, openfgl or fedlog.  [default: strict]"
ENCODER = option(
    "--encoder NAME",
    "How owners of tables measure columns: federated (sums and counts, no rows), local or pooled.  "
    "[default: federated]",
)
DIVISION = (
    option(
        "--task NAME",
        "What is predicted: node (the class of every node) or graph (of every graph of a set).  "
        "[default: the data's]",
    ),
    option(
        "--partition NAME",
        "How the graph is divided: louvain, metis, dirichlet:alpha=0.5, column:NAME, ...  "
        "[default: by owner if the data name owners, else the protocol's]",
    ),
    option(
        "--split NAME",
        "How nodes become training, validation and test nodes: stratified, inductive, "
        "time:COLUMN, given, ...  [default: the protocol's]",
    ),
    option(
        "--ratios A/B/C",
        "Shares of training, validation and test: 0.2/0.4/0.4.  [default: the split's]",
    ),
    option("--protocol NAME", _PROTOCOLS),
    option(
        "--data-seed S",
        "Seed of partition and split for every run.  [default: the protocol's, or the run's seed]",
        int,
    ),
    repeatable("--allow WHAT", "Accept clients with no-edge or single-class; repeatable."),
    option(
        "--batch-size B",
        "Training graphs in one step, for sets of graphs; 0: all.  [default: the protocol's]",
        int,
    ),
    option("--schema FILE", "Column roles of your own tables (TOML)."),
    ENCODER,
    repeatable(
        "--own KEY=VALUE",
        "How to treat your own data: dangling=drop, self_loops=keep, ...; repeatable.",
    ),
    DATA_ROOT,
    NO_CACHE,
)
FEDERATION = (DATA, CLIENTS, *DIVISION)
"""What decides a federation: the same options for `run` and `inspect`."""
ROUNDS = option("--rounds R", "Rounds.  [default: the protocol's]", int)
EPOCHS = option("--epochs E", "Local epochs per round.  [default: the protocol's]", int)
SEEDS = option("--seeds N", "How many seeds to run.  [default: 1]", int)
SEED = option("--seed S", "The first seed.  [default: 0]", int)
SEED_OF_DATA = option("--seed S", "Of partition and split.  [default: 0]", int)
SEED_OF_RUN = option("--seed S", "Which of the run's seeds.  [default: first]", int)
SETTINGS = repeatable(
    "--set KEY=VALUE",
    "A hyper-parameter of method, net or optimizer (`atoll methods NAME` lists them); repeatable.",
    name="settings",
)
DP = option(
    "--dp KEY=VALUE,...",
    "Client-level differential privacy: clip=1,noise=1.1,delta=1e-5 clips each client's "
    "update to norm 1 and adds Gaussian noise with a standard deviation of 1.1 times clip; the "
    "resulting epsilon is reported.  [default: none]",
)
DEVICE = option("--device NAME", "auto, cpu, cuda, or a certain GPU: cuda:1.  [default: auto]")
*_FIRST, _LAST = AUTO, *ENGINES
_ENGINES = f"{', '.join(_FIRST)} or {_LAST}"
MACHINE = (
    option("--engine NAME", f"{_ENGINES}.  [default: {AUTO}]"),
    DEVICE,
    option(
        "--chunk K", "Most clients in one program (fused); bounds memory.  [default: chosen]", int
    ),
)
FRACTION = option("--fraction F", "Share of clients in each round.  [default: 1]", float)
EVALUATE = option(
    "--evaluate MODEL", "Which model is scored: deployed or local.  [default: the protocol's]"
)
METRIC = option(
    "--metric NAME",
    "Selects the round, and is what studies optimise and test: accuracy, macro_f1, auc, "
    "average_precision, recall@1%, ... (docs/metrics.md).  [default: the data's own]",
)
LOSS = (
    option(
        "--class-weights W",
        "How much classes count in the loss: balanced (by each client's own training labels), or "
        "a number for each class, as in 1,10.  [default: all alike]",
    ),
    option("--loss NAME", "cross_entropy, focal or focal:GAMMA.  [default: cross_entropy]"),
)
POSITIVE = option(
    "--positive CLASS",
    "Of two classes the one to be found, for such metrics.  [default: the second]",
)
THRESHOLD = option(
    "--threshold RULE",
    "From which probability on a node is an alert, chosen on validation nodes: max_f1, "
    "recall@precision=P, precision@recall=R or cost:FN,FP.  [default: none]",
)
LOG = repeatable(
    "--log TOOL", "Send every round's numbers to tensorboard or mlflow as well; repeatable."
)
COMPAT = repeatable(
    "--compat NAME",
    "Switch on a known fault of a public code (dropout-at-eval, test-selection); repeatable.",
)
TRAINING = (
    *(ROUNDS, EPOCHS, FRACTION, SEEDS, SEED, SETTINGS, DP, EVALUATE, METRIC, POSITIVE),
    *(THRESHOLD, *LOSS),
    COMPAT,
    *MACHINE,
)
OUT = option("--out DIR", "Folder for the result.  [default: a new one in atoll-runs]", PATH)
JOBS = option(
    "--jobs N",
    "Processes that run cells side by side; auto: one for each core if that gains time, 1 on "
    "a GPU.",
    default="auto",
)
AS_JSON = option("--json", "Print one JSON object as the last line.", name="as_json")
QUIET = option("--quiet", "No progress, no table.")
STUDY = (JOBS, AS_JSON, QUIET)
