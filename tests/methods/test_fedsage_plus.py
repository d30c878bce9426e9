"""FedSage+: the card's golden numbers, the mended graph, the exchange, and what may leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph
from atoll.core.message import ToAll, ToEach
from atoll.core.random import fold, make_key
from atoll.core.tree import Empty, Tree, leaves, named_leaves, stack, structure, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.clients import Participants, Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config, resolve
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import METHODS, FedSage, FedSagePlus
from atoll.methods.fedsage_plus import Learning, Mended, Pull, Seen
from atoll.nn import GCN, GraphSAGE
from atoll.nn.neighgen import (
    NeighGen,
    feature_loss,
    gathered,
    given_back,
    hide_nodes,
    made_neighbours,
    mended_sage,
)
from atoll.testing import CLASSES, FEATURES, double_precision, small_federation
from tests.nn.neighgen_sizes import NET, SMALL

engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def plus(**more: Any) -> FedSagePlus:
    return FedSagePlus(NET, **{**SMALL, **more})


def ready(method: FedSagePlus, federation: Federation | None = None) -> tuple[Graph, ...]:
    return (federation or small_federation()).prepared(method.views).graphs


def run(method: FedSagePlus | FedSage, engine: str = "fused", rounds: int = 3, **more: Any) -> Run:
    return Experiment(method, small_federation(), rounds=rounds, engine=engine, **more).run()


@pytest.fixture
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators that give every node a few neighbours from the start."""
    plain = NeighGen.init

    def init(self: NeighGen, key: Tensor) -> Tree:
        params = plain(self, key)
        params["degree"]["bias"] = params["degree"]["bias"] + 1.5
        return params

    monkeypatch.setattr(NeighGen, "init", init)


