"""Random faults in live federations: every run must end with the numbers of the serial engine.

`python -m bench faults --faults 100`: each federation has 3 to 5 sites, each on its own network
link and small disk. The quorum is all sites, so a run waits for a missing site.
"""

from __future__ import annotations

import csv
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from bench.live import KILL, RESUME, STOP, Live, commands, serial_metrics, until

METHODS = ("fedavg", "fedath", "scaffold", "fedper")
ROUNDS = 40
PATIENCE = 300.0  # seconds for a federation to recover from one fault
OVERLAP = 20.0  # seconds that a job may take to end after its successor has started


@dataclass
class Row:
    """One fault and its recovery."""

    federation: int
    sites: int
    method: str
    fault: str
    round: int
    seconds: float = 0.0
    outcome: str = ""


@dataclass
class Federation:
    """One live federation, its run and the faults that it suffers."""

    number: int
    folder: Path
    live: Live
    method: str
    draw: random.Random
    rows: list[Row] = field(default_factory=list)
    runs: int = 0
    overlap: float = 0.0

    def begin(self) -> None:
        """Start a run."""
        self.runs += 1
        self.out = self.folder / f"out-{self.runs}"
        sites = len(self.live.sites)
        words = [self.method, "--rounds", str(ROUNDS), "--set", "hidden=8"]
        before = self._folders()
        self.words = [*words, "--quorum", str(sites), "--deadline", "15", "--wait", "90"]
        self.admin = self.live.run(self.out, *self.words)
        until(lambda: self._folders() > before and self.live.reached() >= 1, 180)

    def _folders(self) -> int:
        return len(list(self.live.kits["server"].glob("atoll/runs/*")))

    def suffer(self, name: str, fault: Callable[[Federation], None]) -> None:
        """Cause one fault during a run and measure the seconds until the run progresses again."""
        if self.admin.poll() is not None or self.live.reached() > ROUNDS - 6:
            self.finish()
            self.begin()
        until(lambda: self.admin.poll() is not None or self.live.reached() >= 2, 120)
        time.sleep(self.draw.uniform(0.0, 2.0))
        row = Row(self.number, len(self.live.sites), self.method, name, self.live.reached())
        self.rows.append(row)
        began = time.monotonic()
        fault(self)
        at = self.live.reached()
        try:
            until(lambda: self._forward(at), PATIENCE)
            row.outcome = "recovered"
        except TimeoutError:
            row.outcome = "stuck"
        row.seconds = round(time.monotonic() - began, 1)

    def _forward(self, at: int) -> bool:
        """Whether the run is beyond a round. Restart an administrator that was refused."""
        code = self.admin.poll()
        if code is not None and code != 0:
            if self.live.connected() == len(self.live.sites):
                self.admin = self.live.run(self.out, *self.words)
            return False
        return code == 0 or self.live.reached() > at

    def finish(self) -> None:
        """Wait for the end of the run and compare its result with the serial engine."""
        try:
            until(lambda: self._forward(ROUNDS), PATIENCE)
            found = json.loads((self.out / "result.json").read_text())["metrics"]
            expected = serial_metrics(self.method, len(self.live.sites), ROUNDS)
            same = json.loads(json.dumps(expected)) == found
            end = "serial result" if same else "ANOTHER RESULT"
        except (TimeoutError, OSError) as error:
            end = f"NO RESULT ({error})"
        for row in self.rows:
            if row.outcome == "recovered":
                row.outcome = end

    def watch(self, stop: threading.Event) -> None:
        """Measure how long two jobs of the server were alive at the same time."""
        two = 0.0
        while not stop.wait(0.5):
            two = two + 0.5 if len(self.live.pids("server", "job")) > 1 else 0.0
            self.overlap = max(self.overlap, two)


def _kill(*parties: str) -> Callable[[Federation], None]:
    """Kill processes ("site", "site job", "server", ...), then start the parties again."""

    def fault(fed: Federation) -> None:
        drawn = fed.draw.sample(fed.live.sites, 2)
        again = []
        for party in parties:
            if party == "administrator":
                fed.admin.kill()
                fed.admin.wait()
                continue
            name = "server" if party.startswith("server") else drawn.pop()
            kinds = ("job",) if party.endswith("job") else ("parent", "job")
            fed.live.signal(name, KILL, *kinds)
            again += [name] if "parent" in kinds else []
        time.sleep(fed.draw.uniform(0.5, 3.0))
        for name in again:
            fed.live.start(name)

    return fault


def _stop(party: str, kinds: tuple[str, ...], seconds: float) -> Callable[[Federation], None]:
    def fault(fed: Federation) -> None:
        name = "server" if party == "server" else fed.draw.choice(fed.live.sites)
        fed.live.signal(name, STOP, *kinds)
        time.sleep(seconds)
        fed.live.signal(name, RESUME, *kinds)

    return fault


