"""Every hyper-parameter has a meaning and a range on its field, and the range is enforced."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, replace
from typing import Annotated, Literal

import pytest

from atoll.core.aggregate import RULES
from atoll.core.errors import ConfigError
from atoll.core.hyper import (
    Epochs,
    Limits,
    NonNegative,
    OneOrMore,
    Positive,
    Share,
    ShareBelowOne,
    check_hypers,
    hypers,
)
from atoll.core.optim import OPTIMIZERS
from atoll.methods import METHODS, FedOpt, FedProx
from atoll.nn import NETS

PARTS = {**METHODS, **NETS, **OPTIMIZERS, **RULES}
NOT_HYPER = {"net", "optimizer", "features", "classes"}
FIELDS = [
    (name, key)
    for name, cls in PARTS.items()
    for key, hyper in hypers(cls).items()
    if key not in NOT_HYPER and hyper.default is not MISSING
]
NET = NETS["gcn"](features=4, classes=3)


@dataclass(frozen=True)
class Part:
    """A bit of everything."""

    mu: Annotated[NonNegative, "weight of the pull"] = 0.1
    epochs: Epochs = 3
    tau: Annotated[Positive, "temperature"] = 0.5
    kind: Annotated[Literal["a", "bee"], "which"] = "a"
    rate: Annotated[float | None, Limits(low=0, below=1), "how much"] = None
    plain: float = 1.0
    flag: Annotated[bool, "whether"] = False
    width: Annotated[OneOrMore, Limits(low=2, high=8), "narrower than its type"] = 4


def test_a_field_tells_its_meaning_and_its_range() -> None:
    found = hypers(Part)
    assert found["mu"].meaning == "weight of the pull"
    assert found["mu"].allowed == "a finite number that is not negative"
    assert found["epochs"].allowed == "at least 1"
    assert found["kind"].allowed == "a or bee"
    assert found["rate"].allowed == "a number from 0 up to, not including, 1"
    assert found["flag"].allowed == "true or false"
    assert found["plain"].allowed == "a finite number"
    assert found["plain"].meaning == ""
    assert found["width"].limits == Limits(low=2, high=8)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mu": -1}, "mu is -1; give a finite number that is not negative (weight of the pull)"),
        ({"mu": float("inf")}, "mu is inf; give a finite number that is not negative"),
        ({"mu": float("nan")}, "mu is nan; give a finite number that is not negative"),
        ({"epochs": 0}, "epochs is 0; give at least 1 (passes over"),
        ({"tau": 0.0}, "tau is 0.0; give a positive number (temperature)"),
        ({"kind": "be"}, "unknown kind 'be'; did you mean 'bee'?"),
        ({"rate": 1.0}, "rate is 1.0; give a number from 0 up to, not including, 1 (how much)"),
        ({"plain": float("nan")}, "plain is nan; give a finite number"),
        ({"width": 1}, "width is 1; give a number from 2 to 8 (narrower than its type)"),
    ],
)
def test_a_value_outside_is_one_sentence_with_the_meaning(
    change: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_hypers(replace(Part(), **change))
    assert str(caught.value).startswith(sentence)


def test_values_inside_pass() -> None:
    check_hypers(Part(mu=0, epochs=1, tau=1e-9, kind="bee", rate=0.0, flag=True, width=8))


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        (Share, [0, 0.5, 1], [-0.1, 1.1]),
        (ShareBelowOne, [0, 0.999], [1, -1e-9]),
        (Positive, [1e-300, 5], [0, -1]),
    ],
)
def test_ranges_by_name(limits: object, inside: list[float], outside: list[float]) -> None:
    one = limits.__metadata__[0]  # type: ignore[attr-defined]
    assert all(number in one for number in inside)
    assert not any(number in one for number in outside)


def test_a_method_checks_its_fields_however_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"mu is -1; .*\(μ: weight of the pull"):
        FedProx(NET, mu=-1)
    with pytest.raises(ConfigError, match="weight_by"):
        FedProx(NET, weight_by="size")
    with pytest.raises(ConfigError, match="server_beta2 is 1"):
        replace(FedOpt(NET), server_beta2=1.0)


@pytest.mark.parametrize(("name", "key"), FIELDS)
def test_every_hyper_parameter_has_one_line_of_meaning(name: str, key: str) -> None:
    meaning = hypers(PARTS[name])[key].meaning
    assert 3 < len(meaning) < 90, f"{name}.{key} needs a meaning: Annotated[..., 'what it does']"
    assert not meaning.endswith(".")
    assert "\n" not in meaning


@pytest.mark.parametrize("name", PARTS)
def test_defaults_are_inside_their_own_range(name: str) -> None:
    for hyper in hypers(PARTS[name]).values():
        if hyper.default is not MISSING:
            hyper.check(hyper.default)
