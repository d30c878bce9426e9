"""Packing communities into clients of about equal size, and small helpers for owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

NoRoom = Callable[[np.ndarray, np.ndarray, int], int]
"""(sizes of all clients, open clients, cursor) -> the client that takes what fits nowhere."""


@dataclass(frozen=True)
class PackingRule:
    """The numbers in which the public packings differ."""

    piece: int  # no group is larger; a larger community is cut first
    room: int  # a group fits while client and group together hold at most this many
    full: int  # a client with this many gets nothing more
    no_room: NoRoom  # who takes a group that fits nowhere
    least: int = 1  # a client with fewer is topped up in the end
    duplicates: bool = False  # such a group is stored twice (the fault of FedGTA's code)


def smallest(sizes: np.ndarray, open_clients: np.ndarray, cursor: int) -> int:
    """The smallest of all clients; the closed ones may be smaller than the last open one."""
    del open_clients, cursor
    return int(np.argmin(sizes))


def stay(sizes: np.ndarray, open_clients: np.ndarray, cursor: int) -> int:
    """The client at the cursor, which is where a full turn ends."""
    del sizes
    return int(open_clients[cursor])


def mistaken_smallest(sizes: np.ndarray, open_clients: np.ndarray, cursor: int) -> int:
    """The choice of OpenFGL and FedTAD instead of `smallest`, after 1001 steps of the cursor.

    Their search looks at the size under the cursor, which it moves itself, so each comparison is
    one client late: sizes 5, 3, 9 with the cursor on 9 give 9.
    """
    open_sizes = sizes[open_clients]
    seen, least = (cursor + 1001) % len(open_sizes), np.inf
    for candidate in range(len(open_sizes)):
        if open_sizes[seen] < least:
            least, seen = open_sizes[seen], candidate
    return int(open_clients[seen])


def cut(groups: Sequence[np.ndarray], piece: int) -> list[np.ndarray]:
    """Cut groups down to `piece` members: the first stay, the others form a group at the end."""
    result = list(groups)
    for place, group in enumerate(result):  # which also meets the groups that it appends
        if len(group) > piece:
            result.append(group[piece:])
            result[place] = group[:piece]
    return result


def pack(groups: Sequence[np.ndarray], clients: int, rule: PackingRule) -> list[np.ndarray]:
    """Hand the groups, largest first, to the first client in turn that has room.

    The cursor stays on the client that took the last group. No client remains empty.
    """
    pieces = sorted(cut(groups, rule.piece), key=len, reverse=True)
    owned: list[list[np.ndarray]] = [[] for _ in range(clients)]
    sizes = np.zeros(clients, dtype=np.int64)
    open_clients = np.arange(clients)
    cursor = 0
    for group in pieces:
        while len(open_clients) > 1 and sizes[open_clients[cursor]] >= rule.full:
            open_clients = np.delete(open_clients, cursor)
            cursor %= len(open_clients)
        in_turn = np.roll(open_clients, -cursor)
        fits = sizes[in_turn] + len(group) <= rule.room
        if fits.any():
            taker, copies = int(in_turn[fits.argmax()]), 1
        else:
            taker, copies = rule.no_room(sizes, open_clients, cursor), 1 + rule.duplicates
        owned[taker] += [group] * copies
        sizes[taker] += len(group) * copies
        if taker in open_clients:
            cursor = int(np.searchsorted(open_clients, taker))
    none = np.empty(0, dtype=np.int64)
    return top_up([np.concatenate([none, *groups]) for groups in owned], rule.least)


def members(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """The ids of each client, ascending, from the client of each id."""
    sizes = np.bincount(owner, minlength=clients)
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])


def top_up(parts: Sequence[np.ndarray], least: int = 1) -> list[np.ndarray]:
    """Let each client with fewer than `least` share evenly with the then largest client.

    The largest gives its last members. Nothing changes where everybody has enough, and with `least`
    up to half of the mean size each client ends with that many.
    """
    result = list(parts)
    for client in range(len(result)):
        if len(result[client]) < least:
            largest = int(np.argmax([len(ids) for ids in result]))
            keep = len(result[largest]) - (len(result[largest]) - len(result[client])) // 2
            result[client] = np.concatenate([result[client], result[largest][keep:]])
            result[largest] = result[largest][:keep]
    return result
