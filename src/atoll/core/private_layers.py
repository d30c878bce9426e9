"""Layers that never leave a client.

A network may name some of its parameters private (`private`, names at the top of its parameter
tree): they fit what only this client has, such as its own features and classes. A method then
shares the rest, trains both together and keeps the client's part in the private state. For a
network that names none, all of it is shared and these functions change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from atoll.core.fit import fit
from atoll.core.graph import Graph
from atoll.core.optim import Optimizer
from atoll.core.random import fold, make_key
from atoll.core.tree import Tree, record

if TYPE_CHECKING:
    from atoll.core.method import Net


@runtime_checkable
class PartlyPrivate(Protocol):
    """What a network with private layers offers beside `Net`."""

    @property
    def private(self) -> tuple[str, ...]:
        """Names of the parameters that never leave a client."""

    def init_private(self, key: Tensor, graph: Graph) -> Tree:
        """Fresh private layers, for the features and classes that the client has."""


@record
class Private:
    """What a client keeps between rounds: its own layers and the optimizer's moments."""

    layers: Tree
    moments: Tree


def private_names(net: Net) -> tuple[str, ...]:
    """The parameters that never leave a client, () for most networks."""
    return net.private if isinstance(net, PartlyPrivate) else ()


def shared(net: Net, params: Tree) -> Tree:
    """The part of a parameter tree (or of a gradient) that may leave."""
    own = private_names(net)
    return {name: part for name, part in params.items() if name not in own} if own else params


def private(net: Net, params: Tree) -> Tree:
    """The part that stays, {} for a network without private layers."""
    return {name: params[name] for name in private_names(net)}


def joined(common: Tree, own: Tree) -> Tree:
    """A whole parameter tree from its two parts."""
    return {**common, **own} if own else common


def own_layers(net: Net, graph: Graph, key: Tensor) -> Tree:
    """A client's private layers before it has trained, {} for a network without any."""
    if not isinstance(net, PartlyPrivate):
        return {}
    return net.init_private(fold(key, "private"), graph)


def kept(
    net: Net, graph: Graph, state: Private | None, key: Tensor, *, reset: bool = False
) -> Private:
    """What a client kept; on its first visit, layers drawn by the key and no moments yet.

    With `reset` the moments start anew.
    """
    own = Private(own_layers(net, graph, key), None) if state is None else state
    return replace(own, moments=None) if reset else own


def whole(net: Net, graph: Graph, received: Tree, state: Private | None) -> Tree:
    """The parameters that a client predicts with, from what it received and what it kept.

    A client that has never trained has no layers of its own yet; a fixed draw stands in for them.
    """
    if not private_names(net):
        return received  # whatever the state is: a method may keep something else there
    return joined(received, kept(net, graph, state, make_key(0, graph.real.device)).layers)


def fit_layers(
    loss: Callable[..., Tensor],
    net: Net,
    graph: Graph,
    received: Tree,
    own: Private,
    optimizer: Optimizer,
    epochs: int,
    key: Tensor,
    adjust: Callable[[Tree, Tree], Tree] | None = None,
) -> tuple[Tree, Private]:
    """`fit` on received and private layers together: the part to send, and what the client keeps.

    Args:
        loss: (params, graph, key) -> scalar, of whole parameter trees.
        net: Says which layers are private.
        graph: The client's.
        received: The shared layers.
        own: What the client kept (`kept`).
        optimizer: As for `fit`.
        epochs: As for `fit`.
        key: As for `fit`.
        adjust: (grads, params) -> grads of the shared layers, as for `fit`; those of private ones
            are not bent.
    """

    def bent(grads: Tree, params: Tree) -> Tree:
        assert adjust is not None
        return joined(adjust(shared(net, grads), shared(net, params)), private(net, grads))

    params = joined(received, own.layers)
    bend = None if adjust is None else bent
    model, moments = fit(loss, params, optimizer, own.moments, epochs, key, bend, graph=graph)
    return shared(net, model), Private(private(net, model), moments)
