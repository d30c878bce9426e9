"""The policy of a site's owner, a TOML file: methods, steps, work, bytes, disclosures, privacy."""

from __future__ import annotations

import inspect
import math
import os
import tomllib
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll.core.errors import AtollError, ConfigError, WireError, unknown
from atoll.core.method import Method, Net, Step
from atoll.core.tree import leaves
from atoll.engines.fleet import owners_of
from atoll.experiment.build import parameter_shapes
from atoll.experiment.card import CARD, OWN
from atoll.experiment.privacy import PrivacyConfig, epsilon, need_accountant
from atoll.methods import METHODS

DECLARED = "declared"
SIZES = ("epochs", "layers", "width", "parameters")
WORK = ("questions", "seconds", "round_seconds", "memory", "message_bytes", "runs", "kept_bytes")
"""Keys that limit the method of a run, its steps, and the disk. Each value is above 0."""
SEEDS = 100  # average number of seed folders per run that a site keeps
NOT_COUNTED = {"scores.csv", "threshold.toml", OWN, CARD}
"""Small files for the owner, whose sizes depend on the data: the limit must not reveal them."""
FREE = ("features", "classes", "salt", "proxy_seed")
"""Integers that a policy does not limit: sizes of the owner's own data, and seeds."""


class Refusal(AtollError):
    """The owner of a site does not allow the request."""


class OverLimit(WireError):
    """A run exceeded the work that the owner allows. Other sites may continue without it."""


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The owner's choices, by the keys of the file.

    None sets no limit, but `methods = None` allows only the methods that come with Atoll.
    """

    methods: tuple[str, ...] | None = None  # by default all methods of Atoll
    steps: tuple[str, ...] | None = None  # names of steps
    rounds: int = 10_000  # of one run
    epochs: int = 1_000  # local epochs per round, in any part of the method
    layers: int = 100  # of a network
    width: int = 10_000  # any other integer, such as a width, hops or samples
    parameters: int = 100_000_000  # numbers in the network
    questions: int = 1_000  # packets with a step in one round, scoring included
    seconds: float = 3600.0  # of one step
    round_seconds: float = 4 * 3600.0  # of all steps of one round
    memory: int = 32 << 30  # bytes of the job's process
    message_bytes: int = 1 << 30  # of one message from the server
    reply_bytes: int = 1 << 30  # of one reply
    run_bytes: int = 1 << 40  # of all replies of one run
    model_bytes: int = 1 << 30  # of the model that the server delivers at the end of a run
    runs: int = 1_000  # whose private states or models the site keeps
    kept_bytes: int = 100 << 30  # of runs and audit log
    # Fields that steps declare as disclosures, as "step.field". "declared" allows all of them.
    disclose: tuple[str, ...] | str = ()
    statistics: bool = True  # counts, means and deviations of columns, for a common encoder
    rare_categories: int = 1  # fewest rows of a category value that the site sends
    noise: float | None = None  # least noise multiplier; this or `epsilon` demands privacy
    epsilon: float | None = None  # largest epsilon against the server, over all runs of this site
    delta: float = 1e-5  # of that epsilon

    def check_run(self, method: str, rounds: int, base: str = "") -> None:
        """Refuse a run that the owner does not allow. `base` is the wrapped method, if any."""
        names = [name if ":" in name else name.lower() for name in (method, base) if name]
        for name in names:
            _check_named("method", name, self.methods)
            if self.methods is None and name not in METHODS:
                # A name with a colon refers to code that the submitter chose.
                hint = "its owner can allow it by name (methods = [...] in the policy)"
                raise Refusal(f"method '{name}' does not come with Atoll; {hint}")
        if rounds > self.rounds:
            raise Refusal(f"its policy allows {self.rounds} rounds, but the run has {rounds}")

    def check_size(self, method: Method) -> None:
        """Refuse a method with an integer or parameter count above the owner's limits (`SIZES`)."""
        for name, value in _whole_numbers(method):
            key = "epochs" if name.endswith("epochs") else "layers" if name == "layers" else "width"
            if name not in FREE and value > getattr(self, key):
                most = f"{key} up to {getattr(self, key)}"
                raise Refusal(f"its policy allows {most}, but {name} is {value}")
        count = sum(
            leaf.numel() for net in networks(method) for leaf in leaves(parameter_shapes(net))
        )
        if count > self.parameters:
            most = f"{self.parameters} parameters"
            raise Refusal(f"its policy allows {most}, but the method's networks have {count}")

    def check_work(self, questions: int, seconds: float) -> None:
        """Refuse another step of a round. Both numbers count the earlier steps of the round."""
        for key, used in (("questions", questions), ("round_seconds", seconds)):
            if used >= getattr(self, key):
                raise OverLimit(f"over its limit: its policy allows {key} = {getattr(self, key):g}")

    def check_privacy(self, privacy: PrivacyConfig | None) -> None:
        """Refuse a run that protects the owner less than the policy demands."""
        if self.noise is None and self.epsilon is None:
            return
        demand = "its policy demands differential privacy"
        if privacy is None:
            raise Refusal(f"{demand}, but the run has none; give --dp clip=...,noise=...")
        if privacy.randomness == "seed":
            raise Refusal(f"{demand}, but the noise would come from the seed, which all know")
        if privacy.scores == "told":
            raise Refusal(f"{demand}, but scores would be told in the clear; use scores=kept")
        if privacy.noise < (self.noise or 0):
            least = f"noise of at least {self.noise:g}"
            raise Refusal(f"its policy demands {least}, but the run has {privacy.noise:g}")

    def check_spent(self, precision: float, what: str) -> None:
        """Refuse `what` if the epsilon of `precision` (`Account.precision`) is above the limit."""
        if self.epsilon is None:
            return
        found = epsilon(precision, self.delta)
        if found > self.epsilon:
            most = f"epsilon {self.epsilon:g} at delta {self.delta:g} over all its runs"
            raise Refusal(f"its policy allows {most}, but {what} would make it {found:.3g}")

    def check_step(self, step: Step, round: int) -> None:
        """Refuse a step that the owner does not allow."""
        _check_named("step", step.name, self.steps)
        if not -1 <= round < self.rounds:
            most = f"{self.rounds} rounds"
            raise Refusal(f"its policy allows {most}, but round {round + 1} was asked")

    def check_reply(self, step: Step, names: Collection[str]) -> None:
        """Refuse to send a declared disclosure of the step, unless the owner allows it."""
        for name, reason in step.discloses.items():
            field = f"{step.name}.{name}"
            if name in names and self.disclose != DECLARED and field not in self.disclose:
                refused = f"its policy does not allow step '{step.name}' to disclose '{name}'"
                hint = f'its owner can allow it with disclose = ["{field}"]'
                raise Refusal(f"{refused} ({reason}); {hint}")

    def check_statistics(self) -> None:
        """Refuse to send statistics of columns, unless the owner allows it."""
        if not self.statistics:
            refused = "its policy does not allow statistics of columns (statistics = false)"
            raise Refusal(f"{refused}; run with --encoder local")

    def check_model(self, size: int) -> None:
        """Refuse a model that is larger than the owner allows."""
        if size > self.model_bytes:
            raise Refusal(f"its policy takes models of {self.model_bytes} bytes, not of {size}")

    def check_disk(self, folder: Path, run: str, size: int = 0) -> None:
        """Refuse a run, or `size` bytes of it, that would exceed the disk limits."""
        there = {path.name for path in folder.glob("runs/*")} | {run}
        if max(len(set(map(all_seeds, there))), len(there) / SEEDS) > self.runs:
            hint = "its owner can delete old ones from the folder runs"
            raise Refusal(f"its policy keeps {self.runs} runs, and there are as many; {hint}")
        kept = 0
        for place, _, names in os.walk(folder):
            for name in set(names) - NOT_COUNTED:
                with suppress(FileNotFoundError):  # another job may replace its states
                    kept += os.lstat(os.path.join(place, name)).st_size
        if kept + size > self.kept_bytes:
            raise Refusal(f"its policy keeps {self.kept_bytes} bytes, and they are used up")

    def check_bytes(self, size: int, before: int) -> None:
        """Refuse a reply of `size` bytes above the owner's limits. The run sent `before` bytes."""
        if size > self.reply_bytes:
            raise Refusal(f"its policy allows replies of {self.reply_bytes} bytes, not of {size}")
        if before + size > self.run_bytes:
            most = f"{self.run_bytes} bytes in a run"
            raise Refusal(f"its policy allows {most}, and they are used up")


