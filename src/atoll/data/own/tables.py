"""Node and edge tables (CSV, Parquet) of one folder, or of one folder per client."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from atoll.core.errors import ConfigError, DataError, counted
from atoll.data.own import columns as convert
from atoll.data.own.columns import Column, Rows
from atoll.data.own.encoder import Nodes, encode_nodes
from atoll.data.own.schema import Loading, NodeRoles, OwnReport, node_roles, quoted, quoted_list

SEPARATORS = {";": "';'", "\t": "tabs", "|": "'|'"}  # unsupported separators
LONGEST_HEADER = 1 << 16  # bytes of a CSV file that are searched for its first line break


@dataclass(frozen=True)
class TableFile:
    """One CSV or Parquet file, with its name in errors."""

    path: Path
    name: str

    @property
    def is_csv(self) -> bool:
        return self.path.suffix == ".csv"

    @property
    def rows(self) -> Rows:
        return Rows(self.name, self.where)

    def columns(self) -> list[str]:
        """Return the column names. Refuse an empty or unreadable file, and repeated names."""
        if self.is_csv:
            names = [name.strip() for name in self._header()]
        else:
            with self._reading():
                names = list(pa.parquet.read_schema(self.path).names)
        for mark, word in SEPARATORS.items():
            if self.is_csv and sum(name.count(mark) for name in names) >= len(names):
                problem = f"{self.name} seems to use {word} between values"
                raise DataError(f"{problem}; save it with commas")
        if any("\n" in name or "\r" in name for name in names):
            raise DataError(f"{self.name} has a column name of several lines; close its quote")
        if twice := sorted({name for name in names if name and names.count(name) > 1}):
            raise DataError(f"{self.name} has two columns named '{twice[0]}'; rename one")
        return names

    def read(self, names: Sequence[str], texts: Sequence[str]) -> pa.Table:
        """Read the named columns. Columns in `texts` stay text even if they look like numbers."""
        if self._only_header():
            return pa.table({name: pa.array([], pa.large_string()) for name in names})
        with self._reading():
            if self.is_csv:
                table = pa.csv.read_csv(self.path, **self._csv_options(names, texts))
            else:
                table = pa.parquet.read_table(self.path, columns=list(names))
        return self._cleaned(table, names)

    def batches(self, ends: Sequence[str], weight: str | None) -> Iterator[pa.Table]:
        """Yield the columns of an edge table in blocks of rows, to save memory."""
        names = [*ends, *([weight] if weight else [])]
        if self._only_header():
            return
        with self._reading(weight):
            if self.is_csv:
                size = pa.csv.ReadOptions(block_size=2**24)
                options = self._csv_options(names, ends, weight)
                stream = pa.csv.open_csv(self.path, read_options=size, **options)
            else:
                stream = pa.parquet.ParquetFile(self.path).iter_batches(2**20, columns=names)
            for batch in stream:
                yield self._cleaned(pa.Table.from_batches([batch]), names)

    def not_a_number(self, name: str) -> DataError:
        """Return the error for a column of weights that are not all numbers."""
        column = Column(self.read([name], [name])[name], name, self.rows)
        row = convert.first_text(column.values)
        value = quoted(column.values[row].as_py())
        return column.error(row, f"holds {value}; a weight is a finite number, zero or more")

    def where(self, row: int) -> str:
        """Return the place of data row `row`. In a CSV file it is the line in an editor."""
        if not self.is_csv:
            return f"{self.name} row {row + 1}"
        line = 0
        with self.path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.reader(file)
            for record in reader:
                start, line = line + 1, reader.line_num
                if not record:
                    continue
                if row < 0:
                    return f"{self.name} row {start}"
                row -= 1
        return f"{self.name} row {line}"

    def _only_header(self) -> bool:
        """Return whether a CSV file is only a header line, which the fast reader refuses."""
        if not self.is_csv:
            return False
        with self.path.open("rb") as file:
            start = file.read(LONGEST_HEADER)
        return len(start) < LONGEST_HEADER and not set(b"\r\n") & set(start.rstrip(b"\r\n"))

    def _header(self) -> list[str]:
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                return next(record for record in csv.reader(file) if record)
        except StopIteration:
            raise DataError(f"{self.name} is empty; its first line must name the columns") from None
        except (UnicodeDecodeError, csv.Error, OSError) as problem:
            if isinstance(problem, UnicodeDecodeError):
                self._explain()
            raise self._unreadable(problem) from None

    def _csv_options(
        self, names: Sequence[str], texts: Sequence[str], weight: str | None = None
    ) -> dict[str, object]:
        raw = {name.strip(): name for name in self._header()}
        kinds = {raw[name]: pa.string() for name in texts}
        convert_options = pa.csv.ConvertOptions(
            include_columns=[raw[name] for name in names],
            column_types=kinds | ({raw[weight]: pa.float64()} if weight else {}),
            null_values=[""],  # "NA" may be Namibia, so other marks are handled later
            strings_can_be_null=True,
        )
        parse_options = pa.csv.ParseOptions(newlines_in_values=True)
        return {"convert_options": convert_options, "parse_options": parse_options}

    def _cleaned(self, table: pa.Table, names: Sequence[str]) -> pa.Table:
        columns = []
        for name, column in zip(names, table.columns, strict=True):
            where = f"{self.name}, column '{name}'"
            try:
                column.validate(full=not self.is_csv)  # Parquet accepts any bytes as text
            except pa.ArrowInvalid:
                problem = f"{where} holds text that is not UTF-8"
                raise DataError(f"{problem}; save it as UTF-8") from None
            columns.append(convert.clean_text(column))
            kind = columns[-1].type
            if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
                if self.is_csv:  # the reader returns a column that is not UTF-8 as bytes
                    self._explain()
                raise DataError(f"{where} holds bytes; store text or numbers")
            if pa.types.is_nested(kind):
                advice = "store one text or number per column and row"
                raise DataError(f"{where} is of type {kind}; {advice}")
        return pa.table(columns, names=list(names))

    @contextmanager
    def _reading(self, weight: str | None = None) -> Iterator[None]:
        """Convert the reader's errors to one sentence."""
        try:
            yield
        except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError) as problem:
            if self.is_csv:
                self._explain()
                if weight and "conversion error" in str(problem):
                    raise self.not_a_number(weight) from None
            raise self._unreadable(problem) from None

    def _explain(self) -> None:
        """Read a CSV file again, slowly. Raise an error if text or a row's length is wrong."""
        with self.path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                try:
                    raw.decode("utf-8")
                except UnicodeDecodeError as wrong:
                    problem = f"row {line} is not UTF-8 text (byte {raw[wrong.start]:#04x})"
                    raise DataError(f"{self.name} {problem}; save the file as UTF-8") from None
        header, row = self._header(), -1
        with self.path.open(encoding="utf-8-sig", newline="") as file:
            for record in csv.reader(file):
                if record and len(record) != len(header):
                    problem = f"{len(record)} values, but the header names {len(header)} columns"
                    advice = "add or remove a comma, or quote the text"
                    raise DataError(f"{self.where(row)} has {problem}; {advice}")
                row += bool(record)

    def _unreadable(self, problem: object) -> DataError:
        kind = "CSV" if self.is_csv else "Parquet"
        lines = str(problem).splitlines() or ["no reason given"]
        return DataError(f"{self.name} is not readable as {kind} ({lines[0]}); save it again")


