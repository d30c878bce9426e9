"""Lagoon, the built-in data: several owners' parts of one citation-like graph.

Every document has a class (its field), an owner (a library), a popularity, and a bag of words
from its field's vocabulary. It cites popular documents, mostly of its field (homophily) and mostly
of its library. Archipelago is the same generator for scale: any number of owners, each with a small
graph and, by default, no edge to the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from atoll.core.errors import ConfigError, unknown
from atoll.data.source import Source

if TYPE_CHECKING:
    import scipy.sparse as sp


@dataclass(frozen=True)
class Lagoon:
    """The options of the generator.

    Attributes:
        nodes: Number of documents.
        classes: Number of fields.
        words: Size of the vocabulary.
        words_per_node: Words drawn for a document. A word that is drawn twice counts once.
        degree: Approximate mean number of neighbours.
        homophily: Share of citations inside the field, on average over the owners.
        label_skew: At 0 every owner has all fields equally, towards 1 each owner has few.
        topology_skew: Largest difference of an owner's homophily from `homophily`.
        feature_noise: Share of words that are independent of the field.
        own_library: Share of citations to the owner's library. Others go to a random library.
    """

    nodes: int = 3000
    classes: int = 6
    words: int = 600
    words_per_node: int = 12
    degree: float = 4.0
    homophily: float = 0.75
    label_skew: float = 0.4
    topology_skew: float = 0.15
    feature_noise: float = 0.7
    own_library: float = 0.85

    owners: ClassVar[int | None] = None  # default number of owners; None asks the protocol
    dense: ClassVar[bool] = False  # whether words are stored densely

    def __post_init__(self) -> None:
        self._check(type(self).__name__.lower())

    def owner(self, owners: int, rng: np.random.Generator) -> np.ndarray:
        """Return the owner of each document, ascending."""
        if owners < 1 or self.nodes < 10 * owners:
            problem = f"lagoon with {self.nodes} nodes cannot have {owners} clients"
            advice = f"give 1 to {self.nodes // 10}, or more nodes (--data lagoon:nodes=...)"
            raise ConfigError(f"{problem}; {advice}")
        return np.sort(rng.integers(owners, size=self.nodes))

    def _check(self, who: str) -> None:
        for name in ("homophily", "label_skew", "topology_skew", "feature_noise", "own_library"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ConfigError(f"{who}: {name} is {share}; give a number from 0 to 1")
        for name in ("nodes", "classes", "words", "words_per_node"):
            if (count := getattr(self, name)) < 1:
                raise ConfigError(f"{who}: {name} is {count}; give at least 1")
        if not 0 < self.degree < self.nodes:
            advice = f"give a number above 0 and below the {self.nodes} nodes"
            raise ConfigError(f"{who}: degree is {self.degree}; {advice}")


@dataclass(frozen=True)
class Archipelago(Lagoon):
    """The options of lagoon except `nodes`, and two more.

    Attributes:
        least: Fewest documents of an owner.
        most: Most documents of an owner. Sizes are drawn uniformly between the two.
    """

    nodes: int = field(default=0, init=False)
    words: int = 64
    label_skew: float = 0.2
    own_library: float = 1.0
    least: int = 50
    most: int = 200

    owners: ClassVar[int | None] = 1000
    dense: ClassVar[bool] = True

    def owner(self, owners: int, rng: np.random.Generator) -> np.ndarray:
        if owners < 1:
            raise ConfigError(f"archipelago cannot have {owners} clients; give at least 1")
        return np.repeat(np.arange(owners), rng.integers(self.least, self.most + 1, size=owners))

    def _check(self, who: str) -> None:
        if not 10 <= self.least <= self.most:
            problem = f"{who}: owners of {self.least} to {self.most} nodes are not possible"
            raise ConfigError(f"{problem}; give least from 10 on and most from least on")
        object.__setattr__(self, "nodes", self.least)  # `_check` limits `degree` by it
        super()._check(who)


BUILT_IN: dict[str, type[Lagoon]] = {"lagoon": Lagoon, "archipelago": Archipelago}
"""The generators by their names."""


def built_in(text: str) -> type[Lagoon] | None:
    """Return the generator for a name of data, with or without options, or None for other data."""
    return BUILT_IN.get(text.partition(":")[0])


def parse_lagoon(text: str) -> Lagoon:
    """Parse the generator and its options from a text such as `lagoon:homophily=0.3,nodes=5000`."""
    name, _, given = text.partition(":")
    made = BUILT_IN[name]
    kinds: dict[str, type[Any]] = {f.name: type(f.default) for f in fields(made) if f.init}
    knobs: dict[str, Any] = {}
    for item in filter(None, given.split(",")):
        knob, _, value = (part.strip() for part in item.partition("="))
        if knob not in kinds:
            raise unknown(f"{name} knob", knob, kinds)
        try:
            knobs[knob] = kinds[knob](value)
        except ValueError:
            kind = "a whole number" if kinds[knob] is int else "a number"
            raise ConfigError(f"{name}: {knob} cannot be '{value}'; it takes {kind}") from None
    return made(**knobs)


def make_lagoon(knobs: Lagoon, owners: int, seed: int) -> Source:
    """Draw the graph. Its column `owner` contains the owner of each document."""
    rng = np.random.default_rng([seed, owners])
    owner = knobs.owner(owners, rng)
    # A Dirichlet draw per owner. A skew of 0 is (nearly) uniform, 1 is (nearly) one field each.
    strength = max(1e-2, 4.0 * (1.0 - knobs.label_skew) / max(knobs.label_skew, 1e-3))
    shares = rng.dirichlet(np.full(knobs.classes, strength), size=owners)
    draw = rng.random(owner.size)[:, None]
    y = np.asarray((draw > np.cumsum(shares, axis=1)[owner][:, :-1]).sum(axis=1), np.int64)
    x, edges = _words(knobs, y, rng), _citations(knobs, owner, y, owners, rng)
    name, columns = type(knobs).__name__.lower(), {"owner": owner}
    made = Source(name, x, edges, y, knobs.classes, columns=columns)
    return made.undirected_simple()


def _words(knobs: Lagoon, y: np.ndarray, rng: np.random.Generator) -> np.ndarray | sp.csr_array:
    # Words follow a power law of their rank. Each field ranks them in its own random order, and
    # words that are independent of the field have one more order.
    weight = 1.0 / np.arange(1, knobs.words + 1) ** 0.8
    orders = np.stack([rng.permutation(knobs.words) for _ in range(knobs.classes + 1)])
    size = (y.size, knobs.words_per_node)
    rank = np.searchsorted(np.cumsum(weight / weight.sum()), rng.random(size))
    common = rng.random(size) < knobs.feature_noise
    topic = np.where(common, knobs.classes, y[:, None])
    columns = orders[topic, rank.clip(max=knobs.words - 1)].reshape(-1)
    rows = np.repeat(np.arange(y.size), knobs.words_per_node)
    import scipy.sparse as sp

    x = sp.csr_array((np.ones(rows.size, np.float32), (rows, columns)), shape=(y.size, knobs.words))
    x.sum_duplicates()
    x.data[:] = 1.0
    return x.toarray() if knobs.dense else x


def _citations(
    knobs: Lagoon, owner: np.ndarray, y: np.ndarray, owners: int, rng: np.random.Generator
) -> np.ndarray:
    n = owner.size
    source = np.repeat(np.arange(n), rng.poisson(knobs.degree / 2, size=n))
    spread = np.linspace(-1, 1, owners) if owners > 1 else np.zeros(1)
    homophily = np.clip(knobs.homophily + knobs.topology_skew * spread, 0, 1)
    inside = rng.random(source.size) < knobs.own_library
    same = rng.random(source.size) < homophily[owner[source]]
    library = np.where(inside, owner[source], rng.integers(owners, size=source.size))
    shift = rng.integers(1, max(knobs.classes, 2), size=source.size)
    field = np.where(same, y[source], (y[source] + shift) % knobs.classes)
    # For each citation a document of the drawn library and field, by popularity.
    popularity = rng.pareto(2.5, size=n) + 0.1
    group = owner * knobs.classes + y
    order = np.argsort(group, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(popularity[order])])
    groups = int(group.max()) + 1
    first = np.searchsorted(group[order], np.arange(groups + 1))
    wished = np.minimum(library * knobs.classes + field, groups - 1)
    # If a library lacks the field, cite any document of that library instead.
    low, high = first[wished], first[wished + 1]
    whole = np.searchsorted(owner[order], np.stack([library, library + 1]))
    empty = low == high
    low, high = np.where(empty, whole, (low, high))
    point = total[low] + rng.random(low.size) * (total[high] - total[low])
    place = np.searchsorted(total, point, side="right") - 1
    return np.stack([source, order[np.clip(place, low, np.maximum(high - 1, low))]])
