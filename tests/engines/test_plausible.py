"""Values of a reply that honest training on a site's declared data can produce."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from atoll.core.aggregate import Update
from atoll.core.errors import WireError
from atoll.core.optim import SGD
from atoll.core.task import Scores
from atoll.engines.plausible import (
    LARGEST,
    Declared,
    check_values,
    lengths,
    reach_of,
    too_long,
    usual_size,
    widest,
)

SITE, HIDDEN = Declared((5, 2, 3), 10), Declared((0, 0, 0), 0)
MODEL = {"a": torch.ones(4), "b": torch.zeros(2, 3)}


def scores(total: float = 5.0, auc: float = -1.0) -> Scores:
    confusion = torch.zeros(3, 2, 2, dtype=torch.float64)
    confusion[0, 0, 1] = total
    return Scores(confusion, torch.ones(3), torch.full((3,), auc))


def binned(total: float) -> Scores:
    bins = torch.zeros(3, 2, 8)
    bins[0, 1, 5] = total
    return replace(scores(1.0, 0.5), bins=bins)


@pytest.mark.parametrize(
    ("reply", "site"),
    [
        (Update(MODEL, torch.tensor(10)), SITE),
        (Update(MODEL, torch.tensor(1)), HIDDEN),
        (scores(), SITE),
        (scores(1.0, 0.5), SITE),
        (scores(0.0), HIDDEN),
    ],
)
def test_honest_values_pass(reply: object, site: Declared) -> None:
    check_values(reply, site, epochs=3)


@pytest.mark.parametrize(
    ("reply", "site", "reason"),
    [
        (Update(MODEL, torch.tensor(-1.0)), SITE, "'weight' is -1; a plausible value is from 1"),
        (Update(MODEL, torch.tensor(0.0)), SITE, "'weight' is 0; a plausible value is from 1"),
        (Update(MODEL, torch.tensor(1e-40)), SITE, "'weight' is 9.99"),
        (Update(MODEL, torch.tensor(0.5)), HIDDEN, "'weight' is 0.5; .* from 1 to 1"),
        (Update(MODEL, torch.tensor(10.5)), SITE, "'weight' is 10.5"),
        (Update(MODEL, torch.tensor(2)), HIDDEN, "'weight' is 2"),
        (Update({"a": torch.tensor([2e7])}, torch.tensor(1)), SITE, "'model.a' is 2e\\+07"),
        (binned(6.0), SITE, "bins \\(train\\)' is 6"),
        (binned(-1.0), SITE, "bins \\(train\\)' is -1"),
        (scores(6.0), SITE, "confusion \\(train\\)' is 6"),
        (scores(-1.0), SITE, "confusion \\(train\\)' is -1"),
        (scores(1.0), HIDDEN, "confusion \\(train\\)' is 1"),
        (scores(5.0, 1.5), SITE, "'auc \\(train\\)' is 1.5"),
        (scores(0.0, 0.5), HIDDEN, "'auc \\(train\\)' is 0.5"),
    ],
)
def test_values_that_the_data_cannot_give_are_refused(
    reply: object, site: Declared, reason: str
) -> None:
    with pytest.raises(WireError, match=reason):
        check_values(reply, site, epochs=3)


def test_an_update_is_compared_with_those_of_the_other_sites() -> None:
    moved = {"a": torch.full((4,), 3.0), "b": torch.zeros(2, 3)}
    assert lengths(Update(moved, torch.tensor(1)), MODEL, 9.0) == {"model": (4.0, 3.0)}
    assert lengths(scores(), MODEL, 9.0) == {}
    assert lengths(Update(moved, torch.tensor(1)), torch.tensor(7), 9.0) == {"model": (6.0, 1.0)}
    usual = {"a": (1.0, 3.0), "b": (2.0, 3.0), "c": (150.0, 3.0)}
    assert too_long(usual, 100, {}) == {}
    found = too_long({**usual, "d": (1e20, 3.0)}, 100, {})
    assert list(found) == ["d"]
    assert found["d"].startswith("its update was refused: its norm is 1e+20, but the median")
    # Sites without training nodes do not move; an update of the model's own size is plausible.
    assert too_long({"a": (0.0, 3.0), "b": (0.0, 3.0), "c": (3.0, 3.0)}, 100, {}) == {}


def test_a_site_alone_is_compared_with_what_others_sent_before() -> None:
    assert too_long({"a": (1e20, 3.0)}, 100, {}) == {}  # there is nothing to compare it with
    assert too_long({"a": (1e20, 3.0)}, 100, {"a": 1e20}) == {}
    others = {"b": 2.0, "c": 2.0, "d": 0.0}
    assert list(too_long({"a": (1e20, 3.0)}, 100, {"a": 1e20, **others})) == ["a"]
    assert too_long({"a": (1e4, 3.0)}, 100, others) == {}  # the models were others, too


def test_one_or_two_earlier_sites_decide_about_nobody() -> None:
    """Otherwise a liar that is first and sends zeros would exclude every honest site."""
    assert too_long({"a": (4.0, 3.0)}, 100, {"liar": 0.0}) == {}
    assert too_long({"a": (4.0, 3.0)}, 100, {"liar": 0.0, "b": 0.0}) == {}


def test_one_range_holds_for_all_sites_and_no_site_decides_it() -> None:
    small = Declared((5, 2, 3), 200)
    assert usual_size([small, small, Declared((0, 0, 0), 1 << 40)]) == usual_size([small]) == 2e6
    assert usual_size([HIDDEN, HIDDEN]) == 1e4
    large = Update({"a": torch.tensor([2e6])}, torch.tensor(1))
    for site in (SITE, Declared((5, 2, 3), 1 << 40)):
        with pytest.raises(WireError, match=r"'model.a' is 2e\+06; .* to 1e\+06"):
            check_values(large, site, 1)
    # An honest reply to a large model is large.
    check_values(large, SITE, 1, LARGEST * widest({"a": torch.tensor([-3.0])}))


@dataclass
class Shown:
    """A reply without a model."""

    x: torch.Tensor
    weight: torch.Tensor


def test_every_field_of_numbers_is_compared() -> None:
    shown = Shown(torch.full((4,), 2e5), torch.tensor(5.0))
    assert lengths(shown, MODEL, 1e4) == {"x": (4e5, 1e4)}


@dataclass
class Mixed:
    confidence: torch.Tensor


@dataclass
class Controlled:
    control: torch.Tensor
    steps: torch.Tensor
    model: torch.Tensor


def test_a_share_in_a_mixture_is_compared_by_node() -> None:
    sent = {"small": (45.0, 20), "middle": (400.0, 150), "large": (3e4, 20_000), "liar": (1e4, 20)}
    norms = {
        site: lengths(Mixed(torch.tensor(value)), MODEL, 1e4, 1.0, nodes)["confidence"]
        for site, (value, nodes) in sent.items()
    }
    assert list(too_long(norms, 100.0, {})) == ["liar"]


def test_a_control_may_be_as_long_as_that_of_a_plausible_update() -> None:
    received = Controlled(torch.zeros(4), torch.tensor(1), torch.full((4,), 2.0))
    reply = Controlled(torch.full((4,), 30.0), torch.tensor(5), torch.ones(4))
    # The received control's norm, plus (norm of the model + 1) / reach.
    assert lengths(reply, received, 1e4, 0.05)["control"] == (60.0, pytest.approx(100.0))
    received = replace(received, control=torch.ones(4))
    assert lengths(reply, received, 1e4, 50.0)["control"] == (60.0, pytest.approx(3.0))


def test_no_single_site_decides_how_far_a_gradient_reaches() -> None:
    replies = [Controlled(torch.zeros(1), torch.tensor(n), torch.zeros(1)) for n in (5, 6, 1)]
    assert reach_of(SimpleNamespace(optimizer=SGD(lr=0.1)), replies) == pytest.approx(0.5)
    assert reach_of(object(), []) == 1.0
