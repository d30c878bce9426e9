"""Several runs at once: those that differ in data, noise and numbers alone are one program.

Seeds, and points of a grid of hyper-parameters, are one more axis around the clients: `vmap` of a
whole round (`Run.play`). Each run's numbers stand in the method as `Varied`. What a round must not
do to be recorded, it must not do here either; runs for which that fails go on one by one.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import AtollError, ConfigError
from atoll.core.graph import Graph
from atoll.core.tree import Tree, stack, take, tree_map, unstack, vmap_trees
from atoll.core.vmap.varied import Points, Undecided, points
from atoll.engines.base import engine_name, runs_at_once
from atoll.engines.fused import Fused, stack_graphs
from atoll.engines.recording import Recording, Tape, new_pool, no_reads, shapes
from atoll.engines.simulation import Simulation
from atoll.experiment.history import History
from atoll.experiment.model import Trees
from atoll.experiment.replay import (
    Round,
    Take,
    check_place,
    fetched,
    first_line,
    rounds_ahead,
    shown,
)
from atoll.experiment.rounds import Experiment, Run, Saver

log = logging.getLogger(__name__)


def can_be_one(experiments: Sequence[Experiment]) -> str:
    """Why these runs cannot be one program; "" if nothing is known against it."""
    first = experiments[0]
    alike = [
        replace(e, method=first.method, federation=first.federation, seed=first.seed)
        for e in experiments
    ]
    sizes = {len(e.federation) for e in experiments}
    graphs = [graph for e in experiments for graph in e.federation.graphs]
    reasons = {
        "there is one run": len(experiments) < 2,
        f"engine {engine_name(first.engine)} runs clients one by one": not runs_at_once(
            first.engine
        ),
        "they differ in more than seed, data and hyper-parameters": any(
            other != first for other in alike
        ),
        "rounds are not to be recorded": first.replay is False,
        "they need equally many clients": len(sizes) > 1,
        "their clients have different numbers": any(
            e.federation.numbers != first.federation.numbers for e in experiments
        ),
        "mini-batches are cut client by client": any(graph.batch_size for graph in graphs),
    }
    try:
        points([e.method for e in experiments])
    except Undecided as reason:
        reasons[str(reason)] = True
    return next((reason for reason, holds in reasons.items() if holds), "")


class Sweep:
    """Runs under way, side by side.

    Attributes:
        runs: Their histories grow together. Server and states of a run are up to date only after
            `settle`.
        apart: Why the runs go on one by one; "" as long as they are one program.
    """

    def __init__(self, experiments: Sequence[Experiment]) -> None:
        self.apart = can_be_one(experiments)
        beside = 1 if self.apart else len(experiments)
        self.runs = [Run(experiment, beside=beside) for experiment in experiments]
        self.programs: list[tuple[int, ...]] = []
        self.points: Points | None = None
        self.stage: Hashable = None
        self.played = 0  # rounds of this stage
        self.failed: dict[int, AtollError] = {}
        self.carried: tuple[Tree, Tree] | None = None
        self.fixed: tuple[Tree, Tree, Tree] | None = None
        self.takes: dict[bool, Take] = {}
        self.cuda = torch.device(experiments[0].device).type == "cuda"
        self.pool = new_pool(self.cuda)
        if self.apart:
            return
        self.points = points([experiment.method for experiment in experiments])
        self.programs = _engine(self.runs[0]).programs()
        if any(_engine(run).programs() != self.programs for run in self.runs):
            self.part("their clients do not fall into the same programs")
        elif any(_engine(run).lazy for run in self.runs):
            self.part("clients are read when they are needed")

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)

    def advance(self) -> list[int]:
        """One round, or as many as can be replayed before anybody should look; whose they were."""
        if self.apart:
            # As if there had been no sweep: the first comes to its end, then the next begins.
            first = next(place for place, run in enumerate(self.runs) if not run.finished)
            self.runs[first].advance()
            return [first]
        if self._stage_of(self.runs[0].history.rounds) != self.stage:
            self._let_go()
            self.stage, self.played = self._stage_of(self.runs[0].history.rounds), 0
        # States begin in the first round; until everybody has one, no two runs need be alike.
        begun = all(_engine(run).states.begun for run in self.runs)
        if self.played == 0 or (self.carried is None and not begun):
            for place, run in enumerate(self.runs):
                with self._noted(place):
                    run.one_round()
            self.played += 1
            self._stop_if_failed()
            return list(range(len(self.runs)))
        try:
            self._advance_together(self.runs[0].history.rounds)
        except _Apart as reason:
            self.part(str(reason))
            return self.advance()
        return list(range(len(self.runs)))

    def _stage_of(self, number: int) -> Hashable:
        return self.runs[0].experiment.method.stage(number)

    def _advance_together(self, number: int) -> None:
        lead, began = self.runs[0], time.perf_counter()
        if self.carried is None:
            with _or_apart():
                # Too large, or too different: in halves or one by one they can still be run.
                carried, fixed = self._stacked()
                check_place(carried, self.runs[0].simulation.root.device)
            self.carried, self.fixed = carried, fixed
        rounds: list[Round] = []
        copies: list[tuple[Tree, Tree]] = []
        most = rounds_ahead(
            lead.experiment.rounds - number, len(self.runs) * lead.history.seconds[-1]
        )
        if lead.keeper is not None and self.carried is not None:
            most = lead.keeper.rounds_ahead(self.carried, most)
        for ahead in range(most):
            with_train = lead.scores_train(number + ahead)
            if self._stage_of(number + ahead) != self.stage:
                break
            if rounds and lead.keeper is not None and with_train in self.takes:
                assert self.carried is not None
                copies.append(lead.keeper.copied(self.carried))
            if with_train in self.takes:
                rounds.append(self._replay(self.takes[with_train], number + ahead))
            elif rounds:
                break
            else:
                rounds.append(self._rehearse(number, with_train))
        assert self.carried is not None
        self._write(rounds, began, [*copies, self.carried])

    def _stacked(self) -> tuple[tuple[Tree, Tree], tuple[Tree, Tree, Tree]]:
        """Servers and states; graphs, keys and numbers: of all runs, with an axis for them."""
        for run in self.runs:
            _engine(run).regroup()
        self.programs = _engine(self.runs[0]).programs()
        if any(_engine(run).programs() != self.programs for run in self.runs):
            raise _Apart("their clients do not fall into the same programs")
        servers = [run.server for run in self.runs]
        states = [self._states_of(_engine(run)) for run in self.runs]
        for kind, trees in (("servers", servers), ("private states", states)):
            if any(shapes(tree) != shapes(trees[0]) for tree in trees):
                raise _Apart(f"their {kind} differ in shape")
        graphs = [self._graphs(members) for members in self.programs]
        roots = torch.stack([run.simulation.root for run in self.runs])
        assert self.points is not None
        numbers = self.points.tensor(roots.device)
        for run in self.runs:
            _engine(run).stacked.clear()  # everybody's graphs are in one place now
        return (stack(servers), stack(states)), (graphs, roots, numbers)

    def _graphs(self, members: tuple[int, ...]) -> Graph:
        """The graphs of some clients in all runs: an axis for the runs, one for several clients."""
        found = [_engine(run).graphs[position] for run in self.runs for position in members]
        axes = (len(self.runs), len(members)) if len(members) > 1 else (len(self.runs),)
        return tree_map(lambda leaf: leaf.reshape(*axes, *leaf.shape[1:]), stack_graphs(found))

    def _states_of(self, engine: Fused) -> list[Tree]:
        return [engine.states.stacks.get(members) for members in self.programs]

    def _play(self, tape: Tape, with_train: bool, carried: Any, fixed: Any) -> Any:
        """One round of all runs; the tape's root and sums are each run's own."""
        lead, points = self.runs[0], self.points
        engine, simulation = _engine(lead), lead.simulation
        assert isinstance(simulation, Simulation)
        assert points is not None

        def one(
            server: Tree, states: list[Tree], graphs: list[Graph], root: Tensor, numbers: Tree
        ) -> Any:
            pairs = zip(self.programs, states, strict=True)
            engine.stacked = dict(zip(self.programs, graphs, strict=True))
            engine.states.stacks = {m: state for m, state in pairs if state is not None}
            simulation.root = root
            # Every run's tape lists the same; the last one's lists are the ones to read.
            mine = Tape(root, tape.number, tape.shown, tape.salts)
            clients = simulation.clients(tape.number, mine)
            server, outcome = lead.play(server, clients, with_train, points.at(numbers))
            found.append(mine)
            return server, self._states_of(engine), outcome

        found: list[Tape] = []
        kept = engine.stacked, engine.states.copy(), simulation.root
        try:
            servers, states, outcome = vmap_trees(one, *carried, *fixed)
        finally:
            engine.stacked, states_before, simulation.root = kept
            engine.states.restore(states_before)
        return found[-1], (servers, states), outcome

    def _rehearse(self, number: int, with_train: bool) -> Round:
        assert self.carried is not None
        root = self.runs[0].simulation.root
        blank = Tape(root, number, shown(self.stage, number))
        # Whatever goes wrong: one by one the runs give the same results, or the true error.
        with _or_apart(), no_reads(root.device) as watch:
            tape, after, outcome = self._play(blank, with_train, self.carried, self.fixed)
        if shapes(after) != shapes(self.carried):
            raise _Apart("what the server or the clients keep changes its shape")
        tape.sums.clear()  # they are in the outcome, where they have an axis for the runs
        self._record(after, tape, with_train, watch.besides(self.carried))
        self.carried = after
        return Round(number, outcome, tape)

    def _record(
        self, carried: tuple[Tree, Tree], tape: Tape, with_train: bool, keeps: list[Tensor]
    ) -> None:
        def program(servers: Tree, states: Tree, salts: Tensor) -> Tree:
            blank = Tape(tape.root, shown=tape.shown, salts=salts)
            _, after, outcome = self._play(blank, with_train, (servers, states), self.fixed)
            return *after, outcome

        salts = tape.salts_of(range(self.runs[0].experiment.rounds))
        held = keeps, self.fixed, dict(_engine(self.runs[0]).places)
        with _or_apart():
            recording = Recording(
                program, *carried, salts[0], carried=2, pool=self.pool, keeps=held
            )
        if not self.takes:
            log.info("%d runs are trained at once", len(self.runs))
        self.takes[with_train] = Take(recording, tape, salts)

    def _replay(self, recorded: Take, number: int) -> Round:
        assert self.carried is not None
        *carried, outcome = recorded.recording(*self.carried, recorded.salts[number])
        self.carried = carried[0], carried[1]
        return Round(number, tree_map(torch.clone, outcome), recorded.tape)

    def _trees(self, place: int, carried: tuple[Tree, Tree]) -> Trees:
        """One run's server and its clients' private states."""
        servers, stacks = carried
        states: list[Tree] = [None] * len(self.runs[place].history.nodes)
        for members, stacked in zip(self.programs, stacks or (), strict=bool(stacks)):
            if stacked is not None:
                rows = unstack(take(stacked, place), len(members))
                for position, state in zip(members, rows, strict=True):
                    states[position] = state
        return take(servers, place), states

    def _write(
        self, rounds: Sequence[Round], began: float, after: Sequence[tuple[Tree, Tree]]
    ) -> None:
        found = fetched(rounds)
        seconds = (time.perf_counter() - began) / len(rounds) / len(self.runs)
        self.played += len(rounds)
        for place, run in enumerate(self.runs):
            with self._noted(place):
                mine = tree_map(lambda leaf, p=place: leaf[:, p], found)
                trees = [partial(self._trees, place, carried) for carried in after]
                run.write(rounds, mine, seconds, trees)
        self._stop_if_failed()

    @contextmanager
    def _noted(self, place: int) -> Iterator[None]:
        """What goes wrong with one run waits until the others have come as far."""
        try:
            yield
        except AtollError as problem:
            if out_of_memory(problem):
                raise
            self.failed[place] = problem

    def _stop_if_failed(self) -> None:
        for place, error in self.failed.items():
            raise SeedFailed(place, self.runs[place].experiment.seed, error)

    def settle(self) -> None:
        """Give every run its own server and states, for a checkpoint or to go on alone."""
        if self.carried is None:
            return
        servers, states = tree_map(torch.clone, self.carried)
        for place, run in enumerate(self.runs):
            run.server = take(servers, place)
            for members, state in zip(self.programs, states, strict=True):
                if state is not None:
                    _engine(run).states.put(members, take(state, place))

    def finish(self) -> None:
        """Everybody's own server and states, and nothing that was recorded."""
        self._let_go()
        for run in self.runs:
            run.finish()

    def _let_go(self) -> None:
        self.settle()
        self.carried = self.fixed = None
        self.takes.clear()
        self.pool = new_pool(self.cuda)

    def part(self, reason: str) -> None:
        """Go on one by one."""
        self._let_go()
        self.apart = first_line(reason)
        log.info("the runs are trained one by one, because %s", self.apart)


