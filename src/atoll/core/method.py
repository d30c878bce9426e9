"""What a method is: what one client does, and what the server does with the replies.

Its `client_step`s are pure functions of (the client's graph, what it received, its private state,
a key); `round` calls them through `Clients.map` and never learns where they run.
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
Reasons = Mapping[str, str]  # why each of some fields leaves a client


class Net(Protocol):
    """A network: `init` makes a parameter tree, a call turns it and a graph into logits.

    One for another task than node classification names it (`task`, a name of `TASKS`). Logits of
    graphs stand at their roots. One with private layers is also a `private_layers.PartlyPrivate`.
    """

    @property
    def features(self) -> int: ...
    @property
    def classes(self) -> int: ...
    @property
    def views(self) -> Mapping[str, View]: ...  # precomputed from a graph, by name
    def init(self, key: Tensor) -> Tree: ...
    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Logits, (N, C); with a key dropout is on, without one the network predicts."""


@runtime_checkable
class Embedder(Protocol):
    """A network with a separate last layer: a call is `logits` of `embed`."""

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Logits, (N, C); a key turns dropout on."""
        return self.logits(params, self.embed(params, graph, key), graph, key)

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """The last layer's input, a row for all that is classified (`Graph.at_roots`)."""

    def logits(self, params: Tree, h: Tensor, graph: Graph, key: Tensor | None = None) -> Tensor:
        """The last layer on an embedding h; the same key drops what a whole call would drop."""


def embedder(net: Net) -> Embedder:
    """The network, for methods that compare embeddings; a clear error if it has none."""
    if not isinstance(net, Embedder) or not getattr(net, "embeds", True):
        raise ConfigError(
            f"{type(net).__name__} has no hidden layer whose output could be compared; "
            "choose a network with at least two layers"
        )
    return net


def task_of(net: object) -> str:
    """The name of a network's task: node classification unless it names another one."""
    task: str = getattr(net, "task", NODES.name)
    return task


