"""Runs in groups: names, gaps, grids, verdicts, and folders that hold nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from atoll.cli import main
from atoll.core.errors import AtollError
from atoll.report import collect
from atoll.report.collect import main_table, other_tables
from atoll.report.page import page


def test_numbers_are_those_of_the_runs(found, html, study):
    saved = json.loads((study / "cells" / "fedavg-1" / "result.json").read_text())
    accuracy = saved["metrics"]["test_accuracy"]
    cell = main_table(found).cell("fedavg", "lagoon:nodes=160")
    assert cell.values == tuple(accuracy["per_seed"])
    assert f"{100 * accuracy['mean']:.1f}" in html
    assert other_tables(found)[-2].cell("local", "lagoon:nodes=160").mean == pytest.approx(
        sum(saved_bytes(study, "local-0")) / 6 / 1e6
    )


def saved_bytes(study, name):
    return json.loads((study / "cells" / name / "result.json").read_text())["bytes"].values()


def test_what_is_missing_is_said(found, html):
    assert {gap.name: gap.kind for gap in found.missing} == {
        "gcfl-8": "not finished", "lost": "failed",
    }  # fmt: skip
    assert "Missing: 2 of 10 runs" in html
    assert "nowhere.csv" in html
    cell = main_table(found).cell("gcfl", "lagoon:nodes=200,homophily=0.3")
    assert (cell.known, cell.why) == (False, "not finished")


def test_runs_of_one_method_are_told_apart(study, tmp_path):
    first = study / "cells" / "fedavg-1"
    for name, old, new in (("a", "hidden = 8", "hidden = 9"), ("b", "rounds = 3", "rounds = 3")):
        shutil.copytree(first, tmp_path / name)
        config = tmp_path / name / "config.toml"
        assert old in config.read_text()
        config.write_text(config.read_text().replace(old, new))
    found = collect([first, tmp_path / "a", tmp_path / "b", first])
    assert found.rows == ("fedavg, hidden=8", "fedavg, hidden=9", "fedavg, hidden=8 (b)")


def test_federations_are_told_apart_by_what_differs(study, tmp_path):
    shutil.copytree(study / "cells" / "fedavg-1", tmp_path / "a")
    config = tmp_path / "a" / "config.toml"
    config.write_text(re.sub("clients = 3", "clients = 4", config.read_text()))
    found = collect([study / "cells" / "local-0", tmp_path / "a"])
    assert found.columns == ("lagoon:nodes=160, clients 3", "lagoon:nodes=160, clients 4")


def test_of_a_grid_only_the_chosen_point_is_shown(study, tmp_path):
    folder = tmp_path / "grid"
    names = ["fedavg-1", "fedprox-2"]
    for name in names:
        shutil.copytree(study / "cells" / name, folder / "cells" / name)
    labels = [
        {"method": "m", "data": "lagoon", "clients": None, "point": {"lr": i}} for i in (1, 2)
    ]
    trial = {"name": "t", "labels": {"role": "trial"}}
    cells = [{"name": n, "labels": one} for n, one in zip(names, labels, strict=True)]
    request = {"methods": {"m": "m"}, "data": ["lagoon"], "metric": None}
    about = {"request": request, "cells": [*cells, trial]}
    (folder / "study.json").write_text(json.dumps(about))
    said = {
        "methods": ["m"], "cells": 3, "overall": None,
        "tables": [{"data": "lagoon", "sentences": ["A is best."]}],
    }  # fmt: skip
    (folder / "compare.json").write_text(json.dumps(said))
    found = collect([folder])
    scores = [json.loads((folder / "cells" / n / "result.json").read_text()) for n in names]
    best = int(np.argmax([one["metrics"]["val_accuracy"]["mean"] for one in scores]))
    assert [one.run.path.name for one in found.shown] == [names[best]]
    assert found.aside == [
        "1 trial of 'grid' had no test nodes.",
        f"m on lagoon: validation selected lr={best + 1} among 2 grid points.",
    ]
    assert "A is best." in page(found)
    # The metric that the study asked for chooses the point, here as in its own tables.
    other, summary = names[1 - best], scores[1 - best]
    summary["metrics"]["val_macro_f1"] = {"mean": 1.0, "std": 0.0, "per_seed": [1.0]}
    (folder / "cells" / other / "result.json").write_text(json.dumps(summary))
    request["metric"] = "macro_f1"
    (folder / "study.json").write_text(json.dumps(about))
    assert [one.run.path.name for one in collect([folder]).shown] == [other]


def test_tests_are_told_by_number_of_clients_and_left_out_when_outdated(study, tmp_path):
    folder = tmp_path / "s"
    shutil.copytree(study / "cells" / "fedavg-1", folder / "cells" / "fedavg-1")
    cell = {"name": "fedavg-1", "labels": {"method": "a", "data": "lagoon"}, "seeds": 2}
    about = {"request": {"methods": {"a": "a"}, "data": ["lagoon"]}, "cells": [cell]}
    (folder / "study.json").write_text(json.dumps(about))
    tables = [
        {"data": "lagoon", "clients": n, "seeds": 2, "sentences": [f"Of {n}."]} for n in (2, 3)
    ]
    said = {"methods": ["a"], "cells": 1, "tables": tables, "overall": None}
    (folder / "compare.json").write_text(json.dumps(said))
    verdicts = {"lagoon, clients 2": ["Of 2."], "lagoon, clients 3": ["Of 3."]}
    assert collect([folder]).verdicts == verdicts
    for cells in ([{**cell, "seeds": 3}], [cell, {**cell, "name": "later"}]):
        (folder / "study.json").write_text(json.dumps({**about, "cells": cells}))
        found = collect([folder])
        assert found.verdicts == {}
        assert "cover only some of its runs" in found.aside[-1]


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [
        ("nothing", "folder 'nothing' does not exist; give the folder of a run or a study"),
        ("empty", "'empty' holds no run (it has no config.toml)"),
        ("stopped", "the run in 'stopped' is not finished; continue it with: atoll run --resume"),
        ("unborn", "nothing in 'unborn' is finished yet (a: not run yet)"),
        ("broken", "'broken/study.json' cannot be read"),
    ],
)
def test_folders_that_cannot_be_shown(tmp_path, monkeypatch, folder, sentence):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "stopped", "unborn", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "stopped" / "config.toml").write_text('method = "fedavg"\n')
    (tmp_path / "unborn" / "study.json").write_text('{"cells": [{"name": "a"}]}')
    (tmp_path / "broken" / "study.json").write_text("{")
    done = CliRunner().invoke(main, ["report", folder])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {sentence}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_trials_alone_are_nothing_to_report(tmp_path):
    trial = {"name": "t", "labels": {"role": "trial"}}
    (tmp_path / "study.json").write_text(json.dumps({"kind": "tune", "cells": [trial]}))
    with pytest.raises(AtollError, match=r"nothing to report: 1 trial of .* had no test nodes"):
        collect([tmp_path])


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
