"""Columns of a user's node table turned into arrays: labels, roles, owners and features.

Columns are Arrow arrays and nothing loops over rows: values are looked up by hash
(`pyarrow.compute.index_in`), and a row's place in its file is worked out only for an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp

from atoll.core.errors import DataError
from atoll.data.own.schema import Loading, NodeRoles, OwnOptions, quoted
from atoll.data.source import TEST, TRAIN, UNUSED, VAL

ROLE_WORDS = {"train": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "test": TEST}
MISSING = {"na", "n/a", "#n/a", "nan", "null", "none", "?", "-"}
"""Marks that people write for "no value"; a label must not become a class of that name."""
NUMBER = r"^([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|NaN|inf|Inf))$"
SPARSE_BELOW = 0.25
"""Share of non-zero features under which a CSR array is the smaller form by half or more."""


@dataclass(frozen=True)
class Rows:
    """How sentences name a table ("nodes.csv") and its row i ("nodes.csv row 7")."""

    name: str
    where: Callable[[int], str]


@dataclass(frozen=True, eq=False)
class Nodes:
    """The arrays of a node table; the fields are those of `Source` and `OwnReport`."""

    x: np.ndarray | sp.csr_array
    y: np.ndarray
    classes: tuple[str, ...]
    features: tuple[str, ...]
    split: np.ndarray | None
    columns: dict[str, np.ndarray]


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text."""
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def is_number(kind: pa.DataType) -> bool:
    """Whether a column holds numbers, truth values, or nothing at all."""
    tests = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_decimal,
        pa.types.is_null,
    )
    return any(test(kind) for test in tests)


def clean_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text without spaces around it, nothing for empty text; other columns as they are."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not is_text(column.type):
        return column
    column = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
    empty = pc.equal(column, "")
    return pc.if_else(empty, None, column) if pc.any(empty).as_py() else column


def from_labels(y: np.ndarray) -> pa.ChunkedArray:
    """Class numbers as a column; -1, which tensors use for "unknown", becomes no value."""
    return pa.chunked_array([pa.array(y, mask=y == -1)])


def from_lists(values: Mapping[str, Sequence[object]], rows: Rows) -> pa.Table:
    """A table of Python values, None where there is none."""
    table = {}
    for name, column in values.items():
        try:
            table[name] = clean_text(pa.chunked_array([pa.array(column)]))
        except pa.ArrowException:
            kinds = sorted({type(value).__name__ for value in column if value is not None})
            raise DataError(
                f"{rows.name}, attribute '{name}' holds {' and '.join(kinds)}; give every node a "
                f"number, or every node a text"
            ) from None
    return pa.table(table)


def first(mask: pa.ChunkedArray | np.ndarray) -> int:
    """The first row where `mask` holds."""
    if isinstance(mask, pa.ChunkedArray):
        mask = mask.fill_null(False)
    return int(np.argmax(np.asarray(mask)))


def first_text(column: pa.ChunkedArray) -> int:
    """The first row whose text is not a number; 0 where the column holds no text."""
    if not is_text(column.type):
        return 0
    return first(pc.invert(pc.match_substring_regex(column, NUMBER)))


def refuse_missing(column: pa.ChunkedArray, name: str, rows: Rows) -> None:
    """Raise if a value is missing, with the first place and the count."""
    if column.null_count:
        row = first(column.is_null())
        raise DataError(
            f"{rows.where(row)}, column '{name}' has no value ({column.null_count} such rows in "
            f'all); fill them in, or leave the column out with ignore = ["{name}"] in schema.toml'
        )


def as_ids(column: pa.ChunkedArray, name: str, rows: Rows) -> pa.ChunkedArray:
    """Ids as int64 or text; a fraction or a date names nothing."""
    if pa.types.is_integer(column.type) and column.type != pa.uint64():
        return column.cast(pa.int64())
    if is_text(column.type) or pa.types.is_null(column.type) or column.type == pa.uint64():
        return column.cast(pa.large_string())
    if pa.types.is_floating(column.type):
        try:
            return column.cast(pa.int64())
        except pa.ArrowInvalid:
            pass
    raise DataError(
        f"{rows.where(0)}, column '{name}' is of type {column.type}; ids are text or whole numbers"
    )


def lookup(column: pa.ChunkedArray, ids: pa.ChunkedArray) -> np.ndarray:
    """The index of each value among `ids`, int32, or -1 where it is not one of them."""
    if column.type != ids.type:  # a CSV file gives text where a Parquet file gives numbers
        column, ids = column.cast(pa.large_string()), ids.cast(pa.large_string())
    found = pc.index_in(column, value_set=ids.combine_chunks())
    return np.asarray(found.fill_null(-1), dtype=np.int32)


