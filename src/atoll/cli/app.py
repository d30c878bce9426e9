"""The command line. Heavy packages are imported by the commands that need them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll import __version__
from atoll.cli.common import (
    AtollSubgroup,
    chosen_options,
    fresh_folder,
    make_console,
    or_stopped,
    say,
    written,
)
from atoll.cli.compare import compare
from atoll.cli.federate import federate
from atoll.cli.options import (
    DATA_ROOT,
    EPOCHS,
    FEDERATION,
    FILES,
    MACHINE,
    ROUNDS,
    SEED,
    SEEDS,
    SETTINGS,
    TRAINING,
    options,
)
from atoll.cli.report import report
from atoll.cli.reproduce import reproduce
from atoll.cli.tune import tune
from atoll.cli.watch import watch

if TYPE_CHECKING:
    from atoll.experiment.result import Result


class AtollGroup(AtollSubgroup):
    """Turns errors into one sentence."""

    def invoke(self, ctx: click.Context) -> Any:
        from atoll.core.errors import AtollError

        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            ctx.exit(130)
        except Exception as error:
            # A reader that went away (`atoll datasets | head`) is click's to handle.
            if ctx.obj["debug"] or getattr(error, "errno", None) == errno.EPIPE:
                raise
            if isinstance(error, AtollError):
                click.echo(f"error: {error}", err=True)
                ctx.exit(2)
            if isinstance(error, OSError) and error.strerror:
                where = f" '{error.filename}'" if error.filename else ""
                click.echo(f"error: {error.strerror}{where}", err=True)
                ctx.exit(2)
            text = f"internal error: {type(error).__name__}: {error}"
            click.echo(f"{text}; `atoll --debug ...` shows where", err=True)
            ctx.exit(1)


@click.group(cls=AtollGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(__version__, prog_name="atoll")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Federated graph learning: run, compare and deploy methods on private graphs."""
    ctx.obj = {"debug": debug}
    # Threads that wait in a busy loop starve each other when something else runs on the machine
    # (measured: 0.16 s a round in place of 0.04 s). Read when torch is loaded, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


main.add_command(compare)
main.add_command(federate)
main.add_command(report)
main.add_command(reproduce)
main.add_command(tune)
main.add_command(watch)


