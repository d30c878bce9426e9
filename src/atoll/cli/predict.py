"""`atoll predict` and `atoll export`: the model of a finished run, for new data or elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli import common, options
from atoll.cli.options import PATH, command, option

if TYPE_CHECKING:
    from atoll.experiment.predictions import Predictions

BLOCK = option(
    "--block N",
    "Predict N nodes at a time.  [default: as many as fit in memory]",
    click.IntRange(min=1),
)
THRESHOLD = option(
    "--threshold P",
    "Raise an alert if the probability is at least P.  [default: the threshold of the run]",
    float,
)
TABLE = option("--out FILE", "Write this table (.parquet or .csv).", PATH, required=True)
NEW = "Read tables with the same columns as the training data from this folder."
JOINED = "Add the nodes in NEW to the training graph; their edges may refer to training nodes."


@command(
    "Predict new nodes with a run's model.",
    click.Argument(["run"], metavar="RUN", type=PATH),
    option("--data NEW", NEW, required=True),
    TABLE,
    option("--joined", JOINED),
    option("--client NAME", "Set the owner of all new nodes.  [default: owner column or folder]"),
    options.SEED_OF_RUN,
    option("--device NAME", "Compute on auto, cpu, cuda or cuda:1.", default="auto"),
    BLOCK,
    THRESHOLD,
    options.QUIET,
    example="atoll predict my-run --data next-week/ --joined --out scores.parquet",
)
def predict(run: Path, data: str, out: Path, quiet: bool, **given: Any) -> None:
    """Write id, client, class, alert and the probability of each class for the nodes in NEW.

    The column alert (yes or no) needs a threshold, either from the run or from --threshold.
    """
    from atoll.experiment.predict import predict as predicted
    from atoll.experiment.predictions import check_table

    check_table(out)
    write(predicted(run, data, **given), out, quiet=quiet)


def write(found: Predictions, out: Path, *, quiet: bool) -> None:
    """Write predictions, and print their number in each class."""
    import numpy as np

    found.write(out)
    if quiet:
        return
    console = common.make_console()
    common.print_notes(console, found.notes)
    names, counts = np.unique(found.labels, return_counts=True)
    parts = (f"{count:,} {name}" for name, count in zip(names, counts, strict=True))
    text = f"{len(found.ids):,} predicted: {', '.join(parts)}"
    if found.alert is not None and (alerts := found.alerts) is not None:
        name = found.classes[found.alert.positive]
        text += f"; {alerts.sum():,} alerts (p_{name} at least {found.alert.threshold:g})"
    common.print_text(console, text, style="")
    common.print_written(console, [out])


@command(
    "Write a run's model for use without Atoll.",
    click.Argument(["run"], metavar="RUN", type=PATH),
    option("--to FORM", "Export to pyg (standard layers of PyTorch Geometric).", default="pyg"),
    option(
        "--out DIR",
        "Write model.py, model.json and weights.pt into this new folder.  [default: RUN-FORM]",
        PATH,
    ),
    option("--client NAME", "Export this client's model, if each client has its own model."),
    options.SEED_OF_RUN,
    example="atoll export my-run --to pyg --out my-model",
)
def export(run: Path, to: str, out: Path | None, client: str | None, seed: int | None) -> None:
    """Export a run's model to a folder that needs only torch and torch_geometric.

    The folder contains model.py, the weights and the encoder of the tables.
    """
    from atoll.experiment.export import export as exported

    folder = out or Path(f"{run.name}-{to}")
    written = exported(run, folder, to=to, client=client or "", seed=seed)
    console = common.make_console()
    common.print_written(console, written)
    common.print_next(console, [f"python {folder / 'model.py'} nodes.csv edges.csv"])
