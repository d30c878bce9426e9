"""Training of several runs as one program, if only data, seed and float settings differ."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from atoll.core.errors import AtollError, DeviceFull
from atoll.core.minibatch import is_cut
from atoll.core.tree import tree_map
from atoll.core.vmap.varied import Undecided, points
from atoll.engines.base import engine_name, runs_at_once
from atoll.engines.prepare import forget_ready
from atoll.engines.replay import Replay, fetched, out_of_memory
from atoll.engines.stacking import CHUNK
from atoll.experiment.hardware import Heap, release_memory
from atoll.experiment.history import History
from atoll.experiment.metrics import Outcome
from atoll.experiment.rounds import Experiment, Run, Saver, stage_of

log = logging.getLogger(__name__)

ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")


def why_one_by_one(experiments: Sequence[Experiment]) -> str:
    """Return why these runs cannot be one program, or "" if no reason is known."""
    first, federations = experiments[0], [e.federation for e in experiments]
    numbers = first.federation.numbers
    one_by_one = f"engine {engine_name(first.engine)} runs clients one by one"
    reasons = {
        "there is one run": len(experiments) < 2,
        one_by_one: not runs_at_once(first.engine),
        "they differ in more than seed, data and hyper-parameters": any(
            replace(e, method=first.method, federation=first.federation, seed=first.seed) != first
            for e in experiments
        ),
        "rounds are not to be recorded": first.replay is False,
        "they need equally many clients": len(set(map(len, federations))) > 1,
        "their clients have different numbers": any(e.numbers != numbers for e in federations),
        "mini-batches are cut client by client": any(
            is_cut(graph, e.federation.batching if e.batching is None else e.batching)
            for e in experiments
            for graph in e.federation.graphs
        ),
    }
    try:
        points([e.method for e in experiments])
    except Undecided as reason:
        reasons[str(reason)] = True
    return next((reason for reason, holds in reasons.items() if holds), "")


class Sweep:
    """Several running experiments. Their servers and states are current only after `settle`."""

    def __init__(self, experiments: Sequence[Experiment]) -> None:
        self.apart = why_one_by_one(experiments)  # "" as long as they are one program
        runs_per_device = 1 if self.apart else len(experiments)
        self.runs = [Run(experiment, runs_per_device=runs_per_device) for experiment in experiments]
        self.failed: dict[int, AtollError] = {}
        self.replay: Replay[Outcome] | None = None
        if not self.apart:
            methods, rounds = [one.method for one in experiments], experiments[0].rounds
            self.replay = Replay(self.runs, rounds, methods[0].stage, points(methods))
            if self.replay.refused:
                self.part(self.replay.refused)

    def advance(self) -> list[int]:
        """Play one round, or several replayed ones. Return the positions of the advanced runs."""
        if self.replay is None:
            # As without a sweep: the first run finishes before the next one begins.
            first = next(place for place, run in enumerate(self.runs) if not run.finished)
            self.runs[first].advance()
            return [first]
        lead, began = self.runs[0], time.perf_counter()
        copy = None if lead.keeper is None else lead.keeper.copied
        kinds = lead.kinds_ahead(len(self.runs))
        with lead.clock.stage(stage_of(self.replay, kinds)):
            rounds = self.replay.advance(lead.history.rounds, kinds, copy)
        if not rounds and self.replay.refused:
            self.part(self.replay.refused)
            return self.advance()
        # Read once for all runs. Each run then takes its row.
        with lead.clock.stage("scoring"):
            found = fetched(rounds) if rounds else None
        seconds = (time.perf_counter() - began) / max(1, len(rounds)) / len(self.runs)
        for place, run in enumerate(self.runs):
            try:
                if found is None:
                    run.one_round()
                else:
                    own = tree_map(lambda leaf, p=place: leaf[:, p], found)
                    with lead.clock.stage("scoring"):
                        run.write(rounds, own, seconds, partial(self.replay.trees, place=place))
            except AtollError as problem:
                if out_of_memory(problem):
                    raise
                self.failed[place] = problem  # it waits until the other runs have reached it
        for place, error in self.failed.items():
            raise SeedFailed(place, self.runs[place].experiment.seed, error)
        return list(range(len(self.runs)))

    def settle(self) -> None:
        """Give every run its server and states, for a checkpoint or to continue by itself."""
        if self.replay is not None:
            self.replay.settle()

    def finish(self) -> None:
        """Give every run its server and states, and free all recordings."""
        if self.replay is not None:
            self.replay.let_go()
        for run in self.runs:
            run.finish()

    def part(self, reason: str) -> None:
        """Train the runs one by one from now on, for this reason."""
        if self.replay is not None:
            self.replay.let_go()
        self.replay, self.apart = None, reason
        log.info("the runs are trained one by one, because %s", self.apart)


class SeedFailed(AtollError):
    """The run at `place` failed, one of several runs that were trained at once."""

    def __init__(self, place: int, seed: int, error: AtollError) -> None:
        super().__init__(f"seed {seed}: {error}")
        self.place, self.seed, self.error = place, seed, error


class Parted(Exception):
    """The reason why runs that should be one program were not finished."""


def run_together(
    experiments: Sequence[Experiment],
    *,
    checkpoints: Sequence[tuple[Path | None, str]] | None = None,
    every_seconds: float = 10.0,
    on_round: Callable[[int, History], None] = lambda place, history: None,
    should_stop: Callable[[], bool] | None = None,
    or_not_at_all: bool = False,
) -> list[Run]:
    """Run experiments: as one program if possible (`why_one_by_one`), otherwise one by one.

    If the device's memory is too small for all, they are run in halves, then with ever fewer
    clients in one program. If one client does not fit, `DeviceFull` is raised. Each run has a
    checkpoint's file, or None, and a fingerprint. `on_round` and `should_stop` are the same as in
    `Experiment.run`, but `on_round` also gets the position of the experiment. With `or_not_at_all`,
    save and raise `Parted` if the runs cannot be one program. If one run fails, save the others
    and raise `SeedFailed`.
    """
    files = checkpoints or [(None, "")] * len(experiments)

    def run_some(places: range, chunk: int) -> list[Run]:
        wanted = [experiments[place] for place in places]
        sweep = Sweep([replace(e, chunk=chunk) for e in wanted] if chunk else wanted)
        rows = [(run, *files[place]) for run, place in zip(sweep.runs, places, strict=True)]
        for run, path, fingerprint in rows:
            run.start_from(path, fingerprint)
        if len({run.history.rounds for run in sweep.runs}) > 1:
            sweep.part("they were stopped after different numbers of rounds")
        saver, heap = Saver(rows, every_seconds, before=sweep.settle), Heap()
        while saver.another_round(should_stop):
            if sweep.apart and or_not_at_all and len(places) > 1:
                saver.save()
                raise Parted(sweep.apart)
            try:
                moved = sweep.advance()
            except SeedFailed as failed:
                # Save the others, so that they can be finished.
                saver.save(leave_out=[sweep.runs[place] for place in sweep.failed])
                raise SeedFailed(places[failed.place], failed.seed, failed.error) from failed.error
            for place in moved:
                on_round(places[place], sweep.runs[place].history)
            heap.after_round()
        sweep.finish()
        return sweep.runs

    return _in_pieces(run_some, experiments)


def _in_pieces(
    run_some: Callable[[range, int], list[Run]], experiments: Sequence[Experiment]
) -> list[Run]:
    """Run all experiments. If they do not fit into memory together, run them in pieces."""
    first, clients = experiments[0], len(experiments[0].federation)
    most = min(first.chunk or CHUNK, clients) if runs_at_once(first.engine) else 1
    waiting, done = [range(len(experiments))], list[Run]()
    chunk = 0  # 0: the experiments' own, until one of them does not fit by itself
    cuda = torch.device(first.device).type == "cuda"
    while waiting and all(run.finished for run in done):
        places = waiting.pop(0)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            done += run_some(places, chunk)
            continue
        except Exception as error:
            if not out_of_memory(error):
                raise
            asked = "".join(ASKED.findall(str(error))[:1])
        # Here nothing holds references to the tensors that did not fit.
        room = free_memory(cuda)
        if (count := len(places)) > 1:
            waiting[:0] = [places[: count // 2], places[count // 2 :]]
            words = f"{count} runs need more memory than {room}; half of them may do"
        elif most > 1:
            waiting, chunk = [places, *waiting], most // 2
            words = f"{most} clients in one program need more memory than {room}; {chunk} may do"
            most = chunk
        else:
            more = f" (the last request was for {asked})" if asked else ""
            raise DeviceFull(
                f"one client's program needs more memory than {room}{more}; end other processes "
                "there (nvidia-smi lists them), take a smaller network, or use --device cpu"
            )
        log.warning("%s", words)
    return done


def free_memory(cuda: bool) -> str:
    """Free unused memory of this process, and describe how much memory is free then."""
    # The peak of this process is its memory before the refused request.
    had = torch.cuda.max_memory_allocated() if cuda else 0
    forget_ready()
    release_memory()
    if not cuda:
        return "there is"
    free, total = torch.cuda.mem_get_info()
    return (
        f"the GPU has: this process held {had / 2**30:.1f} GiB when there was no more, and now "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"
    )
