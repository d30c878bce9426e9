"""The heads of the packets that a server may send to a site, each field with its type and bounds.

A site checks a head here before it logs, stores or computes anything from it.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from atoll.core.errors import WireError
from atoll.data.own.agree import Agreed
from atoll.deploy.audit import Json
from atoll.engines.fleet import NEVER

CONFIG = 16_384
"""Length of the longest configuration in characters. The longest recipe has about 2,000."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
Word = Annotated[str, Meta(max_length=200)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Hello(msgspec.Struct, frozen=True):
    """The server asks whether a site would take part in a run."""

    run: Word
    method: Word
    rounds: Annotated[int, Meta(ge=0)]
    dp: Annotated[dict[Word, float | Word], Meta(max_length=20)] | None
    atoll: Annotated[str, Meta(max_length=40)] = ""  # the server's version, for the log
    encoder: Word = ""  # "federated" asks for the statistics of a site's columns


class Begin(msgspec.Struct, frozen=True):
    """The server asks a site to build the method of a run."""

    run: Word
    config: Annotated[str, Meta(max_length=CONFIG)]
    # The common encoder for the columns of all sites' tables: a list of `data.own.agree.Agreed`.
    encoder: Annotated[list[Agreed], Meta(max_length=100_000)] = []


class Question(msgspec.Struct, frozen=True):
    """The server asks for one step. The body contains the message."""

    run: Word
    owner: Word
    step: Word
    flags: Annotated[dict[Word, bool], Meta(max_length=20)]
    round: Annotated[int, Meta(ge=-1, le=1 << 31)]
    attempt: Word
    state: Annotated[int, Meta(ge=NEVER, le=1 << 31)]  # the round whose private state is valid
    key: Int64
    keep: Annotated[int, Meta(ge=NEVER, le=1 << 31)] = NEVER  # the selected round so far


class Sealed(msgspec.Struct, frozen=True):
    """A manifest as text, with its signature in base64 and the signer's certificate as PEM."""

    manifest: Annotated[str, Meta(max_length=1 << 20)]
    signature: Annotated[str, Meta(max_length=10_000)]
    certificate: Annotated[str, Meta(max_length=100_000)]


class Delivery(Sealed, frozen=True):
    """The server sends the model of a finished run. The body contains the manifest's files."""

    run: Word


Head = TypeVar("Head", Hello, Begin, Question, Delivery)


def read_head(kind: type[Head], head: Json) -> Head:
    """Check and return the head of a packet. The error quotes none of its values."""
    try:
        found = msgspec.convert(head, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise WireError(f"a packet was refused: {error}") from error
    check_name(found.run)
    return found


def check_name(run: str) -> None:
    """Refuse an invalid name of a run, because it is also the name of a folder."""
    if not NAME.fullmatch(run):
        raise WireError("a run's name is up to 100 letters, digits, '-' and '_'")


def short(value: object, most: int = 100) -> object:
    """Return a packet's value for the log: a number, short ASCII text, or else its type's name."""
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    if not isinstance(value, str):
        return type(value).__name__
    return value[:most].encode("unicode_escape").decode()[:most]
