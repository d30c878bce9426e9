"""The commands that analyse a federation or finished runs: inspect, clusters, explain, ..."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli import options
from atoll.cli.common import config_of, make_console, pop, print_next, print_notes, print_written
from atoll.cli.options import PATH, command, option
from atoll.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.present.tables import Part, Table

VARY = (
    "Keep only one kind of heterogeneity: nodes (no edges), topology (every client has the graph "
    "of --client and random edges), class-topology (random edges between classes); none keeps all."
)
RATIO = "Set the number of random edges, as a fraction of the edges of --client.  [default: 0.5]"
FILES = option("--out DIR", "Write plots and numbers into this folder.", PATH)


@command(
    "Measure how the clients of a federation differ.",
    *options.FEDERATION,
    options.SEED_OF_DATA,
    FILES,
)
def inspect(out: Path | None, **given: object) -> None:
    """Measure how the clients of a federation differ."""
    from atoll.analyses.inspect import inspection_files, inspection_tables
    from atoll.data.measure.heterogeneity import describe
    from atoll.experiment.problem import Problem, nearly_single_class, need_one_graph
    from atoll.present.files import write_all

    config = config_of(given)
    console = checked_console(out)
    made = Problem.of(config).divide(config.seed)
    need_one_graph(made.federation)
    print_notes(console, [*made.notes, *nearly_single_class(made.federation)])
    found = describe(made.federation, seed=config.seed)
    _print_noted(console, inspection_tables(found))
    if out is not None:
        paths = write_all(out, inspection_files(found, made.federation))
        _print(console, [f"Written: {', '.join(map(str, paths))}"])


@command(
    "Measure one client's effect on the accuracy of each class.",
    *options.FEDERATION,
    option("--method NAME", "Train this method, which needs a global model.  [default: fedavg]"),
    option("--client K", "Measure the effect of the client with this number.", int, default=0),
    *(options.ROUNDS, options.EPOCHS, options.SETTINGS, options.SEEDS, options.SEED),
    option("--vary WHAT", VARY, default="none"),
    option("--ratio R", RATIO, float),
    FILES,
    options.AS_JSON,
    example="atoll contribution --data cora --clients 3 --client 0 --seeds 5",
)
def contribution(out: Path | None, as_json: bool, **given: Any) -> None:
    """Train with and without one client, and compare the accuracy of each class."""
    from atoll.analyses import contribution as analysis
    from atoll.experiment.config import resolve
    from atoll.present.terminal import progress

    how, config = pop(given, "client", "vary", "ratio"), config_of(given)
    console = checked_console(out, as_json=as_json)
    rounds = resolve(config)[0].rounds or 1
    with progress(console, 2 * config.seeds * rounds) as move:

        def on_round(seed: int, takes_part: bool, done: int) -> None:
            which = f"seed {seed}, {'with' if takes_part else 'without'} the client"
            move(1, which)
            if not console.is_terminal and done == rounds:
                console.print(f"{which}: {done} rounds")

        found = analysis.contribution(config, on_round=on_round, **how)
    print_notes(console, found.notes)
    _print(console, analysis.contribution_parts(found))
    files = analysis.contribution_files(found) if out else {}
    _finish(console, out, files, analysis.summary(found) if as_json else None)


@command(
    "Show the clusters of a GCFL run and why they split.",
    click.Argument(["folder"], metavar="RUN_DIR", type=PATH),
    option(
        "--against DIR",
        "Measure each client's gain over this run on the same clients, such as local.",
        PATH,
    ),
    option("--beside DIR", "Also show this run for comparison; repeatable.", PATH, multiple=True),
    options.SEED_OF_RUN,
    option("--out DIR", "Write into this folder.  [default: RUN_DIR/clusters]", PATH),
    options.AS_JSON,
    example="atoll clusters gcfl-run --against local-run --beside fedavg-run",
)
def clusters(folder: Path, out: Path | None, as_json: bool, **given: Any) -> None:
    """Show the clusters of a GCFL run, the round and reason of each split, and clients' gains."""
    from atoll.analyses.clusters import cluster_parts, study_clusters, summary
    from atoll.analyses.clusters_charts import cluster_files

    to = out or folder / "clusters"
    console = checked_console(to if folder.exists() else None, as_json=as_json)
    found = study_clusters(folder, **given)
    _print(console, cluster_parts(found), gap=2)
    _finish(console, to, cluster_files(found), summary(found) if as_json else None)


