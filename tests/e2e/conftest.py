"""One federation for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.deploy.local import Demo
from tests.e2e.trial import Trial, lagoon, processes


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    folder, federation = tmp_path_factory.mktemp("federation"), lagoon()
    with Demo(federation, folder / "fed") as demo:
        yield Trial(demo, federation, folder)
    assert processes(folder) == {}
