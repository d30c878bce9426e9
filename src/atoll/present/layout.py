"""Text, tables and trees one below the other, as values, and how a terminal shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from atoll.present.tables import Align, Table, rich_table


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

    def tree(self) -> Tree:
        """The tree for `rich.console.Console.print`."""
        line = Text(self.text)
        tree = Tree(line.append(self.remark, style="dim"), guide_style="dim")
        tree.children = [branch.tree() for branch in self.below]
        return tree


Part = str | Words | Table | Branch  # a string is a plain paragraph; an empty one is an empty line


def heading(text: str) -> Words:
    """The line above everything else."""
    return Words(text, "bold")


def quiet(text: str) -> Words:
    """A caption or a remark."""
    return Words(text, "dim")


def layout(parts: Iterable[Part], *, gap: int = 1, framed: Align | None = None) -> Group:
    """The parts for `rich.console.Console.print`; `gap` and `framed` as for `rich_table`."""
    shown: list[RenderableType] = []
    for part in parts:
        match part:
            case Table():
                shown.append(rich_table(part, gap=gap, framed=framed))
            case Branch():
                shown.append(part.tree())
            case Words():
                shown.append(Text(part.text, style=part.style))
            case _:  # a plain string would have its square brackets read as markup
                shown.append(Text(part))
    return Group(*shown)
