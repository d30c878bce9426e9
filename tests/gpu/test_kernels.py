"""A GPU kernel computes in one launch the CPU's result of several steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atoll.core.graph import moved
from atoll.core.losses import cross_entropy, with_loss
from atoll.core.optim import Adam, pull
from atoll.core.random import dropout, fold, make_key, normal, salted, uniform
from atoll.core.task import NODES
from atoll.core.tree import leaves, tree_map
from atoll.core.vmap.varied import points
from atoll.engines.prepare import prepared
from atoll.engines.recording import Tape
from atoll.engines.stacking import stack_graphs
from atoll.methods import FedAvg
from atoll.nn import GCN
from atoll.nn.disengcn import DisenGCN, route
from atoll.nn.edges import weighted_gcn
from atoll.nn.normalise import normalised
from atoll.nn.ops import matmul, with_values
from atoll.nn.views import loop_adjacency
from atoll.testing import small_federation

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    # Torch warns in a separate thread that it sets up cuBLAS there, and fails if that is an error.
    pytest.mark.filterwarnings("default"),
]


def both(function):
    """The same on CPU and GPU, brought home."""
    return function("cpu"), tree_map(torch.Tensor.cpu, function("cuda"))


def test_keys() -> None:
    def some(device: str) -> list[torch.Tensor]:
        key = make_key(7, device)
        numbers = torch.arange(5, device=device)
        many = fold(key, "client", numbers)
        each = torch.func.vmap(lambda k: fold(k, "dropout", 3))(many)
        crossed = torch.func.vmap(lambda k: fold(k, "node", numbers))(many)
        salt = torch.tensor(-12345678901, device=device)
        return [key, fold(key, "a", 1), many, each, crossed, salted(key, salt)]

    for cpu, gpu in zip(*both(some), strict=True):
        assert torch.equal(cpu, gpu)


@pytest.mark.parametrize("rate", [0.3, 0.5])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_dropout(rate: float, width: int) -> None:
    def drop(device: str) -> list[torch.Tensor]:
        key, rows = make_key(3, device), torch.arange(50, 90, dtype=torch.int32, device=device)
        h = torch.ones(40, width, device=device)
        many = fold(key, torch.arange(4, device=device))
        return [
            dropout(h, key, rows, rate, "layer", 1),
            torch.func.vmap(lambda k: dropout(h, k, rows, rate))(many),
            dropout(h.double(), key, rows, rate),
        ]

    for cpu, gpu in zip(*both(drop), strict=True):
        assert torch.equal(cpu, gpu)


def test_uniform_and_normal() -> None:
    cpu, gpu = both(lambda device: uniform(make_key(5, device), (30, 9)))
    assert torch.equal(cpu, gpu)
    cpu, gpu = both(lambda device: normal(make_key(5, device), (30, 9)))
    torch.testing.assert_close(cpu, gpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam(dtype: torch.dtype) -> None:
    def train(device: str) -> list[torch.Tensor]:
        start = normal(make_key(1, device), (3, 8), dtype)
        params = {"weight": start, "bias": start[0]}
        optimizer, state = Adam(lr=0.02, weight_decay=0.01), None
        for step in range(5):
            state = state or optimizer.init(params)
            grads = tree_map(lambda p, s=step: torch.sin(p * (s + 1)), params)
            params, state = optimizer.update(grads, params, state)
        return leaves((params, state))

    for cpu, gpu in zip(*both(train), strict=True):
        torch.testing.assert_close(cpu, gpu)


def test_adam_of_many_clients_that_took_different_numbers_of_steps() -> None:
    def train(device: str) -> list[torch.Tensor]:
        many = {
            "weight": normal(make_key(2, device), (4, 3, 8)),
            "bias": torch.ones(4, 3).to(device),
        }
        optimizer = Adam()
        state = torch.func.vmap(optimizer.init)(many)
        state = type(state)(torch.arange(4.0).to(device), state.mean, state.square)
        step = torch.func.vmap(optimizer.update)
        return leaves(step(tree_map(torch.sin, many), many, state))

    for cpu, gpu in zip(*both(train), strict=True):
        torch.testing.assert_close(cpu, gpu)


def test_runs_with_their_own_rates() -> None:
    """Adam and dropout with numbers of each run, for runs and clients, as the CPU has them."""
    grid = points(
        [
            FedAvg(GCN(3, 2, dropout=d), Adam(lr=lr, weight_decay=decay))
            for lr, decay, d in ((0.01, 0.0, 0.0), (0.1, 0.01, 0.3), (0.03, 0.1, 0.71))
        ]
    )

    def train(device: str) -> list[torch.Tensor]:
        start = normal(make_key(2, device), (3, 4, 5, 7))
        keys = fold(make_key(4, device), torch.arange(12, device=device)).reshape(3, 4)
        rows = torch.arange(5, dtype=torch.int32, device=device)

        def one(row, params, keys):
            method = grid.at(row)

            def client(params, key):
                state = method.optimizer.init(params)
                for step in range(3):
                    kept = dropout(torch.sin(params), fold(key, step), rows, method.net.dropout)
                    params, state = method.optimizer.update(kept, params, state)
                return params, state, kept

            return torch.func.vmap(client)(params, keys)

        numbers = grid.tensor(torch.device(device))
        return leaves(torch.func.vmap(one)(numbers, start, keys))

    for cpu, gpu in zip(*both(train), strict=True):
        torch.testing.assert_close(cpu, gpu)


def test_runs_with_their_own_betas() -> None:
    grid = points([FedAvg(GCN(3, 2), Adam(beta1=b, eps=e)) for b, e in ((0.9, 1e-8), (0.5, 1e-3))])

    def train(device: str) -> list[torch.Tensor]:
        def one(row, params):
            optimizer = grid.at(row).optimizer
            state = optimizer.init(params)
            for step in range(4):
                params, state = optimizer.update(torch.sin(params * step), params, state)
            return params, state

        numbers = grid.tensor(torch.device(device))
        return leaves(torch.func.vmap(one)(numbers, normal(make_key(2, device), (2, 5, 7))))

    for cpu, gpu in zip(*both(train), strict=True):
        torch.testing.assert_close(cpu, gpu)


@pytest.mark.parametrize("weights", [None, "1,2,0"])
def test_loss_and_scores(weights: str | None) -> None:
    """Of clients side by side, with the gradient by the logits."""
    federation = small_federation()
    graphs = [with_loss(graph, 3, weights, None) for graph in federation.graphs]
    stacked = stack_graphs(graphs)
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(*stacked.y.shape, 3, generator=draw)

    def found(device: str) -> list[torch.Tensor]:
        there, x = moved(stacked, device), logits.to(device)

        def loss(x):
            return torch.func.vmap(cross_entropy)(x, there).sum()

        counted = torch.func.vmap(NODES.score)(x, there)
        each = torch.func.vmap(cross_entropy)(x, there)
        return [each, torch.func.grad(loss)(x), *leaves(counted)]

    for cpu, gpu in zip(*both(found), strict=True):
        torch.testing.assert_close(cpu, gpu)


def test_rectifier_and_dropout() -> None:
    """The noise has the CPU's bits, and so has the gradient."""
    h = torch.randn(4, 40, 7, generator=torch.Generator().manual_seed(2))

    def drop(device: str) -> list[torch.Tensor]:
        rows = torch.arange(50, 90, dtype=torch.int32, device=device)
        keys = fold(make_key(3, device), torch.arange(4, device=device))

        def one(x, key):
            return dropout(x, key, rows, 0.3, "layer", 1, after=torch.relu)

        def total(x):
            return (torch.func.vmap(one)(x, keys) * torch.sin(x)).sum()

        there = h.to(device)
        return [torch.func.vmap(one)(there, keys), torch.func.grad(total)(there)]

    for cpu, gpu in zip(*both(drop), strict=True):
        torch.testing.assert_close(cpu, gpu)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_found(bad: float) -> None:
    leaf = torch.full((3, 5000), 3e38, device="cuda")
    for column in (0, 17, 4999):
        leaf[1, column] = bad
        tape = Tape(make_key(0, "cuda"))
        tape.watch({"leaf": leaf}, "train")
        assert tape.finite().tolist() == [True, False, True]
        leaf[1, column] = 0


