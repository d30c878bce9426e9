"""Summaries that sites send before a run, the check that they agree, and the common encoder."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Annotated

import msgspec

from atoll.core.errors import DataError
from atoll.core.files import write_atomically
from atoll.data.own.agree import Agreed, Told, agree, feature_names
from atoll.engines import fleet as remote

ROSTER = "roster.json"
ENCODER = "encoder.json"
"""The file with the encoder that the sites agreed on for the columns of their tables."""
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
MOST_NODES = 1 << 26
"""The most nodes of one site: a server may store numbers for each of them (FedGNN's keys)."""


class SiteSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `SiteData.summary` that a site sends when it joins."""

    features: Size
    classes: Annotated[int, msgspec.Meta(ge=2, le=10_000)]  # a score counts each pair of classes
    task: Annotated[str, msgspec.Meta(max_length=100)]
    counts: tuple[Size, Size, Size]
    nodes: Annotated[int, msgspec.Meta(ge=0, le=MOST_NODES)]
    metric: Annotated[str, msgspec.Meta(max_length=100)]
    words: list[str]

    def __post_init__(self) -> None:
        if max(self.counts) > self.nodes:
            raise ValueError(f"counts are {self.counts}, but there are {self.nodes} nodes")


def read_told(body: bytes, site: SiteSummary) -> list[Told]:
    """Read a site's column statistics. No column may have more rows than the site has nodes."""
    told = msgspec.json.decode(body or b"[]", type=list[Told])
    for one in told:
        if one.rows > site.nodes:
            sizes = f"{one.rows} rows, but there are {site.nodes} nodes"
            raise msgspec.ValidationError(f"a column has {sizes}")
    return told


def encoder_of(folder: Path, told: Mapping[str, list[Told]], *, is_new: bool) -> list[Agreed]:
    """Return the run's common encoder, or an empty list if the run has none.

    A new run (`is_new`) makes and writes it if every site sent statistics. A resumed run reads it.
    """
    path = folder / ENCODER
    if is_new:
        path.unlink(missing_ok=True)
    if is_new and told and all(told.values()):
        write_atomically(path, msgspec.json.encode(agree(told)))
    if not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Agreed])
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"'{path}' cannot be read ({error}); restore it from a backup") from error


def encoded(site: SiteSummary, told: list[Told], encoder: list[Agreed]) -> SiteSummary:
    """Return a summary with the features of the common encoder, or unchanged if columns differ."""
    if [one.name for one in told] != [one.name for one in encoder]:
        return site  # it is refused later, because it differs from the others or from before
    names = feature_names(told, encoder)
    words = [word for word in site.words if word.startswith("class ")]
    words += [f"column {name}" for name in names]
    return msgspec.structs.replace(site, features=len(names), words=words)


def read_summaries(path: Path) -> dict[str, SiteSummary]:
    """Read the summaries of all sites from a run's file."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, SiteSummary])
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"'{path}' cannot be read ({error}); restore it from a backup") from error
    if not found:
        raise DataError(f"'{path}' names no site; restore it from a backup")
    return found


def check_alike(sites: Mapping[str, SiteSummary]) -> None:
    """Refuse sites whose data do not fit together."""
    first, *others = sites
    for name, key in product(others, ("task", "features", "classes", "metric", "words")):
        one, other = getattr(sites[first], key), getattr(sites[name], key)
        if one == other:
            continue
        if key == "words" and set(one) != set(other):
            left, right = set(one), set(other)  # sets, because a site may send millions of words
            one, other = [w for w in one if w not in right], [w for w in other if w not in left]
        hint = "agree on the columns and give every site the same --classes"
        one, other = (remote.one_line(found, 300) for found in (one, other))
        raise DataError(f"{first} and {name} do not fit together: {key} {one} and {other}; {hint}")
