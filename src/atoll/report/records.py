"""Where it ran, and how to run it again."""

from __future__ import annotations

from html import escape

from atoll.experiment.config import config_text
from atoll.present.tables import html, make_table
from atoll.report.collect import Collection


def environment(found: Collection) -> str:
    """Versions and machines."""
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
    """Commands and configurations."""
    parts = []
    for folder, about in found.studies.items():
        looks = [str(look["command"]) for look in about.get("looks", []) if "command" in look]
        commands = looks or [str(about["command"])] if about.get("command") else []
        if commands:
            text = escape("\n".join(commands))
            parts.append(
                f"<p>The whole study, in <code>{escape(folder.name)}</code>:</p>"
                f"<pre tabindex=0><code>{text}</code></pre>"
            )
    if not found.shown:
        return "".join(parts)
    parts.append(
        "<p>One run: save its configuration below as <code>config.toml</code> (it is also in its "
        "folder), then:</p><pre tabindex=0><code>atoll run --config config.toml --out again</code>"
        "</pre>"
    )
    for one in found.shown:
        note = ""
        if one.config.objects:
            names = " and ".join(one.config.objects)
            note = f"<p>Started in Python with a {escape(names)} object, which no file holds.</p>"
        parts.append(
            f"<details><summary>{escape(one.row)}, {escape(one.column)}</summary>{note}"
            f"<pre tabindex=0><code>{escape(config_text(one.config))}</code></pre></details>"
        )
    return "".join(parts)
