"""Private states by round."""

from __future__ import annotations

import pytest
import torch

from atoll.core.errors import WireError
from atoll.deploy.states import KEPT, States
from atoll.engines.fleet import NEVER


def test_the_last_states_stay_and_so_does_the_selected_one(tmp_path) -> None:
    states = States(tmp_path / "r-0")
    for number in range(8):
        states.save(number, {"x": torch.tensor(float(number))}, f"line {number}", number - 1, 1)
    assert states.rounds() == [1, *range(6 - KEPT, 8)]
    tree, lineage = states.load(7)
    assert (float(tree["x"]), lineage) == (7.0, "line 7")
    assert states.load(NEVER) == (None, "")
    with pytest.raises(WireError, match="the private state after round 0 is not in its runs/r-0"):
        states.load(0)


def test_other_files_in_the_folder_are_no_states(tmp_path) -> None:
    states = States(tmp_path)
    states.save(0, {"x": torch.zeros(1)}, "", NEVER)
    for name in ("state_x.atoll", "state_².atoll", "state_1.txt"):
        (tmp_path / name).touch()
    assert states.rounds() == [0]
