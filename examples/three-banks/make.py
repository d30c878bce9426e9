"""Write nodes.csv and edges.csv: the accounts of three invented banks, and transfers among them.

Every account is private, a shop or a mule (an account that passes on stolen money). One account's
numbers say little. Its payees say more, so a graph network is better than a network without edges.

    python examples/three-banks/make.py     writes the same files every time
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

BANKS = {"harbour": (0.6, 0.3, 0.1), "meadow": (0.4, 0.3, 0.3), "summit": (0.3, 0.5, 0.2)}
KINDS = ("private", "shop", "mule")
ACCOUNTS_PER_BANK, TRANSFERS = 80, 600
# Mean of (age in years, log10 of the balance, payments a day) for each kind; all have spread 1.
MEANS = np.array([[2.6, 3.4, 0.9], [3.2, 3.9, 1.7], [1.9, 3.3, 1.6]])
CHANNELS = {"private": (0.6, 0.3, 0.1), "shop": (0.2, 0.3, 0.5), "mule": (0.6, 0.3, 0.1)}
# Probability that a kind (row) pays each kind (column).
PAYS = np.array([[0.80, 0.15, 0.05], [0.15, 0.80, 0.05], [0.05, 0.10, 0.85]])
INSIDE = 0.85  # share of transfers that stay inside one bank


def accounts(rng: np.random.Generator) -> list[dict[str, object]]:
    """Return one row for each account, bank by bank."""
    rows: list[dict[str, object]] = []
    for bank, shares in BANKS.items():
        for number in range(ACCOUNTS_PER_BANK):
            kind = int(rng.choice(3, p=shares))
            age, balance, payments = rng.normal(MEANS[kind], 1.0)
            rows.append(
                {
                    "account": f"{bank[0].upper()}{number:03d}",
                    "bank": bank,
                    "age": round(abs(age), 2),
                    "log_balance": round(balance, 2),
                    "payments": round(abs(payments), 2),
                    "channel": str(rng.choice(["app", "web", "desk"], p=CHANNELS[KINDS[kind]])),
                    "kind": KINDS[kind],
                }
            )
    return rows


def transfers(rng: np.random.Generator, rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return rows of payer, payee and number of transfers. The payer's kind decides the payee's."""
    bank = np.array([row["bank"] for row in rows])
    kind = np.array([KINDS.index(str(row["kind"])) for row in rows])
    found: list[dict[str, object]] = []
    for _ in range(TRANSFERS):
        payer = int(rng.integers(len(rows)))
        near = bank == bank[payer] if rng.random() < INSIDE else bank != bank[payer]
        near &= kind == rng.choice(3, p=PAYS[kind[payer]])
        near[payer] = False
        payee = int(rng.choice(np.flatnonzero(near)))
        found.append(
            {
                "payer": rows[payer]["account"],
                "payee": rows[payee]["account"],
                "transfers": int(rng.integers(1, 6)),
            }
        )
    return found


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as CSV with the same line ends everywhere."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(folder: Path) -> None:
    """Write both tables into `folder`."""
    rng = np.random.default_rng(7)
    rows = accounts(rng)
    write(folder / "nodes.csv", rows)
    write(folder / "edges.csv", transfers(rng, rows))


if __name__ == "__main__":
    main(Path(__file__).parent)
