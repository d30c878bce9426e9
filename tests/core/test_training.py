"""Shared parts of methods: default averaging, changed gradients, and numbers of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from atoll.core.aggregate import Mean
from atoll.core.errors import ConfigError
from atoll.core.hyper import OptimizerState, hypers
from atoll.core.message import ToEach
from atoll.core.optim import SGD
from atoll.core.training import Averaging, Mixing, mixing_of, put_pairs, unmet
from atoll.core.tree import Tree, leaves, tree_map
from atoll.experiment.rounds import Experiment
from atoll.methods import MOON, FedAvg, FedSage
from atoll.nn import GCN, GraphSAGE
from atoll.testing import CLASSES, FEATURES, small_federation

NET = GCN(FEATURES, CLASSES, hidden=6)


@dataclass(frozen=True)
class Plain(Averaging):
    """Nothing but the base."""

    paper: ClassVar[str] = "none"


@dataclass(frozen=True)
class Fresh(Plain):
    """A choice becomes a hyper-parameter where a method declares it."""

    optimizer_state: OptimizerState = "reset"


@dataclass(frozen=True)
class Still(Plain):
    """Gradients that are bent to zero."""

    def bend(self, grads: Tree, params: Tree, received: Tree) -> Tree:
        return tree_map(torch.zeros_like, grads)


def trained(method: Any, rounds: int = 2) -> Any:
    return Experiment(method, small_federation(), rounds=rounds).run()


def same(a: Tree, b: Tree) -> bool:
    return all(map(torch.equal, leaves(a), leaves(b)))


def test_the_base_alone_is_fedavg() -> None:
    plain = Plain(NET)
    assert (plain.weight_by, plain.optimizer_state, plain.aggregate) == ("nodes", "keep", Mean())
    assert list(hypers(Plain)) == ["net", "optimizer", "epochs"]
    assert same(trained(plain).server, trained(FedAvg(NET)).server)


def test_a_declared_field_replaces_the_default() -> None:
    assert same(trained(Fresh(NET)).server, trained(FedAvg(NET, optimizer_state="reset")).server)
    assert not same(trained(Fresh(NET)).server, trained(Plain(NET)).server)


def test_steps_follow_the_bent_gradient() -> None:
    method = Still(NET, SGD(lr=1.0))
    made = trained(method)
    for after, before in zip(
        leaves(made.server), leaves(method.init(made.simulation.clients(-1))), strict=True
    ):
        torch.testing.assert_close(after, before)  # the weighted mean rounds


def test_fit_drops_the_moments_that_a_method_resets() -> None:
    graph = small_federation().prepared(GraphSAGE(FEATURES, CLASSES).views).graphs[0]
    net, key = GraphSAGE(FEATURES, CLASSES, hidden=4), torch.tensor(7)
    for state, steps in (("keep", 6.0), ("reset", 3.0)):
        method = FedSage(net, optimizer_state=state)
        model, moments = method.fit(graph, net.init(key), None, key)
        assert float(method.fit(graph, model, moments, key)[1].steps) == steps


def test_every_client_gets_its_own_of_the_stacked_models() -> None:
    models = {"w": torch.arange(6.0).reshape(3, 2)}
    message = Mixing.deploy(object(), SimpleNamespace(models=models))  # type: ignore[arg-type]
    assert isinstance(message, ToEach)
    assert torch.equal(message.tree["w"], models["w"])


def test_numbers_of_pairs_change_only_among_the_participants() -> None:
    clients: Any = SimpleNamespace(total=3, key=torch.tensor(0))
    known = unmet(clients, 2)
    assert known.shape == (2, 3, 3)
    assert known.isnan().all()
    found = torch.arange(8.0).reshape(2, 2, 2)
    after = put_pairs(known, torch.tensor([0, 2]), found)
    assert torch.equal(after[:, [0, 0, 2, 2], [0, 2, 0, 2]], found.flatten(1))
    assert int(after.isnan().sum()) == 2 * 5
    assert known.isnan().all()  # the server's last tree stays


def test_weights_follow_from_known_similarities() -> None:
    similarity = torch.tensor([[1.0, 0.5, torch.nan]])
    found = mixing_of(similarity, tau=2.0)
    expected = torch.softmax(torch.tensor([[2.0, 1.0]]), -1)
    torch.testing.assert_close(found["mixing"][:, :2], expected)
    assert float(found["mixing"][0, 2]) == 0
    assert found["similarity"] is similarity


def test_another_network_is_refused_with_the_one_to_choose() -> None:
    FedSage(GraphSAGE(3, 2))
    with pytest.raises(ConfigError, match=r"^fedsage trains a GraphSAGE; use --set net=sage$"):
        FedSage(GCN(3, 2))


def test_a_network_without_a_hidden_layer_is_refused_where_embeddings_are_compared() -> None:
    MOON(GCN(3, 2))
    with pytest.raises(ConfigError, match="GCN has no hidden layer whose output could be compared"):
        MOON(GCN(3, 2, layers=1))


@pytest.mark.parametrize("sizes", [(), (2,), (2, 3)])
def test_pairs_are_replaced_also_for_many_runs_at_once(
    sizes: tuple[int, ...],
) -> None:
    known = torch.randn(4, *sizes, 5, 5)
    found = torch.randn(4, *sizes, 3, 3)
    positions = torch.tensor([[0, 2, 4], [1, 2, 3], [4, 0, 1], [3, 4, 0]])
    expected = known.clone()
    for run, places in enumerate(positions.tolist()):
        for i, one in enumerate(places):
            for j, other in enumerate(places):
                expected[run, ..., one, other] = found[run, ..., i, j]
    torch.testing.assert_close(torch.vmap(put_pairs)(known, positions, found), expected)
    torch.testing.assert_close(put_pairs(known[0], positions[0], found[0]), expected[0])
