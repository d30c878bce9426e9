"""The encoder of a node table: fitted on the training tables and stored with the model.

It finds the columns of a new table by their names, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp
from pyarrow import types

from atoll.core.errors import ConfigError, DataError
from atoll.data.own import agree
from atoll.data.own import columns as convert
from atoll.data.own.columns import NUMBER, SPARSE_BELOW, Column, Rows
from atoll.data.own.rules import OWN_CATEGORY, Rule
from atoll.data.own.schema import Loading, NodeRoles, Schema, quoted, quoted_list

FORMAT = 2  # of encoder.json; format 1 had no rules and no scaling
Kind = Literal["number", "category", "boolean", "date"]
MOSTLY = "most of its values are numbers and the column is a number"


@dataclass(frozen=True)
class Feature:
    """The conversion of one column of a table to columns of the feature matrix.

    A number v becomes (v - centre) / spread. With the scale "log", sign(v) log(1 + |v|) replaces v
    first. With the scale "range" the result is clipped to -1 to 1.
    """

    name: str
    kind: Kind
    values: tuple[str, ...] = ()  # the known values of a category, in the order of their columns
    # With every choice named. A feature of format 1 has an empty rule, and numbers stay unscaled.
    rule: Rule = field(default_factory=Rule)
    centre: float = 0.0
    spread: float = 1.0
    fill: float = 0.0  # replaces a missing number before centring
    # Values that are too rare to be sent. They count as `rule.other`, also if `values` lists them.
    rare: tuple[str, ...] = ()
    # Centre, spread and fill of each client, if clients have their own.
    by_client: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of its columns in the feature matrix."""
        names = [self.name]
        if self.kind == "category":
            values = (*self.values, *([self.rule.other] if self.rule.other else []))
            names = [f"{self.name}={value}" for value in values]
        elif self.kind == "date":
            angles = [part for part in self.rule.parts if part != "days"]
            names = [f"{self.name} days"] if "days" in self.rule.parts else []
            names += [f"{self.name} {part} {f}" for part in angles for f in ("sin", "cos")]
        gap = self.rule.missing == OWN_CATEGORY
        return [*names, f"{self.name} is missing"] if gap else names

    @property
    def again(self) -> str:
        """The advice for a missing value, which the training rules refuse."""
        says = 'the training\'s schema says missing = "refuse"'
        return f"train again with {_ways(self.kind)}, because {says}"

    def measured(self, column: Column) -> np.ndarray:
        """Convert a column to numbers, booleans or timestamps, (N,) float64. Missing: NaN.

        With the scale "log" these are the logarithms. They are not yet centred.
        """
        gaps = self.rule.missing not in (None, "refuse")
        column = convert.cleaned(column, self.rule)
        if not gaps:
            column = column.complete(self.again)
        if self.kind == "date":
            return convert.seconds(column, self.rule)
        if self.kind == "boolean":
            return convert.truths(column)
        why = "the model was trained on numbers there"
        advice = f"leave it empty and {self.again}"
        if gaps:
            advice = f'leave it empty: the training\'s schema says missing = "{self.rule.missing}"'
        found = convert.numbers(column, why, advice, gaps=gaps)
        log = self.rule.scale == "log"
        return np.asarray(np.sign(found) * np.log1p(np.abs(found))) if log else found

    def statistics(self, clients: np.ndarray | None, rows: Rows) -> tuple[Any, Any, Any]:
        """Return centre, spread and fill: numbers, or arrays with one value per row."""
        if not self.by_client:
            return self.centre, self.spread, self.fill
        if clients is None:
            hint = "name the client of the tables with --client, or by their owner column"
            raise DataError(f"every client scales column '{self.name}' by itself; {hint}")
        names, place = np.unique(clients.astype(str), return_inverse=True)
        if unknown := [name for name in names if name not in self.by_client]:
            known = f"training knows {quoted_list(self.by_client, 4)}"
            raise DataError(f"{rows.name} has rows of client {quoted(unknown[0])}; {known}")
        found = np.array([self.by_client[name] for name in names])[place]
        return found[:, 0], found[:, 1], found[:, 2]

    def encoded(self, column: Column, clients: np.ndarray | None = None) -> np.ndarray:
        """Encode a column to features, (N, width) float32, or to category indices, (N,)."""
        if self.kind == "category":
            return self.places(column)
        found = self.measured(column)
        lost, made = np.isnan(found), list[np.ndarray]()
        if self.kind != "date" or "days" in self.rule.parts:
            number = self.in_days(found)
            centre, spread, fill = self.statistics(clients, column.rows)
            number = np.where(lost, fill, number) if lost.any() else number
            scaled = (number - centre) / spread
            made.append(np.clip(scaled, -1, 1) if self.rule.scale == "range" else scaled)
        for part in (part for part in self.rule.parts if part != "days"):
            angle = convert.date_part(found, part, "")
            made += [np.nan_to_num(np.sin(angle)), np.nan_to_num(np.cos(angle))]
        if self.rule.missing == OWN_CATEGORY:
            made.append(lost)
        return np.stack(made, axis=1).astype(np.float32) + np.float32(0)  # -0.0 becomes 0.0

    def in_days(self, found: np.ndarray) -> np.ndarray:
        """Convert timestamps to days. Other numbers are unchanged."""
        days = self.kind == "date"
        return convert.date_part(found, "days", str(self.rule.since)) if days else found

    def places(self, column: Column) -> np.ndarray:
        """Return the place of each row's category among `names`, (N,) int32."""
        column = convert.cleaned(column, self.rule)
        if self.rule.missing != OWN_CATEGORY:
            column = column.complete(self.again)
        texts = column.values.cast(pa.large_string())
        found = convert.lookup(texts, pa.array(self.values, pa.large_string()))
        if self.rare:
            rare = convert.lookup(texts, pa.array(self.rare, pa.large_string())) >= 0
            found = np.where(rare, np.int32(-1), found)
        lost = np.asarray(texts.is_null())
        unknown = (found < 0) & ~lost
        if unknown.any() and self.rule.other is None:
            row, count = convert.first(unknown), int(unknown.sum())
            problem = f"holds {quoted(texts[row].as_py())}, a category that training never saw"
            known = f"it knows {quoted_list(self.values, 4)}"
            advice = "correct it, or train again with other = ... in the schema"
            raise column.error(row, f"{problem} ({count} such rows in all); {known}: {advice}")
        if unknown.any() or lost.any():
            places = [unknown, lost], [len(self.values), len(self.names) - 1]
            found = np.select(*places, found).astype(np.int32)
        return found


