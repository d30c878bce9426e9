"""The page of the papers' tables says what its CSV file says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import matplotlib.image
from bench.tables_page import CHANGES, MARKS, tables_page
from click.testing import CliRunner

RESULTS = Path(__file__).parents[2] / "docs" / "results"
HEAD = (
    "paper,table,dataset,setting,clients,method,metric,printed,printed_std,protocol,ours,std,seeds,"
    "device,recipe\n"
)


def made(tmp_path: Path, lines: str) -> str:
    (tmp_path / "t.csv").write_text(HEAD + lines)
    (tmp_path / "p.md").write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    done = CliRunner().invoke(tables_page, [str(tmp_path / "t.csv"), str(tmp_path / "p.md")])
    assert done.exit_code == 0, done.output
    return (tmp_path / "p.md").read_text()


def test_numbers_that_come_out_are_bold(tmp_path: Path) -> None:
    text = made(
        tmp_path,
        "fediih,1,Cora,metis-overlap,30,Local,acc,81.34,0.28,fediih,82.84,0.31,5,cuda,0\n"
        "fediih,1,Cora,metis-overlap,30,Local,acc,81.34,0.28,strict,80.0,0.5,5,cuda,0\n"
        "fediih,1,Cora,metis-overlap,50,Local,acc,81.34,0.28,fediih,82.85,0.31,5,cuda,0\n"
        "fediih,1,Cora,metis-overlap,50,GCFL,acc,70,5.0,fediih,75.0,0.31,5,cuda,0\n",
    )
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "**Cora**, METIS, overlapping (accuracy; 2 of 3 reproduced):" in text
    assert "| | 30 clients | 50 clients |" in text
    assert "| Local | 81.3 → **82.8 ± 0.3**, 80.0 ± 0.5 | 81.3 → 82.8 ± 0.3 |" in text
    assert "| GCFL | – | 70.0 → **75.0 ± 0.3** ~ |" in text  # within the printed spread


def test_the_last_round_and_other_draws_stand_beside_ours(tmp_path: Path) -> None:
    text = made(
        tmp_path,
        "fedtad,4,Cora,participation=20%,20,FedAvg,acc,44.5,,fedtad:last,47.1,6.5,5,cuda,0\n"
        "fedtad,4,Cora,participation=20%,20,FedAvg,acc,44.5,,fedtad,64.7,1.0,5,cuda,0\n"
        "fedath,1,Cora,louvain-nonoverlap,10,FedAvg,acc,73.6,,fedath,74.0,1.0,5,cuda,0\n"
        "fedath,1,Cora,louvain-nonoverlap,10,FedAvg,acc,73.6,,fedath:2022,77.0,1.0,5,cuda,0\n"
        "fedath,1,Cora,louvain-nonoverlap,10,FedAvg,acc,73.6,,fedath:2024,74.0,1.0,5,cuda,0\n",
    )
    assert "| FedAvg | 44.5 → 64.7 ± 1.0; last: 47.1 ± 6.5 |" in text
    assert "| FedAvg | 73.6 → **74.0 ± 1.0** ~; 2022: 77.0 ± 1.0 |" in text


def test_a_change_of_a_recipe_is_counted_from_two_tables(tmp_path: Path) -> None:
    start = "fediih,1,Cora,metis-overlap,30"
    old, new, page = (tmp_path / name for name in ("old.csv", "new.csv", "p.md"))
    strict = f"{start},Local,acc,81,0.2,strict,81,0.5,5,cuda"
    numbers = {"Local": (90, 81), "FedAvg": (81, 90), "FedGTA": (90, 90), "AdaFGL": (81, 81)}
    for place, path in enumerate((old, new)):
        lines = [
            f"{start},{method},acc,81,0.2,fediih,{ours[place]},0.3,5,cuda,0"
            for method, ours in numbers.items()
        ]
        path.write_text(HEAD + "\n".join([f"{strict},{place}", *lines]) + "\n")
    page.write_text("\n".join([*MARKS, *CHANGES]))
    words = [str(new), str(page), "--before", str(old)]
    assert CliRunner().invoke(tables_page, words).exit_code == 0
    lines = page.read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| FedIIH |")]
    counts = {row[1]: [number.strip(" |") for number in row[3:]] for row in rows}
    assert counts.pop("all changes") == ["4", "2", "2", "1", "1"]
    found = {what.split()[0]: numbers for what, numbers in counts.items()}
    assert found["baselines:"] == ["2", "1", "1", "1", "1"]
    assert found["AdaFGL:"] == ["1", "1", "1", "0", "0"]
    assert all(row[2].strip() for row in rows[1:])  # which source it is
    assert "| reproduced before → now | FedIIH |" in lines
    assert [line for line in lines if " → 1 of 1 |" in line] == [
        "| Local | 0 → 1 of 1 |",
        "| AdaFGL | 1 → 1 of 1 |",
    ]
    done = CliRunner().invoke(tables_page, [*words[:-1], str(tmp_path / "none.csv")])
    assert done.exit_code == 1
    assert "no table" in done.output


def test_the_summary_says_whose_numbers_come_out_and_who_is_first(tmp_path: Path) -> None:
    rivals = "".join(
        f"fediih,1,Cora,metis-overlap,30,M{i},acc,70,,{rules},{ours},0.3,5,cuda,0\n"
        for i in range(5)
        for rules, ours in (("fediih", 75), ("strict", 70))
    )
    own = (
        "fediih,1,Cora,metis-overlap,30,FedIIH,acc,73,,fediih,73.5,0.3,5,cuda,0\n"
        "fediih,1,Cora,metis-overlap,30,FedIIH,acc,73,,strict,71,0.3,5,cuda,0\n"
        "fediih,1,Cora,metis-overlap,30,FedIIH w/o VI,acc,99,,fediih,70,0.3,5,cuda,0\n"
    )
    text = made(tmp_path, rivals + own)
    facts = dict(re.findall(r"^\| (.+) \| ([^|]+) \|$", text, re.M))
    assert facts["reproduced values of its method"] == "1 of 1"
    assert facts["reproduced values of its variants"] == "0 of 1"
    assert facts["reproduced values of the baselines"] == "0 of 5"
    difference = "mean absolute (signed) difference"
    assert facts[f"its method: {difference} from the published values"] == "0.5 (+0.5)"
    assert facts[f"baselines: {difference}"] == "5.0 (+5.0)"
    assert facts["its method is first in the paper; mean lead"] == "1 of 1; +3.0"
    assert facts["its method is first in Atoll; mean lead"] == "0 of 1; -1.5"
    assert facts["first in Atoll under `strict`; mean lead"] == "1 of 1; +1.0"
    assert facts["its method is behind in Atoll by more than both spreads"] == "1 of 1"


def test_what_clients_gain_stands_beside_their_accuracy(tmp_path: Path) -> None:
    start = "gcfl,3,NCI1,oneDS,30"
    text = made(
        tmp_path,
        f"{start},GCFL,acc,73.3,5.2,gcfl,76.0,0.9,5,cuda,0\n"
        f"{start},GCFL,acc,73.3,5.2,strict,62.9,1.3,5,cuda,0\n"
        f"{start},GCFL,min_gain,-4.6,,gcfl,-12.9,,5,cuda,0\n"
        f"{start},GCFL,ratio_improved,26,,gcfl,27,,5,cuda,0\n"
        f"{start},FedAvg,ratio_improved,26,,gcfl,28.0,,5,cuda,0\n",
    )
    assert "all clients (accuracy, min gain, improved; 1 of 4 reproduced):" in text
    assert "| | 30 clients, accuracy | 30 clients, min gain | 30 clients, improved |" in text
    # The published spread is over clients, so it does not widen the tolerance.
    assert "| GCFL | 73.3 → 76.0 ± 0.9, 62.9 ± 1.3 | -4.6 → -12.9 | 26 → **27** |" in text
    assert "| FedAvg | – | – | 26 → 28 |" in text
    assert "mean absolute (signed) difference from the published values | 2.7 (+2.7) |" in text


def test_the_picture_has_a_panel_for_each_paper(tmp_path: Path) -> None:
    (tmp_path / "p.md").write_text(f"{MARKS[0]}\n{MARKS[1]}\n")
    shown = ["--plot", str(tmp_path / "t.png")]
    table = str(RESULTS / "tables.csv")
    done = CliRunner().invoke(tables_page, [table, str(tmp_path / "p.md"), *shown])
    assert done.exit_code == 0, done.output
    width, height = matplotlib.image.imread(tmp_path / "t.png").shape[1::-1]
    assert 0.9 < width / height < 1.1  # four, two in a row


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(HEAD)
    (tmp_path / "p.md").write_text("text\n")
    done = CliRunner().invoke(tables_page, [str(tmp_path / "t.csv"), str(tmp_path / "p.md")])
    assert done.exit_code == 1
    assert "needs the lines" in done.output
    assert (tmp_path / "p.md").read_text() == "text\n"


def test_the_page_in_the_documentation_is_up_to_date(tmp_path: Path) -> None:
    for name in ("tables.csv", "tables.md"):
        shutil.copy(RESULTS / name, tmp_path)
    arguments = [str(tmp_path / "tables.csv"), str(tmp_path / "tables.md")]
    done = CliRunner().invoke(tables_page, arguments)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "tables.md").read_text() == (RESULTS / "tables.md").read_text()
    numbers, near = done.output.split()[0], done.output.split()[3]
    assert f"{near} of the {numbers} numbers are reproduced" in (RESULTS / "tables.md").read_text()
