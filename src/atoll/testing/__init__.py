"""Check the contract of a method with one call: `check_method(MyMethod)`.

    from atoll.testing import check_method

    def test_my_method():
        check_method(MyMethod)                          # or: lambda net: MyMethod(net, mu=0.1)

It runs the method in float64 with dropout, and raises `ContractBroken` if a property does not hold.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.aggregate import Median
from atoll.core.batching import Graphs
from atoll.core.errors import AtollError, ConfigError, described
from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph
from atoll.core.message import Message
from atoll.core.method import Method, Step
from atoll.core.random import fold, make_key, uniform
from atoll.core.task import NODES, Task, task_named
from atoll.core.tree import Tree, leaves, named_leaves, structure, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.engines.prepare import EngineInputs
from atoll.experiment.rounds import Experiment, Run, returned
from atoll.nn import NETS

TOLERANCE = 1e-9
EXPLODES = "a gradient explodes, as in F.normalize at a row of zeros; use atoll.unit"
ROUNDS = 3
FEATURES, CLASSES = 11, 3
SIZES = (13, 17, 22, 9)

MakeMethod = Callable[..., Method]  # a method's class, or a function: net -> method


class ContractBroken(AssertionError):
    """Raised if a method breaks the contract. The message names the property and the place."""


def check_method(make: MakeMethod, *, rounds: int = ROUNDS) -> None:
    """Check all properties that the engines rely on.

    Engines agree. Steps are pure. Replies are finite, and contain private state only if it is
    declared. The order of clients and the numbering of nodes do not matter. A single client and
    partial participation work. A resumed run and a run with replayed rounds give the same numbers.
    The check covers each task of the method: classification of nodes, of graphs, or both.

    Args:
        make: A method's class, or a function that builds the method for a network.
        rounds: Number of rounds of each check.

    Raises:
        ContractBroken: The method breaks the contract. The message names the broken property.

    Examples:
        >>> from atoll.methods import FedSage
        >>> from atoll.testing import check_method
        >>> check_method(FedSage, rounds=2)
    """
    cls = getattr(make, "func", make)  # also behind `functools.partial`
    net = (*getattr(cls, "nets", ()), "gcn")[0]
    with double_precision(), ExitStack() as afterwards:
        # One thread, because waking threads costs more than the work on such small graphs.
        afterwards.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for task in map(task_named, getattr(cls, "tasks", (NODES.name,))):
            try:
                _check_task(make, task, net, rounds)
            except ContractBroken as error:
                if not task.many_graphs:
                    raise
                raise ContractBroken(f"with many graphs at each client: {error}") from error


def _check_task(make: MakeMethod, task: Task, net: str, rounds: int) -> None:
    small: dict[str, Any] = {"hidden": 5, "dropout": 0.4}
    federation = small_graph_federation() if task.many_graphs else small_federation()
    if task.many_graphs:
        # The first convolution is special, and one other is enough.
        net, small["layers"] = "gin-graph", 2
    method = make(net=NETS[net](FEATURES, CLASSES, **small))
    whole = Case(method, federation, rounds)
    part = dataclasses.replace(whole, fraction=0.5)
    check_frozen(method)
    check_steps(whole)
    for case in (whole, part):
        check_engines(case)
        check_client_order(case)
    check_node_order(whole)
    alone = dataclasses.replace(federation, graphs=federation.graphs[:1], numbers=(0,))
    check_engines(Case(method, alone, rounds))
    check_resume(whole)
    check_replay(whole)
    check_replay(part)
    check_rule(method, federation)


def check_frozen(method: Method) -> None:
    """Check that a method is a frozen dataclass, so it cannot store state."""
    # Check the class itself: a subclass without the decorator is not frozen.
    params = vars(type(method)).get("__dataclass_params__")
    if params is None or not params.frozen or "__dict__" not in dir(method):
        name = type(method).__name__
        raise ContractBroken(f"{name} must be a frozen dataclass: @dataclass(frozen=True)")


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A method on a federation, with a number of rounds and a fraction of the clients."""

    method: Method
    federation: Federation
    rounds: int
    fraction: float = 1.0

    @property
    def experiment(self) -> Experiment:
        return Experiment(self.method, self.federation, rounds=self.rounds, fraction=self.fraction)

    def run(self, engine: str = "serial", chunk: int = 0) -> Run:
        """Run on an engine. Errors name method and engine."""
        with _explained(self.method, engine):
            return dataclasses.replace(self.experiment, engine=engine, chunk=chunk).run()

    @cached_property
    def serial(self) -> Run:
        """The reference run, computed once."""
        return self.run()


