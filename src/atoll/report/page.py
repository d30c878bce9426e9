"""The page: one file that needs nothing else, neither a network nor a script to be read."""

from __future__ import annotations

import time
import tomllib
from html import escape
from importlib import resources
from string import Template

from atoll import __version__
from atoll.report.collect import Collection
from atoll.report.maps import heterogeneity, relations
from atoll.report.printed import printed
from atoll.report.records import again, environment
from atoll.report.results import clients, convergence, overview, results
from atoll.report.traffic import cost, crossed
from atoll.report.tuning import tuning


def _file(name: str) -> str:
    return resources.files("atoll.report").joinpath(name).read_text(encoding="utf-8")


LIGHT, DARK = tomllib.loads(_file("page.toml")).values()
"""Colours by name for light and dark screens."""

SECTIONS = (
    ("overview", "Overview", "What was run", overview),
    ("printed", "Printed", "Printed and ours", printed),
    ("tuning", "Tuning", "Tuning", tuning),
    ("results", "Results", "Results", results),
    ("convergence", "Convergence", "Convergence", convergence),
    ("clients", "Clients", "Clients", clients),
    ("relations", "Similarity", "Similarity and mixing", relations),
    ("federations", "Federations", "Federations", heterogeneity),
    ("wire", "Wire", "What crossed the wire", crossed),
    ("cost", "Cost", "Cost", cost),
    ("environment", "Environment", "Environment", environment),
    ("again", "Again", "Run it again", again),
)
"""Name, link, heading and writer of each section."""
WITHOUT_RUNS = ("overview", "printed", "tuning", "again")
"""Sections that a tuning without a tested run has, too."""


def page(found: Collection, title: str | None = None) -> str:
    """The report as HTML."""
    title = title or default_title(found)
    written = [
        (name, link, head, write(found))
        for name, link, head, write in SECTIONS
        if found.shown or name in WITHOUT_RUNS
    ]
    parts = [part for part in written if part[3]]
    links = "".join(f'<li><a href="#{name}">{link}</a></li>' for name, link, _, _ in parts)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{head}</h2>'
        f"{text}</section>"
        for name, _, head, text in parts
    )
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return Template(_file("page.html")).substitute(
        title=escape(title),
        style=colours() + _file("page.css"),
        version=__version__,
        made=made,
        links=links,
        body=body,
        script=_file("page.js"),
    )


def colours() -> str:
    """The colours as CSS variables, for both schemes and for the reader's choice."""
    light, dark = (
        "".join(f"--{name}:{value};" for name, value in kind.items()) for kind in (LIGHT, DARK)
    )
    classes = "".join(f".c{i}{{color:var(--c{i})}}" for i in range(8))
    # Paper is white, whatever the screen is.
    return (
        f":root{{{light}color-scheme:light}}"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light])"
        f"{{{dark}color-scheme:dark}}}}"
        f"@media screen{{:root[data-theme=dark]{{{dark}color-scheme:dark}}}}{classes}"
    )


def default_title(found: Collection) -> str:
    """What was run, in one line."""
    if found.reproductions:
        tables = [f"{one.paper.name}, table {one.table}" for one in found.reproductions]
        return f"{' and '.join(dict.fromkeys(tables))}, again"
    if found.tried:
        names = list(dict.fromkeys(one.method for one in found.tried))
        on = f" on {' and '.join(found.columns)}" if found.columns else ""
        return f"{' and '.join(names)}, tuned{on}"
    methods, sets = list(dict.fromkeys(o.row for o in found.shown)), list(found.columns)
    what = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    on = " and ".join(sets) if len(sets) < 4 else f"{len(sets)} federations"
    return f"{what} on {on}"
