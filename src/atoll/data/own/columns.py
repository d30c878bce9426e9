"""Conversion of the columns of a user's node table to arrays, without a loop over rows.

The columns are ids, labels, roles, numbers (also with a decimal comma), booleans or dates. They may
contain marks for missing values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from atoll.core.errors import DataError
from atoll.data.own.rules import Rule
from atoll.data.own.schema import OwnOptions, quoted
from atoll.data.source import TEST, TRAIN, UNUSED, VAL

ROLE_WORDS = {"train": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "test": TEST}
MISSING = {"na", "n/a", "#n/a", "nan", "null", "none", "?", "-"}
"""Common marks for a missing value, in lower case. A label that equals one is refused."""
NUMBER = r"^([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|NaN|inf|Inf))$"
SPARSE_BELOW = 0.25
"""Share of non-zero features below which a CSR array takes at most half the memory."""
TRUTH = {"true": 1, "yes": 1, "t": 1, "y": 1, "1": 1, "false": 0, "no": 0, "f": 0, "n": 0, "0": 0}
DAY = 86_400.0  # seconds
MONDAY = 3 * DAY  # the first of January 1970 was a Thursday


@dataclass(frozen=True)
class Rows:
    """The names of a table ("nodes.csv") and of its row i ("nodes.csv row 7") in errors."""

    name: str
    where: Callable[[int], str]


@dataclass(frozen=True, eq=False)
class Column:
    """One column of a table, and its name in errors."""

    values: pa.ChunkedArray
    name: str
    rows: Rows

    def error(self, row: int, problem: str) -> DataError:
        """Return the error for one row of the column."""
        return DataError(f"{self.rows.where(row)}, column '{self.name}' {problem}")

    def complete(self, advice: str = "") -> Column:
        """Return the column. Refuse missing values, with the first place and the count."""
        if missing := self.values.null_count:
            problem = f"has no value ({missing} such rows in all); fill them in"
            problem += f", or {advice}" if advice else ""
            raise self.error(first(self.values.is_null()), problem)
        return self


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type contains text."""
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def is_number(kind: pa.DataType) -> bool:
    """Return whether a column of this type contains numbers, booleans, or only missing values."""
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null)
    return any(test(kind) for test in tests)


def clean_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Decode a dictionary column, strip text, and replace empty text by null."""
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not is_text(column.type):
        return column
    column = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
    empty = pc.equal(column, "")
    return pc.if_else(empty, None, column) if pc.any(empty).as_py() else column


def from_lists(values: Mapping[str, Sequence[object]], name: str) -> pa.Table:
    """Make a table of the Python values of a graph called `name`. Missing values are None."""
    table = {}
    for key, column in values.items():
        try:
            table[key] = clean_text(pa.chunked_array([pa.array(column)]))
        except pa.ArrowException:
            kinds = sorted({type(value).__name__ for value in column if value is not None})
            problem = f"{name}, attribute '{key}' holds {' and '.join(kinds)}"
            raise DataError(f"{problem}; give every node a number, or every node a text") from None
    return pa.table(table)


def first(mask: pa.ChunkedArray | np.ndarray) -> int:
    """Return the first row where `mask` is true."""
    return int(np.argmax(mask if isinstance(mask, np.ndarray) else mask.fill_null(False)))


def first_text(column: pa.ChunkedArray) -> int:
    """Return the first row whose text is not a number, or 0 if there is none."""
    if not is_text(column.type):
        return 0
    return first(pc.invert(pc.match_substring_regex(column, NUMBER)))


def as_ids(column: Column) -> pa.ChunkedArray:
    """Convert ids to int64 or text. Refuse fractions and other types."""
    values, kind = column.values, column.values.type
    if is_text(kind) or kind in (pa.null(), pa.uint64()):
        return values.cast(pa.large_string())
    if types.is_integer(kind) or types.is_floating(kind):
        with suppress(pa.ArrowInvalid):
            return values.cast(pa.int64())
    raise column.error(0, f"is of type {kind}; ids are text or whole numbers")


def lookup(column: pa.ChunkedArray, ids: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return the index of each value among `ids`, int32, or -1 if it is missing there."""
    if column.type != ids.type:  # a CSV file has text where a Parquet file has numbers
        column, ids = column.cast(pa.large_string()), ids.cast(pa.large_string())
    return np.asarray(pc.index_in(column, value_set=ids).fill_null(-1), dtype=np.int32)


