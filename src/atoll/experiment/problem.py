"""The data of a run: source, partition and split, resolved once, with a cache of its clients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from atoll import __version__
from atoll.core.clock import OFF, Clock
from atoll.core.errors import ConfigError, counted
from atoll.core.federation import Federation, LazyGraphs
from atoll.core.task import GRAPHS, NODES
from atoll.core.tree import num_bytes, tree_map
from atoll.data.archive import Header, load_federation, memory_needed, new_file, save_federation
from atoll.data.cache import Cache, key_of
from atoll.data.divide import BATCH_SIZE, PREPARATIONS, federate
from atoll.data.load import is_own, load
from atoll.data.public.registry import homes_of_data
from atoll.data.source import GraphGroup, GraphSet, Source
from atoll.data.synthetic import built_in
from atoll.engines.prepare import ready_graphs
from atoll.experiment.config import (
    RunConfig,
    check_divided,
    config_text,
    data_header,
    resolve,
    with_own_partition,
)
from atoll.experiment.fingerprint import data_fingerprint
from atoll.experiment.hardware import available_memory
from atoll.experiment.metrics import find_metric, label_of
from atoll.experiment.model import read_encoder
from atoll.experiment.newcomer import set_apart
from atoll.experiment.protocols import Protocol
from atoll.experiment.unseen import all_tested, part_unseen

NEARLY = 0.75  # mean share of a client's most frequent class above which a score means little
TRAINING = (
    *("method", "rounds", "epochs", "fraction", "seeds", "seed", "engine", "device", "chunk"),
    *("set", "compat", "evaluate", "objects", "metric", "positive", "class_weights", "loss"),
    "threshold",
)
"""Options that do not affect clients, except `seed` (`seed_of_data`). All others may do so."""
UNEVEN = 1e3  # largest ratio of the scales of two feature columns without a warning
CONFIG = "config"  # key of the choices that the data determined, in cached clients
SHARE = 4  # federations are cached in at most the free memory divided by this
_LOADING = Lock()  # so that threads for several seeds load the data only once
Data = Source | GraphSet | GraphGroup | Federation  # Python objects instead of a name


def data_object(data: object) -> Data | None:
    """Return data that are not given by name, or None. Refuse objects that a run cannot use."""
    if not isinstance(data, str | Data):
        kind = "None" if data is None else f"an object of type {type(data).__name__}"
        takes = "a name or path as text, or the result of atoll.load or atoll.partition"
        raise ConfigError(f"data cannot be {kind}; give {takes}")
    return None if isinstance(data, str) else data


def task_of_object(data: Data | None) -> str | None:
    """Return the task of a data object, or None if the data are given by name."""
    if isinstance(data, Federation):
        return data.task.name
    if data is None:
        return None
    return (NODES if isinstance(data, Source) else GRAPHS).name


@dataclass(frozen=True)
class Division:
    """The clients of one seed."""

    federation: Federation
    notes: list[str]  # of the loader
    config: RunConfig  # with every choice named; the data may determine the partition
    newcomer: Federation | None = None  # a client that never trains
    whole: Federation | None = None  # the clients with all nodes, if some arrive after training


@dataclass(frozen=True)
class Problem:
    """Source, partition and split of a run, resolved once."""

    given: RunConfig  # by the user
    config: RunConfig  # completed by the protocol
    rules: Protocol
    data: Data | None = None  # an object instead of a name
    clock: Clock = OFF

    @classmethod
    def of(cls, given: RunConfig, data: Data | None = None, clock: Clock = OFF) -> Problem:
        """Resolve a configuration. No data are loaded yet."""
        if isinstance(data, Federation):
            check_divided(given, _choices(data))
        return cls(given, *resolve(given, task_of_object(data)), data, clock)

    @property
    def divided(self) -> Header | None:
        """The header of a federation file, or None for other data."""
        return data_header(self.config) if self.data is None else None

    def seed_of_data(self, seed: int) -> int:
        """Return the seed of partition and split in a run with this seed."""
        return seed if self.rules.data_seed is None else self.rules.data_seed

    def federation(self, seed: int) -> Federation:
        """Return the clients of one seed."""
        return self.divide(seed).federation

    def divide(self, seed: int) -> Division:
        """Return the clients of one seed, with notes and the completed configuration."""
        made, name = self._divide(seed), self.config.held_out_client
        federation, newcomer = made.federation, None
        if name is not None:
            federation, newcomer = set_apart(federation, name, self.seed_of_data(seed))
        federation, whole = part_unseen(federation)
        if newcomer is not None and whole is not None:
            newcomer = all_tested(newcomer)
        return replace(made, federation=federation, newcomer=newcomer, whole=whole)

    def _divide(self, seed: int) -> Division:
        config, data = self.config, self.data
        if isinstance(data, Federation):
            made = msgspec.structs.replace(config, ratios=None, **_choices(data))
            return Division(data, [], made)
        if self.divided is not None:
            return Division(*open_federation(config, self.divided), config)
        if (cache := self.cache) is None:
            return self._make(seed)
        key = self._key(seed, cache)
        with self.clock.stage("loading"):
            found = cache.read("federation", key, partial(_cached, config))
        if found is None:
            found = self._make(seed)
            known = Settled(found.config.partition, found.config.clients)
            about = {**found.federation.about, CONFIG: msgspec.to_builtins(known)}
            size = num_bytes(list(found.federation.graphs))
            keep = partial(save_federation, replace(found.federation, about=about))
            cache.write("federation", key, keep, size)
        return found

    @property
    def cache(self) -> Cache | None:
        """Return the cache for clients, or None for the user's own data or if caching is off."""
        users = self.data is not None or is_own(self.config.data)
        return None if users else Cache.of_environment()

    def _key(self, seed: int, cache: Cache) -> str:
        """Return the cache key of a seed's clients, from the data and all relevant options."""
        data, root = self.config.data, self.config.data_root
        raw = "" if built_in(data) else cache.hash_of(homes_of_data(data, root))
        plain = {"data_root": None, "from_run": None, "held_out_client": None, "dp": None}
        group = group_of(msgspec.structs.replace(self.given, **plain))
        return key_of(raw, group, self.seed_of_data(seed))

    def _make(self, seed: int) -> Division:
        config, data = self.config, self.data
        assert not isinstance(data, Federation)
        with self.clock.stage("loading"):
            source, notes = (data, []) if data is not None else self.load(seed)
        if not isinstance(source, Source):
            # A group determines its own partition, so refuse a user's choice of another one.
            wishes = self.given if isinstance(source, GraphGroup) else config
            clients, partition = wishes.clients, wishes.partition
            if "undirected" in self.rules.prepare:
                source = source.undirected_simple()
        else:
            source, config = self.prepare(source)
            clients, partition = config.clients, config.partition or self.rules.partition
        federation = federate(
            source,
            clients=clients,
            partition=partition,
            split=config.split or self.rules.split,
            ratios=config.ratios,
            seed=self.seed_of_data(seed),
            allow=config.allow,
            batch_size=BATCH_SIZE if config.batch_size is None else config.batch_size,
        )
        known = {}
        if not isinstance(source, Source):
            known["partition"] = federation.about["partition"]
        if data is not None or not isinstance(source, Source):  # these may name their clients
            known["clients"] = len(federation)
        return Division(federation, notes, msgspec.structs.replace(config, **known))

    def undivided(self, seed: int) -> Source | None:
        """Return the graph that `divide` partitions, or None for graph sets and federations."""
        if isinstance(self.data, Federation) or self.divided is not None:
            return None
        source = self.load(seed)[0] if self.data is None else self.data
        return self.prepare(source)[0] if isinstance(source, Source) else None

    def load(self, seed: int) -> tuple[Source | GraphSet | GraphGroup, list[str]]:
        """Return the named data before partitioning, and the loader's notes."""
        # Only built-in data depend on the seed.
        again = self.config.seeds == 1 or built_in(self.config.data)
        if again:
            return self._load(seed)
        with _LOADING:
            return self._loaded

    @cached_property
    def _loaded(self) -> tuple[Source | GraphSet | GraphGroup, list[str]]:
        return self._load(self.config.seed)

    def _load(self, seed: int) -> tuple[Source | GraphSet | GraphGroup, list[str]]:
        config, seed = self.config, self.seed_of_data(seed)
        clients = config.clients or self.rules.clients
        encoder = None
        if config.from_run is not None and is_own(config.data):  # columns must mean the same
            models = sorted(Path(config.from_run, "model").glob("seed-*"))
            if not models:
                hint = "give the folder of a finished run"
                raise ConfigError(f"'{config.from_run}' holds no model to start from; {hint}")
            encoder = read_encoder(models[0])
        # If the run itself partitions one table, its single owner measures all rows.
        divided = not (self.given.partition or "column:").startswith("column:")
        if divided and config.encoder == "local":
            hint = "remove --partition, or --encoder"
            raise ConfigError(f"--encoder local needs clients that the tables name; {hint}")
        measure = config.encoder or "federated"
        return load(
            config.data,
            clients=clients,
            seed=seed,
            root=config.data_root,
            schema=config.schema,
            own=config.own,
            encoder=encoder,
            measure="pooled" if divided else measure,
            private=config.dp is not None,
        )

    def prepare(self, source: Source) -> tuple[Source, RunConfig]:
        """Return one graph, prepared by the protocol, and the configuration with its partition."""
        config = with_own_partition(self.config, source, self.given)
        for name in self.rules.prepare:
            source = PREPARATIONS[name](source)
        return source, config


