"""The contract that every method keeps, as one call: `check_method(MyMethod)`.

    from atoll.testing import check_method

    def test_my_method():
        check_method(MyMethod)                          # or: lambda net: MyMethod(net, mu=0.1)

It runs the method in float64 with dropout on and raises `ContractBroken`, which says what to mend.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from atoll.core.aggregate import Median
from atoll.core.batching import Graphs
from atoll.core.errors import AtollError, ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph
from atoll.core.message import Message
from atoll.core.method import Method, Step
from atoll.core.random import fold, make_key, uniform
from atoll.core.task import NODES, Task, task_named
from atoll.core.tree import Tree, leaves, named_leaves, structure, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.prepare import EngineInputs
from atoll.engines.simulation import Simulation
from atoll.experiment.rounds import Experiment, Run
from atoll.nn import NETS

TOLERANCE = 1e-9
ROUNDS = 3
FEATURES, CLASSES = 11, 3
SIZES = (13, 17, 22, 9)

MakeMethod = Callable[..., Method]
"""A method's class, or a function: net -> method."""


class ContractBroken(AssertionError):
    """A method does not keep the contract; the message says which part and where."""


def check_method(make: MakeMethod, *, rounds: int = ROUNDS) -> None:
    """Check everything that the engines rely on.

    Engines agree; steps are pure; replies are finite, declared and free of private state; the
    order of clients and the numbering of nodes do not matter; one client and some clients work; a
    run resumed in the middle ends with the same numbers, and so does one whose rounds are recorded
    and replayed. All of it for every task that the method names: nodes to classify, or many graphs
    at each client.

    Args:
        make: A method's class, or a function that makes the method for a network.
        rounds: How many rounds each check runs.

    Raises:
        ContractBroken: The method does not keep the contract; the message says what to mend.

    Examples:
        >>> from atoll.methods import FedSage
        >>> from atoll.testing import check_method
        >>> check_method(FedSage, rounds=2)
    """
    with double_precision(), _one_thread():
        for task in getattr(_class(make), "tasks", (NODES.name,)):
            _check_task(make, task_named(task), rounds)


def _check_task(make: MakeMethod, task: Task, rounds: int) -> None:
    small: dict[str, Any] = {"hidden": 5, "dropout": 0.4}
    if task.many_graphs:
        net, federation = NETS["gin-graph"], small_graph_federation()
        small["layers"] = 2  # the first convolution is like no other; one other is enough
    else:
        net, federation = NETS[(*getattr(_class(make), "nets", ()), "gcn")[0]], small_federation()
    method = make(net=net(FEATURES, CLASSES, **small))
    with _naming(task):
        check_frozen(method)
        check_steps(method, federation, rounds)
        for fraction in (1.0, 0.5):
            # The run that the others are compared with is made once.
            straight = _run(method, federation, "serial", rounds, fraction)
            check_engines(method, federation, rounds, fraction, straight)
            check_client_order(method, federation, rounds, fraction, straight)
            if fraction == 1:
                check_node_order(method, federation, rounds, straight)
        check_engines(method, one_client(federation), rounds)
        check_resume(method, federation, rounds)
        check_replay(method, federation, rounds)
        check_replay(method, federation, rounds, fraction=0.5)
        check_rule(method, federation)


def _class(make: MakeMethod) -> Any:
    """The method's class, also behind `functools.partial`."""
    return getattr(make, "func", make)


def check_frozen(method: Method) -> None:
    """A method is a frozen dataclass: it cannot remember anything."""
    # Asked of the class itself: a subclass without the decorator is not frozen any more.
    params = vars(type(method)).get("__dataclass_params__")
    if params is None or not params.frozen or "__dict__" not in dir(method):
        raise ContractBroken(f"{_name(method)} must be a frozen dataclass: @dataclass(frozen=True)")


def check_engines(
    method: Method,
    federation: Federation,
    rounds: int,
    fraction: float = 1.0,
    straight: Run | None = None,
) -> None:
    """All engines give the same server tree, private states and scores.

    `straight`, here and below, is the serial run if it has been made already.
    """
    share = f" with {fraction:.0%} of the clients in a round" if fraction < 1 else ""
    reference = straight or _run(method, federation, "serial", rounds, fraction)
    for engine in (name for name in ENGINES if name != "serial"):
        other = _run(method, federation, engine, rounds, fraction)
        _same_runs(reference, other, f"engines serial and {engine} disagree{share}")
    # Small chunks split the clients into several programs; that must not show either.
    chunked = _run(method, federation, "fused", rounds, fraction, chunk=2)
    _same_runs(reference, chunked, f"fused in chunks of two disagrees with serial{share}")


