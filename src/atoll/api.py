"""The Python API: the verbs of the command line, and the methods of a result.

A `Result` does not depend on plots and predictions, so this module, in the top layer, attaches
`Result.plot`, `Result.predict` and `Result.model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.method import Method
from atoll.data.archive import is_federation_file, load_federation, save_federation
from atoll.data.divide import federate
from atoll.data.load import load as load_any
from atoll.data.source import GraphGroup, GraphSet, Source
from atoll.experiment.config import owner_column
from atoll.experiment.folder import read_result
from atoll.experiment.predict import Trained
from atoll.experiment.predict import predict as predict_new
from atoll.experiment.predictions import Predictions
from atoll.experiment.problem import Data
from atoll.experiment.protocols import PROTOCOLS
from atoll.experiment.result import Result
from atoll.experiment.run import resume, run
from atoll.present.notebook import with_progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.nn import Module

__all__ = ["Result", "load", "partition", "read_result", "resume", "run", "save"]

# No assignment, because documentation tools read the imports.
globals().update(run=with_progress(run), resume=with_progress(resume))
RULES = PROTOCOLS["strict"]
CLIENTS = RULES.clients


def plot(result: Result, kind: str = "convergence") -> Figure:
    """Return a matplotlib Figure of a result: "convergence", "clients" or "traffic".

    A notebook shows it, and `result.plot().savefig("curve.png")` saves it.
    """
    from atoll.present.result_plots import plot_result  # matplotlib is slow to import

    return plot_result(result, kind)


def predict(result: Result, data: str | Path | Data, **options: Any) -> Predictions:
    """Predict the classes of new nodes with a saved result. See `atoll.experiment.predict`.

    Args:
        result: A saved result (`out=`), because its folder contains the model.
        data: A folder of tables with the columns of the training data, or a Python object.
        **options: joined, client, seed, device, block and method, as in `atoll predict`.

    Examples:
        >>> import atoll
        >>> result = atoll.run("fedavg", "lagoon", clients=3, rounds=2, out="used-run")
        >>> result.predict("lagoon").probabilities.shape
        (3000, 6)
    """
    return predict_new(_folder_of(result), data, **options)


def model(
    result: Result, client: str = "", *, seed: int | None = None, method: Method | None = None
) -> Module:
    """Return the model of the selected round as a torch module of standard PyG layers, on the CPU.

    Args:
        result: A saved result (`out=`), because its folder contains the model.
        client: The client's name, if each client has its own model.
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


Result.plot = plot
Result.predict = predict
Result.model = model


def load(
    name: str, *, root: str | Path | None = None, **options: Any
) -> Source | GraphSet | GraphGroup | Federation:
    """Load one whole graph, a set of small graphs, or a group of such sets, by name or path.

    A file that `save` or `atoll partition` wrote contains a federation, which is already divided.

    Args:
        name: Name or path. `atoll datasets` lists the names.
        root: Folder of data sets (default: ATOLL_DATA, else ~/.cache/atoll/data).
        **options: clients and seed for the built-in data; schema for your own tables; lazy for
            a federation that does not fit into memory.

    Examples:
        >>> import atoll
        >>> source = atoll.load("lagoon", clients=3)
        >>> source.num_nodes, source.classes
        (3000, 6)
    """
    if is_federation_file(name):
        return load_federation(name, **options)
    return load_any(name, root=root, **options)[0]


def partition(
    source: Source | GraphSet | GraphGroup | Federation,
    recipe: str | None = None,
    *,
    clients: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Federation:
    """Divide a graph, or a set of graphs, among clients, and split each client's nodes into roles.

    Args:
        source: The result of `load`.
        recipe: As `--partition` on the command line. The default divides as `run` does: by owner
            if the graph has owners, else "louvain"; "gcfl-oneds" for a set of graphs; one client
            per set for a group.
        clients: Number of clients, by default 5. Owners and groups determine the number.
        seed: Seed of the partition and the split.
        **options: split, ratios, allow and more, see `atoll.data.divide.federate`.

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
    ready = source.prepared()
    if not isinstance(ready, Source):
        count = clients if isinstance(ready, GraphGroup) else clients or CLIENTS
        return federate(ready, clients=count, partition=recipe, seed=seed, **options)
    column = owner_column(ready, ready.name)
    recipe = recipe or (f"column:{column}" if column else RULES.partition)
    count = clients if recipe.startswith("column:") else clients or CLIENTS
    return federate(ready, clients=count, partition=recipe, seed=seed, **options)


def save(federation: Federation, path: str | Path) -> Path:
    """Write a federation into one file, which `load` and `--data` of every command can read.

    Examples:
        >>> import atoll
        >>> federation = atoll.partition(atoll.load("lagoon"), "louvain", clients=2)
        >>> path = atoll.save(federation, "two.atoll")
        >>> len(atoll.load("two.atoll"))
        2
    """
    return save_federation(federation, path)