def check_engines(case: Case) -> None:
    """Check that all engines give the same server tree, private states and scores."""
    share = f" with {case.fraction:.0%} of the clients in a round" if case.fraction < 1 else ""
    for engine in (name for name in ENGINES if name != "serial"):
        _same_runs(case.serial, case.run(engine), f"engines serial and {engine} disagree{share}")
    # Small chunks split the clients into several programs, which must not change the numbers.
    chunked = case.run("fused", chunk=2)
    _same_runs(case.serial, chunked, f"fused in chunks of two disagrees with serial{share}")


def check_client_order(case: Case) -> None:
    """Check that another order of the clients only changes the order of the results."""
    order = [2, 0, 3, 1]
    turned = dataclasses.replace(case, federation=case.federation.reordered(order)).serial
    problem = "the order of the clients changes the"
    for scored, scores in case.serial.history.scores.items():
        other = turned.history.scores[scored][-1]
        _close(scores[-1][order], other, f"{problem} {scored} scores")


def check_node_order(case: Case) -> None:
    """Check that another numbering of each client's nodes changes nothing."""
    graphs = tuple(relabelled(graph, seed) for seed, graph in enumerate(case.federation.graphs))
    moved = dataclasses.replace(case.federation, graphs=graphs)
    turned = dataclasses.replace(case, federation=moved).serial
    problem = "the numbering of the nodes changes"
    _same_trees(case.serial.server, turned.server, f"{problem} the server's tree")
    for scored, scores in case.serial.history.scores.items():
        # If all state stays on the clients, only the scores can reveal a difference.
        _close(scores[-1], turned.history.scores[scored][-1], f"{problem} the {scored} scores")