def _cut(seconds: float) -> Callable[[Federation], None]:
    def fault(fed: Federation) -> None:
        name = fed.draw.choice(fed.live.sites)
        fed.live.cut(name, down=True)
        time.sleep(seconds)
        fed.live.cut(name, down=False)

    return fault


def _full(party: str) -> Callable[[Federation], None]:
    def fault(fed: Federation) -> None:
        name = "server" if party == "server" else fed.draw.choice(fed.live.sites)
        with fed.live.full_disk(name):
            time.sleep(6)

    return fault


FAULTS: dict[str, Callable[[Federation], None]] = {
    "site killed": _kill("site"),
    "job of a site killed": _kill("site job"),
    "server killed": _kill("server"),
    "job of the server killed": _kill("server job"),
    "administrator killed": _kill("administrator"),
    "two sites killed": _kill("site", "site"),
    "site and server killed": _kill("site", "server"),
    "site and administrator killed": _kill("site", "administrator"),
    "job of the server and administrator killed": _kill("server job", "administrator"),
    "job of a site stopped for 20 s": _stop("site", ("job",), 20),
    "server stopped for 10 s": _stop("server", ("parent", "job"), 10),
    "network of a site cut for 3 s": _cut(3),
    "network of a site cut for 25 s": _cut(25),
    "disk of a site full for 6 s": _full("site"),
    "disk of the server full for 6 s": _full("server"),
}


def one_federation(number: int, faults: int, seed: int, table: Path) -> None:
    """Make a federation, cause its faults, and write its rows."""
    draw = random.Random(f"{seed}/{number}")
    folder = Path(tempfile.mkdtemp(prefix="atoll-faults-"))
    live = Live(draw.randint(3, 5), folder)
    fed = Federation(number, folder, live, draw.choice(METHODS), draw)
    stop = threading.Event()
    watcher = threading.Thread(target=fed.watch, args=(stop,))
    try:
        until(lambda: live.connected() == len(live.sites), 180)
        fed.begin()
        watcher.start()
        names = list(FAULTS)
        for step in range(faults):  # kinds take turns over all federations
            name = names[(number * faults + step) % len(names)]
            fed.suffer(name, FAULTS[name])
        fed.finish()
    finally:
        stop.set()
        if fed.admin.poll() is None:
            fed.admin.kill()
        live.close()
        orphans = [words for _, words in commands(folder)]
        note = f"; two jobs for {fed.overlap:g} s" if fed.overlap > OVERLAP else ""
        note += f"; {len(orphans)} ORPHANS" if orphans else ""
        for row in fed.rows:
            row.outcome += note
        with table.open("a", newline="") as file:
            csv.writer(file).writerows(asdict(row).values() for row in fed.rows)
        bad = [row for row in fed.rows if row.outcome != "serial result"]
        if not bad:
            shutil.rmtree(folder, ignore_errors=True)
        click.echo(f"federation {number}: {len(fed.rows)} faults, {len(bad)} bad; {folder}")


@click.command()
@click.option("--faults", default=100, show_default=True)
@click.option("--federations", default=20, show_default=True)
@click.option("--jobs", default=2, show_default=True, help="Federations at the same time.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", type=int, help="One federation, in this process.")
@click.option("--out", default="faults.csv", type=click.Path(path_type=Path), show_default=True)
def faults(
    *, faults: int, federations: int, jobs: int, seed: int, only: int | None, out: Path
) -> None:
    """Cause random faults in live federations and measure the seconds of each recovery."""
    each = -(-faults // federations)
    if only is not None:
        one_federation(only, each, seed, out)
        return
    header = [*Row.__dataclass_fields__]
    with out.open("w", newline="") as file:
        csv.writer(file).writerow(header)
    waiting, running = list(range(federations)), list[subprocess.Popen[bytes]]()
    while waiting or running:
        running = [process for process in running if process.poll() is None]
        if waiting and len(running) < jobs:
            command = [sys.executable, "-m", "bench", "faults", "--only", str(waiting.pop(0))]
            sizes = ["--faults", str(faults), "--federations", str(federations)]
            more = [*sizes, "--seed", str(seed), "--out", str(out)]
            running.append(subprocess.Popen(["unshare", "-nm", *command, *more]))
        time.sleep(0.5)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    for kind in FAULTS:
        mine = sorted(float(row["seconds"]) for row in rows if row["fault"] == kind)
        ends = Counter(row["outcome"] for row in rows if row["fault"] == kind)
        if mine:
            middle, most = mine[len(mine) // 2], mine[-1]
            click.echo(f"{kind:45} {len(mine):3} {middle:6.1f} s {most:6.1f} s  {dict(ends)}")
