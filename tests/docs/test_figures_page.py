"""The page of the papers' figures agrees with the CSV files of its pictures."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE = (RESULTS / "figures.md").read_text(encoding="utf-8")
GALLERY = (RESULTS.parent / "gallery.md").read_text(encoding="utf-8")
NUMBERS = sorted((RESULTS / "figures").glob("*.csv"))
PAIR = re.compile(r"(\d+\.\d) ± (\d+\.\d)")


def section(name: str) -> str:
    """The text below the heading of a figure, such as "fedath-4"."""
    found = re.findall("^## (.+)", PAGE, re.MULTILINE)
    heads = {head.lower().replace(": fig. ", "-"): head for head in found}
    return PAGE.partition(f"## {heads[name]}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: path.stem)
def test_numbers_of_a_figure_are_those_of_its_file(path: Path) -> None:
    text = section(path.stem)
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert f"figures/{path.name}" in text
    assert "**Not run yet.**" not in text
    assert {row["seeds"] for row in rows if "seeds" in row} <= {"5"}
    known = [(float(row["mean"]), float(row["std"])) for row in rows if "std" in row]
    for one in PAIR.findall(text) if known else ():
        mean, std = map(float, one)
        assert any(max(abs(mean - m), abs(std - s)) < 0.051 for m, s in known), one


@pytest.mark.parametrize("name", ["gcfl-6", "gcfl-7", "gcfl-8"])
def test_mean_gains_are_those_of_the_file(name: str) -> None:
    text = section(name)
    axis = {"gcfl-6": "clients", "gcfl-7": "features", "gcfl-8": "sequences"}[name]
    gains: dict[tuple[str, ...], list[float]] = {}
    for row in csv.DictReader((RESULTS / "figures" / f"{name}.csv").read_text().splitlines()):
        gains.setdefault((row["dataset"], row["method"], row[axis]), []).append(float(row["gain"]))
    for key, found in gains.items():
        mean = f"{sum(found) / len(found):.1f}".replace("-", "−")
        assert f"| {mean} " in text, (key, mean)


def test_pictures_are_small_and_on_the_page() -> None:
    pictures = sorted((RESULTS / "figures").glob("*.png"))
    assert {path.stem for path in NUMBERS} <= {re.sub(r"(-\d+).*", r"\1", p.stem) for p in pictures}
    for path in pictures:
        assert path.stat().st_size < 150_000, path.name
        assert f"(figures/{path.name})" in PAGE
        assert f"(results/figures/{path.name})" in GALLERY
