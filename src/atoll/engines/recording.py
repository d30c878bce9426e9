"""Recording and replay of work. On a GPU a recording is a CUDA graph, which is one launch.

Recorded work must repeat the same operations. It must not read a number to decide what comes next
(`no_reads` checks this), and its noise must come from inputs (`Tape`).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.cuda import _POOL_HANDLE as Pool
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.core.kernels import on_gpu
from atoll.core.random import fold, salt, salted
from atoll.core.tree import Tree, leaves, named_leaves, tree_map
from atoll.core.vmap.stacks import Constant, Dims, Vmap, batched, call
from atoll.core.vmap.varied import Args, Kwargs


class NotRecordable(Exception):
    """The reason why some work cannot be recorded, as the end of a sentence."""


Function = Callable[..., tuple[Tree, ...]]
T = TypeVar("T")


class Recording:
    """A function of trees, recorded with copies of its inputs.

    A call copies new inputs over the old ones and replays. Its outputs are valid until the next
    call, which overwrites them. Without a GPU a replay is a call of the function. The function must
    have run before, so that the recording loads and allocates nothing new.

    The first `carried` outputs are the inputs of the next call. The recording writes them over the
    inputs, so they need no copy. Recordings that share a memory `pool` must not run simultaneously.
    `keeps` contains other tensors that the function reads: a replay reads them at their old place.
    """

    def __init__(
        self,
        function: Function,
        *inputs: Tree,
        carried: int = 0,
        pool: Pool | None = None,
        keeps: object = None,
    ) -> None:
        self.keeps = function, keeps
        self.inputs = tree_map(torch.clone, inputs)
        self.targets = leaves(self.inputs)
        self.carried = carried
        self.replay: Function = lambda: self._settled(function(*self.inputs))
        if any(leaf.is_cuda for leaf in self.targets):
            self.replay = self._captured(function, pool)

    def _captured(self, function: Function, pool: Pool | None) -> Function:
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        device = self.targets[0].device
        with torch.cuda.device(device):
            capture = torch.cuda.graph(graph, pool=pool)  # its stream is on the current device
            # Torch aborts the process if the two numbers it needs to begin do not fit into memory.
            # They fit next to this tensor. If the tensor itself does not fit, torch raises.
            with torch.cuda.stream(capture.capture_stream):
                spare = torch.empty(1, device=device)
        # Garbage may contain older graphs, and none may be freed while another one is captured.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(device), capture:
                outputs = self._settled(function(*self.inputs))
        except BaseException:
            torch.cuda.set_stream(before)  # after a failed capture torch leaves its own stream
            raise
        finally:
            if collects:
                gc.enable()
            del spare

        def replay() -> tuple[Tree, ...]:
            graph.replay()
            return outputs

        return replay

    def _settled(self, outputs: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """Return the outputs, after the carried ones are written over their inputs."""
        # First copy outputs that share memory with inputs, because one may overwrite another.
        ours = {leaf.untyped_storage().data_ptr() for leaf in self.targets}

        def apart_from_inputs(leaf: Tensor) -> Tensor:
            return leaf.clone() if leaf.untyped_storage().data_ptr() in ours else leaf

        apart = tree_map(apart_from_inputs, outputs)
        back = self.inputs[: self.carried]
        copy_over(leaves(back), leaves(apart[: self.carried]))
        return (*back, *apart[self.carried :])

    def __call__(self, *inputs: Tree) -> tuple[Tree, ...]:
        copy_over(self.targets, leaves(inputs))
        return self.replay()


def copy_over(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Overwrite tensors with others, in one launch per type."""
    # Lists of several types would be copied one tensor at a time.
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            some, others = kinds.setdefault(target.dtype, ([], []))
            some.append(target)
            others.append(source)
    for some, others in kinds.values():
        torch._foreach_copy_(some, others)


def copied(tree: T) -> T:
    """Return a copy of the tree with separate tensors."""
    copy = tree_map(torch.empty_like, tree)
    copy_over(leaves(copy), leaves(tree))
    return copy


def new_pool(cuda: bool) -> Pool | None:
    """Return a new memory pool for recordings on a GPU, otherwise None.

    A pool cannot be reused after its recordings are freed.
    """
    return torch.cuda.graph_pool_handle() if cuda else None


def shapes(tree: Tree) -> tuple[object, ...]:
    """Return a key that is equal for trees that are interchangeable in a recording."""
    # Values that are not tensors are part of the program, so they must be equal.
    flat, spec = pytree.tree_flatten(tree)
    parts = ((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in flat)
    return spec, tuple(parts)


@contextmanager
def no_reads(device: torch.device) -> Iterator[Watch]:
    """Raise an error if Python waits for a number, because a recording would freeze it."""
    with ExitStack() as after:
        if device.type == "cuda":
            after.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that this mode is a prototype
                torch.cuda.set_sync_debug_mode("error")
        yield after.enter_context(Watch())


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Raise an error if Python reads a result or a shape depends on values. Note read tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler at once, which takes seconds

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # These include tensors that a recording must keep, such as a graph in a method's cache.
        self.read: dict[int, Tensor] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs = None
    ) -> object:
        if func in _READS:
            name = str(func).removeprefix("aten.").partition(".")[0]
            raise NotRecordable(f"it reads numbers on the way ({name})")
        for place, leaf in _places((args, kwargs)).items():
            if place not in self.made:
                self.read.setdefault(place, leaf)
        found = func(*args, **(kwargs or {}))
        self.made.update(_places(found))
        return found

    def besides(self, *trees: Tree) -> list[Tensor]:
        """Return the tensors that were read, but neither made here nor part of these trees."""
        known = _places(trees)
        return [leaf for place, leaf in self.read.items() if place not in known]


