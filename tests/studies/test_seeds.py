"""Seeds of long runs in several processes: the same numbers and files as in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import ConfigError
from atoll.experiment.config import make_config
from atoll.experiment.observers import Observer
from atoll.experiment.run import RunPlan, Stopped
from atoll.experiment.status import read_events
from atoll.methods import FedAvg
from atoll.nn import GCN
from atoll.studies import parallel, seeds, study_run
from atoll.studies.seeds import FOLDER, collect_seeds, long_runs
from atoll.studies.study import run_study
from atoll.studies.study_run import StudyObserver, StudyRun

ABOUT = {"kind": "compare"}
SMALL: dict[str, Any] = {"data": "lagoon:nodes=150", "clients": 2, "rounds": 4, "seeds": 3}
FILES = "metrics.csv", "ledger.csv", "config.toml", "asked.toml"
FAILS = '''
from dataclasses import dataclass
from atoll.core.errors import AtollError
from atoll.methods import FedAvg

@dataclass(frozen=True)
class Fails(FedAvg):
    """Fails in its second round."""

    def round(self, server, clients):
        if clients.round == 1:
            raise AtollError("this method cannot continue")
        return super().round(server, clients)
'''


def a_run(name: str = "fedavg", **options: Any) -> StudyRun:
    return StudyRun(name, make_config(method=name, **SMALL | options), {"method": name})


class Heard(StudyObserver):
    """Notes what is reported, and stops as soon as a seed has a checkpoint in `until`."""

    def __init__(self, until: Path | None = None) -> None:
        self.until, self.heard = until, list[tuple[str, int, int]]()
        self.runs, self.ends, self.jobs = Counter[str](), list[str](), list[int]()

    def parallel(self, jobs: int, threads: int) -> None:
        self.jobs.append(jobs)

    def run(self, run: StudyRun) -> Observer:
        self.runs[run.name] += 1
        return HeardRun(self, run.name)

    def ended(self, outcome: Any) -> None:
        self.ends.append(outcome.run.name)

    def should_stop(self) -> bool:
        return self.until is not None and any(self.until.rglob("checkpoint.atoll"))


class HeardRun(Observer):
    def __init__(self, study: Heard, name: str) -> None:
        self.study, self.name = study, name

    def notes(self, notes: Any) -> None:
        pass

    def progress(self, progress: Mapping[str, Any]) -> None:
        self.study.heard.append((self.name, progress["done"], progress["total"]))

    def should_stop(self) -> bool:
        return self.study.should_stop()


@pytest.fixture
def _all_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "LONG", 0.0)


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run_study(folder, [a_run()], about=ABOUT)
    return folder


def same_files(folder: Path, other: Path) -> None:
    ours, theirs = (one / "cells" / "fedavg" for one in (folder, other))
    for name in FILES:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    found = [sorted(p.relative_to(one) for p in one.rglob("*")) for one in (ours, theirs)]
    assert found[0] == found[1]


@pytest.mark.usefixtures("_all_are_long")
def test_seeds_of_one_run_train_in_several_processes(tmp_path: Path, one_by_one: Path) -> None:
    heard = Heard()
    (outcome,) = run_study(tmp_path, [a_run()], about=ABOUT, observer=heard, jobs=2)
    assert outcome.summary is not None
    assert outcome.summary["seeds"] == 3
    same_files(tmp_path, one_by_one)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cells", "events.jsonl", "study.json"]
    assert heard.jobs == [2]
    assert heard.ends == ["fedavg"]
    # Once for its seeds, once for the run. The seeds count as shares of the run.
    assert heard.runs == {"fedavg": 2}
    assert {(name, total) for name, _, total in heard.heard} <= {("fedavg", 12)}
    assert [event["event"] for event in read_events(tmp_path)] == ["begin", "begin", "end"]
    # The processes wrote the checkpoints: the run itself had nothing to train.
    assert not run_study(tmp_path, [a_run()], about=ABOUT, jobs=2)[0].fresh


@pytest.mark.usefixtures("_all_are_long")
def test_a_stopped_study_keeps_its_seeds_and_continues(tmp_path: Path, one_by_one: Path) -> None:
    with pytest.raises(Stopped) as stopped:
        run_study(tmp_path, [a_run()], about=ABOUT, observer=Heard(until=tmp_path), jobs=2)
    assert stopped.value.out == tmp_path
    assert [event["event"] for event in read_events(tmp_path)] == ["begin", "stopped"]
    assert not (tmp_path / FOLDER).exists()
    assert list((tmp_path / "cells" / "fedavg").glob("seed-*/checkpoint.atoll"))
    run_study(tmp_path, [a_run()], about=ABOUT, jobs=2)
    same_files(tmp_path, one_by_one)


def test_seeds_of_a_killed_study_are_not_lost(tmp_path: Path, one_by_one: Path) -> None:
    there = tmp_path / FOLDER / "cells" / "fedavg.1"
    RunPlan(make_config(method="fedavg", **SMALL | {"seed": 1, "seeds": 1}), there).run()
    before = (there / "seed-1" / "checkpoint.atoll").read_bytes()
    collect_seeds(tmp_path)
    assert not (tmp_path / FOLDER).exists()
    after = tmp_path / "cells" / "fedavg" / "seed-1" / "checkpoint.atoll"
    assert after.read_bytes() == before
    run_study(tmp_path, [a_run()], about=ABOUT)
    same_files(tmp_path, one_by_one)


@pytest.mark.parametrize(
    "link", [".seeds", ".seeds/cells", ".seeds/cells/a.0", ".seeds/cells/a.0/seed-0", "cells",
             "cells/a", "cells/a/seed-0"],
)  # fmt: skip
def test_nothing_outside_the_study_moves_or_disappears(tmp_path: Path, link: str) -> None:
    study, outside = tmp_path / "study", tmp_path / "outside"
    for place in (".seeds/cells/a.0/seed-0/checkpoint.atoll", "cells/a/seed-0/result.json"):
        (study / place).parent.mkdir(parents=True)
        (study / place).write_text(place)
    (study / link).rename(outside)
    (study / link).symlink_to(outside)
    before = sorted(outside.rglob("*"))
    collect_seeds(study)
    assert sorted(outside.rglob("*")) == before


def test_odd_names_in_the_hidden_study_move_nothing(tmp_path: Path) -> None:
    for name in ("...0", ".0", "0", "a.007", "a.\u0663", "a.b", "file.0"):
        seed = tmp_path / FOLDER / "cells" / name / "seed-0"
        seed.mkdir(parents=True)
        (seed / "checkpoint.atoll").write_text(name)
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "file").write_text("not a run")
    collect_seeds(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["cells", "file"]


@pytest.mark.usefixtures("_all_are_long")
def test_a_run_whose_seed_fails_fails_with_this_error(tmp_path: Path) -> None:
    file = tmp_path / "fails.py"
    file.write_text(FAILS)
    config = make_config(method=f"{file}:Fails", **SMALL)
    run = StudyRun("fails", config, {"method": "fails"})
    (outcome,) = run_study(tmp_path / "study", [run], about=ABOUT, jobs=2)
    assert outcome.error == "this method cannot continue"
    with pytest.raises(ConfigError, match="was started with other options"):
        run_study(tmp_path / "study", [replace(run, config=a_run().config)], about=ABOUT)


def test_only_long_runs_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 4)
    monkeypatch.setattr(parallel, "available_memory", lambda: 100 * study_run.PROCESS)
    monkeypatch.setattr(study_run, "on_gpu", lambda config: config.device == "cuda")
    dear = a_run("fedath", data="cora", rounds=100)
    assert study_run.cost_of(dear.config) > seeds.LONG
    assert long_runs([dear], "auto") == long_runs([dear], 2) == [dear]
    assert long_runs([dear], 1) == []
    assert long_runs([replace(dear, name=str(n)) for n in range(9)], "auto") == []
    assert long_runs([dear, a_run()], "auto") == [dear]
    assert long_runs([a_run(rounds=4)], 2) == []
    alone = replace(dear, config=make_config(method="fedath", data="cora", rounds=100))
    given = replace(dear, method=FedAvg(GCN(4, 2)))
    for run in (alone, given, replace(dear, light=True), replace(dear, watch=lambda o: o)):
        assert long_runs([run], "auto") == []
    on_gpu = {"device": "cuda", "rounds": 900}
    assert long_runs([a_run("fedath", data="cora", **on_gpu)], 2) == []  # its seeds train at once
    cut = a_run("gcfl", data="MOLECULES", protocol="gcfl", clients=None, **on_gpu)
    assert long_runs([cut], 2) == [cut]