@dataclass(frozen=True)
class Part:
    """The two tables of one folder. `client` is None if the folder is the whole graph."""

    client: str | None
    nodes: TableFile
    edges: TableFile


def find_parts(folder: Path) -> list[Part]:
    """Return the tables of the folder itself, or those of its sub-folders, one per client."""
    if _table(folder, "nodes") is not None:
        return [_part(folder, None)]
    inside = sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] not in "._")
    if not any(_table(sub, "nodes") for sub in inside):
        problem = f"folder '{folder}' has no nodes.csv or nodes.parquet, and no sub-folder with one"
        raise DataError(f"{problem}; put nodes and edges there, or give another folder")
    for sub in inside:
        if (sub / "schema.toml").exists():
            advice = "all clients share one: put it next to the client folders"
            raise ConfigError(f"client folder '{sub.name}' has its own schema.toml; {advice}")
    return [_part(sub, sub.name) for sub in inside]


def _table(folder: Path, stem: str, prefix: str = "") -> TableFile | None:
    found = [p for p in (folder / f"{stem}.csv", folder / f"{stem}.parquet") if p.is_file()]
    if len(found) > 1:
        raise DataError(f"folder '{folder}' has {stem}.csv and {stem}.parquet; keep one of them")
    return TableFile(found[0], prefix + found[0].name) if found else None


def _part(folder: Path, client: str | None) -> Part:
    prefix = f"{client}/" if client else ""
    nodes, edges = _table(folder, "nodes", prefix), _table(folder, "edges", prefix)
    if nodes is None or edges is None:
        absent = "nodes" if nodes is None else "edges"
        problem = f"folder '{folder}' has no {absent}.csv or {absent}.parquet"
        none = "an edge file with only a header means that there are no edges"
        raise DataError(f"{problem}; a graph needs nodes and edges ({none})")
    return Part(client, nodes, edges)