def check_resume(case: Case) -> None:
    """Check that a stopped and resumed run ends with exactly the same numbers."""
    longer = dataclasses.replace(case, rounds=case.rounds + 1, fraction=0.75)
    whole, experiment = longer.run("fused"), dataclasses.replace(longer.experiment, engine="fused")
    with TemporaryDirectory() as folder, _explained(case.method, "fused"):
        path = Path(folder) / "checkpoint"
        count = itertools.count()
        experiment.run(checkpoint=path, should_stop=lambda: next(count) >= case.rounds // 2 + 1)
        resumed = experiment.run(checkpoint=path)
    _same_runs(whole, resumed, "a resumed run differs from an uninterrupted one", tolerance=0.0)


def check_replay(case: Case) -> None:
    """Check that recorded and replayed rounds, as on a GPU, give the same numbers."""
    experiment = dataclasses.replace(case.experiment, rounds=case.rounds + 2)
    with _explained(case.method, "fused"):
        straight = experiment.run()
        replayed = dataclasses.replace(experiment, replay=True).run()
    _same_runs(straight, replayed, "a replayed run differs from the run itself")
    if list(straight.ledger.rows()) != list(replayed.ledger.rows()):
        raise ContractBroken("a replayed run has another ledger than the run itself")


def check_rule(method: Method, federation: Federation, rounds: int = 2) -> None:
    """Check that a method with a field `aggregate` uses the rule in it, if it accepts a median."""
    if not any(field.name == "aggregate" for field in dataclasses.fields(method)):
        return
    try:
        changed = dataclasses.replace(method, aggregate=Median())  # type: ignore[call-arg]
    except ConfigError:
        return  # the method rejects the rule with an error
    case = Case(changed, federation, rounds)
    fused, mean = case.run("fused"), Case(method, federation, rounds).run("fused")
    _same_runs(case.serial, fused, "engines serial and fused disagree with aggregate=median")
    models = [leaves(mean.server), leaves(fused.server)]
    if models[0] and all(torch.equal(one, other) for one, other in zip(*models, strict=True)):
        raise ContractBroken(
            f"{type(method).__name__} has a field `aggregate`, but a median changes nothing; "
            "combine the replies with it (`core.aggregate.next_server`)"
        )


def check_steps(case: Case) -> None:
    """Check that every step is pure, and that its reply contains no undeclared private state."""
    method, watcher = case.method, _Watcher()
    simulation = Simulation(case.federation, method, engine=watcher)
    with _explained(method, "wire"):
        server = returned(method, "init", method.init(simulation.clients(-1)))
        for number in range(case.rounds):
            server = returned(method, "round", method.round(server, simulation.clients(number)))
    if "train" not in watcher.seen:
        raise ContractBroken(f"{type(method).__name__} never maps a step called 'train'")


class _Watcher:
    """The wire engine with checks. It examines one client in the first two calls of each step."""

    name = "wire"

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def __call__(self, inputs: EngineInputs) -> _Watcher:
        self.graphs, self.engine = inputs.graphs(), ENGINES["wire"](inputs)
        return self

    def run(
        self, step: Step, positions: Sequence[int], message: Message, keys: Tensor, round: int
    ) -> Tree:
        self.seen[step.name] += 1
        if self.seen[step.name] <= 2:
            state = self.engine.export_states()[positions[0]]
            graph = self.graphs[positions[0]]
            examine_step(step, graph, message.for_one(positions[0]), state, keys[0])
        return self.engine.run(step, positions, message, keys, round)

    def export_states(self) -> list[Tree]:
        return list(self.engine.export_states())

    def import_states(self, states: list[Tree]) -> None:
        self.engine.import_states(states)


def examine_step(step: Step, graph: Graph, message: Tree, state: Tree, key: Tensor) -> None:
    """Run one step twice. Compare both answers and everything that must not change."""
    inputs = (graph, message, state)
    before = tree_map(torch.clone, inputs)
    attributes = {name: repr(value) for name, value in vars(step.owner).items()}
    with torch.no_grad():
        reply, after = step(graph, message, state, key)
        again, after_again = step(graph, message, state, key)
    where = f"step '{step.name}'"
    problem = "the same call gave two answers (a global random call, or state kept outside)"
    answers = (reply, after), (again, after_again)
    _same_trees(*answers, f"{where} is not pure: {problem}", tolerance=0.0)
    _same_trees(inputs, before, f"{where} changed one of its inputs in place", tolerance=0.0)
    if {name: repr(value) for name, value in vars(step.owner).items()} != attributes:
        raise ContractBroken(f"{where} stores data on self; return them as private state instead")
    if not dataclasses.is_dataclass(reply) or isinstance(reply, type):
        raise ContractBroken(f"{where} must reply with a record, not {type(reply).__name__}")
    for name, leaf in named_leaves(reply):
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise ContractBroken(f"{where}: reply '{name}' is not finite")
        declared = name.split(".")[0] in step.discloses
        for private, kept in named_leaves(after):
            same = leaf.shape == kept.shape and leaf.numel() > 1 and torch.equal(leaf, kept)
            if same and bool(leaf.any()) and not declared:
                raise ContractBroken(
                    f"{where}: reply '{name}' is the private state '{private}'; if it "
                    "must leave, declare it with its reason (client_step(discloses=...))"
                )


def small_graph_federation() -> Federation:
    """Clients with several graphs, and different features and classes. Two have two batches."""
    counts, features = (6, 9, 7, 5), (FEATURES, FEATURES - 4, 6, FEATURES)
    clients = zip(counts, features, (2, CLASSES, CLASSES, 2), strict=True)
    graphs = tuple(_small_graphs(seed, *client) for seed, client in enumerate(clients))
    return Federation(graphs, CLASSES, batching=Graphs(3))


def _small_graphs(seed: int, count: int, features: int, classes: int) -> Graph:
    """Join several small graphs. Only the first node of each graph has a role."""
    parts = [_small_graph(3 + (seed + 2 * n) % 5, 10 * seed + n) for n in range(count)]
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
    """Clients of different size with every class, isolated nodes, and many zero features."""
    return Federation(tuple(_small_graph(size, seed) for seed, size in enumerate(sizes)), CLASSES)


def _small_graph(size: int, seed: int) -> Graph:
    key, dtype = fold(make_key(seed), "contract"), torch.get_default_dtype()
    places = uniform(fold(key, "edges"), (2, 2 * size), dtype)
    ends = (places * (size - 1)).long()  # the last node is isolated
    ends = ends[:, ends[0] != ends[1]]
    edges = torch.unique(torch.cat([ends, ends.flip(0)], dim=1), dim=1)
    x = uniform(fold(key, "x"), (size, FEATURES), dtype)
    nodes = torch.arange(size)
    y = (nodes + nodes // 3 + seed) % CLASSES  # every class in every split
    own = 0.3 * torch.nn.functional.one_hot(y, FEATURES)
    x = torch.where(x > 0.5, x, torch.zeros_like(x)) + own
    role = nodes % 3
    train = (role == 0) | (nodes < CLASSES)
    return make_graph(x, edges, y, train=train, val=role == 1, test=role == 2)


def relabelled(graph: Graph, seed: int) -> Graph:
    """Return the same graph with its nodes numbered differently. Ids move with the nodes."""
    order = torch.argsort(uniform(fold(make_key(seed), "order"), (graph.num_nodes,)))
    place = torch.argsort(order)
    if not isinstance(graph.x, Tensor):
        raise TypeError("relabelled() takes graphs with dense features")
    names = ("x", "y", "train", "val", "test", "real", "ids")
    moved = {name: getattr(graph, name)[order] for name in names}
    edges, weight = place[graph.edges], graph.edge_weight
    if graph.root is not None and graph.roots is not None:
        moved["root"], moved["roots"] = place[graph.root[order]], place[graph.roots]
        by_source = torch.argsort(edges[0], stable=True)
        edges, weight = edges[:, by_source], weight[by_source]
    return dataclasses.replace(graph, **moved, edges=edges, edge_weight=weight)


@contextmanager
def double_precision() -> Iterator[None]:
    """Set float64 as the default type, and restore it."""
    with ExitStack() as afterwards:
        afterwards.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        yield


@contextmanager
def _explained(method: Method, engine: str) -> Iterator[None]:
    """Convert errors inside a run into broken contracts that name method and engine."""
    try:
        yield
    except ContractBroken:
        raise
    except Exception as error:
        problem = str(error) if isinstance(error, AtollError) else described(error)
        raise ContractBroken(
            f"{type(method).__name__} fails on engine {engine}: {problem}"
        ) from error


def _same_runs(a: Run, b: Run, problem: str, tolerance: float = TOLERANCE) -> None:
    _same_trees(a.server, b.server, f"{problem} (server)", tolerance)
    states, others = (run.simulation.engine.export_states() for run in (a, b))
    _same_trees(states, others, f"{problem} (private states)", tolerance)
    for scored, scores in a.history.scores.items():
        for number, (one, other) in enumerate(zip(scores, b.history.scores[scored], strict=True)):
            _close(one, other, f"{problem} ({scored} scores, round {number})", tolerance)


def _same_trees(a: Tree, b: Tree, problem: str, tolerance: float = TOLERANCE) -> None:
    if structure(a) != structure(b):
        raise ContractBroken(f"{problem}: the structures differ")
    for one, other in zip(leaves(a), leaves(b), strict=True):
        _close(one, other, problem, tolerance)


def _close(
    a: Tensor | np.ndarray, b: Tensor | np.ndarray, problem: str, tolerance: float = TOLERANCE
) -> None:
    if a.shape != b.shape:
        raise ContractBroken(f"{problem}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    one, other = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    if one.numel() == 0:
        return
    gap = (one - other).abs().masked_fill(one.isnan() & other.isnan(), 0.0)
    worst = float(gap.max())
    if not worst <= tolerance:
        largest, differ = float(one.abs().nan_to_num().max()), f"they differ by {worst:.3g}"
        # Both are equal up to rounding, but far too large.
        why = f"; they reach {largest:.0e}: {EXPLODES}" if worst < 1e-9 * largest else ""
        raise ContractBroken(f"{problem}: {differ} (allowed {tolerance:.0e}){why}")
