"""A recording replayed with other inputs equals the function on these inputs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from atoll.core.random import fold, make_key
from atoll.engines.recording import (
    ROUND,
    NotRecordable,
    Recording,
    Tape,
    copied,
    copy_over,
    no_reads,
    shapes,
)  # fmt: skip


def test_a_replay_takes_new_inputs() -> None:
    recording = Recording(lambda x, y: (x["a"] + y, 2 * y), {"a": torch.ones(2)}, torch.zeros(2))
    total, twice = recording({"a": torch.tensor([1.0, 2.0])}, torch.tensor([10.0, 20.0]))
    assert total.tolist() == [11, 22]
    assert twice.tolist() == [20, 40]


def test_what_is_carried_becomes_the_next_input() -> None:
    # The two change places in every call: written one over the other, one of them would be lost.
    recording = Recording(lambda a, b: (b, a + 1, a * b), *torch.tensor([1.0, 5.0]), carried=2)
    a, b, product = recording(torch.tensor(1.0), torch.tensor(5.0))
    assert (a.item(), b.item(), product.item()) == (5, 2, 5)
    a, b, product = recording(a, b)
    assert (a.item(), b.item(), product.item()) == (2, 6, 10)


def test_the_inputs_that_were_recorded_are_left_alone() -> None:
    start = torch.tensor(3.0)
    recording = Recording(lambda a: (a + 1,), start, carried=1)
    (a,) = recording(start)
    recording(a)
    assert start.item() == 3


def test_copies_of_tensors_of_several_types() -> None:
    tree = {"a": torch.ones(2), "n": torch.tensor(3), "b": torch.ones(3, 2).T, "none": None}
    copy = copied(tree)
    copy_over([tree["a"], tree["n"]], [torch.zeros(2), torch.tensor(4)])
    assert (tree["a"].tolist(), tree["n"].item()) == ([0, 0], 4)
    assert (copy["a"].tolist(), copy["n"].item(), copy["none"]) == ([1, 1], 3, None)
    assert torch.equal(copy["b"], tree["b"])


def test_shapes_tell_trees_apart() -> None:
    assert shapes({"a": torch.ones(2)}) == shapes({"a": torch.zeros(2)})
    assert shapes({"a": torch.ones(2), "n": 1}) != shapes({"a": torch.ones(2), "n": 2})
    for other in ({"a": torch.ones(3)}, {"b": torch.ones(2)}, {"a": torch.ones(2).double()}):
        assert shapes({"a": torch.ones(2)}) != shapes(other)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
    ],
)
def test_reading_a_number_cannot_be_recorded(read) -> None:
    with pytest.raises(NotRecordable, match="it reads numbers on the way"), no_reads(CPU):
        read(torch.ones(3))


CPU = torch.device("cpu")


def test_work_without_reading_passes() -> None:
    with no_reads(CPU):
        assert torch.func.vmap(lambda x: x.sort().values * 2)(torch.ones(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("number", [0, 7])
def test_recorded_keys_are_the_keys_of_the_round(number: int) -> None:
    root = make_key(5)
    rehearsed = Tape(root, number)
    asked = [("step", "train", ROUND, 0), ("server", ROUND), ("sample", ROUND)]
    keys = [rehearsed.key(*parts) for parts in asked]
    right = [fold(root, "step", "train", number, 0), fold(root, "server", number)]
    assert torch.equal(torch.stack(keys[:2]), torch.stack(right))
    recorded = Tape(root, salts=rehearsed.salts_of(range(10))[number])
    assert [recorded.key(*parts) for parts in asked] == keys


def watched(*trees: dict[str, Tensor]) -> Tape:
    tape = Tape(make_key(0))
    for number, tree in enumerate(trees):
        tape.watch(tree, f"step {number}")
    return tape


def test_the_first_client_with_a_bad_number_is_named() -> None:
    good, nan = torch.ones(3, 2), torch.ones(3, 2)
    nan[2, 1] = torch.nan
    infinite = torch.ones(3, dtype=torch.float64)
    infinite[1] = torch.inf
    tape = watched({"a": good, "b": good[:, 0]}, {"a": nan, "b": infinite, "n": torch.arange(3)})
    check, name, row = tape.first_problem(tape.finite())
    assert (check.step, name, row) == ("step 1", "b", 1)


def test_nothing_to_complain_about() -> None:
    tape = watched({"a": torch.ones(2, 2)}, {"n": torch.arange(2)})
    assert tape.finite().tolist() == [True, True]
    assert tape.first_problem(tape.finite()) is None


def test_what_is_read_from_elsewhere_can_be_kept() -> None:
    given, cached, unread = torch.ones(3), torch.full((3,), 2.0), torch.zeros(3)
    with no_reads(CPU) as watch:
        made = given[1:] + 1
        torch.func.vmap(lambda x, y: x * y)(cached[:2], made * unread.shape[0])
    assert [leaf.data_ptr() for leaf in watch.besides({"given": given})] == [cached.data_ptr()]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_large_numbers_are_finite_also_where_their_sum_is_not(bad: float) -> None:
    tape, large = Tape(make_key(0)), torch.full((2, 3, 3), 3e38)
    tape.watch({"large": large, "small": torch.zeros(2, 1).double()}, "train")
    assert tape.first_problem(tape.finite()) is None
    large = large.clone()
    large[1, 2, 0] = bad
    tape.watch({"small": torch.zeros(2, 1), "large": large}, "train")
    check, name, row = tape.first_problem(tape.finite()) or (None, "", -1)
    assert (check, name, row) == (tape.checks[1], "large", 1)


def test_watching_for_reads_does_not_import_the_compiler_of_torch() -> None:
    code = """
import sys, torch
from atoll.engines.recording import no_reads
with no_reads(torch.device("cpu")):
    torch.func.vmap(lambda row: (row * 2).sum())(torch.ones(3, 4))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
