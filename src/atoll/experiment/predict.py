"""Predictions of a finished run's model: for a separate graph, or for new nodes of the old graph.

The run's engine computes with the model of the selected round. On the training graph and the same
kind of device, the logits are those of the run, bit for bit. A graph that is too large for memory
is cut into blocks of nodes, each with all nodes that its predictions depend on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.core.message import Message, ToAll, ToEach
from atoll.core.method import Method, client_step
from atoll.core.tree import Tree, record, stack, tree_map
from atoll.data.archive import is_federation_file, load_federation
from atoll.data.divide import PREPARATIONS, InducedSubgraphs, graph_of, joined_graphs
from atoll.data.load import is_own, load, parse_own_options
from atoll.data.own.encoder import Encoder
from atoll.data.own.reader import load_new
from atoll.data.own.schema import quoted_list
from atoll.data.source import UNUSED, GraphGroup, GraphSet, Source
from atoll.engines.base import AUTO, choose_engine
from atoll.engines.clients import Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig
from atoll.experiment.folder import RunFolder
from atoll.experiment.hardware import available_memory, choose_device, tuned_process
from atoll.experiment.model import SelectedModel, read_encoder
from atoll.experiment.predictions import Alert, Predictions
from atoll.experiment.privacy import with_privacy
from atoll.experiment.problem import Data
from atoll.experiment.protocols import protocol
from atoll.experiment.threshold import Threshold

BLOCK = 1 << 16  # nodes of a block if a graph does not fit into memory
EDGE_BYTES = 150  # most bytes of memory per edge of a graph that is predicted as a whole
OWN = "a client keeps its predictions: this reply never leaves it"


@record
class Logits:
    """A client's logits, (rows, C). Rows after its last node or graph are zero."""

    logits: Tensor