@command(
    "Propose GCFL's split thresholds eps1 and eps2.",
    options.METHOD,
    *options.FEDERATION,
    option("--rounds R", "Train for R rounds without splits.  [default: 50]", int),
    *(options.EPOCHS, options.SEED, options.SETTINGS, *options.MACHINE),
    option("--grid", "List the round of the first split for other thresholds."),
    FILES,
    options.AS_JSON,
    name="tune-clusters",
    example="atoll tune-clusters --data molecules --protocol gcfl --rounds 50",
)
def tune_clusters(grid: bool, out: Path | None, as_json: bool, **given: object) -> None:
    """Run METHOD (default: gcfl) without splits, and propose the thresholds eps1 and eps2."""
    from atoll.analyses import cluster_thresholds as analysis
    from atoll.present.terminal import progress

    config = config_of(given, method="gcfl")
    console = checked_console(out, as_json=as_json)
    with progress(console, config.rounds or analysis.ROUNDS, "without splits") as move:
        found = analysis.tune_clusters(config, on_round=lambda done: move(1))
    print_notes(console, found.notes)
    _print(console, analysis.threshold_parts(found, grid=grid), gap=2)
    print_next(console, [analysis.command(found)])
    files = analysis.threshold_files(found) if out else {}
    _finish(console, out, files, analysis.summary(found) if as_json else None)


@command(
    "Show why a model predicts a node's class.",
    click.Argument(["folder"], metavar="RUN", type=PATH),
    option("--node ID", "Explain the prediction of this node."),
    option("--data NEW", "Read the node from NEW if it is not in the training data.", PATH),
    option("--joined", "Add the nodes in NEW to the training graph."),
    option("--client NAME", "Select the client if several clients have a node with this ID."),
    option(
        "--top N",
        "Show the N strongest features and neighbours.",
        click.IntRange(min=1),
        default=10,
    ),
    option("--edges", "Write the edge weights that FedATH learned at each client instead."),
    options.SEED_OF_RUN,
    option("--out DIR", "Write the edges into this folder.  [default: RUN/explain]", PATH),
    click.Option(
        ["--form"],
        type=click.Choice(["csv", "parquet"]),
        default="csv",
        show_default=True,
        help="Select the file format of the edges.",
    ),
    example="atoll explain my-run --node C17",
)
def explain(
    folder: Path, node: str | None, edges: bool, out: Path | None, form: str, **given: Any
) -> None:
    """Show the features and neighbours that decided the predicted class of a node.

    The command uses PyG's GNNExplainer for every method that `atoll export` can write.
    """
    if edges == (node is not None):
        hint = "--edges to write FedATH's edge weights"
        raise ConfigError(f"give either --node ID to explain a prediction, or {hint}")
    from atoll.analyses import explain as analysis
    from atoll.present.files import write_all

    console, to = make_console(), out or folder / "explain"
    if node is not None:
        reasons = analysis.explain_node(folder, node, **given)
        _print_noted(console, analysis.node_tables(reasons))
        return
    found = analysis.explain(folder, given["seed"])
    write_all(to, analysis.explanation_files(found, form))
    _print_noted(console, [analysis.explanation_table(found)])
    console.print(f"[dim]one folder per client, summary.json and edges.png in {to}[/dim]")


@command(
    "Compare methods' client similarities with the data.",
    click.Argument(["folders"], metavar="RUN_DIR...", nargs=-1, required=True, type=PATH),
    option("--seed S", "Select one seed of the runs.  [default: the first seed]", int),
    option(
        "--out DIR", "Write into this folder.  [default: similarity in the first RUN_DIR]", PATH
    ),
    example="atoll similarity fediih-run fedpub-run fedgta-run",
)
def similarity(folders: tuple[Path, ...], seed: int | None, out: Path | None) -> None:
    """Compare the client similarities of fediih, fedpub, fedgta or fedaux with the data."""
    from atoll.analyses.similarity import read_similarities, similarity_files, similarity_table

    to = out or folders[0] / "similarity"
    console = checked_console(to if folders[0].exists() else None)
    found = read_similarities(folders, seed)
    _print_noted(console, [similarity_table(found)])
    _finish(console, to, similarity_files(found))


def checked_console(out: Path | None, *, as_json: bool = False) -> Console:
    """Return the console. If `out` is given, first check that plots can be written there."""
    from atoll.present.files import check_output

    if out is not None:
        check_output(out)
    return make_console(stderr=as_json)


def _print(console: Console, parts: Iterable[Part], **how: Any) -> None:
    from atoll.present.tables import layout

    console.print(layout(parts, **how))


def _print_noted(console: Console, tables: Iterable[Table]) -> None:
    from atoll.present.terminal import noted_table

    for table in tables:
        console.print(noted_table(table))


def _finish(
    console: Console, out: Path | None, files: Mapping[str, object], summary: object = None
) -> None:
    """Write the files if `out` is given.

    Print the summary, if given, as JSON with null for undefined numbers.
    """
    from atoll.present.files import plain_json, write_all

    if out is not None:
        print_written(console, write_all(out, files))
    if summary is not None:
        click.echo(json.dumps(plain_json(summary)))