@main.command(
    short_help="Run a method on a federation and save the result.",
    epilog="For example: atoll run fedprox --data cora --clients 10 --set mu=0.1 --seeds 3",
)
@click.argument("method", required=False)
@options(*FEDERATION, *TRAINING, *FILES)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    settings: tuple[str, ...],
    own: tuple[str, ...],
    config_file: Path | None,
    out: Path | None,
    resume_from: Path | None,
    save_every: float,
    log: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Run METHOD (default: fedavg) on a federation and save the result."""
    from atoll.experiment.config import make_config, read_config
    from atoll.experiment.run import resume, run_config
    from atoll.present.terminal import Watcher

    chosen = chosen_options(given, set=settings, own=own)
    watcher = Watcher(make_console(stderr=as_json or quiet), quiet=quiet)
    more: dict[str, Any] = {"observer": watcher, "save_every": save_every, "log": log}
    if resume_from is not None:
        _refuse_mixing(chosen, config_file, out)
        result = or_stopped(ctx, watcher, resume_from, lambda: resume(resume_from, **more))
    else:
        base = {} if config_file is None else read_config(config_file)
        for name in ("set", "own"):
            if name in chosen:
                chosen[name] = {**base.get(name, {}), **chosen[name]}
        config = make_config(**{**base, **chosen})
        folder = out or fresh_folder(f"{config.method}-{config.data}")
        result = or_stopped(ctx, watcher, folder, lambda: run_config(config, out=folder, **more))
    _show([result], folder=result.out, as_json=as_json, quiet=quiet)


def _refuse_mixing(chosen: dict[str, Any], config_file: Path | None, out: Path | None) -> None:
    from atoll.core.errors import ConfigError

    extra = {**chosen, "config": config_file, "out": out}
    names = [name for name, value in extra.items() if value is not None]
    if names:
        option = "--" + names[0].replace("_", "-")
        given = f"METHOD '{chosen['method']}'" if names[0] == "method" else option
        raise ConfigError(
            f"--resume continues a run with its own configuration, but {given} was given; leave "
            "everything out but --json and --quiet"
        )


def _show(results: list[Result], *, folder: Path | None, as_json: bool, quiet: bool) -> None:
    from rich.text import Text

    from atoll.present.terminal import result_table

    if not quiet:
        console = make_console(stderr=as_json)
        console.print(result_table(results))
        console.print(Text(f"Saved in {folder}", style="dim"), soft_wrap=True)
    if as_json:
        click.echo(json.dumps(results[0].summary()))


@main.command(short_help="Compare three methods on the built-in federation.")
@click.option("--rounds", type=int, default=60, show_default=True, metavar="R", help="Rounds.")
@click.option("--seeds", type=int, default=3, show_default=True, metavar="N", help="Seeds.")
@click.option("--clients", type=int, default=5, show_default=True, metavar="K", help="Clients.")
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path), help="Folder for the results."
)
@click.pass_context
def demo(ctx: click.Context, rounds: int, seeds: int, clients: int, out: Path | None) -> None:
    """Three methods on the built-in federation: what does working together gain?"""
    from atoll.experiment.config import make_config
    from atoll.experiment.folder import check_folder
    from atoll.experiment.run import run_config
    from atoll.present.terminal import Watcher

    folder, names = out or fresh_folder("demo"), ("local", "fedavg", "fedath")
    given = {"clients": clients, "rounds": rounds, "seeds": seeds}
    # On this small graph the evaluator of FedATH's public code does better than its paper's.
    settings = {"fedath": {"evaluator": "gnn", "hsic": "trace/N", "entropy": "sum", "lam": 0.001}}
    configs = [make_config(method=name, set=settings.get(name, {}), **given) for name in names]
    for name in names:
        check_folder(folder / name, resuming=False)
    console = make_console(stderr=False)
    console.print(f"{clients} libraries own parts of one citation graph; nobody shows theirs.")
    results = []
    for config in configs:
        to = folder / config.method
        watcher = Watcher(console, quiet=False, label=f"{config.method:8}")
        action = lambda c=config, t=to, w=watcher: run_config(c, out=t, observer=w)  # noqa: E731
        results.append(or_stopped(ctx, watcher, to, action))
    _show(results, folder=folder, as_json=False, quiet=False)


@main.command(short_help="List the methods, or say everything about one.")
@click.argument("name", required=False)
def methods(name: str | None) -> None:
    """List the methods; with NAME, everything about one."""
    from atoll.present.catalogue import method_page, method_table

    make_console(stderr=False).print(method_table() if name is None else method_page(name))


@main.command(short_help="List the data sets, or say everything about one.")
@click.argument("name", required=False)
@DATA_ROOT
def datasets(name: str | None, data_root: str | None) -> None:
    """List the data sets; with NAME, size, source and where it is looked for."""
    from atoll.present.catalogue import dataset_page, dataset_table

    page = dataset_table(data_root) if name is None else dataset_page(name, data_root)
    make_console(stderr=False).print(page)


@main.group(cls=AtollSubgroup)
def data() -> None:
    """Fetch and check data sets."""


@data.command()
@click.argument("names", nargs=-1, required=True)
@click.option(
    "--mirror",
    metavar="DIR|URL",
    help="Where NAME.tar.xz is.  [default: ATOLL_MIRROR, else the public source]",
)
@click.option("--data-root", metavar="DIR", help="Where to put them.  [default: ATOLL_DATA]")
@click.option("--force", is_flag=True, help="Replace what is there.")
def fetch(names: tuple[str, ...], mirror: str | None, data_root: str | None, force: bool) -> None:
    """Get data sets, or GCFL's groups of them, from their public source or from a mirror."""
    from atoll.data.public.fetch import fetch as fetch_one
    from atoll.data.public.registry import sets_of_group

    wanted = [one for name in names for one in sets_of_group(name) or (name,)]
    for name in wanted:
        folder = fetch_one(name, data_root, mirror, force=force, progress=say)
        click.echo(f"{name}: ready in {folder}")


@data.command()
@DATA_ROOT
@click.pass_context
def check(ctx: click.Context, data_root: str | None) -> None:
    """Load what is present and compare it with the published counts."""
    from atoll.data.public.fetch import check as check_all

    found = [row for row in check_all(data_root, progress=say) if row[1] or row[2]]
    for name, _, problem in found:
        click.echo(f"{name}: {problem or 'as published'}")
    if not found:
        click.echo("no data set is here; get one with: atoll data fetch NAME")
    if any(problem for _, _, problem in found):
        ctx.exit(2)


