import csv
import io

import numpy as np
import pytest

from atoll.core.errors import ConfigError
from atoll.present.tables import (
    Number,
    ResultTable,
    number,
    number_of,
    result_csv,
    result_latex,
    result_markdown,
    write_tables,
)

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
    assert np.isnan(number([0.5]).std)
    assert not number([]).known
    assert number_of({"test_auc": {"per_seed": [0.5, 0.7]}}, "test_auc").mean == pytest.approx(0.6)
    assert not number_of({}, "test_auc").known


def test_what_cannot_be_told_from_the_best_in_printed_digits_is_best_too():
    assert TABLE.best("cora") == {"fed_avg", "gcfl"}
    assert TABLE.best("cite&seer") == set()  # alone, nobody is best


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