@dataclass(frozen=True)
class Predictor:
    """Predict with a method, on the clients of an engine."""

    method: Method
    rows: int  # of every reply, because replies are stacked

    def derived_from(self, state: Tree) -> Tree:
        return self.method.derived_from(state)

    def derive(self, graph: Graph, part: Tree) -> Tree:
        return self.method.derive(graph, part)

    @client_step(keeps_state=True, discloses={"logits": OWN})
    def predict(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Logits:
        """Return the logits of all nodes, or graphs, without dropout."""
        found = graph.at_roots(self.method.predict(graph, message, state))
        return Logits(functional.pad(found, (0, 0, 0, self.rows - found.shape[0])))


@dataclass(frozen=True, eq=False)
class Part:
    """One client's nodes to predict, in a graph with their neighbours."""

    client: str
    graph: Graph
    rows: np.ndarray  # the requested rows of the graph's logits
    places: np.ndarray  # positions of these rows among all predictions


@dataclass(frozen=True, eq=False)
class Trained:
    """A run's model, with the method, encoder and device to use it."""

    path: Path  # of the run's folder, or of a model that a site received
    config: RunConfig
    seed: int
    model: SelectedModel
    encoder: Encoder | None
    method: Method
    device: torch.device
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path, seed: int | None, device: str, method: Method | None) -> Trained:
        """Read a run's model. Refuse a method that is bound to its training graph."""
        run = RunFolder(folder)
        config = run.located_config
        number = config.seed if seed is None else seed
        model = run.model(number)
        encoder = read_encoder(run.model_folder(number))
        found = cls.built(folder, config, number, model, encoder, device, method)
        there, here = run.summary.get("device", found.device.type), found.device.type
        if there != here:
            agree = "numbers agree to rounding, not bit for bit"
            found.notes.append(f"trained on {there}, predicted on {here}: {agree}")
        return found

    @classmethod
    def built(
        cls,
        path: Path,
        config: RunConfig,
        seed: int,
        model: SelectedModel,
        encoder: Encoder | None,
        device: str,
        method: Method | None = None,
    ) -> Trained:
        """Make a model with its method, which is built again unless it is given as an object."""
        if method is None:
            if "method" in config.objects:
                hint = "give the same object: result.predict(data, method=...)"
                raise ConfigError(f"the run in '{path}' trained a method object; {hint}")
            about: Mapping[str, Any] = model.about or {}
            method = build_method(config, *(about[key] for key in ("features", "classes", "task")))
        if why := method.why_bound():
            hint = "train another method to predict new nodes: see `atoll methods`"
            raise ConfigError(f"{config.method} cannot predict new nodes: {why}; {hint}")
        method, chosen = with_privacy(method, config.dp), choose_device(device)
        return cls(path, config, seed, model, encoder, method, chosen)

    @property
    def about(self) -> dict[str, Any]:
        """The content of model.toml."""
        return dict(self.model.about or {})

    @property
    def names(self) -> list[str]:
        """The names of the clients, or their numbers."""
        return list(map(str, self.about.get("client_names", range(len(self.model.rounds)))))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers."""
        return tuple(map(str, self.about.get("class_names", range(self.method.net.classes))))

    @property
    def is_global(self) -> bool:
        """Whether one model serves any client."""
        return self.method.scored_as() == "global" and len(self.model.deployed) == 1

    def place(self, client: str) -> int | None:
        """Return a client's position in training, or None if it gets the global model."""
        if client in self.names:
            return self.names.index(client)
        if not self.is_global:
            who = f"client '{client}' never trained" if client else "the new nodes name no client"
            why = f"{self.config.method} has a model for each client and none for others"
            hint = f"choose one with --client: {', '.join(self.names[:8])}"
            raise ConfigError(f"{who}, and {why}; {hint}")
        return None

    def note_strangers(self, owner: np.ndarray) -> None:
        """Add a note about clients that training did not know: a name may be misspelled."""
        names, counts = np.unique(owner, return_counts=True)
        found = dict(zip(names.tolist(), counts.tolist(), strict=True))
        new = {name: n for name, n in found.items() if name and name not in self.names}
        if new and not self.about.get("site"):
            listed = f"{quoted_list(new)} ({sum(new.values()):,} nodes)"
            got = "the global model, and no edge joins their nodes to another client's"
            self.notes.append(f"training did not know the clients {listed}: they get {got}")

    def alert(self, threshold: float | None) -> Alert | None:
        """Return the rule for alerts, from this threshold or from the run's own."""
        known, classes = Threshold.of(self.about), len(self.classes)
        if threshold is None:
            return None if known is None else Alert(known.positive, known.value)
        if not 0 <= threshold <= 1:
            raise ConfigError(f"--threshold is {threshold:g}; give a probability from 0 to 1")
        if known is None and classes != 2:
            why = f"the model has {classes} classes and no threshold to replace"
            raise ConfigError(f"--threshold is for models of two classes, but {why}; remove it")
        wanted = self.config.positive
        second = 1 if wanted is None else self.classes.index(wanted)
        return Alert(second if known is None else known.positive, threshold)

    @property
    def preparations(self) -> tuple[str, ...]:
        """The changes of a graph before training, except those that would remove new nodes."""
        names = protocol(self.config.protocol).prepare
        names = ("undirected",) if self.about.get("site") else names  # a site uses no other
        return tuple(name for name in names if name != "largest-component")

    def old_clients(self, count: int) -> list[np.ndarray]:
        """Return the old nodes of each client. Refuse changed data and nodes without a client."""
        if self.about.get("site"):
            return [np.arange(count)]
        found = RunFolder(self.path).partition(self.seed)
        every = np.concatenate([np.empty(0, np.int32), *found])
        if not np.array_equal(np.sort(every), np.arange(count)):
            where = f"'{self.config.data}' has {count} nodes, and the clients had {len(every)}"
            raise DataError(f"{where}; --joined needs the same data, each node with one client")
        return found

    def check_width(self, found: int, name: str) -> None:
        """Refuse data with another number of features."""
        if found != self.method.net.features:
            has = f"has {found} features, and the model was trained on {self.method.net.features}"
            raise DataError(f"'{name}' {has}; give data like the training data")

    def logits(self, parts: Sequence[Part], engine: str | None = None) -> list[np.ndarray]:
        """Return the requested logits of each part. By default the run's engine computes them."""
        graphs, method = tuple(part.graph for part in parts), self.method
        trees = [self.model.of_client(self.place(part.client)) for part in parts]
        message: Message = ToAll(self._there(trees[0][0]))
        if len(self.model.deployed) > 1:
            message = ToEach(self._there(stack([deployed for deployed, _ in trees])))
        simulation = Simulation(
            Federation(graphs, method.net.classes),
            method,
            engine=engine or self._engine(),
            device=self.device,
            chunk=self.config.chunk,
        )
        simulation.engine.import_states([self._there(private) for _, private in trees])
        step = Predictor(method, 1 + max(graph.num_nodes for graph in graphs)).predict
        found = simulation.clients(0).map(step, message).logits.cpu().numpy()
        return [rows[part.rows] for rows, part in zip(found, parts, strict=True)]

    def _engine(self) -> str:
        """Return the run's engine, or the automatic choice if it was a Python object."""
        return choose_engine(AUTO if "engine" in self.config.objects else self.config.engine)[0]

    def _there(self, tree: Tree) -> Tree:
        kind = torch.get_default_dtype()

        def one(leaf: Tensor) -> Tensor:
            return leaf.to(self.device, kind if leaf.is_floating_point() else leaf.dtype)

        return tree_map(one, tree)