@dataclass(frozen=True, eq=False)
class Nodes:
    """The arrays of a node table. `Source` and `OwnReport` explain the fields."""

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
    id: str | None = None  # None if node names are not in a column (NetworkX)
    split: str | None = None
    owners: tuple[str, ...] = ()
    schema: Schema = field(default_factory=Schema)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns of the feature matrix."""
        return tuple(name for feature in self.features for name in feature.names)

    def of_client(self, name: str) -> Encoder:
        """Return the encoder with one client's statistics, if clients have their own."""
        every = [f for f in self.features if f.by_client]
        if every and name not in every[0].by_client:
            known = quoted_list(every[0].by_client, 4)
            raise ConfigError(f"every client has its own encoder; name one with --client: {known}")
        features = []
        for f in self.features:
            one = f.by_client.get(name, (f.centre, f.spread, f.fill))
            features.append(replace(f, centre=one[0], spread=one[1], fill=one[2], by_client={}))
        return replace(self, features=tuple(features))

    def transform(
        self, columns: Mapping[str, Column], clients: np.ndarray | None = None
    ) -> np.ndarray | sp.csr_array:
        """Return the features of a table, (N, D) float32, as CSR if under a quarter is non-zero."""
        made = [feature.encoded(columns[feature.name], clients) for feature in self.features]
        rows, width = len(made[0]), len(self.names)
        filled = [np.count_nonzero(m) if m.dtype == np.float32 else rows for m in made]
        sparse = sum(filled) < SPARSE_BELOW * rows * width
        x, start, parts = np.zeros((0 if sparse else rows, width), dtype=np.float32), 0, []
        for feature, block in zip(self.features, made, strict=True):
            wide = len(feature.names)
            if sparse and feature.kind == "category":
                entries = np.ones(rows, np.float32), block, np.arange(rows + 1)
                parts.append(sp.csr_array(entries, shape=(rows, wide)))
            elif sparse:
                parts.append(sp.csr_array(block))
            elif feature.kind == "category":
                x[np.arange(rows), start + block] = 1
            else:
                x[:, start : start + wide] = block
            start += wide
        return sp.hstack(parts, format="csr") if sparse else x

    def labels(self, column: Column) -> np.ndarray:
        """Return class numbers, -1 for missing labels. Refuse a class that training never saw."""
        column = convert.cleaned(column, self.schema.columns.get(self.label, Rule()))
        texts = convert.label_values(column).cast(pa.large_string())
        found = convert.lookup(texts, pa.array(self.classes, pa.large_string())).astype(np.int64)
        unknown = (found < 0) & ~np.asarray(texts.is_null())
        if unknown.any():
            row = convert.first(unknown)
            problem = f"holds {quoted(texts[row].as_py())}, a class that training never saw"
            known = f"the model knows {quoted_list(self.classes, 4)}"
            raise column.error(row, f"{problem}; {known}: correct the label, or leave it empty")
        return found

    def roles(self, columns: Sequence[str], file: str) -> NodeRoles:
        """Return the roles of a new table's columns. Label, split and owner may be missing."""
        if self.id is None:
            where = "this model was trained on a graph whose ids are in no column"
            raise DataError(f"{where}, so that tables such as {file} cannot be read for it")
        needed = [self.id, *(feature.name for feature in self.features)]
        if lacking := [name for name in needed if name not in columns]:
            some = f"{len(lacking)} of the {len(needed)} columns that the model needs"
            listed = quoted_list(lacking, 4)
            raise DataError(f"{file} lacks {some}: {listed}; add them, as in the training tables")
        known = [*needed, self.label, self.split, *self.owners, *self.schema.ignore]
        label, split = (name if name in columns else None for name in (self.label, self.split))
        owners = tuple(name for name in self.owners if name in columns)
        ignored = tuple(name for name in columns if name not in known)
        numbers = tuple(f.name for f in self.features if f.kind != "category")
        categories = tuple(f.name for f in self.features if f.kind == "category")
        texts = tuple(f.name for f in self.features if f.rule.read_as_text)
        return NodeRoles(self.id, label, split, owners, numbers, categories, (), ignored, texts)

    def plain(self) -> dict[str, Any]:
        """Return the encoder as plain values, the content of `encoder.json`."""
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return {"format": FORMAT, **found}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Encoder:
        """Make an encoder from a parsed `encoder.json`."""
        try:
            if plain["format"] not in (1, FORMAT):
                reads = f"and this version reads 1 and {FORMAT}"
                raise DataError(f"it has format {plain['format']}, {reads}")
            found = msgspec.convert({k: v for k, v in plain.items() if k != "format"}, cls)
            if plain["format"] == 1:  # runs of that version were always undirected
                found = replace(found, schema=replace(found.schema, directed=None))
            if not found.features or len(found.classes) < 2:
                raise DataError("it has no feature, or fewer than two classes")
            return found
        except (KeyError, TypeError, msgspec.ValidationError, DataError) as error:
            raise DataError(f"encoder.json cannot be used ({error}); copy it again") from None


