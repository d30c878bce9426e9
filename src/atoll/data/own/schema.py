"""The user's choices for a graph (schema, options), and the loader's report."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ConfigError, DataError, check_name
from atoll.core.task import TASKS
from atoll.data.own.rules import FILLS, SCALES, Rule, check_rule, read_rule

if TYPE_CHECKING:
    from atoll.data.own.agree import Told
    from atoll.data.own.encoder import Encoder

# Names that give columns roles without a schema, in any case. Other columns are features.
CONVENTION = {
    "id": ("id", "node", "node_id"),
    "label": ("label", "y", "class", "target"),
    "split": ("split",),
    "source": ("source", "src", "from"),
    "target": ("target", "dst", "to"),
    "weight": ("weight",),
}
OWNERS = ("client", "owner")  # columns that are owners without a schema
Names = Sequence[str]  # of the columns of a table

_TEXT, _LIST, _BOOL = "a text", "a list of texts", "true or false"
_TOP = ("task", "target")
"""Keys above the sections: the task, and the column to predict (also `[nodes] label`)."""
_KEYS = {
    "nodes": dict.fromkeys(("id", "label", "split", "owner", "scale", "missing"), _TEXT)
    | dict.fromkeys(("features", "categories", "ignore"), _LIST),
    "edges": dict.fromkeys(("source", "target", "weight", "self_loops", "duplicate_edges"), _TEXT)
    | {"directed": _BOOL},
}
_CHOICES = {
    "dangling": ("error", "drop"),
    "duplicate_nodes": ("error", "first"),
    "self_loops": ("drop", "keep", "error"),
    "duplicate_edges": ("drop", "keep", "sum", "count", "error"),
    "scale": SCALES,
    "missing": FILLS,
}


@dataclass(frozen=True)
class OwnOptions:
    """The user's options for loading a graph.

    In an undirected graph a-b and b-a are one edge. Every choice of `duplicate_edges` except "keep"
    merges them. "error" refuses only a repeated a-b, because many files list both directions.
    None uses the schema, whose default is an undirected graph without loops and duplicates.
    """

    directed: bool | None = None
    owner: str | None = None  # a node column of owners, which is not a feature
    time: str | None = None  # a node column of times for a split, which is not a feature
    dangling: str = "error"  # an edge to a missing node: "error" or "drop"
    duplicate_nodes: str = "error"  # a repeated id: "error", or "first" keeps the first row
    self_loops: str | None = None  # "drop", "keep" or "error"
    # "drop" (keeps the first), "keep", "sum" (of weights), "count" (as the weight) or "error"
    duplicate_edges: str | None = None
    max_categories: int = 1000  # most distinct texts of one column, and most classes
    scale: str | None = None  # of numbers without a rule: a name from `rules.SCALES`
    missing: str | None = None  # of columns without a rule: a name from `rules.FILLS`
    columns: Mapping[str, Rule] = field(default_factory=dict)  # these override the schema's
    encoder: str = "federated"  # how several owners measure columns: a name from `agree.MODES`
    private: bool = False  # whether the schema must declare all statistics
    min_classes: int = 2  # 1 for a site, which may lack classes of its federation

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) is not None:
                check_name(f"choice for {name}", str(getattr(self, name)), allowed)
        if self.max_categories < 1:
            raise ConfigError(f"max_categories is {self.max_categories}; give 1 or more")


@dataclass
class OwnReport:
    """Names from a user's graph, and a sentence about every irregularity."""

    classes: tuple[str, ...] = ()  # in the order of the label numbers
    features: tuple[str, ...] = ()  # of the columns of `Source.x`, `kind=shop` for a category
    messages: tuple[str, ...] = ()  # sentences for the user, in the order in which they arose
    dangling_edges: int = 0
    told: tuple[Told, ...] = ()  # statistics of the columns, if a site agrees with others

    def note(self, sentence: str) -> None:
        self.messages = (*self.messages, sentence)


