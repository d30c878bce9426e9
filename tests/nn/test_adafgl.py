"""Products with cosines that are never stored, signed messages, and heads on propagated features,
against the same formulas with every matrix written out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from atoll.core.fit import gradient
from atoll.core.graph import Graph, with_views
from atoll.core.random import make_key, normal
from atoll.core.vmap.stacks import call, vmap_trees
from atoll.engines.stacking import stack_graphs
from atoll.nn import views
from atoll.nn.adafgl import (
    Heads,
    Similarity,
    _PReLU,
    by_rows,
    directions,
    propagation,
    signed_messages,
)
from atoll.testing import CLASSES, FEATURES, double_precision, small_federation

VIEWS = {"x": views.features, "plain": views.plain_adjacency, "gcn": views.gcn_adjacency}
SLOPE = torch.tensor([0.25], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def example(number: int = 2) -> tuple[Graph, Tensor, Tensor]:
    """A graph, a distribution over the classes for each node, and logits."""
    graph = with_views(small_federation().graphs[number], VIEWS)
    shape = (graph.num_nodes, CLASSES)
    p = functional.softmax(2 * normal(make_key(1), shape, torch.float64), dim=-1)
    return graph, p, normal(make_key(2), shape, torch.float64)


def cosines(p: Tensor, threshold: float = 0.0) -> Tensor:
    product = p @ p.T
    s = product / torch.sqrt(product.diag().outer(product.diag()))
    s = (s > threshold).double() if threshold else s
    return s - torch.diag(s.diag())


def dense_t(graph: Graph, p: Tensor, alpha: float, threshold: float = 0.0) -> Tensor:
    adjacency = views.plain_adjacency(graph).to_dense()
    t = alpha * adjacency + (1 - alpha) * cosines(p, threshold) + torch.eye(graph.num_nodes)
    scale = t.sum(1).rsqrt()
    return scale.unsqueeze(1) * t * scale


def dense_messages(
    h: Tensor, p: Tensor, slope: Tensor, beta: float, threshold: float, inverted: bool
) -> Tensor:
    x = beta * cosines(p, threshold) + (1 - beta) * cosines(functional.softmax(h, dim=-1))
    mean, top = x.mean(), x.max()
    below = -x / mean if inverted else (x - mean) / mean
    r = torch.where(x > mean, (x - mean) / (top - mean), below)
    r = r - torch.diag(r.diag()) + torch.eye(len(r))
    parts = [functional.softmax(functional.prelu(side, slope) @ h, dim=-1) for side in (r, -r)]
    return (parts[0] - parts[1] + h) / 2


@pytest.mark.parametrize("threshold", [0.0, 0.8])
@pytest.mark.parametrize("block", [1024, 5])
def test_cosines_are_multiplied_without_being_stored(threshold, block):
    graph, p, h = example()
    s = Similarity(directions(p, graph.real), threshold, block)
    torch.testing.assert_close(s.times(h), cosines(p, threshold) @ h)


@pytest.mark.parametrize("threshold", [0.0, 0.8])
def test_propagation_is_the_normalised_blend(threshold):
    graph, p, h = example()
    s = Similarity(directions(p, graph.real), threshold, 6)
    t = propagation(graph.views["plain"], s, graph.real, 0.3)
    torch.testing.assert_close(t(h), dense_t(graph, p, 0.3, threshold) @ h)


def test_propagation_has_the_derivative_of_its_matrix():
    # One-way edges: the derivative is a product with the transpose.
    clients = [(with_views(_one_way(graph), VIEWS), p, h) for graph, p, h in map(example, (2, 1))]

    def slope(graph: Graph, p: Tensor, h: Tensor) -> Tensor:
        s = Similarity(directions(p, graph.real))
        t = propagation(graph.views["plain"], s, graph.real, 0.3)
        return gradient(lambda x, _: (h * t(x)).sum(), h, make_key(0))

    stacked = stack_graphs([graph for graph, _, _ in clients])
    size = stacked.real.shape[1]
    rows = [
        torch.stack([functional.pad(part, (0, 0, 0, size - len(part))) for part in parts])
        for parts in list(zip(*clients, strict=True))[1:]
    ]
    together = vmap_trees(slope, stacked, *rows)
    for (graph, p, h), found in zip(clients, together, strict=True):
        wanted = dense_t(graph, p, 0.3).T @ h
        torch.testing.assert_close(slope(graph, p, h), wanted)
        torch.testing.assert_close(found[: len(h)], wanted)


def _one_way(graph: Graph) -> Graph:
    keep = graph.edges[0] < graph.edges[1]
    return replace(graph, edges=graph.edges[:, keep], edge_weight=graph.edge_weight[keep])


def test_without_similarity_it_is_the_adjacency_of_a_gcn():
    graph, p, h = example()
    s = Similarity(directions(p, graph.real))
    t = propagation(graph.views["plain"], s, graph.real, alpha=1.0)
    torch.testing.assert_close(t(h), views.gcn_adjacency(graph).to_dense() @ h)


@pytest.mark.parametrize("block", [1024, 5])
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize(("beta", "threshold"), [(0.2, 0.0), (0.3, 0.8), (0.0, 0.0)])
def test_signed_messages_and_their_gradients(beta, threshold, inverted, block):
    graph, p, h = example()
    s = Similarity(directions(p, graph.real), threshold, block)

    def ours(h: Tensor, slope: Tensor) -> Tensor:
        return signed_messages(h, s, slope, graph.real, beta, inverted)

    def dense(h: Tensor, slope: Tensor) -> Tensor:
        return dense_messages(h, p, slope, beta, threshold, inverted)

    torch.testing.assert_close(ours(h, SLOPE), dense(h, SLOPE))
    found, expected = (
        grad(lambda *at, made=made: made(*at).square().sum(), argnums=(0, 1))(h, SLOPE)
        for made in (ours, dense)
    )
    torch.testing.assert_close(found, expected)


def test_the_least_alike_push_hardest_unless_inverted():
    # Node 0 is like 1 and unlike 2: only with the right sign does it move away from 2's class.
    h = torch.tensor([[6.0, 0.0], [6.0, 0.0], [0.0, 6.0]])
    real = torch.ones(3)
    zero, s = torch.zeros(1), Similarity(directions(h.softmax(-1), real))
    right, wrong = (
        signed_messages(h, s, zero, real, 0.0, inverted)[0] for inverted in (False, True)
    )
    assert right[0] - right[1] > wrong[0] - wrong[1]


@pytest.mark.parametrize("block", [1024, 4])
def test_padding_resembles_nobody(block):
    graph, p, h = example(0)
    size, more = graph.num_nodes, 3
    real = torch.cat([graph.real, torch.zeros(more)])
    longer = [functional.pad(part, [0, 0, 0, more], value=0.7) for part in (h, p)]
    for threshold in (0.0, 0.8):
        s = Similarity(directions(p, graph.real), threshold, block)
        alone = signed_messages(h, s, SLOPE, graph.real, 0.2)
        s = Similarity(directions(longer[1], real), threshold, block)
        padded = signed_messages(longer[0], s, SLOPE, real, 0.2)
        torch.testing.assert_close(padded[:size], alone)


def test_a_client_of_one_node_has_only_itself():
    h, real = torch.tensor([[0.3, -0.2]]), torch.ones(1)

    def made(h: Tensor) -> Tensor:
        s = Similarity(directions(h.softmax(-1), real))
        return signed_messages(h, s, SLOPE, real, 0.2)

    up, down = (functional.softmax(part, dim=-1) for part in (h, -SLOPE * h))
    torch.testing.assert_close(made(h), (up - down + h) / 2)
    assert torch.isfinite(grad(lambda h: made(h).square().sum())(h)).all()


def test_blocks_hold_only_their_inputs_and_work_for_many_clients_at_once():
    q = normal(make_key(3), (4, 7, 2), torch.float64)

    def total(q: Tensor, block: int) -> Tensor:
        return by_rows(lambda start, rows, q: torch.sin(rows @ q.T) @ q, (q,), (q,), block).sum()

    whole, blocks = (vmap(grad(lambda q, b=block: total(q, b)))(q) for block in (100, 3))
    torch.testing.assert_close(blocks, whole)
    kept: list[tuple[int, ...]] = []
    tracked = q[0].clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda leaf: kept.append(tuple(leaf.shape)) or leaf, lambda leaf: leaf
    ):
        total(tracked, 3)
    assert kept
    assert all(7 not in shape[1:] for shape in kept)


HEADS = Heads(FEATURES, CLASSES, hops=3, propagated={"a": 2, "b": 3}, plain={"c": 3}, hidden=4)


def test_heads_read_the_concatenation_that_is_never_made():
    graph, p, _ = example()
    s = Similarity(directions(p, graph.real))
    params = HEADS.init(make_key(5))
    found = HEADS(params, graph, propagation(graph.views["plain"], s, graph.real, 0.4))
    t, x = dense_t(graph, p, 0.4), graph.x
    wide = torch.cat([x, t @ x, t @ t @ x, t @ t @ t @ x], dim=1)
    columns = params["first"]["weight"].split(4, dim=1)
    weights = {
        "a": torch.cat(columns[0:8:2]), "b": torch.cat(columns[1:8:2]), "c": columns[8],
    }  # fmt: skip
    for number, (name, weight) in enumerate(weights.items()):
        head = params["rest"][name]
        bias = params["first"]["bias"][4 * number : 4 * number + 4]
        h = (x if name == "c" else wide) @ weight + bias
        for layer in head["layers"]:
            h = functional.prelu(h, head["slope"]) @ layer["weight"] + layer["bias"]
        torch.testing.assert_close(found[name], h)
    assert [len(params["rest"][name]["layers"]) for name in "abc"] == [1, 2, 2]


def test_heads_drop_each_their_own_entries():
    graph, p, _ = example()
    s = Similarity(directions(p, graph.real))
    propagate = propagation(graph.views["plain"], s, graph.real, 0.4)
    params = HEADS.init(make_key(5))
    params["rest"]["b"] = params["rest"]["c"]
    plain = HEADS(params, graph, propagate)
    noisy, again = (HEADS(params, graph, propagate, make_key(6)) for _ in range(2))
    for name in plain:
        assert torch.equal(noisy[name], again[name])
        assert not torch.equal(noisy[name], plain[name])
    still = replace(HEADS, dropout=0.0)(params, graph, propagate, make_key(6))
    assert all(torch.equal(still[name], plain[name]) for name in plain)


def test_prelu_is_that_of_torch_with_its_derivatives():
    made = torch.Generator().manual_seed(0)
    h = torch.randn(3, 20, 4, dtype=torch.float64, generator=made)
    h[:, :2] = 0  # torch takes the slope there
    slope = torch.rand(3, 1, dtype=torch.float64, generator=made)

    def slopes(prelu):
        given = h.clone().requires_grad_(), slope.clone().requires_grad_()
        out = vmap(prelu)(*given)
        return [out.detach(), *torch.autograd.grad((out * torch.arange(4)).sum(), given)]

    ours = slopes(lambda h, slope: call(_PReLU, h, slope))
    for one, other in zip(ours, slopes(functional.prelu), strict=True):
        torch.testing.assert_close(one, other)