def fit(
    columns: Mapping[str, Column],
    roles: NodeRoles,
    loading: Loading,
    clients: np.ndarray | None = None,
) -> tuple[Feature, ...]:
    """Determine the kind of each feature column, its categories and its statistics.

    `clients` contains the owner of each row. The option `encoder` determines whether owners agree
    by sums, each measures its own rows, or all rows are measured together.
    """
    chosen = [column for name, column in columns.items() if name in roles.features]
    features = tuple(_fitted(column, roles, loading) for column in chosen)
    mode = loading.options.encoder
    groups = {} if clients is None else {n: clients == n for n in np.unique(clients).tolist()}
    together = mode == "federated" and len(groups) > 1
    if mode == "local" and not groups:
        raise ConfigError("--encoder local needs tables that name the client of each node")
    if loading.options.private:
        agree.check_declared(features, numbers=mode != "local")
    if together:
        agree.check_sums(features)
    told: dict[str, list[agree.Told]] = {str(name): [] for name in groups}
    made = list[Feature]()
    for feature in features:
        numbers = None
        if agree.needs(feature) in ("sums", "order"):
            numbers = feature.in_days(feature.measured(columns[feature.name]))
        if loading.telling:
            rare = set(_rare(feature, columns[feature.name], loading.telling).rare)
            frequent = tuple(value for value in feature.values if value not in rare)
            loading.report.told += (agree.tell(feature, numbers, frequent),)
        for name, rows in groups.items() if together else ():
            told[str(name)].append(agree.tell(feature, None if numbers is None else numbers[rows]))
        own = groups if mode == "local" else {}
        made.append(feature if together else _with_statistics(feature, numbers, own))
    if together:
        ready = [_with_statistics(f, None, {}) for f in made]
        return agree.with_agreed(ready, agree.agree(told))
    return tuple(made)


