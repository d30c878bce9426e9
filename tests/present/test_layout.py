import io

from rich.console import Console

from atoll.present.layout import Branch, heading, layout, quiet
from atoll.present.tables import make_table


def shown(parts, **options) -> list[str]:
    console = Console(file=io.StringIO(), width=60)
    with console.capture() as captured:
        console.print(layout(parts, **options))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_parts_stand_one_below_the_other_and_brackets_stay():
    parts = [heading("What [was] run"), "", make_table(("a", "b"), [("x", 1)]), quiet("Caption.")]
    lines = shown(parts)
    assert [lines[0], lines[1], lines[2], lines[4], lines[5]] == [
        "What [was] run",
        "",
        "a  b",
        "x  1",
        "Caption.",
    ]
    assert [part.style for part in (parts[0], parts[3])] == ["bold", "dim"]


def test_tables_can_be_wider_apart_or_framed():
    table = make_table(("a", "b"), [("x", 1)], title="T", caption="C")
    assert shown([table], gap=3)[0] == "a    b"
    framed = shown([table], framed="left")
    assert (framed[0], framed[-1]) == ("T", "C")
    assert framed[1].startswith("┏")


def test_a_tree_keeps_the_order_of_its_branches():
    root = Branch("all", "", [Branch("first ", "(why)", [Branch("below")]), Branch("last")])
    assert shown([root]) == ["all", "├── first (why)", "│   └── below", "└── last"]
