"""The cells of a study: each runs to its end once, and a failed cell stops no other cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import atoll
from atoll.core.errors import AtollError, ConfigError
from atoll.experiment.config import make_config
from atoll.experiment.observers import Observer
from atoll.experiment.status import read_events
from atoll.methods import FedAvg
from atoll.nn import GCN
from atoll.studies.study import run_study
from atoll.studies.study_run import StudyObserver, StudyRun

ABOUT = {"kind": "compare"}


def cells(rounds: int = 2) -> list[StudyRun]:
    return [
        StudyRun(name, make_config(method=name, rounds=rounds, clients=2), {"method": name})
        for name in ("local", "fedavg")
    ]


def events(folder: Path) -> list[tuple[str, str]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [(event["event"], event["cell"]) for event in map(json.loads, lines)]


def test_finished_cells_are_only_read_again(tmp_path: Path) -> None:
    first = run_study(tmp_path, cells()[:1], about=ABOUT)
    both = run_study(tmp_path, cells(), about=ABOUT)
    assert [outcome.fresh for outcome in both] == [False, True]
    assert both[0].summary == first[0].summary
    assert events(tmp_path) == [(e, c) for c in ("local", "fedavg") for e in ("begin", "end")]


def test_a_failed_cell_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    broken = StudyRun("broken", make_config(method="fedavg", data="no-such-set"))
    outcomes = run_study(tmp_path, [broken, *cells()], about=ABOUT)
    assert [outcome.summary is None for outcome in outcomes] == [True, False, False]
    assert "no-such-set" in (outcomes[0].error or "")
    assert ("failed", "broken") in events(tmp_path)


def test_other_options_under_the_same_name_are_refused(tmp_path: Path) -> None:
    run_study(tmp_path, cells()[:1], about=ABOUT)
    with pytest.raises(ConfigError, match="started with other options"):
        run_study(tmp_path, cells(rounds=3)[:1], about=ABOUT)


class Heard(StudyObserver, Observer):
    """Notes whose rounds were run."""

    def __init__(self) -> None:
        self.seeds: set[int] = set()

    def begin(self, *what: object) -> None:
        pass

    def run(self, run: StudyRun) -> Heard:
        return self

    def round(self, seed: int, history: object) -> None:
        self.seeds.add(seed)


def test_more_seeds_go_on_with_those_that_are_there(tmp_path: Path) -> None:
    def scores(seeds: int, heard: Heard) -> list[float]:
        config = make_config(method="fedavg", rounds=2, clients=2, seeds=seeds)
        outcome = run_study(tmp_path, [StudyRun("one", config)], about=ABOUT, observer=heard)[0]
        assert outcome.summary is not None
        return outcome.summary["metrics"]["test_accuracy"]["per_seed"]

    heard = [Heard(), Heard(), Heard()]
    few, many, again = (scores(n, h) for n, h in zip((1, 2, 2), heard, strict=True))
    assert [h.seeds for h in heard] == [{0}, {1}, set()]
    assert many[:1] == few
    assert again == many
    assert len(many) == 2
    with pytest.raises(ConfigError, match="only --seeds may grow"):
        scores(1, Heard())


def test_other_objects_under_the_same_name_are_refused(tmp_path: Path) -> None:
    federation = atoll.partition(atoll.load("lagoon:nodes=150"), "louvain", clients=2)
    options = {"method": "FedAvg", "data": federation.name, "rounds": 1}
    config = make_config(**options, objects=["method", "data"])
    net = GCN(federation.features, federation.classes, hidden=8)
    for epochs in (1, 1, 2):
        cell = StudyRun("one", config, method=FedAvg(net=net, epochs=epochs), data=federation)
        if epochs == 1:
            assert run_study(tmp_path, [cell], about=ABOUT)[0].summary is not None
            continue
        with pytest.raises(ConfigError, match="started with other options"):
            run_study(tmp_path, [cell], about=ABOUT)


def test_a_kill_between_a_result_and_its_event_is_mended(tmp_path: Path) -> None:
    run_study(tmp_path, cells()[:1], about=ABOUT)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    (tmp_path / "events.jsonl").write_text(lines[0] + "\n")
    for _ in range(2):
        run_study(tmp_path, cells()[:1], about=ABOUT)
        assert events(tmp_path) == [("begin", "local"), ("end", "local")]


def test_what_a_killed_process_ran_does_not_run_any_more(tmp_path: Path) -> None:
    stopped = {"at": 17, "event": "begin", "cell": "fedavg"}
    (tmp_path / "events.jsonl").write_text(json.dumps(stopped) + "\n")
    run_study(tmp_path, cells(), about=ABOUT)
    assert events(tmp_path)[:3] == [("begin", "fedavg"), ("stopped", "fedavg"), ("begin", "local")]


def test_half_a_line_of_a_killed_process_costs_no_other_event(tmp_path: Path) -> None:
    run_study(tmp_path, cells()[:1], about=ABOUT)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"at": 17, "ev')
    run_study(tmp_path, cells(), about=ABOUT)
    known = [(event["event"], event["cell"]) for event in read_events(tmp_path)]
    assert known == [(e, c) for c in ("local", "fedavg") for e in ("begin", "end")]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("study.json", '{"kind": "tune"}', "contains another study, with the kind 'tune'"),
        ("study.json", '{"kind": "compare", "paper": "gcfl"}', "with the paper 'gcfl'"),
        ("study.json", '{"kind": ', "cannot be read"),
        ("config.toml", "", "contains a run"),
    ],
)
def test_a_folder_of_something_else_is_left_as_it_is(
    tmp_path: Path, name: str, content: str, sentence: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(AtollError, match=sentence):
        run_study(tmp_path, cells()[:1], about=ABOUT)
    assert (tmp_path / name).read_text() == content
    assert not (tmp_path / "cells").exists()


def test_two_cells_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two cells"):
        run_study(tmp_path, cells()[:1] * 2, about=ABOUT)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a folder"):
        run_study(tmp_path / "file", cells(), about=ABOUT)


def test_cells_of_earlier_calls_stay_where_a_call_adds(tmp_path: Path) -> None:
    first, second = cells()
    for adds, names in ((True, ["local", "fedavg"]), (False, ["fedavg"])):
        run_study(tmp_path, [first], about=ABOUT)
        run_study(tmp_path, [second], about=ABOUT, adds=adds)
        study = json.loads((tmp_path / "study.json").read_text())
        assert [cell["name"] for cell in study["cells"]] == names