def _rare(feature: Feature, column: Column, least: int) -> Feature:
    """Mark category values in fewer than `least` rows as rare. The rule must have an `other`."""
    if agree.needs(feature) != "values" or least <= 1:
        return feature
    texts = convert.cleaned(column, feature.rule).values.cast(pa.large_string())
    counts = pc.value_counts(texts.combine_chunks().drop_null())
    seldom = counts.field("values").filter(pc.less(counts.field("counts"), least))
    if len(seldom) and feature.rule.other is None:
        problem = f"column '{feature.name}' has values in fewer than {least} rows, which stay here"
        raise ConfigError(f'{problem}; give other = "other" under [columns.{feature.name}]')
    return replace(feature, rare=tuple(sorted(seldom.to_pylist())))


def _fitted(column: Column, roles: NodeRoles, loading: Loading) -> Feature:
    wish = loading.rule(column.name)
    column = convert.cleaned(column, wish)
    kind = cast(Kind, wish.kind) if wish.kind else _kind(column, wish, roles)
    schema, name = loading.schema, column.name
    rule = wish.settled(kind, schema.scale, schema.missing)
    if rule.missing == "refuse":
        leave = f'exclude the column with ignore = ["{name}"] in schema.toml'
        column.complete(f"say {_ways(kind)} under [columns.{name}] in schema.toml, or {leave}")
    if column.values.null_count == len(column.values):
        advice = "list it under ignore in schema.toml"
        raise DataError(f"{column.rows.name}, column '{name}' has no value in any row; {advice}")
    if kind == "category":
        return _category(column, rule, loading)
    if kind == "number":
        known = "schema.toml says the column is a number"
        convert.check_number(column, known if wish.kind or name in roles.numbers else MOSTLY)
    return Feature(name, kind, (), rule)


def _ways(kind: str) -> str:
    """Return the choices that accept a missing value."""
    return f'missing = "{OWN_CATEGORY}"' + ("" if kind == "category" else ', "mean" or "median"')


def _kind(column: Column, rule: Rule, roles: NodeRoles) -> Kind:
    """Infer the kind of a column whose rule names none. Refuse an ambiguous type."""
    name, kind = column.name, column.values.type
    if name in roles.categories:
        return "category"
    if types.is_boolean(kind):
        return "boolean"
    if convert.is_number(kind) or name in roles.numbers:
        return "number"
    if not convert.is_text(kind):
        advice = "turn it into numbers, or list it under ignore or categories in schema.toml"
        if types.is_date(kind) or types.is_timestamp(kind):
            advice = f'add [columns.{name}] kind = "date" or "text" (to ignore it) to schema.toml'
        problem = f"column '{name}' is of type {kind}; a feature is a number or a text"
        raise DataError(f"{column.rows.name}, {problem}: {advice}")
    matches = pc.match_substring_regex(pc.unique(column.values).drop_null(), NUMBER)
    numeric = pc.mean(matches.cast(pa.float64())).as_py() or 0
    if 0.5 <= numeric < 1:
        convert.check_number(column, MOSTLY)
    return "number" if numeric == 1 and rule.empty else "category"


def _with_statistics(
    feature: Feature, numbers: np.ndarray | None, groups: Mapping[str, np.ndarray]
) -> Feature:
    """Set centre, spread and fill: declared, of all rows, or of each group of rows."""
    if numbers is None:
        known = agree.declared(feature.rule) if feature.rule.range else (0.0, 1.0, 0.0)
        return replace(feature, centre=known[0], spread=known[1], fill=known[2])
    for name, rows in groups.items():
        if np.isnan(numbers[rows]).all():
            problem = f"client '{name}' has no value in column '{feature.name}'"
            raise DataError(f"{problem}, so it cannot scale it; use --encoder federated")
    if groups:
        own = {str(name): _statistics(feature.rule, numbers[rows]) for name, rows in groups.items()}
        return replace(feature, by_client=own)
    centre, spread, fill = _statistics(feature.rule, numbers)
    return replace(feature, centre=centre, spread=spread, fill=fill)


