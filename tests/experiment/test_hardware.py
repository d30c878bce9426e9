"""The hardware settings that a run changes and restores."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import ConfigError, DeviceFull
from atoll.experiment import hardware as machine

SMALL = {"data": "lagoon:nodes=150", "clients": 3, "rounds": 3}


def test_a_run_leaves_the_process_as_it_was() -> None:
    generators = torch.get_rng_state(), np.random.get_state()[1].copy()
    atoll.run("fedavg", **SMALL)
    assert sys.float_info.min / 2 > 0  # denormal numbers count again
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert np.array_equal(np.random.get_state()[1], generators[1])
    assert torch.get_default_dtype() is torch.float32


def test_a_group_s_share_of_processors_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(machine, "Path", lambda path: limit)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for text, expected in (("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1)):
        limit.write_text(text + "\n")
        assert machine.cores() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc returns freed memory")
def test_freed_memory_between_kept_blocks_returns_to_the_system() -> None:
    kept, freed = [], []
    for _ in range(3000):
        freed.append(torch.ones(25_000))  # 100 kB
        kept.append(torch.ones(1))
    full = machine.resident_memory()
    freed.clear()
    machine.return_freed()
    assert full - machine.resident_memory() > 150e6


def test_the_heap_is_trimmed_when_it_exceeds_twice_what_a_round_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, trimmed = iter([1 << 30, 2 << 30, 3 << 30, 1 << 30, 2 << 30]), []
    monkeypatch.setattr(machine, "resident_memory", lambda: next(sizes))
    monkeypatch.setattr(machine, "return_freed", lambda: trimmed.append(heap.limit))
    heap = machine.Heap()
    for expected in (0, 0, 1, 1, 1):
        heap.after_round()
        assert len(trimmed) == expected
    assert heap.limit == (2 << 30) + (1 << 29)  # measured again after the memory was returned


def test_a_gpu_that_others_fill_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = ["CUDA error: out of memory", "CUDA error: an illegal memory access"]
    monkeypatch.setattr(torch, "ones", lambda *_, **__: (_ for _ in ()).throw(full))
    full = RuntimeError(problems[0])
    with pytest.raises(DeviceFull, match="other processes fill the GPU's memory"):
        machine.start(torch.device("cuda"))
    full = RuntimeError(problems[1])
    with pytest.raises(RuntimeError, match="illegal"):
        machine.start(torch.device("cuda"))


def test_a_gpu_can_be_chosen_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert machine.choose_device("cuda:1") == torch.device("cuda", 1)
    assert current == [1]
    with pytest.raises(
        ConfigError, match=r"'cuda:2' was asked for, but the last GPU is cuda:1; use"
    ):
        machine.choose_device("cuda:2")
    for wish in ("cuda:", "cuda:one", "cpu:1", "gpu"):
        with pytest.raises(ConfigError, match=f"unknown device '{wish}'; choose auto, cpu, cuda, "):
            machine.choose_device(wish)