def _places(tree: Tree) -> dict[int, Tensor]:
    """Return the tensors of a tree by their address in memory."""
    found = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    plain = [leaf for leaf in found if leaf.layout is torch.strided and not wrapped(leaf)]
    return {leaf.untyped_storage().data_ptr(): leaf for leaf in plain}


_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
}


class RoundNumber:
    """A placeholder for the round's number among the parts of a key."""


ROUND = RoundNumber()
KeyPart = int | str | RoundNumber


@dataclass(frozen=True)
class Check:
    """Tensors that must be finite, and the error if they are not."""

    step: str  # the client step that returned them, or "" for a tensor of the server
    names: tuple[str, ...]  # of the tensors
    sampled: bool = False  # whether they belong only to the drawn clients
    problem: str = ""  # the error text for a server's tensor


@dataclass
class Tape:
    """Values that a round stores for later, so that it need not wait for them while it runs."""

    root: Tensor  # the root of all keys
    number: int = -1  # of a rehearsed round; -1 while it is recorded
    shown: int | None = None  # the number that a method may see, if it defines stages
    salts: Tensor | None = None  # of the keys of a recorded round, in order
    parts: list[tuple[KeyPart, ...]] = field(default_factory=list)  # of each key, in order
    # Step, whether it ran only on drawn clients, bytes down and bytes up.
    traffic: list[tuple[str, bool, int, int]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    watched: list[Tensor] = field(default_factory=list)  # checked tensors, stacked by clients
    sizes: list[tuple[int, int]] = field(default_factory=list)  # tensors and clients of each check
    doubts: list[Tensor] = field(default_factory=list)  # () bool, true if a rare event happens

    def key(self, *parts: KeyPart) -> Tensor:
        """Return the key `fold(root, *parts)`, with the round's number for `ROUND`."""
        self.parts.append(parts)
        if self.salts is None:
            return fold(self.root, *filled(parts, self.number))
        return salted(self.root, self.salts[len(self.parts) - 1, 0])

    def salts_of(self, rounds: Sequence[int]) -> Tensor:
        """Return the salts of the given rounds, (rounds, keys, 4), as inputs of recordings."""
        # Each salt is the first of four numbers, so it is aligned like a separate tensor, because
        # kernels are compiled for the alignment of their arguments.
        found = [[salt(*filled(parts, number)) for parts in self.parts] for number in rounds]
        table = [[[one, 0, 0, 0] for one in row] for row in found]
        return torch.tensor(table, dtype=torch.int64, device=self.root.device)

    def watch(
        self, tree: Tree, step: str = "", *, sampled: bool = False, problem: str = ""
    ) -> None:
        """Note the float tensors of a tree, stacked by clients, as tensors that must be finite.

        The check (`Check`) follows when Python reads the tape.
        """
        found = [(n, leaf) for n, leaf in named_leaves(tree) if leaf.is_floating_point()]
        floats = {name: leaf for name, leaf in found if leaf.numel()}
        if floats:
            self.checks.append(Check(step, tuple(floats), sampled, problem))
            self.watched.extend(floats.values())
            self.sizes.append((len(floats), len(next(iter(floats.values())))))

    def finite(self) -> Tensor:
        """Return whether each watched tensor of each client is finite, as one vector of bools."""
        if not self.watched:
            return torch.zeros(0, dtype=torch.bool, device=self.root.device)
        found: Tensor = call(_Finite, *self.watched)
        return found

    def first_problem(self, finite: Tensor) -> tuple[Check, str, int] | None:
        """Return the first failed check, with the tensor's name and the client's row, or None."""
        start = 0
        for check, size in zip(self.checks, self.sizes, strict=True):
            end = start + size[0] * size[1]
            # The first client first, then its first tensor: the order of rounds without recording.
            failed = (~finite[start:end].reshape(size)).T.nonzero()
            if len(failed):
                row, name = failed[0].tolist()
                return check, check.names[name], row
            start = end
        return None


class _Finite(Constant):
    """Whether each tensor, (clients, ...), is finite at each client, as one vector."""

    @staticmethod
    def forward(*watched: Tensor) -> Tensor:
        if all(map(on_gpu, watched)):
            from atoll.core.kernels import leaves as leaf_kernels

            return leaf_kernels.finite(watched)
        # A sum of doubles is finite if all its terms are, because float32 terms cannot overflow it.
        sums = [leaf.reshape(len(leaf), -1).sum(1, dtype=torch.float64) for leaf in watched]
        return torch.cat(sums).isfinite()

    @staticmethod
    def vmap(info: Vmap, dims: Dims, *watched: Tensor) -> tuple[Tensor, int]:
        many = batched(info, dims, *watched)
        found = call(_Finite, *(leaf.flatten(0, 1) for leaf in many))
        parts = found.split([len(leaf) * leaf.shape[1] for leaf in many])
        return torch.cat([part.reshape(info.batch_size, -1) for part in parts], dim=1), 0


def filled(parts: Sequence[KeyPart], number: int) -> list[int | str]:
    """Return the parts of a key, with the number of the round for `ROUND`."""
    return [number if isinstance(part, RoundNumber) else part for part in parts]
