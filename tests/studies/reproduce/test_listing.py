"""The list of tables and figures."""

from __future__ import annotations

from pathlib import Path

from atoll.present.tables import Table
from atoll.studies.reproduce.listing import items, listing_parts
from atoll.studies.reproduce.recipes import read_paper

WITHOUT_RUNS = ("not a result", "made of the data", "no numbers", "not drawn")


def test_absent_data_stand_in_brackets_and_take_no_time(tmp_path: Path) -> None:
    _, table, _, caption = listing_parts(["gcfl"], str(tmp_path), seeds=3)
    assert isinstance(table, Table)
    rows = {row[0].text: [cell.text for cell in row] for row in table.rows}
    recipe = read_paper("gcfl").recipe
    assert len(rows) == len(recipe.tables) + len(recipe.figures)
    for name, (_, _, cells, data, time) in rows.items():
        assert data.startswith("(") or data in WITHOUT_RUNS, name
        assert (cells == "–") != data.startswith("(")
        assert time == "–"
    assert "Rough time: 3 seeds" in str(caption)


def test_all_leaves_out_drawings_and_descriptions() -> None:
    paper = read_paper("fedath")
    found = items(paper, "all")
    assert ("table", "1") in found
    assert ("table", "7") not in found  # it describes the data
    assert all(not paper.recipe.figures[n].reason for kind, n in found if kind == "figure")
    assert items(paper, "fig7") == [("figure", "7")]
