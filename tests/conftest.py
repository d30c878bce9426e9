"""Real data for tests: from `ATOLL_DATA`, or fetched once from a mirror into `.cache/data`."""

from __future__ import annotations

import os

# Read when torch is loaded: threads that wait in a busy loop starve each other's processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No test finds what another one, or the user, has cached; tests of the cache name a folder.
os.environ["ATOLL_CACHE"] = "off"

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from atoll.core.errors import DataError
from atoll.data.public.fetch import fetch
from atoll.data.public.registry import dataset_info, is_present

REPOSITORY = Path(__file__).resolve().parents[1]
BESIDE = REPOSITORY.parent / "shared" / "data"
# Read now: single tests take these variables away.
GIVEN, MIRROR = os.environ.get("ATOLL_DATA"), os.environ.get("ATOLL_MIRROR")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """On tensors this small, waking a pool of threads costs more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets. Skip the test if neither they nor a mirror exist."""
    if GIVEN:
        return Path(GIVEN)
    if not MIRROR and not BESIDE.is_dir():
        pytest.skip("no real data: neither ATOLL_DATA nor ATOLL_MIRROR is set, no ../shared/data")
    cache = REPOSITORY / ".cache" / "data"
    cache.mkdir(parents=True, exist_ok=True)
    # The folder ignores itself, so that no data set can be committed.
    (cache.parent / ".gitignore").write_text("*\n")
    return cache


@pytest.fixture(scope="session")
def real_data(data_root: Path) -> Callable[[str], Path]:
    """`real_data("cora")` makes sure that the set is there and returns the data root."""

    def get(name: str) -> Path:
        if is_present(name, data_root):
            return data_root
        if GIVEN:
            pytest.skip(f"'{name}' is not in ATOLL_DATA")
        try:
            # One worker fetches, the others wait for it.
            with FileLock(data_root.parent / "fetch.lock"):
                fetch(name, data_root, MIRROR or BESIDE)
        except DataError as error:
            if f"has no {dataset_info(name).archive}" in str(error):
                pytest.skip(f"'{name}' is not in the mirror")
            raise
        return data_root

    return get
