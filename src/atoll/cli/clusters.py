"""`atoll clusters`: the clusters of a finished GCFL run."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.cli.common import make_console, print_json, written
from atoll.cli.options import AS_JSON, PATH, SEED_OF_RUN, option, options


@click.command(
    short_help="Show a gcfl run's clusters: who split, when, why.",
    epilog="For example: atoll clusters gcfl-run --against local-run --beside fedavg-run",
)
@click.argument("folder", metavar="RUN_DIR", type=PATH)
@option("--against DIR", "A run on the same clients, such as local: who gains over it?", PATH)
@option("--beside DIR", "One more run to show next to it; repeatable.", PATH, multiple=True)
@options(
    SEED_OF_RUN, option("--out DIR", "Where to write.  [default: RUN_DIR/clusters]", PATH), AS_JSON
)
def clusters(
    folder: Path,
    against: Path | None,
    beside: tuple[Path, ...],
    seed: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Show the clusters of a gcfl run: who split, when, why, and who gains."""
    from atoll.analyses.clusters import study_clusters
    from atoll.analyses.clusters_view import cluster_files, cluster_parts, summary
    from atoll.present.files import check_output, write_all
    from atoll.present.layout import layout

    to = out or folder / "clusters"
    if folder.exists():
        check_output(to)
    found = study_clusters(folder, seed=seed, against=against, beside=beside)
    console = make_console(stderr=as_json)
    console.print(layout(cluster_parts(found), gap=2))
    written(console, write_all(to, cluster_files(found)))
    if as_json:
        print_json(summary(found))
