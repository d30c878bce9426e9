"""Aggregation: golden numbers, and the laws of a mixing matrix."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.core.aggregate import (
    Adaptive,
    Averaged,
    Mean,
    Median,
    Update,
    aggregated,
    average,
    combine,
    first_server,
    mix,
    model_of,
    next_server,
    put,
    spread,
    with_model,
)
from atoll.core.dp import Noised
from atoll.core.errors import ConfigError
from atoll.core.random import fold, make_key, normal, uniform
from atoll.core.tree import leaves, record, take, tree_map
from atoll.experiment.rounds import Experiment
from atoll.methods import METHODS, FedAvg, FedProto, FedTAD
from atoll.nn import NETS
from atoll.testing import CLASSES, FEATURES, double_precision, small_federation

MODELS = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25]])


def test_average_by_size_and_plainly():
    # methods/baselines/fedavg.md
    sizes = torch.tensor([3.0, 5.0, 2.0])
    assert average(MODELS, sizes).tolist() == pytest.approx([1.9, 0.15], abs=1e-6)
    assert average(MODELS).tolist() == pytest.approx([1.5, 0.416667], abs=1e-6)
    assert average(MODELS, torch.ones(3)).tolist() == pytest.approx([1.5, 0.416667], abs=1e-6)


def test_mix_by_hand():
    tree = {"w": torch.tensor([[[1.0], [2.0]], [[10.0], [20.0]]]), "b": torch.tensor([3.0, 30.0])}
    out = mix(tree, torch.tensor([[0.75, 0.25], [0.0, 1.0], [1.0, -1.0]]))
    assert out["w"].tolist() == [[[3.25], [6.5]], [[10.0], [20.0]], [[-9.0], [-18.0]]]
    assert out["b"].tolist() == [9.75, 30.0, -27.0]


def test_scalars_and_tensors_without_numbers_are_averaged_too():
    tree = {"scalar": torch.tensor([1.0, 4.0]), "none": torch.zeros(2, 0, 3)}
    out = average(tree, torch.tensor([2.0, 1.0]))
    assert out["scalar"].shape == ()
    assert float(out["scalar"]) == 2
    assert out["none"].shape == (0, 3)
    assert mix(tree, torch.eye(2))["none"].shape == (2, 0, 3)


def test_average_is_one_row_of_mix():
    sizes = torch.tensor([3.0, 5.0, 2.0])
    row = (sizes / sizes.sum()).unsqueeze(0)
    torch.testing.assert_close(mix(MODELS, row)[0], average(MODELS, sizes))
    torch.testing.assert_close(mix(MODELS, torch.eye(3)), MODELS)


def test_types_of_models_win_over_the_type_of_weights():
    tree = [MODELS.double(), MODELS.float()]
    for out in (average(tree, torch.tensor([1.0, 2, 3])), mix(tree, torch.eye(3))):
        assert [leaf.dtype for leaf in out] == [torch.float64, torch.float32]
    assert average(tree, torch.tensor([1, 2, 3]))[0].dtype == torch.float64


def test_whole_numbers_are_refused_rather_than_turned_into_zeros():
    with pytest.raises(TypeError, match=r"floating-point.*int64"):
        mix(torch.arange(4).reshape(2, 2), torch.full((2, 2), 0.5))
    with pytest.raises(TypeError, match=r"floating-point.*int64"):
        average(torch.arange(4).reshape(2, 2), torch.ones(2))


seeds, sizes = st.integers(0, 2**20), st.integers(1, 6)


def rows_to_one(seed: int, rows: int, columns: int) -> Tensor:
    """Any real weights, as long as each row sums to one."""
    raw = normal(fold(make_key(seed), "mix"), (rows, columns), torch.float64)
    return raw + (1 - raw.sum(1, keepdim=True)) / columns


@given(seeds, sizes, sizes, st.floats(-1e6, 1e6))
@settings(max_examples=50, deadline=None)
def test_rows_that_sum_to_one_keep_constants(seed, rows, columns, constant):
    tree = {"w": torch.full((columns, 2, 3), constant, dtype=torch.float64)}
    out = mix(tree, rows_to_one(seed, rows, columns))["w"]
    torch.testing.assert_close(out, torch.full_like(out, constant), rtol=1e-9, atol=1e-9)


@given(seeds, sizes, st.floats(-1e6, 1e6))
@settings(max_examples=50, deadline=None)
def test_an_average_keeps_constants_and_stays_inside(seed, clients, constant):
    weight = uniform(fold(make_key(seed), "w"), (clients,), torch.float64)
    same = torch.full((clients, 3), constant, dtype=torch.float64)
    torch.testing.assert_close(average(same, weight), same[0], rtol=1e-12, atol=1e-12)
    models = normal(make_key(seed), (clients, 3), torch.float64)
    out = average(models, weight)
    assert (out <= models.amax(0) + 1e-12).all()
    assert (out >= models.amin(0) - 1e-12).all()


@given(seeds, sizes, sizes, sizes)
@settings(max_examples=50, deadline=None)
def test_mixing_twice_is_mixing_with_the_product(seed, first, second, clients):
    models = normal(make_key(seed), (clients, 2, 2), torch.float64)
    a, b = rows_to_one(seed, first, clients), rows_to_one(seed + 1, second, first)
    torch.testing.assert_close(mix(mix(models, a), b), mix(models, b @ a), rtol=1e-9, atol=1e-9)


@given(seeds, st.integers(2, 6))
@settings(max_examples=50, deadline=None)
def test_the_order_of_clients_does_not_matter(seed, clients):
    models = normal(make_key(seed), (clients, 3), torch.float64)
    weight = uniform(make_key(seed), (clients,), torch.float64)
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(seed))
    one, other = average(models, weight), average(models[order], weight[order])
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_put_replaces_rows_and_leaves_its_inputs_alone():
    stacked = {"a": torch.zeros(4, 2), "none": None}
    rows = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "none": None}
    out = put(stacked, torch.tensor([3, 1]), rows)
    assert out["a"].tolist() == [[0, 0], [3, 4], [0, 0], [1, 2]]
    assert not stacked["a"].any()


def test_spread_gives_everybody_a_copy_of_their_own():
    tree = [torch.tensor([1.0, 2.0]), torch.tensor(5)]
    out = spread(tree, 3)
    for k in range(3):
        assert all(map(torch.equal, leaves(take(out, k)), leaves(tree)))
    out[0][0] += 1
    assert out[0][1].tolist() == [1.0, 2.0]
    assert tree[0].tolist() == [1.0, 2.0]


# Rules in the place of the mean.

KEY = make_key(0)


@record
class Memory:
    """The state of `Momentum`."""

    velocity: object
    rounds: Tensor


@dataclass(frozen=True)
class Momentum:
    """A rule with a state, its own noise and a parameter, as robust rules have."""

    beta: float = 0.5

    def init(self, model):
        return Memory(tree_map(torch.zeros_like, model), torch.zeros((), dtype=torch.int64))

    def __call__(self, updates, weight, key, state):
        places = iter(range(len(leaves(updates))))

        def moved(mean, before):
            noise = normal(fold(key, next(places)), tuple(mean.shape), mean.dtype)
            return self.beta * before + mean + 1e-3 * noise

        velocity = tree_map(moved, average(updates, weight), state.velocity)
        return velocity, Memory(velocity, state.rounds + 1)


def test_a_mean_is_the_average_of_the_models_to_the_last_bit():
    models = {"w": normal(fold(KEY, "w"), (5, 40), torch.float32)}
    weight, received = torch.tensor([3.0, 1, 4, 1, 5]), {"w": torch.full((40,), 0.1)}
    found, state = combine(Mean(), received, models, weight, KEY, None)
    assert torch.equal(found["w"], average(models, weight)["w"])
    assert state is None


@pytest.mark.parametrize(("count", "expected"), [(3, [3.0, 20.0]), (4, [4.0, 25.0])])
def test_the_median_of_every_parameter(count, expected):
    rows = torch.tensor([[1.0, 20.0], [100.0, -7.0], [3.0, 30.0], [5.0, 40.0]])[:count]
    found, _ = combine(Median(), torch.tensor([0.5, 0.25]), rows, torch.ones(count), KEY, None)
    assert found.tolist() == expected


def test_the_server_s_tree_is_the_model_unless_a_rule_keeps_a_state():
    model = {"w": torch.ones(3)}
    reply = Update({"w": torch.full((2, 3), 2.0)}, torch.ones(2))
    for rule in (Mean(), Median()):
        assert first_server(rule, model) is model
        assert next_server(rule, model, reply, KEY)["w"].tolist() == [2.0] * 3
    server = first_server(Momentum(), model)
    assert isinstance(server, Averaged)
    assert model_of(server) is model
    assert with_model(server, {"w": torch.zeros(3)}).rule is server.rule
    after = next_server(Momentum(), server, reply, KEY)
    assert int(after.rule.rounds) == 1
    assert after.model["w"].tolist() == pytest.approx([2.0] * 3, abs=0.01)
    assert torch.equal(after.model["w"], next_server(Momentum(), server, reply, KEY).model["w"])
    other = next_server(Momentum(), server, reply, fold(KEY, 1)).model["w"]
    assert not torch.equal(after.model["w"], other), "the key does not reach the rule"


AVERAGING = [
    name for name, cls in METHODS.items() if any(f.name == "aggregate" for f in fields(cls))
]


def small(name, **settings):
    cls = METHODS[name]
    net = NETS[(*cls.nets, "gcn")[0]](FEATURES, CLASSES, hidden=5, dropout=0.4)
    if cls is FedProto:
        settings["share_weights"] = True
    return cls(net=net, **settings)


def test_all_averaging_methods_have_the_door():
    assert "fedavg" in AVERAGING
    for name in {*METHODS} - {*AVERAGING}:
        assert "`aggregate`" not in METHODS[name].not_averaging, f"{name} must give its reason"


def memory_in(server):
    """The rule's state, wherever a method keeps it."""
    while hasattr(server, "base"):
        server = server.base
    return server.rule


