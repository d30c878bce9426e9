"""Several seeds at once: runs that differ in their data and noise alone are one program.

The seeds are one more axis around the clients: `vmap` of a whole round (`Run.play`). What a round
must not do to be recorded, it must not do here either; runs for which that fails go on one by one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import AtollError, ConfigError
from atoll.core.graph import Graph
from atoll.core.tree import Tree, stack, take, tree_map, vmap_trees
from atoll.engines.fused import Fused, stack_graphs
from atoll.engines.recording import Recording, Tape, no_reads, shapes
from atoll.engines.simulation import Simulation
from atoll.study.experiment import (
    Experiment,
    History,
    Run,
    Saver,
)
from atoll.study.replay import Round, Take, check_place, fetched, first_line, rounds_ahead

log = logging.getLogger(__name__)


def can_be_one(experiments: Sequence[Experiment]) -> str:
    """Why these runs cannot be one program; "" if nothing is known against it."""
    first = experiments[0]
    alike = [replace(e, federation=first.federation, seed=first.seed) for e in experiments]
    sizes = {len(e.federation) for e in experiments}
    graphs = [graph for e in experiments for graph in e.federation.graphs]
    reasons = {
        "there is one run": len(experiments) < 2,
        f"engine {first.engine} runs clients one by one": first.engine != "fused",
        "they differ in more than seed and data": any(other != first for other in alike),
        "rounds are not to be recorded": first.replay is False,
        "they need equally many clients, at least two": len(sizes) > 1 or sizes == {1},
        "their clients have different numbers": any(
            e.federation.numbers != first.federation.numbers for e in experiments
        ),
        "mini-batches are cut client by client": any(graph.batch_size for graph in graphs),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class Sweep:
    """Runs under way, side by side.

    Attributes:
        runs: One for each seed; their histories grow together. Server and states of a run are up to
            date only after `settle`.
        apart: Why the runs go on one by one; "" as long as they are one program.
    """

    def __init__(self, experiments: Sequence[Experiment]) -> None:
        self.apart = can_be_one(experiments)
        self.runs = [Run(experiment) for experiment in experiments]
        self.everyone = tuple(range(len(experiments[0].federation)))
        self.played = 0
        self.failed: dict[int, AtollError] = {}
        self.carried: tuple[Tree, Tree] | None = None
        self.fixed: tuple[Tree, Tree] | None = None
        self.takes: dict[bool, Take] = {}
        cuda = torch.device(experiments[0].device).type == "cuda"
        self.pool: Any = torch.cuda.graph_pool_handle() if cuda else None
        if not self.apart and any(_engine(run).programs() != [self.everyone] for run in self.runs):
            self.part("their clients are too many or too different for one program")

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
        # States begin in the first round; until everybody has one, no two runs need be alike.
        begun = all(_engine(run).states.begun for run in self.runs)
        if self.played == 0 or (self.carried is None and not begun):
            for run in self.runs:
                run.one_round()
            self.played += 1
            return list(range(len(self.runs)))
        try:
            self._advance_together(self.runs[0].history.rounds)
        except _Apart as reason:
            self.part(str(reason))
            return self.advance()
        return list(range(len(self.runs)))

    def _advance_together(self, number: int) -> None:
        lead, began = self.runs[0], time.perf_counter()
        if self.carried is None:
            try:
                self.carried, self.fixed = self._stacked()
                check_place(self.carried, self.runs[0].simulation.root.device)
            except Exception as reason:
                # Too large, or too different: one by one they can still be run.
                self.carried = self.fixed = None
                raise _Apart(str(reason)) from reason
        rounds: list[Round] = []
        left = lead.experiment.rounds - number
        for ahead in range(rounds_ahead(left, len(self.runs) * lead.history.seconds[-1])):
            with_train = lead.scores_train(number + ahead)
            if with_train in self.takes:
                rounds.append(self._replay(self.takes[with_train], number + ahead))
            elif rounds:
                break
            else:
                rounds.append(self._rehearse(number, with_train))
        self._write(rounds, began)

    def _stacked(self) -> tuple[tuple[Tree, Tree], tuple[Tree, Tree]]:
        """Servers and states, graphs and keys of all runs, with an axis for the seeds."""
        for run in self.runs:
            _engine(run).regroup()
        servers = [run.server for run in self.runs]
        states = [_engine(run).states.stacks.get(self.everyone) for run in self.runs]
        for kind, trees in (("servers", servers), ("private states", states)):
            if any(shapes(tree) != shapes(trees[0]) for tree in trees):
                raise _Apart(f"their {kind} differ in shape")
        graphs = [graph for run in self.runs for graph in _engine(run).graphs]
        seeds, clients = len(self.runs), len(self.everyone)
        stacked = tree_map(
            lambda leaf: leaf.reshape(seeds, clients, *leaf.shape[1:]), stack_graphs(graphs)
        )
        roots = torch.stack([run.simulation.root for run in self.runs])
        for run in self.runs:
            _engine(run).stacked.clear()  # everybody's graphs are in one place now
        return (stack(servers), stack(states)), (stacked, roots)

    def _play(self, tape: Tape, with_train: bool, carried: Any, fixed: Any) -> Any:
        """One round of all runs; the tape's root and sums are each seed's own."""
        lead = self.runs[0]
        engine, simulation = _engine(lead), lead.simulation
        assert isinstance(simulation, Simulation)

        def one(server: Tree, states: Tree, graph: Graph, root: Tensor) -> Any:
            engine.stacked = {self.everyone: graph}
            engine.states.stacks = {} if states is None else {self.everyone: states}
            simulation.root = root
            # Every seed's tape lists the same; the last one's lists are the ones to read.
            mine = Tape(root, tape.number, tape.salts)
            server, outcome = lead.play(server, simulation.clients(tape.number, mine), with_train)
            found.append(mine)
            return server, engine.states.stacks.get(self.everyone), outcome

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
        try:
            with no_reads(root.device):
                tape, after, outcome = self._play(
                    Tape(root, number), with_train, self.carried, self.fixed
                )
        except Exception as reason:
            # Whatever it is: one by one the runs give the same results, or the true error.
            raise _Apart(str(reason)) from reason
        if shapes(after) != shapes(self.carried):
            raise _Apart("what the server or the clients keep changes its shape")
        tape.sums.clear()  # they are in the outcome, where they have an axis for the seeds
        self._record(after, tape, with_train)
        self.carried = after
        return Round(number, outcome, tape)

    def _record(self, carried: tuple[Tree, Tree], tape: Tape, with_train: bool) -> None:
        def program(servers: Tree, states: Tree, salts: Tensor) -> Tree:
            blank = Tape(tape.root, salts=salts)
            _, after, outcome = self._play(blank, with_train, (servers, states), self.fixed)
            return *after, outcome

        salts = tape.salts_of(range(self.runs[0].experiment.rounds))
        keeps = self.fixed, dict(_engine(self.runs[0]).places)
        try:
            recording = Recording(
                program, *carried, salts[0], carried=2, pool=self.pool, keeps=keeps
            )
        except Exception as reason:
            raise _Apart(str(reason)) from reason
        if not self.takes:
            log.info("%d seeds are trained at once", len(self.runs))
        self.takes[with_train] = Take(recording, tape, salts)

    def _replay(self, recorded: Take, number: int) -> Round:
        assert self.carried is not None
        *carried, outcome = recorded.recording(*self.carried, recorded.salts[number])
        self.carried = carried[0], carried[1]
        return Round(number, tree_map(torch.clone, outcome), recorded.tape)

    def _write(self, rounds: Sequence[Round], began: float) -> None:
        found = fetched(rounds)
        seconds = (time.perf_counter() - began) / len(rounds) / len(self.runs)
        self.played += len(rounds)
        for place, run in enumerate(self.runs):
            try:
                run.write(rounds, tree_map(lambda leaf, p=place: leaf[:, p], found), seconds)
            except AtollError as problem:
                self.failed[place] = problem
        for place, error in self.failed.items():
            raise SeedFailed(self.runs[place].experiment.seed, error)

    def settle(self) -> None:
        """Give every run its own server and states, for a checkpoint or to go on alone."""
        if self.carried is None:
            return
        servers, states = tree_map(torch.clone, self.carried)
        for seed, run in enumerate(self.runs):
            run.server = take(servers, seed)
            if states is not None:
                _engine(run).states.put(self.everyone, take(states, seed))

    def finish(self) -> None:
        """Everybody's own server and states, and nothing that was recorded."""
        self._let_go()
        for run in self.runs:
            run.finish()

    def _let_go(self) -> None:
        self.settle()
        self.carried = self.fixed = None
        self.takes.clear()

    def part(self, reason: str) -> None:
        """Go on one by one."""
        self._let_go()
        self.apart = first_line(reason)
        log.info("the seeds are trained one by one, because %s", self.apart)


