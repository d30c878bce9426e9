"""The page lists the runs and the leader, and docs/results has the page of the current rows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from atoll.studies.leaderboard.leagues import read_leagues
from atoll.studies.leaderboard.page import answer, page_text, picture
from atoll.studies.leaderboard.rows import Row, read_rows
from tests.studies.leaderboard.test_standings import row

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


def league() -> list[Row]:
    """Reef first on all development sets but one."""
    sets = [name for name, one in read_leagues().sets.items() if one.development]
    rows = []
    for place, data in enumerate(sets):
        means = {"reef": 0.8, "fedprox": 0.7 + 0.11 * (place == 0), "fedavg": 0.6, "local": 0.5}
        for method, mean in means.items():
            command = f"atoll run {method} --data {data} --clients 10"
            rows.append(row(method, data, mean - place / 100, command=command))
    return rows


def test_the_page_of_this_repository_is_that_of_its_rows() -> None:
    rows = list(read_rows(RESULTS / "leaderboard.csv").values())
    assert (RESULTS / "leaderboard.md").read_text() == page_text(rows, read_leagues())


def test_a_page_without_rows_reports_that_nothing_was_run() -> None:
    text = page_text([], read_leagues())
    assert "**Not run yet**" in text
    assert "| method |" not in text
    assert text.count("\nNot run yet.\n") == 3
    toy = [msgspec.structs.replace(one, rounds=2) for one in league()]
    assert page_text(toy, read_leagues()) == text  # of other rounds than the page states


def test_a_page_opens_with_the_answer() -> None:
    text = page_text(league(), read_leagues())
    first = (
        "- League *Defaults*: reef is first by mean rank, 1.1 of 4\n  (95 % interval 1.0 to 1.4, "
        "8 sets).\n  `reef` is better than 3 of 3 other methods (p = 0.023 at most, each data set "
        "counted once).\n"
        "  On average it has 20.0 points more than `fedavg`.\n"
        "- League *Tuned*: not run yet on the development sets.\n"
    )
    assert first in text
    assert text.index(first) < text.index("| method |")
    assert "| reef | **80.0 ± 1.0** |" not in text  # FedProx is best on Cora
    assert "| fedprox | **81.0 ± 1.0** |" in text
    assert "$ atoll run reef --data minesweeper --clients 10" in text
    assert "--methods reef,fedprox,fedavg,local --data-root DIR" in text
    assert text.count('<div class="sortable" markdown>') == text.count("</div>") == 3
    assert "[leaderboard.csv](leaderboard.csv)" in text
    unfrozen = msgspec.structs.replace(read_leagues(), frozen="")
    assert "is not frozen yet" in page_text(league(), unfrozen)
    frozen = msgspec.structs.replace(read_leagues(), frozen="abc1234")
    assert "was frozen in commit abc1234" in page_text(league(), frozen)


def test_the_answer_names_rivals_that_are_not_beaten() -> None:
    recipe = read_leagues()
    text = answer(league(), recipe, "defaults", "fedavg")
    assert text.endswith(
        "`fedavg` is better than 1 of 3 other methods (p = 0.023 at most, each data set counted "
        "once), and worse than reef, fedprox."
    )
    few = [one for one in league() if one.data in ("cora", "citeseer", "pubmed")]
    assert "not distinguishable from fedprox" in answer(few, recipe, "defaults", "reef")
    others = [one for one in league() if one.method != "reef"]
    assert answer(others, recipe, "defaults", "reef").endswith(" `reef` was not run.")


def test_the_picture_shows_every_ranked_method() -> None:
    drawn = picture(league(), read_leagues())
    assert drawn is not None
    assert [word for _, word in drawn.y.ticks or ()] == ["reef", "fedprox", "fedavg", "local"]
    assert f"![{drawn.alt}](other.png)" in page_text(league(), read_leagues(), image="other.png")
    assert picture([], read_leagues()) is None
