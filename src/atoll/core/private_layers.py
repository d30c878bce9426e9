"""Layers that never leave a client, because they fit what only this client has (its features).

A network names them (`private`, names at the top of its parameter tree). A method shares the rest
and keeps the client's part in the private state. Most networks have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from atoll.core.fit import Adjust, fit
from atoll.core.graph import Graph
from atoll.core.random import fold, make_key
from atoll.core.tree import Tree, record

if TYPE_CHECKING:
    from atoll.core.method import Net
    from atoll.core.training import Training


@runtime_checkable
class PartlyPrivate(Protocol):
    """What a network with private layers offers beside `Net`."""

    @property
    def private(self) -> tuple[str, ...]: ...
    def init_private(self, key: Tensor, graph: Graph) -> Tree:
        """Fresh private layers, for the features and classes that the client has."""


@record
class Private:
    """What a client keeps between rounds: its own layers and the optimizer's moments."""

    layers: Tree
    moments: Tree


class KeepsPrivate:
    """Base of a method's record that keeps more than a `Private`, which is its field `own`."""

    own: Private


def private_names(net: Net) -> tuple[str, ...]:
    """The parameters that never leave a client, () for most networks."""
    # Not by `PartlyPrivate`: every step asks, and `isinstance` of a protocol is slow.
    names: tuple[str, ...] = getattr(net, "private", ())
    return names


def shared_part(net: Net, params: Tree) -> Tree:
    """The part of a parameter tree (or of a gradient) that may leave a client."""
    own = private_names(net)
    return {name: part for name, part in params.items() if name not in own} if own else params


def private_part(net: Net, params: Tree) -> Tree:
    """The part that stays; mostly {}."""
    return {name: params[name] for name in private_names(net)}


def join_parts(common: Tree, own: Tree) -> Tree:
    """A whole parameter tree from its two parts."""
    return {**common, **own} if own else common


def init_shared(net: Net, key: Tensor) -> Tree:
    """Fresh parameters without the private layers: where a server starts."""
    return shared_part(net, net.init(key))


def init_private(net: Net, graph: Graph, key: Tensor) -> Tree:
    """A client's private layers before it has trained, {} for a network without any."""
    if not isinstance(net, PartlyPrivate):
        return {}
    return net.init_private(fold(key, "private"), graph)


def whole_params(net: Net, graph: Graph, received: Tree, state: Tree) -> Tree:
    """The parameters that a client predicts with, from what it received and what it kept."""
    if not private_names(net):
        return received  # whatever the state is: a method may keep something else there
    own = state.own if isinstance(state, KeepsPrivate) else state
    if own is None:  # it has never trained: a fixed draw replaces its private layers
        return join_parts(received, init_private(net, graph, make_key(0, graph.real.device)))
    return join_parts(received, own.layers)


def fit_received(
    method: Training,
    graph: Graph,
    received: Tree,
    state: Private | None,
    key: Tensor,
    *,
    adjust: Adjust | None = None,
    net: Net | None = None,
) -> tuple[Tree, Private]:
    """Train the received model on a client's graph, as FedAvg does: the model to send, and a state.

    Private layers train together with the received ones and stay in the state, which also keeps the
    optimizer's moments. `adjust` bends the gradient of the shared layers, as in `fit`; `net` is the
    network where that is not the method's.
    """
    net = method.net if net is None else net
    own = Private(init_private(net, graph, key), None) if state is None else state

    def bent(grads: Tree, params: Tree) -> Tree:
        assert adjust is not None
        common = adjust(shared_part(net, grads), shared_part(net, params))
        return join_parts(common, private_part(net, grads))

    start = join_parts(received, own.layers)
    before = None if method.optimizer_state == "reset" else own.moments
    bend = None if adjust is None else bent
    trained = fit(method.loss, start, method.optimizer, before, method.epochs, key, graph, bend)
    model, moments = trained
    return shared_part(net, model), Private(private_part(net, model), moments)
