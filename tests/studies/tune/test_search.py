"""A search: every method declares its own ranges, nothing unknown gets in, and Optuna draws."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import atoll
from atoll.core.errors import ConfigError
from atoll.core.space import OneOf, Real, Whole
from atoll.experiment.config import make_config, resolve
from atoll.methods import METHODS
from atoll.studies.tune.result import TuningResult
from atoll.studies.tune.search import Search, defaults_of, grid_of, parse_range, space_of
from tests.studies.tune.conftest import tune

NOT_TUNED = {
    "clip": "a promise of privacy, not a matter of accuracy",
    "epsilon": "a promise of privacy, not a matter of accuracy",
    "phi_noise": "a promise of privacy, not a matter of accuracy",
    "server_beta1": "as in every study of adaptive optimizers",
    "server_beta2": "as in every study of adaptive optimizers",
    "threshold": "adafgl: 0 is the paper's",
    "elbo_weight": "fediih: the ELBO trains nothing that predicts by default",
    "factor_variance": "fediih: a prior of the paper",
    "alpha_variance": "fediih: a prior of the paper",
    "lam_diverg": "fedtad: the scale that lam_sem and lam_div are relative to",
    "generator_lr": "fedtad: replaces generator_ratio, which is searched",
    "distil_lr": "fedtad: replaces distil_ratio, which is searched",
    "memory": "reef: how long the choice between its networks remembers, not how they train",
    "sharpness": "reef: how sharply it chooses between its networks, not how they train",
    "weak_edges": "fgssl: views as published",
    "weak_features": "fgssl: views as published",
    "strong_edges": "fgssl: views as published",
    "strong_features": "fgssl: views as published",
}


def space(name: str, task: str = "node", preset: str | None = None, **search: object):
    asked = make_config(method=name, data="lagoon" if task == "node" else "PROTEINS",
                        protocol="strict")  # fmt: skip
    return space_of(asked, resolve(asked)[0], task, preset, search)[0]


def settings(**given: object):
    asked = make_config(method="fedprox", **given)
    return space_of(asked, resolve(asked)[0], "node")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_what_to_search(name: str) -> None:
    cls = METHODS[name]
    assert {"lr", "weight_decay", "dropout", "hidden"} <= cls.space.keys()
    for task in cls.tasks:
        assert space(name, task) == dict(cls.space)  # known keys, possible values
        for preset in cls.grids:
            assert space(name, task, preset) == dict(cls.grids[preset])
    knobs = [f.name for f in fields(cls) if "float" in str(f.type)]
    assert [knob for knob in knobs if knob not in cls.space and knob not in NOT_TUNED] == []


def test_the_papers_grids_are_theirs() -> None:
    assert space("fedath", preset="paper")["lam"] == OneOf((0.001, 0.1, 7.0, 10.0))
    tad = space("fedtad", preset="paper")
    assert tad["lam_sem"] == tad["lam_div"] == OneOf((0.1, 0.01, 0.001))
    assert {str(tad[k]) for k in ("iterations", "generator_steps", "distil_steps")} == {"1,3,5,10"}
    assert space("fediih", preset="paper")["factors"] == OneOf((1, 2, 4, 6, 8, 10))
    assert 0.07 in space("gcfl", preset="paper")["eps1"]
    assert 0.28 in space("gcfl", preset="paper")["eps2"]


def test_defaults_lie_in_the_space() -> None:
    for name, cls in METHODS.items():
        config = resolve(make_config(method=name))[0]
        found = defaults_of(config, "node", cls.space)
        assert cls.space.keys() - found.keys() <= {"server_lr"}, name  # its default is "choose"


def test_the_type_of_a_field_decides_whether_a_range_is_whole() -> None:
    ranges = {"mu": "0..1", "lr": "1..2:log", "layers": "1..3"}
    found = space("fedprox", **{key: parse_range(key, text) for key, text in ranges.items()})
    assert (found["mu"], found["lr"]) == (Real(0, 1), Real(1, 2, log=True))
    assert found["layers"] == Whole(1, 3)
    assert space("fedopt", server_lr=Whole(1, 2))["server_lr"] == Real(1, 2)  # or None


def test_what_the_user_sets_is_not_searched() -> None:
    found, notes = settings(set={"lr": 0.1, "net.hidden": 16})
    assert found.keys() == {"weight_decay", "dropout", "mu"}
    assert notes == []


def test_what_another_network_lacks_is_left_out_and_said() -> None:
    found, notes = settings(set={"net": "sgc"})
    assert found.keys() == {"lr", "weight_decay", "mu"}
    assert "dropout is not searched, because net lacks it" in notes[0]


OWN = """
from dataclasses import dataclass
from atoll import Averaging, Real, USUAL
@dataclass(frozen=True)
class Mine(Averaging):
    mu: float = 0.1
@dataclass(frozen=True)
class Searched(Mine):
    space = {**USUAL, "mu": Real(0.1, 1)}
