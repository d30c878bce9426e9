"""Write the tables of hyper-parameters in docs/methods.md from the fields of the methods.

Run `python tools/methods_page.py` after a change of a field. A test compares page and fields.
"""

from __future__ import annotations

from pathlib import Path

from atoll.core.optim import OPTIMIZERS
from atoll.methods import METHODS
from atoll.nn import NETS
from atoll.present.catalogue import hyper_rows

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
BEGIN, END = "<!-- hyper-parameters: begin -->\n", "<!-- hyper-parameters: end -->\n"
EVERY = ("epochs", "weight_by", "optimizer_state", "aggregate")
"""Fields that most methods share, which are in one table."""


def tables() -> str:
    """Return a table for each method, network and optimizer."""
    rows = {row[0]: row for row in hyper_rows(METHODS["fedavg"])}
    parts = [_table("Most methods", [rows[key] for key in EVERY])]
    for name, cls in METHODS.items():
        own = [row for row in hyper_rows(cls) if row[0] not in EVERY]
        parts += [_table(f"`{name}`", own)] if own else []
    parts += [_table(f"Network `{name}`", hyper_rows(cls)) for name, cls in NETS.items()]
    parts += [_table(f"Optimizer `{name}`", hyper_rows(cls)) for name, cls in OPTIMIZERS.items()]
    return "\n".join(parts)


def _table(title: str, rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["| key | default | meaning | takes |", "|---|---|---|---|"]
    lines += [f"| `{key}` | {default} | {means} | {takes} |" for key, default, means, takes in rows]
    return f"**{title}**\n\n" + "\n".join(lines) + "\n"


def page_with_tables(page: str) -> str:
    """Return the page with new tables."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + tables() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
