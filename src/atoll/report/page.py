"""The report page: one file that works without network, other files or scripts."""

from __future__ import annotations

import time
import tomllib
from html import escape
from importlib import resources
from string import Template

from atoll import __version__
from atoll.experiment.config import config_text
from atoll.experiment.metrics import COMPARED
from atoll.present.tables import html, make_table
from atoll.present.terminal import listed
from atoll.report.collect import Collection
from atoll.report.maps import heterogeneity, relations
from atoll.report.printed import printed
from atoll.report.results import clients, code, convergence, overview, results
from atoll.report.summary import summary
from atoll.report.traffic import cost, crossed
from atoll.report.tuning import tuning


def _file(name: str) -> str:
    return resources.files("atoll.report").joinpath(name).read_text(encoding="utf-8")


LIGHT, DARK = tomllib.loads(_file("page.toml")).values()
"""Named colours for light and dark screens."""


def environment(found: Collection) -> str:
    """List versions and machines."""
    kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for one in found.shown:
        key = tuple((k, str(v)) for k, v in one.run.result.environment.items())
        kinds.setdefault(key, []).append(f"{one.row} on {one.column}")
    parts = []
    for number, (key, names) in enumerate(kinds.items(), start=1):
        head = "All runs" if len(kinds) == 1 else f"Machine {number}: {', '.join(names[:6])}"
        head += f" and {len(names) - 6} more" if len(kinds) > 1 and len(names) > 6 else ""
        parts.append(html(make_table(["what", "version"], key, left=2, title=head)))
    return "".join(parts)


def again(found: Collection) -> str:
    """List commands and configurations that repeat the runs."""
    parts = []
    for folder, about in found.studies.items():
        # A reproduction lists one command per requested table.
        commands = [str(item["command"]) for item in about.get("looks", []) if "command" in item]
        if about.get("command"):
            text = code("\n".join(commands or [str(about["command"])]))
            parts.append(f"<p>The whole study, in <code>{escape(folder.name)}</code>:</p>{text}")
    if not found.shown:
        return "".join(parts)
    parts.append(
        "<p>One run: save its configuration below as <code>config.toml</code> (it is also in its "
        f"folder), then:</p>{code('atoll run --config config.toml --out again')}"
    )
    for one in found.shown:
        names = escape(" and ".join(one.config.objects))
        note = f"<p>Started in Python with a {names} object, which no file contains.</p>"
        summary = f"<summary>{escape(one.row)}, {escape(one.column)}</summary>"
        config = (note if names else "") + code(config_text(one.config))
        parts.append(f"<details>{summary}{config}</details>")
    return "".join(parts)


SECTIONS = (
    ("answer", "Answer", "The answer", summary),
    ("printed", "Printed", "Published and reproduced values", printed),
    ("tuning", "Tuning", "Tuning", tuning),
    ("overview", "Overview", "Runs", overview),
    ("results", "Results", "Results", results),
    ("convergence", "Convergence", "Convergence", convergence),
    ("clients", "Clients", "Clients", clients),
    ("relations", "Similarity", "Similarity and mixing", relations),
    ("federations", "Federations", "Federations", heterogeneity),
    ("wire", "Data sent", "Transmitted data", crossed),
    ("cost", "Cost", "Cost", cost),
    ("environment", "Environment", "Environment", environment),
    ("again", "Run again", "Run it again", again),
)
"""Name, link, heading and writer of each section."""
EXECUTIVE = ("answer", "printed", "tuning")
"""Sections of the summary page. The others belong to the technical page."""
WITHOUT_RUNS = (*EXECUTIVE, "overview", "again")
"""Sections that a tuning without a tested run also has."""


def page(found: Collection, title: str | None = None) -> str:
    """Render the report as HTML."""
    title = title or default_title(found)
    links, body = "", ""
    for name, link, head, write in SECTIONS:
        text = write(found) if found.shown or name in WITHOUT_RUNS else ""
        if text:
            kind = "executive" if name in EXECUTIVE else "technical"
            if name != "answer":  # it is always at the top
                links += f'<li class="{kind}"><a href="#{name}">{link}</a></li>'
            about = f'id="{name}" class="{kind}" aria-labelledby="{name}-h"'
            body += f'<section {about}><h2 id="{name}-h">{head}</h2>{text}</section>'
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    parts = {"title": escape(title), "version": __version__, "made": made, "links": links}
    code_parts = {"style": colours() + _file("page.css"), "script": _file("page.js"), "body": body}
    return Template(_file("page.html")).substitute(parts | code_parts)


def colours() -> str:
    """Return CSS: colours of both schemes and of the reader's choice, and the switch of metrics."""
    schemes = (LIGHT, DARK)
    light, dark = ("".join(f"--{name}:{value};" for name, value in s.items()) for s in schemes)
    classes = "".join(f".c{i}{{color:var(--c{i})}}" for i in range(8))
    hide = "body:has(#m{0}:checked) .by-metric:not(.m{0}){{display:none}}"
    classes += "".join(map(hide.format, range(len(COMPARED) + 1)))
    # Printouts are always light.
    return (
        f":root{{{light}color-scheme:light}}"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light])"
        f"{{{dark}color-scheme:dark}}}}"
        f"@media screen{{:root[data-theme=dark]{{{dark}color-scheme:dark}}}}{classes}"
    )


def default_title(found: Collection) -> str:
    """Describe the runs in one line."""
    if found.reproductions:
        tables = [f"{one.paper.name}, table {one.table}" for one in found.reproductions]
        return f"{listed(list(dict.fromkeys(tables)))}, again"
    if found.tried:
        names = list(dict.fromkeys(one.method for one in found.tried))
        on = f" on {listed(found.columns)}" if found.columns else ""
        return f"{listed(names)}, tuned{on}"
    methods, sets = found.rows, found.columns
    what = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    on = listed(sets) if len(sets) < 4 else f"{len(sets)} federations"
    return f"{what} on {on}"