@dataclass(frozen=True)
class Step:
    """A client step of one method, ready to be mapped over clients."""

    owner: Any  # a method or an evaluator, whose fields engines read by name
    function: Callable[..., Any]  # (owner, graph, message, state, key), typed where it is written
    name: str  # also part of every key that it gets
    vectorize: bool = True  # whether `fused` may run many clients in one program
    keeps_state: bool = False  # it only reads the private state, and returns just the reply
    # Reply fields with a node or edge axis, each with the reason why it must leave.
    discloses: Reasons = field(default_factory=lambda: MappingProxyType({}), hash=False)

    def __call__(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> tuple[Tree, Tree]:
        result = self.function(self.owner, graph, message, state, key)
        if self.keeps_state:
            return result, state
        reply, state = result
        return reply, state


class TypedStep(Step, Generic[Reply_co]):
    """A step whose record of replies a type checker knows: `clients.map` returns that record."""


class StepDefinition(Generic[Reply_co]):
    """The descriptor that `client_step` leaves in a class; on a method it gives a `Step`."""

    def __init__(
        self,
        function: Callable[..., Any],
        vectorize: Vectorize = True,
        keeps_state: bool = False,
        discloses: Reasons | None = None,
    ) -> None:
        self.function, self.vectorize, self.keeps_state = function, vectorize, keeps_state
        self.discloses = MappingProxyType(dict(discloses or {}))
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
        options = vectorize, self.keeps_state, self.discloses
        return TypedStep[Reply_co](instance, self.function, self.name, *options)


def declared_step(owner: object, name: str) -> Step | None:
    """The step that the owner's class declares with `client_step` under this name, if any.

    A name from a packet is looked up here and never with `getattr`: an attribute or a property may
    return a step of another object, which would run without that object's protections.
    """
    definition = inspect.getattr_static(type(owner), name, None)
    return definition.__get__(owner, type(owner)) if type(definition) is StepDefinition else None


def declared_steps(owner: object) -> list[Step]:
    """Every step that the owner's class declares."""
    names = dict.fromkeys(name for cls in type(owner).__mro__ for name in vars(cls))
    found = (declared_step(owner, name) for name in names)
    return [step for step in found if step is not None]


@overload
def client_step(function: Callable[..., tuple[Reply, object]]) -> StepDefinition[Reply]: ...
@overload
def client_step(
    *, keeps_state: Literal[True], vectorize: Vectorize = ..., discloses: Reasons = ...
) -> Callable[[Callable[..., Reply]], StepDefinition[Reply]]: ...
@overload
def client_step(
    *, keeps_state: Literal[False] = ..., vectorize: Vectorize = ..., discloses: Reasons = ...
) -> Callable[[Callable[..., tuple[Reply, object]]], StepDefinition[Reply]]: ...
def client_step(function: Callable[..., Any] | None = None, **options: Any) -> object:
    """Mark a method's function `(self, graph, message, state, key) -> (reply, state)` as a step.

    The state is None on a client's first visit. See `Step` for the options. A method around
    another one gives `vectorize` as a function of itself.

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
    """The clients that take part in a round, as the server sees them."""

    @property
    def positions(self) -> Tensor: ...  # in the federation, ascending, (K,) int64
    def __len__(self) -> int: ...  # how many take part
    @property
    def total(self) -> int: ...  # how many clients the federation has
    @property
    def replies(self) -> Mapping[str, Any]: ...  # the last of each step in this round, stacked
    @property
    def round(self) -> int: ...  # -1 while `init` runs
    @property
    def key(self) -> Tensor: ...  # for the server's own noise in this round
    def map(self, step: TypedStep[Reply], message: Message) -> Reply:
        """Run the step on every participant; the replies come back stacked, in client order."""

    def sample(self, fraction: float) -> Clients: ...  # at least one, drawn by the round's key
    def require_finite(self, tree: Tree, problem: str) -> None:
        """Stop with the given sentence if one of the server's tensors is not finite."""

    def happens(self, condition: Tensor) -> bool:
        """Whether something rare happens in this round, () bool, which only the device knows.

        A recorded round is one without it; rounds in which it happens are played anew.
        """


@dataclass(frozen=True)
class Method(ABC):
    """What every method offers. Subclasses are frozen dataclasses of hyper-parameters.

    The step that trains is called `train`; everything a method keeps is in the server's tree or in
    the clients' private states, never on `self`.

    Examples:
        >>> import atoll
        >>> method = atoll.methods.FedProx(net=atoll.nn.GCN(features=10, classes=3), mu=0.1)
        >>> isinstance(method, atoll.Method), method.deployed
        (True, 'global')
    """

    net: Net

    paper: ClassVar[str]  # authors, title, venue and year, for `atoll methods`
    # Named sets of hyper-parameters of method, net and optimizer (`--set preset=NAME`).
    presets: ClassVar[Presets] = MappingProxyType({})
    for_graphs: ClassVar[Settings] = MappingProxyType({})  # other defaults to classify graphs
    space: ClassVar[Space] = USUAL  # the ranges of hyper-parameters that `atoll tune` searches
    # Named other spaces (`atoll tune --preset NAME`), such as the values that a paper tried.
    grids: ClassVar[Grids] = MappingProxyType({})
    # Names of the tasks that it can learn; `tuple(TASKS)` where it minimises the task's loss.
    tasks: ClassVar[tuple[str, ...]] = (NODES.name,)
    # Networks that it works with, the default first; empty: any, a GCN by default.
    nets: ClassVar[tuple[str, ...]] = ()
    deployed: ClassVar[str] = "global"  # or "personalised": the model that clients predict with
    # Why `core.dp` cannot clip and noise what its clients send; "" if it can, because a reply is
    # `model`, trained from the received one, and `weight`, and the server needs only their mean.
    not_private: ClassVar[str] = (
        "it does not say that its clients send one update of a model and nothing else"
    )
    # Why a method without a field `aggregate` takes no aggregation rule (`core.aggregate`).
    not_averaging: ClassVar[str] = "it has no field `aggregate`"
    # Memory that a server needs for each node, of as many as the largest client has, and client.
    bytes_per_node: ClassVar[int] = 0

    def __post_init__(self) -> None:
        """Check every hyper-parameter; a method that checks more calls this first."""
        check_hypers(self)

    @property
    def views(self) -> Mapping[str, View]:
        """What the clients precompute; the network's views unless a method needs more."""
        return self.net.views

    @abstractmethod
    def init(self, clients: Clients) -> Tree:
        """The server's first tree."""

    def loss(self, params: Tree, graph: Graph, key: Tensor | None) -> Tensor:
        """What a client minimises (`fit`); unless a method needs more, the task's own loss."""
        return graph.task.loss(self.net(params, graph, key), graph)

    @abstractmethod
    def round(self, server: Tree, clients: Clients) -> Tree:
        """One round: map steps over the clients, aggregate, return the server's next tree."""

    def stage(self, round: int) -> Hashable:
        """The kind of a round, for a method that reads `clients.round`; None promises nothing."""
        # Rounds of one stage do the same with other numbers, so that they can be recorded once.
        return None

    def deploy(self, server: Tree) -> Message:
        """The server's part of a prediction: ToAll one model (`model_of`), ToEach its own."""
        return ToAll(model_of(server))

    def local(self, reply: Any) -> Tree:
        """What a client predicts with right after `train`, from the stacked replies."""
        return reply.model

    def predict(
        self, graph: Graph, message: Tree, state: Tree, key: Tensor | None = None
    ) -> Tensor:
        """Logits on a client's own graph, from what was deployed and its private state.

        A key is given only to reproduce papers that scored with dropout on; pass it to the network.
        """
        return self.net(whole_params(self.net, graph, message, state), graph, key)

    def derived_from(self, state: Tree) -> Tree:
        """What `derive` needs of a private state, or of many, stacked; None to derive nothing."""
        return None

    def derive(self, graph: Graph, part: Tree) -> Tree:
        """What steps need again and again, from the graph and `derived_from`.

        An engine may keep it, as `graph.derived`; a step that does not find it there derives it.
        """
        raise NotImplementedError(f"{type(self).__name__} has `derived_from`, so it needs `derive`")

    def diagnostics(self, server: Tree) -> Mapping[str, Any]:
        """What the server knows of its clients beside the models, for reports and analyses.

        Known names: `similarity`, (N, N) or (F, N, N) for F factors, NaN for pairs that have not
        met; `mixing`, of these shapes: how much of whose model each client (row) got; `cluster`,
        (N,); `cached`, the rounds after which each client's model was put aside; `splits`, `trace`.
        """
        return {}

    def explain_edges(self, graph: Graph, message: Tree, state: Tree) -> Tensor | None:
        """How much each entry of the view `loops` counts, 0 to 1; None for no weights."""
        return None

    def scored_as(self) -> str:
        """A client's kind of model: "global", or "personalised", as any with private layers."""
        return "personalised" if private_names(self.net) else self.deployed

    def too_short(self, rounds: int) -> str:
        """What a run of so few rounds leaves out, as a sentence for the user; "" for nothing."""
        return ""

    def why_not_private(self) -> str:
        """Why it cannot be private as it is set; a method asks its settings where they matter."""
        return self.not_private

    def why_bound(self) -> str:
        """Why it predicts only the nodes it was trained on; "" if it can predict on any graph."""
        return ""

    @property
    def reach(self) -> int | None:
        """How many hops a prediction looks around a node; None for the whole graph."""
        return getattr(self.net, "reach", None)

    def plain_params(self, message: Tree, state: Tree) -> Tree:
        """The network's parameters if `predict` is the network and no more; None if it is more."""
        plain = type(self).predict is Method.predict and not private_names(self.net)
        return message if plain else None

    def redeploy(self, server: Tree, tree: Tree) -> Tree:
        """The server's tree with another deployed model; to override where `deploy` computes."""
        old, new = leaves(self.deploy(server).tree), leaves(tree)
        swapped = {id(a): b for a, b in zip(old, new, strict=True)}
        if not swapped.keys() <= {id(leaf) for leaf in leaves(server)}:
            raise ConfigError(
                f"{type(self).__name__} computes the model that it deploys, so that no other "
                "method can correct it"
            )
        return tree_map(lambda leaf: swapped.get(id(leaf), leaf), server)
