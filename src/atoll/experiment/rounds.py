"""One experiment: one method on one federation with one seed, round by round.

After every round each client scores the *deployed* model (from `method.deploy`) on its own graph.
Each client that took part also scores its *local* model (directly after its training). The protocol
determines which of the two a result reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from atoll.core.batching import Batching
from atoll.core.clock import OFF, Clock
from atoll.core.dp import Noised
from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.files import side_by_side
from atoll.core.message import ToEach
from atoll.core.method import Method, task_of
from atoll.core.task import ROLES, Scores
from atoll.core.tree import Tree, take, tree_map
from atoll.engines.base import EngineFactory, Recordable
from atoll.engines.clients import Backend, Participants, Simulation
from atoll.engines.codec import load_checkpoint, pack_states, save_checkpoint, unpack_states
from atoll.engines.ledger import Ledger
from atoll.engines.replay import Replay, Round, fetched, rounds_ahead
from atoll.experiment.history import History, Selection, empty_history
from atoll.experiment.metrics import Evaluator, Outcome, score_numbers, toward
from atoll.experiment.model import ModelKeeper, Trees
from atoll.experiment.privacy import spent
from atoll.experiment.warm_start import with_models

TreesAfter = Callable[[Round[Outcome]], Trees]
"""A function that returns the server's tree and the private states after a round."""