def read_nodes(parts: Sequence[Part], loading: Loading) -> tuple[Nodes, list[pa.ChunkedArray]]:
    """Read the nodes of all parts. Return their joint arrays, and the ids of each part."""
    # Categories and classes are fitted over all parts, so that they are the same at each client.
    columns, name = parts[0].nodes.columns(), parts[0].nodes.name
    roles = _roles(parts[0], loading)
    names = [column for column in columns if column in roles.used]
    tables, ids, kept = [], [], []
    for part in parts:
        own = set(_roles(part, loading).used)
        if different := sorted(own ^ set(roles.used)):
            has, lacks = (part, parts[0]) if different[0] in own else (parts[0], part)
            found = f"has the column '{different[0]}' and {lacks.nodes.name} has not"
            need = "all clients need the same columns: add it, or list it under ignore"
            differ = f"({len(different)} columns differ)"
            raise DataError(f"{has.nodes.name} {found} {differ}; {need} in schema.toml")
        table = part.nodes.read(names, roles.texts)
        if table.num_rows == 0:
            advice = "give at least one node, or remove it"
            raise DataError(f"{part.nodes.name} has a header but no rows; {advice}")
        id_column = Column(table[roles.id], str(roles.id), part.nodes.rows)
        own_ids, rows = _distinct(id_column.complete("remove these rows"), loading)
        ids.append(own_ids)
        rest = table.drop_columns([roles.id])
        tables.append(rest if len(rows) == len(rest) else rest.take(rows))
        kept.append(rows)
    if roles.ignored:
        loading.report.note(f"{name}: ignored {quoted_list(roles.ignored)}")
    starts = np.cumsum([0, *map(len, kept)])

    def where(row: int) -> str:
        part = int(np.searchsorted(starts, row, side="right")) - 1
        return parts[part].nodes.where(int(kept[part][row - starts[part]]))

    merged = _concatenate(tables, parts)
    owned = [part.client or loading.client for part in parts]
    clients = None if None in owned else np.repeat([str(n) for n in owned], np.diff(starts))
    nodes = encode_nodes(merged, roles, Rows(name, where), loading, clients)
    _add_names(nodes, parts, ids, loading.report)
    del merged, tables, table, rest
    pa.default_memory_pool().release_unused()  # NumPy needs the memory that Arrow keeps
    return nodes, ids


def _roles(part: Part, loading: Loading) -> NodeRoles:
    columns, name = part.nodes.columns(), part.nodes.name
    if loading.encoder is not None:
        return loading.encoder.roles(columns, name)
    return node_roles(columns, loading, name)


def _distinct(column: Column, loading: Loading) -> tuple[pa.ChunkedArray, np.ndarray]:
    """Return the distinct ids of a file, and the first row of each."""
    ids = convert.as_ids(column)
    rows = np.arange(len(ids))
    again = convert.lookup(ids, ids) != rows
    if not again.any():
        return ids, rows
    row, number = convert.first(again), int(again.sum())
    if loading.options.duplicate_nodes == "error":
        problem = f"gives the id {quoted(ids[row].as_py())} again ({number} such rows in all)"
        choose = ", or give --own duplicate_nodes=first" if loading.joined is None else ""
        advice = f"an id names one node: remove one of the rows{choose}"
        raise DataError(f"{column.rows.where(row)} {problem}; {advice}")
    dropped = counted(number, "row was dropped", "rows were dropped")
    loading.report.note(f"{column.rows.name}: {dropped}, because an earlier row has the same id")
    return ids.filter(pa.array(~again)), rows[~again]


def _concatenate(tables: Sequence[pa.Table], parts: Sequence[Part]) -> pa.Table:
    if len(tables) == 1:
        return tables[0]
    merged = {}
    for name in tables[0].column_names:
        columns = [table.select([name]) for table in tables]
        try:
            merged[name] = pa.concat_tables(columns, promote_options="permissive")[name]
        except pa.ArrowException:
            kinds = [table[name].type for table in tables]
            other = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
            both = (f"of type {kinds[i]} in {parts[i].nodes.name}" for i in (0, other))
            hint = "make them alike, or list the column under categories in schema.toml"
            raise DataError(f"column '{name}' is {' and '.join(both)}; {hint}") from None
    return pa.table(merged)


def _add_names(
    nodes: Nodes, parts: Sequence[Part], ids: Sequence[pa.ChunkedArray], report: OwnReport
) -> None:
    """Add the columns `id` and, for a federation of folders, `client`."""
    alike = len({column.type for column in ids}) == 1
    every = [column if alike else column.cast(pa.large_string()) for column in ids]
    joined = pa.chunked_array([chunk for column in every for chunk in column.chunks])
    nodes.columns["id"] = convert.as_numpy(joined)
    if parts[0].client is None:
        return
    if "client" in nodes.columns:
        report.note("the column 'client' was replaced by the names of the client folders")
    sizes = [len(column) for column in ids]
    nodes.columns["client"] = np.repeat([str(part.client) for part in parts], sizes)
    if shared := len(joined) - len(joined.unique()):
        report.note(f"{shared} ids are used by more than one client; they stay different nodes")
