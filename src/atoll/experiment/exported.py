"""A trained network of stock PyTorch Geometric layers, and the encoder of its tables.

    python model.py nodes.csv edges.csv > scores.csv

This file needs torch, torch_geometric, and model.json and weights.pt in its folder. In Python:

    net, about = load()
    ids, x, edges, weight = read_graph("nodes.csv", "edges.csv", about)
    logits = net(x, edges, weight)
"""

from __future__ import annotations

import csv
import json
import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, SGConv

About = dict[str, Any]  # the content of model.json
Graph = tuple[list[str], Tensor, Tensor, "Tensor | None"]  # ids, features, edges, weights
MOST_NAMED = 5
TRUTH = {"true": 1, "yes": 1, "t": 1, "y": 1, "false": 0, "no": 0, "f": 0, "n": 0}


def layer(kind: str, n_in: int, n_out: int, count: int) -> Module:
    """Make one layer. `count` is the number of heads (attention) or of hops (SGC)."""
    made: Module
    if kind == "gat":
        made = GATConv(n_in, n_out // count, heads=count)
    elif kind == "sgc":
        made = SGConv(n_in, n_out, K=count)
    else:
        made = {"gcn": GCNConv, "sage": SAGEConv, "linear": Linear}[kind](n_in, n_out)
    return made


class Network(Module):
    """The trained network: layers with an activation between them, or a mixture of networks."""

    def __init__(self, about: About) -> None:
        super().__init__()
        self.about = about
        self.branches = ModuleList(Network(one) for one in about.get("branches", ()))
        self.kinds = [kind for kind, *_ in about.get("layers", ())]
        self.layers = ModuleList(layer(*one) for one in about.get("layers", ()))
        self.activation = getattr(torch.nn.functional, about.get("activation", "relu"))

    def forward(self, x: Tensor, edges: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the logits, (N, C)."""
        if self.branches:
            prior, shares = (x.new_tensor(self.about[name]) for name in ("prior", "shares"))
            each = torch.stack([one(x, edges, weight) for one in self.branches]) + prior
            return (each.log_softmax(-1) + shares.log().reshape(-1, 1, 1)).logsumexp(0)
        if self.about.get("residual"):
            return self.residual(x, edges)
        for number, (kind, one) in enumerate(zip(self.kinds, self.layers, strict=True)):
            x = self.activation(x) if number else x
            if kind in ("gcn", "sgc"):
                x = one(x, edges, weight)
            else:
                x = one(x) if kind == "linear" else one(x, edges)
        return x

    def residual(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the logits of a network whose blocks add to their input."""
        first, *blocks, last = self.layers
        outputs = [self.activation(first(x))]
        for block in blocks:
            outputs.append(outputs[-1] + self.activation(block(self.norm(outputs[-1]), edges)))
        h = torch.stack(outputs).mean(0) if self.about["jump"] else outputs[-1]
        logits: Tensor = last(self.norm(h))
        return logits

    def norm(self, h: Tensor) -> Tensor:
        """Shift and scale rows to mean 0 and variance 1, if the network does so."""
        return torch.nn.functional.layer_norm(h, h.shape[-1:]) if self.about["norm"] else h


def load(folder: str | Path = Path(__file__).parent) -> tuple[Network, About]:
    """Return the network with its weights, and the content of model.json."""
    about = json.loads(Path(folder, "model.json").read_text(encoding="utf-8"))
    net = Network(about)
    net.load_state_dict(torch.load(Path(folder, "weights.pt"), weights_only=True))
    return net.eval(), about


def read_graph(nodes: str | Path, edges: str | Path, about: About) -> Graph:
    """Return ids, features, edges and weights from two CSV files, encoded as in training."""
    encoder = about["encoder"]
    if encoder is None:
        raise ValueError("this model was not trained on tables; call the network with tensors")
    rows, ends = _read(nodes), _read(edges)
    if not rows:
        raise ValueError(f"{nodes} has no rows")
    wanted = [encoder["id"], *(f["name"] for f in encoder["features"])]
    lacking = [name for name in wanted if name not in rows[0]]
    if lacking:
        raise ValueError(f"{nodes} lacks the columns {', '.join(lacking[:MOST_NAMED])}")
    x = torch.tensor([[v for f in encoder["features"] for v in _encoded(f, row)] for row in rows])
    if not x.isfinite().all():  # larger than the largest float
        far = int((~x.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"{nodes} has a number that is too large, in row {far + 2}")
    ids = [row[encoder["id"]] for row in rows]
    place = {name: number for number, name in enumerate(ids)}
    if "" in place:
        raise ValueError(f"{nodes} has a row without an id; give each node one")
    if len(place) < len(ids):
        twice = next(name for number, name in enumerate(ids) if place[name] != number)
        raise ValueError(f"{nodes} has several rows with the id '{twice}'; give each node one row")
    for role in ("source", "target"):
        column = _column(encoder, role, ends)
        if ends and column not in ends[0]:
            raise ValueError(f"{edges} lacks a column for the {role} of an edge")
        if unknown := [row[str(column)] for row in ends if row[str(column)] not in place]:
            raise ValueError(f"{edges} names '{unknown[0]}', which is not in {nodes}")
    if (column := about.get("owner")) in rows[0]:
        ends = _within(ends, dict(zip(ids, (row[column] for row in rows), strict=True)), encoder)
    return ids, x, *_edges(encoder["schema"], ends, place, encoder)


def _within(
    edges: list[dict[str, str]], owner: dict[str, str], encoder: About
) -> list[dict[str, str]]:
    """Return the edges between nodes of one owner, as in training, and print the number lost."""
    source, target = (_column(encoder, role, edges) for role in ("source", "target"))
    own = [row for row in edges if owner[row[str(source)]] == owner[row[str(target)]]]
    if lost := len(edges) - len(own):
        what = "edge between owners was" if lost == 1 else "edges between owners were"
        print(f"note: {lost} {what} removed", file=sys.stderr)
    return own


def _edges(
    schema: dict[str, Any], rows: list[dict[str, str]], place: dict[str, int], encoder: About
) -> tuple[Tensor, Tensor | None]:
    """Return the edges in ascending order, and their weights, or None without weights.

    An undirected edge appears in both directions. Duplicates are merged as in training.
    """
    names = [_column(encoder, role, rows) for role in ("source", "target", "weight")]
    again, directed = schema.get("duplicate_edges") or "drop", bool(schema.get("directed"))
    found: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        u, v = (place[row[str(name)]] for name in names[:2])
        if u != v or schema.get("self_loops") == "keep":
            pair = (u, v) if directed else (min(u, v), max(u, v))
            one = 1.0 if again == "count" or not names[2] else _finite(names[2], row[names[2]])
            found.setdefault(pair, []).append(one)
    every = list[tuple[int, int, float]]()
    for (u, v), weights in found.items():
        merged = {"keep": weights, "sum": [sum(weights)], "count": [sum(weights)]}
        for one in merged.get(again, weights[:1]):
            every += [(u, v, one)] if directed or u == v else [(u, v, one), (v, u, one)]
    every.sort(key=lambda edge: edge[:2])
    values = torch.tensor([edge[2] for edge in every])
    if not values.isfinite().all():
        raise ValueError("the weight of an edge is too large")
    pairs = torch.tensor([edge[:2] for edge in every], dtype=torch.int64).reshape(-1, 2)
    weighted = names[2] or again in ("sum", "count")
    return pairs.T.contiguous(), values if weighted else None


def _read(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        try:
            head, *rows = [row for row in csv.reader(file, strict=True) if row] or [[]]
        except csv.Error as error:
            raise ValueError(f"{path} cannot be read as CSV: {error}") from error
    names = [name.strip() for name in head]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path} has several columns '{twice[0]}'; give each column one name")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise ValueError(f"{path} has {len(row)} values in row {number}, not {len(names)}")
    return [dict(zip(names, (value.strip() for value in row), strict=True)) for row in rows]


def _encoded(feature: dict[str, Any], row: dict[str, str]) -> list[float]:
    """Encode one feature of one row, as the encoder of the training did."""
    rule, value = feature.get("rule", {}), row[feature["name"]]
    gap, missing = rule.get("missing") == "own category", value in ("", *rule.get("empty", ()))
    if missing and rule.get("missing", "refuse") == "refuse":
        raise ValueError(f"{feature['name']} has no value in a row; the model needs one")
    if feature["kind"] == "category":
        known, other = list(feature["values"]), rule.get("other")
        if not missing and value not in known and not other:
            raise ValueError(f"{feature['name']} is '{value}', a category that training never saw")
        found = [float(not missing and value == one) for one in known]
        found += [float(not missing and value not in known)] if other else []
    elif feature["kind"] == "date":
        found = _date(feature, rule, None if missing else value)
    else:
        number = feature.get("fill", 0.0) if missing else _number(feature["name"], rule, value)
        found = [_scaled(feature, number)]
    return [*found, float(missing)] if gap else found


def _scaled(feature: dict[str, Any], number: float) -> float:
    scaled = float((number - feature.get("centre", 0.0)) / feature.get("spread", 1.0))
    within = feature.get("rule", {}).get("scale") == "range"
    return max(-1.0, min(1.0, scaled)) if within else scaled


def _finite(column: str, text: object) -> float:
    try:
        number = float(str(text))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{column} is '{text}' in a row; the model needs a finite number")
    return number


def _number(column: str, rule: dict[str, Any], text: str) -> float:
    if rule.get("decimal") == ",":
        text = text.replace(".", "").replace(",", ".")
    number = _finite(column, TRUTH.get(text.lower(), text))
    log = rule.get("scale") == "log"
    return math.copysign(math.log1p(abs(number)), number) if log else number


def _date(feature: dict[str, Any], rule: dict[str, Any], text: str | None) -> list[float]:
    """Return the rule's parts of a date: scaled days, and sine and cosine of year, week, day."""
    parts, turns = rule["parts"], [part for part in rule["parts"] if part != "days"]
    if text is None:
        known = [_scaled(feature, feature["fill"])] if "days" in parts else []
        return known + [0.0] * 2 * len(turns)
    form = rule.get("format")
    when = datetime.strptime(text, form) if form else datetime.fromisoformat(text)
    when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    when = when.replace(microsecond=0)
    begin, end = (datetime(when.year + more, 1, 1, tzinfo=UTC) for more in (0, 1))
    midnight = when.hour * 3600 + when.minute * 60 + when.second
    shares = {
        "year": (when - begin) / (end - begin),
        "week": (when.weekday() * 86400 + midnight) / (7 * 86400),
        "day": midnight / 86400,
    }
    since = datetime.fromisoformat(rule["since"]).replace(tzinfo=UTC)
    days = (when - since).total_seconds() / 86400
    found = [_scaled(feature, days)] if "days" in parts else []
    angles = [2 * math.pi * shares[part] for part in turns]
    return found + [turn(angle) for angle in angles for turn in (math.sin, math.cos)]


def _column(encoder: dict[str, Any], role: str, rows: list[dict[str, str]]) -> str | None:
    usual = {"source": ("source", "src", "from"), "target": ("target", "dst", "to")}
    known = encoder["schema"][role]
    wanted = (known,) if known else usual.get(role, (role,))
    return next((name for name in (rows[0] if rows else ()) if name.lower() in wanted), known)


def main() -> None:
    """Print id, class, alert if a threshold exists, and the probability of each class as CSV."""
    if len(sys.argv) != 3:
        raise ValueError("give two files: python model.py nodes.csv edges.csv")
    net, about = load()
    ids, x, edges, weight = read_graph(sys.argv[1], sys.argv[2], about)
    with torch.no_grad():
        chances = net(x, edges, weight).softmax(-1)
    if not chances.isfinite().all():
        raise ValueError("the model has no finite answer for these tables; check their numbers")
    out, classes, alert = csv.writer(sys.stdout), about["classes"], about["alert"]
    out.writerow(["id", "class", *(["alert"] if alert else []), *(f"p_{c}" for c in classes)])
    for name, row in zip(ids, chances.tolist(), strict=True):
        says = ["yes" if row[alert[0]] >= alert[1] else "no"] if alert else []
        out.writerow([name, classes[row.index(max(row))], *says, *row])


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