def _choices(data: Federation) -> dict[str, Any]:
    """Return the options that a divided federation determines."""
    made = {key: data.about.get(key, "given") for key in ("partition", "split")}
    return {"clients": len(data), **made}


class Settled(msgspec.Struct, forbid_unknown_fields=True):
    """The options that the data determine. Only these are read from the cache."""

    partition: str | None
    clients: int | None


Divide = Callable[[Problem, int], Division]
"""A function that makes the clients of one seed, such as `Problem.divide`."""


def _cached(config: RunConfig, path: Path) -> Division:
    """Load clients from the cache into memory, because the entry may be deleted at any time."""
    found = load_federation(path)
    about, graphs = dict(found.about), tree_map(torch.clone, tuple(found.graphs))
    known: Settled = msgspec.convert(about.pop(CONFIG), Settled)
    federation = replace(found, graphs=graphs, about=about)
    return Division(
        federation, [], msgspec.structs.replace(config, **msgspec.structs.asdict(known))
    )


def open_federation(config: RunConfig, header: Header) -> tuple[Federation, list[str]]:
    """Load a federation from its file. Return it, and notes on its origin."""
    path, needed, free = config.data, memory_needed(config.data), available_memory()
    keys = ("partition", "split", "seed", "protocol", "sha1")
    known = [f"{key} {header.about[key]}" for key in keys if header.about.get(key) is not None]
    notes = [f"{path}: {header.name} in {counted(header.clients, 'client')} ({', '.join(known)})"]
    if config.seeds > 1:
        notes.append("every seed trains the same clients with the same split, from the file")
    if lazy := needed > free / 2:
        notes.append(
            f"clients are read when they are needed: at once they would take about "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        )
    return load_federation(path, lazy=lazy), notes


