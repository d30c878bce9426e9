"""A description of all tables of a user's graph: all problems with counts, and a schema to edit.

Each column gets a kind and questions, and a warning if it leaks the label.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from atoll.core.errors import AtollError, DataError, counted
from atoll.data.own import columns as convert
from atoll.data.own import schema as schemas
from atoll.data.own.columns import MISSING, Column
from atoll.data.own.leakage import telling
from atoll.data.own.look import MOST, Look, float32, look_at
from atoll.data.own.rules import SUITS, Rule
from atoll.data.own.schema import CONVENTION, OWNERS, Schema, quoted, quoted_list, read_schema
from atoll.data.own.tables import Part, TableFile, find_parts

ROLES = ("id", "label", "split")
DIRECTED = "[edges] directed"


@dataclass(frozen=True)
class Problem:
    """A problem to decide or to correct, and the number of affected rows."""

    place: str  # a file, or a column of it
    text: str
    rows: int = 0


@dataclass
class Description:
    """All findings of one pass over the tables."""

    looks: dict[str, Look]  # of the columns of the nodes, in order
    roles: dict[str, str]  # of these columns; features are absent
    edges: dict[str, str]  # columns of the edges by role
    problems: list[Problem] = field(default_factory=list)
    rows: int = 0
    known: Schema = field(default_factory=Schema)  # decisions so far
    own: schemas.OwnOptions = field(default_factory=schemas.OwnOptions)
    shared: dict[str, tuple[str, dict[str, int]]] = field(default_factory=dict)  # see `share`

    def ask(self, place: str, text: str, rows: int = 0) -> None:
        """Add a problem."""
        self.problems.append(Problem(place, text, int(rows)))

    def share(self, file: str, text: str, rows: int = 0, end: str = "") -> None:
        """Add a problem of one file. Files with the same text share one, with the first `end`."""
        self.shared.setdefault(text, (end, {}))[1][file] = int(rows)

    def toml(self) -> str:
        """Return a schema with every column. A line with `# ?` asks for a decision."""
        lines = ["# Made by `atoll data describe`. Decide every line with `# ?`."]
        asked = [p for p in self.problems if "column" not in p.place and p.place != DIRECTED]
        lines += [f"# ? {p.place}: {p.text}" for p in asked]
        known, every = self.known, _lines(self.known, ("scale", "missing"))
        lines += [*_lines(known, ("task",)), *(["", "[nodes]", *every] if every else [])]
        for name, look in self.looks.items():
            lines += ["", f"[columns.{json.dumps(name, ensure_ascii=False)}]"]
            role = self.roles.get(name, "feature")
            feature = role == "feature"
            rule = look.complete(known) if feature else look.rule
            lines.append(f"role = {json.dumps('ignore' if feature and rule.ignored else role)}")
            suits = {key: not feature or rule.kind in kinds for key, kinds in SUITS.items()}
            keys = [f.name for f in fields(rule) if suits.get(f.name, True)]
            lines += _lines(rule, keys[1:])
            if feature and rule.values and rule.other is None:
                lines.append('# A new value is an error; other = "other" accepts it.')
            lines += [f"# ? {text}" + (f" ({n} rows)" if n else "") for text, n in look.questions]
        lines += ["", "[edges]"]
        for role in ("source", "target", "weight"):
            if (name := self.edges.get(role, getattr(known, role))) is not None:
                lines.append(f"{role} = {json.dumps(name, ensure_ascii=False)}")
            elif role != "weight":
                lines.append(f'# ? {role} = "..."')
        lines += _lines(known, ("self_loops", "duplicate_edges", "directed"))
        if known.directed is None:
            lines.append("directed = false  # ? true keeps directions")
        return "\n".join(lines) + "\n"


def _lines(of: Rule | Schema, keys: Sequence[str]) -> list[str]:
    """Return the given keys as lines of TOML."""
    given = [(key, getattr(of, key)) for key in keys if getattr(of, key) not in (None, ())]
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in given]


def describe(
    path: Path, schema: Path | None = None, options: schemas.OwnOptions | None = None
) -> Description:
    """Examine every table of a folder. A schema and options answer questions in advance.

    The default is the folder's `schema.toml`, if there is one.
    """
    if not path.is_dir():
        raise DataError(f"'{path}' is no folder; give one with nodes.csv and edges.csv")
    own = path / "schema.toml"
    given = schema or (own if own.is_file() else None)
    parts, found = find_parts(path), Description({}, {}, {}, own=options or schemas.OwnOptions())
    known = (Schema() if given is None else read_schema(given)).with_options(found.own)
    found.known = known = replace(known, owner=found.own.owner or known.owner)
    tables = [_read(part.nodes, found) for part in parts]
    readable = [part for part, table in zip(parts, tables, strict=True) if table.column_names]
    whole, starts = _together(parts, tables, found), np.cumsum([0, *map(len, tables)])

    def where(row: int) -> str:
        part = int(np.searchsorted(starts, row, side="right")) - 1
        return parts[part].nodes.where(row - int(starts[part]))

    found.rows, name = len(whole), _files(dict.fromkeys((part.nodes.name for part in readable), 0))
    rows = convert.Rows(name, where)
    if whole.column_names:  # if no table is readable, one problem is enough
        _find_roles(whole, known, found, name)
        _find_owner(parts, whole.column_names, found, name)
        if "id" not in found.roles.values():
            _find_id(readable, whole, known, found, name)
    for column in whole.column_names:
        rule, role = known.columns.get(column, Rule()), found.roles.get(column)
        one = Column(whole[column], column, rows)
        if role is None:
            listed = "category" if column in known.categories else None
            if column in (known.features or ()) and not types.is_boolean(one.values.type):
                listed = "number"
            wish = rule.kind or listed, rule.missing or known.missing
            rule = replace(rule, kind=wish[0], missing=wish[1])
        found.looks[column] = Look(one, rule) if role else look_at(one, rule)
    y = _labels(found, name)
    for column, look in found.looks.items():
        tried = column not in found.roles and look.rule.kind != "text" and found.rows
        if tried and (told := telling(look.column, look.rule, y)):
            look.ask(f'{told}; if it is not known before the label, role = "ignore"', 0)
        for text, count in look.questions:
            hits = look.hits.get(text)
            masks = [None] * len(parts) if hits is None else np.split(hits, starts[1:-1])
            having = {
                part.nodes.name: 0 if mask is None else int(mask.sum())
                for part, table, mask in zip(parts, tables, masks, strict=True)
                if (column in table.column_names if mask is None else mask.any())
            }
            found.ask(f"{_files(having)}, column '{column}'", text, count)
    for part, table in zip(parts, tables, strict=True):
        _edges(part, _ids(part, table, found), known, found)
    for told, (end, files) in found.shared.items():
        found.ask(_files(files), told + end, sum(files.values()))
    if known.directed is None:
        found.ask(DIRECTED, "an edge joins both ways; choose true to keep directions")
    return found


def _files(rows: Mapping[str, int]) -> str:
    """Return the names of files, each with its number of rows if there are several."""
    names = [f"{name} ({n})" if n and len(rows) > 1 else name for name, n in rows.items()]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _read(file: TableFile, found: Description) -> pa.Table:
    """Read all columns of a table, those of CSV as text.

    If it is unreadable, add a problem and return an empty table.
    """
    try:
        names = [name for name in file.columns() if name]
        return file.read(names, names)
    except AtollError as problem:
        found.ask(file.name, str(problem).removeprefix(f"{file.name} "))
        return pa.table({})


def _together(parts: list[Part], tables: list[pa.Table], found: Description) -> pa.Table:
    """Concatenate the tables of all clients. Different columns and types are problems."""
    columns = {}
    for name in dict.fromkeys(name for table in tables for name in table.column_names):
        having = [name in table.column_names for table in tables]
        kinds = {table[name].type for table, has in zip(tables, having, strict=True) if has}
        kind = kinds.pop() if len(kinds) == 1 else pa.large_string()
        lacking, rows, chunks = [], 0, list[pa.Array]()
        for part, table, has in zip(parts, tables, having, strict=True):
            if has:
                chunks += table[name].cast(kind).chunks
            elif table.column_names:  # an unreadable table is a problem already
                lacking.append(part.nodes.name)
                rows += len(table)
                chunks.append(pa.nulls(len(table), kind))
        if lacking:
            found.ask(f"column '{name}'", f"is not in {quoted_list(lacking, 3)}", rows)
        if len(kinds) > 1:
            told = f"is of the types {' and '.join(sorted(map(str, kinds)))}; make them alike"
            found.ask(f"column '{name}'", told)
        columns[name] = pa.chunked_array(chunks, kind)
    return pa.table(columns)


def _find_id(
    parts: list[Part], nodes: pa.Table, known: Schema, found: Description, file: str
) -> None:
    """Take as id the column whose values most edges name, and ask about it.

    If no column is named by more than half of the edges, ask for one.
    """
    every = ((part.edges, _read(part.edges, Description({}, {}, {}))) for part in parts)
    best, none = ("", 0.5), (parts[0].edges, pa.table({}))
    edges, table = next((pair for pair in every if pair[1].column_names), none)
    usual = (name for name in table.column_names if name.lower() in CONVENTION["source"])
    ends = known.source or next(usual, None)
    if ends in table.column_names and len(table):
        named = table[ends].cast(pa.large_string())
        for name in (name for name in nodes.column_names if name not in found.roles):
            values = pc.unique(nodes[name].cast(pa.large_string()))
            share = np.mean(convert.lookup(named, values) >= 0)
            best = max(best, (name, float(share)), key=lambda pair: pair[1])
    if best[0]:
        found.roles[best[0]] = "id"
        told = f"seems to be the id, because {edges.name} names its values"
        found.ask(f"{file}, column '{best[0]}'", told)
    else:
        found.ask(file, 'no column is the id; write role = "id" under one of them')


def _find_roles(nodes: pa.Table, known: Schema, found: Description, file: str) -> None:
    """Assign roles by the schema or by convention. Open and duplicate roles are problems."""
    names = nodes.column_names
    listed = [*(known.features or ()), *known.categories, *known.ignore]
    listed += [name for name, rule in known.columns.items() if rule.role is not None]
    for role in ROLES:
        given = getattr(known, role)
        hits = [n for n in names if n.lower() in CONVENTION[role] and n not in listed]
        hits = [given] if given is not None else hits
        if len(hits) > 1:
            both = f"columns {quoted_list(hits)} could each be the {role}"
            found.ask(file, f'{both}; write role = "{role}" under one of them')
        elif not hits and role == "label":
            few = [n for n in names if n not in listed and 1 < len(pc.unique(nodes[n])) < MOST]
            some = f"{quoted_list(few)} have few values"
            found.ask(file, f'no column is the label; write role = "label" under one ({some})')
        elif hits:
            if hits[0] in names:
                found.roles[hits[0]] = role
            else:
                found.ask(file, f"the schema names the column '{hits[0]}', which is not there")
    found.roles |= {name: "ignore" for name in known.ignore if name in names}
    used = {*found.roles, *listed, *known.columns, str(known.owner)}
    if known.features is not None:  # the schema lists all features
        found.roles |= {name: "ignore" for name in names if name not in used}
    for name in dict.fromkeys(name for name in (*listed, *known.columns) if name not in names):
        if name not in (getattr(known, role) for role in ROLES):
            found.ask(file, f"the schema names the column '{name}', which is not there")


def _find_owner(parts: list[Part], names: Sequence[str], found: Description, file: str) -> None:
    """Assign the owner by the schema or by convention. Other owner columns are not features."""
    known, free = found.known, [name for name in names if name not in found.roles]
    usual = [n for n in free if n.lower() in OWNERS and n != known.owner]
    owners = [*(name for name in names if name == known.owner), *usual]
    found.roles |= dict.fromkeys(owners[1:], "ignore") | dict.fromkeys(owners[:1], "owner")
    if known.owner is None and len(owners) > 1:
        found.ask(file, f"columns {quoted_list(owners)} could each be the owner; the first is")
    elif known.owner is not None and known.owner not in names:
        found.ask(file, f"the schema names the column '{known.owner}', which is not there")
    elif not owners and parts[0].client is None:
        invented = "without one, Louvain cuts the graph into invented clients"
        found.ask(file, f'which column names the owner? give it role = "owner"; {invented}')


def _labels(found: Description, file: str) -> np.ndarray:
    """Return class numbers, -1 if unknown, and add problems of the label column."""
    name = next((name for name, role in found.roles.items() if role == "label"), None)
    if name is None:
        return np.full(found.rows, -1)
    look, place = found.looks[name], f"{file}, column '{name}'"
    texts = convert.cleaned(look.column, look.rule).values.cast(pa.large_string())
    distinct = convert.sorted_values(texts)
    if marks := [value for value in distinct.to_pylist() if value.lower() in MISSING]:
        hits = np.asarray(pc.is_in(texts, value_set=pa.array(marks, texts.type)))
        look.rule = replace(look.rule, empty=(*look.rule.empty, *marks))
        look.ask(f"{quoted_list(marks)} reads like a missing label", int(hits.sum()), hits)
    fractions = pc.match_substring_regex(distinct, r"^-?\d+\.\d*[1-9]\d*$")
    if pc.any(fractions).as_py():
        found.ask(place, "holds fractions, but a label is a class (text or a whole number)")
    if len(distinct) < 2:
        few = f"holds {counted(len(distinct), 'class')}"
        found.ask(place, f"{few}; classification needs two or more")
    return convert.lookup(texts, distinct).astype(np.int64)


def _ids(part: Part, table: pa.Table, found: Description) -> pa.ChunkedArray | None:
    """Return the ids of one file as text. Missing and repeated ids are problems."""
    name = next((name for name, role in found.roles.items() if role == "id"), None)
    if name is None or name not in table.column_names:
        return None
    ids, place = table[name].cast(pa.large_string()), f"{part.nodes.name}, column '{name}'"
    if ids.null_count:
        found.ask(place, "rows have no id", ids.null_count)
    known = ids.drop_null()
    if found.own.duplicate_nodes == "error" and (again := len(known) - len(pc.unique(known))):
        found.ask(place, "give an id again; --own duplicate_nodes=first keeps the first", again)
    return pc.unique(known)


def _edges(part: Part, ids: pa.Array | None, known: Schema, found: Description) -> None:
    """Assign the roles of one edge table, and add its problems."""
    table, file = _read(part.edges, found), part.edges.name
    names = {}
    for role in ("source", "target", "weight"):
        given, hits = getattr(known, role), table.column_names
        hits = [n for n in hits if n == given or (not given and n.lower() in CONVENTION[role])]
        if len(hits) == 1:
            names[role] = hits[0]
        elif role != "weight" and table.column_names:
            some = f"columns {quoted_list(hits)} could be" if hits else "no column is"
            given = f" (columns: {quoted_list(table.column_names)})"
            found.share(file, f'{some} the {role}; name one with [edges] {role} = "..."{given}')
    found.edges = found.edges or names
    if rest := [name for name in table.column_names if name not in names.values()]:
        found.share(file, f"columns {quoted_list(rest)} of the edges are not used")
    if "weight" in names:
        weight = float32(table[names["weight"]].cast(pa.large_string()))
        if wrong := int((~(np.isfinite(weight) & (weight >= 0))).sum()):  # missing weights, too
            place = f"{file}, column '{names['weight']}'"
            found.ask(place, "a weight is a finite number, zero or more", wrong)
    if ids is None or "source" not in names or "target" not in names:
        return
    given = [table[names[role]].cast(pa.large_string()) for role in ("source", "target")]
    ends = [convert.lookup(end, ids) for end in given]
    if empty := sum(end.null_count for end in given):
        found.ask(file, "an end of an edge has no value", empty)
    lost = (ends[0] < 0) | (ends[1] < 0)
    if (gone := int(lost.sum()) - empty) and found.own.dangling == "error":
        first = convert.first(lost)
        name = names["source" if ends[0][first] < 0 else "target"]
        end = f", as {quoted(table[name][first].as_py())} does; --own dangling=drop drops them"
        found.share(file, "edges name a node that is not there", gone, end)
    loops = int(((ends[0] == ends[1]) & ~lost).sum())
    if loops and known.self_loops in (None, "error"):
        told = "they are dropped unless you choose another self_loops under [edges]"
        told = told if known.self_loops is None else 'and self_loops = "error"'
        found.share(file, f"edges join a node to itself; {told}", loops)
    keys = ends[0][~lost].astype(np.int64) * len(ids) + ends[1][~lost]
    again = keys.size - np.unique(keys).size
    if again and known.duplicate_edges in (None, "error"):
        told = 'the first stays, or choose duplicate_edges = "sum" under [edges]'
        told = told if known.duplicate_edges is None else 'and duplicate_edges = "error"'
        found.share(file, f"edges are given again; {told}", again)
