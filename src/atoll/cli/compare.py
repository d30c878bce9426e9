"""`atoll compare`: several methods on the same partitions and seeds, with tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.common import chosen_options, fresh_folder, make_console, pair, written
from atoll.cli.options import (
    AS_JSON,
    DIVISION,
    JOBS,
    LOG,
    OUT,
    PATH,
    QUIET,
    SEEDS,
    TRAINING,
    option,
    options,
)

if TYPE_CHECKING:
    from atoll.studies.compare.result import Comparison

SEVERAL = (
    option(
        "--data NAME,...",
        "Data sets or paths, as for `atoll run`; several with commas.  [default: lagoon]",
        multiple=True,
    ),
    option(
        "--clients K,...",
        "Numbers of clients; several with commas.  [default: the protocol's]",
        multiple=True,
    ),
    option(
        "--grid KEY=V,V,...",
        "Values to try, for every method that has KEY or for one (fedprox:mu=0.1,1); the "
        "winner is chosen by validation scores; repeatable.",
        multiple=True,
    ),
)
_SEEDS = option("--seeds N", "How many seeds to run, the same for all.  [default: 5]", int)
_TRAINING = tuple(_SEEDS if option is SEEDS else option for option in TRAINING)
TESTING = (
    option("--against METHOD", "Test the others against this one.  [default: the best]"),
    option("--metric NAME", "Metric of the tables, such as auc.  [default: the data's own]"),
    option("--alpha P", "Chance of a false alarm that the tests allow.  [default: 0.05]", float),
    option("--tex FILE", "Write a LaTeX table.", PATH),
)
RESUME = option(
    "--resume DIR",
    "Continue the stopped study in DIR; a finished one is shown again.",
    PATH,
    name="resume_from",
)


@click.command(
    short_help="Compare methods: same partitions and seeds, with tests.",
    epilog="For example: atoll compare local fedavg fedprox:mu=0.1 --data cora,pubmed "
    "--clients 5,10 --seeds 10",
)
@click.argument("methods", metavar="METHOD...", nargs=-1)
@options(*SEVERAL, *DIVISION, *_TRAINING, *TESTING, OUT, RESUME, LOG, JOBS, AS_JSON, QUIET)
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    methods: tuple[str, ...],
    data: tuple[str, ...],
    clients: tuple[str, ...],
    grid: tuple[str, ...],
    settings: tuple[str, ...],
    own: tuple[str, ...],
    tex: Path | None,
    out: Path | None,
    resume_from: Path | None,
    log: tuple[str, ...],
    jobs: str,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Run each METHOD on the same partitions and seeds, and test whether they differ.

    A METHOD may have settings, fedprox:mu=0.1, and a label, strong=fedprox:mu=1. It may also be a
    baseline (majority, features), which is not federated and marked so. A stopped study continues
    with --resume DIR, or with the same command and --out.
    """
    from atoll.cli.study_progress import StudyWatcher
    from atoll.experiment.run import Stopped
    from atoll.studies.compare.comparison import make_request, read_request, run_request

    tested = {name: given.pop(name) for name in ("against", "metric", "alpha")}
    tested = {name: value for name, value in tested.items() if value is not None}
    chosen = chosen_options(given, set=settings, own=own)
    if resume_from is not None:
        several = {"METHOD": methods, "data": data, "clients": clients, "grid": grid, "out": out}
        _refuse_mixing({**several, **chosen})
        request, folder = read_request(resume_from), resume_from
    else:
        request = make_request(
            methods,
            data or "lagoon",
            clients=_numbers(clients),
            options=chosen,
            grid=_grids(grid),
            **tested,
        )
        tested = {}
        folder = out or fresh_folder("compare")
    if tex is not None:
        _check_file(tex)
    watcher = StudyWatcher(make_console(stderr=as_json or quiet), quiet=quiet)
    try:
        with watcher:
            found = run_request(request, folder, watcher, log=log, jobs=jobs, tested=tested)
    except (Stopped, KeyboardInterrupt):
        _say_how_to_go_on(folder)
        ctx.exit(130)
    paths = [] if tested else [folder / f"compare.{kind}" for kind in ("csv", "md", "json")]
    paths += [found.to_tex(tex)] if tex is not None else []
    _show(found, paths, _once(tested, folder), as_json=as_json, quiet=quiet)
    if found.failed:
        ctx.exit(1)


def _grids(texts: tuple[str, ...]) -> dict[str, list[str]]:
    """Values to try by hyper-parameter; a repeated key adds to the first."""
    grids: dict[str, list[str]] = {}
    for key, text in (pair("grid", text) for text in texts):
        grids.setdefault(key, []).extend(value.strip() for value in text.split(","))
    return grids


def _once(tested: Mapping[str, object], folder: Path) -> str:
    """A remark that other tests than the study's own were made."""
    how = " ".join(f"--{name} {value}" for name, value in tested.items())
    if not how:
        return ""
    return f"Tested with {how} for once; {folder}/compare.* keep the study's own tables."


def _numbers(texts: tuple[str, ...]) -> list[int] | None:
    from atoll.core.errors import ConfigError

    if not texts:
        return None
    text = ",".join(texts)
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise ConfigError(f"clients is '{text}'; give whole numbers with commas, such as 5,10,20")
    return [int(part) for part in text.split(",")]


def _refuse_mixing(given: Mapping[str, object]) -> None:
    from atoll.core.errors import ConfigError

    names = [name for name, value in given.items() if value]
    if names:
        option = names[0] if names[0] == "METHOD" else "--" + names[0].replace("_", "-")
        raise ConfigError(
            f"--resume continues a study with its own configuration, but {option} was given; leave "
            "everything out but --against, --metric, --alpha, --tex, --log, --jobs, --json and "
            "--quiet"
        )


def _check_file(path: Path) -> None:
    from atoll.core.errors import ConfigError
    from atoll.experiment.folder import check_folder

    if path.is_dir():
        raise ConfigError(f"'{path}' is a folder; give --tex a file")
    check_folder(path.absolute().parent, resuming=True)


def _say_how_to_go_on(folder: Path) -> None:
    if not (folder / "study.json").exists():
        click.echo("stopped before the first cell; nothing was saved", err=True)
        return
    from atoll.experiment.watch import Watch

    cells = json.loads((folder / "study.json").read_text(encoding="utf-8"))["cells"]
    done = Watch(folder).look().cells.get("finished", 0)
    click.echo(
        f"stopped; {done} of {len(cells)} cells are finished, and the study is saved in {folder}; "
        f"continue with: atoll compare --resume {folder}",
        err=True,
    )


def _show(found: Comparison, paths: list[Path], once: str, *, as_json: bool, quiet: bool) -> None:
    from rich.text import Text

    from atoll.present.terminal import noted_table

    if not quiet:
        console, said = make_console(stderr=as_json), found.sentences()
        for table in found.printed():
            console.print(noted_table(table, said))
        console.print(Text(found.caption, style="dim"))
        if once:
            console.print(Text(once, style="dim"), soft_wrap=True)
        written(console, paths)
    for name, error in found.failed.items():
        click.echo(f"failed: {name}: {error}", err=True)
    if as_json:
        click.echo(json.dumps(found.summary(), allow_nan=False))