def predict(
    folder: str | Path,
    data: str | Path | Data,
    *,
    joined: bool = False,
    client: str | None = None,
    seed: int | None = None,
    device: str = "auto",
    block: int | None = None,
    threshold: float | None = None,
    method: Method | None = None,
) -> Predictions:
    """Predict the classes of new nodes (or graphs) with the model of a finished run.

    Args:
        folder: The run's folder.
        data: A folder of tables like the training tables, or other data with the same number of
            features: a name, a federation file, or a Python object.
        joined: The tables contain new nodes of the training graph, and their edges may name old
            nodes. Otherwise they are a separate graph, and every edge joins two of its nodes.
        client: The owner of all new nodes. By default their owner column or folder names it.
        seed: A seed of the run. The default is its first seed.
        device: "auto", "cpu", "cuda" or "cuda:1".
        block: Nodes that are predicted at a time. By default all, or 65536 if memory is too small.
        threshold: An alert's least probability of the positive class. Default: the run's threshold.
        method: The method object of a run that was started with one.

    Examples:
        >>> import atoll
        >>> result = atoll.run("fedavg", "lagoon", clients=3, rounds=2, out="used-run")
        >>> result.predict("lagoon").probabilities.shape  # with the result's folder
        (3000, 6)
    """
    trained = Trained.of(Path(folder), seed, device, method)
    return predict_with(
        trained, data, joined=joined, client=client, block=block, threshold=threshold
    )


@tuned_process()
def predict_with(
    trained: Trained,
    data: str | Path | Data,
    *,
    joined: bool = False,
    client: str | None = None,
    block: int | None = None,
    threshold: float | None = None,
) -> Predictions:
    """Predict with a loaded model. The arguments are the same as in `predict`."""
    alert = trained.alert(threshold)
    found, start, notes = load_data(trained, data, client, joined=joined)
    if not isinstance(found, Source):
        if joined or block:
            raise ConfigError("joined and block are for one graph; remove them")
        return replace(_predict_clients(trained, found, client), alert=alert)
    found, owner = prepare(trained, found, start, client)
    logits = _in_pieces(trained, found, owner, start, block)
    trained.note_strangers(owner[start:])
    ids = found.columns.get("id", np.arange(-start, found.num_nodes - start))[start:]
    notes = (*notes, *trained.notes)
    return Predictions(ids, owner[start:], logits, trained.classes, notes, alert)


def prepare(
    trained: Trained, source: Source, start: int, client: str | None
) -> tuple[Source, np.ndarray]:
    """Return the graph, prepared as for training, and the client of each node."""
    trained.check_width(source.num_features, source.name)
    if source.classes > trained.method.net.classes:
        has = f"'{source.name}' has {source.classes} classes, more than training saw"
        raise DataError(f"{has} ({trained.method.net.classes}); remove the others")
    owner = _owners(trained, source, start, client)
    for name in trained.preparations:
        source = PREPARATIONS[name](source)
    return source, owner


