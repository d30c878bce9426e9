"""All clients at once in one tensor program: `vmap` of the step over padded, stacked graphs.

Padding, buckets and chunks live here and nowhere else. Clients of similar size share a bucket, so
that little is padded; a bucket has at most `chunk` clients, so that memory is bounded. A client
that trains on mini-batches has a bucket of its own, and a bucket of one runs the step as it is.
Buckets run side by side where the process may use several threads.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from atoll.core.errors import AtollError, StepError
from atoll.core.federation import Lazily
from atoll.core.graph import Distinct, Graph, Matrix, Sparse, lists_nodes
from atoll.core.message import Message, ToAll, ToEach
from atoll.core.method import Step
from atoll.core.tree import (
    Tree,
    concat,
    inside_transform,
    leaves,
    num_bytes,
    stack,
    structure,
    take,
    tree_map,
    vmap_trees,
)
from atoll.core.vmap.varied import Undecided
from atoll.engines.recording import NotRecordable, Recording, new_pool, no_reads, shapes
from atoll.engines.scratch import on_disk
from atoll.engines.serial import Serial

log = logging.getLogger(__name__)

CHUNK = 256
"""Clients per program unless the user says otherwise."""

MOST_KEPT = 256
"""Most lists of positions, and recordings, that are kept."""

MOST_DERIVED = 1 << 29
"""Most bytes of what clients derive that are kept."""

NODES = 1 << 15
"""Nodes per program on a CPU: beyond, a program gains nothing, and its tensors leave the caches."""


class Fused:
    """Runs a step on whole buckets of clients; private states stay stacked between rounds."""

    name = "fused"

    def __init__(self, graphs: Sequence[Graph], chunk: int = 0) -> None:
        self.graphs = graphs
        self.lazy = isinstance(graphs, Lazily)
        self.chunk = chunk or CHUNK
        self.looped = Serial(graphs)
        self.stacked: dict[tuple[int, ...], Graph] = {}
        self.buckets: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self.states = _States(len(graphs))
        self.places: dict[tuple[int, ...], Tensor] = {}
        self.recorded: RecordedSteps | None = None
        self.derived = Derived()

    def record_steps(self) -> None:
        """From now on record each step's program and replay it; the rest runs in between."""
        self.recorded = self.recorded or RecordedSteps()

    @cached_property
    def outlines(self) -> list[Outline]:
        """Of all clients, found once."""
        return outline(self.graphs)

    def run(
        self, step: Step, positions: Sequence[int], message: Message, keys: Tensor, round: int
    ) -> Tree:
        """Replies of the clients at `positions`, stacked."""
        if not step.vectorize:
            return self._loop(step, positions, message, keys, round)
        where = {position: row for row, position in enumerate(positions)}
        programs = [
            members
            for bucket in self._buckets(tuple(positions))
            for members in self.states.same_structure(bucket)
        ]

        def one(members: tuple[int, ...]) -> tuple[Tree, Tree]:
            rows = self._index(tuple(where[p] for p in members))
            return self._run_bucket(step, members, message, keys[rows], round)

        done = self._side_by_side(one, programs)
        if not step.keeps_state:
            for members, (_, state) in zip(programs, done, strict=True):
                self.states.put(members, state)
        order = [position for members in programs for position in members]
        replies = concat([reply for reply, _ in done])
        if order == list(positions):
            return replies
        row = {position: i for i, position in enumerate(order)}
        return take(replies, self._index(tuple(row[p] for p in positions)))

    def run_drawn(self, step: Step, positions: Tensor, message: Message, keys: Tensor) -> Tree:
        """Replies of clients that only the device knows, stacked.

        Everybody computes, and what the others found is thrown away: their states stay, and the
        replies are the same as if they had not. On a GPU small programs cost what one does.
        """
        everyone = range(len(self.graphs))
        self.regroup()
        before = dict(self.states.stacks)
        replies = self.run(step, everyone, message, keys, -1)
        if not step.keeps_state and before.keys() != self.states.stacks.keys():
            raise NotRecordable("private states begin in it")
        if not step.keeps_state:
            here = torch.zeros(len(self.graphs), dtype=torch.bool, device=positions.device)
            here = here.index_fill(0, positions, True)
            for members, stacked in self.states.stacks.items():
                mine = here[self._index(members)]
                self.states.stacks[members] = tree_map(
                    lambda new, old, mine=mine: torch.where(
                        mine.reshape(-1, *[1] * (new.dim() - 1)), new, old
                    ),
                    stacked,
                    before[members],
                )
        return take(replies, positions)

    def regroup(self) -> None:
        """Stack private states as programs of all clients want them; look up all places."""
        programs = self.programs()
        for members in programs:
            if self.states.home[members[0]] is not None:
                self.states.put(members, self.states.get(members))
            self._index(members)
        order = [position for members in programs for position in members]
        row = {position: i for i, position in enumerate(order)}
        self._index(tuple(row[position] for position in range(len(order))))

    def programs(self) -> list[tuple[int, ...]]:
        """Who shares a program when all clients take part."""
        return [
            members
            for bucket in self._buckets(tuple(range(len(self.graphs))))
            for members in self.states.same_structure(bucket)
        ]

    def _index(self, numbers: tuple[int, ...]) -> Tensor:
        """Numbers as a tensor; kept, because copying them to a GPU would wait for it."""
        if numbers not in self.places:
            if len(self.places) >= MOST_KEPT + 2 * len(self.graphs):
                self.places.clear()
            self.places[numbers] = torch.tensor(numbers, device=self.graphs[0].y.device)
        return self.places[numbers]

    def _side_by_side(
        self,
        one: Callable[[tuple[int, ...]], tuple[Tree, Tree]],
        programs: Sequence[tuple[int, ...]],
    ) -> list[tuple[Tree, Tree]]:
        """Every program once, as many at a time as there are threads, the largest first.

        Programs of small tensors use a second core better than one program's operations do.
        """
        threads = torch.get_num_threads()
        # Transforms under way are known to their own thread alone.
        if threads == 1 or len(programs) == 1 or self._on_gpu or inside_transform():
            return [one(members) for members in programs]
        for members in programs:
            self._graph(members)  # made before the threads ask for it
        size = {m: sum(self.outlines[p].nodes for p in m) for m in programs}
        try:
            flushed = sys.float_info.min / 2 == 0
            with ThreadPoolExecutor(threads, initializer=_settle, initargs=(flushed,)) as pool:
                begun = {m: pool.submit(one, m) for m in sorted(programs, key=lambda m: -size[m])}
                return [begun[members].result() for members in programs]
        finally:
            torch.set_num_threads(threads)  # what a thread sets for itself, MKL takes for all

    def _run_bucket(
        self, step: Step, members: tuple[int, ...], message: Message, keys: Tensor, round: int
    ) -> tuple[Tree, Tree]:
        try:
            state = self.states.get(members)
            with torch.no_grad():
                return self._program(step, members, message, state, keys)
        except (AtollError, NotRecordable, Undecided):
            raise
        except Exception as error:
            who = members[0]
            problem = f"{type(error).__name__} in a program of {len(members)} clients: {error}"
            raise StepError(who, step.name, round, problem) from error

    def _program(
        self, step: Step, members: tuple[int, ...], message: Message, states: Tree, keys: Tensor
    ) -> tuple[Tree, Tree]:
        """What one bucket computes: a function of tensors alone, so that it can be recorded."""
        graph = self._graph(members)
        if not self._on_gpu and self.recorded is None and not inside_transform():
            graph = self.derived.added(step.owner, members, graph, states)
        tree, shared = message.tree, isinstance(message, ToAll)
        # A bucket of everybody has the rows in order: nothing to copy.
        if isinstance(message, ToEach) and len(members) < len(self.graphs):
            tree = message.rows(self._index(members))

        def program(tree: Tree, states: Tree, keys: Tensor) -> tuple[Tree, Tree]:
            if len(members) > 1:
                return at_once(step, graph, tree, states, keys, shared)
            # Without `vmap`, which costs time and cannot cut mini-batches; results are stacked.
            received = tree if shared else take(tree, 0)
            found = step(graph, received, take(states, 0), keys[0])
            stacked: tuple[Tree, Tree] = tree_map(lambda leaf: leaf.unsqueeze(0), found)
            return stacked

        if self.recorded is None:
            return program(tree, states, keys)
        return self.recorded.run((step, members, shared), program, tree, states, keys)

    def _loop(
        self, step: Step, positions: Sequence[int], message: Message, keys: Tensor, round: int
    ) -> Tree:
        if inside_transform():
            raise NotRecordable(f"step {step.name} runs client by client")
        log.info("step %s declares vectorize=False: its clients run one by one", step.name)
        self.looped.import_states(self.states.export())
        replies = self.looped.run(step, positions, message, keys, round)
        if not step.keeps_state:
            self.states.replace(self.looped.export_states())
        return replies

    def _buckets(self, positions: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The buckets of a roster; those of the last one, and of everybody, are kept."""
        if positions not in self.buckets:
            everybody = {
                p: found for p, found in self.buckets.items() if len(p) == len(self.graphs)
            }
            nodes = math.inf if self._on_gpu else NODES
            made = make_buckets(self.outlines, positions, self.chunk, nodes)
            self.buckets = {**everybody, positions: made}
            wanted = {members for found in self.buckets.values() for members in found}
            self.stacked = {m: graph for m, graph in self.stacked.items() if m in wanted}
        return self.buckets[positions]

    def _graph(self, members: tuple[int, ...]) -> Graph:
        """The members' graphs, stacked, or the only member's; those in use are kept.

        Where graphs are made lazily they are kept on the disk.
        """
        if members not in self.stacked:
            if len(members) == 1 and not self.lazy:
                return self.graphs[members[0]]
            if len(self.stacked) >= 2 * max(1, sum(map(len, self.buckets.values()))):
                self.stacked.clear()  # buckets were split again and again
            made = [self.graphs[p] for p in members]
            graph = stack_graphs(made) if len(made) > 1 else made[0]
            self.stacked[members] = on_disk(graph) if self.lazy else graph
        return self.stacked[members]

    def stacked_states(self) -> Tree:
        """Every client's private state, stacked in the clients' order."""
        members = [p for stacked in self.states.stacks for p in stacked]
        row = {position: i for i, position in enumerate(members)}
        whole = concat(list(self.states.stacks.values()))
        return take(whole, self._index(tuple(row[p] for p in range(len(self.graphs)))))

    @cached_property
    def _on_gpu(self) -> bool:
        return self.graphs[0].y.is_cuda

    def export_states(self) -> list[Tree]:
        """Every client's private state, for a checkpoint."""
        return self.states.export()

    def import_states(self, states: Sequence[Tree]) -> None:
        """Continue from stored private states."""
        self.states.replace(states)


class Derived:
    """What clients derive from their graphs and private states (`Method.derive`), for programs.

    Kept as long as what it was derived from is the same memory, untouched. Not on a GPU, where to
    derive it again costs less than to carry it through recordings.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], tuple[list[Tensor], Any, Tree]] = {}

    def added(self, owner: Any, members: tuple[int, ...], graph: Graph, states: Tree) -> Graph:
        """The graph with what its clients derive, if the owner of a step derives anything."""
        asked = getattr(owner, "derived_from", None)
        part = None if asked is None else asked(states)
        if part is None:
            return graph
        sources = leaves(part)
        # As long as they are held here no other tensor lies in their place.
        mark = [(leaf.data_ptr(), leaf._version) for leaf in sources]
        if members not in self.kept or self.kept[members][1] != mark:
            self.kept.pop(members, None)
            with torch.no_grad():
                found = _of_program(owner.derive, len(members), graph, part)
            held = sum(num_bytes(tree) for _, _, tree in self.kept.values())
            if held + num_bytes(found) > MOST_DERIVED:
                self.kept.clear()  # of rosters that have gone, or there is too much to keep
            if num_bytes(found) > MOST_DERIVED:
                return replace(graph, derived=found)
            self.kept[members] = sources, mark, found
        return replace(graph, derived=self.kept[members][2])


def _of_program(function: Callable[..., Tree], size: int, graph: Graph, part: Tree) -> Tree:
    """A function of each client's graph and tree, stacked; a bucket of one has a plain graph."""
    return vmap_trees(function, graph, part) if size > 1 else function(graph, take(part, 0))


class RecordedSteps:
    """Programs of steps, recorded when they come for the second time.

    For methods whose server reads numbers to decide what to do, so that no round can be recorded
    whole.
    """

    def __init__(self) -> None:
        self.seen: set[Any] = set()
        self.recordings: dict[Any, Recording | None] = {}
        self.pool = new_pool(torch.cuda.is_available())

    def run(
        self, what: Any, program: Callable[..., tuple[Tree, Tree]], *inputs: Tree
    ) -> tuple[Tree, Tree]:
        """Replay the program, or run it if it is new or cannot be recorded."""
        known = (what, *shapes(inputs))
        try:
            new = known not in self.recordings
        except TypeError:  # a method with a list among its hyper-parameters
            return program(*inputs)
        if new:
            if known in self.seen and len(self.recordings) < MOST_KEPT:
                return self._rehearse(known, program, *inputs)
            if len(self.seen) < 10 * MOST_KEPT:
                self.seen.add(known)  # drawn clients may never come together again
            return program(*inputs)
        recording = self.recordings[known]
        if recording is None:
            return program(*inputs)
        # The next replay overwrites what this one gives, and the server may keep it.
        copied: tuple[Tree, Tree] = tree_map(torch.clone, recording(*inputs))
        return copied

    def _rehearse(
        self, known: Any, program: Callable[..., tuple[Tree, Tree]], *inputs: Tree
    ) -> tuple[Tree, Tree]:
        step = known[0][0]
        try:
            with no_reads(inputs[-1].device) as watch:
                found = program(*inputs)
            keeps = watch.besides(inputs)
            self.recordings[known] = Recording(program, *inputs, pool=self.pool, keeps=keeps)
        except Exception as reason:
            # Whatever it is: the program as it is gives the same result, or the true error.
            log.info("step %s is not recorded: %s", step.name, reason)
            self.recordings[known] = None
            self.pool = None  # what failed may have left something in it
            return program(*inputs)
        return found


def _settle(flushed: bool) -> None:
    """A thread for one program: one core, and denormal numbers as in the main thread."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(flushed)


class _States:
    """Private states: stacked where a bucket left them, so that a steady roster copies nothing.

    Members of a bucket are one tuple, which is told from others by identity first: to compare or
    hash its hundreds of numbers once per client would cost as the square of the clients.
    """

    def __init__(self, size: int) -> None:
        self.home: list[tuple[tuple[int, ...], int] | None] = [None] * size
        self.stacks: dict[tuple[int, ...], Tree] = {}
        self.living: dict[tuple[int, ...], int] = {}  # how many clients' states a stack holds

    def get(self, members: tuple[int, ...]) -> Tree:
        """The members' states, stacked; None if they have none yet."""
        homes = [self.home[position] for position in members]
        if homes[0] is None:
            return None
        if all(h is not None and (h[0] is members or h[0] == members) for h in homes):
            return self.stacks[members]
        return stack([self._one(p) for p in members])

    def put(self, members: tuple[int, ...], state: Tree) -> None:
        for row, position in enumerate(members):
            old = self.home[position]
            if old is not None and old[0] is not members:
                self._leave(old[0])
            if old is None or old[0] is not members:
                self.living[members] = self.living.get(members, 0) + 1
                self.home[position] = (members, row)
        self.stacks[members] = state

    def _leave(self, members: tuple[int, ...]) -> None:
        self.living[members] -= 1
        if not self.living[members]:
            del self.living[members], self.stacks[members]

    def same_structure(self, bucket: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Split a bucket where members' states differ in kind (some may have none yet)."""
        groups: dict[object, list[int]] = {}
        kinds: dict[int, object] = {}
        for position in bucket:
            home = self.home[position]
            if home is not None and id(home[0]) not in kinds:
                kinds[id(home[0])] = _kind(self.stacks[home[0]])
            groups.setdefault(None if home is None else kinds[id(home[0])], []).append(position)
        return [bucket] if len(groups) == 1 else [tuple(group) for group in groups.values()]

    def copy(self) -> tuple[Any, ...]:
        """Where everything is now, for `restore`."""
        return list(self.home), dict(self.stacks), dict(self.living)

    def restore(self, copied: tuple[Any, ...]) -> None:
        """As it was when it was copied."""
        home, stacks, living = copied
        self.home, self.stacks, self.living = list(home), dict(stacks), dict(living)

    @property
    def begun(self) -> bool:
        """Whether all clients have a private state, or none."""
        return len({home is None for home in self.home}) == 1

    def layout(self) -> tuple[Any, ...]:
        """Where everybody's state is; equal as long as nobody moves."""
        return tuple(self.stacks), tuple(self.home)

    def export(self) -> list[Tree]:
        return [self._one(position) for position in range(len(self.home))]

    def replace(self, states: Sequence[Tree]) -> None:
        self.home, self.stacks, self.living = [None] * len(states), {}, {}
        for position, state in enumerate(states):
            if state is not None:
                self.put((position,), stack([state]))

    def _one(self, position: int) -> Tree:
        home = self.home[position]
        return None if home is None else take(self.stacks[home[0]], home[1])


def _kind(tree: Tree) -> tuple[object, ...]:
    """Structure and everything that is not a tensor; trees that differ here cannot be stacked."""
    flat, spec = pytree.tree_flatten(tree)
    return spec, tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in flat)


def at_once(
    step: Step, graphs: Graph, message: Tree, states: Tree, keys: Tensor, shared: bool
) -> tuple[Tree, Tree]:
    """The step for all clients at once; one message is for all of them if `shared`."""

    def one(graph: Graph, state: Tree, key: Tensor, received: Tree = message) -> Tree:
        reply, state = step(graph, received, state, key)
        return reply, None if step.keeps_state else state

    own = () if shared else (message,)
    found: tuple[Tree, Tree] = vmap_trees(one, graphs, states, keys, *own)
    return found


class Outline(NamedTuple):
    """What decides which clients share a program.

    Attributes:
        kind: Number of the graph's structure; only graphs of one kind can be stacked.
        nodes: Its size.
        alone: Whether it has mini-batches: how often it steps, and on what, is its own affair.
    """

    kind: int
    nodes: int
    alone: bool


def outline(graphs: Sequence[Graph]) -> list[Outline]:
    """All clients' outlines; the order of the clients does not change the numbers of kinds."""
    found = [(structure(graph), graph.num_nodes, bool(graph.batch_size)) for graph in graphs]
    kinds = {spec: i for i, spec in enumerate(sorted({spec for spec, *_ in found}, key=str))}
    return [Outline(kinds[spec], nodes, alone) for spec, nodes, alone in found]


def make_buckets(
    outlines: Sequence[Outline], positions: Sequence[int], chunk: int, nodes: float = math.inf
) -> list[tuple[int, ...]]:
    """Group clients so that padding wastes at most a quarter, or too little to matter.

    Args:
        outlines: Of all clients.
        positions: Who is to be grouped.
        chunk: Most clients of a bucket.
        nodes: Most nodes of a bucket of several.
    """
    buckets: list[list[int]] = []
    total = 0
    for position in sorted(positions, key=lambda p: (*outlines[p][:2], p)):
        kind, size, alone = outlines[position]
        current = buckets[-1] if buckets else []
        waste = (len(current) + 1) * size - (total + size)
        fits = (
            current
            and len(current) < chunk
            and total + size <= nodes
            and not alone
            and outlines[current[0]].kind == kind
            and waste <= max(0.25 * (total + size), 4096)
        )
        if fits:
            current.append(position)
            total += size
        else:
            buckets.append([position])
            total = size
    return [tuple(sorted(bucket)) for bucket in buckets]


def stack_graphs(graphs: Sequence[Graph]) -> Graph:
    """Graphs -> one graph with a leading client axis, padded to common numbers of nodes and edges.

    There is always one node of padding: padded edges loop on it.
    """
    nodes = max(graph.num_nodes for graph in graphs) + 1
    edges = max(graph.edges.shape[1] for graph in graphs)

    def rows(name: str) -> Tensor:
        return torch.stack([_pad(getattr(graph, name), nodes) for graph in graphs])

    def on_padding(name: str, size: int) -> Tensor | None:
        found = [getattr(graph, name) for graph in graphs]
        if found[0] is None:
            return None
        return torch.stack([_pad(index, size, nodes - 1) for index in found])

    def spaces(name: str) -> Tensor | None:
        found = [getattr(graph, name) for graph in graphs]
        return None if found[0] is None else torch.stack(found)

    x = _stack_matrix([graph.x for graph in graphs], nodes)

    def view(name: str) -> Matrix:
        found = [graph.views[name] for graph in graphs]
        if all(_is_same(view, graph.x) for view, graph in zip(found, graphs, strict=True)):
            return x  # the features themselves: not stacked twice
        return _stack_view(found, nodes)

    return Graph(
        x=x,
        edges=torch.stack([_pad(graph.edges.T, edges, nodes - 1).T for graph in graphs]),
        edge_weight=torch.stack([_pad(graph.edge_weight, edges) for graph in graphs]),
        y=rows("y"),
        train=rows("train"),
        val=rows("val"),
        test=rows("test"),
        real=rows("real"),
        ids=rows("ids"),
        views={name: view(name) for name in graphs[0].views},
        root=on_padding("root", nodes),
        roots=on_padding("roots", max(len(graph.at_roots(graph.y)) for graph in graphs)),
        has_features=spaces("has_features"),
        has_classes=spaces("has_classes"),
    )


def _stack_view(parts: Sequence[Matrix], nodes: int) -> Matrix:
    distinct = [part for part in parts if isinstance(part, Distinct)]
    if not distinct:
        return _stack_matrix([part for part in parts if not isinstance(part, Distinct)], nodes)
    most = max(len(part.rows) for part in distinct)
    rows = torch.stack([_pad(part.rows, most) for part in distinct])
    return Distinct(rows, stack_sparse([part.which for part in distinct], nodes))


def _is_same(one: Matrix, two: Matrix) -> bool:
    if isinstance(one, Sparse) and isinstance(two, Sparse):
        return one.values is two.values
    return one is two


def _stack_matrix(parts: Sequence[Tensor | Sparse], nodes: int) -> Tensor | Sparse:
    dense = [part for part in parts if isinstance(part, Tensor)]
    sparse = [part for part in parts if isinstance(part, Sparse)]
    if dense and sparse:
        raise ValueError("graphs can be stacked only if a matrix is dense in all, or sparse in all")
    if dense and lists_nodes(dense[0]):
        longest = max(len(part) for part in dense)
        return torch.stack([_pad(part, longest, nodes - 1) for part in dense])
    return (
        torch.stack([_pad(part, nodes) for part in dense]) if dense else stack_sparse(sparse, nodes)
    )


def stack_sparse(parts: Sequence[Sparse], rows: int) -> Sparse:
    """Sparse matrices with a leading axis, numbered as the blocks of one block-diagonal matrix.

    Padding entries stand last, in the last row and column, with value zero.
    """
    square = parts[0].square
    columns = rows if square else max(part.shape[1] for part in parts)
    entries = max(part.values.shape[0] for part in parts)
    blocks = []
    for k, part in enumerate(parts):
        used = part.values.shape[0]
        order = torch.arange(used, entries, dtype=torch.int32, device=part.values.device)
        blocks.append(
            Sparse(
                offsets=_pad(part.offsets, rows, used) + k * entries,
                columns=_pad(part.columns, entries, columns - 1) + k * columns,
                rows=_pad(part.rows, entries, rows - 1) + k * rows,
                values=_pad(part.values, entries),
                t_offsets=_pad(part.t_offsets, columns, used) + k * entries,
                t_columns=_pad(part.t_columns, entries, rows - 1) + k * rows,
                t_order=torch.cat([part.t_order, order]) + k * entries,
                t_values=_pad(part.t_values, entries),
                square=square,
                dense=None if part.dense is None else _pad(_pad(part.dense, rows).T, columns).T,
            )
        )
    return stack(blocks)


def _pad(leaf: Tensor, size: int, value: float = 0) -> Tensor:
    """Lengthen the first axis to `size`."""
    missing = size - leaf.shape[0]
    return functional.pad(leaf, [0, 0] * (leaf.dim() - 1) + [0, missing], value=value)
