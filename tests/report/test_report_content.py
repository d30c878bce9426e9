"""What the page says, without a browser."""

import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner

import atoll
from atoll.cli import main
from atoll.core.errors import AtollError
from atoll.experiment.config import make_config
from atoll.methods import METHODS
from atoll.report import collect, write_report
from atoll.report.collect import main_table, other_tables
from atoll.report.page import DARK, LIGHT, page
from atoll.report.traffic import Declared, declared, paragraph


class Outline(HTMLParser):
    """Balanced tags, headings in order, tables with captions."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.levels: list[int] = []
        self.ids: list[str] = []
        self.captions = self.tables = 0

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        self.ids += [value for name, value in attrs if name == "id"]
        self.tables += tag == "table"
        self.captions += tag == "caption"

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def found(study):
    return collect([study])


@pytest.fixture(scope="module")
def html(found):
    return page(found)


def test_the_page_is_well_formed_and_its_headings_are_in_order(html):
    outline = Outline()
    outline.feed(html)
    assert outline.open == []
    assert outline.levels[0] == 1
    assert outline.levels.count(1) == 1
    steps = np.diff(outline.levels)
    assert steps.max() == 1  # no level is left out on the way down
    assert outline.tables == outline.captions > 10
    assert len(set(outline.ids)) == len(outline.ids)


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
    assert "Not here: 2 of 10 runs" in html
    assert "nowhere.csv" in html
    cell = main_table(found).cell("gcfl", "lagoon:nodes=200,homophily=0.3")
    assert (cell.known, cell.why) == (False, "not finished")


def test_every_section_has_something_to_say(html):
    for text in (
        "highest mean: <b>", "band: lowest to highest seed", "fedpub: similarity",
        "fedgta: mixture", "gcfl: clusters of clients", "lie between clients", "score (apart)",
        "What never crossed", "MB / round", "torch", "atoll run --config config.toml",
        "masks, and the optimizer", "Divergence of structure",
    ):  # fmt: skip
        assert text in html, text
    assert "atoll compare &lt;all&gt; &amp; more" in html  # text of others cannot become markup


def test_nothing_is_loaded_from_anywhere(html):
    assert not re.findall(r'(?:src|href)="(?!#|data:)', html)
    assert "url(" not in html
    assert "default-src 'none'" in html


def test_a_title_cannot_become_markup(found):
    assert "<h1>&lt;b&gt;x</h1>" in page(found, "<b>x")


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_text_and_lines_can_be_read(colours):
    for name in ("text", "soft", "link", *(f"c{i}" for i in range(8))):
        assert contrast(colours[name], colours["bg"]) >= 4.5, name
        if not name.startswith("c"):
            assert contrast(colours[name], colours["panel"]) >= 4.5, name
    for name in ("edge", "focus", "warn"):
        assert contrast(colours[name], colours["bg"]) >= 3, name
    # Numbers on the darkest shade of a matrix: 0.62 of the heat colour over the background.
    heat = np.array([int(part) for part in colours["heat"].split()])
    ground = np.array([int(colours["bg"][i : i + 2], 16) for i in (1, 3, 5)])
    mixed = np.round(0.62 * heat + 0.38 * ground).astype(int)
    assert contrast(colours["text"], "#" + "".join(f"{part:02x}" for part in mixed)) >= 4.5


def test_one_run_alone_shows_its_own_lines(study, tmp_path):
    found, _ = write_report([study / "cells" / "fedavg-1"], tmp_path / "one.html")
    text = (tmp_path / "one.html").read_text()
    assert found.rows == ("fedavg",)
    assert "validation" in text
    assert "local model, test" in text


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
        f"m on lagoon: validation chose lr={best + 1} of 2 points of the grid.",
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
        assert "of fewer runs than are asked for by now" in found.aside[-1]


def test_many_federations_stay_far_below_five_megabytes(found):
    """The parts that grow, drawn for 30 federations of ten methods with 120 rounds."""
    ours = list(found.shown)
    first = ours[0].run.result.seeds[0].history
    try:
        for seed in (s for one in ours for s in one.run.result.seeds):
            for name, rounds in seed.history.scores.items():
                seed.history.scores[name] = rounds * 40
        many = [
            type(one)(one.run, one.labels, f"method {r}", f"set {c}", r)
            for c in range(30) for r, one in enumerate((ours * 2)[:10])
        ]  # fmt: skip
        text = page(type(found)(many, [], {}))
        assert first.array("deployed", "accuracy", "test").shape[0] == 120
        assert len(text) < 2.5e6
    finally:
        for seed in (s for one in ours for s in one.run.result.seeds):
            for name, rounds in seed.history.scores.items():
                seed.history.scores[name] = rounds[:3]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_says_what_crosses_and_what_stays(name):
    words = declared(make_config(method=name), "node")
    assert isinstance(words, Declared), words
    assert words.wire
    assert words.private


def test_declarations():
    words = declared(make_config(method="fedgnn"), "node")
    assert [pair[:2] for pair in words.discloses] == [("announce", "keys"), ("embed", "rows")]
    assert words.discloses[0][2] == "the server finds equal neighbourhoods by their keys"
    words = declared(make_config(method="fedtad", set={"base": "fedgta"}), "node")
    assert "FedGTA (base): down: own model; up: model, confidence H, moments M" in words.wire
    assert "Python object" in declared(make_config(method="Mine", objects=["method"]), "node")
    assert "cannot be asked" in declared(make_config(method="gone.py:Mine"), "node")
    assert paragraph("Wire, x:  down  a      up  b\nPrivate state: c", "Wire,") == "down: a; up: b"
    assert paragraph("nothing", "Wire,") == ""


# The command, and what it refuses.


def test_the_command_writes_page_and_tables(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        main, ["report", str(study), "--md", "t.md", "--tex", "t.tex", "--csv", "t.csv"]
    )
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.csv", "t.md", "t.tex"]
    assert "2 of 10 runs are not in it: gcfl-8 (not finished), lost (failed)" in done.stderr
    assert "| fedgta |" in (tmp_path / "t.md").read_text()
    done = CliRunner().invoke(main, ["report", str(study)])
    assert done.exit_code == 0
    assert (tmp_path / "report.html").stat().st_size < 5e6


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


def test_an_output_that_is_a_folder_is_refused_before_the_work(study, tmp_path):
    with pytest.raises(AtollError, match="is a folder"):
        write_report([study], tmp_path)


def test_the_report_needs_no_checkpoint_and_no_data(study, tmp_path):
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns("checkpoint.atoll", "partition.npz")
    shutil.copytree(study / "cells" / "fedpub-3", copy, ignore=ignore)
    assert "fedpub: mixture" in page(collect([copy]))
    assert atoll.read_result(copy).clients == 3
