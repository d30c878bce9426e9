"""Trees on the disk, mapped into memory: the system reads what is used and drops what it needs.

For graphs that are made `Lazily` because all of them together do not fit.
"""

from __future__ import annotations

import mmap
import tempfile

import torch
from torch import Tensor

from atoll.core.tree import Tree, leaves, tree_map

_ALIGNED = 64


def on_disk(tree: Tree) -> Tree:
    """The same tree, its tensors in a file without a name that goes when nobody uses them."""
    tensors = [leaf.contiguous() for leaf in leaves(tree)]
    places = []
    with tempfile.TemporaryFile(prefix="atoll-") as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % _ALIGNED))
            places.append(file.tell())
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        file.write(bytes(_ALIGNED))  # an empty file cannot be mapped
        file.flush()
        # A private copy: writing into it, which nobody should, would not reach the file.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    placed = iter(zip(tensors, places, strict=True))
    return tree_map(lambda _: _read(mapped, *next(placed)), tree)


def _read(mapped: mmap.mmap, like: Tensor, place: int) -> Tensor:
    if not like.numel():
        return like
    flat = torch.frombuffer(mapped, dtype=like.dtype, count=like.numel(), offset=place)
    return flat.view(like.shape)