def check_client_order(
    method: Method,
    federation: Federation,
    rounds: int,
    fraction: float = 1.0,
    straight: Run | None = None,
) -> None:
    """Listing the clients in another order changes nothing but the order of the results."""
    order = [2, 0, 3, 1]
    straight = straight or _run(method, federation, "serial", rounds, fraction)
    turned = _run(method, federation.reordered(order), "serial", rounds, fraction)
    for scored, scores in straight.history.scores.items():
        _close(
            torch.from_numpy(scores[-1][order]),
            torch.from_numpy(turned.history.scores[scored][-1]),
            f"the order of the clients changes the {scored} scores",
        )


def check_node_order(
    method: Method, federation: Federation, rounds: int, straight: Run | None = None
) -> None:
    """Numbering each client's nodes differently changes nothing."""
    graphs = tuple(relabelled(graph, seed) for seed, graph in enumerate(federation.graphs))
    moved = dataclasses.replace(federation, graphs=graphs)
    straight = straight or _run(method, federation, "serial", rounds)
    turned = _run(method, moved, "serial", rounds)
    problem = "the numbering of the nodes changes"
    _same_trees(straight.server, turned.server, f"{problem} the server's tree")
    for scored, scores in straight.history.scores.items():
        # A method may keep everything on its clients; then only the scores can tell.
        _close(
            torch.from_numpy(scores[-1]),
            torch.from_numpy(turned.history.scores[scored][-1]),
            f"{problem} the {scored} scores",
        )


