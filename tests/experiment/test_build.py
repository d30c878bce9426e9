"""Building a method from a configuration: net, optimizer, base and aggregation rule by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import Tensor

import atoll
from atoll.core.aggregate import RULES, Adaptive, Mean, Median, Stateless
from atoll.core.errors import ConfigError
from atoll.core.method import task_of
from atoll.core.optim import SGD
from atoll.core.random import make_key
from atoll.core.task import NODES
from atoll.core.tree import Tree, num_bytes, tree_map
from atoll.experiment.build import COPIES, build_method, check_memory
from atoll.experiment.config import make_config, resolve
from atoll.methods import METHODS
from atoll.nn import NETS, nets_for

NODE_NETS = nets_for(NODES.name)


@dataclass(frozen=True)
class Trimmed(Stateless):
    """The mean of every parameter without its f least and f largest values."""

    f: int = 1
    weighted: bool = False

    def combined(self, updates: Tree, weight: Tensor) -> Tree:
        return tree_map(self._trimmed, updates)

    def _trimmed(self, stacked: Tensor) -> Tensor:
        return stacked.sort(dim=0).values[self.f : len(stacked) - self.f].mean(0)


@pytest.fixture(autouse=True)
def _one_more_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers a rule as the author of one would, until the end of a test."""
    monkeypatch.setitem(RULES, "trimmed", Trimmed)


def built(method: str = "fedavg", **settings: object):
    return build_method(resolve(make_config(method=method, set=settings))[0], 5, 3)


def test_a_rule_is_chosen_by_name_and_parameters() -> None:
    assert built().aggregate == Mean()
    assert built(aggregate="median").aggregate == Median()
    assert built("fedopt", aggregate="trimmed:f=2").aggregate == Trimmed(2)
    rule = built("scaffold", aggregate="trimmed:f=3,weighted=true").aggregate
    assert rule == Trimmed(3, weighted=True)