def as_numpy(column: pa.ChunkedArray) -> np.ndarray:
    """Convert a column of integers to int64, and any other column to NumPy text."""
    if types.is_integer(column.type):
        return np.asarray(column, dtype=np.int64)
    column = column.cast(pa.large_string())
    distinct = pc.unique(column)
    names = np.array(distinct.to_pylist(), dtype=np.str_)
    return names if len(distinct) == len(column) else np.asarray(names[lookup(column, distinct)])


def sorted_values(column: pa.ChunkedArray) -> pa.Array:
    """Return the distinct values of a column, in ascending order."""
    distinct = pc.unique(column).drop_null()
    return distinct.take(pc.sort_indices(distinct))


def label_values(labels: Column) -> pa.ChunkedArray:
    """Return labels as text or integers, null if missing. Refuse fractions."""
    column = labels.values
    if types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
        fraction = pc.not_equal(column, pc.floor(column))
        if pc.any(fraction).as_py():
            problem = f"holds the fraction {column[first(fraction)].as_py()}"
            advice = "a label is a class (text or a whole number)"
            raise labels.error(first(fraction), f"{problem}; {advice}")
        return column.cast(pa.int64(), safe=False)
    if not is_text(column.type) and not types.is_integer(column.type):
        return column.cast(pa.large_string())
    return column


def encode_labels(labels: Column, options: OwnOptions) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class number of each row, -1 if missing, and the sorted names of the classes."""
    max_classes = options.max_categories
    column, name = label_values(labels), labels.name
    distinct = sorted_values(column)
    names = tuple(str(value) for value in distinct.to_pylist())
    marks = [value for value in names if value.lower() in MISSING]
    if marks and is_text(column.type):
        problem = f"holds {quoted(marks[0])}, which reads like a missing label"
        advice = "leave it empty for an unlabelled node, or give the class another name"
        raise labels.error(first(pc.equal(column, marks[0])), f"{problem}; {advice}")
    if len(names) < options.min_classes:
        found = f"only the class {quoted(names[0])}" if names else "no label at all"
        advice = "classification needs two classes or more"
        raise DataError(f"column '{name}' of {labels.rows.name} holds {found}; {advice}")
    if len(names) > max_classes:
        problem = f"column '{name}' holds {len(names)} different labels for {len(column)} nodes"
        advice = "name the right column with [nodes] label in schema.toml, or raise max_categories"
        raise DataError(f"{problem}; at most {max_classes} are allowed; {advice}")
    return lookup(column, distinct).astype(np.int64), names


def split_roles(given: Column) -> np.ndarray:
    """Convert texts such as "train" to roles. An empty text is an unused node."""
    column = pc.utf8_lower(given.values.cast(pa.large_string()))
    distinct = pc.unique(column).drop_null()
    words = distinct.to_pylist()
    if wrong := [word for word in words if word not in ROLE_WORDS]:
        advice = "a split is train, val (or valid, validation), test, or empty for an unused node"
        raise given.error(first(pc.equal(column, wrong[0])), f"holds {quoted(wrong[0])}; {advice}")
    roles = np.array([*(ROLE_WORDS[word] for word in words), UNUSED], dtype=np.int8)
    return np.asarray(roles[lookup(column, distinct)])  # -1 selects the last entry


def cleaned(column: Column, rule: Rule) -> Column:
    """Replace the rule's marks for missing values by null, and decimal commas by points."""
    values = column.values
    if rule.empty:
        marks = pa.array(rule.empty, pa.large_string())
        if not is_text(values.type):
            marks = marks.filter(pc.match_substring_regex(marks, NUMBER)).cast(pa.float64())
            values = values.cast(pa.float64())
        values = pc.if_else(pc.is_in(values, value_set=marks), None, values)
    if rule.decimal == "," and is_text(values.type):
        values = pc.replace_substring(pc.replace_substring(values, ".", ""), ",", ".")
    return replace(column, values=values)