@dataclass(frozen=True)
class Experiment:
    """One method on one federation with one seed, without files and protocols.

    Attributes:
        fraction: Share of the clients that takes part in a round (rounded up, at least one).
        seed: Root of all noise: initial model, dropout, sampling.
        engine: A name among `engines.base.ENGINES`, or a factory of engines.
        chunk: Most clients in one program of the fused engine. 0: automatic.
        batching: How clients cut their training into steps. None: as the federation says.
        auc: Whether to compute the area under the ROC curve each round. None: for two classes.
        metric: A metric that the user chose. With two classes, clients count scores in bins for it.
        positive: The number of the positive class of such metrics.
        train_every: Score the training part every n rounds, and always in the last round. None: 1
            for nodes, which cost nothing, and 10 for graphs.
        compat: Names from `protocols.COMPAT`.
        start: A pair: a function that returns the models to start from, and the name of their run.
            None: random initial models.
        keep: The rule that selects the round whose model is kept (`experiment.model`), or None.
        replay: Whether to record and replay rounds (`Replay`). None: on a GPU with the fused
            engine. Elsewhere a replay repeats the same work, which only tests need.
        clock: Measures the seconds of each stage, if it is on.

    Examples:
        >>> import atoll
        >>> federation = atoll.partition(atoll.load("lagoon", clients=3))
        >>> net = atoll.nn.GCN(federation.features, federation.classes)
        >>> done = atoll.Experiment(atoll.methods.FedAvg(net), federation, rounds=4).run()
        >>> done.history.array("deployed", "accuracy", "test").shape  # rounds, clients
        (4, 3)
    """

    method: Method
    federation: Federation
    rounds: int = 100
    fraction: float = 1.0
    seed: int = 0
    engine: str | EngineFactory = "fused"
    device: torch.device | str = "cpu"
    chunk: int = 0
    batching: Batching | None = None
    auc: bool | None = None
    metric: str | None = None
    positive: int = 1
    train_every: int | None = None
    compat: tuple[str, ...] = ()
    start: tuple[Callable[[], Sequence[Tree]], str] | None = None
    keep: Selection | None = None
    replay: bool | None = None
    clock: Clock = OFF

    def run(
        self,
        *,
        checkpoint: Path | None = None,
        fingerprint: str = "",
        every_seconds: float = 10.0,
        on_round: Callable[[History], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Run:
        """Run, or continue from `checkpoint` if it exists. Its fingerprint must be the same.

        Checkpoints are written at most every `every_seconds` (0: also before the first round), at
        the end, and when stopped. `on_round` is called after each round, or after several rounds
        that were replayed together. Then `should_stop` is called. If it returns True, the run ends.
        """
        run = self.begin()
        run.start_from(checkpoint, fingerprint)
        saver = Saver([(run, checkpoint, fingerprint)], every_seconds)
        while saver.another_round(should_stop):
            run.advance()
            if on_round is not None:
                on_round(run.history)
        run.finish()
        return run

    def begin(self) -> Run:
        """Return the run before its first round."""
        return Run(self)


@dataclass(eq=False)
class Saver:
    """Save runs every few seconds, at the end, and when they are stopped."""

    runs: Sequence[tuple[Run, Path | None, str]]  # each with its checkpoint's file and fingerprint
    every_seconds: float
    before: Callable[[], None] = lambda: None
    played: int = -1  # rounds before the last save

    def __post_init__(self) -> None:
        self.time, self.pause = time.monotonic(), self.every_seconds  # last save; time between two

    def another_round(self, should_stop: Callable[[], bool] | None) -> bool:
        """Save if it is time to, and return whether another round must be played."""
        played, began = sum(run.history.rounds for run, *_ in self.runs), time.monotonic()
        stop = all(run.finished for run, *_ in self.runs) or bool(should_stop and should_stop())
        if (stop or began - self.time >= self.pause) and self.played != played:
            self.save()
            self.played, self.time = played, time.monotonic()
            # Many clients' states take long to write. Spend at most a tenth of the time on it.
            if self.every_seconds:
                self.pause = max(self.every_seconds, 9 * (self.time - began))
        return not stop

    def save(self, leave_out: Sequence[Run] = ()) -> None:
        """Write a checkpoint of every run that is not in `leave_out`."""
        with self.runs[0][0].clock.stage("saving"):
            self.before()
            side_by_side(
                partial(save_checkpoint, checkpoint, run.snapshot(fingerprint))
                for run, checkpoint, fingerprint in self.runs
                if checkpoint is not None and run not in leave_out
            )


class Run:
    """A running experiment, one of `runs_per_device` runs that share the device's memory."""

    server: Tree
    keeper: ModelKeeper | None
    replay: Replay[Outcome] | None

    def __init__(self, experiment: Experiment, *, runs_per_device: int = 1) -> None:
        self.experiment, self.runs_per_device = experiment, runs_per_device
        federation = experiment.federation
        if experiment.rounds < 1:
            raise ConfigError(f"rounds is {experiment.rounds}; give at least 1")
        check_task(experiment.method, federation)
        self.clock = experiment.clock
        with self.clock.stage("views"):
            self.simulation: Backend = self.backend()
        auc = federation.classes == 2 if experiment.auc is None else experiment.auc
        noisy = "dropout-at-eval" in experiment.compat
        bins = experiment.metric is not None and federation.classes == 2
        how = {"with_auc": auc, "with_bins": bins, "with_dropout": noisy}
        self.evaluator = Evaluator(experiment.method, **how)
        # Scoring training nodes costs nothing. Most graphs of a set are training graphs.
        self.train_every = experiment.train_every or (10 if federation.task.many_graphs else 1)
        self.history, self.server = self.no_history(), None
        self.history.ledger = self.ledger
        self.keeper = self.replay = None
        if experiment.keep is not None:
            self.keeper = ModelKeeper(experiment.keep, experiment.method, experiment.rounds)
        cuda = torch.device(experiment.device).type == "cuda"
        wished = cuda if experiment.replay is None else experiment.replay
        if wished and isinstance(self.simulation.engine, Recordable):
            self.replay = Replay([self], experiment.rounds, experiment.method.stage)

    def backend(self) -> Backend:
        """Return the backend of the clients, on this machine."""
        wanted, names = self.experiment, ("engine", "seed", "device", "chunk", "batching", "clock")
        same = {name: getattr(wanted, name) for name in names}
        together = self.runs_per_device
        return Simulation(wanted.federation, wanted.method, runs_per_device=together, **same)

    def no_history(self) -> History:
        """Return a history with the clients' sizes and no measurements."""
        return empty_history(self.experiment.federation, self.experiment.metric)

    @property
    def ledger(self) -> Ledger:
        return self.simulation.ledger

    @property
    def finished(self) -> bool:
        return self.history.rounds >= self.experiment.rounds

    def start_from(self, checkpoint: Path | None, fingerprint: str) -> None:
        """Start, or continue from the checkpoint if it exists. Refuse another fingerprint."""
        if checkpoint is None or not checkpoint.exists():
            self.start()
            return
        tree = load_checkpoint(checkpoint)
        if tree["fingerprint"] != fingerprint:
            hint = "resume with its own folder (--resume DIR) or choose another --out"
            raise DataError(f"checkpoint {checkpoint} belongs to another configuration; {hint}")
        self.restore(tree)

    def start(self) -> None:
        """Create the server's first tree."""
        method, start = self.experiment.method, self.experiment.start
        self.server = returned(method, "init", method.init(self.simulation.clients(-1)))
        if start is not None:
            self.server = with_models(method, self.server, start[0](), start[1])

    def finish(self) -> None:
        """Store results that are known only at the end, and free the memory of recordings."""
        self.history.cached = self.experiment.method.diagnostics(self.server).get("cached", [])
        if self.replay is not None:
            self.replay.finish()

    def one_round(self) -> None:
        """Train, aggregate, score."""
        began, number = time.perf_counter(), self.history.rounds
        everyone = self.simulation.clients(number)
        eager = nullcontext() if self.replay is None else self.replay.eager()
        with self.clock.stage("training"), eager:
            self.server, outcome = self.play(self.server, everyone, self.scores_train(number))
        self._read([Round(number, outcome)], began, lambda _: self.trees())

    def advance(self) -> None:
        """Play one round, or as many as can be replayed before they are read."""
        began, replay = time.perf_counter(), self.replay
        copy = None if self.keeper is None else self.keeper.copied
        rounds: list[Round[Outcome]] = []
        if replay is not None:
            kinds = self.kinds_ahead()
            with self.clock.stage(stage_of(replay, kinds)):
                rounds = replay.advance(self.history.rounds, kinds, copy)
        if replay is not None and rounds:
            self._read(rounds, began, replay.trees)
        else:
            self.one_round()

    def kinds_ahead(self, runs: int = 1) -> list[bool]:
        """Return whether each of the next rounds that may be replayed scores the training part."""
        number, seconds = self.history.rounds, self.history.seconds
        left = self.experiment.rounds - number
        ahead = rounds_ahead(left, runs * seconds[-1]) if seconds else 1
        if self.keeper is not None and ahead > 1:
            server, states = self.trees()
            ahead = self.keeper.rounds_ahead(([server] * runs, [states] * runs), ahead)
        return [self.scores_train(number + more) for more in range(ahead)]

    def trees(self) -> Trees:
        """Return the server's tree, and the private states if the kept model needs them."""
        needed = self.keeper is not None and self.keeper.reads_states
        return self.server, self.simulation.engine.export_states() if needed else None

    def scores_train(self, number: int) -> bool:
        """Return whether the training part is scored in this round."""
        return number % self.train_every == 0 or number == self.experiment.rounds - 1

    def play(
        self, server: Tree, everyone: Participants, with_train: bool, method: Method | None = None
    ) -> tuple[Tree, Outcome]:
        """Train and score one round. Results stay on the device. `method` replaces the run's."""
        method = method or self.experiment.method
        evaluator = replace(self.evaluator, method=method, with_train=with_train)
        chosen = everyone.sample(self.experiment.fraction)
        server = returned(method, "round", method.round(server, chosen))
        with self.clock.stage("scoring") if everyone.tape is None else nullcontext():
            deployed = everyone.map(evaluator.score, method.deploy(server))
            local = _score_local(method, chosen, evaluator)
        finite = None if everyone.tape is None else everyone.tape.finite()
        return server, Outcome(chosen.positions, everyone.positions, deployed, local, finite)

    def _read(self, rounds: Sequence[Round[Outcome]], began: float, after: TreesAfter) -> None:
        """Fetch and store the results of several rounds."""
        with self.clock.stage("scoring"):
            found = fetched(rounds)
            self.write(rounds, found, (time.perf_counter() - began) / len(rounds), after)

    def write(
        self, rounds: Sequence[Round[Outcome]], found: Outcome, seconds: float, after: TreesAfter
    ) -> None:
        """Store the stacked outcomes of rounds. Raise the error of the first round that failed."""
        chosen, positive = self.history.chosen, self.experiment.positive
        counts = toward(found.deployed, positive)
        own = None if found.local is None else toward(found.local, positive)
        deployed = score_numbers(counts, chosen)
        local = None if own is None else score_numbers(own, chosen)
        for row, played in enumerate(rounds):
            positions, scored = found.positions[row].tolist(), found.scored[row].tolist()
            finite = None if found.finite is None else found.finite[row]
            if problem := played.problem(finite, positions):
                raise problem
            shape = len(self.history.nodes), len(ROLES), len(self.history.columns)
            nothing = np.full(shape, np.nan)
            everywhere = nothing.copy()
            everywhere[scored] = deployed[row]
            # Clients that did not train keep their last local numbers.
            past = self.history.scores["local"]
            scores = past[-1].copy() if past else nothing
            if local is not None:
                scores[positions] = local[row]
            self.history.pool("deployed", take(counts, row), played.number)
            complete = own is not None and len(positions) == len(self.history.nodes)
            self.history.pool("local", take(own or counts, row), played.number, complete=complete)
            self.history.scores["deployed"].append(everywhere)
            self.history.scores["local"].append(scores)
            self.history.seconds.append(seconds)
            for step, sampled, down, up in [] if played.tape is None else played.tape.traffic:
                self.ledger.add(played.number, step, positions if sampled else scored, down, up)
            if self.keeper is not None:
                self.keeper.offer(self.history, played.number, partial(after, played))

    def snapshot(self, fingerprint: str) -> Tree:
        """Return everything that is needed to continue with the same numbers."""
        history = {k: [torch.from_numpy(a) for a in v] for k, v in self.history.scores.items()}
        states = pack_states(self.simulation.engine.export_states())
        method, privacy = self.experiment.method, None
        if isinstance(method, Noised):
            plain = {"clip": method.clip, "noise": method.noise, "delta": method.delta}
            privacy = plain | asdict(spent(method.noise, method.delta, [self.ledger]))
        return {
            "fingerprint": fingerprint,
            "server": tree_map(torch.Tensor.cpu, self.server),
            "states": tree_map(torch.Tensor.cpu, states),
            "scores": {k: torch.stack(v) if v else torch.zeros(0) for k, v in history.items()},
            "seconds": torch.tensor(self.history.seconds, dtype=torch.float64),
            "pooled": {
                name: torch.from_numpy(np.stack(rounds))
                for name, rounds in self.history.pooled.items()
                if rounds
            },
            "ledger": self.ledger.export(),
            "privacy": privacy,
            "selected": self.keeper.model.export() if self.keeper and self.keeper.model else None,
        }

    def restore(self, tree: Tree) -> None:
        """Continue from a snapshot."""
        device = self.experiment.device
        trees = tree["server"], tree["states"]
        self.server, states = tree_map(lambda leaf: leaf.to(device), trees)
        self.simulation.engine.import_states(unpack_states(states))
        self.history.restore(tree)
        if self.keeper is not None:
            self.keeper.restore(self.history, tree.get("selected"))


def returned(method: Method, hook: str, server: Tree) -> Tree:
    """Return the server's tree from `init` or `round`. Refuse None: a `return` is missing."""
    if server is None:
        name = type(method.base if isinstance(method, Noised) else method).__name__
        when = "first" if hook == "init" else "next"
        raise ConfigError(f"{hook} of {name} returned None; return the server's {when} state")
    return server


def stage_of(replay: Replay[Outcome], kinds: Sequence[bool]) -> str:
    """Return the clock's name of the next round: "recording" for the first one of its kind."""
    return "training" if kinds[0] in replay.takes else "recording"


def _score_local(method: Method, chosen: Participants, evaluator: Evaluator) -> Scores | None:
    """Return the scores of the local models of clients that trained, or None if none did."""
    if "train" not in chosen.replies:
        return None
    trained, positions = method.local(chosen.replies["train"]), chosen.positions
    if len(chosen) < chosen.total:
        # A row for each client, as `ToEach` requires. Rows of absent clients are never read.
        row = torch.zeros(chosen.total, dtype=torch.int64, device=positions.device)
        order = torch.arange(len(chosen), device=positions.device)
        trained = take(trained, row.scatter(0, positions, order))
    scores: Scores = chosen.map(evaluator.score, ToEach(trained))
    return scores


def check_task(method: Method, federation: Federation) -> None:
    """Refuse a method or network that does not support the clients' task or growing graphs."""
    task, name = federation.task.name, type(method).__name__
    have = f"the clients of '{federation.name}' have {task}s to classify"
    if task not in method.tasks:
        known = " and ".join(f"{known}s" for known in method.tasks)
        raise ConfigError(f"{name} classifies {known}, but {have}; choose another method")
    here = isinstance(federation, Federation)  # a server has no graphs, only summaries
    if (why := method.why_bound()) and here and federation.graphs[0].since is not None:
        hint = "choose another method or split"
        raise ConfigError(f"{name} cannot predict nodes that are absent in training: {why}; {hint}")
    if task_of(method.net) != task:
        net, known = type(method.net).__name__, f"{task_of(method.net)}s"
        raise ConfigError(f"network {net} classifies {known}, but {have}; choose another network")
    features, classes = federation.features, federation.classes
    # A network of one's own may work for any size, and then states none.
    inputs = getattr(method.net, "features", features)
    outputs = getattr(method.net, "classes", classes)
    # More classes are valid for nodes. Each graph of a set masks the classes that its set lacks.
    exact = federation.task.many_graphs and outputs != classes
    if here and (inputs != features or outputs < classes or exact):
        has = f"the network has {inputs} features and {outputs} classes"
        hint = "build it from federation.features and federation.classes"
        raise ConfigError(f"{has}, but the data have {features} and {classes}; {hint}")