def load_data(
    trained: Trained, data: str | Path | Data, client: str | None, *, joined: bool
) -> tuple[Data, int, tuple[str, ...]]:
    """Return the new data, the number of old nodes before the new ones, and the loader's notes."""
    config, encoder = trained.config, trained.encoder
    if not isinstance(data, str | Path):
        if isinstance(data, Source) and data.encoder != encoder:
            hint = "give the path of the tables, so that the run's encoder reads them"
            raise DataError(f"'{data.name}' was encoded by itself, not as in training; {hint}")
        return data, 0, ()
    name = str(data)
    if not name.strip():
        raise ConfigError("no data are named; give a folder of tables with --data")
    if is_federation_file(name):
        return load_federation(name), 0, ()
    if encoder is None:
        if joined:
            raise ConfigError("--joined needs a run on tables of your own, with ids; remove it")
        if is_own(name) and Path(name).suffix not in (".pt", ".pth"):  # tensors need no encoder
            why = "its data were no tables, or an earlier version or a federation made it"
            problem = f"the run in '{trained.path}' has no encoder ({why})"
            raise DataError(f"{problem}, so '{name}' cannot be read for it; give tensors (.pt)")
        rules = protocol(config.protocol)
        fixed = [one for one in (config.data_seed, rules.data_seed) if one is not None]
        seed = (*fixed, trained.seed)[0]
        clients = config.clients or rules.clients
        source, notes = load(name, root=config.data_root, clients=clients, seed=seed)
        return source, 0, tuple(notes)
    options, old = parse_own_options(config.own), None
    if joined:
        if not Path(config.data).is_dir():
            problem = f"--joined needs the training data, but there is no folder '{config.data}'"
            raise DataError(f"{problem} here; start the command where the run was started")
        old = load_new(Path(config.data), encoder, options)[0]
    source, report = load_new(Path(name).expanduser(), encoder, options, old, client)
    return source, 0 if old is None else old.num_nodes, report.messages


def _owners(trained: Trained, source: Source, start: int, client: str | None) -> np.ndarray:
    """Return the client of each node. An old node keeps its client."""
    column = (trained.config.partition or "").removeprefix("column:")
    owner = np.full(source.num_nodes, client or "", dtype=object)
    if (known := source.columns.get(column)) is not None:
        owner[:] = known.astype(str)
        if client is not None:
            owner[start:] = client
    if start:
        for name, ids in zip(trained.names, trained.old_clients(start), strict=True):
            owner[ids] = name
    if start and client is None and not all(owner[start:]):
        raise ConfigError("the new nodes name no owner to join; choose one with --client NAME")
    return owner.astype(str)


def _in_pieces(
    trained: Trained, source: Source, owner: np.ndarray, start: int, block: int | None
) -> np.ndarray:
    """Return the logits of all nodes from `start` on, computed as a whole or in blocks."""
    logits = torch.zeros(source.num_nodes - start, trained.method.net.classes).numpy()
    reach, names = trained.method.reach, np.unique(owner[start:])
    for name in names:
        trained.place(name)  # refuse a client without a model before any computation
    if block is None:
        fits = EDGE_BYTES * source.edges.shape[1] < available_memory() / 2
        block = 0 if fits or reach is None else BLOCK
    if block and reach is None:
        looks = f"{trained.config.method} looks at the whole graph at once"
        raise ConfigError(f"{looks}, so that it cannot predict in blocks; remove --block")
    found = _client_sources(source, owner, names)
    if block:
        hops = (reach or 0) + 1  # one more, because the degrees of the last nodes matter, too
        for one in found:
            for piece in _blocks(*one, start, block, hops):
                logits[piece.places] = trained.logits([piece], engine="serial")[0]
        return logits
    parts = [_whole(*one, start) for one in found]
    for part, rows in zip(parts, trained.logits(parts), strict=True):
        logits[part.places] = rows
    return logits


