"""The keyword options of the Python API, with their types. `RunConfig` holds their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from atoll.core.space import Value
from atoll.experiment.privacy import PrivacyConfig


class CommonOptions(TypedDict, total=False):
    """The keyword options that `run`, `compare` and `tune` share, for type checkers and editors.

    They are fields of `RunConfig`, and a test compares the types.
    """

    task: str | None
    partition: str | None
    split: str | None
    ratios: str | Sequence[float] | None
    protocol: str
    data_seed: int | None
    rounds: int | None
    epochs: int | None
    fraction: float
    seed: int
    device: str
    chunk: int
    set: Mapping[str, Value]
    compat: Sequence[str]
    evaluate: str | None
    class_weights: str | None
    loss: str | None
    threshold: str | None
    positive: str | None
    allow: Sequence[str]
    batch_size: int | None
    data_root: str | None
    schema: str | None
    own: Mapping[str, Value]
    encoder: str | None
    dp: str | Mapping[str, object] | PrivacyConfig | None
    from_run: str | None
    held_out_client: str | None


class RunOptions(CommonOptions, total=False):
    """The keyword options of `run`."""

    clients: int | None
    seeds: int
    metric: str | None


class CompareOptions(CommonOptions, total=False):
    """The keyword options of `compare`."""

    engine: str


class TuneOptions(CompareOptions, total=False):
    """The keyword options of `tune`."""

    clients: int | None
    metric: str | None
