"""Fuzz packets, messages, orders and checkpoints: every error must be an `AtollError`.

Needs Atheris, which is not a dependency of the package: pip install atheris==3.0.0

    python -m fuzz.packets -runs=1000000

Options are libFuzzer's. The seeds are real inputs, made at every start. The first error of
another type ends the run with its traceback, and its input is written to a file `crash-...`.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["atoll"]):
    from fuzz.cases import MOST, Case, Targets, mutated


def main() -> None:
    """Run libFuzzer until it has tried `-runs` inputs, or one fails."""
    with tempfile.TemporaryDirectory() as folder:
        targets, corpus = Targets(Path(folder)), Path(folder) / "corpus"
        seeds = targets.seeds()
        corpus.mkdir()
        for number, case in enumerate(seeds):
            (corpus / str(number)).write_bytes(case.packed())

        def mutate(data: bytes, most: int, seed: int) -> bytes:
            chance = random.Random(seed)
            if chance.random() < 0.1:
                return bytes(atheris.Mutate(data, most))
            base = chance.choice(seeds) if chance.random() < 0.3 else Case.unpacked(data)
            return mutated(base, chance, seeds).packed()[:most]

        # They precede the user's options, which override them.
        options = [sys.argv[0], f"-max_len={2 * MOST + 5}", "-timeout=60", *sys.argv[1:]]
        atheris.Setup(
            [*options, str(corpus)],
            lambda data: targets.try_one(Case.unpacked(data)),
            custom_mutator=mutate,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