def save_divided(given: RunConfig, out: Path) -> tuple[Path, Division]:
    """Partition data as a run would, and save the clients. Return the file and the clients."""
    if data_header(given) is not None:
        raise ConfigError(f"'{given.data}' is divided already; give data that are not")
    out = new_file(out)
    problem = Problem.of(given)
    made = problem._divide(problem.config.seed)  # with all clients and nodes
    about = {
        "data": made.config.data,
        "seed": problem.seed_of_data(made.config.seed),
        "protocol": problem.rules.name,
        "ratios": made.config.ratios,
        "own": made.config.own,
        "atoll": __version__,
        **made.federation.about,
        "partition": made.config.partition,
        "split": made.config.split,
    }
    return save_federation(replace(made.federation, about=about), out), made


def nearly_single_class(
    federation: Federation, metric: str = "accuracy", positive: int = 1
) -> list[str]:
    """Return a warning if one class dominates at the clients, otherwise []. Skip lazy graphs."""
    counts = _class_counts(federation)
    shares = [float(own.max() / own.sum()) for own in counts if own.sum()]
    every = sum(counts, torch.zeros(federation.classes))
    mean = sum(shares) / max(len(shares), 1)
    advice = "compare accuracies with that number"
    if metric == "average_precision":
        chance = f"{100 * float(every[positive] / every.sum()):.2g} %"
        advice = f"guessing has an average precision of {chance}, the positive class's share"
    elif metric == "auc":
        advice = "guessing has an AUC of 50 %"
    elif metric != "accuracy":
        advice = f"this number is about accuracy, not about {label_of(metric)}"
    warning = (
        f"one class dominates at the clients: always predicting a client's most frequent class "
        f"is right for {100 * mean:.0f} % of its {federation.task.plural} on average; {advice}"
    )
    return [] if mean < NEARLY else [warning]


def _class_counts(federation: Federation) -> list[Tensor]:
    """Return each client's number of known items by class. Skip lazy graphs, which take long."""
    found = list[Tensor]()
    for graph in () if isinstance(federation.graphs, LazyGraphs) else federation.graphs:
        known = graph.at_roots(graph.train + graph.val + graph.test) > 0
        found.append(graph.at_roots(graph.y)[known].bincount(minlength=federation.classes))
    return found


