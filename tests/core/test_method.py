"""Steps: the effect of the decorator on a class, and the type that `clients.map` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.core.method import Method, Step, StepDefinition, client_step


@dataclass(frozen=True)
class Toy:
    factor: float = 2.0

    @client_step
    def plain(self, graph: Any, message: Any, state: Any, key: Any) -> Any:
        """Multiply."""
        return message * self.factor, "new state"

    @client_step(keeps_state=True, vectorize=False, discloses={"h": "it is public"})
    def reader(self, graph: Any, message: Any, state: Any, key: Any) -> Any:
        return message + 1


def test_a_step_knows_its_owner_name_and_options():
    toy = Toy(3.0)
    step = toy.plain
    assert isinstance(step, Step)
    assert (step.owner, step.name, step.vectorize, step.keeps_state) == (toy, "plain", True, False)
    assert dict(step.discloses) == {}
    other = toy.reader
    assert (other.vectorize, other.keeps_state) == (False, True)
    assert other.discloses == {"h": "it is public"}


def test_on_the_class_a_step_is_its_definition_with_its_docstring():
    assert isinstance(Toy.plain, StepDefinition)
    assert Toy.plain.__doc__ == "Multiply."


def test_a_step_returns_reply_and_state():
    assert Toy(3.0).plain(None, 2, "old", None) == (6.0, "new state")
    assert Toy().reader(None, 2, "old", None) == (3, "old")


def test_unknown_options_of_a_step_are_refused():
    with pytest.raises(TypeError, match="vectorise"):

        @dataclass(frozen=True)
        class Typo:
            @client_step(vectorise=False)
            def train(self) -> None: ...


def test_a_method_without_init_and_round_cannot_be_made():
    @dataclass(frozen=True)
    class Half(Method):
        def init(self, clients: Any) -> Any: ...

    with pytest.raises(TypeError, match="abstract"):
        Half(net=None)


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
