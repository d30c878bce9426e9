"""Recording and exact replay of rounds, of one run or of several runs at once.

The first round runs eagerly, because private states begin in it. Several runs play it at once if
they can. The second round is a rehearsal, which stops if Python waits for a number. A complete
rehearsal counts as a round and is recorded. Later rounds of the same kind, with or without scores
of the training part, are replays. After a stopped rehearsal of one run, only the clients' steps are
recorded. Several runs then continue one by one. If a replayed round had a rare event
(`Clients.happens`), the rounds before it are replayed again, and it is played eagerly. In each
stage of a method all this starts anew. Several runs that differ only in data, noise and
hyper-parameters that are floats (`Varied`) are one program: `vmap` of a round.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from atoll.core.errors import AtollError, ServerDiverged
from atoll.core.graph import Graph
from atoll.core.method import Method
from atoll.core.tree import Tree, leaves, stack, take, tree_map, unstack
from atoll.core.vmap.stacks import vmap_trees
from atoll.core.vmap.varied import Points
from atoll.engines.base import Members, Recordable
from atoll.engines.clients import Backend, Participants, client_diverged
from atoll.engines.recording import (
    NotRecordable,
    Recording,
    Tape,
    copied,
    new_pool,
    no_reads,
    shapes,
)
from atoll.engines.stacking import stack_graphs

log = logging.getLogger(__name__)

MOMENT = 0.2  # seconds of replays before their results are read
MOST_AHEAD = 50  # rounds whose scores wait on the device
MOST_TRIES = 3
"""After so many rehearsals that change a shape of the server's tree or states, none follows."""
OFTEN = 2  # times that a step runs in an eager round before it is recorded there
FULL = re.compile("out of memory|ALLOC_FAILED|INSUFFICIENT_RESOURCES")
OTHER_PROGRAMS = "their clients do not fall into the same programs"
T = TypeVar("T")
Outcome = TypeVar("Outcome")
Found_co = TypeVar("Found_co", covariant=True)
States = dict[Members, Tree]
Graphs = dict[Members, Graph] | None
Carried = tuple[Tree, States]
"""The state between two rounds: the server's tree and each program's private states."""
Played = tuple[Tape, Carried, Tree, Tensor | None]  # tape, next state, outcome and doubt


class Playable(Protocol[Found_co]):
    """A run whose rounds can be played without reading their scores."""

    server: Tree

    @property
    def simulation(self) -> Backend: ...
    def play(
        self, server: Tree, everyone: Participants, with_train: bool, method: Method | None = None
    ) -> tuple[Tree, Found_co]:
        """Return the server's next tree and the scores, with the training part if requested."""


@dataclass(frozen=True)
class Round(Generic[Outcome]):
    """A round that was played."""

    number: int
    outcome: Outcome
    tape: Tape | None = None  # None if the round has already stored everything
    after: Carried | None = None  # for `Replay.trees`; None if it was overwritten
    doubt: Tensor | None = None  # true, in some run, if a rare event happened (`happens`)

    def problem(self, finite: Tensor | None, positions: Sequence[int]) -> AtollError | None:
        """Return the error that an eager run would have raised in this round, or None."""
        found = None if self.tape is None or finite is None else self.tape.first_problem(finite)
        if found is None:
            return None
        check, name, row = found
        if check.step:
            position = positions[row] if check.sampled else row
            return client_diverged(position, check.step, self.number, name)
        return ServerDiverged(self.number, check.problem)


@dataclass(frozen=True)
class Take:
    """A recorded round: its program, its `Tape` of keys and checks, and the salts of all rounds."""

    recording: Recording
    tape: Tape
    salts: Tensor


