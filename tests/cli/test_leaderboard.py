"""`atoll leaderboard`: a small league from end to end, in pieces, and its refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atoll.studies.leaderboard.rows import read_rows

ROWS = Path(__file__).parents[2] / "docs" / "results" / "leaderboard.csv"
SMALL = (
    "leaderboard", "--data", "lagoon:nodes=150", "--methods", "reef,fedavg,local", "--rounds", 2,
    "--epochs", 1, "--seeds", 2, "--device", "cpu",
)  # fmt: skip


def test_a_league_in_pieces_with_a_page(cli) -> None:
    plan = cli(*SMALL, "--dry-run").stdout
    assert "3 rows, 3 runs to do" in plan
    assert not Path("leaderboard.csv").exists()
    stopped = cli(*SMALL, "--minutes", 1e-6)
    assert "the same command continues" in stopped.stderr
    assert stopped.stderr.endswith("0 of 3 rows are in leaderboard.csv\n")
    done = cli(*SMALL, "--page", "page.md")
    assert done.stderr.endswith("3 of 3 rows are in leaderboard.csv\n")
    assert "Defaults: further sets" in done.stdout
    assert "mean rank" in done.stdout
    assert "Against reef" in done.stdout
    assert max(map(len, done.stdout.splitlines()[-30:])) <= 80
    assert "Not run yet" in Path("page.md").read_text()  # it shows leagues of 100 rounds
    before = Path("leaderboard.csv").read_bytes()
    again = cli(*SMALL, "--against", "fedavg")
    assert "Against fedavg" in again.stdout
    assert "validation" not in again.stdout  # nothing is run
    assert Path("leaderboard.csv").read_bytes() == before
    assert "none" in cli(*SMALL, "--dry-run").stdout
    shown = cli(*SMALL, "--minutes", 0, "--quiet")
    assert (shown.stdout, shown.stderr) == ("", "3 of 3 rows of leaderboard.csv are ranked\n")


RANK = ("leaderboard", "--minutes", 0, "--csv", ROWS)


def test_ranking_needs_only_the_rows(cli) -> None:
    ranked = cli(*RANK, "--against", "fedavg")
    assert "Against fedavg" in ranked.stdout
    assert "get it with" not in ranked.output
    assert re.fullmatch(rf"\d+ of \d+ rows of {ROWS} are ranked\n", ranked.stderr)
    one = cli(
        *RANK, "--data", "Cora,pubmed", "--methods", "reef,fedavg", "--partitions", "louvain-10"
    )
    assert one.stderr.startswith("4 of ")
    Path("empty.csv").write_text(Path(ROWS).read_text().splitlines(keepends=True)[0])
    for wrong, problem in (
        (("--methods", "reff"), "unknown method in the CSV file 'reff'; did you mean 'reef'?"),
        (("--against", "fedavgg"), "unknown method to test against 'fedavgg'"),
        (("--csv", "none.csv"), "the CSV file 'none.csv' does not exist; run the league first"),
        (("--csv", "empty.csv"), "the CSV file has no row of the league defaults; run the league"),
    ):
        assert problem in cli(*RANK, *wrong, code=2).stderr


def test_several_processes_and_a_failure(cli) -> None:
    jobs = cli(*SMALL, "--jobs", 2, "--quiet")
    assert jobs.stderr == "3 of 3 rows are in leaderboard.csv\n"
    assert len(read_rows(Path("leaderboard.csv"))) == 3
    Path("own").mkdir()
    Path("own/nodes.csv").write_text("id,label\n1,a\n")
    failed = cli("leaderboard", "--data", "own/", "--methods", "fedavg", "--rounds", 1, code=1)
    assert "failed: defaults-own--owners-fedavg" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--data", "coraa"), "unknown data set 'coraa'; did you mean 'cora'"),
        (("--data", "lagoon", "--methods", "reff"), "unknown method 'reff'"),
        (("--league", "best"), "unknown league 'best'"),
        (("--partitions", "lovain-10"), "did you mean 'louvain-10'"),
        (("--data", "lagoon", "--against", "moo"), "unknown method to test against 'moo'"),
        (("--data", "lagoon", "--csv", "."), "'.' is a folder"),
        (("--data", "lagoon", "--jobs", "many"), "jobs is 'many'"),
        (("--data", "lagoon", "--rounds", 0), "rounds is 0"),
        (("--data", "cora"), "cora is not in"),
    ],
)
def test_bad_input_gets_one_sentence_and_no_file(cli, arguments, problem: str) -> None:
    result = cli("leaderboard", *arguments, code=2)
    assert problem in " ".join(result.stderr.split())
    assert len(result.stderr.splitlines()) == 1
    assert not Path("leaderboard.csv").exists()