@dataclass(frozen=True)
class Schema:
    """The task and the roles of columns in a `schema.toml`. None means "by convention"."""

    file: str = "schema.toml"
    task: str | None = None
    id: str | None = None
    label: str | None = None
    split: str | None = None
    owner: str | None = None
    features: tuple[str, ...] | None = None
    categories: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    source: str | None = None
    target: str | None = None
    weight: str | None = None
    directed: bool | None = None
    self_loops: str | None = None
    duplicate_edges: str | None = None
    scale: str | None = None
    missing: str | None = None
    columns: dict[str, Rule] = field(default_factory=dict)

    def with_options(self, options: OwnOptions) -> Schema:
        """Return the schema, overridden by the options, and check it."""
        rules = dict(self.columns)
        for name, rule in options.columns.items():
            rules[name] = rule.over(rules.get(name, Rule()))
        both = ("directed", "self_loops", "duplicate_edges", "scale", "missing")
        given = {name: getattr(options, name) for name in both}
        given = {name: value for name, value in given.items() if value is not None}
        return replace(self, columns=rules, **given)._with_roles()

    def _with_roles(self) -> Schema:
        """Return the schema with the roles from column rules. Each column has one role."""
        given: dict[str, Any] = {}  # str or tuple[str, ...], as the fields
        for name, rule in self.columns.items():
            where = f"{self.file} [columns.{name}]"
            check_rule(rule, where)
            named = name in (self.id, self.label, self.split, self.owner)
            role = "ignore" if rule.ignored and not named else rule.role
            many = "ignore" if role == "ignore" else "categories"
            if role == "ignore" or (role in (None, "feature") and rule.kind == "category"):
                before = given.get(many, getattr(self, many))
                given[many] = before if name in before else (*before, name)
            elif role in ("id", "label", "split", "owner"):
                if given.get(role, getattr(self, role)) not in (None, name):
                    both = f"'{given.get(role, getattr(self, role))}' and '{name}'"
                    raise ConfigError(f"{self.file} gives the role {role} to {both}; give one")
                given[role] = name
        schema, roles = replace(self, **given), dict[str, str]()
        for role in ("id", "label", "split", "owner", "features", "categories", "ignore"):
            one = getattr(schema, role)
            for name in (one,) if isinstance(one, str) else one or ():
                if name in roles:
                    both = f"column '{name}' as {roles[name]} and as {role}"
                    raise ConfigError(f"{schema.file} [nodes] gives {both}; a column has one role")
                roles[name] = role
        return schema


@dataclass(frozen=True)
class Loading:
    """The state of one load of a user's graph: schema, options and the report so far."""

    schema: Schema = Schema()  # with the choices of the options
    options: OwnOptions = OwnOptions()
    report: OwnReport = field(default_factory=OwnReport)
    encoder: Encoder | None = None  # of a trained model, for new tables
    # If above 0, the report contains a site's statistics of its columns. Category values in fewer
    # rows than this number are omitted.
    telling: int = 0
    client: str | None = None  # the owner of the tables, if no column names it
    joined: bool | None = None  # for predictions: whether the tables join the training graph

    def rule(self, name: str) -> Rule:
        """Return the user's choices for one column of the nodes."""
        return self.schema.columns.get(name, Rule())


@dataclass(frozen=True)
class NodeRoles:
    """The role of each column of a node table.

    The schema, or a model's encoder, names `numbers` and `categories`. The types of the `inferred`
    columns follow from their values.
    """

    id: str | None
    label: str | None  # only new tables for predictions may lack it
    split: str | None
    owners: tuple[str, ...]
    numbers: tuple[str, ...]
    categories: tuple[str, ...]
    inferred: tuple[str, ...]
    ignored: tuple[str, ...]
    as_text: tuple[str, ...] = ()  # features whose type a CSV reader must not infer

    @property
    def features(self) -> tuple[str, ...]:
        return (*self.numbers, *self.categories, *self.inferred)

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that are read."""
        roles = [name for name in (self.id, self.label, self.split) if name is not None]
        return (*roles, *self.owners, *self.features)

    @property
    def texts(self) -> tuple[str, ...]:
        """Columns whose values are names even if they look like numbers (007 is not 7)."""
        roles = [name for name in (self.id, self.split) if name is not None]
        return (*roles, *self.owners, *self.categories, *self.as_text)


def read_schema(path: Path) -> Schema:
    """Read and check a schema file. The error for an unknown key suggests the closest valid key."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no schema file '{path}'; give the path of a TOML file") from None
    except (ValueError, RecursionError, OSError) as problem:
        raise ConfigError(f"schema '{path}' is not readable as TOML ({problem})") from None
    values: dict[str, Any] = {}  # str, bool or tuple[str, ...], see _KEYS
    top = {key: _checked(raw.pop(key), _TEXT, f"{path.name} {key}") for key in _TOP if key in raw}
    columns = raw.pop("columns", {})
    if not isinstance(columns, dict):
        raise ConfigError(f"{path.name}: write a section [columns.NAME] for each column")
    for section, entries in raw.items():
        _check_key(f"section of {path.name}", section, [*_KEYS, "columns", *_TOP])
        if not isinstance(entries, dict):
            raise ConfigError(f"{path.name}: write [{section}] as a section, not as a value")
        for key, value in entries.items():
            _check_key(f"{path.name} [{section}] key", key, _KEYS[section])
            values[key] = _checked(value, _KEYS[section][key], f"{path.name} [{section}] {key}")
    values["task"] = top.get("task")
    if "target" in top and values.setdefault("label", top["target"]) != top["target"]:
        both = f"target = '{top['target']}' and [nodes] label = '{values['label']}'"
        conflict = f"{path.name} gives {both}, but both name the column to predict"
        raise ConfigError(f"{conflict}; remove one of them")
    for key, allowed in _CHOICES.items():
        if key in values:
            check_name(f"{path.name} [{_section(key)}] {key}", values[key], allowed)
    rules = {key: read_rule(one, f"{path.name} [columns.{key}]") for key, one in columns.items()}
    schema = Schema(file=path.name, **values, columns=rules)
    if schema.task is not None:
        check_name(f"task in {schema.file}", schema.task, TASKS)
        if TASKS[schema.task].many_graphs:  # tables contain one graph
            tables = "nodes and edges are tables of one graph with labels on its nodes"
            given = f"{schema.file} gives task = '{schema.task}', but {tables}"
            raise ConfigError(f'{given}; write task = "node", or remove it')
    return schema._with_roles()