def close(a: Tree, b: Tree, tolerance: float = 1e-12) -> None:
    assert structure(a) == structure(b)
    for one, other in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def differ(a: Tree, b: Tree) -> bool:
    return any(not torch.allclose(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


# The card's numbers


@pytest.mark.parametrize(("compat", "mean"), [("none", [0.25, 0.75]), ("one-directional", [0, 1])])
def test_the_mean_over_neighbours_of_the_card(compat: str, mean: list[float]) -> None:
    net = GraphSAGE(2, 2, layers=1)
    x = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    graph = make_graph(x, torch.tensor([[0, 1], [1, 0]]), torch.zeros(2).long(), views=net.views)
    layer = {"neighbour": torch.eye(2), "self": torch.zeros(2, 2), "bias": torch.zeros(2)}
    used = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    read = used * FedSagePlus(net, compat=compat)._both_ways
    made = made_neighbours(torch.full((2, 2, 2), 0.5), read)
    heard = mended_sage(net, [layer], graph, graph.real, made, None)
    assert heard.tolist() == [pytest.approx(mean), [1, 1]]


def test_sizes_of_the_paper() -> None:
    params = NeighGen(1433, wide=2048).init(make_key(0))
    count = {name: sum(leaf.numel() for leaf in leaves(part)) for name, part in params.items()}
    assert count["features"] == 15_240_445
    assert sum(count.values()) == 15_440_574


# The mended graph


@pytest.mark.parametrize("compat", ["none", "one-directional"])
def test_a_generated_feature_reaches_its_node_unless_the_fault_is_on(compat: str) -> None:
    method = plus(compat=compat)
    graph = ready(method)[0]
    generator = method.neighgen.init(make_key(5))
    made = method.mend(graph, generator, make_key(6))
    _, lost = method.neighgen.encode(generator, graph, graph.real)
    node = int(lost.argmax())
    assert float(lost[node]) >= 1
    params = method.net.init(make_key(7))

    def logits(x: Tensor) -> Tensor:
        around = made_neighbours(x, made.linked)
        return mended_sage(method.net, params, graph, graph.real, around, None)

    changed = made.x.clone()
    changed[node, 0] += 1
    moved = (logits(changed) - logits(made.x)).abs().sum(1)
    # Two layers reach only the node and its neighbours.
    near = {node, *graph.edges[1][graph.edges[0] == node].tolist()}
    expected = near if compat == "none" else set()
    assert set(moved.nonzero().squeeze(1).tolist()) == expected


def test_every_node_of_the_whole_graph_is_mended_and_always_alike() -> None:
    made = run(plus())
    method, states = made.experiment.method, made.simulation.engine.export_states()
    graph, state = made.simulation.engine.graphs[0], states[0]
    one, two = (method.mend(graph, state.generator, state.seed) for _ in range(2))
    assert torch.equal(one.x, two.x)
    hidden = graph.real - hide_nodes(state.seed, graph, method.hide, 1).kept
    # A generator that gives each node two: also those that were hidden, and the isolated last.
    params = tree_map(torch.clone, state.generator)
    params["degree"] = {"weight": torch.zeros(5, 1), "bias": torch.tensor([2.9])}
    assert float(hidden.sum()) > 0
    assert method.mend(graph, params, state.seed).linked.sum(1).tolist() == [2.0] * 13


# Only used neighbours are made


@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("compat", ["none", "one-directional"])
def test_what_nobody_hears_need_not_be_made(compat: str) -> None:
    method = plus(compat=compat)
    graph = ready(method)[2]
    generator, params = method.neighgen.init(make_key(5)), method.net.init(make_key(7))
    every = method.mend(graph, generator, make_key(6))
    few = method.mend(graph, generator, make_key(6), sparing=True)
    assert few.places is not None
    assert len(few.x) == max(1, int(every.linked.sum()))
    for noise in (None, make_key(9)):  # a made node drops what it would drop among all
        one, two = (
            torch.func.vjp(
                lambda p, made=made, noise=noise: mended_sage(
                    method.net, p, graph, graph.real, made, noise
                ),
                params,
            )
            for made in (every, few)
        )
        close(one[0], two[0])
        close(one[1](torch.cos(one[0])), two[1](torch.cos(one[0])))


@pytest.mark.usefixtures("generous")
@engines
@pytest.mark.parametrize("bias", [-9.0, 0.0, 9.0])
def test_a_run_is_the_same_if_everything_is_made(
    engine: str, bias: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few, some or all slots are used, and clients of one program use different numbers."""
    plain = NeighGen.init

    def init(self: NeighGen, key: Tensor) -> Tree:
        params = plain(self, key)
        params["degree"]["bias"] = params["degree"]["bias"] + bias
        return params

    monkeypatch.setattr(NeighGen, "init", init)
    found = run(plus(), engine, fraction=0.75)
    monkeypatch.setattr("atoll.methods.fedsage_plus.used_places", lambda used: None)
    expected = run(plus(), engine, fraction=0.75)
    close(found.server, expected.server, 1e-10)
    states = (r.simulation.engine.export_states() for r in (found, expected))
    close(*([s.generator for s in some if s is not None] for some in states), 1e-10)


def test_a_graph_is_mended_once_and_again_after_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    plain = FedSagePlus.derive

    def derive(self: FedSagePlus, graph: Graph, part: Tree) -> Any:
        if "features" in part[0]:  # the rest is derived while generators train
            calls.append(len(calls))
        return plain(self, graph, part)

    monkeypatch.setattr(FedSagePlus, "derive", derive)
    made = Experiment(plus(), small_federation(), rounds=9).begin()
    made.start()
    found = []
    for number in range(9):
        if number == 5:  # like a run that continues from a checkpoint
            engine = made.simulation.engine
            engine.import_states([tree_map(torch.clone, s) for s in engine.export_states()])
        made.advance()
        found.append(len(calls))
    programs = len(made.simulation.engine.programs())
    # Once by itself, when it is first trained on; then the engine keeps it for all that follow.
    assert found[0] == 2 * programs
    assert found[1:5] == [found[0]] * 4
    assert found[5] > found[4]
    assert found[6:] == [found[5]] * 3
    # Where it is too much to keep it is made for every step, with the same numbers.
    monkeypatch.setattr("atoll.engines.programs.MOST_DERIVED", 0)
    calls.clear()
    again = run(plus(), rounds=9)
    assert len(calls) == 3 * 9 * programs
    close(again.server, made.server)


def test_a_generator_that_changes_is_not_taken_for_the_old_one() -> None:
    simulation = Simulation(small_federation(), plus())
    method, engine = plus(), simulation.engine
    method.round(method.init(simulation.clients(-1)), simulation.clients(0))
    members, states = next(iter(engine.states.stacks.items()))
    graph = engine._graph(members)
    given = (method, members, graph)
    kept = engine.derived.added(*given, states).derived
    assert engine.derived.added(*given, states).derived is kept
    states.generator["features"][0]["bias"].add_(1)
    changed = engine.derived.added(*given, states).derived
    assert changed is not kept
    assert not torch.equal(changed.x, kept.x)


def test_what_stays_the_same_in_exchanges_is_derived_once() -> None:
    simulation = Simulation(small_federation(), plus())
    method, engine, everyone = plus(), simulation.engine, simulation.clients(0)
    shown = everyone.map(method.learn, ToAll(Empty())).x
    members, states = next(iter(engine.states.stacks.items()))
    given = (method, members, engine._graph(members))
    kept = engine.derived.added(*given, states).derived
    assert isinstance(kept, Seen)
    pull = Pull(torch.ones_like(shown), shown.new_full((len(shown),), 1 / len(shown)))
    everyone.map(method.pull, ToEach(pull))
    after = engine.states.stacks[members]
    old, new = (leaves(state.generator["features"]) for state in (states, after))
    assert any(not torch.equal(*pair) for pair in zip(old, new, strict=True))
    assert engine.derived.added(*given, after).derived is kept


# What is hidden, and what is drawn


@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        ("lam_d", {"encoder", "degree"}),
        ("lam_f", {"encoder", "features"}),
        ("lam_c", {"encoder", "features", "classifier"}),
    ],
)
def test_every_loss_teaches_its_own_parts(loss: str, parts: set[str]) -> None:
    silent = plus(lam_d=0.0, lam_f=0.0, lam_c=0.0)
    graph = ready(silent)[2]
    still, taught = (
        method._learned(graph, None, make_key(4)).generator
        for method in (silent, replace(silent, **{loss: 1.0}))
    )
    assert {name for name in still if differ(still[name], taught[name])} == parts


# The exchange


@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("compat", ["none", "last"])
def test_an_exchange_gives_the_gradient_of_the_joint_loss(compat: str) -> None:
    method = plus(compat=compat, lam_f=0.7)
    graphs = ready(method)
    keys = [make_key(10 + i) for i in range(len(graphs))]
    replies, states = zip(
        *(method.learn(g, Empty(), None, k) for g, k in zip(graphs, keys, strict=True)), strict=True
    )
    shown = stack([reply.x for reply in replies])
    asked = [fold(key, "ask") for key in keys]
    answers = [
        method.answer(g, shown, None, k)[0].slopes for g, k in zip(graphs, asked, strict=True)
    ]
    moved = 0
    for i, (graph, state) in enumerate(zip(graphs, states, strict=True)):
        others = sum(answer[i] for j, answer in enumerate(answers) if j != i)
        pull = Pull(others, torch.tensor(1 / len(graphs)))
        _, after = method.pull(graph, pull, state, make_key(99))
        lost = hide_nodes(state.seed, graph, method.hide, method.p_max)
        seen = Seen(lost, *method.neighgen.encode(state.generator, graph, lost.kept))
        drawn = method._sample(graph, seen, state.shown)
        strangers = [method._strangers(g, 7, k) for g, k in zip(graphs, asked, strict=True)]
        candidates = [(graph.views["rows"][lost.index[drawn.nodes]], lost.there[drawn.nodes])]
        candidates += [one for j, one in enumerate(strangers) if j != i]

        def joint(layers: Tree, drawn: Any, candidates: Any) -> Tensor:
            made = method.neighgen.make(layers, drawn.z)
            losses = [
                feature_loss(made, true, drawn.used, there, torch.ones(7), compat == "last")
                for true, there in candidates
            ]
            return 0.7 * sum(losses) / len(candidates)

        layers = state.generator["features"]
        slope = torch.func.grad(joint)(layers, drawn, candidates)
        # Adam's first mean is a tenth of its first gradient, weight decay included.
        found = tree_map(lambda m, p: m / 0.1 - 1e-4 * p, after.moments.mean, layers)
        close(found, slope, 1e-14)
        moved += any(bool(leaf.any()) for leaf in leaves(slope))
        # Everything else stays as it was.
        for part in ("encoder", "degree", "classifier"):
            close(after.generator[part], state.generator[part], 0.0)
    assert moved >= 3


def test_answers_are_given_to_used_slots_alone() -> None:
    method = plus()
    graph = ready(method)[1]
    shown = torch.rand(2, 7, 3, FEATURES)
    shown[0, 1, 2] = 0
    answer = method.answer(graph, shown, None, make_key(1))[0].slopes
    silent = (answer == 0).all(-1)
    assert silent.sum() == 1
    assert bool(silent[0, 1, 2])
    # A client without edges has no neighbours to compare with.
    alone = make_graph(graph.x, graph.edges[:, :0], graph.y, views=method.views)
    assert not method.answer(alone, shown, None, make_key(1))[0].slopes.any()


@pytest.mark.usefixtures("generous")
@engines
def test_no_row_of_features_is_sent_as_it_is(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str, Tensor]] = []
    plain = Participants.map

    def spy(self: Participants, step: Any, message: Any) -> Any:
        reply = plain(self, step, message)
        for name, leaf in named_leaves(reply):
            sent.append((step.name, name, leaf))
            wide = leaf.shape[-1:] == (FEATURES,) and leaf.dim() > 3
            assert not wide or name in step.discloses
        return reply

    monkeypatch.setattr(Participants, "map", spy)
    run(plus(exchanged_nodes=20), engine, fraction=0.75)
    rows = torch.cat([graph.x for graph in small_federation().graphs])
    checked = 0
    for step, name, leaf in sent:
        if leaf.shape[-1:] != (FEATURES,):
            continue
        found = leaf.reshape(-1, FEATURES)
        found = found[found.any(-1)]
        # Neither a row nor a multiple of one.
        alike = torch.nn.functional.cosine_similarity(found.unsqueeze(1), rows, dim=-1).abs()
        assert not bool((alike > 1 - 1e-9).any()), (step, name)
        checked += len(found)
    assert checked > 100
    assert {step for step, *_ in sent} >= {"learn", "answer", "pull", "train"}


@pytest.mark.usefixtures("generous")
def test_a_client_is_pulled_by_the_others_and_not_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[tuple[str, Any, Any]] = []
    plain = Participants.map

    def spy(self: Participants, step: Any, message: Any) -> Any:
        messages.append((step.name, message.tree, plain(self, step, message)))
        return messages[-1][2]

    monkeypatch.setattr(Participants, "map", spy)
    method = plus()
    simulation = Simulation(small_federation(), method)
    server = method.init(simulation.clients(-1))
    method.round(server, Participants(simulation, 0, torch.tensor([0, 1, 3])))
    names = [name for name, *_ in messages]
    assert names == ["learn", "answer", "pull", "answer", "pull", "train"]
    moved = [reply.x for name, _, reply in messages if name in ("learn", "pull")]
    for x, (_, asked, reply), (_, pull, _) in zip(
        moved, messages[1:5:2], messages[2:5:2], strict=False
    ):
        to = dict(enumerate((0, 1, 3)))
        # Only used slots are sent, plus zeros: fewer rows than 3 clients' 3 slots.
        shown, places = gathered(x)
        assert torch.equal(asked, shown)
        assert torch.equal(given_back(shown, places, x.shape), x)
        assert len(asked) < 9
        by = torch.stack([given_back(one, places, x.shape) for one in reply.slopes])
        assert bool(shown.any())
        for i, position in to.items():
            others = sum(by[j, i] for j in to if j != i)
            torch.testing.assert_close(pull.slopes[position], others)
        assert not pull.slopes[2].any()
        assert pull.share.tolist() == [pytest.approx(1 / 3)] * 4
        assert bool(pull.slopes[0].any())


# Phases and participants


@engines
def test_with_the_fault_fedsage_plus_is_fedsage(engine: str) -> None:
    # Every round trains the classifier, with the same keys; so dropout may be on.
    for compat in ("one-directional", "openfgl"):
        deaf, sage = run(plus(compat=compat), engine, fraction=0.75), run(
            FedSage(NET), engine, fraction=0.75
        )  # fmt: skip
        close(deaf.server, sage.server)
        for scored, rounds in sage.history.scores.items():
            for one, other in zip(rounds, deaf.history.scores[scored], strict=True):
                torch.testing.assert_close(*map(torch.from_numpy, (one, other)), equal_nan=True)
    assert differ(run(plus(), engine, fraction=0.75).server, sage.server)


def test_the_last_candidate_makes_another_generator() -> None:
    nearest, last = (run(plus(compat=compat)) for compat in ("none", "last"))
    assert differ(nearest.server, last.server)


def test_the_classifier_waits_for_the_generators() -> None:
    method = plus(generator_rounds=3)
    simulation = Simulation(small_federation(), method)
    start = method.init(simulation.clients(-1))
    server = start
    for number in range(5):
        clients = simulation.clients(number)
        before, server = server, method.round(server, clients)
        states = simulation.engine.export_states()
        if number < 2:
            assert server is start
            assert "train" not in clients.replies
            assert all(isinstance(state, Learning) for state in states)
        else:
            assert differ(before, server)
            assert all(isinstance(state, Mended) for state in states)
        assert ("learn" in clients.replies) == (number < 3)
    # Four parts learn; three of them are kept to mend.
    assert set(states[0].generator) == {"encoder", "degree", "features"}
    assert float(states[0].moments.steps) == 9


def test_before_a_graph_is_mended_it_is_read_as_it_is() -> None:
    method = plus()
    graph = ready(method)[0]
    params = method.net.init(make_key(2))
    plain = method.net(params, graph)
    _, learning = method.learn(graph, Empty(), None, make_key(3))
    for state in (None, learning):
        assert torch.equal(method.predict(graph, params, state), plain)
    _, mended = method.train(graph, params, learning, make_key(4))
    assert not torch.allclose(method.predict(graph, params, mended), plain)


@engines
def test_only_participants_exchange_and_the_others_wait(engine: str) -> None:
    method, whole = plus(), small_federation()
    simulation = Simulation(whole, method, engine=engine)
    server = method.init(simulation.clients(-1))
    some = Participants(simulation, 0, torch.tensor([1, 3]))
    trained = method.round(server, some)
    states = simulation.engine.export_states()
    assert [state is None for state in states] == [True, False, True, False]
    # The same two in a federation of their own learn the same.
    pair = Federation((whole.graphs[1], whole.graphs[3]), CLASSES, numbers=(1, 3))
    alone = Simulation(pair, method, engine=engine)
    close(method.round(server, alone.clients(0)), trained)
    close(alone.engine.export_states(), [states[1], states[3]])
    # A late client learns by itself, then mends. An absent client stays unchanged.
    late = Participants(simulation, 1, torch.tensor([0, 1]))
    method.round(trained, late)
    after = simulation.engine.export_states()
    assert isinstance(after[0], Mended)
    assert after[2] is None
    close(after[3], states[3], 0.0)
    close(after[1].generator, states[1].generator, 0.0)
    key = fold(fold(simulation.root, "step", "train", 1, 0), torch.tensor(0))
    expected = method._learned(ready(method)[0], None, fold(key, "alone"))
    close(after[0].generator["features"], expected.generator["features"], 1e-9)


def test_a_client_with_nothing_to_hide_still_trains() -> None:
    graphs = tuple(
        replace(g, train=1 - g.test, val=torch.zeros_like(g.val))
        for g in small_federation().graphs
    )  # fmt: skip
    made = Experiment(plus(), Federation(graphs, CLASSES), rounds=2).run()
    shown = made.simulation.engine.export_states()
    assert all(isinstance(state, Mended) for state in shown)
    assert all(bool(torch.isfinite(leaf).all()) for leaf in leaves(made.server))


# Configuration


def test_it_is_called_as_its_paper_calls_it() -> None:
    assert METHODS["fedsage+"] is FedSagePlus
    config, _ = resolve(make_config(method="FedSage+", set={"preset": "paper", "compat": "last"}))
    method = build_method(config, features=5, classes=3)
    assert (method.narrow, method.wide, method.compat) == (256, 2048, "last")
    assert isinstance(method.net, GraphSAGE)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"generator_rounds": 0}, "generator_rounds is 0; give at least 1"),
        ({"exchanged_nodes": 0}, "exchanged_nodes is 0; give at least 1"),
        ({"p_max": 0}, "p_max is 0; give at least 1"),
        ({"latent": 0}, "latent is 0; give at least 1"),
        ({"narrow": 0}, "narrow is 0; give at least 1"),
        ({"wide": -1}, "wide is -1; give at least 1"),
        ({"generator_epochs": -1}, "generator_epochs is -1; give 0 or more"),
        ({"exchanges": -1}, "exchanges is -1; give 0 or more"),
        ({"hide": 0.0}, "hide is 0.0; give a share between 0 and 1"),
        ({"hide": 1.0}, "hide is 1.0; give a share between 0 and 1"),
    ],
)
def test_values_that_make_no_sense_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plus(**given)


def test_another_network_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fedsage\+ trains a GraphSAGE; use --set net=sage"):
        FedSagePlus(GCN(FEATURES, CLASSES))
