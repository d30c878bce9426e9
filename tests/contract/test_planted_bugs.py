"""`check_method` catches bugs that happen in practice: one short method for each bug.

It cannot catch aggregation with a wrong but consistent weight, because all engines agree on it. A
server that divides the sum of the participants' models by `clients.total` shrinks the model under
partial participation, on all engines. Only the golden numbers of the method detect this. The tests
below cover visible faults of `clients.total` (shapes, rows at wrong positions).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from atoll.core.aggregate import Mean, average, put, spread
from atoll.core.errors import ConfigError
from atoll.core.fit import fit
from atoll.core.graph import Graph
from atoll.core.losses import cross_entropy
from atoll.core.message import ToAll, ToEach
from atoll.core.method import Clients, Method, client_step
from atoll.core.private_layers import Private, init_private, join_parts, private_part
from atoll.core.random import fold, make_key, normal
from atoll.core.tree import Empty, Tree, leaves, record, tree_map
from atoll.methods import FedAvg, Local
from atoll.testing import ContractBroken, check_method


@record
class Update:
    model: Tree
    weight: Tensor


@record
class Talkative:
    model: Tree
    weight: Tensor
    more: Tree


BUGS: dict[str, tuple[type[Method] | Callable[..., Method], str]] = {}


def bug(says: str) -> Callable[[Any], Any]:
    """Register a method with what the contract must say about it."""

    def add(method: Any) -> Any:
        BUGS[method.__name__] = (method, says)
        return method

    return add


def train(method: FedAvg, graph: Graph, model: Tree, state: Tree, key: Tensor, **more: Any) -> Any:
    """The steps of FedAvg."""
    extra = more.get("extra", lambda logits: 0.0)

    def loss(params: Tree, graph: Graph, key: Tensor) -> Tensor:
        logits = method.net(params, graph, key)
        return cross_entropy(logits, graph) + extra(logits)

    return fit(loss, model, method.optimizer, state, method.epochs, key, graph)


def noisy(model: Tree, key: Tensor) -> Tree:
    return tree_map(lambda leaf: leaf + 0.1 * normal(key, leaf.shape, leaf.dtype), model)


def test_the_method_that_the_bugs_are_planted_in_keeps_the_contract():
    @dataclass(frozen=True)
    class Sound(FedAvg):
        tasks: ClassVar[tuple[str, ...]] = ("node",)

        @client_step
        def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
            model, state = train(self, graph, model, state, key)
            return Update(noisy(model, key), graph.size("nodes")), state

    check_method(Sound, rounds=2)


# Clients are mixed


class MeanOverClients(Function):
    """A bug only with a client axis, where every client gets the mean."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x.mean(in_dims[0], keepdim=True).movedim(in_dims[0], 0).expand(
            info.batch_size, *[-1] * (x.dim() - 1)
        ), 0  # fmt: skip


@bug("engines serial and fused disagree")
@dataclass(frozen=True)
class AMeanOverAllClients(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key)
        return Update(tree_map(MeanOverClients.apply, model), graph.size("nodes")), state


# Padding is counted


@bug("engines serial and fused disagree")
@dataclass(frozen=True)
class AMeanOverPaddedNodes(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key, extra=lambda out: out.square().mean())
        return Update(model, graph.size("nodes")), state


@bug("engines serial and fused disagree")
@dataclass(frozen=True)
class ASizeThatCountsPadding(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key)
        return Update(model, torch.ones_like(graph.real).sum()), state


# Randomness that no key decides


@bug("step 'train' is not pure")
@dataclass(frozen=True)
class AGlobalRandomCall(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key)
        model = tree_map(lambda leaf: leaf + 0.01 * torch.rand(leaf.shape), model)
        return Update(model, graph.size("nodes")), state


@bug("step 'train' is not pure")
@dataclass(frozen=True)
class ARandomCallOfPython(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key)
        return Update(model, graph.size("nodes") * random.random()), state


@bug("engines serial and wire disagree")
@dataclass(frozen=True)
class ARandomServer(FedAvg):
    def round(self, server: Tree, clients: Clients) -> Tree:
        server = super().round(server, clients)
        return tree_map(lambda leaf: leaf + 0.01 * torch.rand(leaf.shape), server)


# Memory outside the trees


