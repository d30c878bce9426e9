"""From a configuration to the clients of each seed: load, prepare, divide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from atoll import __version__
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation, Lazily
from atoll.data.archive import Header, load_federation, memory_needed, new_file, save_federation
from atoll.data.divide import federate
from atoll.data.divide_graphs import BATCH_SIZE, federate_graphs
from atoll.data.load import load
from atoll.data.prepare import PREPARATIONS
from atoll.data.source import GraphGroup, GraphSet, Source
from atoll.experiment.config import RunConfig, resolve, saved_header, with_own_partition
from atoll.experiment.hardware import available_memory
from atoll.experiment.protocols import Protocol

NEARLY = 0.75
"""Mean share of a client's most frequent class from which on a score says little."""
Data = Source | GraphSet | GraphGroup | Federation
"""Data that Python may give in place of a name."""


def task_of_object(data: Data | None) -> str | None:
    """What is classified in data that Python gave; None if a name was given."""
    if isinstance(data, Federation):
        return data.task
    if data is None:
        return None
    return "node" if isinstance(data, Source) else "graph"


def make_federation(
    config: RunConfig,
    rules: Protocol,
    seed: int,
    data: Data | None,
    asked: RunConfig,
) -> tuple[Federation, list[str], RunConfig]:
    """The federation of one seed, what the loader has to say, and the completed configuration.

    Args:
        config: Resolved.
        rules: Its protocol.
        seed: The run's seed.
        data: What Python gave in place of a name.
        asked: The configuration before it was resolved.
    """
    if isinstance(data, Federation):
        made = {key: data.about.get(key, "given") for key in ("partition", "split")}
        return data, [], msgspec.structs.replace(config, clients=len(data), ratios=None, **made)
    header = saved_header(config) if data is None else None
    if header is not None:
        return *open_federation(config, header), config
    data_seed = seed if rules.data_seed is None else rules.data_seed
    notes: list[str] = []
    source: Source | GraphSet | GraphGroup | None = data
    if source is None:
        source, notes = load_source(config, rules, data_seed)
    if not isinstance(source, Source):
        federation = _federate_graphs(config, rules, data_seed, source, asked)
        made = {"partition": federation.about["partition"], "clients": len(federation)}
        return federation, notes, msgspec.structs.replace(config, **made)
    source, config = prepare_source(source, config, rules, asked)
    federation = federate(
        source,
        clients=config.clients,
        partition=config.partition or rules.partition,
        split=config.split or rules.split,
        ratios=config.ratios,
        seed=data_seed,
        allow=config.allow,
    )
    if data is not None:  # a graph that Python gives may name its owners
        config = msgspec.structs.replace(config, clients=len(federation))
    return federation, notes, config


def open_federation(config: RunConfig, header: Header) -> tuple[Federation, list[str]]:
    """A federation from its file, and where it comes from, for people."""
    path = config.data
    needed, there = memory_needed(path), available_memory()
    lazy = needed > there / 2
    about = header.about
    known = [f"{key} {about[key]}" for key in _ORIGIN if about.get(key) is not None]
    notes = [f"{path}: {header.name} in {header.clients} clients ({', '.join(known)})"]
    if config.seeds > 1:
        notes.append("every seed trains the same clients with the same split, those of the file")
    if lazy:
        notes.append(
            f"clients are read when they are needed: at once they would take about "
            f"{needed / 2**30:.1f} GiB, and {there / 2**30:.1f} GiB are free"
        )
    return load_federation(path, lazy=lazy), notes


_ORIGIN = ("partition", "split", "seed", "protocol", "sha1")


def save_divided(asked: RunConfig, out: Path) -> tuple[Path, Federation, list[str]]:
    """Divide data as a run with this configuration would, and write the clients into one file."""
    if saved_header(asked) is not None:
        raise ConfigError(f"'{asked.data}' is divided already; give data that are not")
    out = new_file(out)
    config, rules = resolve(asked)
    federation, notes, config = make_federation(config, rules, config.seed, None, asked)
    seed = config.seed if rules.data_seed is None else rules.data_seed
    about = {
        "data": config.data,
        "seed": seed,
        "protocol": rules.name,
        "ratios": config.ratios,
        "own": config.own,
        "atoll": __version__,
        **federation.about,
        "partition": config.partition,
        "split": config.split,
    }
    return save_federation(replace(federation, about=about), out), federation, notes


def nearly_single_class(federation: Federation) -> list[str]:
    """A warning where a client's most frequent class is most of what it has; else nothing."""
    if isinstance(federation.graphs, Lazily):
        return []  # reading every client would take long
    shares = []
    for graph in federation.graphs:
        known = graph.at_roots(graph.train + graph.val + graph.test) > 0
        counts = graph.at_roots(graph.y)[known].bincount()
        shares += [float(counts.max() / counts.sum())] if counts.numel() else []
    mean = sum(shares) / max(len(shares), 1)
    if mean < NEARLY:
        return []
    return [
        f"the clients are nearly single-class: always predicting a client's most frequent class "
        f"is right for {100 * mean:.0f} % of its {federation.task}s on average, so compare scores "
        "with that number"
    ]


def need_one_graph(federation: Federation) -> None:
    """Refuse clients with many graphs each, for commands that look at nodes."""
    if federation.task == "graph":
        raise ConfigError(
            f"'{federation.name}' is a set of graphs with one label each; this command needs one "
            "graph: see `atoll datasets`"
        )


def load_source(
    config: RunConfig, rules: Protocol, seed: int
) -> tuple[Source | GraphSet | GraphGroup, list[str]]:
    """What the configuration names, undivided, and what the loader has to say."""
    return load(
        config.data,
        clients=config.clients or rules.clients,
        seed=seed,
        root=config.data_root,
        schema=config.schema,
        own=config.own,
    )


def prepare_source(
    source: Source, config: RunConfig, rules: Protocol, asked: RunConfig
) -> tuple[Source, RunConfig]:
    """One graph as the protocol wants it, and the configuration with its owners' partition."""
    config = with_own_partition(config, source, asked)
    for name in rules.prepare:
        source = PREPARATIONS[name](source)
    return source, config


def _federate_graphs(
    config: RunConfig,
    rules: Protocol,
    seed: int,
    source: GraphSet | GraphGroup,
    asked: RunConfig,
) -> Federation:
    """A federation of clients with many graphs each."""
    # A group divides itself; what the user asks for beside that must be refused, not overruled.
    asks = asked if isinstance(source, GraphGroup) else config
    if "undirected" in rules.prepare:
        source = source.undirected_simple()
    size = BATCH_SIZE if config.batch_size is None else config.batch_size
    return federate_graphs(
        source,
        clients=asks.clients,
        partition=asks.partition,
        split=config.split or rules.split,
        ratios=config.ratios,
        seed=seed,
        allow=config.allow,
        batch_size=size,
    )
