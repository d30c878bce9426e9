"""The ledger: what each method moves, counted by hand."""

from __future__ import annotations

import pytest
import torch

from atoll.core.tree import leaves
from atoll.engines.base import ENGINES
from atoll.engines.ledger import Ledger
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import METHODS
from atoll.nn.nets import GCN
from atoll.testing import CLASSES, FEATURES, double_precision, small_federation

HIDDEN = 7
PARAMETERS = FEATURES * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
ROUNDS, CLIENTS = 3, 4


def run(name: str, engine: str = "fused", fraction: float = 1.0) -> Run:
    method = METHODS[name](GCN(FEATURES, CLASSES, hidden=HIDDEN))
    federation = small_federation()
    return Experiment(method, federation, ROUNDS, fraction, engine=engine).run()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_fedavg_moves_2p_plus_1_floats_per_client_and_round(name, engine):
    made = run(name, engine)
    assert sum(leaf.numel() for leaf in leaves(made.server)) == PARAMETERS
    assert made.ledger.by_step()["train"] == {
        "messages": ROUNDS * CLIENTS,
        "down": ROUNDS * CLIENTS * 4 * PARAMETERS,
        "up": ROUNDS * CLIENTS * 4 * (PARAMETERS + 1),
    }
    assert made.ledger.total("down") + made.ledger.total("up") == (
        ROUNDS * CLIENTS * 4 * (2 * PARAMETERS + 1)
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_local_moves_one_number_down_and_nothing_up(engine):
    ledger = run("local", engine).ledger
    assert (ledger.total("down"), ledger.total("up")) == (ROUNDS * CLIENTS * 8, 0)


def test_double_precision_doubles_the_bytes():
    with double_precision():
        ledger = run("fedavg").ledger
    assert ledger.total("down") == ROUNDS * CLIENTS * 8 * PARAMETERS


def test_only_participants_are_counted():
    ledger = run("fedavg", fraction=0.5).ledger
    assert ledger.by_step()["train"]["messages"] == ROUNDS * 2
    assert ledger.total("down") == ROUNDS * 2 * 4 * PARAMETERS
    trained = [row for row in ledger.rows() if row[1] == "train"]
    assert all(down == 4 * PARAMETERS for *_, down, _ in trained)
    assert [sum(row[0] == number for row in trained) for number in range(ROUNDS)] == [2, 2, 2]


def test_scoring_is_counted_apart():
    ledger = run("fedavg").ledger
    score = ledger.by_step()["score"]
    assert score["messages"] == 2 * ROUNDS * CLIENTS  # the deployed and the local model
    assert score["down"] > 0
    whole = sum(row["down"] for row in ledger.by_step().values())
    assert ledger.total("down") == whole - score["down"]


def test_the_rows_add_up_to_the_totals():
    ledger = run("fedavg", fraction=0.75).ledger
    trained = [row for row in ledger.rows() if row[1] == "train"]
    assert sum(up for *_, up in trained) == ledger.total("up")
    assert sum(down for *_, down, _ in trained) == ledger.total("down")


def test_rounds_add_up_to_the_totals_and_the_first_has_what_init_moved():
    ledger = Ledger()
    ledger.add(-1, "announce", [0, 1, 2], down=5, up=7)
    ledger.add(0, "train", [0, 2], down=100, up=10)
    ledger.add(1, "train", [1], down=100, up=10)
    ledger.add(1, "score", [0, 1, 2], down=1000, up=1000)
    down, up = ledger.by_round(3)
    assert (down, up) == ([215, 100, 0], [41, 10, 0])
    assert (sum(down), sum(up)) == (ledger.total("down"), ledger.total("up"))


def test_a_restored_ledger_continues():
    ledger = Ledger()
    ledger.add(0, "train", [0, 2], 10, 3)
    other = Ledger()
    other.restore(ledger.export())
    other.add(1, "train", [1], 10, 3)
    assert list(other.rows()) == [
        (0, "train", 0, 10, 3), (0, "train", 2, 10, 3), (1, "train", 1, 10, 3),
    ]  # fmt: skip
    assert other.total("up") == 9


def test_rows_sent_to_each_are_counted_once_per_client():
    from atoll.core.message import ToEach

    assert ToEach(torch.zeros(4, 5)).bytes_for_one(4) == 20
