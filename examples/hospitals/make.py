"""Write the patients of two invented hospitals, in one folder for each hospital.

An edge joins two patients who shared a ward. Alder has the values f and m of `sex`, and Birch also
has x. Birch has more missing lactate values and older patients. The hospitals agree on one encoder,
and neither sees a row of the other.

    python examples/hospitals/make.py hospitals
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

PATIENTS, CONTACTS = 300, 3
HOSPITALS = {  # mean age, share of missing lactate values, values of sex with their shares
    "alder": (48, 0.05, {"f": 0.5, "m": 0.5}),
    "birch": (63, 0.2, {"f": 0.48, "m": 0.48, "x": 0.04}),
}


def main() -> None:
    """Write nodes.csv and edges.csv of each hospital."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    rng = np.random.default_rng(4)
    for name, (age, gaps, sexes) in HOSPITALS.items():
        folder = given.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        infected = rng.random(PATIENTS) < 0.3
        patients = [["patient", "sex", "age", "lactate", "admission", "infection"]]
        for i, ill in enumerate(infected):
            lactate = f"{np.exp(rng.normal(0.6 if ill else 0.35, 0.4)):.2f}"
            row = [
                f"{name[0].upper()}{i:03}",
                str(rng.choice([*sexes], p=[*sexes.values()])),
                str(int(np.clip(rng.normal(age, 14), 18, 99))),
                "" if rng.random() < gaps else lactate,
                f"2026-0{rng.integers(1, 7)}-{rng.integers(1, 29):02}",
                "yes" if ill else "no",
            ]
            patients.append(row)
        write(folder / "nodes.csv", patients)
        write(folder / "edges.csv", contacts(rng, infected, patients))
    print(f"{given.folder}: {', '.join(HOSPITALS)} with {PATIENTS} patients each")


def contacts(
    rng: np.random.Generator, infected: np.ndarray, patients: list[list[str]]
) -> list[list[str]]:
    """Return shared wards. Patients with the same infection status meet more often."""
    rows = [["patient", "shared_a_ward_with"]]
    for i, ill in enumerate(infected):
        alike = np.flatnonzero(infected == ill)
        for _ in range(CONTACTS):
            other = int(rng.choice(alike) if rng.random() < 0.6 else rng.integers(len(infected)))
            if other != i:
                rows.append([patients[i + 1][0], patients[other + 1][0]])
    return rows


def write(path: Path, rows: list[list[str]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
