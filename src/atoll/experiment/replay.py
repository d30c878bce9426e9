"""Rounds that are recorded once and replayed (`engines.recording`), with the same numbers.

The first round runs as it is, because private states begin in it. The second is rehearsed: it
counts, but whatever would make Python wait for a number stops it. If nothing does, it is recorded,
and all later rounds are replays. Otherwise the steps of the clients are recorded one by one, and
the rest of a round runs between their replays. Where a method has several stages (`Method.stage`),
each is a beginning of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.errors import AtollError, ServerDiverged
from atoll.core.tree import Tree, leaves, record, stack, tree_map
from atoll.engines.clients import Participants, client_diverged
from atoll.engines.fused import Fused
from atoll.engines.recording import NotRecordable, Recording, Tape, new_pool, no_reads, shapes
from atoll.engines.simulation import Simulation
from atoll.experiment.evaluate import Scores

log = logging.getLogger(__name__)

MOMENT = 0.2
"""Seconds of replays before somebody looks at what they found."""

MOST_AHEAD = 50
"""Rounds whose scores wait on the device at most."""

MOST_TRIES = 3
"""Rehearsals after which a server's tree, or states, that still change their shape always will."""


@record
class Outcome:
    """What one round found.

    Attributes:
        positions: Who took part.
        scored: Who scored what was deployed: all clients that are there.
        deployed: Their scores.
        local: Scores of the local models of those who took part; None if nobody trained.
        finite: For a round with a tape: which of the numbers that it watched are finite.
    """

    positions: Tensor
    scored: Tensor
    deployed: Scores
    local: Scores | None = None
    finite: Tensor | None = None


@dataclass(frozen=True)
class Round:
    """A round that was played: what it found, and its tape unless everything is written already."""

    number: int
    outcome: Outcome
    tape: Tape | None = None

    def problem(self, finite: Tensor | None, positions: Sequence[int]) -> AtollError | None:
        """The error that this round would have been stopped with, if it had been looked at."""
        if self.tape is None or finite is None or bool(finite.all()):
            return None
        found = self.tape.first_problem(finite)
        assert found is not None
        check, name, row = found
        if check.step:
            position = positions[row] if check.drawn else row
            return client_diverged(position, check.step, self.number, name)
        return ServerDiverged(self.number, check.problem)


Play = Callable[[Tree, Participants, bool], tuple[Tree, Outcome]]
"""(server, everyone, whether the training part is scored) -> (server, outcome): one round."""


@dataclass(frozen=True)
class Take:
    """A recorded round: its program, its tape, and the salts of every round."""

    recording: Recording
    tape: Tape
    salts: Tensor