def _statistics(rule: Rule, numbers: np.ndarray) -> tuple[float, float, float]:
    """Compute location, scale and imputation value of a column with scikit-learn."""
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import RobustScaler, StandardScaler

    found, centre, spread, fill = numbers[:, None], 0.0, 1.0, 0.0
    if rule.range:
        centre, spread, _ = agree.declared(rule)
    if rule.scale in ("standard", "log"):
        standard = StandardScaler().fit(found)
        centre, spread = float(standard.mean_[0]), float(standard.scale_[0])
    elif rule.scale == "robust":
        robust = RobustScaler().fit(found)
        centre, spread = float(robust.center_[0]), float(robust.scale_[0])
    if rule.missing in ("mean", "median", OWN_CATEGORY):
        strategy = "median" if rule.missing == "median" else "mean"
        fill = float(SimpleImputer(strategy=strategy).fit(found).statistics_[0])
    return centre, spread, fill


def _category(column: Column, rule: Rule, loading: Loading) -> Feature:
    texts, name = column.values.cast(pa.large_string()), column.name
    distinct = rule.values or tuple(convert.sorted_values(texts).to_pylist())
    if len(distinct) > loading.options.max_categories:
        problem = f"column '{name}' holds {len(distinct)} different texts"
        most = f"at most {loading.options.max_categories} can become categories"
        advice = "list it under ignore in schema.toml, or raise max_categories"
        raise DataError(f"{column.rows.name}, {problem}; {most}; {advice}")
    feature = Feature(name, "category", distinct, rule)
    loading.report.note(f"column '{name}' became {len(feature.names)} columns, one per category")
    return feature


def encode_nodes(
    table: pa.Table,
    roles: NodeRoles,
    rows: Rows,
    loading: Loading,
    clients: np.ndarray | None = None,
) -> Nodes:
    """Convert a node table to arrays: labels, roles, owners, and features in the encoder's order.

    `clients` are the owners of the rows. None takes them from the table's own columns.
    """
    columns = {name: Column(table[name], name, rows) for name in table.column_names}
    encoder, y = loading.encoder, np.full(table.num_rows, -1)
    leave = "" if encoder else "exclude the column with ignore = [...] in schema.toml"
    owners = {name: convert.as_numpy(columns[name].complete(leave).values) for name in roles.owners}
    split = None if roles.split is None else convert.split_roles(columns[roles.split])
    if clients is None and owners:
        names = (str(loading.options.owner), "client", *owners)
        natural = [n for n in names if n in owners and n != loading.options.time]
        clients = owners[natural[0]] if natural else None
    if encoder is None:
        assert roles.label is not None
        rule = loading.rule(roles.label)
        label = convert.cleaned(columns[roles.label], rule)
        y, classes = convert.encode_labels(label, loading.options)
        if unknown := [name for name in classes if rule.values and name not in rule.values]:
            row, listed = int(np.argmax(y == classes.index(unknown[0]))), quoted_list(rule.values)
            problem = f"holds the class {quoted(unknown[0])}, but values lists only {listed}"
            raise label.error(row, f"{problem}; correct the row, or add the class to values")
        if not (features := fit(columns, roles, loading, clients)):
            advice = "add at least one, for example each node's degree"
            raise DataError(f"{rows.name} has no feature column; {advice}")
        named = roles.label, classes, roles.id, roles.split, roles.owners
        encoder = Encoder(features, *named, loading.schema)
    else:
        if roles.label is not None:
            y = encoder.labels(columns[roles.label])
        # Another party's encoder may list a rare value that the party guessed.
        own = (_rare(f, columns[f.name], loading.telling) for f in encoder.features)
        encoder = replace(encoder, features=tuple(own))
    x = encoder.transform(columns, clients)
    return Nodes(x, y, encoder.classes, encoder.names, split, owners, encoder)
