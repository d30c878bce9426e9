"""`atoll federate status`: the state that the administrator, the server or a site knows."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from atoll.cli.federate import session
from atoll.cli.federate.session import AS_JSON, KIT, printable
from atoll.cli.options import command
from atoll.deploy.activity import RunActivity, ServerActivity, SiteActivity
from atoll.deploy.audit import Json
from atoll.deploy.kits import about_kit, certificate_days, need_nvflare

if TYPE_CHECKING:
    from atoll.engines.flare import AdminSession

SHOWN = 5  # newest runs or jobs in the tables; --json contains all


@command("Show rounds, sites, traffic, epsilon and certificates.", KIT, AS_JSON)
def status(kit: Path, as_json: bool) -> None:
    """Show the state of a federation.

    With the administrator's kit, show the sites and jobs that the server reports. With the kit of
    the server or of a site, show the runs in its folder, even if the server or site is stopped.
    """
    about = about_kit(kit)
    kind = session.kind_of(about)
    found: Json = {"party": about["name"], "kind": kind, "certificate_days": certificate_days(kit)}
    if kind == "admin":
        need_nvflare()
        with session.open_admin(kit, about["name"]) as admin:
            found |= _federation(admin, about["sites"])
    elif kind == "server":
        found["runs"] = [_plain(run) for run in reversed(ServerActivity(kit).read())]
    else:
        found |= _site(SiteActivity(kit))
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"{about['name']}: certificate {found['certificate_days']} days")
    {"admin": _show_federation, "server": _show_runs, "site": _show_site}[kind](found)


def _federation(admin: AdminSession, expected: Sequence[str]) -> Json:
    """Return the sites and jobs, with the progress and traffic of running jobs."""
    seen = admin.last_seen()
    jobs = []
    for job in admin.jobs():
        progress = admin.progress(job["job_id"]) if job["status"] == "RUNNING" else {}
        plain = {"job": job["job_id"], "name": job["job_name"], "status": job["status"]}
        jobs.append({**plain, "progress": progress})
    return {"sites": {s: s in seen for s in (*expected, *seen)}, "last_seen": seen, "jobs": jobs}


def _plain(run: RunActivity) -> Json:
    peers = {name: dict(vars(peer)) for name, peer in run.peers.items()}
    own = {key: getattr(run, key) for key in ("name", "round", "rounds", "ended", "epsilon")}
    return {**own, "last": run.last, "peers": peers}


def _site(activity: SiteActivity) -> Json:
    newest = reversed(activity.read())
    runs = [
        {**_plain(run), "private": run.name in activity.private - activity.clear} for run in newest
    ]
    spent, limit, delta = activity.budget()
    finite = spent if math.isfinite(spent) else None  # JSON has no infinity
    epsilon = {"spent": finite, "limit": limit, "delta": delta, "releases": len(activity.releases)}
    counts = {"refusals": activity.refusals, "failures": activity.failures}
    return {"runs": runs, "epsilon": epsilon, **counts, "last_refusal": activity.last_refusal}


def _show_federation(found: Json) -> None:
    running = [job["progress"] for job in found["jobs"] if job["progress"]]
    traffic = running[0].get("sites", {}) if running else {}
    rows = []
    for name, there in found["sites"].items():
        peer = traffic.get(name, {})
        sizes = [_megabytes(peer.get(way)) for way in ("received", "sent")]
        state = "connected" if there else "not connected"
        rows.append([name, state, _ago(found["last_seen"].get(name)), *sizes, peer.get("out", "")])
    print_table(["site", "", "last seen", "MB up", "MB down", ""], rows)
    for job in found["jobs"][:SHOWN]:
        click.echo(f"{job['name']:32} {job['status'].lower()}{_place(job['progress'])}")


def _show_runs(found: Json) -> None:
    for run in found["runs"][:SHOWN]:
        state = "complete" if run["ended"] else f"last event {_ago(run['last'])}"
        click.echo(f"\n{run['name']}: {state}{_place(run)}")
        rows = []
        for name, peer in run["peers"].items():
            sizes = map(_megabytes, (peer["received"], peer["sent"]))
            rows.append([name, _ago(peer["last"]), *sizes, peer["out"]])
        print_table(["site", "last answer", "MB up", "MB down", ""], rows)


def _show_site(found: Json) -> None:
    spent, limit, delta = (found["epsilon"][key] for key in ("spent", "limit", "delta"))
    most = "" if limit is None else f" of {limit:g}"
    text = "infinite" if spent is None else f"{spent:.3g}"
    if found["epsilon"]["releases"] or limit is not None:
        click.echo(f"epsilon {text}{most} at delta {delta:g}, in all private runs")
    sent = [run for run in found["runs"] if run["peers"]["server"]["sent"]]
    if clear := sum(not run["private"] for run in sent):
        runs = f"{clear} run{'' if clear == 1 else 's'}"
        click.echo(f"{runs} without differential privacy: updates or scores left in the clear")
    last = f"; the last: {printable(found['last_refusal'])}" if found["last_refusal"] else ""
    click.echo(f"{found['refusals']} refused, {found['failures']} failed{last}")
    rows = [
        [run["name"], run["round"], _megabytes(run["peers"]["server"]["sent"]), _ago(run["last"])]
        for run in found["runs"][:SHOWN]
    ]
    print_table(["run", "rounds", "MB sent", "last"], rows)


def _place(now: Json) -> str:
    """Format the round and the epsilon of a run or of a job's progress."""
    most = f" of {now['rounds']}" if now.get("rounds") else ""
    seed = f", seed {now['seed']}" if now.get("seed") else ""
    place = f", round {now['round']}{most}{seed}" if "round" in now else ""
    return place + (f", epsilon {now['epsilon']:.3g}" if now.get("epsilon") is not None else "")


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.2f}"


def _ago(at: float | None) -> str:
    if at is None:
        return ""
    seconds = max(0, round(time.time() - at))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows in aligned columns, without control characters."""
    lines = [[printable(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
