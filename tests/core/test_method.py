"""Steps and messages: what a decorator leaves in a class, and what a server sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from atoll.core.message import ToAll, ToEach
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


TREE = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.arange(3)}


def test_to_all_sends_the_tree_to_everybody():
    message = ToAll(TREE)
    assert message.for_one(0) is message.for_one(2) is TREE
    assert message.bytes_for_one(3) == 6 * 4 + 3 * 8


def test_to_each_sends_one_row():
    message = ToEach(TREE)
    assert message.for_one(1)["w"].tolist() == [2.0, 3.0]
    assert message.rows(torch.tensor([2, 0]))["b"].tolist() == [2, 0]
    assert message.bytes_for_one(3) == 2 * 4 + 8
