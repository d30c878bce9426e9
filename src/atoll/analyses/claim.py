"""The result of a numeric check of a paper's claim: tables, sentences and a picture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.present.chart import Panels
from atoll.present.tables import Part, Table, heading, quiet


@dataclass(frozen=True, eq=False)
class Claim:
    """A checked claim. `numbers` contains the data of table and picture, for JSON."""

    name: str
    tables: tuple[Table, ...]
    sentences: tuple[str, ...]  # whether the claim holds
    picture: Panels
    numbers: dict[str, object]

    def parts(self) -> list[Part]:
        """Return tables with titles and captions, then the sentences, for `layout`."""
        parts: list[Part] = []
        for table in self.tables:
            parts += [heading(table.title), table, quiet(table.caption), ""]
        return [*parts, *self.sentences]

    def files(self) -> dict[str, object]:
        """Return tables as CSV, numbers as JSON and the picture, for `write_all`."""
        ends = ("", *(f"-{n}" for n in range(2, 1 + len(self.tables))))
        tables = {f"{self.name}{end}.csv": t for end, t in zip(ends, self.tables, strict=True)}
        numbers = {"sentences": self.sentences, **self.numbers}
        return {**tables, f"{self.name}.json": numbers, f"{self.name}.png": self.picture}


def exponent(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the slope of log y over log x by least squares, and R² of that line."""
    at, values = np.log(x), np.log(y)
    line = np.polynomial.Polynomial.fit(at, values, 1).convert()
    return float(line.coef[1]), float(1 - (values - line(at)).var() / max(values.var(), 1e-300))