class _Apart(Exception):
    """Why runs cannot be one program."""


class SeedFailed(AtollError):
    """One of several seeds that were trained at once went wrong."""

    def __init__(self, seed: int, error: AtollError) -> None:
        super().__init__(f"seed {seed}: {error}")


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
) -> list[Run]:
    """Run experiments that differ in seed and data alone, at once where that is possible.

    Args:
        experiments: Alike but for seed and federation.
        checkpoints: For each a file, or None, and a fingerprint (`Experiment.run`).
        every_seconds: Least time between two checkpoints.
        on_round: Called with an experiment's place and history after one or several rounds.
        should_stop: Asked then; True saves and returns.
    """
    if any(e.rounds < 1 for e in experiments):
        raise ConfigError(f"rounds is {experiments[0].rounds}; give at least 1")
    sweep = Sweep(experiments)
    files = checkpoints or [(None, "")] * len(experiments)
    for run, (path, fingerprint) in zip(sweep.runs, files, strict=True):
        run.start_from(path, fingerprint)
    if len({run.history.rounds for run in sweep.runs}) > 1:
        sweep.part("they were stopped after different numbers of rounds")
    saver = Saver([(run, *file) for run, file in zip(sweep.runs, files, strict=True)],
                  every_seconds, before=sweep.settle)  # fmt: skip
    while saver.goes_on(should_stop):
        try:
            moved = sweep.advance()
        except SeedFailed:
            # The others are in order: kept, so that they can be brought to their end.
            saver.save(leave_out=[sweep.runs[place] for place in sweep.failed])
            raise
        for place in moved:
            if on_round is not None:
                on_round(place, sweep.runs[place].history)
    sweep.finish()
    return sweep.runs
