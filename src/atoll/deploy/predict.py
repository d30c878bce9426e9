"""A site's predictions on its data, with its delivered model and private parts. Nothing is sent."""

from __future__ import annotations

from pathlib import Path

import msgspec

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.deploy.delivery import verify_model
from atoll.deploy.kits import read_settings
from atoll.deploy.site_data import SUFFIX, read_site_data
from atoll.experiment.card import OWN
from atoll.experiment.config import RunConfig, make_config, parse_config
from atoll.experiment.model import read_encoder, read_model
from atoll.experiment.predict import Trained, predict_with
from atoll.experiment.predictions import Predictions
from atoll.experiment.problem import Data


def predict_at_site(
    folder: Path,
    kit: Path,
    data: Path,
    *,
    seed: int | None = None,
    joined: bool = False,
    block: int | None = None,
    threshold: float | None = None,
    device: str = "cpu",
) -> Predictions:
    """Verify a model that the server delivered, and predict the nodes of `data` with it.

    With `joined`, the new nodes join this site's graph. `experiment.predict.predict` describes the
    other arguments.
    """
    manifest = verify_model(folder, kit)
    number = min(manifest.rounds) if seed is None else seed
    if number not in manifest.rounds:
        known = ", ".join(map(str, manifest.rounds))
        raise ConfigError(f"the model in '{folder}' has no seed {number}; it has {known}")
    place = folder / f"seed-{number}"
    if not (place / OWN).exists():
        hint = "copy the folder whole, or delete it and let the administrator send the model again"
        raise ConfigError(f"'{place}' lacks {OWN}, which this site wrote; {hint}")
    given = parse_config(manifest.config, "the configuration")
    config = make_config(**{**given, "objects": ("data",)})
    own = str(read_settings(kit).get("data", ""))
    if joined and not own:
        raise ConfigError(f"'{kit}' names no data to join; start `atoll federate site` with them")
    config = msgspec.structs.replace(config, data=own, own=RunConfig().own)
    model = read_model(place)
    if why := (model.about or {}).get("incomplete"):
        raise ConfigError(f"the model in '{place}' lacks its private part: {why}; train again")
    trained = Trained.built(folder, config, number, model, read_encoder(place), device)
    new: Path | Data = data
    if data.suffix == SUFFIX:
        found = read_site_data(data)
        new = Federation((found.graph,), found.classes, found.name)
    return predict_with(
        trained, new, joined=joined, client=manifest.site, block=block, threshold=threshold
    )