class _Apart(Exception):
    """Why runs cannot be one program."""


class SeedFailed(AtollError):
    """One of several runs that were trained at once went wrong.

    Attributes:
        place: Which.
    """

    def __init__(self, place: int, seed: int, error: AtollError) -> None:
        super().__init__(f"seed {seed}: {error}")
        self.place, self.seed, self.error = place, seed, error


class Parted(Exception):
    """Why runs that were to be one program were not brought to their end."""


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, is that the device's memory is full."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error is not None


@contextmanager
def _or_apart() -> Iterator[None]:
    """What goes wrong within keeps runs from being one program; full memory may do for fewer."""
    try:
        yield
    except Exception as reason:
        if isinstance(reason, _Apart) or out_of_memory(reason):
            raise
        raise _Apart(str(reason)) from reason


def _engine(run: Run) -> Fused:
    engine = run.simulation.engine
    assert isinstance(engine, Fused)
    return engine


def run_together(
    experiments: Sequence[Experiment],
    *,
    checkpoints: Sequence[tuple[Path | None, str]] | None = None,
    every_seconds: float = 10.0,
    on_round: Callable[[int, History], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    or_not_at_all: bool = False,
) -> list[Run]:
    """Run experiments that differ in seed, data and numbers alone, at once where possible.

    Where memory is too small for all, they are run in halves.

    Args:
        experiments: Alike but for seed, federation and numbers among the hyper-parameters.
        checkpoints: For each a file, or None, and a fingerprint (`Experiment.run`).
        every_seconds: Least time between two checkpoints.
        on_round: Called with an experiment's place and history after one or several rounds.
        should_stop: Asked then; True saves and returns those that were begun.
        or_not_at_all: Save and raise `Parted` where they would have to be run one by one.

    Raises:
        SeedFailed: One went wrong; the others are saved.
    """
    if any(e.rounds < 1 for e in experiments):
        raise ConfigError(f"rounds is {experiments[0].rounds}; give at least 1")
    files = checkpoints or [(None, "")] * len(experiments)
    waiting, done = [range(len(experiments))], list[Run]()
    while waiting and all(run.finished for run in done):
        places = waiting.pop(0)
        some = [(place, experiments[place], files[place]) for place in places]
        try:
            done += _run_some(some, every_seconds, on_round, should_stop, or_not_at_all)
            continue
        except Exception as error:
            if len(places) == 1 or not out_of_memory(error):
                raise
        # Here, where nothing holds on to what did not fit.
        gc.collect()
        torch.cuda.empty_cache()
        log.info("%d runs need more memory than there is; half of them may do", len(places))
        half = len(places) // 2
        waiting[:0] = [places[:half], places[half:]]
    return done


def _run_some(
    some: Sequence[tuple[int, Experiment, tuple[Path | None, str]]],
    every_seconds: float,
    on_round: Callable[[int, History], None] | None,
    should_stop: Callable[[], bool] | None,
    or_not_at_all: bool,
) -> list[Run]:
    """`run_together` of experiments that may fit into memory, each with its place and its file."""
    places, experiments, files = zip(*some, strict=True)
    sweep = Sweep(experiments)
    for run, (path, fingerprint) in zip(sweep.runs, files, strict=True):
        run.start_from(path, fingerprint)
    if len({run.history.rounds for run in sweep.runs}) > 1:
        sweep.part("they were stopped after different numbers of rounds")
    saver = Saver(
        [(run, *file) for run, file in zip(sweep.runs, files, strict=True)],
        every_seconds,
        before=sweep.settle,
    )
    while saver.goes_on(should_stop):
        if sweep.apart and or_not_at_all and len(sweep.runs) > 1:
            saver.save()
            raise Parted(sweep.apart)
        try:
            moved = sweep.advance()
        except SeedFailed as failed:
            # The others are in order: kept, so that they can be brought to their end.
            saver.save(leave_out=[sweep.runs[place] for place in sweep.failed])
            raise SeedFailed(places[failed.place], failed.seed, failed.error) from failed.error
        for place in moved:
            if on_round is not None:
                on_round(places[place], sweep.runs[place].history)
    sweep.finish()
    return sweep.runs
