"""The command line. Heavy packages are imported by the commands that need them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.study.result import Result


class AtollGroup(click.Group):
    """Turns errors into one sentence, and unknown commands into a suggestion."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = click.utils.make_str(args[0])
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            from atoll.core.errors import unknown

            raise click.UsageError(str(unknown("command", name, self.commands)))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        from atoll.core.errors import AtollError

        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except AtollError as error:
            if ctx.obj["debug"]:
                raise
            click.echo(f"error: {error}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            ctx.exit(130)
        except Exception as error:
            if ctx.obj["debug"]:
                raise
            name = type(error).__name__
            click.echo(
                f"internal error: {name}: {error}; `atoll --debug ...` shows where", err=True
            )
            ctx.exit(1)


@click.group(cls=AtollGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(__version__, prog_name="atoll")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Federated graph learning: run, compare and deploy methods on private graphs."""
    ctx.obj = {"debug": debug}


@main.command()
@click.argument("method", required=False)
@click.option("--data", help="lagoon (built in), a data set's name, or a path.  [default: lagoon]")
@click.option("--clients", type=int, help="Number of clients.")
@click.option("--partition", help="How the graph is divided: louvain, metis, column:NAME, ...")
@click.option("--split", help="How nodes become training, validation and test nodes.")
@click.option(
    "--protocol", help="strict, fedath, fedtad, fediih, gcfl or openfgl.  [default: strict]"
)
@click.option("--rounds", type=int, help="Communication rounds.")
@click.option("--epochs", type=int, help="Local epochs per round.")
@click.option("--fraction", type=float, help="Share of clients in each round.  [default: 1]")
@click.option("--seeds", type=int, help="How many seeds to run.  [default: 1]")
@click.option("--seed", type=int, help="The first seed.  [default: 0]")
@click.option("--engine", help="auto, serial, fused or wire.  [default: auto]")
@click.option("--device", help="auto, cpu or cuda.  [default: auto]")
@click.option("--chunk", type=int, help="Most clients in one program (fused); bounds memory.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="A hyper-parameter of method, net or optimizer; repeatable.",
)
@click.option("--evaluate", help="Which model is scored: deployed or local.")
@click.option(
    "--compat", multiple=True, help="Switch on a known fault of a public code; repeatable."
)
@click.option("--allow", multiple=True, help="Accept clients with no-edge or single-class.")
@click.option("--schema", help="Column roles of your own tables (TOML).")
@click.option(
    "--own",
    multiple=True,
    metavar="KEY=VALUE",
    help="How to treat your own data: dangling=drop, self_loops=keep, ...; repeatable.",
)
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="A TOML file of options."
)
@click.option("--data-root", help="Where data sets are looked for (or ATOLL_DATA).")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the result.")
@click.option(
    "--resume", "resume_from", type=click.Path(path_type=Path), help="Continue a stopped run."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
@click.option("--quiet", is_flag=True, help="No progress, no table.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    settings: tuple[str, ...],
    own: tuple[str, ...],
    config_file: Path | None,
    out: Path | None,
    resume_from: Path | None,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Run METHOD (default: fedavg) on a federation and save the result."""
    from atoll.study.config import make_config, read_config
    from atoll.study.run import resume, run_config
    from atoll.study.show import Watcher

    chosen = {key: value for key, value in given.items() if value not in (None, ())}
    for name, texts in (("set", settings), ("own", own)):
        if texts:
            chosen[name] = dict(_pair(name, text) for text in texts)
    with Watcher(_console(stderr=as_json or quiet), quiet=quiet) as watcher:
        if resume_from is not None:
            _refuse_mixing(chosen, config_file, out)
            result = _or_stopped(ctx, lambda: resume(resume_from, watcher))
        else:
            base = {} if config_file is None else read_config(config_file)
            for name in ("set", "own"):
                if name in chosen:
                    chosen[name] = {**base.get(name, {}), **chosen[name]}
            config = make_config(**{**base, **chosen})
            folder = out or _fresh_folder(f"{config.method}-{config.data}")
            result = _or_stopped(ctx, lambda: run_config(config, out=folder, observer=watcher))
    _show([result], as_json=as_json, quiet=quiet)


def _pair(option: str, text: str) -> tuple[str, str]:
    from atoll.core.errors import ConfigError

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--{option} takes key=value, but got '{text}'")
    return key.strip(), value.strip()


def _refuse_mixing(chosen: dict[str, Any], config_file: Path | None, out: Path | None) -> None:
    from atoll.core.errors import ConfigError

    if chosen or config_file is not None or out is not None:
        raise ConfigError(
            "--resume continues a run with its own configuration; give no other options with it"
        )


def _or_stopped(ctx: click.Context, action: Any) -> Result:
    from atoll.study.run import Stopped

    try:
        result: Result = action()
    except Stopped as stop:
        where = f"; continue with: atoll run --resume {stop.out}" if stop.out else ""
        message = f"stopped after {stop.rounds} rounds of seed {stop.seed}{where}"
        click.echo(message, err=True)
        ctx.exit(130)
    return result


def _fresh_folder(name: str) -> Path:
    """A folder for a result that the user gave no name for."""
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:60]
    stem = Path("atoll-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}"
    number, folder = 1, stem
    while folder.exists():
        number += 1
        folder = stem.with_name(f"{stem.name}-{number}")
    return folder


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _show(results: list[Result], *, as_json: bool, quiet: bool) -> None:
    from atoll.study.show import result_table

    if not quiet:
        console = _console(stderr=as_json)
        console.print(result_table(results))
        for result in results:
            console.print(f"[dim]saved in {result.out}[/dim]")
    if as_json:
        click.echo(json.dumps(results[0].summary()))


@main.command()
@click.option("--rounds", type=int, default=60, show_default=True)
@click.option("--seeds", type=int, default=3, show_default=True)
@click.option("--clients", type=int, default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the results.")
@click.pass_context
def demo(ctx: click.Context, rounds: int, seeds: int, clients: int, out: Path | None) -> None:
    """Three methods on the built-in federation: what does working together gain?"""
    from atoll.study.config import make_config
    from atoll.study.run import run_config
    from atoll.study.show import Watcher

    folder = out or _fresh_folder("demo")
    console = _console(stderr=False)
    console.print(f"{clients} libraries own parts of one citation graph; nobody shows theirs.")
    results = []
    for method in ("local", "fedavg", "fedprox"):
        with Watcher(console, quiet=False, label=f"{method:8}") as watcher:
            config = make_config(method=method, clients=clients, rounds=rounds, seeds=seeds)
            action = lambda c=config, m=method, w=watcher: run_config(c, out=folder / m, observer=w)  # noqa: E731
            results.append(_or_stopped(ctx, action))
    _show(results, as_json=False, quiet=False)


@main.command()
@click.argument("name", required=False)
def methods(name: str | None) -> None:
    """List the methods; with NAME, everything about one."""
    from atoll.study.catalogue import method_page, method_table

    _console(stderr=False).print(method_table() if name is None else method_page(name))


@main.command()
@click.argument("name", required=False)
@click.option("--data-root", help="Where data sets are looked for (or ATOLL_DATA).")
def datasets(name: str | None, data_root: str | None) -> None:
    """List the data sets; with NAME, size, source and where it is looked for."""
    from atoll.study.catalogue import dataset_page, dataset_table

    page = dataset_table(data_root) if name is None else dataset_page(name, data_root)
    _console(stderr=False).print(page)


@main.group()
def data() -> None:
    """Fetch and check data sets."""


@data.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--mirror", help="Folder or URL that holds NAME.tar.xz (or ATOLL_MIRROR).")
@click.option("--data-root", help="Where to put them (or ATOLL_DATA).")
@click.option("--force", is_flag=True, help="Replace what is there.")
def fetch(names: tuple[str, ...], mirror: str | None, data_root: str | None, force: bool) -> None:
    """Get data sets from their public source, or from a mirror."""
    from atoll.data.fetch import fetch as fetch_one

    for name in names:
        folder = fetch_one(name, data_root, mirror, force=force, progress=_say)
        click.echo(f"{name}: ready in {folder}")


@data.command()
@click.option("--data-root", help="Where data sets are looked for (or ATOLL_DATA).")
@click.pass_context
def check(ctx: click.Context, data_root: str | None) -> None:
    """Load what is present and compare it with the published counts."""
    from atoll.data.fetch import check as check_all

    found = [row for row in check_all(data_root, progress=_say) if row[1] or row[2]]
    for name, _, problem in found:
        click.echo(f"{name}: {problem or 'as published'}")
    if not found:
        click.echo("no data set is here; get one with: atoll data fetch NAME")
    if any(problem for _, _, problem in found):
        ctx.exit(2)


def _say(text: str) -> None:
    click.echo(text, err=True)


@main.command()
@click.option("--data", default="lagoon", show_default=True, help="As for `atoll run`.")
@click.option("--clients", type=int, help="Number of clients.")
@click.option("--partition", help="As for `atoll run`.")
@click.option("--split", help="As for `atoll run`.")
@click.option("--protocol", default="strict", show_default=True, help="As for `atoll run`.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--data-root", help="Where data sets are looked for (or ATOLL_DATA).")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for plots and numbers.")
def inspect(seed: int, out: Path | None, **given: Any) -> None:
    """Show what makes the clients of a federation differ."""
    from atoll.study.config import make_config, resolve
    from atoll.study.inspect import inspect_federation
    from atoll.study.run import claim_folder, make_federation

    config, rules = resolve(make_config(**{k: v for k, v in given.items() if v is not None}))
    if out is not None:
        claim_folder(out, resuming=True)
    federation, notes, _ = make_federation(config, rules, seed, None, given["partition"])
    console = _console(stderr=False)
    for note in notes:
        console.print(f"[dim]{note}[/dim]")
    console.print(inspect_federation(federation, out, seed=seed))
    if out is not None:
        console.print(f"[dim]plots and numbers in {out}[/dim]")
