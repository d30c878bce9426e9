"""The runs that began at a site, from its audit log: one name, one configuration, one encoder."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.core.errors import ConfigError
from atoll.data.own.agree import Agreed
from atoll.deploy.agreement import ENCODER
from atoll.deploy.audit import Audit, Json
from atoll.deploy.policy import Refusal, all_seeds
from atoll.experiment.config import RunConfig, make_config


def ordered(text: str) -> RunConfig:
    """Parse the server's configuration. Its `data` is only a name, never a file of this machine."""
    try:
        given = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the server's configuration is not valid TOML: {error}") from error
    return make_config(**{**given, "objects": ("data",)})


def digest_of(encoder: Sequence[Agreed]) -> str:
    """Return the SHA-256 of the common encoder, or "" if each site has its own encoder."""
    return hashlib.sha256(msgspec.json.encode(encoder)).hexdigest() if encoder else ""


class Begun:
    """The configuration, the encoder and the data that a run began with."""

    def __init__(self, audit: Audit, run: str) -> None:
        events = audit.events(event="begin", run=run)
        self.run = run
        with audit.readable():
            self.configs = [ordered(event["config"]) for event in events if "config" in event]
        # Earlier versions logged neither the encoder nor the data.
        self.encoders = [event["encoder"] for event in events if "encoder" in event]
        every = audit.events(event="begin")  # all seeds share the data
        same = [event for event in every if all_seeds(str(event.get("run"))) == all_seeds(run)]
        self.data = [event["data"] for event in same if "data" in event]

    def check(self, config: RunConfig) -> None:
        """Refuse another configuration: states depend on the method, and noise on its scale."""
        if any(known != config for known in self.configs):
            raise Refusal(f"run '{self.run}' was begun here with another configuration")

    def check_data(self, fingerprint: str) -> None:
        """Refuse other data: a model card has one fingerprint, and a state fits only its data."""
        if any(known != fingerprint for known in self.data):
            hint = "start the site with those, or begin a new run"
            raise Refusal(f"run '{self.run}' was begun here with other data; {hint}")

    def news(self, config: RunConfig, text: str, encoder: str, data: str = "") -> Json:
        """Return the values that the log of the run still lacks. Refuse changed values."""
        self.check(config)
        if any(known != encoder for known in self.encoders):
            raise Refusal(f"run '{self.run}' was begun here with another encoder of its tables")
        if data:
            self.check_data(data)
        return {
            **({} if self.configs else {"config": text}),
            **({} if self.encoders else {"encoder": encoder}),
            **({} if self.data or not data else {"data": data}),
        }

    def encoder(self, folder: Path) -> list[Agreed]:
        """Read the encoder from the run's folder. It is empty if each site has its own."""
        if not self.encoders:
            why = "an earlier version began it, which did not note the encoder"
            raise Refusal(f"run '{self.run}' has tables, and {why}; resume it once more")
        if not self.encoders[0]:
            return []
        try:
            found = msgspec.json.decode((folder / ENCODER).read_bytes(), type=list[Agreed])
        except (OSError, msgspec.DecodeError):
            found = []
        if digest_of(found) != self.encoders[0]:
            raise Refusal(f"the encoder of run '{self.run}' is not whole in its runs/{self.run}")
        return found
