"""The commands that analyse a federation or finished runs: inspect, contribution, clusters, ..."""

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

    from atoll.present.tables import Part

VARY = (
    "One kind of difference alone: nodes (no edges), topology (one client's nodes, more random "
    "edges at each client), class-topology (random edges at other classes), or none."
)
RATIO = "Random edges of a topology, as a share of its edges.  [default: 0.5]"


@command(
    "Show what makes the clients of a federation differ.",
    *options.FEDERATION,
    options.SEED_OF_DATA,
    option("--out DIR", "Folder for plots and numbers.", PATH),
)
def inspect(out: Path | None, **given: object) -> None:
    """Show what makes the clients of a federation differ."""
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
    _print(console, inspection_tables(found), framed="center")
    if out is not None:
        paths = write_all(out, inspection_files(found, made.federation))
        _print(console, [f"Written: {', '.join(map(str, paths))}"])


@command(
    "Show what one client's participation does to each class.",
    *options.FEDERATION,
    option("--method NAME", "One with a global model.  [default: fedavg]"),
    option("--client K", "Number of the client in question.", int, default=0),
    *(options.ROUNDS, options.EPOCHS, options.SETTINGS, options.SEEDS, options.SEED),
    option("--vary WHAT", VARY, default="none"),
    option("--ratio R", RATIO, float),
    option("--out DIR", "Folder for plot and numbers.", PATH),
    options.AS_JSON,
    example="atoll contribution --data cora --clients 3 --client 0 --seeds 5",
)
def contribution(out: Path | None, as_json: bool, **given: Any) -> None:
    """Train with and without one client: what does it do to each class?"""
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
    "Show a gcfl run's clusters: who split, when, why.",
    click.Argument(["folder"], metavar="RUN_DIR", type=PATH),
    option("--against DIR", "A run on the same clients, such as local: who gains over it?", PATH),
    option("--beside DIR", "One more run to show next to it; repeatable.", PATH, multiple=True),
    options.SEED_OF_RUN,
    option("--out DIR", "Where to write.  [default: RUN_DIR/clusters]", PATH),
    options.AS_JSON,
    example="atoll clusters gcfl-run --against local-run --beside fedavg-run",
)
def clusters(folder: Path, out: Path | None, as_json: bool, **given: Any) -> None:
    """Show the clusters of a gcfl run: who split, when, why, and who gains."""
    from atoll.analyses.clusters import cluster_parts, study_clusters, summary
    from atoll.analyses.clusters_charts import cluster_files

    to = out or folder / "clusters"
    console = checked_console(to if folder.exists() else None, as_json=as_json)
    found = study_clusters(folder, **given)
    _print(console, cluster_parts(found), gap=2)
    _finish(console, to, cluster_files(found), summary(found) if as_json else None)


@command(
    "Propose when the clusters of gcfl should split.",
    options.METHOD,
    *options.FEDERATION,
    option("--rounds R", "Rounds without splits.  [default: 50]", int),
    *(options.EPOCHS, options.SEED, options.SETTINGS, *options.MACHINE),
    option("--grid", "List when other choices would split first."),
    option("--out DIR", "Folder for plot and numbers.", PATH),
    options.AS_JSON,
    name="tune-clusters",
    example="atoll tune-clusters --data molecules --protocol gcfl --rounds 50",
)
def tune_clusters(grid: bool, out: Path | None, as_json: bool, **given: object) -> None:
    """Run METHOD (default: gcfl) for a while without splits; propose eps1 and eps2."""
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
    option("--node ID", "The node; features and neighbours that decided are shown."),
    option("--data NEW", "Where the node is, if not in the training data.", PATH),
    option("--joined", "NEW holds new nodes of the training graph."),
    option("--client NAME", "Whose node and model, where several clients have such a node."),
    option("--top N", "Features and neighbours to show.", click.IntRange(min=1), default=10),
    option("--edges", "Instead: the edges that a method trusts, at each client (fedath)."),
    options.SEED_OF_RUN,
    option("--out DIR", "Where to write the edges.  [default: RUN/explain]", PATH),
    click.Option(
        ["--form"], type=click.Choice(["csv", "parquet"]), default="csv", show_default=True
    ),
    example="atoll explain my-run --node C17",
)
def explain(
    folder: Path, node: str | None, edges: bool, out: Path | None, form: str, **given: Any
) -> None:
    """Show which features and neighbours decided the class of a node.

    PyG's GNNExplainer works for every method that `atoll export` can write.
    """
    if edges == (node is not None):
        hint = "--edges for the edges that fedath trusts"
        raise ConfigError(f"give either --node ID to explain a prediction, or {hint}")
    from atoll.analyses import explain as analysis
    from atoll.present.files import write_all

    console, to = make_console(), out or folder / "explain"
    if node is not None:
        reasons = analysis.explain_node(folder, node, **given)
        _print(console, analysis.node_tables(reasons), framed="left")
        return
    found = analysis.explain(folder, given["seed"])
    write_all(to, analysis.explanation_files(found, form))
    _print(console, [analysis.explanation_table(found)], framed="left")
    console.print(f"[dim]one folder per client, summary.json and edges.png in {to}[/dim]")


@command(
    "Compare the similarities that methods see with the data's.",
    click.Argument(["folders"], metavar="RUN_DIR...", nargs=-1, required=True, type=PATH),
    option("--seed S", "Which of the runs' seeds.  [default: first]", int),
    option("--out DIR", "Where to write.  [default: similarity in the first RUN_DIR]", PATH),
    example="atoll similarity fediih-run fedpub-run fedgta-run",
)
def similarity(folders: tuple[Path, ...], seed: int | None, out: Path | None) -> None:
    """Compare how alike fediih, fedpub, fedgta or fedaux find clients with how alike data are."""
    from atoll.analyses.similarity import read_similarities, similarity_files, similarity_table

    to = out or folders[0] / "similarity"
    console = checked_console(to if folders[0].exists() else None)
    found = read_similarities(folders, seed)
    _print(console, [similarity_table(found)], framed="left")
    _finish(console, to, similarity_files(found))


def checked_console(out: Path | None, *, as_json: bool = False) -> Console:
    """The console, once files can be written into the folder, if there is one."""
    from atoll.present.files import check_output

    if out is not None:
        check_output(out)
    return make_console(stderr=as_json)


def _print(console: Console, parts: Iterable[Part], **how: Any) -> None:
    from atoll.present.tables import layout

    console.print(layout(parts, **how))


def _finish(
    console: Console, out: Path | None, files: Mapping[str, object], summary: object = None
) -> None:
    """Write the files if there is a folder, then print the summary as JSON; null is undefined."""
    from atoll.present.files import plain_json, write_all

    if out is not None:
        print_written(console, write_all(out, files))
    if summary is not None:
        click.echo(json.dumps(plain_json(summary)))
