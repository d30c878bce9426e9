"""The options that several commands share, in the order of the help pages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from atoll.core.errors import ConfigError
from atoll.engines.base import AUTO, ENGINES

Strings = tuple[str, ...]
Kind = type | click.ParamType[object]


class _Path(click.Path):
    """A path. An empty text would mean the current folder, and is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "" and param is not None:
            option = isinstance(param, click.Option)
            name = max(param.opts, key=len) if option else param.human_readable_name
            raise ConfigError(f"{name} is empty; give a path")
        return super().convert(value, param, ctx)


PATH, PATH_TEXT = _Path(path_type=Path), _Path(path_type=str)


def command(
    summary: str, *params: click.Parameter, example: str = "", name: str | None = None
) -> Callable[[Callable[..., None]], click.Command]:
    """Define a command by its summary, its options and the example that ends its help page."""
    epilog = f"For example: {example}" if example else None
    return click.command(name, short_help=summary, params=list(params), epilog=epilog)


def option(usage: str, text: str, kind: Kind = str, *, name: str = "", **more: Any) -> click.Option:
    """Define an option: `option("--rounds R", "Rounds.", int)`.

    A usage without a value defines a switch. `name` is the parameter of the command if it differs
    from the flag. `more` contains other arguments of `click.Option`. Help pages show a `default`.
    """
    words = usage.split()
    flags = [word for word in words if word.startswith("-")]
    value = {"is_flag": True} if flags == words else {"metavar": words[-1], "type": kind}
    names, shown = [*flags, name] if name else flags, "default" in more
    return click.Option(names, help=text, show_default=shown, **value, **more)


def repeatable(usage: str, text: str, **more: Any) -> click.Option:
    """Define an option that the user may repeat."""
    return option(usage, text, multiple=True, **more)


def resume(text: str) -> click.Option:
    """Define `--resume DIR`, with the parameter `resume_from`."""
    return option("--resume DIR", text, PATH, name="resume_from")


