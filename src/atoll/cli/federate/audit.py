"""`atoll federate audit`: verify the audit logs of a party, and show what a site sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from atoll.cli.federate import session
from atoll.cli.federate.session import AS_JSON, KIT
from atoll.cli.federate.status import print_table
from atoll.cli.options import command, option
from atoll.core.errors import ConfigError, DataError
from atoll.deploy.audit import Audit, Json, check_audit
from atoll.deploy.kits import about_kit, state_folder

AFTER = option(
    "--after HASH",
    "Also check that a line with this hash, from an earlier check, is still there.",
)


@command("Verify audit logs, and show what a site sent.", KIT, AFTER, AS_JSON)
def audit(kit: Path, after: str | None, as_json: bool) -> None:
    """Verify the chain of hashes in a party's audit logs.

    With the kit of a site, also show what left it: the replies and bytes of every run and step. The
    chain cannot show that the end of a log was removed. Keep the printed hash in another place, and
    pass it to the next check as --after.
    """
    about = about_kit(kit)
    kind, folder = session.kind_of(about), state_folder(kit)
    if kind == "admin":
        raise ConfigError("an administrator's kit has no audit log; give the kit of another party")
    paths = [folder / "audit.jsonl"]
    if kind == "server":
        paths = sorted((folder / "runs").glob("*/audit.jsonl"))
    found: Json = {"party": about["name"], "logs": {}}
    known = after is None
    for path in paths:
        chain = check_audit(path)
        found["logs"][str(path)] = {"lines": len(chain), "last": chain[-1] if chain else ""}
        known = known or after in chain
    if not known:
        raise DataError(f"no audit log of {kit} contains the line {after!r}; its end was removed")
    if kind == "site":
        found["sent"] = _sent(Audit(paths[0]))
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, log in found["logs"].items():
        click.echo(f"{name}: {log['lines']} lines, unchanged; last hash {log['last'] or 'none'}")
    if rows := found.get("sent"):
        print_table(list(rows[0]), [list(row.values()) for row in rows])


def _sent(log: Audit) -> Sequence[Json]:
    """Count the replies and bytes that left a site, by run and step, in the order of the log."""
    rows: dict[tuple[str, str, str], Json] = {}
    with log.readable():
        for event in log.events():
            if event["event"] not in ("hello", "sent"):
                continue
            noise = "no noise" if "release" not in event else f"noise {float(event['noise']):g}"
            step = "summary" if event["event"] == "hello" else str(event["step"])
            how = "scores kept here" if event.get("kept") else "" if step == "summary" else noise
            start = {"run": event["run"], "step": step, "privacy": how, "replies": 0, "bytes": 0}
            row = rows.setdefault((event["run"], step, how), start)
            row["replies"] += 1
            row["bytes"] += int(event.get("bytes", 0))
    return list(rows.values())
