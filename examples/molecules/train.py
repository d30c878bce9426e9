"""Six labs classify molecules together: your own graphs in Python, one set per client.

Each lab has 100 invented molecules. All labs look for molecules with more nitrogen than oxygen.
Three labs use the label 1 for them, and three use 0. No lab tells the others its label.

    python examples/molecules/train.py                  about a minute and a half
    python examples/molecules/train.py --rounds 20 --seeds 1       shorter
"""

from __future__ import annotations

import argparse

import numpy as np

import atoll
from atoll.data.source import GraphGroup, GraphSet

ATOMS = "CNOS"
LABS = {"alpha": 1, "beta": 1, "gamma": 1, "delta": 0, "epsilon": 0, "zeta": 0}
"""The labs, and the label of each for a molecule with more nitrogen than oxygen."""
MOLECULES, MISTAKES = 100, 0.03  # of each lab; share of wrong measurements

Molecule = tuple[np.ndarray, list[tuple[int, int]]]  # the kind of each atom, and the bonds


def molecule(rng: np.random.Generator) -> Molecule:
    """Return a ring of five or six atoms with branches of up to twelve more."""
    ring, branch = int(rng.integers(5, 7)), int(rng.integers(5, 13))
    kinds = rng.choice(4, ring + branch, p=[0.66, 0.16, 0.12, 0.06])
    bonds = [(i, (i + 1) % ring) for i in range(ring)]
    bonds += [(i, int(rng.integers(i))) for i in range(ring, ring + branch)]
    return kinds, bonds


def more_nitrogen(kinds: np.ndarray) -> bool:
    """Whether a molecule has the property that the labs predict."""
    return bool((kinds == ATOMS.index("N")).sum() > (kinds == ATOMS.index("O")).sum())


def measured(name: str, rng: np.random.Generator) -> GraphSet:
    """Return a lab's molecules, half of which have more nitrogen than oxygen."""
    found: tuple[list[Molecule], list[Molecule]] = ([], [])
    while min(map(len, found)) < MOLECULES // 2:
        new = molecule(rng)
        found[more_nitrogen(new[0])].append(new)
    chosen = [*found[0][: MOLECULES // 2], *found[1][: MOLECULES // 2]]
    active = np.repeat([1 - LABS[name], LABS[name]], MOLECULES // 2)
    starts = np.cumsum([0, *(len(kinds) for kinds, _ in chosen)])
    joined = [
        np.array(bonds).T + start for (_, bonds), start in zip(chosen, starts[:-1], strict=True)
    ]
    return GraphSet(
        name,
        np.eye(len(ATOMS), dtype=np.float32)[np.concatenate([kinds for kinds, _ in chosen])],
        np.concatenate(joined, axis=1),
        starts,
        np.where(rng.random(MOLECULES) < MISTAKES, 1 - active, active),
        classes=2,
    )


def main() -> None:
    """Train locally, together, and together in clusters, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    scores: dict[str, list[float]] = {"local": [], "fedavg": [], "gcfl": []}
    for seed in range(given.seeds):
        rng = np.random.default_rng(seed)
        labs = GraphGroup("labs", tuple(measured(name, rng) for name in LABS))
        federation = atoll.partition(labs, seed=seed)
        for method, found in scores.items():
            result = atoll.run(method, federation, rounds=given.rounds, seed=seed)
            found.append(100 * result.metrics()["test_accuracy"]["mean"])
    print(f"{'method':10}test accuracy, mean and spread of {given.seeds} seeds")
    for method, found in scores.items():
        print(f"{method:10}{np.mean(found):.1f} ± {np.std(found):.1f}")


if __name__ == "__main__":
    main()