def check_resume(method: Method, federation: Federation, rounds: int) -> None:
    """A run that is stopped and continued ends with exactly the same numbers."""
    whole = _run(method, federation, "fused", rounds + 1, 0.75)
    experiment = Experiment(method, federation, rounds=rounds + 1, fraction=0.75, engine="fused")
    with TemporaryDirectory() as folder, _explained(method, "fused"):
        path = Path(folder) / "checkpoint"
        count = itertools.count()
        experiment.run(checkpoint=path, should_stop=lambda: next(count) >= rounds // 2 + 1)
        resumed = experiment.run(checkpoint=path)
    _same_runs(whole, resumed, "a resumed run differs from an uninterrupted one", tolerance=0.0)


def check_replay(
    method: Method, federation: Federation, rounds: int, fraction: float = 1.0
) -> None:
    """Rounds that are recorded once and replayed, as on a GPU, give the same numbers."""
    experiment = Experiment(method, federation, rounds=rounds + 2, fraction=fraction)
    with _explained(method, "fused"):
        straight = experiment.run()
        replayed = dataclasses.replace(experiment, replay=True).run()
    _same_runs(straight, replayed, "a replayed run differs from the run itself")
    if list(straight.ledger.rows()) != list(replayed.ledger.rows()):
        raise ContractBroken("the ledger of a replayed run differs from that of the run itself")


def check_rule(method: Method, federation: Federation, rounds: int = 2) -> None:
    """A method that averages (it has a field `aggregate`) can take another rule than the mean."""
    if not any(field.name == "aggregate" for field in dataclasses.fields(method)):
        return
    try:
        changed = dataclasses.replace(method, aggregate=Median())  # type: ignore[call-arg]
    except ConfigError:
        return  # the method refuses the rule with a sentence
    serial, fused = (_run(changed, federation, name, rounds) for name in ("serial", "fused"))
    _same_runs(serial, fused, "engines serial and fused disagree with aggregate=median")
    mean = _run(method, federation, "fused", rounds)
    models = [leaves(mean.server), leaves(fused.server)]
    if models[0] and all(torch.equal(one, other) for one, other in zip(*models, strict=True)):
        raise ContractBroken(
            f"{_name(method)} has a field `aggregate`, but a median changes nothing; combine the "
            "replies with it (`core.aggregate.next_server`)"
        )


def check_steps(method: Method, federation: Federation, rounds: int) -> None:
    """Every step is pure, and its reply carries what was declared and nothing private."""
    watcher = _Watcher()
    simulation = Simulation(federation, method, engine=watcher)
    with _explained(method, "wire"):
        server = method.init(simulation.clients(-1))
        for number in range(rounds):
            server = method.round(server, simulation.clients(number))
    if not any(name == "train" for name in watcher.seen):
        raise ContractBroken(f"{_name(method)} never maps a step called 'train'")


class _Watcher:
    """The wire engine; it examines every step the first two times that the step runs."""

    name = "wire"

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def __call__(self, inputs: EngineInputs) -> _Watcher:
        self.graphs, self.engine = inputs.graphs(), ENGINES["wire"](inputs)
        return self

    def run(
        self, step: Step, positions: Sequence[int], message: Message, keys: Tensor, round: int
    ) -> Tree:
        times = self.seen.get(step.name, 0)
        self.seen[step.name] = times + 1
        if times < 2:
            state = self.engine.export_states()[positions[0]]
            graph = self.graphs[positions[0]]
            examine_step(step, graph, message.for_one(positions[0]), state, keys[0])
        return self.engine.run(step, positions, message, keys, round)

    def export_states(self) -> list[Tree]:
        states: list[Tree] = self.engine.export_states()
        return states

    def import_states(self, states: list[Tree]) -> None:
        self.engine.import_states(states)


def examine_step(step: Step, graph: Graph, message: Tree, state: Tree, key: Tensor) -> None:
    """Run one step twice on copies and compare everything that must not change."""
    inputs = (graph, message, state)
    before = tree_map(torch.clone, inputs)
    attributes = {name: repr(value) for name, value in vars(step.owner).items()}
    with torch.no_grad():
        reply, after = step(graph, message, state, key)
        again, after_again = step(graph, message, state, key)
    where = f"step '{step.name}'"
    _same_trees(
        (reply, after),
        (again, after_again),
        f"{where} is not pure: the same call gave two answers (a global random call, or "
        "state kept outside)",
        tolerance=0.0,
    )
    _same_trees(inputs, before, f"{where} changed one of its inputs in place", tolerance=0.0)
    if {name: repr(value) for name, value in vars(step.owner).items()} != attributes:
        raise ContractBroken(f"{where} keeps something on self; return it as private state instead")
    _check_reply(step, reply, after)


def _check_reply(step: Step, reply: Tree, state: Tree) -> None:
    if not dataclasses.is_dataclass(reply) or isinstance(reply, type):
        raise ContractBroken(
            f"step '{step.name}' must reply with a record, not {type(reply).__name__}"
        )
    for name, leaf in named_leaves(reply):
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise ContractBroken(f"step '{step.name}': reply '{name}' is not finite")
        declared = name.split(".")[0] in step.discloses
        for private, kept in named_leaves(state):
            same = leaf.shape == kept.shape and leaf.numel() > 1 and torch.equal(leaf, kept)
            if same and bool(leaf.any()) and not declared:
                raise ContractBroken(
                    f"step '{step.name}': reply '{name}' is the private state '{private}'; if that "
                    "must leave, declare it with its reason (client_step(discloses=...))"
                )


def small_graph_federation() -> Federation:
    """Clients with several graphs each, and different features and classes; two have batches."""
    counts, features = (6, 9, 7, 5), (FEATURES, FEATURES - 4, 6, FEATURES)
    clients = zip(counts, features, (2, CLASSES, CLASSES, 2), strict=True)
    graphs = tuple(_small_graphs(seed, *client) for seed, client in enumerate(clients))
    return Federation(graphs, CLASSES, batching=Graphs(3))


def _small_graphs(seed: int, count: int, features: int, classes: int) -> Graph:
    """Several small graphs end to end; labels and roles stand on the first node of each."""
    parts = [
        _small_graph(3 + (seed + 2 * number) % 5, 10 * seed + number) for number in range(count)
    ]
    sizes = torch.tensor([part.num_nodes for part in parts])
    starts = torch.cumsum(sizes, 0) - sizes
    root = starts.repeat_interleave(sizes)
    at_root = root == torch.arange(int(sizes.sum()))
    number = torch.arange(count).repeat_interleave(sizes)
    has_features = torch.arange(FEATURES) < features
    role = number % 3
    return make_graph(
        torch.cat([part.x for part in parts if isinstance(part.x, Tensor)]) * has_features,
        torch.cat([part.edges + start for part, start in zip(parts, starts, strict=True)], dim=1),
        (number + number // 3) % classes,
        train=at_root & ((role == 0) | (number < classes)),
        val=at_root & (role == 1),
        test=at_root & (role == 2),
        root=root,
        has_features=has_features,
        has_classes=torch.arange(CLASSES) < classes,
    )


def small_federation(sizes: tuple[int, ...] = SIZES) -> Federation:
    """Clients of different size with every class, isolated nodes, and sparse features."""
    return Federation(tuple(_small_graph(size, seed) for seed, size in enumerate(sizes)), CLASSES)


def _small_graph(size: int, seed: int) -> Graph:
    key = fold(make_key(seed), "contract")
    dtype = torch.get_default_dtype()
    ends = (
        uniform(fold(key, "edges"), (2, 2 * size), dtype) * (size - 1)
    ).long()  # the last is isolated
    ends = ends[:, ends[0] != ends[1]]
    edges = torch.unique(torch.cat([ends, ends.flip(0)], dim=1), dim=1)
    x = uniform(fold(key, "x"), (size, FEATURES), dtype)
    nodes = torch.arange(size)
    y = (nodes + nodes // 3 + seed) % CLASSES  # every class in every role
    x = torch.where(x > 0.5, x, torch.zeros_like(x)) + 0.3 * torch.nn.functional.one_hot(
        y, FEATURES
    )
    role = nodes % 3
    return make_graph(
        x, edges, y, train=(role == 0) | (nodes < CLASSES), val=role == 1, test=role == 2
    )


def one_client(federation: Federation) -> Federation:
    """The federation's first client alone."""
    return dataclasses.replace(federation, graphs=federation.graphs[:1], numbers=(0,))


def relabelled(graph: Graph, seed: int) -> Graph:
    """The same graph with its nodes numbered differently; ids move with the nodes."""
    order = torch.argsort(uniform(fold(make_key(seed), "order"), (graph.num_nodes,)))
    place = torch.argsort(order)
    if not isinstance(graph.x, Tensor):
        raise TypeError("relabelled() takes graphs with dense features")
    moved = {
        name: getattr(graph, name)[order]
        for name in ("x", "y", "train", "val", "test", "real", "ids")
    }
    edges, weight = place[graph.edges], graph.edge_weight
    if graph.root is not None and graph.roots is not None:
        moved["root"], moved["roots"] = place[graph.root[order]], place[graph.roots]
        by_source = torch.argsort(edges[0], stable=True)
        edges, weight = edges[:, by_source], weight[by_source]
    return dataclasses.replace(graph, **moved, edges=edges, edge_weight=weight)


@contextmanager
def double_precision() -> Iterator[None]:
    """float64 as the default type, and back."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _naming(task: Task) -> Iterator[None]:
    """Broken contracts on a federation of graphs say so."""
    try:
        yield
    except ContractBroken as error:
        if not task.many_graphs:
            raise
        raise ContractBroken(f"with many graphs at each client: {error}") from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """No thread pool: on graphs this small, waking threads costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _explained(method: Method, engine: str) -> Iterator[None]:
    """Errors inside a run become broken contracts that name method and engine."""
    try:
        yield
    except ContractBroken:
        raise
    except Exception as error:
        kind = "" if isinstance(error, AtollError) else f"{type(error).__name__}: "
        raise ContractBroken(f"{_name(method)} fails on engine {engine}: {kind}{error}") from error


def _run(
    method: Method,
    federation: Federation,
    engine: str,
    rounds: int,
    fraction: float = 1.0,
    chunk: int = 0,
) -> Run:
    experiment = Experiment(
        method, federation, rounds=rounds, fraction=fraction, engine=engine, chunk=chunk
    )
    with _explained(method, engine):
        return experiment.run()


def _same_runs(a: Run, b: Run, problem: str, tolerance: float = TOLERANCE) -> None:
    _same_trees(a.server, b.server, f"{problem} (server)", tolerance)
    states, others = (run.simulation.engine.export_states() for run in (a, b))
    _same_trees(states, others, f"{problem} (private states)", tolerance)
    for scored, scores in a.history.scores.items():
        for number, (one, other) in enumerate(zip(scores, b.history.scores[scored], strict=True)):
            where = f"{problem} ({scored} scores, round {number})"
            _close(torch.from_numpy(one), torch.from_numpy(other), where, max(tolerance, 0.0))


def _same_trees(a: Tree, b: Tree, problem: str, tolerance: float = TOLERANCE) -> None:
    if structure(a) != structure(b):
        raise ContractBroken(f"{problem}: the structures differ")
    for one, other in zip(leaves(a), leaves(b), strict=True):
        _close(one, other, problem, tolerance)


def _close(a: Tensor, b: Tensor, problem: str, tolerance: float = TOLERANCE) -> None:
    if a.shape != b.shape:
        raise ContractBroken(f"{problem}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if a.numel() == 0:
        return
    gap = (a.double() - b.double()).abs()
    gap = torch.where(torch.isnan(a.double()) & torch.isnan(b.double()), torch.zeros_like(gap), gap)
    worst = float(gap.max())
    if not worst <= tolerance:
        raise ContractBroken(f"{problem}: they differ by {worst:.3g} (allowed {tolerance:.0e})")


def _name(method: Method) -> str:
    return type(method).__name__
