"""`atoll data` and `atoll partition`: fetch, check, describe and divide data."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import click

from atoll.cli import options
from atoll.cli.common import AtollSubgroup, config_of, make_console, pair, print_notes, print_text
from atoll.cli.options import DATA_ROOT, FEDERATION, PATH, SEED_OF_DATA, Strings, command, option
from atoll.core.errors import ConfigError, counted

MIRROR = (
    "Download NAME.tar.xz from this folder or URL.  [default: ATOLL_MIRROR, else the public source]"
)
ROOT = "Save data sets in this folder.  [default: ATOLL_DATA, else ~/.cache/atoll/data]"
SCHEMA = "Read your earlier decisions from this file.  [default: PATH/schema.toml]"


@click.group(cls=AtollSubgroup)
def data() -> None:
    """Fetch and check data sets, and describe your own tables."""


@data.command(
    short_help="Download data sets.",
    params=[
        click.Argument(["names"], nargs=-1, required=True),
        option("--mirror DIR|URL", MIRROR, options.PATH_TEXT),
        option("--data-root DIR", ROOT, options.PATH_TEXT),
        option("--force", "Overwrite existing files."),
    ],
)
def fetch(names: Strings, mirror: str | None, data_root: str | None, force: bool) -> None:
    """Download data sets, or GCFL's groups of data sets, from their public source or a mirror."""
    from atoll.data.public.fetch import fetch as fetch_one
    from atoll.data.public.registry import sets_of_group

    progress = partial(click.echo, err=True)
    wanted = [one for name in names for one in sets_of_group(name) or (name,)]
    for name in wanted:
        folder = fetch_one(name, data_root, mirror, force=force, progress=progress)
        click.echo(f"{name}: ready in {folder}")


@data.command(short_help="Compare downloaded data with the published counts.", params=[DATA_ROOT])
@click.pass_context
def check(ctx: click.Context, data_root: str | None) -> None:
    """Load every downloaded data set, and compare its size with the published counts."""
    from atoll.data.public.fetch import check as check_all

    progress = partial(click.echo, err=True)
    found = [row for row in check_all(data_root, progress=progress) if row[1] or row[2]]
    for name, _, problem in found:
        click.echo(f"{name}: {problem or 'as published'}")
    if not found:
        click.echo("no data set is downloaded; get one with: atoll data fetch NAME")
    if any(problem for _, _, problem in found):
        ctx.exit(2)


@data.command(
    short_help="List columns and problems of your own tables.",
    params=[
        click.Argument(["path"], type=PATH),
        option("--schema FILE", SCHEMA, PATH),
        options.OWN,
        option("--out FILE", "Write a draft of the schema to this file.", PATH),
        option("--overwrite", "Replace the file in --out."),
    ],
)
def describe(
    path: Path, schema: Path | None, own: Strings, out: Path | None, overwrite: bool
) -> None:
    """List the columns and all problems of your own tables, and draft a schema."""
    from atoll.core.files import write_atomically
    from atoll.data.load import parse_own_options
    from atoll.data.own.describe import describe as look_at_all
    from atoll.present.tables import make_table, rich_table

    if out is not None and out.exists() and not (overwrite and out.is_file()):
        raise ConfigError(
            f"'{out}' exists; choose another --out, or replace a file with --overwrite"
        )
    reading = parse_own_options(dict(pair("own", text) for text in own))
    found, console = look_at_all(path, schema, reading), make_console()
    rows = []
    for name, look in found.looks.items():
        known = look.column.values.drop_null()
        example = "" if not len(known) else str(known[0].as_py())[:20]
        gaps = len(look.column.values) - len(known)
        role = found.roles.get(name, "feature")
        kind = "" if name in found.roles else look.rule.kind or ""
        rows.append((name, role, kind, gaps or "", example))
    names = ("column", "role", "kind", "missing", "example")
    console.print(rich_table(make_table(names, rows, left=5), gap=2))
    things = "1 thing" if len(found.problems) == 1 else f"{len(found.problems) or 'no'} things"
    todo = f"{things} to decide or to repair"
    print_text(console, f"\n{counted(found.rows, 'node')}; {todo}", style="", wrap=True)
    for number, problem in enumerate(found.problems, 1):
        count = f" ({counted(problem.rows, 'row')})" if problem.rows else ""
        text = f"{number:3}. {problem.place}: {problem.text}{count}"
        print_text(console, text, style="", wrap=True)
    if out is not None:
        write_atomically(out, found.toml().encode())
        print_text(console, f"Written: {out}; decide the lines with `# ?`", style="")
    if "label" not in found.roles.values():
        more = "this may find columns that leak the label"
        print_text(console, f"Name the label, then describe again: {more}", style="")


@data.command(
    short_help="Show or clear the data cache.", params=[option("--clear", "Delete all entries.")]
)
def cache(clear: bool) -> None:
    """Show or clear the cache of loaded and partitioned public data (ATOLL_CACHE)."""
    from atoll.data.cache import Cache

    found = Cache.of_environment()
    if found is None:
        click.echo("the cache is off (ATOLL_CACHE=off)")
        return
    if clear:
        found.clear()
    entries = found.entries()
    kinds = Counter(path.name.partition("-")[0] for _, _, path in entries)
    which = "".join(f", {count} of {kind}" for kind, count in sorted(kinds.items()))
    size, limit = sum(size for _, size, _ in entries) / 1e6, found.limit / 1e6
    click.echo(f"{found.folder}: {len(entries)} entries{which}; {size:.1f} of {limit:.0f} MB")


@command(
    "Divide data among clients and save the federation.",
    *FEDERATION,
    SEED_OF_DATA,
    option("--out FILE", "Write the federation to FILE, which must be new.", PATH, required=True),
    example="atoll partition --data cora --clients 10 --out cora10.atoll && "
    "atoll run fedavg --data cora10.atoll",
)
def partition(out: Path, **given: object) -> None:
    """Divide data as `atoll run` does, and save the federation in one file (--data FILE)."""
    from atoll.experiment.problem import save_divided

    path, made = save_divided(config_of(given), out)
    console = make_console()
    print_notes(console, made.notes)
    size = path.stat().st_size / 1e6
    print_text(console, f"{made.federation!r} saved in {path} ({size:.1f} MB)", style="")