def _client_sources(
    source: Source, owner: np.ndarray, names: np.ndarray
) -> Iterator[tuple[str, Source, np.ndarray]]:
    """Yield the name, the nodes and edges, and the node numbers of each client with new nodes."""
    cut = None if len(names) == 1 and (owner == names[0]).all() else InducedSubgraphs(source)
    for name in names:
        ids = np.flatnonzero(owner == name)
        yield str(name), source if cut is None else cut.part(ids), ids


def _whole(client: str, part: Source, ids: np.ndarray, start: int) -> Part:
    """Return all nodes of a client as one part."""
    rows = np.flatnonzero(ids >= start)
    graph = graph_of(part, ids, np.full(len(ids), UNUSED))
    return Part(client, graph, rows, ids[rows] - start)


def _blocks(
    client: str, part: Source, ids: np.ndarray, start: int, size: int, hops: int
) -> Iterator[Part]:
    """Yield blocks of new nodes, each with all nodes that are at most `hops` edges before them."""
    before, cut, new = edges_before(part), InducedSubgraphs(part), np.flatnonzero(ids >= start)
    for first in range(0, len(new), size):
        own = new[first : first + size]
        rows = near(before, own, hops)
        graph = graph_of(cut.part(rows), ids[rows], np.full(len(rows), UNUSED))
        yield Part(client, graph, np.searchsorted(rows, own), ids[own] - start)


def edges_before(part: Source) -> sp.csr_array:
    """Return a matrix with a row for each node: the nodes with an edge to it."""
    size, (begins, ends) = part.num_nodes, part.edges
    return sp.csr_array((np.ones(len(ends), np.int8), (ends, begins)), shape=(size, size))


def near(before: sp.csr_array, nodes: np.ndarray, hops: int) -> np.ndarray:
    """Return nodes and all nodes that are at most `hops` edges before them, in ascending order."""
    seen = np.zeros(before.shape[0], dtype=bool)
    seen[nodes] = True
    for _ in range(hops):
        nodes = np.unique(before[nodes].indices)
        nodes = nodes[~seen[nodes]]
        seen[nodes] = True
    return np.flatnonzero(seen)


def _predict_clients(
    trained: Trained, data: Federation | GraphSet | GraphGroup, client: str | None
) -> Predictions:
    """Predict all nodes of the clients of partitioned data, or the graphs of a set."""
    graphs, names = list[Graph](), list[str]()
    if isinstance(data, Federation):
        graphs, names = list(data.graphs), list(data.about.get("client_names", ()))
    else:
        sets = data.sets if isinstance(data, GraphGroup) else (data,)
        width, classes = trained.method.net.features, trained.method.net.classes
        for one in sets:
            if one.num_features > width or one.classes > classes:
                trained.check_width(one.num_features, one.name)
                raise DataError(f"'{one.name}' has more classes than the {classes} of training")
            every = np.arange(one.num_graphs)
            roles = np.full(len(every), UNUSED)
            graphs.append(joined_graphs(one.undirected_simple(), every, roles, width, classes))
    trained.check_width(graphs[0].num_features, data.name)
    if client is not None or (len(graphs) == 1 < len(trained.names) and not names):
        names = [client or ""] * len(graphs)
    names = names or [*map(str, range(len(graphs)))]
    sizes = [len(graph.at_roots(graph.y)) for graph in graphs]
    ends = np.cumsum(sizes)
    parts = [
        Part(name, graph, np.arange(size), np.arange(end - size, end))
        for name, graph, size, end in zip(names, graphs, sizes, ends, strict=True)
    ]
    logits = np.concatenate(trained.logits(parts))
    ids = [graph.at_roots(graph.ids).numpy() for graph in graphs]
    if trained.about["task"] != "node":
        ids = [np.arange(size) for size in sizes]
    found = np.concatenate(ids), np.repeat(np.array(names), sizes), logits
    trained.note_strangers(found[1])
    return Predictions(*found, trained.classes, tuple(trained.notes))
