"""How many processes a study gets, and which of its tasks comes next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.core.errors import AtollError, ConfigError
from atoll.data.archive import memory_needed
from atoll.data.public.registry import dataset_info, plain_name, sets_of_group
from atoll.experiment.config import RunConfig, saved_header
from atoll.experiment.hardware import available_memory, cores
from atoll.studies.batch_runs import on_gpu
from atoll.studies.reproduce.recipes import rough_seconds
from atoll.studies.workers import Task

AUTO = "auto"
WORTH = 20.0
"""Processor seconds below which a study is over before other processes have begun to help."""
PROCESS = 1 << 30
"""Bytes of a process with a small graph; 0.6 GiB were seen with Cora."""
COPIES = 6
"""How many times the features of a graph are in memory while clients train on it, at most."""
DEAR = 4.0
"""A task that takes so many times the usual one is on its own."""


def cost_of(config: RunConfig) -> float:
    """`rough_seconds`, also of what is not known or cannot run: nothing."""
    try:
        return rough_seconds(config)
    except AtollError:
        return 0.0  # whoever runs it says what is wrong


def check_jobs(wish: int | str) -> None:
    """Refuse what is no number of processes."""
    if wish != AUTO and not (str(wish).isdigit() and int(wish)):
        raise ConfigError(f"jobs is '{wish}'; give a number of processes, 1 or more, or auto")


def choose_jobs(wish: int | str, configs: Sequence[RunConfig]) -> int:
    """How many processes run so many configurations side by side.

    "auto" is one for each core, but no more than memory allows; one where a GPU is used, which is
    busy with one, and where all are done before other processes have begun.
    """
    if wish != AUTO:
        return max(1, min(int(wish), len(configs)))
    if len(configs) < 2 or any(on_gpu(config) for config in configs):
        return 1
    if sum(map(cost_of, configs)) < WORTH:
        return 1
    room = available_memory() // max(map(memory_of, configs))
    return max(1, min(cores(), len(configs), room))


def memory_of(config: RunConfig) -> int:
    """Bytes that a process with such a run takes, roughly."""
    path = Path(config.data).expanduser()
    try:
        if saved_header(config) is not None:
            return PROCESS + memory_needed(path)
        if path.is_dir():
            return PROCESS + COPIES * sum(one.stat().st_size for one in path.rglob("*"))
        if path.is_file():
            return PROCESS + COPIES * path.stat().st_size
        name = plain_name(config.data).lower()
        sets = [dataset_info(one) for one in sets_of_group(name) or (name,)]
    except AtollError:
        return PROCESS  # made by a generator, or given by Python
    # Features of four bytes, and two ends of eight for each edge.
    sizes = [4 * (one.nodes or 0) * (one.features or 0) + 16 * (one.edges or 0) for one in sets]
    return PROCESS + COPIES * sum(sizes)


class Schedule:
    """Tasks in an order that keeps all processes busy to the end and shares what they keep.

    Dear tasks are on their own; of the others a process goes on with its last task's kin, then
    takes a kin that nobody has begun, then helps with what is left of one.

    Args:
        tasks: All of them.
        dearest_first: For the earliest end of the whole; else the cheapest come first, for the
            most that is done in a limited time.
    """

    def __init__(self, tasks: Sequence[Task], *, dearest_first: bool = True) -> None:
        sign = -1 if dearest_first else 1
        order = sorted(tasks, key=lambda task: sign * task.cost)
        usual = sorted(task.cost for task in tasks)[len(tasks) // 2] if tasks else 0.0
        self.dear = [task for task in order if task.cost > DEAR * usual]
        self.kins: dict[str, list[Task]] = {}
        for task in order:
            if task.cost <= DEAR * usual:
                self.kins.setdefault(task.kin, []).append(task)
        self.begun: set[str] = set()
        self.dearest_first = dearest_first

    def take(self, last: Task | None) -> Task | None:
        """The next task for a process that had this one; None if all are given out."""
        if self.dear and (self.dearest_first or not self.kins):
            return self.dear.pop(0)
        if not self.kins:
            return None
        kin = last.kin if last is not None and last.kin in self.kins else self._other_kin()
        self.begun.add(kin)
        tasks = self.kins[kin]
        task = tasks.pop(0)
        if not tasks:
            del self.kins[kin]
        return task

    def _other_kin(self) -> str:
        fresh = [kin for kin in self.kins if kin not in self.begun]
        if fresh and not self.dearest_first:
            return min(fresh, key=lambda kin: self.kins[kin][-1].cost)
        return max(fresh or self.kins, key=lambda kin: sum(t.cost for t in self.kins[kin]))
