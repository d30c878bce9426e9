"""The Python API: load, divide and save data, run and resume experiments, and use results.

A `Result` does not depend on plots and predictions, so this module, in the top layer, attaches
`Result.plot`, `Result.predict` and `Result.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.method import Method
from atoll.data.archive import is_federation_file, load_federation, save_federation
from atoll.data.divide import BATCH_SIZE, federate
from atoll.data.load import load as load_any
from atoll.data.source import GraphGroup, GraphSet, Source
from atoll.data.split import Ratios
from atoll.experiment.config import owner_column
from atoll.experiment.folder import read_result
from atoll.experiment.predict import Trained, predict
from atoll.experiment.protocols import PROTOCOLS
from atoll.experiment.result import Result
from atoll.experiment.run import resume, run
from atoll.present.notebook import with_progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.nn import Module

__all__ = ["Result", "load", "partition", "read_result", "resume", "run", "save"]

# Not `run = with_progress(run)`, because documentation tools read the imports above.
globals().update(run=with_progress(run), resume=with_progress(resume))
RULES = PROTOCOLS["strict"]
CLIENTS = RULES.clients
P = ParamSpec("P")
T = TypeVar("T")


def plot(result: Result, kind: str = "convergence") -> Figure:
    """Return a matplotlib Figure of a result. Kinds are "convergence", "clients" and "traffic".

    A notebook shows it, and `result.plot().savefig("curve.png")` saves it.
    """
    from atoll.present.result_plots import plot_result  # matplotlib is slow to import

    return plot_result(result, kind)


def model(
    result: Result, client: str = "", *, seed: int | None = None, method: Method | None = None
) -> Module:
    """Return the model of the selected round as a torch module of standard PyG layers, on the CPU.

    It raises a ConfigError if PyG has no equal layers for the network, or if such layers cannot
    compute the method's prediction.

    Args:
        result: A saved result (`out=`), because its folder contains the model.
        client: The client's name. It is required if each client has its own model.
        seed: A seed of the run. The default is its first seed.
        method: The method object, if the run was started with one.

    Examples:
        >>> import atoll
        >>> result = atoll.run("fedavg", "lagoon", clients=3, rounds=2, out="module-run")
        >>> graph = atoll.partition(atoll.load("lagoon")).graphs[0]
        >>> net = result.model()
        >>> net(graph.x.to_dense(), graph.edges).shape == (graph.num_nodes, 6)
        True
    """
    from atoll.experiment.export import module  # PyG's layers are slow to import

    return module(Trained.of(_folder_of(result), seed, "cpu", method), client)


def _folder_of(result: Result) -> Path:
    if result.out is None:
        raise ConfigError("this result was not saved, so it has no model; run with out=FOLDER")
    return Path(result.out)


def _of_saved(function: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Result, P], T]:
    """Make a method of a saved result from a function of a run's folder."""

    @wraps(function)
    def inner(result: Result, /, *args: P.args, **options: P.kwargs) -> T:
        return function(_folder_of(result), *args, **options)

    return inner


Result.plot = plot
Result.predict = _of_saved(predict)
Result.model = model


def load(
    name: str,
    *,
    root: str | Path | None = None,
    clients: int = CLIENTS,
    seed: int = 0,
    schema: str | Path | None = None,
    own: Mapping[str, object] | None = None,
    lazy: bool = False,
) -> Source | GraphSet | GraphGroup | Federation:
    """Load one whole graph, a set of small graphs, or a group of such sets, by name or path.

    A file that `save` or `atoll partition` wrote contains a federation, which is already divided.

    Args:
        name: Name or path. `atoll datasets` lists the names.
        root: Folder of data sets (default: ATOLL_DATA, else ~/.cache/atoll/data).
        clients: Number of owners in the built-in data.
        seed: Seed of the built-in data.
        schema: A TOML file with the column roles of your own tables.
        own: How to read your own tables, such as {"dangling": "drop"}. See `--own` of `atoll run`.
        lazy: Read a graph at each access and keep none in memory. Only for federation files.

    Examples:
        >>> import atoll
        >>> source = atoll.load("lagoon", clients=3)
        >>> source.num_nodes, source.classes
        (3000, 6)
    """
    if is_federation_file(name):
        return load_federation(name, lazy=lazy)
    if lazy:
        raise ConfigError(f"lazy is for a federation file, but '{name}' is none; remove it")
    return load_any(name, root=root, clients=clients, seed=seed, schema=schema, own=own)[0]


def partition(
    source: Source | GraphSet | GraphGroup | Federation,
    recipe: str | None = None,
    *,
    clients: int | None = None,
    seed: int = 0,
    split: str = RULES.split,
    ratios: Ratios | None = None,
    partition_seed: int | None = None,
    allow: Collection[str] = (),
    batch_size: int = BATCH_SIZE,
) -> Federation:
    """Divide a graph, or a set of graphs, among clients, and split each client's part into roles.

    Args:
        source: The result of `load`, except a federation, which is already divided.
        recipe: As `--partition` on the command line. The default divides as `run` does: by owner
            if the graph has owners, else "louvain"; "gcfl-oneds" for a set of graphs; one client
            per set for a group.
        clients: Number of clients. By default 5, or one per owner, or one per set of a group.
        seed: Seed of the partition and the split.
        split: As `--split` on the command line.
        ratios: Fractions of training, validation and test items. By default the split's own.
        partition_seed: Seed of the partition, if it differs from `seed`.
        allow: "no-edge" accepts clients without an edge, "single-class" those with one class.
        batch_size: Training graphs per step, for sets of graphs. 0 uses all graphs of a client.

    Examples:
        >>> import atoll
        >>> source = atoll.load("lagoon")
        >>> len(atoll.partition(source, "louvain", clients=4))
        4
        >>> len(atoll.partition(source))  # one client for each owner of nodes
        5
    """
    if isinstance(source, Federation):
        raise ConfigError(f"'{source.name}' is already a divided federation; use it unchanged")
    if isinstance(clients, int) and clients < 1:
        raise ConfigError(f"clients is {clients}; give a whole number of at least 1")
    ready = source.prepared()
    if isinstance(ready, Source):
        column = owner_column(ready, ready.name)
        recipe = recipe or (f"column:{column}" if column else RULES.partition)
        fixed = recipe.startswith("column:")
    else:
        fixed = isinstance(ready, GraphGroup)
    return federate(
        ready, clients=clients if fixed else clients or CLIENTS, partition=recipe, split=split,
        ratios=ratios, seed=seed, partition_seed=partition_seed, allow=allow, batch_size=batch_size,
    )  # fmt: skip


def save(federation: Federation, path: str | Path) -> Path:
    """Write a federation into one file, which `load` and `--data` can read. Return its path.

    Examples:
        >>> import atoll
        >>> federation = atoll.partition(atoll.load("lagoon"), "louvain", clients=2)
        >>> path = atoll.save(federation, "two.atoll")
        >>> len(atoll.load("two.atoll"))
        2
    """
    return save_federation(federation, path)
