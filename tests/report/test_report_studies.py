"""A paper's tables and a tuning on the page, and as files."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from atoll.cli import main
from atoll.core.errors import AtollError
from atoll.report import collect, write_report
from atoll.report.page import page
from atoll.report.printed import printed_tables
from atoll.report.tuning import _axis_of
from atoll.studies.reproduce.history import read_tables
from atoll.studies.tune.result import read_tried


def section(html: str, name: str) -> str:
    return html.partition(f'<section id="{name}"')[2].partition("</section>")[0]


def test_printed_and_ours_stand_side_by_side(reproduced: Path) -> None:
    found = collect([reproduced])
    table = found.reproductions[0]
    text = section(page(found), "printed")
    assert text.count("<h3>") == 2
    row = next(r for r in table.rows if r.printed.method == "FedAvg" and r.printed.metric == "acc")
    ours = row.ours["gcfl"]
    gap = ours.mean - row.printed.value
    line = re.sub(
        "<[^>]*>", " ", text.partition('<th scope="row">FedAvg</th>')[2].partition("</tr>")[0]
    )
    words = line.replace("−", "-").split()
    assert words[:3] == [f"{row.printed.value:.1f}", "±", f"{row.printed.std:.1f}"]
    assert words[3] == f"{ours.mean:.1f}"
    assert words[6] == f"{gap:+.1f}"
    assert words[7] == table.verdict(row)
    assert words[8] == f"{row.ours['strict'].mean:.1f}"
    # Gains have no number under strict, and clients are counted.
    assert "in clients" in text
    assert "Shortened to 2 rounds" in text
    assert "shortened (" in text


def test_the_printed_table_is_exported_in_every_form(reproduced: Path, tmp_path: Path) -> None:
    files = {form: tmp_path / f"t.{form}" for form in ("md", "tex", "csv")}
    write_report([reproduced], None, tables=files)
    markdown, tex = files["md"].read_text(), files["tex"].read_text()
    assert "| method and data | printed | ours | difference | verdict | strict |" in markdown
    assert re.search(r"\| FedAvg, IMDB-BINARY, 10 clients, accuracy \| 76.0 ± 4.9 \|", markdown)
    assert "FedAvg, IMDB-BINARY, 10 clients, accuracy & 76.0{" in tex
    assert "−" not in tex
    with files["csv"].open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "gcfl_table_3"]
    ours = next(r for r in rows if r["row"].startswith("FedAvg") and r["column"] == "ours")
    assert len(ours["per_seed"].split()) == int(ours["seeds"]) == 2
    verdicts = [row["missing"] for row in rows if row["column"] == "verdict"]
    first = read_tables(reproduced)[0]
    assert sorted(verdicts) == sorted(first.verdict(row) for row in first.rows)
    assert {table.scale for table in printed_tables(first)} == {100.0, 1.0}


def test_columns_say_no_more_than_tells_them_apart(reproduced: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    cells = sorted((reproduced / "cells").iterdir())[:2]
    for number, cell in enumerate(cells):
        shutil.copytree(cell, folder / str(number))
        config = folder / str(number) / "config.toml"
        text = config.read_text()
        if number:
            text = text.replace('"strict"', '"fedath"').replace('"stratified"', '"fedtad"')
        config.write_text(text)
    found = collect([folder / "0", folder / "1"])
    assert found.columns == (
        "lagoon:nodes=160, protocol strict", "lagoon:nodes=160, protocol fedath",
    )  # fmt: skip


def test_a_tuning_shows_its_trials(tuned: Path) -> None:
    with (tuned / "trials.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "fedprox"]
    states = [row["state"] for row in rows]
    assert "pruned" in states
    tried = read_tried(tuned)[1]
    assert [trial.state for trial in tried.trials] == states
    assert [str(trial.settings["lr"]) for trial in tried.trials] == [row["lr"] for row in rows]
    best = json.loads((tuned / "tune.json").read_text())["methods"]["fedprox"]
    assert tried.best is not None
    assert (tried.best.number, tried.best.value) == (best["best_trial"], best["validation"])
    text = section(page(collect([tuned])), "tuning")
    assert f"8 trials: {states.count('complete')} complete, {states.count('pruned')} pruned" in text
    assert "--set hidden" not in text  # it was fixed, not searched
    assert text.count('class="line c1"') == 2  # the best so far, of each method
    test = json.loads((tuned / "cells" / "test-fedprox" / "result.json").read_text())
    assert f"on test data <b>{100 * test['metrics']['test_accuracy']['mean']:.1f}</b>" in text
    assert f"trial {best['best_trial']} with {100 * best['validation']:.1f} percent" in text


def test_a_tuning_without_a_test_is_a_page_too(tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "begun"
    shutil.copytree(tuned, folder, ignore=shutil.ignore_patterns("test-*"))
    about = json.loads((folder / "study.json").read_text())
    about["cells"] = [c for c in about["cells"] if c["labels"]["role"] == "trial"]
    (folder / "study.json").write_text(json.dumps(about))
    lines = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("\n".join(lines[:10]) + "\n")
    files = {"md": tmp_path / "t.md"}
    write_report([folder], tmp_path / "r.html", tables=files)
    text = (tmp_path / "r.html").read_text()
    assert "No run has been tested yet" in text
    assert ", 3 left." in text
    assert "No trial has come to its end yet." in text  # of the second method
    assert 'id="convergence"' not in text
    assert "| fedavg |" in files["md"].read_text()
    (folder / "events.jsonl").write_text("")
    with pytest.raises(AtollError, match=r"nothing to report: 16 trials of 'begun' had no test"):
        collect([folder])


def test_every_look_has_its_command(reproduced: Path) -> None:
    text = section(page(collect([reproduced])), "again")
    assert text.count("atoll reproduce gcfl table") == 2


def test_the_command_reports_both(reproduced: Path, tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    done = CliRunner().invoke(main, ["report", str(reproduced), str(tuned), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "<h1>gcfl, table 3 and gcfl, table 4, again</h1>" in out.read_text()


def test_few_values_that_come_again_stand_side_by_side() -> None:
    words, place = _axis_of("hidden", {0: 64, 1: 256, 2: 64, 3: 256})
    assert [text for _, text in words.ticks] == ["64", "256"]
    assert place == {0: 0, 1: 1, 2: 0, 3: 1}
    drawn, place = _axis_of("lr", {0: 0.01, 1: 0.0001, 2: 0.1, 3: 0.01})
    assert drawn.log
    assert place[1] == 0.0001
    assert _axis_of("net", {0: "sage", 1: "gcn"})[1] == {0: 1, 1: 0}


@pytest.mark.parametrize("width", [1440, 375])
def test_in_a_browser_nothing_overflows_and_all_is_named(
    browser, reproduced: Path, tuned: Path, tmp_path: Path, width: int
) -> None:
    out = tmp_path / "both.html"
    write_report([reproduced, tuned], out)
    for dark in (False, True):
        browser.size(width, dark=dark)
        browser.open(out)
        sizes = "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
        assert browser.run(sizes) == [width, width]
        assert browser.log("browser") == []
    outside = browser.run(
        """return [...document.querySelectorAll("#printed *, #tuning *")].filter(e =>
             e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll, pre"))
             .map(e => e.outerHTML.slice(0, 80))"""
    )
    assert outside == []
    # Marks lie in their charts, and their colours are those of the scheme.
    far = browser.run(
        """return [...document.querySelectorAll(".field .mark")].filter(e => {
             const m = e.getBoundingClientRect(), f = e.closest(".field").getBoundingClientRect();
             return m.left < f.left - 6 || m.right > f.right + 6 || m.bottom > f.bottom + 6;
           }).length"""
    )
    assert far == 0
    assert browser.run("return document.querySelectorAll('.field .mark').length") > 20
    named = """return [...document.querySelectorAll("#printed svg, #tuning svg")].every(e =>
      e.closest("[aria-hidden=true]") || e.closest("svg[role=img]").getAttribute("aria-label"))"""
    assert browser.run(named)
    captions = "#printed table:not(:has(caption)), #tuning table:not(:has(caption))"
    assert browser.run(f"return document.querySelectorAll('{captions}').length") == 0
