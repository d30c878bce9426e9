"""AdaFGL: the card's golden numbers, what it reduces to, and its two steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, make_graph, with_views
from atoll.core.losses import cross_entropy
from atoll.core.message import ToAll
from atoll.core.optim import Adam
from atoll.core.random import make_key
from atoll.core.tree import Empty, Tree, leaves, num_bytes
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config, resolve
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import AdaFGL, FedAvg
from atoll.methods.adafgl import (
    Private,
    Start,
    mix_heads,
)
from atoll.nn import GCN, ChebNet, views
from atoll.nn.adafgl import (
    Similarity,
    Surroundings,
    accuracy,
    directions,
    homophily,
    propagate_labels,
    propagation,
)
from atoll.testing import (
    CLASSES,
    FEATURES,
    check_method,
    double_precision,
    relabelled,
    small_federation,
)

engines = pytest.mark.parametrize("engine", ENGINES)
NET = GCN(FEATURES, CLASSES, hidden=6)
SHORT = AdaFGL(NET, federated_rounds=2, personal_epochs=2)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def run(method: Any, rounds: int, engine: str = "fused", **more: Any) -> Run:
    return Experiment(method, small_federation(), rounds=rounds, engine=engine, **more).run()


def same(a: Tree, b: Tree) -> bool:
    return len(leaves(a)) == len(leaves(b)) and all(map(torch.equal, leaves(a), leaves(b)))


def states(made: Run) -> list[Private]:
    return made.simulation.engine.export_states()


def on_client(method: AdaFGL, number: int = 0) -> Graph:
    return with_views(small_federation().graphs[number], method.views)


def adapted(method: AdaFGL, confidence: float = 0.5) -> Private:
    heads = method.adaptive.init(make_key(3))
    return Private(None, NET.init(make_key(2)), heads, torch.tensor(confidence))


def around(method: AdaFGL, model: Tree, graph: Graph) -> Surroundings:
    return method.adaptive.surroundings(NET(model, graph), graph)


# Golden numbers of the card.

BELIEF = [[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.1, 0.9]]


def card_graph() -> Graph:
    one_way = torch.tensor([[0, 0, 1, 2, 3], [1, 2, 2, 3, 4]])
    return make_graph(
        torch.arange(10.0).reshape(5, 2) / 10,
        torch.cat([one_way, one_way.flip(0)], dim=1),
        torch.tensor([0, 0, 0, 1, 1]),
        train=torch.tensor([1, 1, 0, 1, 1]),
        views={"plain": views.plain_adjacency, "gcn": views.gcn_adjacency},
    )


def test_golden_label_propagation():
    graph = card_graph()
    labels = functional.one_hot(graph.y, 2).double()
    seeds = torch.tensor([1.0, 0, 0, 0, 1])
    y = propagate_labels(graph.views["gcn"], labels, seeds)
    expected = [
        [2.123163, 0.179683], [0.873163, 0.429683], [0.858987, 0.542189], [0.480558, 0.946639],
        [0.130608, 2.257419],
    ]  # fmt: skip
    np.testing.assert_allclose(y.numpy(), expected, atol=1e-6)
    assert float(accuracy(y, labels, graph.train - seeds)) == 1


def test_golden_confidence_is_drawn_from_the_training_nodes():
    # Which half is drawn depends on the key: over many, each of the six halves comes up.
    graph = card_graph()
    labels = functional.one_hot(graph.y, 2).double()
    by_half = {}
    for pair in torch.combinations(torch.tensor([0, 1, 3, 4])):
        seeds = torch.zeros(5).index_fill(0, pair, 1.0)
        y = propagate_labels(graph.views["gcn"], labels, seeds)
        by_half[tuple(pair.tolist())] = float(accuracy(y, labels, graph.train - seeds))
    assert by_half[0, 4] == 1
    found = {round(float(homophily(graph, 2, make_key(n))), 9) for n in range(60)}
    assert found == {round(value, 9) for value in by_half.values()}
    assert len(found) > 1


def test_golden_similarity_and_propagation():
    graph = card_graph()
    q = directions(torch.tensor(BELIEF), graph.real)
    first = Similarity(q).times(torch.eye(5))[0]
    np.testing.assert_allclose(first, [0, 0.990992, 0.888218, 0.493013, 0.219512], atol=1e-6)
    once = propagation(graph.views["plain"], Similarity(q), graph.real, alpha=0.5)(graph.x)
    expected = [
        [0.235122, 0.331601], [0.260151, 0.359035], [0.371787, 0.481125], [0.551101, 0.653283],
        [0.557274, 0.648177],
    ]  # fmt: skip
    np.testing.assert_allclose(once.numpy(), expected, atol=1e-6)


def test_golden_mix():
    mixed = mix_heads(torch.tensor(0.6), torch.tensor([0.7, 0.3]), torch.tensor([0.2, 0.8]))
    np.testing.assert_allclose(mixed, [0.5, 0.5], atol=1e-12)


# Confidence.


def test_halves_follow_the_nodes_and_ties_are_a_fair_draw():
    graph, key = on_client(SHORT, 2), make_key(7)
    moved = with_views(relabelled(small_federation().graphs[2], 1), SHORT.views)
    assert torch.allclose(homophily(graph, CLASSES, key), homophily(moved, CLASSES, key))
    # Without edges nothing arrives anywhere: every class is as likely as any other.
    alone = replace(graph, edges=graph.edges[:, :0], edge_weight=graph.edge_weight[:0])
    alone = with_views(alone, SHORT.views)
    assert float(homophily(alone, CLASSES, key)) == pytest.approx(1 / CLASSES)


def test_a_client_without_training_labels_trusts_the_global_model():
    graph = on_client(SHORT)
    nothing = replace(graph, train=torch.zeros_like(graph.train))
    assert float(homophily(nothing, CLASSES, make_key(0))) == 1


# Step 1.


@engines
@pytest.mark.parametrize("moments", ["keep", "reset"])
def test_before_step_two_it_is_fedavg_bit_for_bit(engine, moments):
    ours = run(AdaFGL(NET, optimizer_state=moments), 3, engine, fraction=0.75)
    fedavg = run(FedAvg(NET, optimizer_state=moments), 3, engine, fraction=0.75)
    assert same(ours.server.model, fedavg.server)
    for scored, rounds in fedavg.history.scores.items():
        np.testing.assert_array_equal(rounds, ours.history.scores[scored])
    kept = [state is not None and state.moments is not None for state in states(ours)]
    assert any(kept) == (moments == "keep")


def federated(method: AdaFGL) -> tuple[list[Tree], list[float]]:
    """The global model after every round of step 1, and its validation accuracy."""
    simulation = Simulation(small_federation(), method)
    server = method.init(simulation.clients(-1))
    models, scores = [], []
    for number in range(method.federated_rounds):
        server = method.round(server, simulation.clients(number))
        seen = simulation.clients(number).map(method.validate, ToAll(server.model))
        assert seen.total.tolist() == [float(g.val.sum()) for g in small_federation().graphs]
        models.append(server.model)
        scores.append(float(seen.right.sum() / seen.total.sum()))
    return models, scores


def test_the_best_round_by_validation_is_kept():
    # Long steps lead up and down: with some rate the best round is neither the first nor the last.
    for lr in (0.1, 0.2, 0.5, 1.0):
        wild = AdaFGL(NET, Adam(lr=lr), federated_rounds=7)
        models, scores = federated(wild)
        best = int(np.argmax(scores))
        if scores[best] > max(scores[0], scores[-1]):
            break
    assert scores[best] > max(scores[0], scores[-1])
    made = run(replace(wild, keep="best"), 8)
    assert same(made.server.model, models[best])
    assert float(made.server.score) == pytest.approx(scores[best])
    assert all(same(state.model, models[best]) for state in states(made))


def test_the_right_are_counted_among_the_validation_nodes_alone():
    graph, model = on_client(SHORT), NET.init(make_key(2))
    reply, _ = SHORT.validate(graph, model, None, make_key(0))
    guess = NET(model, graph).argmax(-1)
    assert float(reply.right) == float(((guess == graph.y) & (graph.val > 0)).sum())
    assert 0 < float(reply.right) < float(reply.total)


# Step 2.


def test_the_wire_is_empty_once_everybody_has_the_model():
    made = run(SHORT, 5)
    size = num_bytes(made.server.model)
    per_round = {(row.round, row.step): (row.down, row.up) for row in made.ledger.entries}
    weight = torch.zeros(()).element_size()
    assert [per_round[number, "train"] for number in range(5)] == [
        (size, size + weight), (size, size + weight), (size, 0), (0, 0), (0, 0)
    ]  # fmt: skip


@engines
def test_latecomers_get_the_model_and_the_absent_wait(engine):
    simulation = Simulation(small_federation(), SHORT, engine=engine)
    server = SHORT.init(simulation.clients(-1))
    for number in range(2):
        server = SHORT.round(server, simulation.clients(number))
    final = server.model
    begun: set[int] = set()
    for number in range(2, 9):
        some = simulation.clients(number).sample(0.5)
        present = set(some.positions.tolist())
        before = simulation.engine.export_states()
        server = SHORT.round(server, some)
        after = simulation.engine.export_states()
        begun |= present
        assert same(server.model, final)
        assert {p for p, flag in enumerate(server.ready.tolist()) if flag} == begun
        for position in range(4):
            assert same(before[position], after[position]) == (position not in present)
            assert (after[position].confidence is not None) == (position in begun)
    assert len(begun) == 4
    assert all(same(state.model, final) for state in simulation.engine.export_states())


def test_step_two_is_scored_from_one_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = AdaFGL._outputs

    def outputs(self: AdaFGL, *given: Any) -> Any:
        calls.append(len(calls))
        return plain(self, *given)

    monkeypatch.setattr(AdaFGL, "_outputs", outputs)
    fused = run(SHORT, 5)
    # A client's deployed and local model are the same there, and the engine keeps the outputs.
    assert len(calls) == 3 * len(fused.simulation.engine.programs())
    calls.clear()
    serial = run(SHORT, 5, "serial")
    assert len(calls) == 2 * 3 * len(serial.history.nodes)
    for model in ("deployed", "local"):
        found, expected = (made.history.array(model, "loss", "test") for made in (fused, serial))
        np.testing.assert_allclose(found, expected, atol=1e-9)


def test_confidence_stays_and_moments_grow():
    short, long = states(run(SHORT, 3)), states(run(SHORT, 5))
    for early, late in zip(short, long, strict=True):
        assert torch.equal(early.confidence, late.confidence)
        assert [float(s.moments.steps) for s in (early, late)] == [2, 6]
    assert len({float(state.confidence) for state in long}) > 1


def test_a_client_that_never_heard_of_the_model_waits():
    graph = on_client(SHORT)
    reply, state = SHORT.train(graph, Empty(), None, make_key(0))
    assert isinstance(reply, Empty)
    assert state is None
    _, state = SHORT.train(graph, Start(NET.init(make_key(0))), None, make_key(0))
    assert state.confidence is not None


def test_local_scores_are_those_of_the_personal_model():
    made = run(SHORT, 4)
    deployed, local = (made.history.scores[scored] for scored in ("deployed", "local"))
    assert not np.array_equal(deployed[1], local[1])
    np.testing.assert_array_equal(deployed[2], local[2])
    assert not np.array_equal(deployed[2], deployed[3])


# What a client predicts.


def test_clients_without_heads_predict_with_the_global_model():
    graph, model = on_client(SHORT), NET.init(make_key(2))
    for state in (None, Private(None)):
        assert torch.equal(SHORT.predict(graph, model, state), NET(model, graph))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    ("switch", "confidence", "trust"),
    [("mix", 0.95, 0.95), ("mix", 0.3, 0.3), ("hard", 0.9, 1.0), ("hard", 0.89, 0.0)],
)
def test_the_prediction_is_the_mixture(switch, confidence, trust, double):
    method = replace(SHORT, switch=switch, double_softmax=double)
    graph = on_client(method)
    own = adapted(method, confidence)
    seen = around(method, own.model, graph)
    homo, *hetero = (h.softmax(-1) for h in method.adaptive(own.heads, seen, graph))
    belief = NET(own.model, graph).softmax(-1)
    belief = belief.softmax(-1) if double else belief
    expected = trust * (homo + belief) / 2 + (1 - trust) * torch.stack(hetero).mean(0)
    found = method.predict(graph, Empty(), own)
    torch.testing.assert_close(found.exp(), expected)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(graph.num_nodes))


def test_dropout_at_scoring_is_heard():
    graph = on_client(SHORT)
    state = adapted(SHORT)
    quiet, noisy = (SHORT.predict(graph, Empty(), state, key) for key in (None, make_key(1)))
    assert not torch.equal(quiet, noisy)


# The faults of public codes, each behind its switch.


def test_a_second_softmax_makes_everybody_alike():
    graph, model = on_client(SHORT), NET.init(make_key(2))
    once = around(SHORT, model, graph)
    twice = around(replace(SHORT, double_softmax=True), model, graph)
    assert torch.equal(once.belief, twice.belief)
    torch.testing.assert_close(twice.similar.q, directions(once.belief.softmax(-1), graph.real))
    assert (twice.similar.q @ twice.similar.q.T).min() > (once.similar.q @ once.similar.q.T).min()


@pytest.mark.parametrize("logits", [False, True])
def test_knowledge_is_preserved_between_probabilities_unless_asked(logits):
    method = replace(SHORT, logit_mse=logits)
    graph = on_client(method)
    own = adapted(method)
    seen = around(method, own.model, graph)
    homo, *hetero = method.adaptive(own.heads, seen, graph)
    said = homo if logits else homo.softmax(-1)
    expected = functional.mse_loss(said, NET(own.model, graph).softmax(-1))
    expected = expected + sum(cross_entropy(h, graph) for h in (homo, *hetero))
    torch.testing.assert_close(method.heads_loss(seen, own.heads, graph, None), expected)


@pytest.mark.parametrize("fault", [{"inverted_rescale": True}, {"threshold": 0.999}, {"beta": 0.9}])
def test_switches_reach_the_signed_messages_alone_or_the_propagation(fault):
    method = replace(SHORT, **fault)
    graph = on_client(method)
    own = adapted(method)
    before, after = (
        m.adaptive(own.heads, around(m, own.model, graph), graph) for m in (SHORT, method)
    )
    changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    # homophilous, on X, on X~, signed messages
    assert changed == ([True, False, True, True] if "threshold" in fault else [False] * 3 + [True])


@pytest.mark.parametrize(
    ("preset", "alpha", "beta"), [("reference", 0.05, 0.2), ("openfgl", 0.5, 0.0)]
)
def test_presets_are_settings_of_the_method_and_its_network(preset, alpha, beta):
    config = make_config(method="adafgl", set={"preset": preset})
    method = build_method(resolve(config)[0])
    assert (method.alpha, method.beta, method.inverted_rescale) == (alpha, beta, True)
    network = ChebNet(1, 2, matrix="adjacency") if preset == "reference" else GCN(1, 2)
    assert method.net == network


# Contract and refusals.


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "keep": "best", "optimizer_state": "keep", "block": 5, "threshold": 0.9,
            "switch": "hard", "logit_mse": True,
        },
    ],
)  # fmt: skip
def test_the_contract_holds_in_step_two(settings):
    check_method(lambda net: AdaFGL(net, federated_rounds=1, personal_epochs=1, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"federated_rounds": 0}, "federated_rounds is 0; give at least 1"),
        ({"personal_epochs": 0}, "personal_epochs is 0; give at least 1"),
        ({"hops": 0}, "hops is 0; give at least 1"),
        ({"block": 0}, "block is 0; give at least 1"),
        ({"alpha": 1.5}, "alpha is 1.5; give a number from 0 to 1"),
        ({"beta": -0.1}, "beta is -0.1; give a number from 0 to 1"),
        ({"threshold": 1}, "threshold is 1; give a number from 0 up to, not including, 1"),
        ({"keep": "lst"}, "unknown keep 'lst'; did you mean 'last'"),
        ({"switch": "soft"}, "unknown switch 'soft'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        AdaFGL(NET, **settings)