class Replay(Generic[Outcome]):
    """Play the rounds of one run, or of several with other seeds, data and numbers (`points`)."""

    def __init__(
        self,
        runs: Sequence[Playable[Outcome]],
        rounds: int,
        stage_of: Callable[[int], Hashable],
        points: Points[Method] | None = None,
    ) -> None:
        self.runs, self.rounds, self.stage_of, self.points = runs, rounds, stage_of, points
        self.lead, self.root = runs[0], runs[0].simulation.root
        self.everyone = torch.arange(len(self.lead.simulation.federation), device=self.root.device)
        engines = [run.simulation.engine for run in runs]
        self.engines = [engine for engine in engines if isinstance(engine, Recordable)]
        assert len(self.engines) == len(runs)
        self.stage: Hashable = None
        self.stage_begun = False
        self.carried: Carried | None = None
        self.fixed: tuple[Graphs, Tensor, Tree] = None, self.root, None
        self.takes: dict[bool, Take] = {}
        self.tries = 0
        self.doubting = False  # whether rounds have doubts
        self.doubted = -1  # the round that must be played eagerly because of a doubt
        self.steps = False  # whether steps are recorded, because no round can be
        self.how = ""  # a sentence for the log
        self.refused = ""  # why several runs cannot be one program
        self.pool = new_pool(self.root.is_cuda)
        if len(runs) > 1 and any(engine.lazy for engine in self.engines):
            self.refused = "clients are read when they are needed"
        elif len(runs) > 1 and not self._same_programs():
            self.refused = OTHER_PROGRAMS

    def advance(
        self, number: int, kinds: Sequence[bool], copy: Callable[[Carried], Carried] | None = None
    ) -> list[Round[Outcome]]:
        """Play a round, and as many later rounds as can be replayed without reading outcomes.

        The list is empty if the round must be played eagerly. `kinds` contains, for each round,
        whether the training part is scored. `copy` copies server and states (`Round.after`) before
        the next replay overwrites them.
        """
        if self.stage_of(number) != self.stage:
            self.let_go()
            self.stage, self.stage_begun = self.stage_of(number), False
        first, self.stage_begun = not self.stage_begun, True
        if first:
            return self._first(number, kinds[0])
        if number == self.doubted:
            self.settle()
            self.carried = None
            return []
        if not self._can_begin(number, kinds[0]):
            return []
        before = copied(self.carried) if self.doubting else self.carried
        rounds = self._ahead(number, kinds, copy)
        if (sure := _before_doubts(rounds)) < len(rounds):
            self.doubted, self.carried = number + sure, before
            rounds = self._ahead(number, kinds[:sure], copy)
        if rounds:
            rounds[-1] = replace(rounds[-1], after=self.carried)
        if len(self.runs) == 1 or number == self.doubted:
            self.settle()
            self.carried = None  # a single run may play its next round eagerly
        return rounds

    def _ahead(
        self, number: int, kinds: Sequence[bool], copy: Callable[[Carried], Carried] | None
    ) -> list[Round[Outcome]]:
        """Rehearse or replay rounds, as far as possible."""
        rounds: list[Round[Outcome]] = []
        for ahead, with_train in enumerate(kinds):
            here = number + ahead
            if self.stage_of(here) != self.stage:
                break
            if with_train in self.takes:
                if rounds and copy is not None and self.carried is not None:
                    rounds[-1] = replace(rounds[-1], after=copy(self.carried))
                rounds.append(self._replay(self.takes[with_train], here))
            elif rounds:
                break  # a round that cannot be replayed would have to wait
            else:
                rounds += self._rehearse(here, with_train)
                if not rounds:
                    break
        return rounds

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Record steps that repeat often, inside an eager round of a single run."""
        if not self.steps:
            self.engines[0].record_steps(OFTEN)
        try:
            yield
        finally:
            if not self.steps:
                self.engines[0].record_steps(None)

    def trees(self, played: Round[Outcome], place: int = 0) -> tuple[Tree, list[Tree]]:
        """Return one run's server and its clients' private states after a round."""
        assert played.after is not None
        server, stacks = played.after if len(self.runs) == 1 else take(played.after, place)
        states: list[Tree] = [None] * len(self.lead.simulation.federation)
        for members, stacked in (stacks or {}).items():
            rows = [None] * len(members) if stacked is None else unstack(stacked, len(members))
            for position, state in zip(members, rows, strict=True):
                states[position] = state
        return server, states

    def _first(self, number: int, with_train: bool) -> list[Round[Outcome]]:
        """Play the first round of a stage in all runs at once. Return [] if that is impossible."""
        if len(self.runs) == 1 or self.refused:
            return []
        try:
            if not all(engine.regroup() for engine in self.engines):
                return []
            blank = Tape(self.root, number, number)
            tape, after, outcome, doubt = self._play(blank, with_train, self._gather())
            if doubt is not None and bool(doubt.any()):
                return []
        except Exception as reason:
            if out_of_memory(reason):
                raise
            self.fixed = None, self.root, None
            return []  # each run plays it by itself, with the same result or the real error
        self.carried = after
        return [Round(number, outcome, tape, after)]

    def _can_begin(self, number: int, with_train: bool) -> bool:
        """Return whether a round can be rehearsed or replayed. If so, gather its inputs."""
        alone = len(self.runs) == 1
        if with_train not in self.takes:
            useless = alone and number == self.rounds - 1
            if useless or self.refused or self.tries >= MOST_TRIES:
                return False
        if alone or self.carried is None:
            # Until all clients have a state, or no client has, programs change between rounds.
            if not all(engine.regroup() for engine in self.engines):
                return False
            self.carried = self._attempt(self._gather)
        return self.carried is not None

    def _gather(self) -> Carried:
        """Return server and states, stacked if there are several runs.

        If so, also stack the constant inputs of all rounds: graphs, root keys, hyper-parameters.
        """
        servers = [run.server for run in self.runs]
        states = [engine.program_states() for engine in self.engines]
        if len(self.runs) == 1:
            return servers[0], states[0]
        if not self._same_programs():
            raise NotRecordable(OTHER_PROGRAMS)
        for kind, trees in (("servers", servers), ("private states", states)):
            if any(shapes(tree) != shapes(trees[0]) for tree in trees):
                raise NotRecordable(f"their {kind} differ in shape")
        if self.fixed[0] is None:
            graphs = {members: self._graphs(members) for members in states[0]}
            roots = torch.stack([run.simulation.root for run in self.runs])
            assert self.points is not None
            self.fixed = graphs, roots, self.points.tensor(roots.device)
        for engine in self.engines:
            engine.forget_stacks()  # the stack above contains the graphs of all runs
        return stack(servers), stack(states)

    def _same_programs(self) -> bool:
        return len({tuple(engine.program_states()) for engine in self.engines}) == 1

    def _graphs(self, members: Members) -> Graph:
        """Stack the graphs of all runs along an axis, and several clients along a second axis."""
        found = [engine.graphs[position] for engine in self.engines for position in members]
        axes = (len(self.runs), len(members)) if len(members) > 1 else (len(self.runs),)
        return tree_map(lambda leaf: leaf.reshape(*axes, *leaf.shape[1:]), stack_graphs(found))

    def _play(self, blank: Tape, with_train: bool, carried: Carried) -> Played:
        """Play one round of all runs as a pure function. It changes no run and no engine."""
        engine, simulation, tapes = self.engines[0], self.lead.simulation, list[Tape]()

        def one(server: Tree, states: States, graphs: Graphs, root: Tensor, row: Tree) -> Tree:
            method = None if self.points is None else self.points.at(row)
            tapes.append(Tape(root, blank.number, blank.shown, blank.salts))
            with engine.substituted(states, graphs):
                clients = Participants(simulation, blank.number, self.everyone, tape=tapes[-1])
                server, outcome = self.lead.play(server, clients, with_train, method)
                doubts = tapes[-1].doubts
                doubt = torch.stack(doubts).any() if doubts else None
                return server, engine.program_states(), outcome, doubt

        given = (*carried, *self.fixed)
        played = one(*given) if len(self.runs) == 1 else vmap_trees(one, *given)
        # After `vmap` the tape's tensors are unusable. Its lists are valid for every run.
        tapes[-1].root = blank.root
        tapes[-1].watched.clear()  # the outcome contains the results
        tapes[-1].doubts.clear()
        return tapes[-1], (played[0], played[1]), played[2], played[3]

    def _rehearse(self, number: int, with_train: bool) -> list[Round[Outcome]]:
        """Play and record the round. Return [] if it must be played eagerly."""
        assert self.carried is not None
        # Replays show a method this number, so it sees none unless it defines stages.
        shown, carried = None if self.stage is None else number, self.carried

        def watched() -> tuple[Played, list[Tensor]]:
            if any(leaf.device != self.root.device for leaf in leaves(carried)):
                # A recording for a GPU would freeze their values.
                raise NotRecordable("the server or the clients keep tensors in main memory")
            with no_reads(self.root.device) as watch:
                played = self._play(Tape(self.root, number, shown), with_train, carried)
            return played, watch.besides(carried)  # and other tensors that it used

        played = self._attempt(watched)
        if played is None:
            return []
        (tape, after, outcome, doubt), keeps = played
        if shapes(after) != shapes(self.carried):
            self.tries += 1
            if len(self.runs) > 1 or self.tries == MOST_TRIES:
                self._give_up("what the server or the clients keep changes its shape")
            return []
        self.carried, self.doubting = after, self.doubting or doubt is not None
        if number < self.rounds - 1:
            self._record(tape, with_train, keeps)
        return [Round(number, outcome, tape, doubt=doubt)]

    def _record(self, tape: Tape, with_train: bool, keeps: list[Tensor]) -> None:
        assert self.carried is not None

        def program(server: Tree, states: States, salts: Tensor) -> tuple[Tree, ...]:
            blank = Tape(self.root, shown=tape.shown, salts=salts)
            _, after, outcome, doubt = self._play(blank, with_train, (server, states))
            return *after, (outcome, doubt)

        salts = tape.salts_of(range(self.rounds))
        inputs = *self.carried, salts[0]
        read = keeps, self.fixed, self.engines[0].read_by_programs()
        make = partial(Recording, program, *inputs, carried=2, pool=self.pool, keeps=read)
        recording = self._attempt(make)
        if recording is None:
            self.pool = None  # the failed recording may have left allocations in it
            return
        self.takes[with_train] = Take(recording, tape, salts)
        many = f"{len(self.runs)} runs are trained at once"
        self._log(many if len(self.runs) > 1 else "rounds are recorded and replayed")

    def _replay(self, recorded: Take, number: int) -> Round[Outcome]:
        assert self.carried is not None
        server, states, found = recorded.recording(*self.carried, recorded.salts[number])
        self.carried = server, states
        outcome, doubt = copied(found)
        return Round(number, outcome, recorded.tape, doubt=doubt)

    def settle(self) -> None:
        """Give every run its server and states, for a checkpoint or to continue without replay."""
        if self.carried is None:
            return
        if len(self.runs) == 1:
            self.lead.server, states = self.carried
            self.engines[0].put_states(states)
            return
        servers, stacks = tree_map(torch.clone, self.carried)
        for place, (run, engine) in enumerate(zip(self.runs, self.engines, strict=True)):
            run.server = take(servers, place)
            engine.put_states(take(stacks, place))

    def let_go(self) -> None:
        """Settle, and free all recordings of rounds."""
        self.settle()
        self.carried, self.fixed = None, (None, self.root, None)
        self.takes.clear()
        self.pool = new_pool(self.root.is_cuda)

    def finish(self) -> None:
        """Settle, and free all recordings of rounds and of steps."""
        self.let_go()
        for engine in self.engines:
            engine.record_steps(None)

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """Return the result of some work. If it fails, return None and record no more rounds."""
        # Played eagerly, and one by one, the runs give the same results, or the real error. Only
        # full memory is an error at once if there are several runs, because half may fit.
        try:
            return work()
        except Exception as reason:
            if len(self.runs) > 1 and out_of_memory(reason):
                raise
            self._give_up(str(reason))
            return None

    def _give_up(self, reason: str) -> None:
        # The first line is short enough for the log.
        self.tries, reason = MOST_TRIES, (reason.strip().splitlines() or ["no reason given"])[0]
        if len(self.runs) > 1:
            self.refused = reason
        elif self.takes:
            log.info("rounds of one kind are not recorded: %s", reason)
        else:
            self.steps = True
            self.engines[0].record_steps(1)
            self._log(
                f"no round is recorded as a whole, because {reason}; the clients' steps are, and "
                "the server runs between them"
            )

    def _log(self, how: str) -> None:
        if how != self.how:
            log.info("%s", how)
        self.how = how


def _before_doubts(rounds: Sequence[Round[Outcome]]) -> int:
    """Return how many rounds come before the first rare event in any run."""
    doubts = [played.doubt for played in rounds if played.doubt is not None]
    if not doubts:
        return len(rounds)
    found = torch.stack(doubts).reshape(len(doubts), -1).any(1).tolist()
    return found.index(True) if True in found else len(rounds)


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, is that the device's memory is full."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        # Libraries other than torch's allocator report it in other words.
        if isinstance(error, RuntimeError) and FULL.search(str(error)):
            return True
        error = error.__cause__
    return error is not None


def rounds_ahead(left: int, seconds: float) -> int:
    """Return how many rounds of `seconds` each to replay before their results are read."""
    return max(1, min(left, MOST_AHEAD, int(MOMENT / max(seconds, 1e-6))))


def fetched(rounds: Sequence[Round[Outcome]]) -> Outcome:
    """Return the stacked outcomes of several rounds of one kind, in main memory."""
    outcomes = [played.outcome for played in rounds]
    if any(len(leaves(outcome)) != len(leaves(outcomes[0])) for outcome in outcomes):
        raise ValueError("only rounds of one kind can be read together")
    found: Outcome = tree_map(torch.Tensor.cpu, stack(outcomes))
    return found