@bug("step 'train' stores data on self")
@dataclass(frozen=True)
class AStateOnSelf(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        object.__setattr__(self, "last_graph", graph)
        model, state = train(self, graph, model, state, key)
        return Update(model, graph.size("nodes")), state


@bug("step 'train' stores data on self")
@dataclass(frozen=True)
class ACacheOnSelf(FedAvg):
    cache: dict[str, int] = field(default_factory=dict)

    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        self.cache["nodes"] = graph.num_nodes
        model, state = train(self, graph, model, state, key)
        return Update(model, graph.size("nodes")), state


@bug("engines serial and wire disagree")
@dataclass(frozen=True)
class AServerWithStateOnSelf(FedAvg):
    def round(self, server: Tree, clients: Clients) -> Tree:
        past = vars(self).get("rounds", 0)
        object.__setattr__(self, "rounds", past + 1)
        return tree_map(lambda leaf: leaf * (1 + 0.01 * past), super().round(server, clients))


@bug("must be a frozen dataclass")
class AClassThatIsNotFrozen(FedAvg):
    """Without the decorator a subclass of a frozen dataclass takes new attributes."""


MEMORY: list[Tree] = []


@bug("step 'train' is not pure")
@dataclass(frozen=True)
class AMemoryInTheModule(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        previous = MEMORY[-1] if MEMORY else model
        model, state = train(self, graph, model, state, key)
        MEMORY[:] = [tree_map(torch.clone, model)]
        model = tree_map(lambda new, old: 0.9 * new + 0.1 * old, model, previous)
        return Update(model, graph.size("nodes")), state


# What leaves a client


@bug(r"would send 'more', whose size depends on the client's graph")
@dataclass(frozen=True)
class ANodeAxisInAReply(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key)
        return Talkative(model, graph.size("nodes"), self.net(model, graph)), state


@bug(r"would send 'more\.edges', whose size depends on the client's graph")
@dataclass(frozen=True)
class AnEdgeAxisInAReply(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key)
        return Talkative(model, graph.size("nodes"), {"edges": graph.edge_weight}), state


@bug(r"reply 'more\.0\.\w+' is the private state 'mean\.0\.\w+'")
@dataclass(frozen=True)
class PrivateStateInAReply(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key)
        return Talkative(model, graph.size("nodes"), state.mean), state


@bug(r"reply 'model\.0\.\w+' is the private state")
@dataclass(frozen=True)
class APrivateModelThatLeaves(Local):
    def local(self, reply: Any) -> Tree:
        return Empty()

    @client_step
    def train(self, graph: Graph, seed: Tensor, state: Any, key: Tensor) -> Any:
        _, state = Local.train.function(self, graph, seed, state, key)
        return Update(state.model, graph.size("nodes")), state


@bug("must reply with a record, not dict")
@dataclass(frozen=True)
class AReplyThatIsNoRecord(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key)
        return {"model": model, "weight": graph.size("nodes")}, state


@bug("reply 'weight' is not finite")
@dataclass(frozen=True)
class AReplyThatIsNotANumber(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key)
        return Update(model, torch.log(-graph.size("nodes"))), state


@bug("client 2, step train, round 0: .* not finite")
@dataclass(frozen=True)
class AReplyThatIsNotANumberOnOneClient(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key)
        return Update(model, torch.sqrt(20 - graph.size("nodes"))), state


@bug("cannot be sent: use tensors")
@dataclass(frozen=True)
class AStateThatCannotBeStored(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, _ = train(self, graph, model, None, key)
        return Update(model, graph.size("nodes")), {"optimizer": self.optimizer}


@bug("cannot be sent: use tensors")
@dataclass(frozen=True)
class AServerThatCannotBeStored(FedAvg):
    def init(self, clients: Clients) -> Tree:
        return {"model": super().init(clients), "seen": frozenset()}

    def round(self, server: Tree, clients: Clients) -> Tree:
        return {"model": super().round(server["model"], clients), "seen": frozenset()}

    def deploy(self, server: Tree) -> ToAll:
        return ToAll(server["model"])


@bug(r"engines serial and fused disagree \(private states\): shapes \(13,\) and \(23,\)")
@dataclass(frozen=True)
class APrivateStateWithANodeAxis(FedAvg):
    """A state that is padded in a program of many clients. It needs `vectorize=False`."""

    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        moments = None if state is None else state["moments"]
        model, moments = train(self, graph, model, moments, key)
        marked = {"moments": moments, "guess": self.net(model, graph).argmax(-1)}
        return Update(model, graph.size("nodes")), marked


@bug(r"with many graphs at each client: step 'train': reply 'model\.pre\.weight' is the private")
@dataclass(frozen=True)
class SendsPrivateLayers(FedAvg):
    tasks: ClassVar[tuple[str, ...]] = ("graph",)

    @client_step
    def train(self, graph: Graph, received: Tree, state: Any, key: Tensor) -> Any:
        own = state or Private(init_private(self.net, graph, key), None)
        model, moments = train(self, graph, join_parts(received, own.layers), own.moments, key)
        layers = private_part(self.net, model)
        return Update(model, graph.size("nodes")), Private(layers, moments)


# What came in is changed


@bug("is not pure|changed one of its inputs in place")
@dataclass(frozen=True)
class AReceivedModelChangedInPlace(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        trained, state = train(self, graph, model, state, key)
        for old, new in zip(leaves(model), leaves(trained), strict=True):
            old.copy_(new)
        return Update(model, graph.size("nodes")), state


@bug("changed one of its inputs in place")
@dataclass(frozen=True)
class AGraphChangedInPlace(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key)
        graph.test.zero_()
        return Update(model, graph.size("nodes")), state


# Orders that carry no meaning


@bug("the order of the clients changes the deployed scores")
@dataclass(frozen=True)
class NoiseByTheClientsPlace(FedAvg):
    def round(self, server: Tree, clients: Clients) -> Tree:
        places = fold(make_key(0), torch.arange(clients.total))
        message = ToEach({"model": spread(server, clients.total), "noise": places})
        reply = clients.map(self.train, message)
        return average(reply.model, reply.weight)

    @client_step
    def train(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, message["model"], state, key)
        return Update(noisy(model, message["noise"]), graph.size("nodes")), state


@bug("the numbering of the nodes changes the server's tree")
@dataclass(frozen=True)
class WeightsByTheNodesPlace(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        first = replace(graph, train=graph.train * torch.arange(graph.num_nodes))
        model, state = train(self, first, model, state, key)
        return Update(model, graph.size("nodes")), state


@bug("the numbering of the nodes changes the deployed scores")
@dataclass(frozen=True)
class PrivateWeightsByTheNodesPlace(Local):
    @client_step
    def train(self, graph: Graph, seed: Tensor, state: Any, key: Tensor) -> Any:
        first = replace(graph, train=graph.train * torch.arange(graph.num_nodes))
        return Local.train.function(self, first, seed, state, key)


@bug("the numbering of the nodes changes the server's tree")
@dataclass(frozen=True)
class NoiseByTheNodesPlace(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        places = torch.arange(graph.num_nodes, dtype=torch.int32)
        model, state = train(self, replace(graph, ids=places), model, state, key)
        return Update(model, graph.size("nodes")), state


# Partial participation


@bug(r"engine serial: RuntimeError in test_planted_bugs.py line .*shapes cannot be multiplied")
@dataclass(frozen=True)
class WeightsForClientsThatAreNotThere(FedAvg):
    def round(self, server: Tree, clients: Clients) -> Tree:
        reply = clients.map(self.train, ToAll(server))
        return average(reply.model, torch.ones(clients.total))


@bug("the order of the clients changes the deployed scores")
@dataclass(frozen=True)
class RowsTakenForPositions(FedAvg):
    """Keeps one model per client, and writes the replies to the first rows."""

    def init(self, clients: Clients) -> Tree:
        return spread(super().init(clients), clients.total)

    def round(self, server: Tree, clients: Clients) -> Tree:
        reply = clients.map(self.train, ToEach(server))
        return put(server, torch.arange(len(clients)), reply.model)

    def deploy(self, server: Tree) -> ToEach:
        return ToEach(server)


# Aggregation


@bug("has a field `aggregate`, but a median changes nothing")
@dataclass(frozen=True)
class TheMeanWhateverTheRule(FedAvg):
    def round(self, server: Tree, clients: Clients) -> Tree:
        reply = clients.map(self.train, ToAll(server))
        return average(reply.model, reply.weight)


# The rest


@bug("never maps a step called 'train'")
@dataclass(frozen=True)
class ATrainingStepOfAnotherName(FedAvg):
    def round(self, server: Tree, clients: Clients) -> Tree:
        reply = clients.map(self.learn, ToAll(server))
        return average(reply.model, reply.weight)

    @client_step
    def learn(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        model, state = train(self, graph, model, state, key)
        return Update(model, graph.size("nodes")), state


@bug("ZeroDivisionError")
@dataclass(frozen=True)
class AStepThatFails(FedAvg):
    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> Any:
        return 1 // 0, state


@pytest.mark.parametrize("name", list(BUGS))
def test_a_planted_bug_is_caught_and_named(name):
    method, says = BUGS[name]
    before = torch.get_default_dtype(), torch.get_num_threads()
    with pytest.raises(ContractBroken, match=says):
        check_method(method, rounds=2)
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before


def test_rows_at_their_positions_keep_the_contract():
    @dataclass(frozen=True)
    class Personal(FedAvg):
        def __post_init__(self) -> None:
            if self.aggregate != Mean():
                raise ConfigError("every client keeps its model; leave out aggregate")

        def init(self, clients: Clients) -> Tree:
            return spread(super().init(clients), clients.total)

        def round(self, server: Tree, clients: Clients) -> Tree:
            reply = clients.map(self.train, ToEach(server))
            return put(server, clients.positions, reply.model)

        def deploy(self, server: Tree) -> ToEach:
            return ToEach(server)

    check_method(Personal, rounds=2)
