"""A run as TensorBoard sees it: curves of every seed, hyper-parameters and final numbers.

atoll run fedavg --log tensorboard --out r && tensorboard --logdir r
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError
from atoll.experiment.config import RunConfig
from atoll.experiment.history import History
from atoll.experiment.loggers.base import NewRounds, flat, missing
from atoll.experiment.protocols import protocol
from atoll.experiment.result import Result, seed_metrics


def need() -> None:
    """Refuse where the package is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise missing("tensorboard", "tensorboard") from error


def open_log(out: Path | None) -> TensorBoardLog:
    """The log of a run that is saved in `out`."""
    need()
    if out is None:
        raise ConfigError("log='tensorboard' writes into the run's folder; give out=FOLDER as well")
    return TensorBoardLog(out / "tensorboard")


def share() -> None:
    """Nothing to make: every run has files of its own."""


class TensorBoardLog:
    """Writes `tensorboard/seed-N/` in the run's folder (`experiment.run.Observer`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writers: dict[int, Any] = {}  # a class of an optional package

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.rounds = NewRounds(protocol(config.protocol).weights)

    def round(self, seed: int, history: History) -> None:
        writer = self._writer(seed)
        for number, found in self.rounds.of(seed, history):
            for name, value in found.items():
                writer.add_scalar(name, value, number + 1)

    def should_stop(self) -> bool:
        return False

    def end(self, result: Result) -> None:
        about = {
            "method": result.config.method,
            "data": result.config.data,
            **flat(dict(result.hyperparameters)),
        }
        for one in result.seeds:
            self.round(one.seed, one.history)  # a seed that was finished in an earlier call
            writer = self._writer(one.seed)
            final = {f"final/{k}": v for k, v in seed_metrics(one.history, result).items()}
            # In the curves' own folder: by default every call makes one of its own.
            writer.add_hparams(about, final, run_name=".")
            writer.close()

    def _writer(self, seed: int) -> Any:
        if seed not in self.writers:
            from torch.utils.tensorboard import SummaryWriter

            # A run that goes on writes all its rounds again, and TensorBoard drops the old ones.
            self.writers[seed] = SummaryWriter(
                str(self.folder / f"seed-{seed}"), purge_step=0, flush_secs=10
            )
        return self.writers[seed]