def _check_key(kind: str, key: str, allowed: Iterable[str]) -> None:
    """Refuse an unknown key. The error for an option of `--own` names it."""
    if key in ("dangling", "duplicate_nodes"):
        raise ConfigError(f"unknown {kind} '{key}'; give --own {key}={_CHOICES[key][-1]} instead")
    check_name(kind, key, allowed)


def _checked(value: object, kind: str, where: str) -> str | bool | tuple[str, ...]:
    if kind == _BOOL and isinstance(value, bool):
        return value
    if kind == _TEXT and isinstance(value, str) and value:
        return value
    if kind == _LIST and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    raise ConfigError(f"{where} is {value!r}; it must be {kind}")


def node_roles(columns: Names, loading: Loading, file: str, *, with_id: bool = True) -> NodeRoles:
    """Return every column's role. `with_id` is False if no column has node names (NetworkX)."""
    schema, owner, time = loading.schema, loading.options.owner, loading.options.time
    listed = (*(schema.features or ()), *schema.categories, *schema.ignore)
    free = [name for name in columns if name not in listed]
    node_id = _role("id", free, columns, schema, file) if with_id else None
    if with_id and node_id is None:
        raise _absent("id", columns, file)
    free = [name for name in free if name != node_id]
    if (label := _role("label", free, columns, schema, file)) is None:
        raise _absent("label", columns, file, "column" if with_id else "attribute")
    split = _role("split", free, columns, schema, file)
    owners = [name for name in (owner, schema.owner) if name is not None]
    times, origin = [time] if time else [], {owner: "option owner", time: "option time"}
    for name in (*owners, *times, *listed, *schema.columns):
        _check_present(name, columns, origin.get(name, schema.file), file)
    owners += [*(name for name in free if name.lower() in OWNERS), *times]
    rest = [name for name in free if name not in (label, split, *owners)]
    inferred = [name for name in rest if name and not name.startswith("__index_level_")]
    if schema.features is not None:
        inferred = [name for name in inferred if name in schema.columns]
    given = (schema.features or (), schema.categories)
    numbers, categories = (tuple(name for name in one if name not in owners) for one in given)
    ignored = (*schema.ignore, *(name for name in rest if name not in inferred))
    texts = tuple(n for n in (*numbers, *inferred) if loading.rule(n).read_as_text)
    roles = node_id, label, split, tuple(dict.fromkeys(owners))
    return NodeRoles(*roles, numbers, categories, tuple(inferred), ignored, texts)


def edge_roles(columns: Names, loading: Loading, file: str) -> tuple[str, str, str | None]:
    """Return the columns of source, target and weight (or None) of an edge table."""
    schema = loading.schema
    roles = ("source", "target", "weight")
    source, target, weight = (_role(role, columns, columns, schema, file) for role in roles)
    if source is None or target is None:
        raise _absent("source" if source is None else "target", columns, file)
    if ignored := [name for name in columns if name not in (source, target, weight)]:
        loading.report.note(f"{file}: ignored {quoted_list(ignored)}")
    return source, target, weight


def _role(role: str, free: Names, columns: Names, schema: Schema, file: str) -> str | None:
    """Return the column of one role: the schema's, or the only one that convention allows."""
    if (given := getattr(schema, role)) is not None:
        _check_present(given, columns, schema.file, file)
        return str(given)
    found = [name for name in free if name.lower() in CONVENTION[role]]
    if len(found) > 1:
        problem = (
            f"{file} has columns '{found[0]}' and '{found[1]}', and either could be the {role}"
        )
        hint = f'say which in schema.toml: [{_section(role)}] {role} = "{found[0]}"'
        raise DataError(f"{problem}; {hint}")
    return found[0] if found else None


def _section(role: str) -> str:
    return "edges" if role in _KEYS["edges"] else "nodes"


def _check_present(name: str, columns: Names, origin: str, file: str) -> None:
    if name not in columns:
        near = difflib.get_close_matches(name, columns, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"its columns are {quoted_list(columns)}"
        raise ConfigError(f"{origin} names column '{name}', which {file} does not have; {hint}")


def _absent(role: str, columns: Names, file: str, word: str = "column") -> DataError:
    return DataError(
        f"{file} has no {role} {word}: its {word}s are {quoted_list(columns)}; name one of "
        f"them {', '.join(CONVENTION[role])}, or say which it is in schema.toml: "
        f'[{_section(role)}] {role} = "..."'
    )


def quoted_list(names: Iterable[object], most: int = 8) -> str:
    """Quote names for a sentence, and shorten a long list."""
    every = [quoted(name) for name in names]
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return (", ".join(every[:most]) + more) or "none"


def quoted(value: object, most: int = 40) -> str:
    """Quote a value from a file for a sentence: on one line, and shortened if it is long."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(value))
    return f"'{text[:most]}...'" if len(text) > most else f"'{text}'"
