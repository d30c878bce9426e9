"""The heads of a server's packets: their fields, and the types that a site accepts."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from atoll.core.errors import WireError
from atoll.engines.fleet import PROTOCOL

Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # fits into a tensor


class Hello(msgspec.Struct):
    """The first question: may this run take place here?"""

    version: str
    run: str
    method: str
    rounds: Whole
    dp: dict[str, float | str] | None


class Begin(msgspec.Struct):
    """The configuration that the run begins with, as TOML."""

    run: str
    config: str


class Ask(msgspec.Struct):
    """A step, and the round whose private state it begins with."""

    run: str
    owner: str
    step: str
    flags: dict[str, bool]
    round: Whole
    attempt: str
    state: Whole
    key: Whole


HEADS: dict[str, type[msgspec.Struct]] = {"hello": Hello, "begin": Begin, "step": Ask}


def check_head(head: dict[str, Any]) -> None:
    """Refuse a head that lacks a field or has one of another type."""
    what = head.get("do")
    if not isinstance(what, str) or what not in {*HEADS, "ping"}:
        raise WireError(f"'{str(what)[:100]}' is nothing that a site does")
    if what not in HEADS or (what == "hello" and head.get("version") != PROTOCOL):
        return  # another version may have other heads: the site refuses it by its version
    try:
        msgspec.convert(head, HEADS[what])
    except (msgspec.ValidationError, RecursionError) as error:
        raise WireError(
            f"a packet was refused: its head is not one of '{what}' ({error})"
        ) from error
