"""Write the customers and payments of three invented banks, as raw as a bank's own export.

Two in a hundred customers are fraudsters. They work in rings, which pass money around within one
bank, so a customer's payees say more than the customer's own columns. The tables contain missing
values, dates, mixed columns and names, and 30 % of the customers have no label yet.

    python examples/fraud/make.py payments              this week, next week and its true labels
    python examples/fraud/make.py payments --customers 2000        a smaller example
"""

from __future__ import annotations

import argparse
import csv
from datetime import date, timedelta
from pathlib import Path

import numpy as np

BANKS = {"harbour": 0.5, "meadow": 0.3, "summit": 0.2}
SEGMENTS = {"private": 0.62, "student": 0.18, "business": 0.2}
COUNTRIES = {"DE": 0.5, "NL": 0.2, "PL": 0.15, "AT": 0.1, "ES": 0.05}
FRAUD, UNEXAMINED, NEW, INSIDE = 0.022, 0.3, 0.1, 0.9
PAYMENTS = 4  # of each customer
RING = 9  # customers in a ring, on average
LAST_DAY = date(2026, 6, 28)
COLUMNS = [
    *("customer", "name", "bank", "age", "segment", "country"),
    *("balance", "signup_date", "verified", "outcome"),
]


def main() -> None:
    """Write the two weeks and the true labels of the second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--customers", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    customers, ring = people(rng, given.customers)
    payments = pay(rng, customers, ring)
    week = np.where(rng.random(given.customers) < NEW, "next-week", "this-week")
    for name in ("this-week", "next-week"):
        write(given.folder / name, customers, payments, week, name)
    truth = [
        [row["customer"], row["truth"]]
        for row, of in zip(customers, week, strict=True)
        if of == "next-week"
    ]
    table(given.folder / "truth.csv", ["customer", "outcome"], truth)
    new = len(truth)
    print(f"{given.folder}: {given.customers - new} customers of three banks this week,")
    print(f"{new} more next week (truth.csv contains their labels), {len(payments)} payments")


def people(rng: np.random.Generator, count: int) -> tuple[list[dict[str, object]], np.ndarray]:
    """Return one row for each customer, and the number of its ring (-1: honest)."""
    bank = rng.choice([*BANKS], count, p=[*BANKS.values()])
    ring = np.full(count, -1)
    wanted, number = round(count * FRAUD), 0
    while (ring >= 0).sum() < wanted:
        here = np.flatnonzero((bank == rng.choice([*BANKS], p=[*BANKS.values()])) & (ring < 0))
        size = min(2 + rng.poisson(RING - 2), wanted - int((ring >= 0).sum()), here.size)
        ring[rng.choice(here, max(size, 1), replace=False)] = number
        number += 1
    fraud = ring >= 0
    # A fraudster's own columns differ a little from an honest customer's.
    age = np.clip(rng.normal(np.where(fraud, 35, 43), 15), 18, 95).round()
    balance = np.exp(rng.normal(np.where(fraud, 6.7, 7.7), 1.4)).round(2)
    days = rng.exponential(np.where(fraud, 350, 1100)).astype(int)
    verified = rng.random(count) < np.where(fraud, 0.65, 0.85)
    segment = rng.choice([*SEGMENTS], count, p=[*SEGMENTS.values()])
    country = rng.choice([*COUNTRIES], count, p=[*COUNTRIES.values()])
    gap = rng.random((4, count)) < np.array([[0.07], [0.04], [0.05], [0.03]])
    examined = rng.random(count) >= UNEXAMINED
    rows: list[dict[str, object]] = []
    for i in range(count):
        truth = "fraud" if fraud[i] else "ok"
        values = (
            f"C{i:05}",
            f"Customer {i}, Mx",
            bank[i],
            "" if gap[0, i] else int(age[i]),
            "" if gap[1, i] else segment[i],
            "" if gap[2, i] else country[i],
            "" if gap[3, i] else balance[i],
            LAST_DAY - timedelta(days=int(days[i])),
            str(bool(verified[i])).lower(),
            truth if examined[i] else "",
        )
        rows.append({**dict(zip(COLUMNS, values, strict=True)), "truth": truth})
    return rows, ring


def pay(rng: np.random.Generator, rows: list[dict[str, object]], ring: np.ndarray) -> np.ndarray:
    """Return a row (payer, payee, cents, day) per payment. A ring pays mostly its members."""
    count = len(rows)
    bank = np.array([row["bank"] for row in rows])
    at = {name: np.flatnonzero(bank == name) for name in BANKS}
    payer = np.repeat(np.arange(count), PAYMENTS)
    payee = rng.integers(count, size=payer.size)
    inside = rng.random(payer.size) < INSIDE
    for name, here in at.items():
        local = inside & (bank[payer] == name)
        payee[local] = rng.choice(here, local.sum())
    within = (ring[payer] >= 0) & (rng.random(payer.size) < 0.7)
    members = [np.flatnonzero(ring == number) for number in range(ring.max() + 1)]
    payee[within] = [rng.choice(members[ring[i]]) for i in payer[within]]
    cents = np.exp(rng.normal(np.where(within, 9.2, 8.6), 1.1)).astype(int)
    day = rng.integers(28, size=payer.size)
    found = np.stack([payer, payee, cents, day], axis=1)
    return found[payer != payee]


def write(
    folder: Path,
    rows: list[dict[str, object]],
    payments: np.ndarray,
    week: np.ndarray,
    name: str,
) -> None:
    """Write the tables of one week. A payment to or from a new customer is in next week."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = [row for row, of in zip(rows, week, strict=True) if of == name]
    columns = COLUMNS if name == "this-week" else COLUMNS[:-1]
    table(folder / "nodes.csv", columns, [[row[column] for column in columns] for row in mine])
    new = (week[payments[:, :2]] == "next-week").any(axis=1)
    chosen = payments[new == (name == "next-week")]
    first = LAST_DAY + timedelta(days=1 if name == "next-week" else -27)
    length = 7 if name == "next-week" else 28
    found = [
        [f"C{a:05}", f"C{b:05}", f"{cents / 100:.2f}", first + timedelta(days=int(day) % length)]
        for a, b, cents, day in chosen
    ]
    table(folder / "edges.csv", ["payer", "payee", "amount", "day"], found)


def table(path: Path, header: list[str], rows: list[list[object]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


if __name__ == "__main__":
    main()
