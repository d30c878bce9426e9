"""Loading of any data by name: a built-in generator, a public data set, or a path."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ConfigError, DataError, check_name
from atoll.core.task import NODES
from atoll.data.own.rules import rules_from_words
from atoll.data.own.schema import OwnOptions
from atoll.data.public import registry
from atoll.data.public.registry import DATASETS, GROUPS, dataset_info, sets_of_group
from atoll.data.public.tables import TABLES
from atoll.data.source import GraphGroup, GraphSet, Source
from atoll.data.spec import Value, options_of
from atoll.data.synthetic import BUILT_IN, built_in, make_lagoon, parse_lagoon

if TYPE_CHECKING:
    from atoll.data.own.encoder import Encoder


def load(
    name: str,
    *,
    clients: int = 5,  # owners of the built-in data
    seed: int = 0,  # of the built-in data
    root: str | Path | None = None,  # the folder of the public data sets
    schema: str | Path | None = None,  # column roles for the user's own tables
    own: Mapping[str, object] | None = None,  # fields of `OwnOptions`
    encoder: Encoder | None = None,  # of an earlier run, which the user's tables must fit
    measure: str = "federated",  # how several owners measure columns: `own.agree.MODES`
    private: bool = False,  # whether the schema must declare statistics that owners would send
) -> tuple[Source | GraphSet | GraphGroup, list[str]]:
    """Load data. Return them and the loader's notes, which only a user's own data have.

    A name is "lagoon" or "archipelago" (with options: "lagoon:homophily=0.3"), a data set's or a
    group's name (some have options: "PROTEINS:features=degree"), or a path.
    """
    if not name.strip():
        raise ConfigError("no data are named; give --data a name or a path")
    if not is_own(name) and (schema is not None or own):
        if not (built_in(name) or _is_public(name)):
            start = "a saved path counts from the folder in which the run was started"
            raise DataError(f"there is no '{name}' here; {start}: go there, or give --data")
        given = "--schema" if schema is not None else "--own"
        raise ConfigError(f"{given} is for a graph of your own, but data is '{name}'; remove it")
    if built_in(name):
        return make_lagoon(parse_lagoon(name), clients, seed), []
    if is_own(name):
        from atoll.data.own.reader import load_own

        wishes = replace(parse_own_options(own or {}), encoder=measure, private=private)
        path = Path(name).expanduser()
        try:
            source, report = load_own(path, schema, wishes, encoder)
        except DataError as error:
            if not any(path.glob("**/nodes.*")):  # not a folder of tables
                raise
            hint = f"`atoll data describe {shlex.quote(name)}` lists all problems at once"
            raise DataError(f"{error}; {hint}") from None
        return source, list(report.messages)
    if not _is_public(name):
        names = {key.lower(): key for key in (*DATASETS, *GROUPS, *BUILT_IN)}
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        hint = "`atoll datasets` lists the names, and a graph of your own is given by its path"
        hint = f"did you mean '{names[near[0]]}'?" if near else hint
        raise ConfigError(f"unknown data set '{name}'; {hint}")
    plain, options = registry.parse_name(name)
    table = None if sets_of_group(plain) else TABLES.get(dataset_info(plain).name)
    if table is not None:
        for option in options:
            check_name(f"option of data set '{plain}'", option, options_of(table))
        return registry.load_dataset(plain, root, options=options), []
    features, max_degree = _graph_set_options(plain, options)
    if sets_of_group(plain):
        return registry.load_group(plain, root, features=features, max_degree=max_degree), []
    info = dataset_info(plain)
    if root is not None and not registry.is_present(plain, root):
        advice = f"get it with: atoll data fetch {info.name} --data-root {root}"
        raise DataError(f"data set '{info.name}' is not in {root}; {advice}")
    return registry.load_dataset(plain, root, features=features, max_degree=max_degree), []


def _graph_set_options(name: str, options: Mapping[str, Value]) -> tuple[str, int | None]:
    """Return the options features and max_degree of a graph set or group. Refuse any others."""
    is_node_set = not sets_of_group(name) and dataset_info(name).task == NODES.name
    for option in options:
        if is_node_set:
            raise ConfigError(f"data set '{name}' takes no options, but got '{option}'")
        check_name("option of a set of graphs", option, ("features", "max_degree"))
    largest = options.get("max_degree")
    if largest is not None and not (isinstance(largest, int) and largest >= 0):
        raise ConfigError(f"max_degree is {largest}; give a whole number from 0 on")
    return str(options.get("features", "own")), largest


def is_own(name: str) -> bool:
    """Return whether a name of data refers to the user's own files."""
    if built_in(name):
        return False
    path = Path(name).expanduser()
    # A folder with the name of a public set does not hide the set.
    return "/" in name or bool(path.suffix) or (not _is_public(name) and path.exists())


def _is_public(text: str) -> bool:
    name = registry.plain_name(text).lower()
    known = name in {key.lower() for key in DATASETS} or bool(sets_of_group(name))
    return known or name.startswith("tu:")


def parse_own_options(given: Mapping[str, object]) -> OwnOptions:
    """Parse the options of a user's own data from the command line."""
    inner = ("columns", "encoder", "private", "min_classes")
    known = [field.name for field in fields(OwnOptions) if field.name not in inner]
    columns = {key: value for key, value in given.items() if "." in key}  # as in age.scale=log
    options: dict[str, Any] = {k: v for k, v in given.items() if k not in columns}
    for key, value in list(options.items()):  # each gets the type of its field
        word = str(value).lower()
        check_name("option of your own data", key, known)
        if key == "max_categories":
            if not word.isdigit():
                raise ConfigError(f"max_categories is '{value}'; give a whole number")
            options[key] = int(word)
        if key == "directed":
            if word not in ("true", "false"):
                raise ConfigError(f"directed is '{value}'; give true or false")
            options[key] = word == "true"
    return OwnOptions(**options, columns=rules_from_words(columns))


def as_one_graph(source: Source | GraphSet | GraphGroup) -> Source:
    """Return the source if it is one graph, otherwise raise an error."""
    if not isinstance(source, Source):
        advice = "this command needs one graph: see `atoll datasets`"
        raise ConfigError(f"'{source.name}' is a set of graphs with one label each; {advice}")
    return source
