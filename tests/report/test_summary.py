"""The executive page: the answer in one metric, every client's gain, and what is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import atoll
from atoll.report import collect, results
from atoll.report.collect import Collection, main_table
from atoll.report.page import page
from atoll.report.results import by_client
from atoll.report.summary import summary

DATA = "lagoon:nodes=160,classes=2,label_skew=0"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study by AUC of three methods and two seeds."""
    folder = tmp_path_factory.mktemp("summary") / "study"
    how = {"clients": 3, "rounds": 2, "seeds": 2, "epochs": 1, "metric": "auc"}
    atoll.compare(["local", "fedavg", "fedprox"], DATA, out=folder, **how)
    return folder


def views(found: Collection) -> dict[str, str]:
    """The parts of the page by the label of their metric."""
    text = summary(found)
    labels = re.findall(r'<label for="m\d+">(.*?)</label>', text)
    return dict(zip(labels, text.split('<div class="by-metric')[1:], strict=True))


def test_the_answer_the_chart_and_the_tests_are_in_the_studys_metric(compared: Path) -> None:
    found = collect([compared])
    table, parts = main_table(found), views(found)
    assert next(iter(parts)) == "AUC"
    assert {"accuracy", "macro F1"} < parts.keys()
    head = table.columns[0]
    (best, *_) = (row for row in table.rows if row in table.best(head))
    score = table.printed(best, head).plain.replace(" ", "\u00a0")
    answer = f"<b>{best}</b> has the highest mean test AUC: <b>{score}\u00a0%</b>"
    assert answer in parts["AUC"]
    assert "accuracy" not in parts["AUC"]
    assert "2 seeds are too few to tell: " in parts["AUC"]
    # The tests are of AUC, so that they stand beside no other metric.
    assert "too few to tell" not in parts["accuracy"]
    assert "highest mean test accuracy" in parts["accuracy"]
    assert "AUC" not in parts["accuracy"]
    assert "alone" not in summary(found)
    assert re.search(r"<th[^>]*>local</th>", summary(found))
    assert "Wilcoxon" not in summary(found)
    assert "Wilcoxon" in page(found)  # on the technical page


def test_the_level_of_guessing_and_the_threshold_are_on_the_page(tmp_path: Path) -> None:
    how = {"clients": 2, "rounds": 2, "epochs": 1, "metric": "average_precision"}
    atoll.run("fedavg", DATA, out=tmp_path / "a", threshold="max_f1", **how)
    found = collect([tmp_path / "a"])
    result, parts = found.shown[0].run.result, views(found)
    counts = result.confusion().sum(1)
    assert f"Guessing reaches {100 * counts[1] / counts.sum():.1f}" in parts["average precision"]
    most = f"most frequent class reaches {100 * counts.max() / counts.sum():.1f}"
    assert f"Always predicting the {most}" in parts["accuracy"]
    assert "Guessing reaches 50.0" in parts["AUC"]
    assert "uessing reaches" not in parts["recall"]  # an alert for every node finds all
    assert "reaches" not in parts["macro F1"].partition("%</b>")[2]
    threshold = result.metrics()["threshold"]["mean"]
    assert f"alert if the probability is at least {threshold:.3g} (max_f1" in parts["accuracy"]