def frequent_positive(
    config: RunConfig, federation: Federation, metric: str, positive: int
) -> list[str]:
    """Return a note if the default positive class is the frequent one and matters, otherwise []."""
    matters = find_metric(metric).of_class or config.threshold is not None
    every = sum(_class_counts(federation), torch.zeros(federation.classes))
    if config.positive is not None or not matters or 2 * every[positive] <= every.sum():
        return []
    name = federation.class_names[positive]
    return [f"positive class is '{name}', the frequent one; choose another with --positive"]


def uneven_features(federation: Federation) -> list[str]:
    """Return a warning if the scales of two dense columns differ by 1e3 or more, otherwise []."""
    largest = torch.zeros(federation.features)
    if isinstance(federation.graphs, LazyGraphs):
        return []
    for graph in federation.graphs:
        if not isinstance(graph.x, Tensor):  # sparse features are words of a text
            return []
        largest = torch.maximum(largest, graph.x.abs().amax(0).float())
    known = largest[largest > 0]
    if not known.numel() or float(known.max() / known.min()) < UNEVEN:
        return []
    times = f"{float(known.max() / known.min()):.0e}".replace("e+0", "e")
    return [
        f"feature columns differ in scale by {times}, so that the small ones hardly count; scale "
        "them, for example with scale = 'standard' in schema.toml"
    ]


def need_one_graph(federation: Federation) -> None:
    """Refuse clients with many graphs each, for commands that need one graph."""
    if federation.task.many_graphs:
        why = "is a set of graphs with one label each; this command needs one graph"
        raise ConfigError(f"'{federation.name}' {why}: see `atoll datasets`")


class FederationCache:
    """A cache of the federations of several runs, each loaded and partitioned once.

    When the memory is full, the oldest entries with other data or partitions are evicted. Other
    seeds of the same data are kept: otherwise runs that cycle through all seeds would always miss.
    The limit is in bytes. None takes a share of the free memory. `make` may be a function around
    `Problem.divide`, which for example hides the test nodes.
    """

    def __init__(self, limit: int | None = None, make: Divide = Problem.divide) -> None:
        self.limit = available_memory() // SHARE if limit is None else limit
        self.make = make
        self.made = 0  # number of cache misses
        # By group, seed, whether there are several seeds, and the identity of a data object. The
        # object is stored, so that no other one can get its identity.
        self._entries: dict[tuple[str, int, bool, int], tuple[Division, Data | None]] = {}

    def with_limit(self, limit: int) -> Self:
        """Return an empty cache of the same kind with another limit."""
        other = copy(self)
        other.limit, other._entries = limit, {}
        return other

    def __getstate__(self) -> dict[str, object]:
        """Return the state without entries, because another process makes its own federations."""
        return {**vars(self), "made": 0, "_entries": {}}

    def __call__(self, problem: Problem, seed: int) -> Division:
        config, group = problem.config, group_of(problem.given)
        # The notes on a file depend on the number of seeds.
        key = group, problem.seed_of_data(seed), config.seeds > 1, id(problem.data)
        if key in self._entries:
            made, _ = self._entries[key]
            training = {name: getattr(config, name) for name in TRAINING}
            return replace(made, config=msgspec.structs.replace(made.config, **training))
        self.made += 1
        made = self.make(problem, seed)
        if isinstance(made.federation.graphs, LazyGraphs):  # there is nothing to cache
            return made
        others = [old for old in self._entries if old[0] != group]
        while others and self._size_with(made) > self.limit:
            del self._entries[others.pop(0)]
        if self._size_with(made) <= self.limit:
            self._entries[key] = made, problem.data
        return made

    def _size_with(self, new: Division) -> int:
        """Return the bytes of all graphs and of `new`, including prepared graphs of engines."""
        every = [new.federation, *(made.federation for made, _ in self._entries.values())]
        return sum(num_bytes([list(one.graphs), ready_graphs(one)]) for one in every)


def group_of(config: RunConfig) -> str:
    """Return the options that determine a run's clients, without the seed, as a key."""
    plain = {name: getattr(RunConfig(), name) for name in TRAINING}
    return config_text(msgspec.structs.replace(config, **plain))


def name_configuration(config: RunConfig, method: object = None, data: Data | None = None) -> str:
    """Return a fingerprint of the options that determine the numbers, for checkpoints.

    It includes the fields of a method object, and all numbers of a data object.
    """
    # The folder of the data does not matter. Engines agree only to rounding, so they matter.
    plain = msgspec.structs.replace(config, seeds=1, seed=0, data_root=None)
    header = data_header(config) if data is None else None
    if header is not None:  # the same clients, wherever the file is
        plain = msgspec.structs.replace(plain, data=str(header))
    text = config_text(plain)
    if method is not None:
        text += repr(method)
    if data is not None:
        text += data_fingerprint(data)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