def networks(method: Method) -> list[Net]:
    """Return all networks of a method and of wrapped methods, also those that properties make."""
    found: list[Any] = []
    for part in owners_of(method).values():
        made = inspect.getmembers_static(type(part), lambda value: isinstance(value, property))
        names = dict.fromkeys([*vars(part), *(name for name, _ in made)])
        for value in (getattr(part, name) for name in names):
            init = getattr(value, "init", None)
            if callable(init) and "key" in inspect.signature(init).parameters:
                found += [] if any(value is one for one in found) else [value]
    inner = {id(getattr(net, "net", None)) for net in found}  # networks inside of others
    return [net for net in found if id(net) not in inner]


def all_seeds(run: str) -> str:
    """Return the name of a run without its seed: `RUN-SEED` names one seed."""
    seed = seed_of(run)
    return run[: -len(seed) - 1] if seed else run


def seed_of(run: str) -> str:
    """Return the seed number in the name of a run, or "" if the name contains no seed."""
    name, _, seed = run.rpartition("-")
    return seed if name and seed.isdigit() else ""


def _whole_numbers(part: object) -> Iterator[tuple[str, int]]:
    """Yield the integers of a method and of all its parts, such as its network."""
    if is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            value = getattr(part, field.name)
            if type(value) is int:
                yield field.name, value
            yield from _whole_numbers(value)


def _check_named(what: str, name: str, allowed: tuple[str, ...] | None) -> None:
    if allowed is not None and name not in allowed:
        names = ", ".join(allowed) or "none"
        raise Refusal(f"its policy does not allow {what} '{name}'; it allows: {names}")


def read_policy(path: Path | None) -> Policy:
    """Read the policy from a TOML file, or return the default policy without a file."""
    if path is None:
        return Policy()
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        for key in raw:
            if key not in Policy.__struct_fields__:
                raise unknown(f"key in {path}", key, Policy.__struct_fields__)
        policy: Policy = msgspec.convert(raw, Policy)
    except FileNotFoundError:
        raise ConfigError(f"policy {path} does not exist; give a TOML file") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy {path} cannot be used: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"policy {path} cannot be read: {error}") from error
    if isinstance(policy.disclose, str) and policy.disclose != DECLARED:
        raise ConfigError(f'policy {path}: disclose takes a list of step.field, or "{DECLARED}"')
    above = ("noise", "epsilon", *SIZES, *WORK, "rare_categories")
    bounds = dict.fromkeys(above, math.inf) | {"delta": 1}
    for name, below in bounds.items():
        value = getattr(policy, name)
        if value is not None and not 0 < value < below:
            hint = f"give a number between 0 and {below:g}"
            raise ConfigError(f"policy {path}: {name} is {value:g}; {hint}")
    if policy.epsilon is not None:
        need_accountant()
    for name in policy.methods or ():
        if ":" not in name and name not in METHODS:
            raise unknown(f"method in {path}", name, METHODS)
    return policy
