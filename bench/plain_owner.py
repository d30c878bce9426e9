"""The code of one client in a federation without a framework, with PyG only.

It trains a two-layer GCN of stock layers with Adam and scores the model on the test nodes.
The runners of other programs import it in their environments, so it needs only torch, PyG, NumPy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch_geometric.nn import GCNConv

Arrays = list[np.ndarray]


class Net(torch.nn.Module):
    """A two-layer GCN of stock layers."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = GCNConv(features, hidden, cached=True)
        self.second = GCNConv(hidden, classes, cached=True)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = functional.dropout(self.first(x, edges).relu(), 0.5, training=self.training)
        out: torch.Tensor = self.second(h, edges)
        return out


def first_model(about: dict[str, Any], hidden: int) -> Arrays:
    """The model that the federation starts from."""
    torch.manual_seed(0)
    net = Net(about["features"], hidden, about["classes"])
    return [parameter.detach().numpy() for parameter in net.parameters()]


def load_client(folder: Path, number: int) -> dict[str, np.ndarray]:
    """Return one client's arrays from the files of all clients, which are memory-mapped."""
    nodes, edges = np.load(folder / "nodes.npy"), np.load(folder / "edges_at.npy")
    (a, b), (c, d) = nodes[number : number + 2], edges[number : number + 2]
    cut = {
        name: np.array(np.load(folder / f"{name}.npy", mmap_mode="r")[a:b])
        for name in ("x", "y", "train", "test")
    }
    return {**cut, "edges": np.array(np.load(folder / "edges.npy", mmap_mode="r")[:, c:d])}


class Owner:
    """One owner of a graph."""

    def __init__(self, folder: Path, number: int, epochs: int, hidden: int) -> None:
        self.data = {k: torch.from_numpy(v) for k, v in load_client(folder, number).items()}
        about = json.loads((folder / "about.json").read_text())
        self.net, self.epochs = Net(about["features"], hidden, about["classes"]), epochs

    @property
    def nodes(self) -> int:
        return len(self.data["y"])

    def load(self, model: Arrays) -> None:
        for parameter, array in zip(self.net.parameters(), model, strict=True):
            parameter.data = torch.from_numpy(np.array(array))

    def train(self, model: Arrays) -> Arrays:
        """Return the model after the local epochs."""
        self.load(model)
        data, net = self.data, self.net.train()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
        for _ in range(self.epochs):
            optimizer.zero_grad()
            out = net(data["x"], data["edges"])[data["train"]]
            functional.cross_entropy(out, data["y"][data["train"]]).backward()
            optimizer.step()
        return [parameter.detach().numpy() for parameter in net.parameters()]

    @torch.no_grad()
    def score(self, model: Arrays) -> tuple[float, float, int]:
        """Return loss and accuracy on the test nodes, and the number of test nodes."""
        self.load(model)
        data = self.data
        out, y = self.net.eval()(data["x"], data["edges"])[data["test"]], data["y"][data["test"]]
        right = float((out.argmax(-1) == y).float().mean())
        return float(functional.cross_entropy(out, y)), right, len(y)
