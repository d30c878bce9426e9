"""`atoll federate predict`: a delivered model, used at its site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from atoll.cli import options
from atoll.cli.federate.session import KIT, open_kit
from atoll.cli.options import PATH, command, option
from atoll.cli.predict import BLOCK, TABLE, THRESHOLD, write

JOINED = "NEW holds new nodes of this site's graph; its edges may name old nodes."


@command(
    "Predict your nodes with a model that the server delivered.",
    click.Argument(["model"], metavar="MODEL", type=PATH),
    KIT,
    option("--data NEW", "Tables like those that you took part with.", PATH, required=True),
    TABLE,
    option("--joined", JOINED),
    options.SEED_OF_RUN,
    option("--device NAME", "Where to predict: cpu, cuda or auto.", default="cpu"),
    BLOCK,
    THRESHOLD,
    options.QUIET,
    example="atoll federate predict bank-a/atoll/runs/RUN/model --kit bank-a --data new/ "
    "--out scores.csv",
)
def predict(model: Path, kit: Path, data: Path, out: Path, quiet: bool, **given: Any) -> None:
    """Verify the delivered MODEL and write its predictions for NEW. Nothing leaves the site."""
    open_kit(kit, "site")
    from atoll.deploy.predict import predict_at_site
    from atoll.experiment.predictions import check_table

    check_table(out)
    write(predict_at_site(model, kit, data, **given), out, quiet=quiet)
