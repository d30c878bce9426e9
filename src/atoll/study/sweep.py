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

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph
from atoll.core.tree import Tree, stack, take, tree_map, vmap_trees
from atoll.engines.fused import Fused, stack_graphs
from atoll.engines.recording import Recording, Tape, no_reads, shapes
from atoll.engines.simulation import Simulation
from atoll.study.experiment import (
    MOMENT,
    MOST_AHEAD,
    Experiment,
    History,
    Run,
    Saver,
    cached_rounds,
)
from atoll.study.replay import Outcome, Round, Take

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
        "they need equally many clients, at least two": len(sizes) > 1 or sizes == {1},
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
        self.runs = [Run(experiment, in_one=not self.apart) for experiment in experiments]
        self.everyone = tuple(range(len(experiments[0].federation)))
        self.played = 0
        self.carried: tuple[Tree, Tree] | None = None
        self.fixed: tuple[Tree, Tree] | None = None
        self.takes: dict[bool, Take] = {}
        cuda = torch.device(experiments[0].device).type == "cuda"
        self.pool: Any = torch.cuda.graph_pool_handle() if cuda else None

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)

    def advance(self) -> None:
        """One round of every run, or as many as can be replayed before anybody should look."""
        lead = self.runs[0]
        number = lead.history.rounds
        # States begin in the first round; until everybody has one, no two runs need be alike.
        begun = all(_engine(run).states.begun for run in self.runs)
        if self.apart or self.played == 0 or (self.carried is None and not begun):
            for run in self.runs:
                if not run.finished:
                    run.advance()
            self.played += 1
            return
        try:
            self._advance_together(number)
        except _Apart as reason:
            self._part(str(reason))
            self.advance()

    def _advance_together(self, number: int) -> None:
        lead, began = self.runs[0], time.perf_counter()
        if self.carried is None:
            self.carried, self.fixed = self._stacked()
        rounds: list[Round] = []
        for ahead in range(self._ahead()):
            with_train = lead.scores_train(number + ahead)
            if with_train in self.takes:
                rounds.append(self._replay(self.takes[with_train], number + ahead))
            elif rounds:
                break
            else:
                rounds.append(self._rehearse(number, with_train))
        self._write(rounds, began)

    def _ahead(self) -> int:
        lead = self.runs[0]
        left = lead.experiment.rounds - lead.history.rounds
        moment = MOMENT / max(len(self.runs) * lead.history.seconds[-1], 1e-6)
        return max(1, min(left, MOST_AHEAD, int(moment)))

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
        return (stack(servers), stack(states)), (stacked, roots)

    def _play(self, tape: Tape, with_train: bool, carried: Any, fixed: Any) -> Any:
        """One round of all runs; the tape's root and flags are each seed's own."""
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
        kept = engine.stacked, dict(engine.states.stacks), simulation.root
        try:
            servers, states, outcome = vmap_trees(one, *carried, *fixed)
        finally:
            engine.stacked, engine.states.stacks, simulation.root = kept
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
        tape.flags.clear()  # they are in the outcome, where they have an axis for the seeds
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
        self.takes[with_train] = Take(recording, tape, salts)
        log.info("%d seeds are trained at once", len(self.runs))

    def _replay(self, recorded: Take, number: int) -> Round:
        assert self.carried is not None
        *carried, outcome = recorded.recording(*self.carried, recorded.salts[number])
        self.carried = carried[0], carried[1]
        return Round(number, tree_map(torch.clone, outcome), recorded.tape)

    def _write(self, rounds: Sequence[Round], began: float) -> None:
        found: Outcome = tree_map(torch.Tensor.cpu, stack([r.outcome for r in rounds]))
        seconds = (time.perf_counter() - began) / len(rounds) / len(self.runs)
        self.played += len(rounds)
        for seed, run in enumerate(self.runs):
            run.write(rounds, tree_map(lambda leaf, s=seed: leaf[:, s], found), seconds)

    def settle(self) -> None:
        """Give every run its own server and states, for a checkpoint or to go on alone."""
        if self.carried is None:
            return
        servers, states = tree_map(torch.clone, self.carried)
        for seed, run in enumerate(self.runs):
            run.server = take(servers, seed)
            if states is not None:
                _engine(run).states.put(self.everyone, take(states, seed))

    def _part(self, reason: str) -> None:
        """Go on one by one."""
        self.settle()
        self.carried = self.fixed = None
        self.takes.clear()
        self.apart = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
        for run in self.runs:
            run.may_replay()
        log.info("the seeds are trained one by one, because %s", self.apart)


class _Apart(Exception):
    """Why runs cannot be one program."""


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
        on_round: Called with an experiment's place and history after each round.
        should_stop: Asked after each round; True saves and returns.
    """
    if any(e.rounds < 1 for e in experiments):
        raise ConfigError(f"rounds is {experiments[0].rounds}; give at least 1")
    sweep = Sweep(experiments)
    files = checkpoints or [(None, "")] * len(experiments)
    for run, (path, fingerprint) in zip(sweep.runs, files, strict=True):
        run.start_from(path, fingerprint)
    if len({run.history.rounds for run in sweep.runs}) > 1:
        sweep.apart = sweep.apart or "they were stopped after different numbers of rounds"
    saver = Saver([(run, *file) for run, file in zip(sweep.runs, files, strict=True)],
                  every_seconds, before=sweep.settle)  # fmt: skip
    while saver.goes_on(should_stop):
        sweep.advance()
        for place, run in enumerate(sweep.runs):
            if on_round is not None:
                on_round(place, run.history)
    sweep.settle()
    for run in sweep.runs:
        run.history.cached = cached_rounds(run.experiment.method, run.server)
    return sweep.runs