def as_numpy(column: pa.ChunkedArray) -> np.ndarray:
    """A column as int64, or as NumPy text with every distinct text made only once."""
    if pa.types.is_integer(column.type):
        return np.asarray(column, dtype=np.int64)
    column = column.cast(pa.large_string())
    distinct = pc.unique(column)
    names = np.array(distinct.to_pylist(), dtype=np.str_)
    if len(distinct) == len(column):
        return names
    texts: np.ndarray = names[lookup(column, pa.chunked_array([distinct]))]
    return texts


def encode_labels(
    column: pa.ChunkedArray, name: str, rows: Rows, options: OwnOptions
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Class numbers, -1 where no label is given, and the classes' names in sorted order."""
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
        fraction = pc.not_equal(column, pc.floor(column)).fill_null(False)
        if pc.any(fraction).as_py():
            row = first(fraction)
            raise DataError(
                f"{rows.where(row)}, column '{name}' holds the fraction {column[row].as_py()}; a "
                f"label is a class (text or a whole number)"
            )
        column = column.cast(pa.int64(), safe=False)
    elif not is_text(column.type) and not pa.types.is_integer(column.type):
        column = column.cast(pa.large_string())
    distinct = pc.unique(column).drop_null()
    distinct = distinct.take(pc.sort_indices(distinct))
    names = tuple(str(value) for value in distinct.to_pylist())
    if is_text(column.type):
        _refuse_marks(column, names, name, rows)
    if len(names) < 2:
        found = f"only the class {quoted(names[0])}" if names else "no label at all"
        raise DataError(
            f"column '{name}' of {rows.name} holds {found}; classification needs "
            f"two classes or more"
        )
    if len(names) > options.max_categories:
        raise DataError(
            f"column '{name}' holds {len(names)} different labels for {len(column)} nodes; at most "
            f"{options.max_categories} are allowed; name the right column with [nodes] label in "
            f"schema.toml, or raise max_categories"
        )
    return lookup(column, pa.chunked_array([distinct])).astype(np.int64), names


def _refuse_marks(column: pa.ChunkedArray, names: tuple[str, ...], name: str, rows: Rows) -> None:
    marks = [value for value in names if value.lower() in MISSING]
    if marks:
        row = first(pc.equal(column, marks[0]))
        raise DataError(
            f"{rows.where(row)}, column '{name}' holds {quoted(marks[0])}, which reads like a "
            f"missing label; leave it empty for an unlabelled node, or give the class another name"
        )


def split_roles(column: pa.ChunkedArray, name: str, rows: Rows) -> np.ndarray:
    """Roles from texts such as "train"; an empty text is an unused node."""
    column = pc.utf8_lower(column.cast(pa.large_string()))
    distinct = pc.unique(column).drop_null()
    wrong = [value for value in distinct.to_pylist() if value not in ROLE_WORDS]
    if wrong:
        row = first(pc.equal(column, wrong[0]))
        raise DataError(
            f"{rows.where(row)}, column '{name}' holds {quoted(wrong[0])}; a split is train, val "
            f"(or valid, validation), test, or empty for an unused node"
        )
    roles = np.array(
        [*(ROLE_WORDS[value] for value in distinct.to_pylist()), UNUSED], dtype=np.int8
    )
    split: np.ndarray = roles[lookup(column, pa.chunked_array([distinct]))]  # -1 takes the last
    return split


def encode_nodes(table: pa.Table, roles: NodeRoles, rows: Rows, loading: Loading) -> Nodes:
    """Turn a node table into arrays: labels, roles, owners, and features in the table's order."""
    if table.num_rows == 0:
        raise DataError(f"{rows.name} holds no nodes; give at least one row for each class")
    options = loading.options
    y, classes = encode_labels(table[roles.label], roles.label, rows, options)
    split = None if roles.split is None else split_roles(table[roles.split], roles.split, rows)
    columns = {}
    for name in roles.owners:
        refuse_missing(table[name], name, rows)
        columns[name] = as_numpy(table[name])
    blocks: list[Block] = []
    for name in table.column_names:
        if name in roles.features:
            refuse_missing(table[name], name, rows)
            blocks.append(_block(table[name], name, roles, rows, options))
    if not blocks:
        raise DataError(
            f"{rows.name} has no feature column; add at least one, for example each node's degree"
        )
    for block in blocks:
        if block.categories:
            loading.report.note(
                f"column '{block.name}' became {len(block.categories)} columns, one per category"
            )
    names = tuple(name for block in blocks for name in block.names())
    return Nodes(_stack(blocks, len(y)), y, classes, names, split, columns)


@dataclass(frozen=True, eq=False)
class Block:
    """One feature column: numbers, or the codes of its categories."""

    name: str
    values: np.ndarray
    categories: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """The names of its columns in the feature matrix."""
        return [f"{self.name}={value}" for value in self.categories] or [self.name]


def _block(
    column: pa.ChunkedArray, name: str, roles: NodeRoles, rows: Rows, options: OwnOptions
) -> Block:
    if name in roles.categories:
        return _categories(column.cast(pa.large_string()), name, rows, options)
    if is_number(column.type):
        return Block(name, _numbers(column, name, rows))
    if not is_text(column.type):
        raise DataError(
            f"{rows.name}, column '{name}' is of type {column.type}; a feature is a number or a "
            f"text: turn it into numbers, or list it under ignore or categories in schema.toml"
        )
    distinct = pc.unique(column)
    numeric = pc.mean(pc.match_substring_regex(distinct, NUMBER).cast(pa.float64())).as_py()
    if numeric < 1 and (name in roles.numbers or numeric >= 0.5):
        row = first_text(column)
        told = "schema.toml says" if name in roles.numbers else "most of its values are numbers and"
        raise DataError(
            f"{rows.where(row)}, column '{name}' holds {quoted(column[row].as_py())}, but {told} "
            f"the column is a number; correct it, or list it under categories in schema.toml"
        )
    if name in roles.numbers:
        return Block(name, _numbers(column.cast(pa.float64()), name, rows))
    return _categories(column, name, rows, options)


def _categories(column: pa.ChunkedArray, name: str, rows: Rows, options: OwnOptions) -> Block:
    distinct = pc.unique(column)
    if len(distinct) > options.max_categories:
        raise DataError(
            f"{rows.name}, column '{name}' holds {len(distinct)} different texts; at most "
            f"{options.max_categories} can become categories; list it under ignore in schema.toml, "
            f"or raise max_categories"
        )
    distinct = distinct.take(pc.sort_indices(distinct))
    codes = lookup(column, pa.chunked_array([distinct]))
    return Block(name, codes, tuple(distinct.to_pylist()))


def _numbers(column: pa.ChunkedArray, name: str, rows: Rows) -> np.ndarray:
    wide = np.asarray(column.cast(pa.float64(), safe=False))
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused below, with its place
        values = wide.astype(np.float32)
    bad = ~np.isfinite(values)
    if bad.any():
        row = first(bad)
        raise DataError(
            f"{rows.where(row)}, column '{name}' holds {wide[row]} ({int(bad.sum())} such rows in "
            f"all); a feature is a finite number that float32 can hold: replace these values"
        )
    return values


def compact(x: np.ndarray) -> np.ndarray | sp.csr_array:
    """Dense features as float32, or as CSR when most entries are zero."""
    x = x.astype(np.float32, copy=False)
    return x if np.count_nonzero(x) >= SPARSE_BELOW * x.size else sp.csr_array(x)


def _stack(blocks: Sequence[Block], n: int) -> np.ndarray | sp.csr_array:
    """The feature matrix: dense, or CSR when most entries are zero."""
    starts = np.cumsum([0, *(len(block.names()) for block in blocks)])
    width = int(starts[-1])
    entries = sum(n if b.categories else int(np.count_nonzero(b.values)) for b in blocks)
    if entries >= SPARSE_BELOW * n * width:
        x = np.zeros((n, width), dtype=np.float32)
        for start, block in zip(starts, blocks, strict=False):
            if block.categories:
                x[np.arange(n), start + block.values] = 1
            else:
                x[:, start] = block.values
        return x
    row, col, data = [], [], []
    for start, block in zip(starts, blocks, strict=False):
        at = np.arange(n) if block.categories else np.flatnonzero(block.values)
        row.append(at.astype(np.int32))
        col.append((start + (block.values if block.categories else 0 * at)).astype(np.int32))
        data.append(np.ones(n, np.float32) if block.categories else block.values[at])
    parts = (np.concatenate(data), (np.concatenate(row), np.concatenate(col)))
    return sp.coo_array(parts, shape=(n, width)).tocsr()