def check_number(column: Column, why: str, advice: str = "") -> None:
    """Refuse a text that is not a number, with its place. `why` is the reason in the error."""
    kind = column.values.type
    if is_number(kind):
        return
    if not is_text(kind):
        raise column.error(0, f"is of type {kind}, but {why}; turn it into numbers")
    right = pc.match_substring_regex(column.values, NUMBER)
    if pc.all(right).as_py() is not False:
        return
    row = first_text(column.values)
    advice = f"correct it, or {advice or 'list it under categories in schema.toml'}"
    raise column.error(row, f"holds {quoted(column.values[row].as_py())}, but {why}; {advice}")


def numbers(column: Column, why: str, advice: str = "", *, gaps: bool) -> np.ndarray:
    """Convert a column to numbers, (N,) float64. Missing values are NaN, if `gaps` allows them."""
    check_number(column, why, advice)
    wide = np.asarray(column.values.cast(pa.float64(), safe=False))
    with np.errstate(over="ignore"):  # a value beyond float32 is refused below, with its place
        bad = ~np.isfinite(wide.astype(np.float32))
    bad &= ~np.isnan(wide) if gaps else True
    if bad.any():
        row = first(bad)
        advice = "a feature is a finite number that float32 can hold: replace these values"
        problem = f"holds {wide[row]} ({int(bad.sum())} such rows in all)"
        raise column.error(row, f"{problem}; {advice}")
    return wide


def truths(column: Column) -> np.ndarray:
    """Convert a boolean column to 1 or 0, (N,) float64. Missing values are NaN."""
    values = column.values
    if types.is_boolean(values.type):
        return np.asarray(values.cast(pa.float64()))
    texts = pc.utf8_lower(values.cast(pa.large_string()))
    places = lookup(texts, pa.array(list(TRUTH), pa.large_string()))
    wrong = (places < 0) & ~np.asarray(texts.is_null())
    if wrong.any():
        row = first(wrong)
        problem = f"holds {quoted(texts[row].as_py())} ({int(wrong.sum())} such rows in all)"
        raise column.error(row, f"{problem}; a truth value is true or false, yes or no, 1 or 0")
    every = np.array([*TRUTH.values(), np.nan], dtype=np.float64)
    return np.asarray(every[places])  # -1 selects the last entry


def seconds(column: Column, rule: Rule) -> np.ndarray:
    """Convert a date column to seconds since 1970, (N,) float64. Missing values are NaN."""
    values, kind = column.values, column.values.type
    if not types.is_date(kind) and not types.is_timestamp(kind):
        form = rule.format or "%Y-%m-%d"
        texts = values.cast(pa.large_string())
        values = pc.strptime(texts, format=form, unit="s", error_is_null=True)
        wrong = pc.and_(values.is_null(), texts.is_valid())
        if pc.any(wrong).as_py():
            row, count = first(wrong), pc.sum(wrong).as_py()
            problem = f"holds {quoted(texts[row].as_py())}, no date of the form {form}"
            advice = "correct it, or train with its form as format in schema.toml"
            raise column.error(row, f"{problem} ({count} such rows in all); {advice}")
    whole = values.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
    return np.asarray(whole.cast(pa.float64(), safe=False))


def date_part(instants: np.ndarray, part: str, since: str) -> np.ndarray:
    """Return days since the day `since`, or the time in a year, week or day as an angle, (N,)."""
    if part == "days":
        return np.asarray(instants / DAY - (date.fromisoformat(since) - date(1970, 1, 1)).days)
    if part == "year":
        known = np.nan_to_num(instants).astype("datetime64[s]")
        year = known.astype("datetime64[Y]")
        begin, end = (y.astype("datetime64[s]").astype(np.float64) for y in (year, year + 1))
        share = (instants - begin) / (end - begin)
    else:
        length = DAY if part == "day" else 7 * DAY
        share = (instants + MONDAY) % length / length
    return np.asarray(2 * np.pi * share)