@main.command(
    short_help="Divide data among clients and save them in one file.",
    epilog="For example: atoll partition --data cora --clients 10 --out cora10.atoll, then "
    "atoll run fedavg --data cora10.atoll, here or elsewhere",
)
@options(*FEDERATION)
@click.option("--seed", type=int, metavar="S", help="Of partition and split.  [default: 0]")
@click.option(
    "--out",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path),
    help="The file to write; it must not exist.",
)
def partition(out: Path, own: tuple[str, ...], **given: Any) -> None:
    """Divide data as a run would, and save the federation in one file (--data FILE)."""
    from rich.text import Text

    from atoll.experiment.config import make_config
    from atoll.experiment.problem import save_divided

    asked = make_config(**chosen_options(given, own=own))
    path, federation, notes = save_divided(asked, out)
    console = make_console(stderr=False)
    for note in notes:
        console.print(Text(note, style="dim"))
    size = path.stat().st_size / 1e6
    console.print(Text(f"{federation!r} saved in {path} ({size:.1f} MB)"), soft_wrap=True)


@main.command()
@options(*FEDERATION)
@click.option("--seed", type=int, metavar="S", help="Of partition and split.  [default: 0]")
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path), help="Folder for plots and numbers."
)
def inspect(out: Path | None, own: tuple[str, ...], **given: Any) -> None:
    """Show what makes the clients of a federation differ."""
    from rich.text import Text

    from atoll.analyses.inspect import inspect_federation
    from atoll.experiment.config import make_config, resolve
    from atoll.experiment.folder import check_folder
    from atoll.experiment.problem import make_federation, need_one_graph

    asked = make_config(**chosen_options(given, own=own))
    config, rules = resolve(asked)
    if out is not None:
        check_folder(out, resuming=True)
    federation, notes, _ = make_federation(config, rules, asked.seed, None, asked)
    need_one_graph(federation)
    console = make_console(stderr=False)
    for note in notes:
        console.print(Text(note, style="dim"))
    console.print(inspect_federation(federation, out, seed=asked.seed))


