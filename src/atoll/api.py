"""The Python face: the verbs of the command line, and the view of a result.

A result is a value below views and predictions, so `Result.plot`, `Result.predict` and
`Result.model` are attached here, in the top layer.
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

# Not by assignment: tools that read the source take the documentation from the imports.
globals().update(run=with_progress(run), resume=with_progress(resume))
RULES = PROTOCOLS["strict"]
CLIENTS = RULES.clients


def plot(result: Result, kind: str = "convergence") -> Figure:
    """A matplotlib Figure of a result: "convergence", "clients" or "traffic".

    A notebook shows it; `result.plot().savefig("curve.png")` keeps it.
    """
    from atoll.present.result_plots import plot_result  # matplotlib takes long to import

    return plot_result(result, kind)


def predict(result: Result, data: str | Path | Data, **options: Any) -> Predictions:
    """The classes of new nodes by the model of a saved result; see `atoll.experiment.predict`.

    Args:
        result: It was saved (`out=`), because its folder has the model.
        data: A folder of tables like those of the training, or an object of Python.
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
    """The model of the selected round as a torch module of stock PyG layers, on the CPU.

    Args:
        result: It was saved (`out=`), because its folder has the model.
        client: Whose model, for a method with one for each client.
        seed: Of the run; by default its first.
        method: The method object of a run that was started with one.

    Examples:
        >>> import atoll
        >>> result = atoll.run("fedavg", "lagoon", clients=3, rounds=2, out="module-run")
        >>> graph = atoll.partition(atoll.load("lagoon")).graphs[0]
        >>> net = result.model()
        >>> net(graph.x.to_dense(), graph.edges).shape == (graph.num_nodes, 6)
        True
    """
    from atoll.experiment.export import module  # PyG's layers take long to import

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
    """One whole graph, a set of small graphs, or a group of such sets, by its name or path.

    A file that `save` or `atoll partition` wrote is a federation, divided already.

    Args:
        name: What to load; `atoll datasets` lists the names.
        root: Where data sets are looked for (default: the variable ATOLL_DATA).
        **options: clients and seed for the built-in data; schema for tables of your own; lazy for
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
    """Divide a graph, or a set of graphs, among clients, and what each has into roles.

    Args:
        source: What `load` gave.
        recipe: As `--partition` on the command line. By default it divides as `run` does: by owner
            where the graph names owners, else "louvain"; "gcfl-oneds" for a set of graphs; and each
            client gets a set of a group.
        clients: How many, 5 by default; owners and groups have a number already.
        seed: Of the partition and the split.
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
        raise ConfigError(f"'{source.name}' is a federation, divided already; use it as it is")
    ready = source.prepared()
    if not isinstance(ready, Source):
        count = clients if isinstance(ready, GraphGroup) else clients or CLIENTS
        return federate(ready, clients=count, partition=recipe, seed=seed, **options)
    column = owner_column(ready, ready.name)
    recipe = recipe or (f"column:{column}" if column else RULES.partition)
    count = clients if recipe.startswith("column:") else clients or CLIENTS
    return federate(ready, clients=count, partition=recipe, seed=seed, **options)


def save(federation: Federation, path: str | Path) -> Path:
    """Write a federation into one file, which `load`, and `--data` of every command, can read.

    Examples:
        >>> import atoll
        >>> federation = atoll.partition(atoll.load("lagoon"), "louvain", clients=2)
        >>> path = atoll.save(federation, "two.atoll")
        >>> len(atoll.load("two.atoll"))
        2
    """
    return save_federation(federation, path)
