"""A trained network of stock PyTorch Geometric layers, and the encoder of its tables.

    python model.py nodes.csv edges.csv > scores.csv

It needs torch and torch_geometric, and the files model.json and weights.pt beside it. In Python:

    net, about = load()
    ids, x, edges, weight = read_graph("nodes.csv", "edges.csv", about)
    logits = net(x, edges, weight)
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, SGConv

About = dict[str, Any]  # the content of model.json
Graph = tuple[list[str], Tensor, Tensor, "Tensor | None"]  # ids, features, edges, weights
MOST_NAMED = 5


def layer(kind: str, n_in: int, n_out: int, count: int) -> Module:
    """One layer; `count` is the heads of an attention, or the hops of an SGC."""
    made: Module
    if kind == "gat":
        made = GATConv(n_in, n_out // count, heads=count)
    elif kind == "sgc":
        made = SGConv(n_in, n_out, K=count)
    else:
        made = {"gcn": GCNConv, "sage": SAGEConv, "linear": Linear}[kind](n_in, n_out)
    return made


class Network(Module):
    """The network that was trained: layers with an activation between them."""

    def __init__(self, about: About) -> None:
        super().__init__()
        self.kinds = [kind for kind, *_ in about["layers"]]
        self.layers = ModuleList(layer(*one) for one in about["layers"])
        self.activation = getattr(torch.nn.functional, about["activation"])

    def forward(self, x: Tensor, edges: Tensor, weight: Tensor | None = None) -> Tensor:
        """Logits, (N, C)."""
        for number, (kind, one) in enumerate(zip(self.kinds, self.layers, strict=True)):
            x = self.activation(x) if number else x
            if kind in ("gcn", "sgc"):
                x = one(x, edges, weight)
            else:
                x = one(x) if kind == "linear" else one(x, edges)
        return x


def load(folder: str | Path = Path(__file__).parent) -> tuple[Network, About]:
    """The network with its weights, and the content of model.json."""
    about = json.loads(Path(folder, "model.json").read_text(encoding="utf-8"))
    net = Network(about)
    net.load_state_dict(torch.load(Path(folder, "weights.pt"), weights_only=True))
    return net.eval(), about


def read_graph(nodes: str | Path, edges: str | Path, about: About) -> Graph:
    """Two CSV files as tensors, encoded as the training tables were."""
    encoder = about["encoder"]
    if encoder is None:
        raise ValueError("this model was not trained on tables; call the network with tensors")
    rows, ends = _read(nodes), _read(edges)
    lacking = [f["name"] for f in encoder["features"] if f["name"] not in rows[0]]
    if lacking:
        raise ValueError(f"{nodes} lacks the columns {', '.join(lacking[:MOST_NAMED])}")
    x = torch.tensor([[v for f in encoder["features"] for v in _encoded(f, row)] for row in rows])
    ids = [row[encoder["id"]] for row in rows]
    place = {name: number for number, name in enumerate(ids)}
    names = [_column(encoder, role, ends) for role in ("source", "target", "weight")]
    found: dict[tuple[int, int], float] = {}
    for row in ends:  # every edge in both directions, once, without loops
        u, v = (place[row[str(name)]] for name in names[:2])
        if u != v and (u, v) not in found:
            found[u, v] = found[v, u] = float(row[names[2]]) if names[2] else 1.0
    pairs = torch.tensor(sorted(found), dtype=torch.int64).reshape(-1, 2).T.contiguous()
    weight = torch.tensor([found[pair] for pair in sorted(found)]) if names[2] else None
    return ids, x, pairs, weight


def _read(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        return [{str(k).strip(): (v or "").strip() for k, v in row.items()} for row in rows]


def _encoded(feature: dict[str, Any], row: dict[str, str]) -> list[float]:
    value = row[feature["name"]]
    if feature["kind"] == "category":
        if value not in feature["values"]:
            raise ValueError(f"{feature['name']} is '{value}', a category that training never saw")
        return [float(value == known) for known in feature["values"]]
    return [float({"true": 1, "false": 0}.get(value.lower(), value))]


def _column(encoder: dict[str, Any], role: str, rows: list[dict[str, str]]) -> str | None:
    usual = {"source": ("source", "src", "from"), "target": ("target", "dst", "to")}
    known = encoder["schema"][role]
    wanted = (known,) if known else usual.get(role, (role,))
    return next((name for name in (rows[0] if rows else ()) if name.lower() in wanted), known)


def main() -> None:
    """Print id, class and the probability of each class as CSV."""
    net, about = load()
    ids, x, edges, weight = read_graph(sys.argv[1], sys.argv[2], about)
    with torch.no_grad():
        chances = net(x, edges, weight).softmax(-1)
    out, classes = csv.writer(sys.stdout), about["classes"]
    out.writerow(["id", "class", *(f"p_{name}" for name in classes)])
    for name, row in zip(ids, chances, strict=True):
        out.writerow([name, classes[int(row.argmax())], *row.tolist()])


if __name__ == "__main__":
    main()
