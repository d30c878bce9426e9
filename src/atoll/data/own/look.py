"""The rule that the values of one column suggest, with questions to its owner.

`describe` looks at every column of the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from atoll.data.own import columns as convert
from atoll.data.own.columns import MISSING, NUMBER, TRUTH, Column
from atoll.data.own.rules import OWN_CATEGORY, Rule
from atoll.data.own.schema import Schema, quoted, quoted_list

COMMA = r"^[-+]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?$"
"""A number with a decimal comma, and points between thousands."""
FORMS = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%Y-%m-%d %H:%M:%S")
MOST = 50  # distinct texts up to which a column is a category without a question
RARE = 5  # a value in fewer rows counts as `other`, if another value is frequent
FEW = 10  # up to this number of rows, a column of different numbers is not an id


def float32(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return numbers as float32: infinite beyond its range, and NaN if not a number."""
    if convert.is_text(values.type):
        values = pc.if_else(pc.match_substring_regex(values, NUMBER), values, None)
    with np.errstate(over="ignore"):
        return np.asarray(values.cast(pa.float64(), safe=False)).astype(np.float32)


@dataclass
class Look:
    """A column with its inferred rule, and questions, each with a number of rows."""

    column: Column
    rule: Rule
    questions: list[tuple[str, int]] = field(default_factory=list)
    hits: dict[str, np.ndarray] = field(default_factory=dict)  # affected rows, if not the column

    def complete(self, known: Schema) -> Rule:
        """Return the rule with every choice named, and all values of a category."""
        kind, rule = self.rule.kind or "text", self.rule
        if kind == "category" and not rule.values:
            texts = convert.cleaned(self.column, rule).values.cast(pa.large_string())
            rule = replace(rule, values=tuple(convert.sorted_values(texts).to_pylist()))
        return rule if kind == "text" else rule.settled(kind, known.scale, known.missing)

    def ask(self, question: str, rows: int, hits: pa.Array | np.ndarray | None = None) -> None:
        """Add a question about a number of rows: those with these values, or a mask of rows."""
        self.questions.append((question, rows))
        if hits is not None and not isinstance(hits, np.ndarray):
            hits = np.asarray(pc.is_in(self.column.values.cast(hits.type), value_set=hits))
        self.hits |= {} if hits is None else {question: hits}


def look_at(column: Column, wish: Rule) -> Look:
    """Infer the kind of a feature column, with a question for every uncertain choice."""
    found = Look(convert.cleaned(column, wish), wish)
    counts = pc.value_counts(found.column.values.combine_chunks().drop_null())
    texts, rows = counts.field("values"), np.asarray(counts.field("counts"))
    if not len(texts):
        found.ask("no row has a value; it is ignored", len(column.values))
        found.rule = replace(wish, kind="text")
    elif wish.kind is None:
        _guess(found, texts, rows)
    else:
        _check(found, texts, rows)
    _open(found, texts, rows)
    _gaps(found)
    return found


def _guess(look: Look, texts: pa.Array, rows: np.ndarray) -> None:
    """Set the kind of a column whose kind the schema does not name."""
    kind, wish = texts.type, look.rule
    if types.is_boolean(kind):
        look.rule = replace(wish, kind="boolean")
    elif types.is_date(kind) or types.is_timestamp(kind):
        look.rule = replace(wish, kind="date")
        look.ask('dates become days; choose other parts, or kind = "text" to ignore them', 0)
    elif convert.is_number(kind):
        look.rule = replace(wish, kind="number")
        _check(look, texts, rows)
        _identity(look, texts)
    else:
        _guess_text(look, texts.cast(pa.large_string()), rows)


def _guess_text(look: Look, texts: pa.Array, rows: np.ndarray) -> None:
    lower, wish = pc.utf8_lower(texts), look.rule
    marks = np.asarray(pc.is_in(lower, value_set=pa.array(sorted(MISSING), lower.type)))
    real, count = texts.filter(pa.array(~marks)), rows[~marks]
    number = np.asarray(pc.match_substring_regex(real, NUMBER)) & ~np.isinf(float32(real))
    comma = np.asarray(pc.match_substring_regex(real, COMMA))
    shares = [float(count[hits].sum() / max(count.sum(), 1)) for hits in (number, comma)]
    form = next((f for f in FORMS if _parses(real, f)), None)
    if len(real) and set(pc.utf8_lower(real).to_pylist()[:9]) <= set(TRUTH) - {"0", "1"}:
        look.rule = replace(wish, kind="boolean")
    elif form is not None:
        look.rule = replace(wish, kind="date", format=form)
        other = [f for f in FORMS if f != form and _parses(real, f)]
        ways = f"it could be {form} or {other[0]}" if other else f"dates of the form {form}"
        look.ask(f'{ways}; they become days, or choose kind = "text" to ignore them', 0)
    elif shares[1] == 1 and shares[0] < 1:
        look.rule = replace(wish, kind="number", decimal=",")
        told = f"{quoted(real[int(np.argmin(number))].as_py())} seems to be a number with a decimal"
        look.ask(f"{told} comma", int(count[~number].sum()), real.filter(pa.array(~number)))
    elif shares[0] >= 0.5:
        wrong = real.filter(pa.array(~number))
        look.rule = replace(wish, kind="number", empty=(*wish.empty, *wrong.to_pylist()[:MOST]))
        if len(wrong):
            told = f"{quoted_list(wrong.to_pylist(), 3)} are no numbers, and become missing values"
            look.ask(told, int(count[~number].sum()), wrong)
        _identity(look, real)
    elif len(real) > MOST:
        look.rule = replace(wish, kind="text")
        what = "an id or a free text" if len(real) > count.sum() / 2 else "a category"
        told = f"{len(real)} different texts seem to be {what}; they are ignored"
        look.ask(f'{told} unless you choose kind = "category"', int(count.sum()))
    else:
        look.rule = replace(wish, kind="category")
    if marks.any():
        gaps = texts.filter(pa.array(marks))
        told = f"{quoted_list(named := gaps.to_pylist())} may mean that there is no value"
        look.ask(told, int(rows[marks].sum()), gaps)
        if look.rule.kind != "category":  # in a category it may be a value, such as Namibia
            look.rule = replace(look.rule, empty=(*look.rule.empty, *named))


