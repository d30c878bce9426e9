"""Building a method from a configuration: aggregation rules by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from atoll.core.aggregate import RULES, Mean, Median
from atoll.core.errors import ConfigError
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config, resolve


@dataclass(frozen=True)
class Trimmed(Median):
    """Stands for a rule with parameters."""

    f: int = 1
    cautious: bool = False


@pytest.fixture(autouse=True)
def _one_more_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "trimmed", Trimmed)


def built(method: str = "fedavg", **settings: object):
    return build_method(resolve(make_config(method=method, set=settings))[0], 5, 3)


def test_a_rule_is_chosen_by_name_and_parameters() -> None:
    assert built().aggregate == Mean()
    assert built(aggregate="median").aggregate == Median()
    assert built("fedopt", aggregate="trimmed:f=2").aggregate == Trimmed(2)
    rule = built("scaffold", aggregate="trimmed:f=3,cautious=true").aggregate
    assert rule == Trimmed(3, cautious=True)


def test_a_plug_and_its_base_get_the_same_rule() -> None:
    method = built("fedtad", base="fedprox", aggregate="median")
    assert method.base.aggregate == Median()


@pytest.mark.parametrize(
    ("method", "text", "sentence"),
    [
        ("fedavg", "medain", "unknown aggregation rule 'medain'; did you mean 'median'?"),
        (
            "fedavg",
            "trimmed:fs=2",
            "unknown parameter of aggregate=trimmed 'fs'; did you mean 'f'?",
        ),
        ("fedavg", "trimmed:f=some", "f cannot be 'some'; it takes a whole number"),
        ("fedavg", "trimmed:f", "'trimmed:f' cannot be read; options follow the name as"),
        ("local", "median", "local takes no aggregation rule: nothing is aggregated; leave out"),
        ("fedpub", "median", "fedpub takes no aggregation rule: every client gets a mixture"),
        ("gcfl", "median", "gcfl takes no aggregation rule: the mean of each cluster's updates"),
        ("fedproto", "median", "fedproto averages models only with share_weights; leave out"),
    ],
)
def test_a_wrong_rule_is_one_sentence(method: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(method, aggregate=text)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_private_run_accepts_only_the_mean() -> None:
    with pytest.raises(ConfigError, match="accepts only aggregate=mean"):
        resolve(make_config(dp="clip=1,noise=1", set={"aggregate": "median"}))
