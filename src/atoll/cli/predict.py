"""`atoll predict` and `atoll export`: the model of a finished run, for new data or elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli import common, options
from atoll.cli.options import PATH, command, option

if TYPE_CHECKING:
    from atoll.experiment.predictions import Predictions

BLOCK = option("--block N", "Nodes at a time.  [default: all that fit]", click.IntRange(min=1))
THRESHOLD = option("--threshold P", "Alert from this probability on.  [default: the run's]", float)
TABLE = option("--out FILE", "A table to write: .parquet or .csv.", PATH, required=True)


@command(
    "Predict new nodes with a run's model.",
    click.Argument(["run"], metavar="RUN", type=PATH),
    option("--data NEW", "A folder of tables like those of the training.", required=True),
    TABLE,
    option("--joined", "NEW holds new nodes of the training graph; its edges may name old nodes."),
    option("--client NAME", "Owner of all new nodes.  [default: their owner column or folder]"),
    options.SEED_OF_RUN,
    option("--device NAME", "auto, cpu, cuda or cuda:1.", default="auto"),
    BLOCK,
    THRESHOLD,
    options.QUIET,
    example="atoll predict my-run --data next-week/ --joined --out scores.parquet",
)
def predict(run: Path, data: str, out: Path, quiet: bool, **given: Any) -> None:
    """Write id, client, class, alert and the probability of each class for the nodes in NEW.

    The column alert (yes or no) needs a threshold: the run's own, or the given one.
    """
    from atoll.experiment.predict import predict as predicted
    from atoll.experiment.predictions import check_table

    check_table(out)
    write(predicted(run, data, **given), out, quiet=quiet)


def write(found: Predictions, out: Path, *, quiet: bool) -> None:
    """Write predictions, and print how many there are of each class."""
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
    option("--to FORM", "pyg: stock layers of PyTorch Geometric.", default="pyg"),
    option("--out DIR", "A new folder for model.py, model.json and weights.pt.", PATH),
    option("--client NAME", "Whose model, for a method with one for each client."),
    options.SEED_OF_RUN,
    example="atoll export my-run --to pyg --out my-model",
)
def export(run: Path, to: str, out: Path | None, client: str | None, seed: int | None) -> None:
    """Write a folder that needs only torch and torch_geometric: model.py, weights and encoder."""
    from atoll.experiment.export import export as exported

    folder = out or Path(f"{run.name}-{to}")
    written = exported(run, folder, to=to, client=client or "", seed=seed)
    console = common.make_console()
    common.print_written(console, written)
    common.print_next(console, [f"python {folder / 'model.py'} nodes.csv edges.csv"])
