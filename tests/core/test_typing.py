"""A type checker knows what `clients.map` returns."""

from __future__ import annotations

from pathlib import Path

import pytest

SNIPPET = """
from dataclasses import dataclass
from torch import Tensor
from atoll.core.aggregate import Update
from atoll.core.graph import Graph
from atoll.core.message import ToAll
from atoll.core.method import Clients, Method, client_step
from atoll.core.tree import Tree, record

@record
class Count:
    nodes: Tensor

@dataclass(frozen=True)
class Mine(Method):
    def init(self, clients: Clients) -> Tree:
        return clients.map(self.count, ToAll(None)).nodes

    def round(self, server: Tree, clients: Clients) -> Tree:
        reply = clients.map(self.train, ToAll(server))
        reveal_type(reply)
        wrong = reply.modle
        reveal_type(clients.map(self.count, ToAll(server)))
        return reply.model

    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> tuple[Update, Tree]:
        return Update(model, key), state

    @client_step(keeps_state=True)
    def count(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Count:
        return Count(key)

    @client_step(discloses={"model": "a test"})
    def tell(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Count:
        return Count(key)
"""

SETTINGS = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,atoll.api,atoll.studies.*,atoll.experiment.*,atoll.methods.*,atoll.nn.*,atoll.data.*]
follow_imports = skip
"""
"""What the snippet does not need is not read: torch would take half a minute."""


def test_the_reply_of_a_step_has_its_own_type(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    (tmp_path / "mine.py").write_text(SNIPPET)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    options = [f"--config-file={tmp_path}/mypy.ini", f"--cache-dir={tmp_path}/cache"]
    out, err, _ = api.run([*options, str(tmp_path / "mine.py")])
    assert not err
    assert 'Revealed type is "atoll.core.aggregate.Update"' in out
    assert 'Revealed type is "mine.Count"' in out
    assert '"Update" has no attribute "modle"; maybe "model"?' in out
    # `keeps_state` decides whether a step also returns a state.
    assert "Argument 1 has incompatible type" in out
    assert out.count("error:") == 2, out
