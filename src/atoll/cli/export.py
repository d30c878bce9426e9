"""`atoll export`: the model of a finished run, for use without Atoll."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.cli import common, options
from atoll.cli.options import PATH, command, option


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
