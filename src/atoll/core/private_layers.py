"""Private layers: parameters that never leave a client, because they fit only its own data.

A network names them in `private` (keys at the top of its parameter tree). A method shares the rest
and keeps these layers in the private state. Most networks have none. `fit_received` is the local
training of FedAvg, with or without private layers.
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
    """The protocol of a network with private layers, in addition to `Net`."""

    @property
    def private(self) -> tuple[str, ...]: ...
    def init_private(self, key: Tensor, graph: Graph) -> Tree:
        """Initialise private layers for the features and classes of the client."""


@record
class Private:
    """The private state of a client: its own layers and the optimizer's moments."""

    layers: Tree
    moments: Tree


class KeepsPrivate:
    """Base of a private state that has a `Private` in its field `own`, and more fields."""

    own: Private


def private_names(net: Net) -> tuple[str, ...]:
    """Return the names of the parameters that never leave a client. () for most networks."""
    # Not `isinstance` of `PartlyPrivate`, because every step asks and protocols are slow.
    names: tuple[str, ...] = getattr(net, "private", ())
    return names


def shared_part(net: Net, params: Tree) -> Tree:
    """Return the part of a parameter tree (or of a gradient) that may leave a client."""
    own = private_names(net)
    return {name: part for name, part in params.items() if name not in own} if own else params


def private_part(net: Net, params: Tree) -> Tree:
    """Return the part of a parameter tree that stays at the client. {} for most networks."""
    return {name: params[name] for name in private_names(net)}


def join_parts(common: Tree, own: Tree) -> Tree:
    """Join the shared and the private part of a parameter tree."""
    return {**common, **own} if own else common


def init_shared(net: Net, key: Tensor) -> Tree:
    """Initialise the parameters without the private layers, for the server."""
    return shared_part(net, net.init(key))


def init_private(net: Net, graph: Graph, key: Tensor) -> Tree:
    """Initialise a client's private layers. {} for a network without private layers."""
    if not isinstance(net, PartlyPrivate):
        return {}
    return net.init_private(fold(key, "private"), graph)


def whole_params(net: Net, graph: Graph, received: Tree, state: Tree) -> Tree:
    """Return the parameters that a client predicts with: the received and the private part."""
    if not private_names(net):
        return received  # ignore the state, because a method may store something else there
    own = state.own if isinstance(state, KeepsPrivate) else state
    if own is None:  # the client has never trained: initialise its layers with a fixed key
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
    """Train the received model on a client's graph, as in FedAvg. Return shared layers and state.

    Private layers train together with the received layers and stay in the state, which also
    stores the optimizer's moments. `adjust` changes the gradient of the shared layers, as in
    `fit`. `net` replaces the method's network.
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
