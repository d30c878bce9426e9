"""The page: one file that needs nothing else, neither a network nor a script to be read."""

from __future__ import annotations

import time
import tomllib
from html import escape
from importlib import resources

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
    ("overview", "What was run", overview),
    ("printed", "Printed and ours", printed),
    ("tuning", "Tuning", tuning),
    ("results", "Results", results),
    ("convergence", "Convergence", convergence),
    ("clients", "Clients", clients),
    ("relations", "Similarity and mixing", relations),
    ("federations", "Federations", heterogeneity),
    ("wire", "What crossed the wire", crossed),
    ("cost", "Cost", cost),
    ("environment", "Environment", environment),
    ("again", "Run it again", again),
)
WITHOUT_RUNS = ("overview", "printed", "tuning", "again")
"""Sections that have something to say of a tuning that has not been tested."""
SHORT = {
    "overview": "Overview",
    "printed": "Printed",
    "relations": "Similarity",
    "wire": "Wire",
    "again": "Again",
}


def page(found: Collection, title: str | None = None) -> str:
    """The report as HTML."""
    title = title or default_title(found)
    parts = [
        (name, head, write(found))
        for name, head, write in SECTIONS
        if found.shown or name in WITHOUT_RUNS
    ]
    parts = [part for part in parts if part[2]]
    links = "".join(
        f'<li><a href="#{name}">{SHORT.get(name, head)}</a></li>' for name, head, _ in parts
    )
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{head}</h2>'
        f"{text}</section>"
        for name, head, text in parts
    )
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<title>{escape(title)} · Atoll</title>
<link rel="icon" href="data:,">
<style>{colours()}{_file("page.css")}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header><h1>{escape(title)}</h1><p class="by">Report of Atoll {__version__}, {made}</p></header>
<nav aria-label="Sections"><div><ul>{links}</ul><button id="theme" type="button" hidden>Dark</button></div></nav>
<main id="main" tabindex="-1">{body}</main>
<footer>Made by <code>atoll report</code> from result.json, metrics, ledger and clients in the folders of
the runs. This file loads nothing from anywhere.</footer>
<script>{_file("page.js")}</script>
</body>
</html>
"""  # noqa: E501  # one meta element is one line


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
