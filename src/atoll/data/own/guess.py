"""What a column of a user's table may be, what must be asked about it, and whether it leaks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from atoll.core.errors import AtollError
from atoll.data.own import columns as convert
from atoll.data.own.columns import MISSING, NUMBER, TRUTH, Column
from atoll.data.own.rules import OWN_CATEGORY, Rule
from atoll.data.own.schema import quoted, quoted_list

COMMA = r"^[-+]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?$"
"""A number with a decimal comma, and points between thousands."""
FORMS = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%Y-%m-%d %H:%M:%S")
MOST = 50  # distinct texts that are taken for a category without a question
TELLING = 0.95  # AUC of one column from which on it seems to give the label away
CERTAIN, CAUGHT = 0.99, 0.25  # or it is this certain of this share of a class
LEAST = 10  # labelled rows of a class below which no column is tried
SAMPLE = 20_000  # labelled rows that a column is tried on


@dataclass
class Look:
    """A column with what it seems to be; a question is a remark and perhaps a count of rows."""

    column: Column
    rule: Rule
    questions: list[tuple[str, int]] = field(default_factory=list)

    def complete(self) -> Rule:
        """The rule with every choice named, and all values of a category."""
        kind, rule = self.rule.kind or "text", self.rule
        if kind == "category" and not rule.values:
            texts = convert.cleaned(self.column, rule).values.cast(pa.large_string())
            rule = replace(rule, values=tuple(convert.sorted_values(texts).to_pylist()))
        return rule if kind == "text" else rule.settled(kind, None, None)

    def ask(self, question: str, rows: int) -> None:
        """Add a question about some rows."""
        self.questions.append((question, rows))


def look_at(column: Column, wish: Rule) -> Look:
    """The kind of a feature column, with a question for everything that is not certain."""
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
    _gaps(found)
    return found


def _guess(look: Look, texts: pa.Array, rows: np.ndarray) -> None:
    """Set the kind of a column that the schema says nothing about."""
    kind, wish = texts.type, look.rule
    if types.is_boolean(kind):
        look.rule = replace(wish, kind="boolean")
    elif types.is_date(kind) or types.is_timestamp(kind):
        look.rule = replace(wish, kind="date")
        look.ask('dates become days; choose other parts, or kind = "text" to ignore them', 0)
    elif convert.is_number(kind):
        look.rule = replace(wish, kind="number")
        _identity(look, texts)
    else:
        _guess_text(look, texts.cast(pa.large_string()), rows)


def _guess_text(look: Look, texts: pa.Array, rows: np.ndarray) -> None:
    lower, wish = pc.utf8_lower(texts), look.rule
    marks = np.asarray(pc.is_in(lower, value_set=pa.array(sorted(MISSING), lower.type)))
    real, count = texts.filter(pa.array(~marks)), rows[~marks]
    number = np.asarray(pc.match_substring_regex(real, NUMBER))
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
        example = quoted(real[int(np.argmin(number))].as_py())
        look.ask(f"{example} seems to be a number with a decimal comma", int(count[~number].sum()))
    elif shares[0] >= 0.5:
        wrong = real.filter(pa.array(~number)).to_pylist()
        look.rule = replace(wish, kind="number", empty=(*wish.empty, *wrong[:MOST]))
        if wrong:
            told = f"{quoted_list(wrong, 3)} are no numbers, and become missing values"
            look.ask(told, int(count[~number].sum()))
        _identity(look, real)
    elif len(real) > MOST:
        look.rule = replace(wish, kind="text")
        what = "an id or a free text" if len(real) > count.sum() / 2 else "a category"
        told = f"{len(real)} different texts seem to be {what}; they are ignored"
        look.ask(f'{told} unless you choose kind = "category"', int(count.sum()))
    else:
        look.rule = replace(wish, kind="category")
    if marks.any():
        named = texts.filter(pa.array(marks)).to_pylist()
        look.ask(f"{quoted_list(named)} may mean that there is no value", int(rows[marks].sum()))
        if look.rule.kind != "category":  # of a category it may be a value, such as Namibia
            look.rule = replace(look.rule, empty=(*look.rule.empty, *named))


def _parses(texts: pa.Array, form: str) -> bool:
    """Whether every text is a date of a form."""
    head = pc.strptime(texts[:100], format=form, unit="s", error_is_null=True)
    if head.null_count or not len(texts):
        return False
    return not pc.strptime(texts, format=form, unit="s", error_is_null=True).null_count


def _identity(look: Look, distinct: pa.Array) -> None:
    """Ask about whole numbers that differ in every row, or begin with a zero."""
    texts = distinct.cast(pa.large_string())
    zeros = pc.sum(pc.match_substring_regex(texts, r"^0\d")).as_py() or 0
    whole = pc.all(pc.match_substring_regex(texts, r"^\d+$")).as_py()
    rows = len(look.column.values)
    named = look.column.name.lower().endswith(("id", "_no", "number", "code"))
    if zeros and whole:
        look.ask('numbers that begin with 0 may be names; choose kind = "category" then', zeros)
    elif whole and len(texts) == rows > LEAST and (named or len(texts) > MOST):
        look.ask('whole numbers that differ in every row may be an id; role = "ignore" then', rows)


def _check(look: Look, texts: pa.Array, rows: np.ndarray) -> None:
    """Count values that do not fit the kind that the schema names."""
    kind, bad = look.rule.kind, np.zeros(len(texts), dtype=bool)
    if kind == "category" and look.rule.values and look.rule.other is None:
        bad = ~np.isin(texts.cast(pa.string()).to_pylist(), look.rule.values)
    elif kind == "number" and convert.is_text(texts.type):
        bad = ~np.asarray(pc.match_substring_regex(texts, NUMBER))
    elif kind == "date" and convert.is_text(texts.type):
        form = look.rule.format or FORMS[0]
        bad = np.asarray(pc.strptime(texts, format=form, unit="s", error_is_null=True).is_null())
    elif kind == "boolean" and not types.is_boolean(texts.type):
        lower = pc.utf8_lower(texts.cast(pa.large_string()))
        bad = ~np.asarray(pc.is_in(lower, value_set=pa.array(list(TRUTH), lower.type)))
    if bad.any():
        wrong = quoted_list(texts.filter(pa.array(bad)).to_pylist(), 3)
        look.ask(f'{wrong} do not fit kind = "{kind}"', int(rows[bad].sum()))


def _gaps(look: Look) -> None:
    """Ask about rows without a value, unless the schema decides."""
    if look.rule.kind == "text" or look.rule.missing not in (None, "refuse"):
        return
    values = convert.cleaned(look.column, look.rule).values
    gaps = values.null_count
    if types.is_floating(values.type):
        gaps += pc.sum(pc.is_nan(values)).as_py() or 0
    if gaps and look.rule.missing is None:
        look.rule = replace(look.rule, missing=OWN_CATEGORY)
        look.ask("rows have no value; choose missing", gaps)
    elif gaps:
        look.ask('rows have no value, and missing = "refuse"', gaps)


def telling(look: Look, y: np.ndarray) -> str:
    """How this column alone gives the label away, by a cross-validated small tree; or nothing."""
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.tree import DecisionTreeClassifier

    rows = np.flatnonzero(y >= 0)
    if rows.size > SAMPLE:
        rows = np.random.default_rng(0).choice(rows, SAMPLE, replace=False)
    sizes = np.bincount(y[rows])
    rows = rows[sizes[y[rows]] >= LEAST]
    if np.unique(y[rows]).size < 2:
        return ""
    try:
        codes = _codes(look)[rows]
    except AtollError:  # values that do not fit have a problem already
        return ""
    tree = DecisionTreeClassifier(max_leaf_nodes=16, min_samples_leaf=3, random_state=0)
    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    chances = cross_val_predict(tree, codes[:, None], y[rows], cv=folds, method="predict_proba")
    two = chances[:, 1] if chances.shape[1] == 2 else chances
    score = float(roc_auc_score(y[rows], two, multi_class="ovr"))
    if score >= TELLING:
        return f"predicts the label by itself (AUC {score:.3f})"
    for place, number in enumerate(np.unique(y[rows])):
        right, sure = y[rows] == number, chances[:, place] >= CERTAIN
        caught = float((right & sure).sum() / right.sum())
        if right.mean() <= 0.5 and caught >= CAUGHT and right[sure].mean() >= CERTAIN:
            return f"by itself is certain of {100 * caught:.0f} % of one class"
    return ""


def _codes(look: Look) -> np.ndarray:
    """The column as numbers for a tree; a missing value is below all others."""
    column = convert.cleaned(look.column, look.rule)
    if look.rule.kind == "category":
        texts = column.values.cast(pa.large_string())
        return convert.lookup(texts, convert.sorted_values(texts)).astype(np.float64)
    if look.rule.kind == "date":
        found = convert.seconds(column, look.rule)
    elif look.rule.kind == "boolean":
        found = convert.truths(column)
    else:
        found = convert.numbers(column, "the column is a number", gaps=True)
    lowest = float(np.nanmin(found)) if not np.isnan(found).all() else 0.0
    return np.asarray(np.where(np.isnan(found), lowest - 1, found))
