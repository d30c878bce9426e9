"""The curves of a page."""

import pytest

import atoll
from atoll.present.chart import DASHED, SOLID
from atoll.report import collect, write_report
from atoll.report.collect import main_table
from atoll.report.page import page
from atoll.report.results import best_lines


@pytest.fixture(scope="module")
def found(study):
    return collect([study])


def test_one_run_alone_shows_its_own_lines(study, tmp_path):
    found, _ = write_report([study / "cells" / "fedavg-1"], tmp_path / "one.html")
    text = (tmp_path / "one.html").read_text()
    assert found.rows == ("fedavg",)
    assert "validation" in text
    assert "local model, test" in text


def test_a_comparison_by_a_chosen_metric_leads_with_it(tmp_path):
    data = "lagoon:nodes=120,classes=2,label_skew=0"
    how = {"clients": 2, "rounds": 2, "seeds": 2, "epochs": 1, "metric": "average_precision"}
    how["threshold"] = "max_f1"
    found = atoll.compare(["local", "fedavg"], data, out=tmp_path / "study", **how)
    best = max(found.tables[0].rows, key=lambda row: row.mean)
    shown = collect([tmp_path / "study"])
    table = main_table(shown)
    assert (table.title, table.metric) == (
        "Test average precision of class 1, in percent",
        "test_average_precision",
    )
    head = next(iter(table.columns))
    assert table.cell(best.method, head).mean == best.mean
    text = page(shown)
    assert (
        f"<b>{best.method}</b> has the highest mean test average precision of class 1: <b>" in text
    )
    assert "average precision)</dt>" in text  # the tests
    assert "pooled over clients, at the round" in text
    assert "average precision in percent" in found.latex()
    assert "fedavg: alert if the probability is at least " in text
    assert f"Classes with {best.method}: scores in percent" in text
    counts = next(one for one in shown.shown if one.row == best.method).run.result.confusion()
    cells = "".join(f"<td class=n>{count}</td>" for count in counts[0].tolist())
    assert f"{cells}</tr>" in text


def test_epochs_leave_out_baselines_which_have_none(tmp_path):
    how = {"clients": 2, "rounds": 2, "seeds": 1}
    arms = {"majority": "majority", "few": "fedavg:epochs=3", "many": "fedavg:epochs=10"}
    atoll.compare(arms, "lagoon:nodes=120", out=tmp_path / "study", **how)
    found = collect([tmp_path / "study"])
    assert "<td>3, 10</td><td>1</td></tr></tbody>" in page(found)
    lines = {line.name.split()[0]: line for line in best_lines(found.shown)}
    assert [*lines["majority"].x] == [1, 2]  # its only score, across the chart
    assert (lines["majority"].dash, lines["few"].dash) == (DASHED, SOLID)
    (cell,) = (tmp_path / "study" / "cells").glob("*-majority")
    assert "<td>–</td><td>1</td></tr></tbody>" in page(collect([cell]))
