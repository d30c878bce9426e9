"""Time and profile rounds of the `atoll` on the path: one side of `python -m bench rounds-gpu`.

The script prints one line of JSON for each case. PYTHONPATH names the source tree to measure, so
the script uses only names that every version of Atoll has.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS, WARM, PROFILED_FROM = 200, 20, 140


def measure(method: str, data: str, seeds: int, listing: Path | None) -> dict[str, Any]:
    """Return milliseconds and kernels of a round, for all seeds together."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    import atoll
    from atoll.experiment.sweep import Sweep

    found: dict[str, Any] = {}
    plain = Sweep.advance

    def advance(self: Sweep) -> list[int]:
        begun = self.runs[0].history.rounds
        if begun < PROFILED_FROM or "rounds" in found:
            return plain(self)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            moved = plain(self)
            torch.cuda.synchronize()
        found.update(rounds=self.runs[0].history.rounds - begun, begun=begun, profile=profiled)
        return moved

    name, _, preset = method.partition("+")
    given: dict[str, Any] = {"rounds": ROUNDS, "seeds": seeds, "device": "cuda"}
    if data == "cora":
        given |= {"clients": 10, "partition": "louvain", "epochs": 3}
    elif data == "proteins":
        given["protocol"] = "gcfl"
    if preset:
        given["set"] = {"preset": preset}
    elif name == "fedtad":  # the public code's number of iterations, as in earlier measurements
        given["set"] = {"iterations": 5}
    Sweep.advance = advance  # type: ignore[method-assign]
    try:
        result = atoll.run(name, data, **given)
    finally:
        Sweep.advance = plain  # type: ignore[method-assign]
    seconds = result.seeds[0].history.seconds
    ends = found.get("begun", ROUNDS)
    device = torch.autograd.DeviceType.CUDA
    events = [e for e in found["profile"].events() if e.device_type == device]
    events = [e for e in events if e.name != "Activity Buffer Request"]
    count, times = Counter(e.name for e in events), Counter[str]()
    for event in events:
        times[event.name] += event.time_range.elapsed_us()
    rounds = found["rounds"]
    if listing is not None:
        _list(listing, events, count, times, rounds)
    return {
        "method": method,
        "data": data,
        "seeds": seeds,
        "ms": 1e3 * seeds * median(seconds[WARM:ends]),
        "kernels": len(events) / rounds,
        "busy_us": sum(times.values()) / rounds,
        "training_s": sum(seconds) * seeds,
        "test_accuracy": result.metrics()["test_accuracy"]["mean"],
        "scores": [float(s.history.scores["deployed"][9][:, 2, 0].mean()) for s in result.seeds],
    }


def _list(path: Path, events: list[Any], count: Any, times: Any, rounds: int) -> None:
    """Write the kernels by time, then the sequence of one round."""
    lines = [
        f"{microseconds / rounds:9.2f} us {count[name] / rounds:7.1f} x  {name[:200]}"
        for name, microseconds in times.most_common(70)
    ]
    events = sorted(events, key=lambda event: event.time_range.start)
    size = round(len(events) / rounds)
    first = 2 * size if rounds > 3 else 0
    lines += ["", "the kernels of one round in order (us, gap before)"]
    for before, event in zip(events[first:], events[first + 1 : first + size + 5], strict=False):
        gap = event.time_range.start - before.time_range.end
        lines.append(f"{event.time_range.elapsed_us():7.1f} {gap:6.1f}  {event.name[:150]}")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    folder, side, *cases = sys.argv[1:]
    for case in cases:
        wanted, dataset, number = case.split(":")
        tag = f"{side}-{wanted}-{dataset}-{number}.txt"
        listing = Path(folder) / tag if folder else None
        print(json.dumps(measure(wanted, dataset, int(number), listing)), flush=True)
        gc.collect()
