"""Values of a column as numbers: decimals with a comma, truth values, dates, marks for no value."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from atoll.data.own import columns as convert
from atoll.data.own.columns import NUMBER, Column
from atoll.data.own.rules import Rule
from atoll.data.own.schema import quoted

TRUTH = {"true": 1, "yes": 1, "t": 1, "y": 1, "1": 1, "false": 0, "no": 0, "f": 0, "n": 0, "0": 0}
DAY = 86_400.0  # seconds
MONDAY = 3 * DAY  # the first of January 1970 was a Thursday


def cleaned(column: Column, rule: Rule) -> Column:
    """The column with nothing where a mark for no value stands, and with decimal points."""
    values = column.values
    if rule.empty:
        marks = pa.array(rule.empty, pa.large_string())
        if not convert.is_text(values.type):
            marks = marks.filter(pc.match_substring_regex(marks, NUMBER)).cast(pa.float64())
            values = values.cast(pa.float64())
        values = pc.if_else(pc.is_in(values, value_set=marks), None, values)
    if rule.decimal == "," and convert.is_text(values.type):
        values = pc.replace_substring(pc.replace_substring(values, ".", ""), ",", ".")
    return replace(column, values=values)


def check_number(column: Column, why: str) -> None:
    """Refuse a text that is not a number, with its place; `why` is the reason in the sentence."""
    kind = column.values.type
    if convert.is_number(kind):
        return
    if not convert.is_text(kind):
        raise column.error(0, f"is of type {kind}, but {why}; turn it into numbers")
    right = pc.match_substring_regex(column.values, NUMBER)
    if pc.all(right).as_py() is not False:
        return
    row = convert.first_text(column.values)
    advice = "correct it, or list it under categories in schema.toml"
    raise column.error(row, f"holds {quoted(column.values[row].as_py())}, but {why}; {advice}")


def numbers(column: Column, why: str, *, gaps: bool) -> np.ndarray:
    """A number for each row, (N,) float64; NaN where there is none, if there may be gaps."""
    check_number(column, why)
    wide = np.asarray(column.values.cast(pa.float64(), safe=False))
    with np.errstate(over="ignore"):  # a value beyond float32 is refused below, with its place
        bad = ~np.isfinite(wide.astype(np.float32))
    bad &= ~np.isnan(wide) if gaps else True
    if bad.any():
        row = convert.first(bad)
        advice = "a feature is a finite number that float32 can hold: replace these values"
        problem = f"holds {wide[row]} ({int(bad.sum())} such rows in all)"
        raise column.error(row, f"{problem}; {advice}")
    return wide


def truths(column: Column) -> np.ndarray:
    """1 or 0 for each row, (N,) float64, NaN where there is no value."""
    values = column.values
    if types.is_boolean(values.type):
        return np.asarray(values.cast(pa.float64()))
    texts = pc.utf8_lower(values.cast(pa.large_string()))
    places = convert.lookup(texts, pa.array(list(TRUTH), pa.large_string()))
    wrong = (places < 0) & ~np.asarray(texts.is_null())
    if wrong.any():
        row = convert.first(wrong)
        problem = f"holds {quoted(texts[row].as_py())} ({int(wrong.sum())} such rows in all)"
        raise column.error(row, f"{problem}; a truth value is true or false, yes or no, 1 or 0")
    every = np.array([*TRUTH.values(), np.nan], dtype=np.float64)
    return np.asarray(every[places])  # -1 takes the last


def seconds(column: Column, rule: Rule) -> np.ndarray:
    """Seconds since 1970 for each row, (N,) float64, NaN where there is no value."""
    values, kind = column.values, column.values.type
    if not types.is_date(kind) and not types.is_timestamp(kind):
        form = rule.format or "%Y-%m-%d"
        texts = values.cast(pa.large_string())
        values = pc.strptime(texts, format=form, unit="s", error_is_null=True)
        wrong = pc.and_(values.is_null(), texts.is_valid())
        if pc.any(wrong).as_py():
            row, count = convert.first(wrong), pc.sum(wrong).as_py()
            problem = f"holds {quoted(texts[row].as_py())}, no date of the form {form}"
            advice = "correct it, or give the form as format in schema.toml"
            raise column.error(row, f"{problem} ({count} such rows in all); {advice}")
    whole = values.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
    return np.asarray(whole.cast(pa.float64(), safe=False))


def date_part(instants: np.ndarray, part: str, since: str) -> np.ndarray:
    """Days since a day, or the place in a year, a week or a day as an angle; (N,) each."""
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
