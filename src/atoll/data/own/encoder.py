"""The encoder of a node table: fitted on the training tables and kept with the model.

It finds the columns of a new table by their names, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp

from atoll.core.errors import DataError
from atoll.data.own import columns as convert
from atoll.data.own.columns import NUMBER, SPARSE_BELOW, Column, Rows
from atoll.data.own.schema import Loading, NodeRoles, Schema, quoted, quoted_list


@dataclass(frozen=True)
class Feature:
    """How one column of a table becomes columns of the feature matrix."""

    name: str
    kind: Literal["number", "category"]  # truth values are numbers
    values: tuple[str, ...] = ()  # the known values of a category, in the order of their columns

    @property
    def names(self) -> list[str]:
        """The names of its columns in the feature matrix."""
        if self.kind == "category":
            return [f"{self.name}={value}" for value in self.values]
        return [self.name]

    def numbers(self, column: Column) -> np.ndarray:
        """A number for each row, (N,) float32."""
        _check_number(column, "the model was trained on numbers there")
        wide = np.asarray(column.values.cast(pa.float64(), safe=False))
        with np.errstate(over="ignore"):  # a value beyond float32 is refused below, with its place
            values = wide.astype(np.float32)
        bad = ~np.isfinite(values)
        if bad.any():
            row = convert.first(bad)
            advice = "a feature is a finite number that float32 can hold: replace these values"
            problem = f"holds {wide[row]} ({int(bad.sum())} such rows in all)"
            raise column.error(row, f"{problem}; {advice}")
        return values

    def places(self, column: Column) -> np.ndarray:
        """The place of each row's category among the known values, (N,) int32."""
        texts = column.values.cast(pa.large_string())
        found = convert.lookup(texts, pa.array(self.values, pa.large_string()))
        if (found < 0).any():
            row, count = convert.first(found < 0), int((found < 0).sum())
            problem = f"holds {quoted(texts[row].as_py())}, a category that training never saw"
            known = f"it knows {quoted_list(self.values, 4)}"
            advice = "correct it, leave these rows out, or train again with them"
            raise column.error(row, f"{problem} ({count} such rows in all); {known}: {advice}")
        return found


@dataclass(frozen=True, eq=False)
class Nodes:
    """The arrays of a node table; the fields are those of `Source` and `OwnReport`."""

    x: np.ndarray | sp.csr_array
    y: np.ndarray
    classes: tuple[str, ...]
    features: tuple[str, ...]
    split: np.ndarray | None
    columns: dict[str, np.ndarray]
    encoder: Encoder | None = None


@dataclass(frozen=True)
class Encoder:
    """The meaning of the columns of the training tables, by name and in order."""

    features: tuple[Feature, ...]
    label: str
    classes: tuple[str, ...]  # in the order of the class numbers
    id: str | None = None  # None where the nodes are named elsewhere (NetworkX)
    split: str | None = None
    owners: tuple[str, ...] = ()
    schema: Schema = field(default_factory=Schema)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns of the feature matrix."""
        return tuple(name for feature in self.features for name in feature.names)

    def transform(self, columns: Mapping[str, Column]) -> np.ndarray | sp.csr_array:
        """The features of a table, (N, D) float32; CSR where most of them are zero."""
        made: list[np.ndarray] = []
        for feature in self.features:
            column = columns[feature.name].complete()
            of_kind = feature.places if feature.kind == "category" else feature.numbers
            made.append(of_kind(column))
        rows, width = len(made[0]), len(self.names)
        filled = [np.count_nonzero(m) if m.dtype == np.float32 else rows for m in made]
        if sum(filled) < SPARSE_BELOW * rows * width:
            return self._sparse(made, rows)
        x, start = np.zeros((rows, width), dtype=np.float32), 0
        for feature, values in zip(self.features, made, strict=True):
            if feature.kind == "category":
                x[np.arange(rows), start + values] = 1
            else:
                x[:, start] = values + np.float32(0)  # -0.0 becomes 0.0
            start += len(feature.names)
        return x

    def _sparse(self, made: Sequence[np.ndarray], rows: int) -> sp.csr_array:
        parts = []
        for feature, values in zip(self.features, made, strict=True):
            if feature.kind == "category":
                entries = np.ones(rows, np.float32), values, np.arange(rows + 1)
                parts.append(sp.csr_array(entries, shape=(rows, len(feature.values))))
            else:
                parts.append(sp.csr_array(values[:, None]))
        return sp.hstack(parts, format="csr")

    def labels(self, column: Column) -> np.ndarray:
        """Class numbers, -1 where no label is given; a class that training never saw is refused."""
        values = convert.label_values(column).cast(pa.large_string())
        found = convert.lookup(values, pa.array(self.classes, pa.large_string())).astype(np.int64)
        unknown = (found < 0) & ~np.asarray(values.is_null())
        if unknown.any():
            row = convert.first(unknown)
            problem = f"holds {quoted(values[row].as_py())}, a class that training never saw"
            known = f"the model knows {quoted_list(self.classes, 4)}"
            raise column.error(row, f"{problem}; {known}: correct the label, or leave it empty")
        return found

    def roles(self, columns: Sequence[str], file: str) -> NodeRoles:
        """The roles of a new table's columns, by name; the label, split and owner may be absent."""
        if self.id is None:
            where = "this model was trained on a graph whose ids are in no column"
            raise DataError(f"{where}, so that tables such as {file} cannot be read for it")
        needed = [self.id, *(feature.name for feature in self.features)]
        lacking = [name for name in needed if name not in columns]
        if lacking:
            some = f"{len(lacking)} of the {len(needed)} columns that the model needs"
            listed = quoted_list(lacking, 4)
            raise DataError(f"{file} lacks {some}: {listed}; add them, as in the training tables")
        known = [*needed, self.label, self.split, *self.owners, *self.schema.ignore]
        label, split = (name if name in columns else None for name in (self.label, self.split))
        owners = tuple(name for name in self.owners if name in columns)
        ignored = tuple(name for name in columns if name not in known)
        numbers = tuple(f.name for f in self.features if f.kind == "number")
        categories = tuple(f.name for f in self.features if f.kind == "category")
        return NodeRoles(self.id, label, split, owners, numbers, categories, (), ignored)

    def plain(self) -> dict[str, Any]:
        """The encoder as plain values, the content of `encoder.json`."""
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return {"format": 1, **found}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Encoder:
        """The encoder of a parsed `encoder.json`."""
        try:
            if plain["format"] != 1:
                raise DataError(f"it has format {plain['format']}, and this version reads 1")
            found = msgspec.convert({k: v for k, v in plain.items() if k != "format"}, cls)
            if not found.features or len(found.classes) < 2:
                raise DataError("it has no feature, or fewer than two classes")
            return found
        except (KeyError, TypeError, msgspec.ValidationError, DataError) as error:
            raise DataError(f"encoder.json cannot be used ({error}); copy it anew") from None