def _parses(texts: pa.Array, form: str) -> bool:
    """Return whether every text is a date of this form."""
    head = pc.strptime(texts[:100], format=form, unit="s", error_is_null=True)
    if head.null_count or not len(texts):
        return False
    return not pc.strptime(texts, format=form, unit="s", error_is_null=True).null_count


def _identity(look: Look, distinct: pa.Array) -> None:
    """Ask about integers that differ in every row, or that begin with a zero."""
    texts = distinct.cast(pa.large_string())
    zeros = pc.sum(pc.match_substring_regex(texts, r"^0\d")).as_py() or 0
    whole = pc.all(pc.match_substring_regex(texts, r"^\d+$")).as_py()
    rows = len(look.column.values)
    named = look.column.name.lower().endswith(("id", "_no", "number", "code"))
    if zeros and whole:
        look.ask('numbers that begin with 0 may be names; choose kind = "category" then', zeros)
    elif whole and len(texts) == rows > FEW and (named or len(texts) > MOST):
        look.ask('whole numbers that differ in every row may be an id; role = "ignore" then', rows)


def _check(look: Look, texts: pa.Array, rows: np.ndarray) -> None:
    """Ask about values that do not fit the kind that the schema names."""
    kind, bad = look.rule.kind, np.zeros(len(texts), dtype=bool)
    if kind == "category" and look.rule.values and look.rule.other is None:
        bad = ~np.isin(texts.cast(pa.string()).to_pylist(), look.rule.values)
    elif kind == "number" and convert.is_text(texts.type):
        bad = ~np.isfinite(float32(texts))  # no number, infinite or nan
        bad &= ~np.isin(texts.to_pylist(), look.rule.empty)
    elif kind == "number" and convert.is_number(texts.type):
        bad = np.isinf(float32(texts))
    elif kind == "date" and convert.is_text(texts.type):
        form = look.rule.format or FORMS[0]
        bad = np.asarray(pc.strptime(texts, format=form, unit="s", error_is_null=True).is_null())
    elif kind == "boolean" and not types.is_boolean(texts.type):
        lower = pc.utf8_lower(texts.cast(pa.large_string()))
        bad = ~np.asarray(pc.is_in(lower, value_set=pa.array(list(TRUTH), lower.type)))
    if bad.any():
        wrong = texts.filter(pa.array(bad))
        told = f'{quoted_list(wrong.to_pylist(), 3)} do not fit kind = "{kind}"'
        look.ask(told, int(rows[bad].sum()), wrong)


def _open(look: Look, texts: pa.Array, rows: np.ndarray) -> None:
    """Count rare values of a category as `other`, so that it accepts new values after training.

    `values` then contains no rare value, because owners share the schema. If all values are rare,
    the category stays closed.
    """
    rule, seldom = look.rule, rows < RARE
    given = rule.kind != "category" or rule.values or rule.other is not None
    if given or not seldom.any() or seldom.all():
        return
    kept = sorted(texts.filter(pa.array(~seldom)).cast(pa.large_string()).to_pylist())
    other = "other"
    while other in kept:
        other = f"any {other}"
    look.rule = replace(rule, values=tuple(kept), other=other)
    many = "a value" if seldom.sum() == 1 else f"{seldom.sum()} values"
    told = f'{many} in fewer than {RARE} rows, and new values, count as "{other}"'
    hits = texts.filter(pa.array(seldom))
    look.ask(f"{told}; list more values to keep them", int(rows[seldom].sum()), hits)


def _gaps(look: Look) -> None:
    """Ask about rows without a value, unless the schema says how to fill them."""
    if look.rule.kind == "text" or look.rule.missing not in (None, "refuse"):
        return
    values = convert.cleaned(look.column, look.rule).values
    hits = np.asarray(values.is_null(nan_is_null=types.is_floating(values.type)))
    if (gaps := int(hits.sum())) and look.rule.missing is None:
        look.rule = replace(look.rule, missing=OWN_CATEGORY)
        look.ask("rows have no value; choose missing", gaps, hits)
    elif gaps:
        look.ask('rows have no value, and missing = "refuse"', gaps, hits)
