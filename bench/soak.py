"""Memory, threads and files of a live federation over an hour, and of many sites on one machine.

`python -m bench soak --minutes 60 --sites 5` samples every process of the federation. In a healthy
process resource usage stays constant. `python -m bench sites --sites 20` measures seconds per round
and memory per site.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from bench.live import Live, until

COLUMNS = (
    *("seconds", "round", "party", "process"),
    *("memory_mb", "threads", "descriptors", "log_kb", "audit_kb"),
)


def sample(live: Live, began: float) -> Iterator[tuple[object, ...]]:
    """Yield one row for each process of each party."""
    reached, passed = live.reached(), round(time.monotonic() - began, 1)
    for name in ("server", *live.sites):
        files = [path for path in live.kits[name].rglob("*") if path.is_file()]
        audits = [path for path in files if path.name == "audit.jsonl"]
        logs = [path for path in files if "log" in path.name and path not in audits]
        sizes = [round(sum(p.stat().st_size for p in part) / 1024, 1) for part in (logs, audits)]
        for kind in ("parent", "job"):
            for pid in live.pids(name, kind):
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                    handles = len(os.listdir(f"/proc/{pid}/fd"))
                except OSError:  # it has just ended
                    continue
                found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
                memory = int(found.get("VmRSS", "0").split()[0]) / 1024
                threads = int(found["Threads"])
                yield passed, reached, name, kind, round(memory, 1), threads, handles, *sizes


def draw(rows: list[dict[str, str]], picture: Path) -> None:
    """Draw one panel for each resource, with one line for each process."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = COLUMNS[4:]
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), sharex=True, layout="constrained")
    for axis, column in zip(axes.flat, panels, strict=False):
        for party in sorted({row["party"] for row in rows}):
            for kind, style in (("parent", ":"), ("job", "-")):
                mine = [r for r in rows if r["party"] == party and r["process"] == kind]
                at = [float(row["seconds"]) / 60 for row in mine]
                label = party if kind == "job" else None
                axis.plot(at, [float(row[column]) for row in mine], style, lw=1, label=label)
        axis.set_title(column.replace("_", " "))
        axis.set_ylim(bottom=0)
    axes[1][2].axis("off")
    axes[1][2].legend(*axes[0][0].get_legend_handles_labels(), loc="center")
    for axis in (*axes[1][:2], axes[0][2]):
        axis.set_xlabel("minutes")
    figure.suptitle("One hour of rounds: jobs (lines) and parents (dotted)")
    figure.savefig(picture, dpi=120)


@contextmanager
def running(sites: int, *words: str) -> Iterator[tuple[Live, subprocess.Popen[str], Path]]:
    """Run FedAvg in a federation, and delete everything at the end."""
    folder = Path(tempfile.mkdtemp(prefix="atoll-live-"))
    live = Live(sites, folder)
    try:
        until(lambda: live.connected() == sites, 600)
        yield live, live.run(folder / "out", "fedavg", "--set", "hidden=8", *words), folder / "out"
    finally:
        live.close()
        shutil.rmtree(folder, ignore_errors=True)


@click.command()
@click.option("--minutes", default=60.0, show_default=True)
@click.option("--sites", default=5, show_default=True)
@click.option("--out", default="soak.csv", type=click.Path(path_type=Path), show_default=True)
def soak(*, minutes: float, sites: int, out: Path) -> None:
    """Run rounds for the given minutes and sample every process, as CSV and as a picture."""
    with running(sites, "--rounds", "9999") as (live, admin, _):
        until(lambda: live.reached() >= 1, 180)
        began = time.monotonic()
        with out.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(COLUMNS)
            while time.monotonic() - began < 60 * minutes and admin.poll() is None:
                table.writerows(sample(live, began))
                file.flush()
                time.sleep(10)
        admin.kill()
    with out.open() as file:
        rows = list(csv.DictReader(file))
    draw(rows, out.with_suffix(".png"))
    click.echo(f"{rows[-1]['round']} rounds in {float(rows[-1]['seconds']) / 60:.1f} minutes")


@click.command()
@click.option("--sites", default=20, show_default=True)
@click.option("--rounds", default=10, show_default=True)
@click.option("--out", default="sites.json", type=click.Path(path_type=Path), show_default=True)
def sites(*, sites: int, rounds: int, out: Path) -> None:
    """Measure seconds per round and memory per site of a federation on this machine."""
    times, memory = dict[int, float](), list[tuple[object, ...]]()
    with running(sites, "--rounds", str(rounds), "--wait", "300") as (live, admin, result):
        while admin.poll() is None:
            now = live.reached()
            times.setdefault(now, time.monotonic())
            if now >= rounds // 2 and not memory:
                memory = list(sample(live, 0.0))
            time.sleep(0.1)
        ended = json.loads((result / "result.json").read_text())
    seen = [times[r + 1] - times[r] for r in times if r >= 0 and r + 1 in times]
    each: dict[str, float] = {}
    for row in memory:
        each[str(row[2])] = each.get(str(row[2]), 0.0) + float(str(row[4]))
    found = {
        "sites": sites,
        "seconds_per_round": round(statistics.median(seen), 3),
        "site_mb": round(statistics.median(v for k, v in each.items() if k != "server")),
        "server_mb": round(each["server"]),
        "metrics": ended["metrics"],
    }
    out.write_text(json.dumps(found, indent=1))
    click.echo(json.dumps(found))
