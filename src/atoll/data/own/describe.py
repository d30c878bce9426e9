"""A look at all tables of a user's own graph: every problem with its count, a schema to edit."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from atoll.core.errors import AtollError, DataError
from atoll.data.own import columns as convert
from atoll.data.own.columns import MISSING, NUMBER, Column
from atoll.data.own.guess import MOST, Look, look_at, telling
from atoll.data.own.rules import SUITS, Rule
from atoll.data.own.schema import CONVENTION, OWNERS, Schema, quoted, quoted_list, read_schema
from atoll.data.own.tables import Part, TableFile, find_parts

ROLES = ("id", "label", "split")


@dataclass(frozen=True)
class Problem:
    """Something to decide or to mend, and how many rows it concerns."""

    place: str  # a file, or a column of it
    text: str
    rows: int = 0


@dataclass
class Description:
    """All that one look at the tables found."""

    looks: dict[str, Look]  # of the columns of the nodes, in order
    roles: dict[str, str]  # of these columns; a feature has none
    edges: dict[str, str]  # columns of the edges by role
    problems: list[Problem] = field(default_factory=list)
    rows: int = 0

    def ask(self, place: str, text: str, rows: int = 0) -> None:
        """Add a problem."""
        self.problems.append(Problem(place, text, int(rows)))

    def toml(self) -> str:
        """A schema with every column; a line with `# ?` asks for a decision."""
        lines = ["# Made by `atoll data describe`. Decide every line with `# ?`."]
        lines += [f"# ? {p.place}: {p.text}" for p in self.problems if "column" not in p.place]
        for name, look in self.looks.items():
            lines += ["", f"[columns.{json.dumps(name, ensure_ascii=False)}]"]
            role = self.roles.get(name, "feature")
            rule = look.complete() if role == "feature" else Rule(empty=look.rule.empty)
            lines.append(f"role = {json.dumps('ignore' if rule.kind == 'text' else role)}")
            keys = [f.name for f in fields(rule) if rule.kind in SUITS.get(f.name, (rule.kind,))]
            lines += [line for key in keys[1:] for line in _line(key, getattr(rule, key))]
            lines += [f"# ? {text}" + _counted(rows) for text, rows in look.questions]
        if self.edges:
            lines += ["", "[edges]"]
            lines += [line for role, name in self.edges.items() for line in _line(role, name)]
            lines.append("directed = false  # ? true keeps directions")
        return "\n".join(lines) + "\n"


def _line(key: str, value: str | tuple[str, ...] | None) -> list[str]:
    plain = list(value) if isinstance(value, tuple) else value
    return [f"{key} = {json.dumps(plain, ensure_ascii=False)}"] if plain else []


def _counted(rows: int) -> str:
    return f" ({rows} rows)" if rows else ""


def describe(path: Path, schema: Path | None = None) -> Description:
    """Look at every file of a folder of tables once; what a schema decides is not asked again."""
    if not path.is_dir():
        raise DataError(f"'{path}' is no folder; give one with nodes.csv and edges.csv")
    own = path / "schema.toml"
    given = schema or (own if own.is_file() else None)
    known = Schema() if given is None else read_schema(given)
    parts, found = find_parts(path), Description({}, {}, {})
    tables = [_read(part.nodes, found) for part in parts]
    whole, starts = _together(parts, tables, found), np.cumsum([0, *map(len, tables)])

    def where(row: int) -> str:
        part = int(np.searchsorted(starts, row, side="right")) - 1
        return parts[part].nodes.where(row - int(starts[part]))

    found.rows, name = len(whole), parts[0].nodes.name
    rows = convert.Rows(name, where)
    _find_roles(whole, known, found, name)
    if "id" not in found.roles.values():
        _find_id(parts[0].edges, whole, known, found, name)
    for column in whole.column_names:
        rule, role = known.columns.get(column, Rule()), found.roles.get(column)
        rule = replace(rule, kind="category") if column in known.categories else rule
        one = Column(whole[column], column, rows)
        found.looks[column] = Look(one, rule) if role else look_at(one, rule)
    y = _labels(found, name)
    for column, look in found.looks.items():
        tried = column not in found.roles and look.rule.kind != "text" and found.rows
        if tried and (told := telling(look, y)):
            look.ask(f'{told}; if it is not known before the label, role = "ignore"', 0)
        for text, count in look.questions:
            found.ask(f"{name}, column '{column}'", text, count)
    for part, table in zip(parts, tables, strict=True):
        _edges(part, _ids(part, table, found), known, found)
    return found


def _read(file: TableFile, found: Description) -> pa.Table:
    """All columns of a table, of CSV as text; an empty one where the file cannot be read."""
    try:
        names = [name for name in file.columns() if name]
        return file.read(names, names)
    except AtollError as problem:
        found.ask(file.name, str(problem))
        return pa.table({})


def _together(parts: list[Part], tables: list[pa.Table], found: Description) -> pa.Table:
    """The tables of all clients as one; different columns and types are problems."""
    columns = {}
    for name in dict.fromkeys(name for table in tables for name in table.column_names):
        having = [name in table.column_names for table in tables]
        kinds = {table[name].type for table, has in zip(tables, having, strict=True) if has}
        kind = kinds.pop() if len(kinds) == 1 else pa.large_string()
        lacking, rows, chunks = [], 0, list[pa.Array]()
        for part, table, has in zip(parts, tables, having, strict=True):
            if has:
                chunks += table[name].cast(kind).chunks
            else:
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
    edges: TableFile, nodes: pa.Table, known: Schema, found: Description, file: str
) -> None:
    """Ask about the column whose values the edges name; without one, the id is open."""
    table, best = _read(edges, Description({}, {}, {})), ("", 0.5)
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
    """Roles by the schema or by convention; one that is open or taken twice is a problem."""
    names = nodes.column_names
    listed = (*(known.features or ()), *known.categories, *known.columns)
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
    owners = [known.owner] if known.owner else [n for n in names if n.lower() in OWNERS]
    found.roles |= {name: "owner" for name in owners if name in names}
    found.roles |= {name: "ignore" for name in known.ignore if name in names}


def _labels(found: Description, file: str) -> np.ndarray:
    """Class numbers, -1 where unknown; problems of the label column."""
    name = next((name for name, role in found.roles.items() if role == "label"), None)
    if name is None:
        return np.full(found.rows, -1)
    look, place = found.looks[name], f"{file}, column '{name}'"
    texts = convert.cleaned(look.column, look.rule).values.cast(pa.large_string())
    distinct = convert.sorted_values(texts)
    if marks := [value for value in distinct.to_pylist() if value.lower() in MISSING]:
        rows = pc.sum(pc.is_in(texts, value_set=pa.array(marks, texts.type))).as_py()
        look.rule = replace(look.rule, empty=(*look.rule.empty, *marks))
        look.ask(f"{quoted_list(marks)} reads like a missing label", rows)
    fractions = pc.match_substring_regex(distinct, r"^-?\d+\.\d*[1-9]\d*$")
    if pc.any(fractions).as_py():
        found.ask(place, "holds fractions, but a label is a class (text or a whole number)")
    if len(distinct) < 2:
        found.ask(place, f"holds {len(distinct)} classes; classification needs two or more")
    return convert.lookup(texts, distinct).astype(np.int64)


def _ids(part: Part, table: pa.Table, found: Description) -> pa.ChunkedArray | None:
    """The ids of one file as text; missing and repeated ones are problems."""
    name = next((name for name, role in found.roles.items() if role == "id"), None)
    if name is None or name not in table.column_names:
        return None
    ids, place = table[name].cast(pa.large_string()), f"{part.nodes.name}, column '{name}'"
    if ids.null_count:
        found.ask(place, "rows have no id", ids.null_count)
    known = ids.drop_null()
    if again := len(known) - len(pc.unique(known)):
        found.ask(place, "give an id again; --own duplicate_nodes=first keeps the first", again)
    return pc.unique(known)


def _edges(part: Part, ids: pa.Array | None, known: Schema, found: Description) -> None:
    """Roles and problems of one edge table."""
    table, file = _read(part.edges, found), part.edges.name
    names = {}
    for role in ("source", "target", "weight"):
        given, hits = getattr(known, role), table.column_names
        hits = [n for n in hits if n == given or (not given and n.lower() in CONVENTION[role])]
        if len(hits) == 1:
            names[role] = hits[0]
        elif role != "weight" and table.column_names:
            some = f"columns {quoted_list(hits)} could be" if hits else "no column is"
            found.ask(file, f'{some} the {role}; name one with [edges] {role} = "..." ')
    found.edges = found.edges or names
    if rest := [name for name in table.column_names if name not in names.values()]:
        found.ask(file, f"columns {quoted_list(rest)} of the edges are not used")
    if "weight" in names:
        weight = table[names["weight"]].cast(pa.large_string())
        right = pc.match_substring_regex(weight, NUMBER.replace("[-+]?", "[+]?", 1))
        if wrong := len(right) - (pc.sum(right).as_py() or 0):  # a missing weight is wrong, too
            place = f"{file}, column '{names['weight']}'"
            found.ask(place, "a weight is a finite number, zero or more", wrong)
    if ids is None or "source" not in names or "target" not in names:
        return
    given = [table[names[role]].cast(pa.large_string()) for role in ("source", "target")]
    ends = [convert.lookup(end, ids) for end in given]
    if empty := sum(end.null_count for end in given):
        found.ask(file, "an end of an edge has no value", empty)
    lost = (ends[0] < 0) | (ends[1] < 0)
    if gone := int(lost.sum()) - empty:
        first = convert.first(lost)
        name = names["source" if ends[0][first] < 0 else "target"]
        told = f"edges name a node that is not there, as {quoted(table[name][first].as_py())} does"
        found.ask(file, f"{told}; --own dangling=drop leaves them out", gone)
    if loops := int(((ends[0] == ends[1]) & ~lost).sum()):
        found.ask(file, "edges join a node to itself; they are dropped (--own self_loops)", loops)
    keys = ends[0][~lost].astype(np.int64) * len(ids) + ends[1][~lost]
    if again := keys.size - np.unique(keys).size:
        told = "edges are given again; the first stays, or choose --own duplicate_edges=sum"
        found.ask(file, told, again)
