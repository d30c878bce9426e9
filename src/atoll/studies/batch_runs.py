"""Points of a grid at once: configurations that differ in numbers alone are one program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from atoll.core.errors import ConfigError
from atoll.core.task import GRAPHS, NODES
from atoll.core.vmap.varied import Undecided, points
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig, resolve
from atoll.experiment.hardware import choose_device, tuned_process
from atoll.experiment.problem import Problem, make_federation
from atoll.experiment.result import Result
from atoll.experiment.run import SAVE_EVERY, Divide, Observer, Plan, Silent, Stopped
from atoll.experiment.sweep import Parted, can_be_one, run_together


def on_gpu(config: RunConfig) -> bool:
    """Whether a configuration runs on a GPU, where points at once cost little more than one."""
    try:
        return choose_device(config.device).type == "cuda"
    except ConfigError:
        return False  # whoever runs it says so


def why_apart(one: RunConfig, other: RunConfig) -> str:
    """Why two configurations cannot be one program; "" if nothing is known against it yet."""
    if one.objects:
        return "they are made of Python objects"
    try:
        one, other = resolve(one)[0], resolve(other)[0]
        if msgspec.structs.replace(other, set=one.set) != one:
            return "they differ in more than hyper-parameters"
        task = (NODES if one.batch_size is None else GRAPHS).name
        points([build_method(config, 1, 2, task) for config in (one, other)])
    except (ConfigError, Undecided) as reason:
        return str(reason)
    return ""


@tuned_process()
def run_configs(
    configs: Sequence[RunConfig],
    *,
    outs: Sequence[Path | None] | None = None,
    observers: Sequence[Observer] | None = None,
    resuming: bool = False,
    save_every: float = SAVE_EVERY,
    log: str | Sequence[str] = (),
    divide: Divide | None = None,
) -> list[Result]:
    """Run all seeds of configurations that differ in numbers alone, in one program.

    Each has the results, files and checkpoints that `run_config` would give it.

    Args:
        configs: What to run.
        outs: A folder for each.
        observers: Each hears about its own.
        resuming: Whether the folders may hold runs that go on.
        save_every: Least seconds between two checkpoints.
        log: Where else the numbers of every round go (`experiment.loggers.base.LOGS`).
        divide: In the place of `make_federation`.

    Raises:
        Parted: They cannot be one program; what was done is saved, and `run_config` goes on there.
        SeedFailed: One went wrong, the run at its `place`, where each configuration has as many
            places as seeds. The others are saved.
        Stopped: An observer stopped them.
    """
    shared = _Once(divide or make_federation)
    folders = outs or [None] * len(configs)
    hearers = observers or [Silent() for _ in configs]
    plans = [
        Plan(
            Problem.of(config),
            out=out,
            observer=observer,
            resuming=resuming,
            save_every=save_every,
            log=log,
            divide=shared,
        )
        for config, out, observer in zip(configs, folders, hearers, strict=True)
    ]
    rows = [(plan, experiment) for plan in plans for experiment in plan.experiments()]
    experiments = [experiment for _, experiment in rows]
    reason = can_be_one(experiments)
    if reason:
        raise Parted(reason)
    runs = run_together(
        experiments,
        checkpoints=[plan.checkpoint(experiment) for plan, experiment in rows],
        every_seconds=save_every,
        on_round=lambda at, history: rows[at][0].heard.round(experiments[at].seed, history),
        should_stop=lambda: True in [plan.heard.should_stop() for plan in plans],  # all note it
        or_not_at_all=True,
    )
    results = []
    for plan in plans:
        mine = [run for run, (owner, _) in zip(runs, rows, strict=False) if owner is plan]
        if len(mine) < plan.config.seeds:  # they were stopped before its turn came
            raise Stopped(plan.out, plan.config.seed, 0)
        results.append(plan.result([plan.seed_result(run) for run in mine]))
    return results


class _Once:
    """A federation of each seed, made once: configurations of one grid have the same."""

    def __init__(self, divide: Divide) -> None:
        self.divide = divide
        self.made: dict[int, Any] = {}

    def __call__(
        self, config: RunConfig, rules: Any, seed: int, data: Any, asked: RunConfig
    ) -> Any:
        if seed not in self.made:
            self.made[seed] = self.divide(config, rules, seed, data, asked)
        federation, notes, completed = self.made[seed]
        return federation, notes, msgspec.structs.replace(completed, set=config.set)
