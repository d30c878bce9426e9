"""One experiment: one method on one federation with one seed, round by round.

After every round two things are scored on each client's own graph: the *deployed* model (what
`method.deploy` gives it) and the *local* model (right after its own training). Which of the two a
result reports is the protocol's business; both are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.message import ToEach
from atoll.core.method import Method, task_of
from atoll.core.tree import Tree, take, tree_map
from atoll.engines.checkpoint import load_checkpoint, save_checkpoint
from atoll.engines.ledger import Ledger
from atoll.engines.simulation import Backend, Participants, Simulation
from atoll.study.evaluate import ROLES, Evaluator, Scores
from atoll.study.metrics import METRICS, from_confusion

SCORED = ("deployed", "local")


@runtime_checkable
class Caches(Protocol):
    """A method that puts models aside while it trains, before it goes another way."""

    def cached_rounds(self, server: Tree) -> list[list[int]]:
        """For each client the rounds after which its model was put aside."""


@dataclass
class History:
    """Everything measured, round by round.

    Attributes:
        scores: For "deployed" and "local" a list over rounds of (K, 3, 5): client, role, metric.
        counts: Training, validation and test nodes (or graphs) of each client, (K, 3).
        nodes: Nodes (or graphs) of each client, (K,).
        seconds: Seconds of each round, training and scoring.
        cached: For each client the rounds after which its model was put aside; empty where a
            method puts none aside.
    """

    counts: np.ndarray
    nodes: np.ndarray
    scores: dict[str, list[np.ndarray]] = field(default_factory=lambda: {k: [] for k in SCORED})
    seconds: list[float] = field(default_factory=list)
    cached: list[list[int]] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return len(self.seconds)

    def array(self, scored: str, metric: str, role: str) -> np.ndarray:
        """One number for each round and client, (R, K); NaN where a client has none."""
        stacked = np.stack(self.scores[scored])
        return np.asarray(stacked[:, :, ROLES.index(role), METRICS.index(metric)])


@dataclass(frozen=True)
class Experiment:
    """What to run.

    Attributes:
        method: With its hyper-parameters.
        federation: The clients.
        rounds: How many.
        fraction: Share of the clients that takes part in a round (rounded up, at least one).
        seed: Root of all noise: initial model, dropout, sampling.
        engine: "serial", "wire" or "fused".
        device: Where tensors live.
        chunk: Most clients in one program of the fused engine; 0 chooses.
        auc: Whether to compute ROC curves each round; None does for two classes.
        train_every: Rounds from one scoring of the training part to the next, and in the last
            round; None takes 1 for nodes, which cost nothing, and 10 for graphs, most of which
            train. Validation and test are scored in every round.
        compat: Names from `protocols.COMPAT`.
    """

    method: Method
    federation: Federation
    rounds: int = 100
    fraction: float = 1.0
    seed: int = 0
    engine: str = "fused"
    device: torch.device | str = "cpu"
    chunk: int = 0
    auc: bool | None = None
    train_every: int | None = None
    compat: tuple[str, ...] = ()

    def run(
        self,
        *,
        checkpoint: Path | None = None,
        fingerprint: str = "",
        every_seconds: float = 10.0,
        on_round: Callable[[History], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Run:
        """Run, or continue from `checkpoint` if it exists.

        Args:
            checkpoint: Where to save; written at the start, at most every `every_seconds`, at the
                end, and when stopped.
            fingerprint: Names the configuration; a checkpoint of another one is refused.
            every_seconds: Least time between two checkpoints.
            on_round: Called after each round.
            should_stop: Asked after each round; True saves and returns.
        """
        if self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}; give at least 1")
        run = self.begin()
        if checkpoint is not None and checkpoint.exists():
            run.restore(load_checkpoint(checkpoint), fingerprint, checkpoint)
        else:
            run.start()
        saved_round = -1
        saved_at = -np.inf
        while True:
            stop = run.finished or (should_stop is not None and should_stop())
            due = stop or time.monotonic() - saved_at >= every_seconds
            if checkpoint is not None and due and saved_round != run.history.rounds:
                save_checkpoint(checkpoint, run.snapshot(fingerprint))
                saved_round, saved_at = run.history.rounds, time.monotonic()
            if stop:
                run.history.cached = cached_rounds(self.method, run.server)
                return run
            run.one_round()
            if on_round is not None:
                on_round(run.history)

    def begin(self) -> Run:
        """The run before its first round."""
        return Run(self)


class Run:
    """An experiment under way: the server's tree, the clients behind the engine, the history."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        federation = experiment.federation
        check_task(experiment.method, federation)
        self.simulation: Backend = self.backend()
        auc = federation.classes == 2 if experiment.auc is None else experiment.auc
        noisy = "dropout-at-eval" in experiment.compat
        self.evaluator = Evaluator(experiment.method, with_auc=auc, with_dropout=noisy)
        self.train_every = experiment.train_every or (10 if federation.task == "graph" else 1)
        self.history = self.no_history()
        self.server: Tree = None

    def backend(self) -> Backend:
        """Where the clients are: on this machine."""
        wanted = self.experiment
        return Simulation(
            wanted.federation, wanted.method, engine=wanted.engine, seed=wanted.seed,
            device=wanted.device, chunk=wanted.chunk,
        )  # fmt: skip

    def no_history(self) -> History:
        """The clients' sizes, and nothing measured yet."""
        return empty_history(self.experiment.federation)

    @property
    def ledger(self) -> Ledger:
        return self.simulation.ledger

    @property
    def finished(self) -> bool:
        return self.history.rounds >= self.experiment.rounds

    def start(self) -> None:
        """The server's first tree."""
        self.server = self.experiment.method.init(self.simulation.clients(-1))

    def one_round(self) -> None:
        """Train, aggregate, score."""
        began = time.perf_counter()
        method = self.experiment.method
        everyone = self.simulation.clients(self.history.rounds)
        chosen = everyone.sample(self.experiment.fraction)
        self.server = method.round(self.server, chosen)
        last = self.history.rounds == self.experiment.rounds - 1
        evaluator = self.evaluator
        if self.history.rounds % self.train_every and not last:
            evaluator = replace(evaluator, with_train=False)
        deployed = np.full((everyone.total, len(ROLES), len(METRICS)), np.nan)
        scores = _numbers(everyone.map(evaluator.score, method.deploy(self.server)))
        deployed[everyone.positions.cpu().numpy()] = scores
        local = self._score_local(chosen, evaluator)
        if torch.device(self.experiment.device).type == "cuda":
            torch.cuda.synchronize()
        self.history.scores["deployed"].append(deployed)
        self.history.scores["local"].append(local)
        self.history.seconds.append(time.perf_counter() - began)

    def _score_local(self, chosen: Participants, evaluator: Evaluator) -> np.ndarray:
        """Local models of those who trained; the others' last numbers still hold."""
        past = self.history.scores["local"]
        empty = np.full((chosen.total, len(ROLES), len(METRICS)), np.nan)
        scores = past[-1].copy() if past else empty
        if "train" not in chosen.replies:
            return scores
        trained = self.experiment.method.local(chosen.replies["train"])
        positions = chosen.positions
        if len(chosen) < chosen.total:
            # A row for everybody, as `ToEach` wants; rows of absent clients are never read.
            row = torch.zeros(chosen.total, dtype=torch.int64, device=positions.device)
            row[positions] = torch.arange(len(chosen), device=positions.device)
            trained = take(trained, row)
        scores[positions.cpu().numpy()] = _numbers(chosen.map(evaluator.score, ToEach(trained)))
        return scores

    def snapshot(self, fingerprint: str) -> Tree:
        """Everything needed to continue with the same numbers."""
        history = {k: [torch.from_numpy(a) for a in v] for k, v in self.history.scores.items()}
        return {
            "fingerprint": fingerprint,
            "server": tree_map(torch.Tensor.cpu, self.server),
            "states": tree_map(torch.Tensor.cpu, self.simulation.engine.export_states()),
            "scores": {k: torch.stack(v) if v else torch.zeros(0) for k, v in history.items()},
            "seconds": torch.tensor(self.history.seconds, dtype=torch.float64),
            "ledger": self.ledger.export(),
        }

    def restore(self, tree: Tree, fingerprint: str, path: Path) -> None:
        """Continue from a snapshot."""
        if tree["fingerprint"] != fingerprint:
            raise DataError(
                f"checkpoint {path} belongs to another configuration; resume with its own folder "
                "(--resume DIR) or choose another --out"
            )
        device = self.experiment.device
        server, states = tree_map(lambda leaf: leaf.to(device), (tree["server"], tree["states"]))
        self.server = server
        self.simulation.engine.import_states(states)
        self.history.seconds = tree["seconds"].tolist()
        self.history.scores = restored_scores(tree)
        self.ledger.restore(tree["ledger"])