def _without_cache(ctx: click.Context, param: click.Parameter, off: bool) -> None:
    """Disable the cache in this process and its child processes until the command ends."""
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
    "Do not read or write the data cache (`atoll data cache`).",
    callback=_without_cache,
    expose_value=False,
)
METHODS = click.Argument(["methods"], metavar="METHOD...", nargs=-1)
DATA_ROOT = option(
    "--data-root DIR",
    "Look for data sets in this folder.  [default: ATOLL_DATA, else ~/.cache/atoll/data]",
    PATH_TEXT,
)
DATA = option(
    "--data NAME|PATH",
    "Load a data set by name (lagoon and archipelago are built in), a group (molecules, or "
    "PROTEINS+MUTAG), a path to your own data, or a file that `atoll partition` wrote.  "
    "[default: lagoon]",
)
CLIENTS = option(
    "--clients K",
    "Set the number of clients.  [default: chosen by the protocol, or one per owner]",
    int,
)
PROTOCOL = option(
    "--protocol NAME",
    "Follow this evaluation protocol: strict, fedath, fedtad, fediih, gcfl, openfgl or fedlog.  "
    "[default: strict]",
)
ENCODER = option(
    "--encoder NAME",
    "Encode tables with these statistics: federated (owners share statistics, no rows), local or "
    "pooled.  [default: federated]",
)
SCHEMA = "Read the column roles of your own tables from this TOML file."
OWN = repeatable(
    "--own KEY=VALUE",
    "Set how to read your own data: dangling=drop, self_loops=keep, ...; repeatable.",
)
ALLOW = repeatable(
    "--allow WHAT",
    "Accept clients without edges (no-edge) or with only one class (single-class); repeatable.",
)
DIVISION = (
    option(
        "--task NAME",
        "Select the task: node (classify nodes) or graph (classify whole graphs).  "
        "[default: chosen by the data]",
    ),
    option(
        "--partition NAME",
        "Divide the graph by this rule: louvain, metis, dirichlet:alpha=0.5, column:NAME, ...  "
        "[default: the owner column if the data have one, else chosen by the protocol]",
    ),
    option(
        "--split NAME",
        "Split nodes into training, validation and test by this rule: stratified, inductive, "
        "time:COLUMN, given, ...  [default: chosen by the protocol]",
    ),
    option(
        "--ratios A/B/C",
        "Set the fractions of training, validation and test, such as 0.2/0.4/0.4.  "
        "[default: chosen by the split]",
    ),
    PROTOCOL,
    option(
        "--data-seed S",
        "Fix the seed of partition and split for all runs.  "
        "[default: chosen by the protocol, or the seed of each run]",
        int,
    ),
    ALLOW,
    option(
        "--batch-size B",
        "Train on B graphs per step if the data are sets of graphs; 0 uses all graphs.  "
        "[default: chosen by the protocol]",
        int,
    ),
    option("--schema FILE", SCHEMA, PATH_TEXT),
    ENCODER,
    OWN,
    DATA_ROOT,
    NO_CACHE,
)
FEDERATION = (DATA, CLIENTS, *DIVISION)
"""The options that determine a federation, the same for `run` and `inspect`."""
ROUNDS = option(
    "--rounds R", "Train for R communication rounds.  [default: chosen by the protocol]", int
)
EPOCHS = option(
    "--epochs E", "Train for E local epochs per round.  [default: chosen by the protocol]", int
)
SEEDS = option("--seeds N", "Repeat the run with N seeds.  [default: 1]", int)
SEED = option("--seed S", "Set the first seed.  [default: 0]", int)
SEED_OF_DATA = option("--seed S", "Set the seed of partition and split.  [default: 0]", int)
SEED_OF_RUN = option("--seed S", "Select one seed of the run.  [default: the first seed]", int)
SETTINGS = repeatable(
    "--set KEY=VALUE",
    "Set a hyper-parameter of method, network or optimizer (`atoll methods NAME` lists them); "
    "repeatable.",
    name="settings",
)
DP = option(
    "--dp KEY=VALUE,...",
    "Train with client-level differential privacy: clip=1,noise=1.1,delta=1e-5 clips each "
    "client's update to norm 1, adds Gaussian noise with a standard deviation of 1.1 times clip, "
    "and reports epsilon.  [default: no privacy]",
)
DEVICE = option(
    "--device NAME",
    "Compute on this device: auto, cpu, cuda, or one GPU by its number (cuda:1).  [default: auto]",
)
*_FIRST, _LAST = AUTO, *ENGINES
_ENGINES = f"{', '.join(_FIRST)} or {_LAST}"
MACHINE = (
    option("--engine NAME", f"Run clients with this engine: {_ENGINES}.  [default: {AUTO}]"),
    DEVICE,
    option(
        "--chunk K",
        "Limit memory: the fused engine trains at most K clients at once.  [default: automatic]",
        int,
    ),
)
FRACTION = option(
    "--fraction F", "Train only this fraction of the clients in each round.  [default: 1]", float
)
EVALUATE = option(
    "--evaluate MODEL",
    "Evaluate this model: deployed (after aggregation) or local (after local training).  "
    "[default: chosen by the protocol]",
)
METRIC = option(
    "--metric NAME",
    "Select the reported round by this metric: accuracy, macro_f1, auc, average_precision, "
    "recall@1%, ... (docs/metrics.md). `tune` also optimises it, and `compare` tests it.  "
    "[default: chosen by the data]",
)
LOSS = (
    option(
        "--class-weights W",
        "Weight the classes in the loss: balanced (by each client's own training labels), or one "
        "number per class, such as 1,10.  [default: equal weights]",
    ),
    option(
        "--loss NAME",
        "Train with this loss: cross_entropy, focal or focal:GAMMA.  [default: cross_entropy]",
    ),
)
POSITIVE = option(
    "--positive CLASS",
    "Set the positive class of binary metrics such as average_precision.  "
    "[default: the second class]",
)
THRESHOLD = option(
    "--threshold RULE",
    "Choose the alert threshold on validation nodes by this rule: max_f1, "
    "recall@precision=P, precision@recall=R or cost:FN,FP.  [default: no threshold]",
)
LOG = repeatable(
    "--log TOOL", "Also send each round's metrics to tensorboard or mlflow; repeatable."
)
COMPAT = repeatable(
    "--compat NAME",
    "Emulate a known bug of a paper's public code (dropout-at-eval, test-selection); repeatable.",
)
TRAINING = (
    *(ROUNDS, EPOCHS, FRACTION, SEEDS, SEED, SETTINGS, DP, EVALUATE, METRIC, POSITIVE),
    *(THRESHOLD, *LOSS),
    COMPAT,
    *MACHINE,
)
CONFIG = option(
    "--config FILE",
    "Read options from this TOML file, for example the config.toml of a saved run.",
    PATH,
    name="config_file",
)
OUT = option(
    "--out DIR", "Save the result in this folder.  [default: a new folder in atoll-runs]", PATH
)
OVERWRITE = option("--overwrite", "Replace the run or the study in --out.")
JOBS = option(
    "--jobs N",
    "Run N processes in parallel; auto uses one per core if that is faster, and fewer on a GPU.",
    default="auto",
)
AS_JSON = option("--json", "Print one JSON object as the last line.", name="as_json")
QUIET = option("--quiet", "Print no progress and no tables.")
STUDY = (JOBS, AS_JSON, QUIET)
