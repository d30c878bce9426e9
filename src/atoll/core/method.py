"""The contract of a method: the steps of a client, and the server's round.

A client step is a pure function of the client's graph, the received message, the client's private
state and a key. The server's `round` calls steps through `Clients.map` and does not know where
they run: engines decide that. To write a method, subclass `core.training.Training` or `Method`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, overload, runtime_checkable

from torch import Tensor

from atoll.core.aggregate import model_of
from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, View
from atoll.core.hyper import check_hypers
from atoll.core.message import Message, ToAll
from atoll.core.private_layers import private_names, whole_params
from atoll.core.space import USUAL, Grids, Presets, Settings, Space
from atoll.core.task import NODES
from atoll.core.tree import Tree, leaves, tree_map

Reply = TypeVar("Reply")
Reply_co = TypeVar("Reply_co", covariant=True)
Vectorize = bool | Callable[..., bool]
Reasons = Mapping[str, str]  # why a reply field leaves a client, by field name


class Net(Protocol):
    """A network: `init` creates a parameter tree, a call maps it and a graph to logits.

    A network for another task than node classification has `task`, a name of `TASKS`. Logits of
    small graphs are at their roots. See `private_layers.PartlyPrivate` for private layers.
    """

    @property
    def features(self) -> int: ...
    @property
    def classes(self) -> int: ...
    @property
    def views(self) -> Mapping[str, View]: ...  # matrices to precompute from a graph, by name
    def init(self, key: Tensor) -> Tree: ...
    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return logits, (N, C). Dropout is on only if a key is given."""


