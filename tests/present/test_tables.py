import csv
import io

import numpy as np
import pytest
from rich.console import Console

from atoll.core.errors import ConfigError
from atoll.present.tables import (
    Branch,
    Cell,
    Column,
    Number,
    ResultTable,
    csv_text,
    heading,
    html,
    latex,
    layout,
    make_table,
    markdown,
    number,
    number_of,
    quiet,
    record_table,
    result_csv,
    result_latex,
    result_markdown,
    rich_table,
    write_tables,
)
from atoll.present.terminal import noted_table, plain_text

TABLE = ResultTable(
    "Test accuracy",
    ("local", "fed_avg", "gcfl"),
    ("cora", "cite&seer"),
    {
        ("local", "cora"): number([0.70, 0.72]),
        ("fed_avg", "cora"): number([0.801, 0.803]),
        ("gcfl", "cora"): number([0.80, 0.8043]),  # 80.215 against 80.2: one printed digit
        ("local", "cite&seer"): number([0.5]),
        ("fed_avg", "cite&seer"): Number(why="failed"),
    },
    caption="Two seeds.",
)


def test_spread_is_the_sample_standard_deviation_and_absent_for_one_seed():
    assert number([0.70, 0.72]).std == pytest.approx(np.std([0.70, 0.72], ddof=1))
    assert number([0.5]).std is None
    assert not number([]).known
    assert number_of({"test_auc": {"per_seed": [0.5, 0.7]}}, "test_auc").mean == pytest.approx(0.6)
    assert not number_of({}, "test_auc").known


def test_what_cannot_be_told_from_the_best_in_printed_digits_is_best_too():
    assert TABLE.best("cora") == {"fed_avg", "gcfl"}
    assert TABLE.best("cite&seer") == set()  # a single method is not the best


def test_fewer_is_better_where_it_is():
    cells = {("a", "s"): number([2.0]), ("b", "s"): number([1.0])}
    assert ResultTable("", ("a", "b"), ("s",), cells, higher=False).best("s") == {"b"}
    assert ResultTable("", ("a", "b"), ("s",), cells, higher=None).best("s") == set()


def test_markdown():
    lines = result_markdown([TABLE]).splitlines()
    assert "| fed\\_avg | **80.2 ± 0.1** | failed |" in lines
    assert "| gcfl | **80.2 ± 0.3** | – |" in lines
    assert "| local | 71.0 ± 1.4 | 50.0 |" in lines


def test_latex_is_escaped_and_balanced():
    text = result_latex([TABLE])
    assert "fed\\_avg & \\textbf{80.2}{\\scriptsize$\\pm$0.1} & failed \\\\" in text
    assert "cite\\&seer" in text
    assert text.count("{") == text.count("}")
    assert text.count("\\begin") == text.count("\\end") == 2


def test_csv_has_fractions_and_every_seed():
    rows = list(csv.DictReader(io.StringIO(result_csv([TABLE]))))
    assert len(rows) == 6
    assert float(rows[0]["mean"]) == pytest.approx(0.71)
    assert rows[0]["per_seed"].split() == ["0.7", "0.72"]
    assert rows[3]["missing"] == "failed"


def test_files_are_written_or_refused_in_one_sentence(tmp_path):
    files = {"md": tmp_path / "t.md", "tex": None, "csv": tmp_path / "new" / "t.csv"}
    assert write_tables([TABLE], files) == [files["md"], files["csv"]]
    assert files["md"].read_text() == result_markdown([TABLE])
    with pytest.raises(ConfigError, match="is a folder"):
        write_tables([TABLE], {"md": tmp_path})
    with pytest.raises(ConfigError, match="is a file"):
        write_tables([TABLE], {"md": tmp_path / "t.md" / "x.md"})


MARKED = make_table(
    ("method", "score", Column("scale", below="<i>0</i>")),
    [
        ("a_b|c", Cell("80.2", "0.1", best=True), Cell("x", html="<svg/>")),
        ("d", Cell("79.0", sign="≈"), None),
    ],
    title="Scores & more",
    caption="In <percent>.",
    notes=("One note.",),
    sections=(1,),
)


