"""Text, tables and trees one below the other, as values, and how a terminal shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.present.tables import Align, Table, rich_table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text
    from rich.tree import Tree


@dataclass(frozen=True)
class Words:
    """A paragraph with a style of rich, such as "bold" or "dim"."""

    text: str
    style: str = ""


@dataclass
class Branch:
    """A node of a tree: a line, a quiet remark behind it, and the branches below."""

    text: str
    remark: str = ""
    below: list[Branch] = field(default_factory=list)


Part = str | Words | Table | Branch
"""A string is a plain paragraph; an empty one is an empty line."""


def heading(text: str) -> Words:
    """The line above everything else."""
    return Words(text, "bold")


def quiet(text: str) -> Words:
    """A caption or a remark."""
    return Words(text, "dim")


def layout(parts: Iterable[Part], *, gap: int = 1, framed: Align | None = None) -> Group:
    """The parts for `rich.console.Console.print`; `gap` and `framed` as for `rich_table`."""
    from rich.console import Group

    return Group(*(_drawn(part, gap, framed) for part in parts))


def _drawn(part: Part, gap: int, framed: Align | None) -> Text | RichTable | Tree:
    from rich.text import Text

    if isinstance(part, Table):
        return rich_table(part, gap=gap, framed=framed)
    if isinstance(part, Branch):
        return _tree(part)
    # A plain string would have its square brackets read as markup.
    return Text(part.text, style=part.style) if isinstance(part, Words) else Text(part)


def _tree(root: Branch) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(root.text), guide_style="dim")
    waiting: list[tuple[Tree, Sequence[Branch]]] = [(tree, root.below)]
    for parent, branches in waiting:
        for branch in branches:
            line = Text(branch.text)
            line.append(branch.remark, style="dim")
            waiting.append((parent.add(line), branch.below))
    return tree