@main.command(
    short_help="Show what one client's participation does to each class.",
    epilog="For example: atoll contribution --data cora --clients 3 --client 0 --seeds 5",
)
@options(*FEDERATION)
@click.option("--method", metavar="NAME", help="One with a global model.  [default: fedavg]")
@click.option(
    "--client",
    type=int,
    default=0,
    show_default=True,
    metavar="K",
    help="Number of the client in question.",
)
@options(ROUNDS, EPOCHS, SETTINGS, SEEDS, SEED)
@click.option(
    "--vary",
    default="none",
    show_default=True,
    metavar="WHAT",
    help="One kind of difference alone: nodes (no edges), topology (one client's nodes, more "
    "random edges at each client), class-topology (random edges at other classes), or none.",
)
@click.option(
    "--ratio",
    type=float,
    metavar="R",
    help="Random edges of a topology, as a share of its edges.  [default: 0.5]",
)
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path), help="Folder for plot and numbers."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def contribution(
    client: int,
    vary: str,
    ratio: float | None,
    settings: tuple[str, ...],
    own: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Train with and without one client: what does it do to each class?"""
    from rich.text import Text

    from atoll.analyses import contribution_show as show
    from atoll.analyses.contribution import contribution as compare
    from atoll.experiment.config import make_config
    from atoll.present.plots import check_output

    config = make_config(**chosen_options(given, set=settings, own=own))
    if out is not None:
        check_output(out)
    console = make_console(stderr=as_json)
    with show.progress(console, config) as on_round:
        found = compare(config, client=client, vary=vary, ratio=ratio, on_round=on_round)
    for note in found.notes:
        console.print(Text(note, style="dim"))
    console.print(show.contribution_tables(found))
    if out is not None:
        written(console, show.write_contribution(found, out))
    if as_json:
        click.echo(json.dumps(show.summary(found)))


@main.command(short_help="Show which edges a method trusts (fedath).")
@click.argument("folder", metavar="RESULT_DIR", type=click.Path(path_type=Path))
@click.option("--seed", type=int, metavar="S", help="Which of the run's seeds.  [default: first]")
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where to write.  [default: RESULT_DIR/explain]",
)
@click.option("--form", type=click.Choice(["csv", "parquet"]), default="csv", show_default=True)
def explain(folder: Path, seed: int | None, out: Path | None, form: str) -> None:
    """Show which edges a method trusts (fedath): weights per client, plots, distances."""
    from atoll.analyses.explain import explain as explain_run
    from atoll.analyses.explain import explanation_table, write_explanation

    found = explain_run(folder, seed)
    to = out or folder / "explain"
    write_explanation(found, to, form)
    console = make_console(stderr=False)
    console.print(explanation_table(found))
    console.print(f"[dim]one folder per client, summary.json and edges.png in {to}[/dim]")


@main.command(
    "tune-clusters",
    short_help="Propose when the clusters of gcfl should split.",
    epilog="For example: atoll tune-clusters --data molecules --protocol gcfl --rounds 50",
)
@click.argument("method", required=False)
@options(*FEDERATION)
@click.option("--rounds", type=int, metavar="R", help="Rounds without splits.  [default: 50]")
@options(EPOCHS, SEED, SETTINGS, *MACHINE)
@click.option("--grid", is_flag=True, help="List when other choices would split first.")
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path), help="Folder for plot and numbers."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def tune_clusters(
    grid: bool,
    settings: tuple[str, ...],
    own: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Run METHOD (default: gcfl) for a while without splits; propose eps1 and eps2."""
    from rich.text import Text

    from atoll.analyses import cluster_thresholds_show as show
    from atoll.analyses.cluster_thresholds import tune_clusters as tune
    from atoll.experiment.config import make_config
    from atoll.present.plots import check_output

    config = make_config(**{"method": "gcfl", **chosen_options(given, set=settings, own=own)})
    if out is not None:
        check_output(out)
    console = make_console(stderr=as_json)
    with show.progress(console, config) as on_round:
        found = tune(config, on_round=on_round)
    for note in found.notes:
        console.print(Text(note, style="dim"))
    console.print(show.tuning_text(found, grid=grid))
    console.print(Text("  " + show.command(found)), soft_wrap=True)
    if out is not None:
        written(console, show.write_tuning(found, out))
    if as_json:
        click.echo(json.dumps(show.summary(found)))


@main.command(
    short_help="Show a gcfl run's clusters: who split, when, why.",
    epilog="For example: atoll clusters gcfl-run --against local-run --beside fedavg-run",
)
@click.argument("folder", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option(
    "--against",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="A run on the same clients, such as local: who gains over it?",
)
@click.option(
    "--beside",
    metavar="DIR",
    type=click.Path(path_type=Path),
    multiple=True,
    help="One more run to show next to it; repeatable.",
)
@click.option("--seed", type=int, metavar="S", help="Which of the run's seeds.  [default: first]")
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where to write.  [default: RUN_DIR/clusters]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def clusters(
    folder: Path,
    against: Path | None,
    beside: tuple[Path, ...],
    seed: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Show the clusters of a gcfl run: who split, when, why, and who gains."""
    from atoll.analyses import clusters_show as show
    from atoll.analyses.clusters import study_clusters
    from atoll.present.plots import check_output

    to = out or folder / "clusters"
    if folder.exists():
        check_output(to)
    found = study_clusters(folder, seed=seed, against=against, beside=beside)
    console = make_console(stderr=as_json)
    console.print(show.clusters_text(found))
    written(console, show.write_clusters(found, to))
    if as_json:
        click.echo(json.dumps(show.summary(found)))


@main.command(
    short_help="Compare the similarities that methods see with the data's.",
    epilog="For example: atoll similarity fediih-run fedpub-run fedgta-run",
)
@click.argument(
    "folders", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--seed", type=int, metavar="S", help="Which of the runs' seeds.  [default: first]")
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where to write.  [default: similarity in the first RUN_DIR]",
)
def similarity(folders: tuple[Path, ...], seed: int | None, out: Path | None) -> None:
    """Compare how alike clients seem to fediih, fedpub or fedgta with how alike their data are."""
    from atoll.analyses.similarity import read_similarities, similarity_table, write_similarities
    from atoll.present.plots import check_output

    to = out or folders[0] / "similarity"
    if folders[0].exists():
        check_output(to)
    found = read_similarities(folders, seed)
    console = make_console(stderr=False)
    console.print(similarity_table(found))
    written(console, write_similarities(found, to))
