"""Findings in plain sentences, and the printed tables."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from atoll.present.tables import tex
from atoll.present.terminal import noted_table
from atoll.studies.compare.printed import p_text
from tests.studies.compare.test_tables import compared, noisy, outcome


def test_five_seeds_say_what_they_cannot_tell(tmp_path: Path) -> None:
    found = compared([
        outcome(tmp_path, "a", noisy(0.8, 5)), outcome(tmp_path, "b", noisy(0.7, 5)),
        outcome(tmp_path, "c", noisy(0.6, 5)),
    ])  # fmt: skip
    said = " ".join(found.sentences())
    assert "With 5 pairs, Wilcoxon's test cannot reach p < 0.05 for any scores" in said
    assert "its smallest p is 0.0625, 0.125 after Holm's correction; it needs 7 seeds" in said
    assert "so the paired t-test decides here" in said
    assert found.tests()[0]["wilcoxon"] == 0.125


def test_all_noise_is_said_plainly(tmp_path: Path) -> None:
    found = compared([outcome(tmp_path, name, noisy(0.8, 8, 0.05)) for name in "abc"])
    assert re.fullmatch(
        "On one, 5 clients, 8 seeds are too few to call any method better or worse than [abc]\\.",
        found.sentences()[0],
    )
    same = noisy(0.8, 8)
    found = compared([outcome(tmp_path, name, same) for name in "de"])
    assert "e and d have the same score everywhere." in found.sentences()
    assert found.tables[0].best == ["d", "e"]
    assert [row.rank for row in found.tables[0].rows] == [1.5, 1.5]


def test_equal_gaps_have_no_spread_to_measure_by(tmp_path: Path) -> None:
    found = compared([outcome(tmp_path, "a", [0.5, 0.7]), outcome(tmp_path, "b", [0.6, 0.8])])
    assert found.sentences()[1] == (
        "For a against b, all 2 differences are −10.0 points, so they have no variance; "
        "use more seeds."
    )


def test_a_p_value_shows_on_which_side_of_alpha_it_is() -> None:
    assert [p_text(p) for p in (0.0312, 0.04971, 0.0503, 0.05, 0.0004)] == [
        "p = 0.031", "p = 0.0497", "p = 0.05", "p = 0.05", "p < 0.001",
    ]  # fmt: skip
    assert p_text(0.00998, alpha=0.01) == "p = 0.00998"


def test_long_names_are_folded_and_not_cut_off(tmp_path: Path) -> None:
    name = "fedprox:mu=0.1,lr=0.02,weight_decay=0.0001"
    found = compared([outcome(tmp_path, name, noisy(0.8)), outcome(tmp_path, "b", noisy(0.7))])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(noted_table(found.printed()[0]))
    rows = console.export_text().split("───\n")[1].split("\nb ")[0].splitlines()
    assert "".join(row.split()[0] for row in rows) == name


def test_latex_writes_its_own_characters_out() -> None:
    assert tex("a_b & 5% ± {x} ~^\\") == (
        "a\\_b \\& 5\\% $\\pm$ \\{x\\} \\textasciitilde{}\\textasciicircum{}\\textbackslash{}"
    )


def test_many_differences_that_no_seed_shows_are_one_sentence(tmp_path: Path) -> None:
    scores = {"a": [0.80, 0.70, 0.75], "b": [0.78, 0.73, 0.74], "c": [0.79, 0.69, 0.77],
              "d": [0.74, 0.76, 0.71]}  # fmt: skip
    found = compared([outcome(tmp_path, name, values) for name, values in scores.items()])
    (told,) = [text for text in found.sentences() if "too few to tell" in text]
    assert re.fullmatch(
        r"3 seeds are too few to tell \w, \w and \w from \w \(\S+ points to \S+ points\); "
        r"(about|more than) \d+ seeds would show all of these differences, and \d+ the clearest\.",
        told,
    )


def test_different_networks_are_named(tmp_path: Path) -> None:
    nets = {"a": "GCN", "b": "Duo", "c": "GCN"}
    runs = [outcome(tmp_path, name, noisy(0.8)) for name in nets]
    assert "Networks" not in compared(runs).markdown()
    for run, net in zip(runs, nets.values(), strict=True):
        model = run.folder / "model/seed-0/model.toml"
        model.parent.mkdir(parents=True)
        model.write_text(f'net = "{net}"\n')
    assert "Networks: gcn of a and c; duo of b. Differences" in compared(runs).markdown()
    assert "Networks" not in compared(runs[::2]).markdown()
