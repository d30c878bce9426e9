"""Training beyond a finished run: more rounds of it, or a new run from its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from atoll.core.errors import ConfigError, counted
from atoll.core.files import write_atomically
from atoll.core.tree import Tree
from atoll.engines.codec import load_checkpoint, save_checkpoint
from atoll.experiment.config import RunConfig, saved_text
from atoll.experiment.folder import RunFolder
from atoll.experiment.result import CONFIG, RESULT


def extend(
    folder: Path, config: RunConfig, rounds: int, name: Callable[[RunConfig], str]
) -> RunConfig:
    """Extend a folder's run to `rounds` rounds. `name` returns a configuration's fingerprint.

    The checkpoints get the fingerprint of the longer run, then the configuration is replaced. If
    this is interrupted, the same call completes it.
    """
    if config.rounds is not None and rounds < config.rounds:
        has = f"the run in '{folder}' has {counted(config.rounds, 'round')}"
        raise ConfigError(f"{has}, so it cannot end after {rounds}; give {config.rounds} or more")
    longer = msgspec.structs.replace(config, rounds=rounds)
    if rounds == config.rounds:
        return config
    before, after = name(config), name(longer)
    run = RunFolder(folder)
    for seed in config.all_seeds:
        if run.checkpoint(seed).exists():
            tree = load_checkpoint(run.checkpoint(seed))
            if tree["fingerprint"] == f"{before}/{seed}":
                save_checkpoint(run.checkpoint(seed), {**tree, "fingerprint": f"{after}/{seed}"})
    write_atomically(folder / CONFIG, saved_text(longer).encode())
    (folder / RESULT).unlink(missing_ok=True)  # it marks the end
    return longer


def trained_models(folder: str, seed: int) -> Sequence[Tree]:
    """Return the models of a run's selected round, for `seed` or else for its first seed."""
    run = RunFolder(Path(folder))
    return run.model(seed if seed in run.config.all_seeds else None).deployed