@runtime_checkable
class Embedder(Protocol):
    """A network with a separate last layer: a call applies `logits` to the result of `embed`."""

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return logits, (N, C). A key turns dropout on."""
        return self.logits(params, self.embed(params, graph, key), graph, key)

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return the last layer's input, one row per classified item (`Graph.at_roots`)."""

    def logits(self, params: Tree, h: Tensor, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Apply the last layer to an embedding h. Its dropout depends on the key of the call."""


def embedder(net: Net) -> Embedder:
    """Return the network as an `Embedder`, or raise an error if it has no embeddings."""
    if not isinstance(net, Embedder) or not getattr(net, "embeds", True):
        raise ConfigError(
            f"{type(net).__name__} has no hidden layer whose output could be compared; "
            "choose a network with at least two layers"
        )
    return net


def task_of(net: object) -> str:
    """Return the name of a network's task. The default is node classification."""
    task: str = getattr(net, "task", NODES.name)
    return task


@dataclass(frozen=True)
class Step:
    """A client step of one method. `Clients.map` runs it on clients."""

    owner: Any  # a method or an evaluator, whose fields engines read by name
    function: Callable[..., Any]  # (owner, graph, message, state, key), typed at its definition
    name: str  # also part of every key that the step gets
    vectorize: bool = True  # whether `fused` may run many clients in one program
    keeps_state: bool = False  # the step returns only a reply and does not change the private state
    # Reply fields with a node or edge axis, each with the reason why it must leave the client.
    discloses: Reasons = field(default_factory=lambda: MappingProxyType({}), hash=False)
    rows: bool = False  # whether other clients affect the first axis of its message and reply

    def __call__(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> tuple[Tree, Tree]:
        result = self.function(self.owner, graph, message, state, key)
        if self.keeps_state:
            return result, state
        reply, state = result
        return reply, state


class TypedStep(Step, Generic[Reply_co]):
    """A step with the type of its reply, which `clients.map` returns stacked."""


class StepDefinition(Generic[Reply_co]):
    """The descriptor that `client_step` stores in a class. Access on a method returns a `Step`."""

    def __init__(
        self,
        function: Callable[..., Any],
        vectorize: Vectorize = True,
        keeps_state: bool = False,
        discloses: Reasons | None = None,
        rows: bool = False,
    ) -> None:
        self.function, self.vectorize, self.keeps_state = function, vectorize, keeps_state
        self.discloses, self.rows = MappingProxyType(dict(discloses or {})), rows
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> StepDefinition[Reply_co]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> TypedStep[Reply_co]: ...
    def __get__(self, instance: object | None, owner: type) -> object:
        if instance is None:
            return self
        vectorize = self.vectorize(instance) if callable(self.vectorize) else self.vectorize
        options = vectorize, self.keeps_state, self.discloses, self.rows
        return TypedStep[Reply_co](instance, self.function, self.name, *options)


def declared_step(owner: object, name: str) -> Step | None:
    """Return the step that the owner's class declares under this name, or None.

    Look up every name that arrives over the network here, never with `getattr`. An attribute or a
    property may return a step of another object, which would run without the owner's protection.
    """
    definition = inspect.getattr_static(type(owner), name, None)
    return definition.__get__(owner, type(owner)) if type(definition) is StepDefinition else None


def declared_steps(owner: object) -> list[Step]:
    """Return all steps that the owner's class declares."""
    names = dict.fromkeys(name for cls in type(owner).__mro__ for name in vars(cls))
    found = (declared_step(owner, name) for name in names)
    return [step for step in found if step is not None]


@overload
def client_step(function: Callable[..., tuple[Reply, object]]) -> StepDefinition[Reply]: ...
@overload
def client_step(
    *,
    keeps_state: Literal[True],
    vectorize: Vectorize = ...,
    discloses: Reasons = ...,
    rows: bool = ...,
) -> Callable[[Callable[..., Reply]], StepDefinition[Reply]]: ...
@overload
def client_step(
    *,
    keeps_state: Literal[False] = ...,
    vectorize: Vectorize = ...,
    discloses: Reasons = ...,
    rows: bool = ...,
) -> Callable[[Callable[..., tuple[Reply, object]]], StepDefinition[Reply]]: ...
def client_step(function: Callable[..., Any] | None = None, **options: Any) -> object:
    """Mark a method's function `(self, graph, message, state, key) -> (reply, state)` as a step.

    The state is None in a client's first step. See `Step` for the options. A method that wraps
    another method may give `vectorize` as a function of the wrapper.

    Examples:
        >>> import atoll
        >>> class Counting:
        ...     @atoll.client_step(keeps_state=True)
        ...     def count(self, graph, message, state, key):
        ...         return graph.real.sum()
        >>> Counting().count.name, Counting().count.keeps_state
        ('count', True)
    """
    if function is not None:
        return StepDefinition(function)
    return lambda given: StepDefinition(given, **options)


class Clients(Protocol):
    """The participants of a round, as the server sees them."""

    @property
    def positions(self) -> Tensor: ...  # in the federation, ascending, (K,) int64
    @property
    def numbers(self) -> Tensor: ...  # for noise of each client, the same in any order, (K,) int64
    def __len__(self) -> int: ...  # the number of participants
    @property
    def total(self) -> int: ...  # the number of clients in the federation
    @property
    def replies(self) -> Mapping[str, Any]: ...  # by step: the latest of this round, stacked
    @property
    def round(self) -> int: ...  # -1 while `init` runs
    @property
    def key(self) -> Tensor: ...  # for the server's noise in this round
    def map(self, step: TypedStep[Reply], message: Message) -> Reply:
        """Run the step on every participant. Return the replies, stacked in client order."""

    def sample(self, fraction: float) -> Clients: ...  # at least one; the round's key selects
    def require_finite(self, tree: Tree, problem: str) -> None:
        """Stop the run with the given sentence if one of the tree's tensors is not finite."""

    def happens(self, condition: Tensor) -> bool:
        """Return whether a rare event occurs in this round, given a boolean scalar tensor.

        While an engine records or replays the round, the answer is False. If the event did occur,
        Atoll repeats the round without the recording.
        """


@dataclass(frozen=True)
class Method(ABC):
    """Base class of all methods. Subclasses are frozen dataclasses of hyper-parameters.

    The training step is called `train`. A method stores nothing on `self`: its data are in the
    server's tree and in the clients' private states.

    Examples:
        >>> import atoll
        >>> method = atoll.methods.FedProx(net=atoll.nn.GCN(features=10, classes=3), mu=0.1)
        >>> isinstance(method, atoll.Method), method.deployed
        (True, 'global')
    """

    net: Net

    paper: ClassVar[str] = ""  # authors, title, venue and year, for `atoll methods`
    # Named sets of hyper-parameters of method, net and optimizer (`--set preset=NAME`).
    presets: ClassVar[Presets] = MappingProxyType({})
    for_graphs: ClassVar[Settings] = MappingProxyType({})  # other defaults for graph tasks
    space: ClassVar[Space] = USUAL  # the ranges of hyper-parameters that `atoll tune` searches
    # Other named search spaces (`atoll tune --preset NAME`), such as the values that a paper tried.
    grids: ClassVar[Grids] = MappingProxyType({})
    # Names of the supported tasks: `tuple(TASKS)` if the method minimises the task's loss.
    tasks: ClassVar[tuple[str, ...]] = (NODES.name,)
    # Supported networks, the default first. Empty: any network, a GCN by default.
    nets: ClassVar[tuple[str, ...]] = ()
    deployed: ClassVar[str] = "global"  # or "personalised": the model that clients predict with
    # Why `core.dp` cannot clip and noise the replies, or "" if it can. A reply must then have only
    # `model`, trained from the received model, and `weight`, and the server needs only the mean.
    not_private: ClassVar[str] = (
        "it does not declare that its clients send only one update of a model"
    )
    # Why a method without a field `aggregate` accepts no aggregation rule (`core.aggregate`).
    not_averaging: ClassVar[str] = "it has no field `aggregate`"
    # Bytes that the server needs per client and node, with the node count of the largest client.
    bytes_per_node: ClassVar[int] = 0
    # Fields that count repetitions. Their values change no shape of a message.
    repeats: ClassVar[tuple[str, ...]] = ("epochs",)

    def __post_init__(self) -> None:
        """Check every hyper-parameter. A method with more checks calls this first."""
        check_hypers(self)

    @property
    def views(self) -> Mapping[str, View]:
        """The matrices that clients precompute. The default is the network's views."""
        return self.net.views

    @abstractmethod
    def init(self, clients: Clients) -> Tree:
        """Return the server's first tree."""

    def loss(self, params: Tree, graph: Graph, key: Tensor | None) -> Tensor:
        """Return the loss that a client minimises (`fit`). The default is the task's loss."""
        return graph.task.loss(self.net(params, graph, key), graph)

    @abstractmethod
    def round(self, server: Tree, clients: Clients) -> Tree:
        """Run one round: map steps over the clients, aggregate, return the server's next tree."""

    def stage(self, round: int) -> Hashable:
        """Return a round's stage. Rounds of one stage run the same operations.

        So an engine can record one and replay it, and `clients.round` stays that of the recorded
        round. A method may use that number only to find the stage, never in its arithmetic. If it
        reads the number without stages, an engine does not record whole rounds.
        """
        return None

    def deploy(self, server: Tree) -> Message:
        """Return the message that clients predict with. The default is one model (`model_of`)."""
        return ToAll(model_of(server))

    def local(self, reply: Any) -> Tree:
        """Return the clients' models right after `train`, from the stacked replies."""
        return reply.model

    def predict(
        self, graph: Graph, message: Tree, state: Tree, key: Tensor | None = None
    ) -> Tensor:
        """Return logits on a client's graph, given the deployed message and the private state.

        Pass the key to the network. A key is given only to repeat papers that scored with dropout.
        """
        return self.net(whole_params(self.net, graph, message, state), graph, key)

    def derived_from(self, state: Tree) -> Tree:
        """Return the part of a private state that `derive` needs, or None to derive nothing.

        The state may be a stack of several clients' states.
        """
        return None

    def derive(self, graph: Graph, part: Tree) -> Tree:
        """Compute values that every step needs, from the graph and the result of `derived_from`.

        An engine may cache the result as `graph.derived`. Without it a step calls `derive`.
        """
        raise NotImplementedError(f"{type(self).__name__} has `derived_from`, so it needs `derive`")

    def diagnostics(self, server: Tree) -> Mapping[str, Any]:
        """Return facts about the N clients besides their models, for reports and analyses.

        Known names: `similarity`, (N, N) or (F, N, N) for F factors, with NaN for unknown pairs.
        `mixing` has the same shapes: the share of each client's model (column) in a client's next
        model (row). `cluster`, (N,), is each client's cluster. `cached` lists, for each client, the
        rounds in which its model was stored. `splits` and `trace` describe GCFL's clusters.
        """
        return {}

    def explain_edges(self, graph: Graph, message: Tree, state: Tree) -> Tensor | None:
        """Return the weight, 0 to 1, of each entry of the view `loops`, or None without weights."""
        return None

    def scored_as(self) -> str:
        """Return a model's kind: "personalised" if it has private layers, else `deployed`."""
        return "personalised" if private_names(self.net) else self.deployed

    def too_short(self, rounds: int) -> str:
        """Say in one sentence which phase a run of `rounds` rounds omits, or return ""."""
        return ""

    def why_not_private(self) -> str:
        """Say why these settings cannot be private, or return "". The default is `not_private`."""
        return self.not_private

    def why_bound(self) -> str:
        """Say why clients can predict only the nodes of their training, or return "" otherwise."""
        return ""

    @property
    def reach(self) -> int | None:
        """The number of hops that a prediction depends on, or None for the whole graph."""
        return getattr(self.net, "reach", None)

    def plain_params(self, message: Tree, state: Tree) -> Tree:
        """Return the network's parameters if `predict` only calls the network, else None."""
        plain = type(self).predict is Method.predict and not private_names(self.net)
        return message if plain else None

    def mixture(self, state: Tree) -> tuple[Tensor, Tensor] | None:
        """Return a client's class prior, (C,), and its weights of the network's branches, (B,).

        Override it, and `plain_params`, if `predict` mixes branches with these numbers. None stands
        for no prior and equal weights.
        """
        return None

    def redeploy(self, server: Tree, tree: Tree) -> Tree:
        """Replace the deployed model in the server's tree. Override it if `deploy` computes one."""
        old, new = leaves(self.deploy(server).tree), leaves(tree)
        swapped = {id(a): b for a, b in zip(old, new, strict=True)}
        if not swapped.keys() <= {id(leaf) for leaf in leaves(server)}:
            raise ConfigError(
                f"{type(self).__name__} computes the model that it deploys, so that no other "
                "method can correct it"
            )
        return tree_map(lambda leaf: swapped.get(id(leaf), leaf), server)