def empty_history(federation: Federation) -> History:
    """The clients' sizes, and nothing measured yet."""
    masks = [torch.stack([g.train, g.val, g.test]).sum(1) for g in federation.graphs]
    return History(
        counts=torch.stack(masks).numpy().astype(np.int64),
        nodes=np.array([int(g.size("nodes")) for g in federation.graphs]),
    )


def cached_rounds(method: object, server: Tree) -> list[list[int]]:
    """For each client the rounds after which its model was put aside; empty if none ever is."""
    return method.cached_rounds(server) if isinstance(method, Caches) else []


def restored_scores(saved: Tree) -> dict[str, list[np.ndarray]]:
    """The scores of a snapshot, as `History` has them."""
    return {name: list(rounds.numpy()) for name, rounds in saved["scores"].items()}


def _numbers(scores: Scores) -> np.ndarray:
    """Stacked scores -> (K, 3, 5), NaN where a client has no such number."""
    confusion = scores.confusion.cpu().numpy()
    numbers = from_confusion(confusion)
    empty = confusion.sum((-1, -2)) == 0
    auc = scores.auc.cpu().numpy()
    numbers["auc"] = np.where(auc < 0, np.nan, auc)
    numbers["loss"] = np.where(empty, np.nan, scores.loss.cpu().numpy())
    return np.stack([numbers[m] for m in METRICS], axis=-1)


def check_task(method: Method, federation: Federation) -> None:
    """Refuse a method, or its network, that does not classify what the clients have."""
    task, name = federation.task, type(method).__name__
    if task not in method.tasks:
        raise ConfigError(
            f"{name} classifies {' and '.join(f'{known}s' for known in method.tasks)}, but the "
            f"clients of '{federation.name}' have {task}s to classify; choose another method"
        )
    if task_of(method.net) != task:
        net = type(method.net).__name__
        raise ConfigError(
            f"network {net} classifies {task_of(method.net)}s, but the clients of "
            f"'{federation.name}' have {task}s to classify; choose another network"
        )
