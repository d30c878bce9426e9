"""Ranks, intervals and tests against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.studies.leaderboard.leagues import read_leagues
from atoll.studies.leaderboard.rows import Row
from atoll.studies.leaderboard.standings import (
    against_table,
    bootstrap,
    rank_methods,
    rank_table,
    result_tables,
    rows_of,
)


def row(method: str, data: str, mean: float | None, part: str = "louvain-10", **more) -> Row:
    costs = {"bytes_per_round": 2e6, "ms_per_round": 3.0, "device": "cuda"}
    about = {"league": "defaults", "data": data, "partition": part, "method": method, "seeds": 5}
    filled = {**about, **costs, "std": 0.01, "metric": "accuracy", "rounds": 100, "epochs": 3}
    return Row(**{**filled, "mean": mean, "recipe": "r", "command": "atoll run"} | more)


def three() -> list[Row]:
    """Cora twice, Actor once: ranks a (1, 2 | 3), b (2, 1 | 1) and c (3, 3 | 2)."""
    scores = {
        "a": (0.9, 0.7, 0.1),
        "b": (0.8, 0.8, 0.3),
        "c": (0.7, 0.6, 0.2),
    }
    places = (("cora", "louvain-10"), ("cora", "metis-10"), ("actor", "louvain-10"))
    return [
        row(method, data, mean, part)
        for method, means in scores.items()
        for (data, part), mean in zip(places, means, strict=True)
    ]


def cells(table) -> list[list[str]]:
    return [[cell.plain for cell in line] for line in table.rows]


def test_mean_ranks_are_means_over_sets() -> None:
    found = rank_methods(three())
    assert found is not None
    assert found.methods == ("b", "a", "c")
    # b: (1.5 + 1) / 2, a: (1.5 + 3) / 2, c: (3 + 2) / 2
    assert found.mean_ranks == pytest.approx([1.25, 2.25, 2.5])
    assert found.intervals.T.tolist() == [[1, 3]] * 3  # two sets say next to nothing
    assert found.sets == 2
    assert found.notes == ()


def test_an_interval_of_sets_that_agree_is_a_point() -> None:
    assert bootstrap(np.array([[1.0, 2.0]] * 4)) == pytest.approx(np.array([[1, 2], [1, 2]]))
    assert bootstrap(np.array([[3.0]])) == pytest.approx(np.array([[3], [3]]))


def test_an_interval_of_few_normal_values_covers_the_mean_as_often_as_students() -> None:
    values = np.random.default_rng(3).normal(size=(8, 600))  # 600 methods with a mean rank of 0
    low, high = bootstrap(values)
    covered = float(((low < 0) & (high > 0)).mean())
    assert 0.93 < covered < 0.97
    half = 2.364624 * values.std(0, ddof=1) / 8**0.5
    assert float(((high - low) / 2 / half).mean()) == pytest.approx(1, abs=0.05)


def test_what_lacks_is_left_out_of_ranks_and_reported() -> None:
    rows = [*three(), row("d", "cora", 0.95)]  # one problem of three
    found = rank_methods(rows)
    assert found is not None
    assert found.methods == ("b", "a", "c")
    assert found.notes == ("Not ranked, with too few problems: d.",)
    found = rank_methods([*rows, row("d", "actor", 0.95)])  # two of three: the third is not counted
    assert found is not None
    assert found.methods[0] == "d"
    assert found.problems == (("cora", "louvain-10"), ("actor", "louvain-10"))
    assert found.notes == (
        "1 problem without all of these methods, or with several metrics: excluded.",
    )
    assert rank_methods(rows[:3]) is None
    assert rank_methods([]) is None


def test_a_method_that_diverged_is_last() -> None:
    rows = [one for one in three() if one.method != "a"]
    rows += [row("a", one.data, None, one.partition) for one in three() if one.method == "a"]
    found = rank_methods(rows)
    assert found is not None
    assert found.methods == ("b", "c", "a")
    assert found.mean_ranks[-1] == 3
    assert "If a seed diverged (a), the method is last on the problem." in found.notes
    points = {test.name: (test.points, test.losses) for test in found.comparisons("b")}
    assert points["a"] == (None, 3)  # it loses, by an unknown number of points
    assert points["c"][0] == pytest.approx((-0.15 - 0.1) / 2)
    assert cells(result_tables(rows, read_leagues())[0])[-1] == ["a", "diverged", "diverged"]
    table = rank_table(rows, read_leagues())
    assert table is not None
    assert cells(table)[-1][3] == "–"  # it has no mean score


def test_two_tests_must_agree() -> None:
    sets = list(read_leagues().sets)[:8]
    rows = [row("reef", data, 0.8) for data in sets]
    rows += [row("bad", data, 0.7 - place / 100) for place, data in enumerate(sets)]
    signs = (1, -1, 1, -1, 1, -1, 1, -1)
    rows += [
        row("alike", data, 0.8 + sign * place / 1000)
        for place, (data, sign) in enumerate(zip(sets, signs, strict=True), start=1)
    ]
    table = against_table(rows, "reef")
    assert table is not None
    names = [column.name for column in table.columns]
    assert names[3:] == ["wins/losses", "p", "p (sets)", "verdict"]
    alike, bad = cells(table)
    # All 8 differences on one side: 2 / 2^8. Two comparisons double it.
    assert bad == ["bad", "−13.5", "−15.5 to −11.5", "0/8", "0.016", "0.016", "worse"]
    assert alike[0] == "alike"
    assert alike[3:4] + alike[6:] == ["4/4", "≈"]
    assert against_table(rows, "nothing") is None


def test_problems_of_few_sets_decide_nothing() -> None:
    parts = ("louvain-10", "metis-10", "louvain-20", "dirichlet-10")
    rows = [
        row(method, data, mean - 0.001 * place, part)
        for method, mean in (("reef", 0.8), ("bad", 0.7))
        for data in ("cora", "actor", "photo")
        for place, part in enumerate(parts, start=1 if method == "bad" else 0)
    ]
    table = against_table(rows, "reef")
    assert table is not None
    assert cells(table)[0][3:] == ["0/12", "< 0.001", "0.250", "≈"]
    assert table.notes[-1].startswith("With fewer than 6 sets")
    table = against_table([one for one in three() if one.data == "actor"], "b")
    assert table is not None
    assert cells(table)[0][2:] == ["–", "0/1", "1.000", "1.000", "≈"]


def test_the_verdict_follows_the_ranks_and_not_one_large_loss() -> None:
    sets = [f"set{number}" for number in range(10)]
    rows = [row("reef", data, 0.5) for data in sets]
    rows += [row("other", data, 0.51 + n / 1000) for n, data in enumerate(sets[1:])]
    rows.append(row("other", "set0", 0.1))  # the mean difference is negative
    table = against_table(rows, "reef")
    assert table is not None
    line = cells(table)[0]
    assert line[1].startswith("−")
    assert line[3:] == ["9/1", "0.084", "0.084", "≈"]
    fewer = [one for one in rows if one.data != "set0"]
    table = against_table([*fewer, row("reef", "set0", 0.5), row("other", "set0", 0.499)], "reef")
    assert table is not None
    assert cells(table)[0][6] == "better"


def test_a_problem_with_two_metrics_is_not_ranked() -> None:
    rows = [*three(), row("a", "photo", 0.9, metric="auc"), row("b", "photo", 0.95)]
    found = rank_methods([*rows, row("c", "photo", 0.1)])
    assert found is not None
    assert ("photo", "louvain-10") not in found.problems
    assert found.excluded == 1


def test_the_table_of_ranks_has_halves_and_costs() -> None:
    rows = three()
    rows += [row(m, "chameleon", s) for m, s in zip("abc", (0.3, 0.2, 0.1), strict=True)]
    rows += [row(m, "pubmed", s) for m, s in zip("abc", (0.3, 0.2, 0.1), strict=True)]
    table = rank_table(rows, read_leagues())
    assert table is not None
    names = [column.name for column in table.columns]
    assert names == [
        "method", "mean rank", "95 % interval", "homophilous", "heterophilous", "mean score",
        "MB/round",
    ]  # fmt: skip
    by_method = {line[0]: line for line in cells(table)}
    # Cora 1.5 and PubMed 1; Actor 3 and Chameleon 1; Cora counts twice in the mean score.
    assert by_method["a"][3:5] == ["1.2", "2.0"]
    assert by_method["a"][1] == f"{(1.5 + 1 + 3 + 1) / 4:.2f}"
    assert by_method["a"][5:] == ["46.0", "2.00"]  # the time of these methods is unknown
    assert table.notes == ("5 problems (set and partition) of 4 sets.",)


def test_time_is_that_of_the_defaults() -> None:
    rows = [row(name, data, 0.5) for name in ("fedavg", "reef") for data in ("cora", "actor")]
    rows += [row("moon", data, 0.5, settings="mu=2") for data in ("cora", "actor")]
    table = rank_table(rows, read_leagues())
    assert table is not None
    assert table.columns[-1].name == "time"
    assert "multiple of fedavg's" in table.notes[1]
    time = {line[0]: line[-1] for line in cells(table)}
    assert time["fedavg"] == "1.0"
    assert float(time["reef"]) > 1
    assert time["moon"] == "–"


def test_rows_are_grouped_and_ordered_as_the_recipe() -> None:
    recipe = read_leagues()
    rows = [row("a", name, 0.5) for name in ("twitch", "pubmed", "my/own", "NCI1", "cora")]
    groups = {
        group: [one.data for one in rows_of(rows, recipe, "defaults", group)]
        for group in ("development sets", "further sets", "sets of graphs")
    }
    assert groups == {
        "development sets": ["cora", "pubmed"],
        "further sets": ["twitch", "my/own"],
        "sets of graphs": ["NCI1"],
    }
    assert rows_of(rows, recipe, "tuned", "development sets") == []


def test_a_table_of_scores_for_each_partition_marks_the_best() -> None:
    rows = [*three(), row("a", "minesweeper", 0.9, metric="auc"), row("b", "minesweeper", 0.95)]
    first, second = result_tables(rows, read_leagues())
    assert (first.title, second.title) == ("louvain-10", "metis-10")
    assert cells(first)[0] == ["b", "80.0 ± 1.0", "30.0 ± 1.0", "95.0 ± 1.0"]
    assert [cell.best for cell in first.rows[0]] == [False, False, True, True]
    assert first.caption.endswith("over 5 seeds, in percent: AUC for minesweeper, else accuracy.")
    assert second.caption.endswith("in percent: accuracy.")
