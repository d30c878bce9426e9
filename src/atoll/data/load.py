"""One name for every kind of data: the built-in lagoon, a public data set, or a path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError, unknown
from atoll.data.datasets import DATASETS, load_dataset
from atoll.data.own import OwnOptions, load_own
from atoll.data.source import GraphSet, Source
from atoll.data.synthetic import make_lagoon, parse_lagoon


def load(
    name: str,
    *,
    clients: int = 5,
    seed: int = 0,
    root: str | Path | None = None,
    schema: str | Path | None = None,
    own: Mapping[str, Any] | None = None,
) -> tuple[Source | GraphSet, list[str]]:
    """A source, and what a loader of the user's own data has to say about it.

    Args:
        name: "lagoon" (with knobs: "lagoon:homophily=0.3"), a data set's name, or a path.
        clients: How many owners the built-in data has.
        seed: Seed of the built-in data.
        root: Where data sets are looked for.
        schema: Column roles for the user's own tables.
        own: What to do with what is found in the user's own data: fields of `OwnOptions`.
    """
    if name == "lagoon" or name.startswith("lagoon:"):
        return make_lagoon(parse_lagoon(name), clients, seed), []
    path = Path(name).expanduser()
    if path.exists() or "/" in name or path.suffix:
        source, report = load_own(path, schema, own_options(own or {}))
        return source, list(report.messages)
    if name.lower().startswith("tu:") or name.lower() in {key.lower() for key in DATASETS}:
        return load_dataset(name, root), []
    raise unknown("data set", name, [*DATASETS, "lagoon"])


def own_options(given: Mapping[str, Any]) -> OwnOptions:
    """Options from the command line's words."""
    words: dict[str, Any] = {"true": True, "false": False}
    options: dict[str, Any] = {}
    for key, value in given.items():
        if key not in {f.name for f in fields(OwnOptions)}:
            raise unknown("option of your own data", key, [f.name for f in fields(OwnOptions)])
        if key == "max_categories" and not str(value).isdigit():
            raise ConfigError(f"max_categories is '{value}'; give a whole number")
        if key == "directed" and str(value).lower() not in words:
            raise ConfigError(f"directed is '{value}'; give true or false")
        if key == "directed":
            options[key] = words[str(value).lower()]
        else:
            options[key] = int(value) if key == "max_categories" else value
    return OwnOptions(**options)


def one_graph(source: Source | GraphSet) -> Source:
    """The source, if it is one graph."""
    if isinstance(source, GraphSet):
        raise ConfigError(
            f"'{source.name}' is a set of graphs with one label each; node classification "
            "needs one graph: see `atoll datasets`"
        )
    return source