@pytest.mark.parametrize("name", [*AVERAGING, "fedtad on fedavg"])
def test_a_rule_with_a_state_runs_with_every_averaging_method(name, tmp_path):
    with double_precision():
        if " on " in name:
            method = small("fedtad", base=small("fedavg", aggregate=Momentum()))
        else:
            method = small(name, aggregate=Momentum())
        plain = replace(method, aggregate=Mean())
        plain = replace(plain, base=small("fedavg")) if " on " in name else plain
        federation = small_federation()
        runs = [
            Experiment(method, federation, rounds=3, engine=engine).run()
            for engine in ("serial", "fused")
        ]
        for one, other in zip(*(leaves(run.server) for run in runs), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-9)
        assert int(memory_in(runs[0].server).rounds) == 3
        # The state stays on the server: as many bytes cross as with the mean.
        usual = Experiment(plain, federation, rounds=3, engine="serial").run()
        assert list(usual.ledger.rows()) == list(runs[0].ledger.rows())
        count, path = itertools.count(), tmp_path / "checkpoint"
        experiment = Experiment(method, federation, rounds=3, engine="serial")
        experiment.run(checkpoint=path, should_stop=lambda: next(count) >= 1)
        resumed = experiment.run(checkpoint=path)
        for one, other in zip(leaves(resumed.server), leaves(runs[0].server), strict=True):
            assert torch.equal(one, other)


