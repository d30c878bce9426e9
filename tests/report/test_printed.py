"""Published values next to Atoll's, on the page and as tables."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from atoll.report import collect, write_report
from atoll.report.page import page
from atoll.report.printed import printed_tables
from atoll.studies.reproduce.table import read_tables


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
