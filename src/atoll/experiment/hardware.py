"""The machine of a run: device, memory, cores, and settings of the process."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import torch

from atoll.core.errors import ConfigError, DeviceFull
from atoll.engines.replay import out_of_memory

PACKAGES = ("atoll-fgl", "torch", "torch_geometric", "numpy", "scipy", "scikit-network", "pymetis")


@contextmanager
def tuned_process() -> Iterator[None]:
    """Apply settings that make small tensors several times as fast on a CPU.

    Denormal numbers are flushed to zero until the context ends, because other code may rely on
    them. On Linux, glibc keeps large blocks from now on. By default it returns freed tensors above
    128 KiB to the system, and the page faults cost more than the arithmetic (an Adam step over ten
    clients: 6.2 ms, now 0.9 ms).
    """
    flushed = sys.float_info.min / 2 == 0
    torch.set_flush_denormal(True)
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


class Heap:
    """Bounds the freed memory that `tuned_process` keeps.

    Mini-batches of changing sizes leave gaps in the heap that no later tensor fits into. On DD,
    they grew to 13 GB in a thousand rounds.
    """

    def __init__(self) -> None:
        self.limit = 0

    def after_round(self) -> None:
        """Return freed memory to the system if the process is twice as large as after one round."""
        held = resident_memory()
        if not self.limit:
            self.limit = 2 * held + (1 << 29)
        elif held > self.limit:
            self.limit = 0  # the next round shows what a round needs
            return_freed()


def resident_memory() -> int:
    """Return the bytes of main memory that this process uses, or 0 if the system hides them."""
    sizes = Path("/proc/self/statm")
    return int(sizes.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if sizes.exists() else 0


def return_freed() -> None:
    """Return all freed main memory to the system, if the C library is glibc."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def available_memory() -> int:
    """Return the bytes that this process may still allocate, by the machine and its cgroup."""
    memory, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    text = memory.read_text() if memory.exists() else ""
    free = [1024 * int(size) for size in re.findall(r"(?m)^MemAvailable:\s+(\d+) kB", text)]
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        free.append(int(limit.read_text()) - int(used.read_text()))
    return min(free, default=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def device_answers() -> bool:
    """Return False if the GPU of this process fails. A process cannot repair a kernel fault."""
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def cores() -> int:
    """Return the number of processors that this process may use, by affinity and cgroup."""
    free = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.exists():
        share, _, period = limit.read_text().partition(" ")
        if share.isdigit():
            free = min(free, max(1, int(share) // int(period)))
    return free


def choose_device(wish: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:1". A numbered GPU becomes current."""
    name, _, number = wish.partition(":")
    if wish not in ("auto", "cpu", "cuda") and (name != "cuda" or not number.isdecimal()):
        raise ConfigError(f"unknown device '{wish}'; choose auto, cpu, cuda, or cuda:1 for GPU 1")
    if name == "cuda" and int(number or 0) >= (count := torch.cuda.device_count()):
        finds = f"the last GPU is cuda:{count - 1}" if count else "torch finds no GPU"
        raise ConfigError(f"device '{wish}' was asked for, but {finds}; use --device cpu or auto")
    if number:
        torch.cuda.set_device(int(number))  # memory, streams and names refer to the current one
        return torch.device(wish)
    return torch.device("cuda" if wish != "cpu" and torch.cuda.is_available() else "cpu")


def start(device: torch.device) -> None:
    """Let a GPU load its libraries. This takes half a second, which is not training time."""
    if device.type != "cuda":
        return
    try:
        one = torch.ones(1, 1, 1, device=device)
        torch.bmm(one, one).sum().item()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise DeviceFull(
            "other processes fill the GPU's memory, so that this one cannot even begin; end them "
            "(nvidia-smi lists them), or use --device cpu"
        ) from error


def release_memory() -> None:
    """Return unused memory to the GPU, so that other processes can use it."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def device_memory() -> int:
    """Return the total bytes of the current GPU's memory, or 0 without a GPU."""
    there = torch.cuda.is_available()
    return int(torch.cuda.get_device_properties(None).total_memory) if there else 0


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def process_seconds() -> tuple[float, float]:
    """Return wall and CPU seconds since this process began. Unknown wall seconds are 0."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0.0, time.process_time()
    began = int(stat.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began, time.process_time()


def environment() -> dict[str, str]:
    """Return the versions of packages and the machine, for the record."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found["cpus"] = str(os.cpu_count())
    found["threads"] = str(torch.get_num_threads())
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found
