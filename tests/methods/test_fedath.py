"""FedATH against hand-computed numbers, its gradient routing, and its awkward graphs."""

from dataclasses import replace

import pytest
import torch

from atoll.core.errors import ConfigError
from atoll.core.graph import make_graph, with_views
from atoll.core.losses import cross_entropy
from atoll.core.random import fold, make_key
from atoll.core.tree import leaves
from atoll.methods.fedath import FedATH, hsic, negative_entropy
from atoll.nn import GCN, SGC
from atoll.nn.edges import weighted_gcn
from atoll.testing import check_method, double_precision, small_federation

HC = [[1, 0, 2], [0, 1, -1], [2, 1, 0], [-1, 0.5, 1]]
HB = [[0.5, 1, 0], [1, -1, 2], [0, 0, 1], [-0.5, 2, 0.5]]


@pytest.fixture(autouse=True)
def _double():
    with double_precision():
        yield


@pytest.mark.parametrize(("scale", "value"), [("trace/N", 8.645508), ("trace/(N-1)^2", 3.842448)])
def test_hsic(scale, value):
    found = hsic(torch.tensor(HC), torch.tensor(HB), torch.ones(4), scale)
    assert found.item() == pytest.approx(value, abs=1e-6)


def test_hsic_gradient():
    causal = torch.tensor(HC, requires_grad=True)
    (4 * hsic(causal, torch.tensor(HB), torch.ones(4), "trace/N")).backward()
    expected = torch.tensor(
        [[-1.3125, -3.046875, 9.1875], [6.1875, 6.328125, -20.8125],
         [1.6875, 1.453125, -4.3125], [-6.5625, -4.734375, 15.9375]]
    )  # fmt: skip
    assert torch.allclose(causal.grad, expected, atol=1e-6)


def test_hsic_equals_the_trace_of_grams_and_ignores_padding():
    a, b = torch.randn(30, 4), torch.randn(30, 5)
    centre = torch.eye(30) - 1 / 30
    trace = torch.trace(a @ a.T @ centre @ b @ b.T @ centre)
    assert torch.isclose(hsic(a, b, torch.ones(30), "trace/N"), trace / 30)
    padded = [torch.cat([part, 7 + torch.randn(3, part.shape[1])]) for part in (a, b)]
    real = torch.cat([torch.ones(30), torch.zeros(3)])
    assert torch.isclose(hsic(*padded, real, "trace/N"), trace / 30)


@pytest.mark.parametrize(
    ("reading", "value"), [("sum", -3.389407), ("mean", -0.847352), ("uniform", 4.260321)]
)
def test_negative_entropy(reading, value):
    found = negative_entropy(torch.tensor(HB), torch.ones(4), reading)
    assert found.item() == pytest.approx(value, abs=1e-6)


def test_negative_entropy_of_certain_logits_is_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    negative_entropy(logits, torch.ones(1), "sum").backward()
    assert torch.isfinite(logits.grad).all()


def prepared(method, size=13):
    graph = small_federation((size,)).graphs[0]
    return with_views(graph, method.views)


def gradients(method, graph):
    networks = {
        n: method._fresh(n, make_key(i)) for i, n in enumerate(("causal", "evaluator", "biased"))
    }
    return networks, lambda loss: torch.func.grad(loss)(networks)


@pytest.mark.parametrize("evaluator", ["mlp", "gnn"])
def test_gradients_go_where_they_should(evaluator):
    """Entropy must not reach the evaluator, and cross entropy not the biased network."""
    net = GCN(11, 3, hidden=5)
    without = FedATH(net, evaluator=evaluator, use_entropy=False, use_hsic=False)
    graph = prepared(without)
    _, grad = gradients(without, graph)
    plain = grad(lambda n: without.loss(n, graph, make_key(5)))
    assert all(not leaf.any() for leaf in leaves(plain["biased"]))
    assert any(leaf.any() for leaf in leaves(plain["evaluator"]))

    with_entropy = FedATH(net, evaluator=evaluator, use_hsic=False)
    both = grad(lambda n: with_entropy.loss(n, graph, make_key(5)))
    for name in ("causal", "evaluator"):
        for one, other in zip(leaves(plain[name]), leaves(both[name]), strict=True):
            assert torch.equal(one, other)
    assert any(leaf.any() for leaf in leaves(both["biased"]))


def test_the_joint_loss_is_eq_12_and_trains_every_network_with_all_of_it():
    graph = prepared(FedATH(GCN(11, 3, hidden=5)))
    method = FedATH(GCN(11, 3, hidden=5), routing="joint", lam=0.7)
    networks, grad = gradients(method, graph)
    loops, key = graph.views["loops"], make_key(5)

    def by_hand(networks):
        weight = method.edge_weights(networks, graph, key)
        sides = ((weight, "causal", key), (1 - weight, "biased", fold(key, "biased")))
        causal, biased = (
            method.net.on(weighted_gcn(loops, w), networks[name], graph, noise)
            for w, name, noise in sides
        )
        dependence = hsic(causal, biased, graph.real, method.hsic)
        entropy = negative_entropy(biased, graph.real, "mean")
        return cross_entropy(causal, graph) + entropy + 0.7 * dependence

    assert torch.equal(method.loss(networks, graph, key), by_hand(networks))
    whole = grad(lambda n: method.loss(n, graph, key))
    assert all(map(torch.allclose, leaves(whole), leaves(grad(by_hand))))
    # In the code's routing the evaluator hears nothing of the entropy; here it does.
    without = [replace(method, use_hsic=False, use_entropy=on) for on in (True, False)]
    entropy, plain = (grad(lambda n, m=m: m.loss(n, graph, key)) for m in without)
    assert not any(map(torch.equal, leaves(entropy["evaluator"]), leaves(plain["evaluator"])))
    assert all(map(torch.allclose, leaves(entropy["causal"]), leaves(plain["causal"])))