def test_the_axis_of_the_seeds_contains_every_error_bar(
    compared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    axis = results.strip_axis
    monkeypatch.setattr(
        results, "strip_axis", lambda values, share: asked.extend(values) or axis(values, share)
    )
    found = collect([compared])
    summary(found)
    for one in found.shown:
        seeds = np.array(results.percents(one, "test_auc"))
        assert min(asked) <= seeds.mean() - seeds.std(ddof=1)
        assert max(asked) >= seeds.mean() + seeds.std(ddof=1)


def test_a_metric_of_one_class_names_the_class(tmp_path: Path) -> None:
    atoll.compare(["local", "fedavg"], DATA, metric="recall", clients=2, rounds=1, out=tmp_path)
    found = collect([tmp_path])
    for one in found.shown:
        one.run.result.federation["class_names"] = ["fraud", "ok"]
    parts = views(found)
    assert "highest mean test recall of class ok: " in parts["recall"]
    assert "<caption>Test recall of class ok, in percent</caption>" in parts["recall"]
    assert "Test recall of class ok of every client with" in parts["recall"]
    assert "of class" not in parts["accuracy"]
    assert main_table(found).title == "Test recall of class ok, in percent"


def test_every_client_has_its_gain_and_the_worst_is_marked(compared: Path) -> None:
    found = collect([compared])
    text = views(found)["AUC"]
    own = {one.row: by_client(one) for one in found.shown}
    best = max(
        ("fedavg", "fedprox"),
        key=lambda row: main_table(found).cell(row, main_table(found).columns[0]).mean,
    )
    table = text.partition(f"every client with {best}, in percent")[2]
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', table)
    assert len(rows) == 3
    worst = int(np.argmin(own[best]))
    assert ["lowest" in name for name, _ in rows] == [place == worst for place in range(3)]
    for place, (_, cells) in enumerate(rows):
        numbers = re.sub("<.*?>", " ", cells).replace("−", "-").split()
        assert float(numbers[1]) == pytest.approx(own[best][place], abs=0.051)
        assert float(numbers[2]) == pytest.approx(own["local"][place], abs=0.051)
        gain = own[best][place] - own["local"][place]
        assert float(numbers[3]) == pytest.approx(gain, abs=0.051)
        assert numbers[3][0] in "+-"
        assert ('class="warn"' in cells) == (gain < 0)


def test_the_ranking_is_best_first_and_the_tests_are_below_it(compared: Path) -> None:
    found = collect([compared])
    text, table = views(found)["AUC"], main_table(found)
    ranking = text.partition("<caption>Test AUC, in percent</caption>")[2]
    rows = re.findall(r'<th scope="row"><span class="chip c\d"></span>(.*?)</th>', ranking)
    names = [row.partition("<span")[0] for row in rows]
    means = [table.cell(name, table.columns[0]).mean for name in names]
    assert means == sorted(means, reverse=True)
    assert 'local<span class="aside"> no federation</span>' in rows
    assert text.index("</table>") < text.index("too few to tell") < text.rindex("<table>")
    assert ">local</th>" in text
    assert "alone" not in text


def test_one_seed_has_no_strip_and_equal_names_are_joined(tmp_path: Path) -> None:
    how = {"clients": 3, "rounds": 1, "epochs": 1, "seeds": 1}
    atoll.compare(["local", "fedavg", "fedprox", "moon"], DATA, out=tmp_path, **how)
    found = collect([tmp_path])
    assert "seeds, mean ± std" not in summary(found)
    assert "client 3 of one seed is not" not in summary(found)
    for one in found.shown:
        one.run.summary["metrics"]["test_accuracy"]["per_seed"] = [0.5]
    names = "<b>local</b>, <b>fedavg</b>, <b>fedprox</b> and <b>moon</b> have the highest mean"
    assert names in summary(found)


def test_names_of_clients_take_the_place_of_numbers(compared: Path) -> None:
    found = collect([compared])
    assert "client 3 of one seed is not" in summary(found)
    for one in found.shown:
        one.run.result.federation["client_names"] = ["north", "south", "west <b>"]
    text = summary(found)
    assert '<th scope="row">north' in text
    assert "west &lt;b&gt;" in text
    assert "client 3 of one seed is not" not in text


def test_two_runs_of_one_federation_are_never_in_two_metrics(tmp_path: Path) -> None:
    small = {"data": DATA, "clients": 2, "rounds": 1, "epochs": 1}
    atoll.run("fedavg", out=tmp_path / "a", metric="auc", **small)
    atoll.run("fedprox", out=tmp_path / "b", **small)
    found = collect([tmp_path / "a", tmp_path / "b"])
    assert [one.metric for one in found.shown] == ["auc", "auc"]
    other = found.shown[1].run.summary["metrics"]["test_auc"]["mean"]
    assert main_table(found).cell("fedprox", main_table(found).columns[0]).mean == other


def test_one_run_and_only_local_have_an_answer_too(compared: Path) -> None:
    (local,) = (one for one in collect([compared]).shown if one.row == "local")
    text = summary(Collection([local]))
    assert "<b>local</b> reaches a test AUC: <b>" in text
    assert "every client with local, in percent" in text
    assert ">gain</th>" not in text


def test_many_federations_are_one_table(compared: Path) -> None:
    (first, *_) = collect([compared]).shown
    many = Collection([replace(first, column=f"set {i}") for i in range(7)])
    text = summary(many)
    assert 'type="radio"' not in text
    assert text.count("<table>") == 1


def test_sections_that_have_nothing_are_absent(compared: Path) -> None:
    text = page(collect([compared]))
    assert 'id="relations"' not in text  # none of these methods compares clients
    assert 'href="#relations"' not in text
    assert "None of these methods" not in text
    found = collect([compared])
    for one in found.shown:
        vars(one.run)["measures"] = {}
    assert 'id="federations"' not in page(found)
