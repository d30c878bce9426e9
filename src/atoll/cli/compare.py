"""`atoll compare`: several methods on the same partitions and seeds, with tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli import common, options
from atoll.cli.options import PATH, Strings, command, option, repeatable
from atoll.core.errors import ConfigError, counted
from atoll.experiment.status import StatusReader

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.studies.compare.comparison import Comparison

DATA = "Load these data, as in `atoll run`; separate several with commas.  [default: lagoon]"
CLIENTS = (
    "Set the number of clients; separate several with commas.  [default: chosen by the protocol]"
)
GRID = (
    "Try these values of KEY for all methods or for one (fedprox:mu=0.1,1), and select the best "
    "by validation scores; repeatable."
)
SEEDS = option("--seeds N", "Run every method with the same N seeds.  [default: 5]", int)


@command(
    "Compare methods on the same seeds, with significance tests.",
    options.METHODS,
    repeatable("--data NAME,...", DATA),
    repeatable("--clients K,...", CLIENTS),
    repeatable("--grid KEY=V,V,...", GRID),
    *options.DIVISION,
    *(SEEDS if one is options.SEEDS else one for one in options.TRAINING),
    option("--against METHOD", "Test all methods against METHOD.  [default: the best method]"),
    option("--alpha P", "Set the significance level of the tests.  [default: 0.05]", float),
    option("--tex FILE", "Write a LaTeX table.", PATH),
    options.OUT,
    options.OVERWRITE,
    options.resume("Resume the stopped study in DIR, or show a finished study again."),
    options.LOG,
    *options.STUDY,
    example="atoll compare local fedavg fedprox:mu=0.1 --data cora,pubmed "
    "--clients 5,10 --seeds 10",
)
def compare(
    methods: Strings, tex: Path | None, out: Path | None, as_json: bool, quiet: bool, **given: Any
) -> None:
    """Run each METHOD on the same partitions and seeds, and test whether they differ.

    A METHOD may have settings, fedprox:mu=0.1, and a label, strong=fedprox:mu=1. It may also be a
    non-federated baseline (majority, features, trees, oracle, ...), which the tables mark. To
    continue a stopped study, use --resume DIR, or the same command with --out.
    """
    from atoll.cli.study_progress import StudyWatcher
    from atoll.experiment.folder import check_folder
    from atoll.studies.compare.comparison import read_request, run_request
    from atoll.studies.compare.plan import make_request, plain_arm

    data, clients, grid = common.pop(given, "data", "clients", "grid").values()
    how = common.pop(given, "log", "jobs", "overwrite")
    tests = common.pop(given, "against", "metric", "alpha")
    tests = {name: value for name, value in tests.items() if value is not None}
    here = Path.cwd()
    folder, chosen = common.to_resume(given.pop("resume_from")), common.chosen_options(given)
    tex = here / tex if tex is not None and here != Path.cwd() else tex
    if folder is not None:
        several = {"methods": methods, "data": data, "clients": clients, "grid": grid, "out": out}
        several["overwrite"] = how["overwrite"] or None
        allowed = "--against, --metric, --alpha, --tex, --log, --jobs, --json and --quiet"
        common.refuse_beside_resume("study", several | chosen, allowed)
        request = read_request(folder)
        if "against" in tests:
            tests["against"] = plain_arm(str(tests["against"]), request.methods)
    else:
        grids: dict[str, list[str]] = {}  # a repeated key adds its values
        for key, text in (common.pair("grid", text) for text in grid):
            grids.setdefault(key, []).extend(value.strip() for value in text.split(","))
        several = tests | {"clients": _numbers(clients), "grid": grids}
        request = make_request(methods, data or "lagoon", options=chosen, **several)
        tests, folder = {}, out or common.fresh_folder("compare")
    if tex is not None:
        if tex.is_dir():
            raise ConfigError(f"'{tex}' is a folder; give --tex a file")
        check_folder(tex.absolute().parent, resuming=True)
    watcher = StudyWatcher(common.make_console(stderr=as_json or quiet), quiet=quiet)
    with common.stoppable(partial(_report_stop, folder)), watcher:
        found = run_request(request, folder, watcher, tested=tests, **how)
    paths = [] if tests else [folder / f"compare.{kind}" for kind in ("csv", "md", "json")]
    paths += [found.to_tex(tex)] if tex is not None else []
    if not quiet:
        _print(watcher.console, found, tests, folder)
        common.print_written(watcher.console, paths)
    for name, error in found.failed.items():
        click.echo(f"failed: {name}: {error}", err=True)
    if as_json:
        click.echo(json.dumps(found.summary(), allow_nan=False))
    if found.failed:
        click.get_current_context().exit(1)


def _numbers(texts: Strings) -> list[int] | None:
    if not texts:
        return None
    text = ",".join(texts)
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise ConfigError(f"clients is '{text}'; give whole numbers with commas, such as 5,10,20")
    return [int(part) for part in text.split(",")]


def _report_stop(folder: Path, stop: BaseException) -> None:
    """Print the progress of a stopped study, and the command that continues it."""
    if not (folder / "study.json").exists():
        click.echo("stopped before the first cell; nothing was saved", err=True)
        return
    cells = json.loads((folder / "study.json").read_text(encoding="utf-8"))["cells"]
    done = StatusReader(folder).read().cells.get("finished", 0)
    click.echo(
        f"stopped; {done} of {counted(len(cells), 'cell')} are finished, and the study is saved "
        f"in {folder}; continue with: atoll compare --resume {folder}",
        err=True,
    )


def _print(console: Console, found: Comparison, tests: Mapping[str, object], folder: Path) -> None:
    """Print the tables. Say that options of tests (`tests`) do not change the study's files."""
    from atoll.present.terminal import noted_table

    sentences = found.sentences()
    for table in found.printed():
        console.print(noted_table(table, sentences))
    common.print_text(console, found.caption, wrap=True)
    if tests:
        how = " ".join(f"--{name} {value}" for name, value in tests.items())
        text = (
            f"Tested once with {how}; the tables of the study in {folder}/compare.* do not change."
        )
        common.print_text(console, text)