class Replay:
    """Plays the rounds of one run.

    Attributes:
        how: What became of it, for the log: a sentence.
    """

    def __init__(
        self, simulation: Simulation, play: Play, rounds: int, stage_of: Callable[[int], Hashable]
    ) -> None:
        assert isinstance(simulation.engine, Fused)
        self.simulation, self.engine = simulation, simulation.engine
        self.play, self.rounds, self.stage_of = play, rounds, stage_of
        self.stage: Hashable = None
        self.takes: dict[bool, Take] = {}
        self.tries = 0
        self.played = 0  # rounds of this stage
        self.how = ""
        self.pool = new_pool(simulation.root.is_cuda)

    def ready(self, number: int, with_train: bool) -> bool:
        """Whether a round is a replay, so that nothing waits for it."""
        return with_train in self.takes and self.stage_of(number) == self.stage

    def one(self, server: Tree, number: int, with_train: bool) -> tuple[Tree, Round]:
        """The server's next tree, and the round."""
        if self.stage_of(number) != self.stage:
            self.stage, self.played = self.stage_of(number), 0
            self.takes.clear()
            self.pool = new_pool(self.simulation.root.is_cuda)
        self.played += 1
        if with_train in self.takes:
            return self._replay(self.takes[with_train], server, number)
        useless = self.played == 1 or self.tries >= MOST_TRIES or number == self.rounds - 1
        if useless or not self.engine.states.begun:
            return self._as_it_is(server, number, with_train)
        return self._rehearse(server, number, with_train)

    def _as_it_is(self, server: Tree, number: int, with_train: bool) -> tuple[Tree, Round]:
        server, outcome = self.play(server, self.simulation.clients(number), with_train)
        return server, Round(number, outcome)

    def _rehearse(self, server: Tree, number: int, with_train: bool) -> tuple[Tree, Round]:
        states = self.engine.states
        self.engine.regroup()
        before = shapes(server), states.layout(), shapes(list(states.stacks.values()))
        kept = states.copy()
        tape = Tape(self.simulation.root, number, shown(self.stage, number))
        try:
            check_place((server, kept[1]), self.simulation.root.device)
            with no_reads(self.simulation.root.device) as watch:
                clients = self.simulation.clients(number, tape)
                after, outcome = self.play(server, clients, with_train)
        except Exception as reason:
            # Whatever it is: the round as it is gives the same result, or the true error.
            states.restore(kept)
            self._give_up(str(reason))
            return self._as_it_is(server, number, with_train)
        if before == (shapes(after), states.layout(), shapes(list(states.stacks.values()))):
            self._record(after, tape, with_train, watch.besides(server, kept[1]))
        else:
            self.tries += 1
            if self.tries == MOST_TRIES:
                self._give_up("what the server or the clients keep changes its shape")
        return after, Round(number, outcome, tape)

    def _record(self, server: Tree, tape: Tape, with_train: bool, keeps: list[Tensor]) -> None:
        states, root = self.engine.states, self.simulation.root
        names, stacks = list(states.stacks), list(states.stacks.values())

        def program(server: Tree, stacks: list[Tree], salts: Tensor) -> Tree:
            states.stacks = dict(zip(names, stacks, strict=True))
            clients = self.simulation.clients(-1, Tape(root, shown=tape.shown, salts=salts))
            server, outcome = self.play(server, clients, with_train)
            return server, list(states.stacks.values()), outcome

        salts = tape.salts_of(range(self.rounds))
        try:
            held = keeps, dict(self.engine.stacked), dict(self.engine.places)
            recording = Recording(
                program, server, stacks, salts[0], carried=2, pool=self.pool, keeps=held
            )
        except Exception as reason:
            self.pool = None  # what failed may have left something in it
            self._give_up(str(reason))
        else:
            self.takes[with_train] = Take(recording, tape, salts)
            self._tell("rounds are recorded and replayed")
        states.stacks = dict(zip(names, stacks, strict=True))

    def _replay(self, take: Take, server: Tree, number: int) -> tuple[Tree, Round]:
        states = self.engine.states
        server, stacks, outcome = take.recording(
            server, list(states.stacks.values()), take.salts[number]
        )
        states.stacks = dict(zip(states.stacks, stacks, strict=True))
        return server, Round(number, tree_map(torch.clone, outcome), take.tape)

    def forget(self) -> None:
        """Let go of what was recorded."""
        self.takes.clear()
        self.engine.recorded = None

    def _give_up(self, reason: str) -> None:
        self.tries = MOST_TRIES
        if self.takes:
            log.info("rounds of one kind are not recorded: %s", reason)
            return
        self.engine.record_steps()
        self._tell(
            f"no round is recorded as a whole, because {first_line(reason)}; the clients' steps "
            "are, and the server runs between them"
        )

    def _tell(self, how: str) -> None:
        if how != self.how:
            log.info("%s", how)
        self.how = how


def shown(stage: Hashable, number: int) -> int | None:
    """What a recorded round may know of its number: that of one like it."""
    return None if stage is None else number


def first_line(reason: str) -> str:
    """What an error says, short enough for the log."""
    return (reason.strip().splitlines() or ["no reason given"])[0]


def rounds_ahead(left: int, seconds: float) -> int:
    """How many rounds to replay before they are read, if one takes so long: a moment's worth."""
    return max(1, min(left, MOST_AHEAD, int(MOMENT / max(seconds, 1e-6))))


def check_place(tree: Tree, device: torch.device) -> None:
    """Refuse tensors in main memory: a recording for a GPU would freeze their numbers."""
    if any(leaf.device != device for leaf in leaves(tree)):
        raise NotRecordable("the server or the clients keep tensors in main memory")


def fetched(rounds: Sequence[Round]) -> Outcome:
    """What some rounds found, stacked, where Python can read it."""
    outcomes = [played.outcome for played in rounds]
    if any(len(leaves(outcome)) != len(leaves(outcomes[0])) for outcome in outcomes):
        raise ValueError("only rounds of one kind can be read together")
    return tree_map(torch.Tensor.cpu, stack(outcomes))