"""


def test_fields_of_an_own_method_without_a_range_are_named(tmp_path: Path, caplog) -> None:
    path = tmp_path / "tune_own_fields.py"
    path.write_text(OWN)
    asked = make_config(method=f"{path}:Mine")
    found, notes = space_of(asked, resolve(asked)[0], "node")
    assert "mu" not in found
    why = "mu is not searched, because `space` has no range for it; add --search mu=LOW..HIGH"
    assert notes == [f"{path}:Mine: {why}"]
    assert why in caplog.text  # at once, not after hours
    for name, search in (("Searched", {}), ("Mine", {"mu": Real(0.1, 1)})):
        asked = make_config(method=f"{path}:{name}")
        found, notes = space_of(asked, resolve(asked)[0], "node", None, search)
        assert "mu" in found
        assert notes == []
    asked = make_config(method=f"{path}:Mine", set={"mu": 0.3})
    assert space_of(asked, resolve(asked)[0], "node")[1] == []


NAMED = """
from dataclasses import dataclass
from typing import Literal
from atoll import Aggregate, Averaging, Mean
@dataclass(frozen=True)
class Named(Averaging):
    aggregate: Aggregate = Mean()
    kind: Literal["one", "two"] = "one"
    warm: bool = True
    most: int | None = None
    widths: tuple[int, ...] = ()
"""


def test_the_advice_to_search_suits_the_field(tmp_path: Path) -> None:
    path = tmp_path / "tune_named_fields.py"
    path.write_text(NAMED)
    asked = make_config(method=f"{path}:Named")
    notes = space_of(asked, resolve(asked)[0], "node")[1]
    advised = [note.rpartition("--search ")[2] for note in notes]
    names = {"aggregate": "mean,median,adaptive", "kind": "one,two", "warm": "true,false"}
    assert advised == [*(f"{key}={values}" for key, values in names.items()), "most=LOW..HIGH"]
    search = {key: parse_range(key, values) for key, values in names.items()}
    found = space_of(asked, resolve(asked)[0], "node", None, search)[0]
    assert {key: found[key].values for key in names} == {
        "aggregate": ("mean", "median", "adaptive"), "kind": ("one", "two"), "warm": (True, False),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1e-4..0.1:log", Real(1e-4, 0.1, log=True)), ("0..0.8", Real(0, 0.8)),
        ("1..5", Whole(1, 5)), ("32,64", OneOf((32, 64))), ("a,b", OneOf(("a", "b"))),
        ("true,false", OneOf((True, False))),
    ],
)  # fmt: skip
def test_ranges_are_read_and_written_alike(text: str, wanted: object) -> None:
    found = parse_range("key", text)
    assert found == wanted
    assert parse_range("key", str(found)) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a..b", "write lr=LOW..HIGH"), ("1..", "write lr=LOW"), ("1..2:square", "write lr=LOW"),
        ("", "write lr=LOW"), ("5..1", "from a lower to a higher"), ("0..1:log", "begins above 0"),
        ("1,1", "different values"),
    ],
)  # fmt: skip
def test_unreadable_ranges_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_range("lr", text)


def test_unknown_and_impossible_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dropout'"):
        space("fedavg", droput=Real(0, 1))
    with pytest.raises(ConfigError, match="unknown hyper-parameter of fedavg 'mu'"):
        space("fedavg", mu=Real(0, 1))
    with pytest.raises(ConfigError, match=r"cannot search dropout=0\.\.1: dropout is 1"):
        space("fedavg", dropout=Real(0, 1))
    asked = make_config(epochs=2)
    with pytest.raises(ConfigError, match="both fixed and in --search"):
        space_of(asked, resolve(asked)[0], "node", None, {"epochs": Whole(1, 3)})


def test_a_missing_grid_says_who_has_one() -> None:
    with pytest.raises(ConfigError, match=r"local has no published grid.* fedath, "):
        space("local", preset="paper")
    with pytest.raises(ConfigError, match="did you mean 'paper'"):
        space("fedath", preset="papre")


def test_a_small_space_is_a_grid() -> None:
    few = {"a": OneOf((1, 2)), "b": Whole(0, 2)}
    assert len(grid_of(few, 6) or []) == 6
    assert grid_of(few, 5) is None
    assert grid_of({**few, "c": Real(0, 1)}, 100) is None


def test_settings_that_depend_on_no_result_are_known_before(tmp_path: Path) -> None:
    space = {"lr": Real(1e-3, 0.3, log=True), "mu": OneOf((0.1, 1.0))}
    file, first = tmp_path / "optuna.db", [{"lr": 0.01, "mu": 0.1}]
    search = Search(file, "m", space, seed=3, rounds=4, pruner="median", first=first)
    known = search.known(12)
    assert len(known) == 10  # the blind draws; what comes after learns from them
    assert search.known(4) == known[:4]
    assert search.frozen == []
    for number in range(12):
        settings = search.ask()
        assert settings is not None
        if number < 10:
            assert settings == known[number]
        else:
            assert search.known(12) == [settings]
        search.ask()
        failed = number == 3
        value = None if failed else 0.1 * number
        search.tell("failed" if failed else "complete", [0.1 * number], value=value)
    assert search.known(12) == []


def test_a_point_is_not_tried_twice() -> None:
    found = atoll.tune("fedavg", "lagoon:nodes=150", clients=2, trials=7, seeds=0, rounds=1,
                       set={"lr": 0.1, "weight_decay": 0, "dropout": 0},
                       search={"hidden": "4,5,6,8", "weight_by": "nodes,train"})  # fmt: skip
    tried = [tuple(t.settings.items()) for t in found.methods["fedavg"].trials]
    assert len(set(tried)) == len(tried) == 7


def test_importance_needs_some_trials(whole: TuningResult) -> None:
    assert whole.methods["fedavg"].importance == {}
    found = tune(clients=2, trials=10, seeds=0, pruner="none", rounds=3)
    shares = found.methods["fedavg"].importance
    assert shares.keys() == {"lr", "weight_decay", "dropout"}
    assert sum(shares.values()) == pytest.approx(1)