def test_privacy_accepts_only_rules_that_read_the_mean():
    method = small("fedavg", aggregate=Adaptive(lr=0.1))
    assert Noised(net=method.net, base=method, clip=1.0, noise=1.0).base is method
    method = small("fedavg", aggregate=Median())
    with pytest.raises(ConfigError, match=r"only aggregate=mean.*remove --set aggregate"):
        Noised(net=method.net, base=method, clip=1.0, noise=1.0)


def test_a_rule_of_the_mean_gives_the_same_step_for_stacked_updates():
    rule, weight = Adaptive("yogi", lr=0.5), torch.tensor([3.0, 5.0, 2.0])
    state = rule.init(MODELS[0])
    found, after = rule(MODELS, weight, make_key(0), state)
    wanted, moments = rule.step(average(MODELS, weight), state)
    assert torch.equal(found, wanted)
    assert torch.equal(after.square, moments.square)


@pytest.mark.parametrize("base", [Mean, Adaptive])
@pytest.mark.parametrize("name", ["__call__", "combined"])
def test_a_rule_of_the_mean_cannot_read_single_updates(base, name):
    with pytest.raises(ConfigError, match=r"Own derives from OfMean.*define `step`, or derive"):
        type("Own", (base,), {name: lambda self, updates, *rest: updates})
    mixin = type("Mixin", (), {name: lambda self, updates, *rest: updates})
    with pytest.raises(ConfigError, match="read only the mean"):
        type("Own", (mixin, base), {})


def test_models_of_a_reply_in_another_order_meet_their_own():
    received = {"a": torch.zeros(2), "b": torch.full((2,), 10.0)}
    replies = {"b": torch.full((3, 2), 11.0), "a": torch.ones(3, 2)}
    rule = Adaptive("sgd", lr=1.0)
    found, _ = combine(rule, received, replies, torch.ones(3), make_key(0), rule.init(received))
    assert found["a"].tolist() == [1, 1]
    assert found["b"].tolist() == [11, 11]


def test_a_server_of_another_rule_is_refused():
    method = small("fedavg", aggregate=Adaptive())
    with pytest.raises(ConfigError, match="began with another rule; start the run again"):
        aggregated(method.aggregate, MODELS[0], Update(MODELS, torch.ones(3)), make_key(0))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"optimizer": "adagrat"}, "unknown optimizer 'adagrat'; did you mean 'adagrad'"),
        ({"lr": -1.0}, "lr is -1.0; give a positive learning rate"),
        ({"beta1": 1.0}, "beta1 is 1.0; give"),
        ({"tau": 1e300}, "tau is 1e.300; give a positive number up to a million"),
    ],
)
def test_a_wrong_parameter_of_the_server_is_one_sentence(values, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Adaptive(**values)


def test_fedproto_takes_a_rule_only_where_it_averages_models():
    with pytest.raises(ConfigError, match="share_weights"):
        FedProto(NETS["gcn"](FEATURES, CLASSES), aggregate=Median())


def test_a_base_s_rule_is_its_own():
    net = NETS["gcn"](FEATURES, CLASSES)
    assert FedTAD(net, base=FedAvg(net, aggregate=Median())).base.aggregate == Median()