def test_without_both_terms_all_routings_are_one():
    graph = prepared(FedATH(GCN(11, 3, hidden=5)))
    code, joint = (
        FedATH(GCN(11, 3, hidden=5), routing=routing, use_hsic=False, use_entropy=False)
        for routing in ("code", "joint")
    )
    _, grad = gradients(code, graph)
    one, other = (grad(lambda n, m=m: m.loss(n, graph, make_key(5))) for m in (code, joint))
    assert all(map(torch.equal, leaves(one), leaves(other)))


@pytest.mark.parametrize(("weight_by", "weight"), [("nodes", 13), ("uniform", 1)])
def test_a_client_weighs_by_its_nodes_or_one_over_k(weight_by, weight):
    method = FedATH(GCN(11, 3, hidden=5), weight_by=weight_by)
    reply, _ = method.train(prepared(method), method.start(make_key(0)), None, make_key(1))
    assert reply.weight == weight


def test_hsic_reaches_evaluator_through_the_causal_branch_only():
    method = FedATH(GCN(11, 3, hidden=5), use_entropy=False)
    graph = prepared(method)
    networks, grad = gradients(method, graph)
    whole = grad(lambda n: method.loss(n, graph, None))
    # Holding the biased network's output fixed by hand must give the evaluator the same gradient.
    weight = method.edge_weights(networks, graph)
    loops = graph.views["loops"]
    biased = method.net.on(weighted_gcn(loops, 1 - weight), networks["biased"], graph).detach()

    def by_hand(evaluator):
        own = method.edge_weights({"evaluator": evaluator}, graph)
        causal = method.net.on(weighted_gcn(loops, own), networks["causal"], graph)
        log_p = torch.log_softmax(causal, -1).gather(-1, graph.y[:, None])[:, 0]
        ce = -(log_p * graph.train).sum() / graph.train.sum()
        return ce + method.lam * hsic(causal, biased, graph.real, method.hsic)

    expected = torch.func.grad(by_hand)(networks["evaluator"])
    for one, other in zip(leaves(whole["evaluator"]), leaves(expected), strict=True):
        assert torch.allclose(one, other, atol=1e-10)


@pytest.mark.parametrize("edges", [[], [[0, 1], [1, 0]], [[0, 1]]])
@pytest.mark.parametrize("evaluator", ["mlp", "gnn"])
def test_graphs_with_almost_no_edges(edges, evaluator):
    method = FedATH(GCN(4, 2, hidden=3), evaluator=evaluator)
    index = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).T
    graph = make_graph(torch.rand(3, 4), index, torch.tensor([0, 1, 0]), train=torch.ones(3))
    graph = with_views(graph, method.views)
    shared = {"causal": method.net.init(make_key(0))}
    reply, state = method.train(graph, shared, None, make_key(1))
    reply, state = method.train(graph, reply.model, state, make_key(2))
    assert all(torch.isfinite(leaf).all() for leaf in [*leaves(reply), *leaves(state)])
    assert torch.isfinite(method.predict(graph, reply.model, state)).all()


def test_without_evaluator_a_client_uses_every_edge():
    method = FedATH(GCN(11, 3, hidden=5))
    graph = prepared(method)
    model = {"causal": method.net.init(make_key(0))}
    assert torch.allclose(method.predict(graph, model, None), method.net(model["causal"], graph))


def test_only_what_is_shared_leaves():
    graph = prepared(FedATH(GCN(11, 3, hidden=5)))
    expected = {"cg": {"causal"}, "cg+ee": {"causal", "evaluator"}, "cg+bg": {"causal", "biased"}}
    for share, names in expected.items():
        method = FedATH(GCN(11, 3, hidden=5), share=share)
        server = {n: method._fresh(n, make_key(0)) for n in names}
        reply, state = method.train(graph, server, None, make_key(1))
        assert set(reply.model) == names
        assert set(state.networks) == {"causal", "evaluator", "biased"} - names


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"share": "cg+ee"}, {"share": "all"}, {"routing": "joint", "weight_by": "uniform"}],
)
def test_contract_of_the_variants(options):
    check_method(lambda net: FedATH(net, **options), rounds=2)


@pytest.mark.long
def test_contract_of_the_public_codes_reading():
    reading = {"evaluator": "gnn", "hsic": "trace/N", "entropy": "sum", "lam": 7.0}
    check_method(lambda net: FedATH(net, **reading), rounds=2)


def test_another_network_is_refused():
    with pytest.raises(ConfigError, match="net=gcn"):
        FedATH(SGC(11, 3))