def test_a_registered_rule_trains() -> None:
    given = {"data": "lagoon:nodes=150", "clients": 3, "rounds": 2}
    losses = {
        name: atoll.run("fedavg", set={"aggregate": name}, **given).metrics()["test_loss"]["mean"]
        for name in ("mean", "median", "trimmed:f=1")
    }
    assert losses["trimmed:f=1"] == pytest.approx(losses["median"])  # the middle one of three
    assert losses["median"] != losses["mean"]


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
        ("fedavg", "adaptive:lr=many", "lr cannot be 'many'; it takes a number or none"),
        ("fedopt", "adaptive", "fedopt has its own server optimizer; remove"),
        ("local", "median", "local takes no aggregation rule: nothing is aggregated; remove"),
        ("fedpub", "median", "fedpub takes no aggregation rule: every client gets a mixture"),
        ("gcfl", "median", "gcfl takes no aggregation rule: the mean of each cluster's updates"),
        ("fedproto", "median", "fedproto averages models only with share_weights; remove"),
    ],
)
def test_a_wrong_rule_is_one_sentence(method: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(method, aggregate=text)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_parameters_of_a_rule_begin_with_those_of_the_method() -> None:
    assert built("reef", aggregate="adaptive").aggregate == Adaptive(lr=0.1)
    assert built("reef", aggregate="adaptive:tau=0.01").aggregate == Adaptive(lr=0.1, tau=0.01)
    assert built("reef", aggregate="adaptive:lr=none").aggregate == Adaptive()
    assert built("fedavg", aggregate="adaptive:optimizer=yogi").aggregate == Adaptive("yogi")


def test_a_private_run_accepts_only_the_mean() -> None:
    with pytest.raises(ConfigError, match="accepts only aggregate=mean"):
        resolve(make_config(dp="clip=1,noise=1", set={"aggregate": "median"}))


def refusal(**options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(make_config(**options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_hyper_parameter_of_another_method_lists_or_suggests() -> None:
    sentence = refusal(method="fedavg", set={"zzz": 1})
    assert sentence.startswith("unknown hyper-parameter of fedavg 'zzz'; choose one of: ")
    for name in ("hidden", "lr", "epochs", "net", "optimizer", "weight_by"):
        assert name in sentence
    for fixed in ("features", "classes"):
        assert fixed not in sentence


@pytest.mark.parametrize("method", ["moon", "fedproto", "fedpub"])
def test_a_network_without_hidden_layer_is_refused_in_words(method: str) -> None:
    assert "has no hidden layer" in refusal(method=method, set={"layers": 1})


@pytest.mark.parametrize(
    ("method", "net"),
    [
        (name, net)
        for name, method in METHODS.items()
        for net in NETS
        if not method.nets and task_of(NETS[net]) in method.tasks
    ],
)
def test_every_method_takes_every_net_for_its_tasks(method: str, net: str) -> None:
    task = task_of(NETS[net])
    data = {"node": "lagoon", "graph": "MUTAG"}[task]
    given = {"net": net, "optimizer": "SGD"}
    config, _ = resolve(make_config(method=method.upper(), data=data, set=given))
    built = build_method(config, features=5, classes=3, task=task)
    assert type(built) is METHODS[method]
    assert type(built.net) is NETS[net]
    assert isinstance(built.optimizer, SGD)
    assert (built.net.features, built.net.classes) == (5, 3)


@pytest.mark.parametrize("method", [name for name, cls in METHODS.items() if cls.nets])
def test_a_method_that_needs_a_network_gets_it_and_no_other(method: str) -> None:
    wanted = METHODS[method].nets
    built = build_method(resolve(make_config(method=method))[0], features=5, classes=3)
    assert type(built.net) is NETS[wanted[0]]
    for net in NETS:
        if net not in wanted:
            problem = refusal(method=method, set={"net": net})
            works = " or ".join(name for name in wanted if name in NODE_NETS)
            assert problem == f"{method} cannot use net={net}; use --set net={works}"


def test_fedath_takes_a_gcn_alone() -> None:
    with pytest.raises(ConfigError, match="use --set net=gcn"):
        resolve(make_config(method="fedath", set={"net": "sage"}))


def test_a_preset_sets_method_net_and_optimizer_and_can_be_overruled() -> None:
    settings = {"preset": "reference", "lam": "0.5"}
    method = build_method(resolve(make_config(method="fedath", set=settings))[0], 5, 3)
    assert (method.evaluator, method.lam) == ("gnn", 0.5)
    assert (method.net.hidden, method.optimizer.lr) == (512, 1e-3)


def test_another_network_than_the_preset_s_leaves_out_what_the_preset_sets_of_its_own() -> None:
    chosen = {"preset": "reference"}
    for more, net in (({}, "chebnet"), ({"net": "gcn"}, "gcn"), ({"net": "chebnet"}, "chebnet")):
        config, _ = resolve(make_config(method="adafgl", set={**chosen, **more}))
        built = build_method(config)
        assert type(built.net) is NETS[net]
        assert getattr(built.net, "matrix", "adjacency") == "adjacency"
        assert built.alpha == 0.05


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'paper'"):
        resolve(make_config(method="fedath", set={"preset": "papr"}))


def test_a_method_keeps_its_own_learning_rate() -> None:
    assert build_method(resolve(make_config(method="fedath"))[0], 5, 3).optimizer.lr == 1e-3
    assert build_method(resolve(make_config(method="fedavg"))[0], 5, 3).optimizer.lr == 1e-2


def test_settings_reach_the_part_that_they_name() -> None:
    settings = {"hidden": "8", "net.dropout": "0", "optimizer.lr": "0.2", "weight_by": "train"}
    method = build_method(resolve(make_config(set=settings))[0], 5, 3)
    assert (method.net.hidden, method.net.dropout) == (8, 0.0)
    assert (method.optimizer.lr, method.weight_by) == (0.2, "train")


def test_a_plug_is_built_around_its_base() -> None:
    given = {"base": "fedprox", "mu": "0.5", "base.weight_by": "train", "lr": 0.02, "hidden": 7}
    config = resolve(make_config(method="fedtad", epochs=4, set=given))[0]
    method = build_method(config, 5, 3)
    base = method.base
    assert (base.mu, base.weight_by, base.epochs, base.optimizer.lr) == (0.5, "train", 4, 0.02)
    assert (method.epochs, method.optimizer) == (4, base.optimizer)
    assert base.net is method.net
    assert method.net.hidden == 7


def test_a_plug_without_a_base_and_a_base_without_a_plug() -> None:
    config = resolve(make_config(method="fedtad"))[0]
    assert build_method(config, 5, 3).base is None
    problem = refusal(method="fedavg", set={"base": "fedprox"})
    assert problem == "fedavg does not wrap other methods; remove --set base=fedprox"
    assert "cannot be its own base" in refusal(method="fedtad", set={"base": "fedtad"})
    assert "fedprox" in refusal(method="fedtad", set={"base": "fedprx"})
    assert "mu" in refusal(method="fedtad", set={"mu": 1})


def test_a_plug_takes_the_network_that_its_base_needs() -> None:
    config = resolve(make_config(method="fedtad", set={"base": "fediih", "hidden": 8}))[0]
    method = build_method(config, 5, 3)
    assert type(method.net) is NETS["disengcn"]
    assert method.base.net is method.net
    assert "use --set net=disengcn" in refusal(
        method="fedtad", set={"base": "fediih", "net": "gcn"}
    )


def test_hyper_parameters_that_belong_together_come_in_any_order() -> None:
    for settings in ({"clip": 0.1, "epsilon": 1.0}, {"epsilon": 1.0, "clip": 0.1}):
        config, _ = resolve(make_config(method="fedgnn", set=settings))
        built = build_method(config, features=5, classes=3)
        assert (built.clip, built.epsilon) == (0.1, 1.0)


@pytest.mark.parametrize(
    ("method", "settings", "sentence"),
    [
        ("fedavg", {"hidden": 10**11}, "hidden is 100000000000; give at most 1000000"),
        ("fedavg", {"layers": 10**9}, "layers is 1000000000; give at most 1000"),
        ("fedavg", {"hidden": 10**6, "layers": 9}, "the network needs .* GiB to train"),
        ("fedavg", {"net": "gin", "hidden": 10**6}, "choose smaller widths or fewer layers"),
        ("fediih", {"hidden": 10**6, "factors": 1000}, "the network needs .* GiB to train"),
        ("moon", {"head": 10**11}, "head is 100000000000; give from 0 to a million"),
        ("fedtad", {"pseudo_nodes": 10**11}, "pseudo_nodes is 100000000000; give from 1"),
    ],
)
def test_an_absurd_width_is_refused_before_anything_is_made(method, settings, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        atoll.run(method, "lagoon:nodes=150", clients=2, rounds=1, set=settings)


@pytest.mark.parametrize("net", NETS)
def test_a_network_that_fits_is_accepted(net, monkeypatch) -> None:
    monkeypatch.setattr("atoll.experiment.build.WIDE", 10)
    wide = NETS[net](features=4097, classes=3)
    check_memory(wide)
    size = COPIES * num_bytes(wide.init(make_key(0)))
    monkeypatch.setattr("atoll.experiment.build.available_memory", lambda: size)
    check_memory(wide)
    monkeypatch.setattr("atoll.experiment.build.available_memory", lambda: size - 1)
    with pytest.raises(ConfigError, match=f"{size // 4 // COPIES} parameters"):
        check_memory(wide)
