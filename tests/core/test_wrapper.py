"""A wrapper forwards every hook of `Method` to its base, and no step."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch

from atoll.core.aggregate import Mean
from atoll.core.dp import Noised
from atoll.core.message import ToAll
from atoll.core.method import Method, Step, StepDefinition, client_step, declared_steps
from atoll.core.tree import Empty
from atoll.core.wrapper import Wrapper
from atoll.methods import GCFL, METHODS, FedAvg, FedSagePlus, FedTAD
from atoll.nn import NETS

OWN = {"why_not_private"}
"""Hooks that a wrapper answers itself."""
NET = NETS["gcn"](features=4, classes=3)


def hooks(cls: type) -> set[str]:
    return {
        name
        for name, value in vars(cls).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


def missing(method: type, wrapper: type) -> set[str]:
    """Hooks of a method that a wrapper does not forward."""
    return hooks(method) - hooks(wrapper) - OWN


def test_every_hook_of_a_method_is_in_the_written_list() -> None:
    assert missing(Method, Wrapper) == set()
    assert hooks(Wrapper) - hooks(Method) == {"of_base"}


def test_a_hook_that_is_added_but_not_forwarded_is_found() -> None:
    class MethodOfTomorrow(Method):
        def one_more_hook(self) -> str:
            return ""

    assert missing(MethodOfTomorrow, Wrapper) == {"one_more_hook"}


def test_a_wrapper_has_no_step_and_no_getattr() -> None:
    assert not any(isinstance(value, StepDefinition) for value in vars(Wrapper).values())
    assert "__getattr__" not in vars(Wrapper)
    assert "__getattribute__" not in vars(Wrapper)


@dataclass(frozen=True)
class Spied(Method):
    """Answers every hook with its name and what it got."""

    def init(self, clients):
        return "init", clients

    def round(self, server, clients):
        return "round", server, clients

    @property
    def views(self):
        return {"views": 1}

    @client_step
    def train(self, graph, message, state, key):
        return Empty(), None


CALLS = {
    "init": (1,),
    "loss": (1, 2, None),
    "round": (1, 2),
    "stage": (1,),
    "deploy": (1,),
    "redeploy": (1, 2),
    "local": (1,),
    "predict": (1, 2, 3, None),
    "derived_from": (1,),
    "derive": (1, 2),
    "diagnostics": (1,),
    "explain_edges": (1, 2, 3),
    "scored_as": (),
    "too_short": (1,),
    "why_bound": (),
    "plain_params": (1, 2),
    "mixture": (1,),
}


@dataclass(frozen=True)
class Plug(Wrapper):
    """The least that a wrapper is."""

    base: Method | None = None


def test_all_hooks_are_called_here() -> None:
    assert {*CALLS, "views", "reach"} == hooks(Method) - OWN


@pytest.mark.parametrize("name", CALLS)
def test_a_hook_answers_as_the_base_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Spied(NET)
    monkeypatch.setattr(Spied, name, lambda self, *given: (name, given), raising=False)
    assert getattr(Plug(NET, base), name)(*CALLS[name]) == (name, CALLS[name])
    assert Plug(NET, base).views == {"views": 1}
    assert Plug(NET, base).reach == NET.reach == 2


def test_without_a_base_the_hooks_of_method_apply() -> None:
    plug = Plug(NET)
    assert [*plug.views] == [*NET.views]
    assert plug.too_short(1) == ""
    assert plug.scored_as() == "global"
    assert plug.deploy(torch.ones(2)).tree.tolist() == [1, 1]


def test_a_plug_keeps_the_warning_and_the_other_hooks_of_its_base() -> None:
    base = GCFL(NET)
    assert base.too_short(5)
    assert FedTAD(NET, base=base).too_short(5) == base.too_short(5)
    assert Noised(NET, base=FedAvg(NET), clip=1.0, noise=1.0).too_short(5) == ""
    sage = NETS["sage"](features=4, classes=3)
    mended = FedTAD(sage, base=FedSagePlus(sage))
    assert mended.derived_from(None) is None
    with pytest.raises(NotImplementedError):
        FedTAD(NET).derive(None, None)


def test_a_plug_s_diagnostics_are_its_base_s(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Server:
        base: object

    monkeypatch.setattr(GCFL, "diagnostics", lambda self, server: {"cluster": server})
    assert FedTAD(NET, base=GCFL(NET)).diagnostics(Server("inner")) == {"cluster": "inner"}
    assert FedTAD(NET).diagnostics(Server("inner")) == {}


def test_privacy_stays_the_wrapper_s_own_answer() -> None:
    private = Noised(NET, base=FedAvg(NET), clip=1.0, noise=1.0)
    assert private.why_not_private() == "it is already"
    assert "reliable" in FedTAD(NET, base=FedAvg(NET)).why_not_private()


def test_no_attribute_of_a_wrapper_is_a_step_of_its_base() -> None:
    for wrapper in (
        Noised(NET, base=FedAvg(NET), clip=1.0, noise=1.0),
        FedTAD(NET, base=FedAvg(NET)),
    ):
        own = {step.name for step in declared_steps(wrapper)}
        for name in dir(wrapper):
            found = getattr(wrapper, name, None)
            if isinstance(found, Step):
                assert name in own
                assert found.owner is wrapper


def test_diagnostics_are_empty_or_known_names() -> None:
    known = {"similarity", "mixing", "cluster", "cached", "splits", "trace"}
    for name, cls in METHODS.items():
        if "diagnostics" in vars(cls):
            assert name in ("fedaux", "fedgta", "fediih", "fedpub", "gcfl")
    assert known == {word for word in known if f"`{word}`" in (Method.diagnostics.__doc__ or "")}


def test_wrappers_are_dataclasses_with_a_base() -> None:
    for cls in (Noised, FedTAD):
        assert issubclass(cls, Wrapper)
        assert "base" in {field.name for field in fields(cls)}
    assert FedTAD(NET).aggregate == Mean()
    assert isinstance(Plug(NET).deploy(torch.ones(1)), ToAll)
