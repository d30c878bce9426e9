"""Checkpoints: a run killed at any moment leaves the last complete one.

A file is the SHA-256 of its content, then the content (`codec.encode`), written in one step.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from atoll.core.errors import DataError, WireError
from atoll.core.files import write_atomically
from atoll.core.tree import Tree, stack, unstack
from atoll.engines.codec import decode, encode
from atoll.engines.recording import shapes


def save_checkpoint(path: Path, tree: Tree) -> None:
    """Write a checkpoint."""
    data = encode(tree)
    write_atomically(path, hashlib.sha256(data).digest() + data)


def load_checkpoint(path: Path) -> Tree:
    """Read a checkpoint; a damaged one is refused."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise DataError(
            f"checkpoint {path} is damaged (its checksum does not match); delete it to start this "
            "seed again from round 0"
        )
    try:
        return decode(data[32:], limit=1 << 40, finite=False)
    except WireError as error:
        raise DataError(f"checkpoint {path} was written by another version of Atoll") from error


def pack_states(states: Tree) -> Tree:
    """Private states for a checkpoint: those of one shape stacked, so that many cost little.

    An engine whose clients keep their states elsewhere exports no list; that stays unchanged.
    """
    if not isinstance(states, list):
        return states
    alike: dict[object, list[int]] = {}
    for position, state in enumerate(states):
        alike.setdefault(shapes(state), []).append(position)
    return [
        {"clients": torch.tensor(group), "states": stack([states[p] for p in group])}
        for group in alike.values()
    ]


def unpack_states(packed: Tree) -> Tree:
    """The argument of `pack_states`."""
    if not isinstance(packed, list):
        return packed
    found: dict[int, Tree] = {}
    for group in packed:
        clients = group["clients"].tolist()
        found |= zip(clients, unstack(group["states"], len(clients)), strict=True)
    return [found[position] for position in range(len(found))]