def test_marks_spreads_and_signs_in_every_form():
    assert "| a\\_b\\|c | **80.2 ± 0.1** | x |" in markdown(MARKED)
    assert "| d | 79.0≈ |  |" in markdown(MARKED)
    text = latex(MARKED)
    assert "a\\_b|c & \\textbf{80.2}{\\scriptsize$\\pm$0.1} & x \\\\" in text
    assert "d & 79.0$^{\\approx}$ &  \\\\" in text
    page = html(MARKED)
    assert (
        '<td class=n><b>80.2</b> <span class="pm">± 0.1</span></td><td class=n><svg/></td>' in page
    )
    assert "<td class=n>79.0<sup>≈</sup></td>" in page
    assert csv_text(MARKED).splitlines() == ["method,score,scale", "a_b|c,80.2 ± 0.1,x", "d,79.0≈,"]


def test_heading_and_escapes_of_markdown_can_be_chosen():
    lines = markdown(MARKED, level=2, escaped="|").splitlines()
    assert lines[:2] == ["## Scores & more", ""]
    assert lines[3:5] == ["|---|---:|---:|", "| a_b\\|c | **80.2 ± 0.1** | x |"]
    assert lines[-4:] == ["", "- One note.", "", "In <percent>."]


def test_latex_without_words_is_no_float():
    plain = latex(make_table(("a", "b"), [(1, 2)]))
    assert plain.splitlines()[0] == "\\begin{tabular}{lr}"
    assert plain.splitlines()[2:5] == ["a & b \\\\", "\\midrule", "1 & 2 \\\\"]
    assert "\\begin{table}[t]" in latex(MARKED)
    assert "\\begin{table}\n" in latex(MARKED, place="")
    assert "\\caption{Scores \\& more. In <percent>.}" in latex(MARKED)


def test_page_escapes_text_and_names_its_region():
    page = html(make_table(("<a>", "n"), [("<b>", 1)], title="T<"), label='"L"')
    assert 'aria-label="&quot;L&quot;"' in page
    assert "<caption>T&lt;</caption>" in page
    assert '<th scope="col">&lt;a&gt;</th><th scope="col" class=n>n</th>' in page
    assert '<tr><th scope="row">&lt;b&gt;</th><td class=n>1</td></tr>' in page
    assert '<th scope="col" class="wide">scale<i>0</i></th>' in html(MARKED)
    assert '<p class="note">In &lt;percent&gt;.</p><p class="note">One note.</p>' in html(MARKED)


def test_terminal_has_marks_sections_and_no_markup():
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    table = make_table(("m", "s"), [("[red]", Cell("1", best=True)), ("b", 2)], sections=(1,))
    with console.capture() as captured:
        console.print(rich_table(table))
    lines = captured.get().splitlines()
    assert [line.strip() for line in lines[0::2]] == ["m      s", "[red]  1", "b      2"]
    assert set(lines[1].strip()) == {"─"}
    drawn = rich_table(MARKED)
    assert [str(cell.style) for cell in drawn.columns[1].cells] == ["bold", ""]


def test_records_become_rows_and_what_is_missing_stays_empty():
    records = [{"a": 1, "b": 0.5}, {"a": None, "c": 2}]
    assert csv_text(record_table(records)) == "a,b\n1,0.5\n,\n"
    assert csv_text(record_table(records, ("c", "a"))) == "c,a\n,1\n2,\n"


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


def test_tables_can_be_wider_apart_or_have_their_title():
    table = make_table(("a", "b"), [("x", 1)], title="T", caption="C")
    assert shown([table], gap=3)[0] == "a    b"
    lines = ["T", "", "a  b", "────", "x  1", "", "C"]
    assert [line.rstrip() for line in plain_text(noted_table(table)).splitlines()] == lines


def test_a_tree_keeps_the_order_of_its_branches():
    root = Branch("all", "", [Branch("first ", "(why)", [Branch("below")]), Branch("last")])
    assert shown([root]) == ["all", "├── first (why)", "│   └── below", "└── last"]