@pytest.mark.parametrize(("factors", "hidden"), [(2, 128), (10, 16), (3, 5)])
def test_routing(factors: int, hidden: int) -> None:
    draw = torch.Generator().manual_seed(factors)
    federation = small_federation()
    net = DisenGCN(federation.features, 3, hidden=hidden, factors=factors)
    wide = max(graph.num_nodes for graph in federation.graphs) + 1
    x = torch.randn(len(federation), wide, factors * hidden, generator=draw)
    weight = torch.randn(x.shape, generator=draw)

    def routed(device: str) -> tuple[torch.Tensor, ...]:
        graphs = prepared(federation.graphs, net.views, device)
        edges = stack_graphs(graphs).views["neighbours"]
        edges = replace(edges, dense=None)
        there, by = x.to(device).requires_grad_(), weight.to(device)
        found = torch.func.vmap(lambda e, h: route(e, h, factors, 5))(edges, there)
        return found.detach(), torch.autograd.grad((found * by).sum(), there)[0]

    for cpu, gpu in zip(*both(routed), strict=True):
        torch.testing.assert_close(cpu, gpu, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("columns", [1, 3, 64, 100])
def test_sparse_products(columns: int) -> None:
    """Forwards and backwards, in the dense factor and in the values, of clients side by side."""
    draw = torch.Generator().manual_seed(columns)
    federation = small_federation()
    net = GCN(federation.features, 3)
    wide = max(graph.num_nodes for graph in federation.graphs) + 1
    x = torch.randn(len(federation), wide, columns, generator=draw)
    weight = torch.randn(x.shape, generator=draw)

    def product(device: str) -> tuple[torch.Tensor, ...]:
        graphs = prepared(federation.graphs, net.views, device)
        adjacency = stack_graphs(graphs).views["gcn"]
        there, by = x.to(device).requires_grad_(), weight.to(device)
        scale = adjacency.values.clone().requires_grad_()

        def one(edges, values, dense):
            return matmul(with_values(replace(edges, dense=None), values), dense)

        found = torch.func.vmap(one)(adjacency, scale, there)
        return found.detach(), *torch.autograd.grad((found * by).sum(), (scale, there))

    for cpu, gpu in zip(*both(product), strict=True):
        torch.testing.assert_close(cpu, gpu, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [3, 64, 100])
def test_weighted_convolutions(columns: int) -> None:
    """Forwards, and backwards by weights, rows and bias, of clients side by side."""
    draw = torch.Generator().manual_seed(columns)
    federation = small_federation()
    loops = prepared(federation.graphs, {"loops": loop_adjacency}, "cpu")
    stacked = stack_graphs(loops)
    entries, nodes = stacked.views["loops"].values, stacked.y.shape
    given = [torch.rand(entries.shape, generator=draw)]
    given += [torch.randn(*nodes, columns, generator=draw) for _ in range(2)]
    given += [torch.randn(len(federation), columns, generator=draw)]

    def found(device: str) -> tuple[torch.Tensor, ...]:
        there = moved(stacked, device).views["loops"]
        weight, h, by, bias = (part.to(device).requires_grad_() for part in given)

        def one(edges, weight, h, bias):
            return weighted_gcn(edges, weight)(h, bias)

        out = torch.func.vmap(one)(there, weight, h, bias)
        slopes = torch.autograd.grad((out * by.detach()).sum(), (weight, h, bias))
        return out.detach(), *slopes

    for cpu, gpu in zip(*both(found), strict=True):
        torch.testing.assert_close(cpu, gpu, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(40, 32), (3, 70)])
def test_normalisation(shape: tuple[int, int]) -> None:
    def made(device: str) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        h = torch.randn(5, *shape, generator=draw).to(device).requires_grad_()
        many = torch.func.vmap(normalised)(h)
        slope = torch.autograd.grad(many.square().sum() + normalised(h[0]).exp().sum(), h)
        return [many.detach(), *slope]

    for cpu, gpu in zip(*both(made), strict=True):
        torch.testing.assert_close(cpu, gpu, rtol=1e-4, atol=1e-4)


def test_pull() -> None:
    def made(device: str) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        parts = [
            [torch.randn(3, *one, generator=draw).to(device) for one in ((2000, 3), (5,))]
            for _ in range(3)
        ]
        each = torch.func.vmap(lambda *trees: pull(*trees, 0.3))(*parts)
        start = [leaf[0] for leaf in parts[2]]
        shared = torch.func.vmap(lambda g, w: pull(g, w, start, 0.3))(*parts[:2])
        return [*each, *shared]

    for cpu, gpu in zip(*both(made), strict=True):
        torch.testing.assert_close(cpu, gpu)