def fit(columns: Mapping[str, Column], roles: NodeRoles, loading: Loading) -> tuple[Feature, ...]:
    """Decide the kind of each feature column, and collect its categories."""
    chosen = [column.complete() for name, column in columns.items() if name in roles.features]
    return tuple(_fitted(column, roles, loading) for column in chosen)


def _fitted(column: Column, roles: NodeRoles, loading: Loading) -> Feature:
    values, name, kind = column.values, column.name, column.values.type
    if name in roles.categories:
        return _category(column, loading)
    if convert.is_number(kind):
        return Feature(name, "number")
    if not convert.is_text(kind):
        raise DataError(
            f"{column.rows.name}, column '{name}' is of type {kind}; a feature is a number or a "
            f"text: turn it into numbers, or list it under ignore or categories in schema.toml"
        )
    matches = pc.match_substring_regex(pc.unique(values), NUMBER)
    numeric = pc.mean(matches.cast(pa.float64())).as_py()
    if name in roles.numbers:
        _check_number(column, "schema.toml says the column is a number")
        return Feature(name, "number")
    if 0.5 <= numeric < 1:
        _check_number(column, "most of its values are numbers and the column is a number")
    return _category(column, loading)


def _category(column: Column, loading: Loading) -> Feature:
    most = loading.options.max_categories
    distinct = convert.sorted_values(column.values.cast(pa.large_string()))
    if len(distinct) > most:
        problem = f"column '{column.name}' holds {len(distinct)} different texts"
        advice = "list it under ignore in schema.toml, or raise max_categories"
        most_words = f"at most {most} can become categories"
        raise DataError(f"{column.rows.name}, {problem}; {most_words}; {advice}")
    loading.report.note(f"column '{column.name}' became {len(distinct)} columns, one per category")
    return Feature(column.name, "category", tuple(distinct.to_pylist()))


def _check_number(column: Column, why: str) -> None:
    """Refuse a text that is not a number, with its place; `why` is the reason in the sentence."""
    kind = column.values.type
    if convert.is_number(kind):
        return
    if not convert.is_text(kind):
        raise column.error(0, f"is of type {kind}, but {why}; turn it into numbers")
    right = pc.match_substring_regex(column.values, NUMBER)
    if pc.all(right).as_py():
        return
    row = convert.first_text(column.values)
    advice = "correct it, or list it under categories in schema.toml"
    raise column.error(row, f"holds {quoted(column.values[row].as_py())}, but {why}; {advice}")


def encode_nodes(table: pa.Table, roles: NodeRoles, rows: Rows, loading: Loading) -> Nodes:
    """Turn a node table into arrays: labels, roles, owners, and features in the encoder's order."""
    columns = {name: Column(table[name], name, rows) for name in table.column_names}
    encoder, y = loading.encoder, np.full(table.num_rows, -1)
    owners = {name: convert.as_numpy(columns[name].complete().values) for name in roles.owners}
    split = None if roles.split is None else convert.split_roles(columns[roles.split])
    if encoder is not None:
        y = y if roles.label is None else encoder.labels(columns[roles.label])
        x, classes = encoder.transform(columns), encoder.classes
        return Nodes(x, y, classes, encoder.names, split, owners, encoder)
    assert roles.label is not None
    y, classes = convert.encode_labels(columns[roles.label], loading.options.max_categories)
    features = fit(columns, roles, loading)
    if not features:
        advice = "add at least one, for example each node's degree"
        raise DataError(f"{rows.name} has no feature column; {advice}")
    named = roles.label, classes, roles.id, roles.split, roles.owners
    encoder = Encoder(features, *named, loading.schema)
    return Nodes(encoder.transform(columns), y, classes, encoder.names, split, owners, encoder)
