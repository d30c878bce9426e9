"""Seeds of long runs in several processes.

A study of a few long runs would leave processes idle. `spread_seeds` first trains each seed of such
a run as a separate run, in a hidden study inside the study's folder. Then it moves the seeds'
checkpoints into the run's folder, so that the run itself continues from finished seeds.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from atoll.core.files import write_atomically
from atoll.experiment.config import RunConfig
from atoll.experiment.folder import CHECKPOINT
from atoll.experiment.observers import PROGRESS, Observer
from atoll.experiment.run import Stopped
from atoll.studies import study_run
from atoll.studies.parallel import choose_jobs
from atoll.studies.study_run import Json, ReadsFiles, StudyObserver, StudyRun

FOLDER = ".seeds"  # the folder of the hidden study
NAME = re.compile(r"(?P<run>[^.].*)\.(?P<seed>0|[1-9][0-9]*)")  # of a run of one seed
LONG = 20.0  # a run with fewer estimated seconds is not spread


def spread_seeds(
    folder: Path,
    runs: Sequence[StudyRun],  # those that are not finished
    jobs: int | str,
    observer: StudyObserver,
    run_study: Callable[..., object],  # `study.run_study` with the settings of the study
) -> None:
    """Train the seeds of long runs in `jobs` processes, if that saves time."""
    found = long_runs(runs, jobs)
    if not found or _has_links(folder / "cells", folder / FOLDER):
        return
    pieces = {_name(run, seed): (run, seed) for run in found for seed in run.config.all_seeds}
    for name, (run, seed) in pieces.items():
        own = folder / "cells" / run.name
        write_atomically(own / "asked.toml", study_run.asked_text(run).encode())
        _move(own, folder / FOLDER / "cells" / name, seed)
    for run in found:
        study_run.note(folder, "begin", run.name)
    try:
        count = choose_jobs(jobs, [_of_seed(*piece) for piece in pieces.values()])
        study = [
            StudyRun(name, _of_seed(run, seed), run.labels) for name, (run, seed) in pieces.items()
        ]
        owners = {name: run for name, (run, _) in pieces.items()}
        watcher = _OfSeeds(observer, owners, folder)
        run_study(folder / FOLDER, study, observer=watcher, jobs=count)
    except BaseException as problem:
        for run in found:
            study_run.note_stop(folder, run)
        if isinstance(problem, Stopped):
            raise Stopped(folder, 0, 0) from None
        raise
    finally:
        collect_seeds(folder)


def collect_seeds(folder: Path) -> None:
    """Move all seeds of the hidden study into the folders of their runs."""
    inner = folder / FOLDER
    if _has_links(folder / "cells", inner, inner / "cells"):
        return
    for there in (inner / "cells").glob("*"):
        if found := NAME.fullmatch(there.name):
            _move(there, folder / "cells" / found["run"], int(found["seed"]))
    shutil.rmtree(inner, ignore_errors=True)


def long_runs(runs: Sequence[StudyRun], jobs: int | str) -> list[StudyRun]:
    """Return the runs that would keep one process busy while others have no work."""
    each = [_of_seed(run, seed) for run in runs for seed in run.config.all_seeds]
    if str(jobs) == "1" or (count := choose_jobs(jobs, each)) < 2:
        return []
    costs = [study_run.cost_of(run.config) for run in runs]
    least = max(LONG, sum(costs) / count / 2)
    pairs = zip(runs, costs, strict=True)
    return [run for run, cost in pairs if cost >= least and trains_seeds_in_turn(run)]


def trains_seeds_in_turn(run: StudyRun) -> bool:
    """Whether a process trains the seeds of a run one after another, and another process could."""
    given = run.method, run.data, run.watch
    if run.config.seeds < 2 or run.light or any(one is not None for one in given):
        return False
    return not study_run.on_gpu(run.config) or study_run.has_batches(run.config)


def _name(run: StudyRun, seed: int) -> str:
    return f"{run.name}.{seed}"


def _of_seed(run: StudyRun, seed: int) -> RunConfig:
    return msgspec.structs.replace(run.config, seed=seed, seeds=1)


def _move(source: Path, to: Path, seed: int) -> None:
    """Move the folder of a seed, unless the other run has a checkpoint of it."""
    ours, theirs = source / f"seed-{seed}", to / f"seed-{seed}"
    if _has_links(source, to, ours, theirs) or (to.exists() and not to.is_dir()):
        return
    if not (ours / CHECKPOINT).exists() or (theirs / CHECKPOINT).exists():
        return
    shutil.rmtree(theirs, ignore_errors=True)
    to.mkdir(parents=True, exist_ok=True)
    ours.rename(theirs)


def _has_links(*paths: Path) -> bool:
    """Whether a path is a link: a study moves and deletes nothing outside its folder."""
    return any(path.is_symlink() for path in paths)


class _OfSeeds(StudyObserver):
    """Shows the runs of single seeds as progress of the runs that they belong to."""

    def __init__(
        self, observer: StudyObserver, owners: Mapping[str, StudyRun], folder: Path
    ) -> None:
        self.observer, self.owners, self.folder = observer, owners, folder
        self.shown: dict[str, _Seeds] = {}

    def parallel(self, jobs: int, threads: int) -> None:
        self.observer.parallel(jobs, threads)

    def run(self, run: StudyRun) -> Observer:
        owner = self.owners[run.name]
        if owner.name not in self.shown:
            file = self.folder / "cells" / owner.name / PROGRESS
            self.shown[owner.name] = _Seeds(self.observer.run(owner), owner.config.seeds, file)
        return _Seed(self.shown[owner.name], run.config.seed)

    def should_stop(self) -> bool:
        return self.observer.should_stop()


class _Seeds:
    """The observer of a run, its progress.json, and the finished rounds of its seeds."""

    def __init__(self, observer: Observer, count: int, file: Path) -> None:
        self.observer, self.count, self.file = observer, count, file
        self.done: dict[int, int] = {}

    def progress(self, seed: int, progress: Json) -> None:
        """Show the progress of a seed as a part of the run."""
        self.done[seed] = progress["done"]
        now = {**progress, "done": sum(self.done.values())}
        now["total"] = progress["total"] * self.count
        write_atomically(self.file, json.dumps(now).encode())  # for `atoll watch`
        if isinstance(self.observer, ReadsFiles):
            self.observer.progress(now)


class _Seed(Observer):
    """Follows one seed of a run."""

    def __init__(self, seeds: _Seeds, seed: int) -> None:
        self.seeds, self.seed = seeds, seed

    def notes(self, notes: Iterable[str]) -> None:
        if isinstance(self.seeds.observer, ReadsFiles):
            self.seeds.observer.notes(list(notes))

    def progress(self, progress: Json) -> None:
        self.seeds.progress(self.seed, progress)

    def should_stop(self) -> bool:
        return self.seeds.observer.should_stop()
