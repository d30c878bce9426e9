"""One method's search with Optuna: the next settings, early pruning, and what was tried.

Every finished trial is stored, in one transaction, in the SQLite file of the study's folder, which
Optuna's own tools read as well. The next settings depend only on the stored trials and on (seed,
number of the trial), so that a killed search continues as if it had not been interrupted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ConfigError
from atoll.core.space import OneOf, Range, Value, Whole
from atoll.studies.tune.result import Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

PRUNERS = ("median", "none")
STARTUP = 10  # trials that are drawn blindly before the sampler learns from them
PRUNE_AFTER = 5  # finished trials that a median is made of, at least
TRIES = 50  # how often another point is drawn where all were tried already


def need_optuna() -> None:
    """Refuse in one sentence, before the work, where Optuna is missing."""
    try:
        import optuna  # noqa: F401  # only to know whether it is there
    except ImportError as error:
        raise ConfigError(
            "tuning needs the package optuna, which is not installed; install it with: "
            "pip install 'atoll-fgl[tune]'"
        ) from error


@dataclass
class Search:
    """The trials of one method."""

    file: Path
    name: str  # the study's name in it
    space: Mapping[str, Range]  # the ranges to search
    seed: int  # of the sampler
    rounds: int  # of a whole trial, for the pruner
    pruner: str  # one of `PRUNERS`
    first: Sequence[Mapping[str, Value]] = ()  # to try before any is drawn; open keys are drawn

    def __post_init__(self) -> None:
        import optuna

        # Optuna logs on its own; here the command line reports.
        logging.getLogger("optuna").setLevel(logging.WARNING)
        self.distributions = {key: _distribution(wanted) for key, wanted in self.space.items()}
        storage = optuna.storages.RDBStorage(f"sqlite:///{self.file.absolute()}")
        self.storage = optuna.create_study(
            study_name=self.name, storage=storage, direction="maximize", load_if_exists=True
        )
        self.frozen: list[FrozenTrial] = self.storage.get_trials(deepcopy=False)
        self.live: Any = None  # the trial under way, in a separate study in memory

    def __getstate__(self) -> dict[str, object]:
        """For another process, which asks and reports but stores nothing."""
        return {k: v for k, v in self.__dict__.items() if k not in ("storage", "live")}

    @property
    def trials(self) -> list[Trial]:
        found = []
        for number, frozen in enumerate(self.frozen):
            curve = [value for _, value in sorted(frozen.intermediate_values.items())]
            about = frozen.user_attrs  # the other fields
            value = frozen.value if about["state"] == "complete" else None
            found.append(Trial(number, dict(frozen.params), value=value, curve=curve, **about))
        return found

    def ask(self) -> dict[str, Value] | None:
        """The next settings; None if nothing is left that was not tried."""
        import optuna

        number, tried = len(self.frozen), [trial.params for trial in self.frozen]
        warmup = max(self.rounds // 5, 1)
        median = optuna.pruners.MedianPruner(n_startup_trials=PRUNE_AFTER, n_warmup_steps=warmup)
        pruner = median if self.pruner == "median" else optuna.pruners.NopPruner()
        memory = optuna.create_study(direction="maximize", pruner=pruner)
        memory.add_trials(self.frozen)
        for attempt in range(TRIES):
            seed = (self.seed * 1_000_003 + number * 1009 + attempt) % 2**32
            # After five attempts a blind sampler takes over from one that repeats itself.
            blind = optuna.samplers.RandomSampler(seed=seed)
            learned = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
            memory.sampler = learned if attempt < 5 else blind
            if attempt == 0 and number < len(self.first):
                memory.enqueue_trial(dict(self.first[number]))
            self.live = memory.ask(self.distributions)
            settings = {key: _rounded(self.space[key], v) for key, v in self.live.params.items()}
            if settings not in tried:
                self.settings = settings
                return settings
            memory.tell(self.live, state=optuna.trial.TrialState.FAIL)
        return None

    def known(self, trials: int) -> list[dict[str, Value]]:
        """Settings of the next trials, up to so many in all, that depend on no open result.

        These are the given first points and the blind draws; after them, only the next trial.
        """
        before, found = self.frozen, []
        free = max(STARTUP, len(self.first), len(before) + 1)
        self.frozen = list(before)
        try:
            while len(self.frozen) < min(free, trials) and (settings := self.ask()) is not None:
                found.append(settings)
                self.frozen.append(self._freeze("failed"))
        finally:
            self.frozen = before
        return found

    def report(self, step: int, value: float) -> bool:
        """Report the score after a round; True if the trial should be pruned."""
        if math.isnan(value):
            return False
        self.live.report(value, step)
        return bool(self.live.should_prune())

    def tell(
        self, state: str, curve: Sequence[float], value: float | None = None, **about: object
    ) -> None:
        """Store how the trial ended; `about` has further fields of its `Trial`."""
        frozen = self._freeze(state, curve, value, **about)
        self.storage.add_trial(frozen)
        self.frozen.append(frozen)

    def _freeze(
        self, state: str, curve: Sequence[float] = (), value: float | None = None, **about: object
    ) -> FrozenTrial:
        """The trial under way, as Optuna keeps it."""
        from optuna.trial import TrialState, create_trial

        # A diverged trial counts as pruned, so that the sampler learns to avoid its settings.
        states = {"complete": TrialState.COMPLETE, "failed": TrialState.FAIL}
        return create_trial(
            state=states.get(state, TrialState.PRUNED),
            value=value,
            params=self.settings,
            distributions=self.distributions,
            intermediate_values={i: v for i, v in enumerate(curve) if not math.isnan(v)},
            user_attrs={"state": state, **about},
        )

    def importance(self) -> dict[str, float]:
        """Share of each hyper-parameter in how far scores differ; empty with too few trials."""
        import optuna

        complete = [t for t in self.frozen if t.state == optuna.trial.TrialState.COMPLETE]
        varied = [k for k in self.space if len({t.params[k] for t in complete}) > 1]
        if len(complete) < STARTUP or not varied or len({t.value for t in complete}) < 2:
            return {}
        memory = optuna.create_study(direction="maximize")
        memory.add_trials(complete)
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(memory, evaluator=evaluator, params=varied)
        return {key: float(share) for key, share in found.items()}


def _distribution(wanted: Range) -> BaseDistribution:
    from optuna import distributions

    if isinstance(wanted, OneOf):
        return distributions.CategoricalDistribution(wanted.values)
    if isinstance(wanted, Whole):
        return distributions.IntDistribution(wanted.low, wanted.high, log=wanted.log)
    return distributions.FloatDistribution(wanted.low, wanted.high, log=wanted.log)


def _rounded(wanted: Range, value: Value) -> Value:
    """Three digits are enough for a real number, and fit on a command line."""
    if isinstance(value, float) and not isinstance(wanted, OneOf):
        short = float(f"{value:.3g}")
        value = short if short in wanted else value
    return value
