"""The command line. Each command imports the heavy packages that it needs."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from atoll import __version__
from atoll.cli.advise import advise
from atoll.cli.analyses import clusters, contribution, explain, inspect, similarity, tune_clusters
from atoll.cli.catalogue import datasets, methods
from atoll.cli.claim import claim
from atoll.cli.common import AtollSubgroup
from atoll.cli.compare import compare
from atoll.cli.data import data, partition
from atoll.cli.federate import federate
from atoll.cli.leaderboard import leaderboard
from atoll.cli.predict import export, predict
from atoll.cli.report import report
from atoll.cli.reproduce import reproduce
from atoll.cli.run import demo, run, watch
from atoll.cli.tune import tune
from atoll.core.errors import AtollError, described, own_line
from atoll.present.ascii import adapt

ANALYSES = (inspect, contribution, clusters, tune_clusters, explain, similarity)
COMMANDS = (
    *(run, demo, watch, predict, export, advise, compare, tune, reproduce, leaderboard, report),
    federate,
)


@contextmanager
def _one_line() -> Iterator[None]:
    """Show an error of click as one sentence, without the usage text. Help pages do not change."""
    try:
        yield
    except click.ClickException as error:
        if not isinstance(error, click.exceptions.NoArgsIsHelpError):
            text, ctx = error.format_message().rstrip("."), getattr(error, "ctx", None)
            text += f"; see {ctx.command_path} --help" if ctx and "?" not in text else ""
            error.show = partial(click.echo, f"error: {text}", err=True)  # type: ignore[method-assign]
        raise


class AtollGroup(AtollSubgroup):
    """The main command group, which reports each error as one sentence."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        adapt(sys.stdout, sys.stderr)
        with _one_line():  # for the options before a command's name
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> object:
        try:
            with _one_line():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            ctx.exit(130)
        except Exception as error:
            # click handles a closed pipe (`atoll datasets | head`).
            if ctx.obj["debug"] or getattr(error, "errno", None) == errno.EPIPE:
                raise
            if isinstance(error, AtollError):
                click.echo(f"error: {error}", err=True)
                ctx.exit(2)
            if isinstance(error, OSError) and error.strerror:
                where = f" '{error.filename}'" if error.filename else ""
                click.echo(f"error: {error.strerror}{where}", err=True)
                ctx.exit(2)
            if own_line(error):  # for example of the user's method
                click.echo(f"error: {described(error)}; correct it", err=True)
                ctx.exit(2)
            text = f"internal error: {described(error)}"
            click.echo(f"{text}; `atoll --debug ...` shows the traceback", err=True)
            ctx.exit(1)


@click.group(cls=AtollGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(__version__, prog_name="atoll")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Federated graph learning: run, compare and deploy methods on private graphs."""
    ctx.obj = {"debug": debug}
    # Threads that wait in a busy loop starve each other if the machine has other load (measured:
    # 0.16 s per round instead of 0.04 s). torch reads this variable later, when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


for _command in (*COMMANDS, *ANALYSES, claim, data, datasets, methods, partition):
    main.add_command(_command)
