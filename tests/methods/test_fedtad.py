"""FedTAD against hand-computed numbers, on other methods, and on awkward federations."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from atoll.core.aggregate import mix, put, spread
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import make_graph
from atoll.core.message import ToEach
from atoll.core.method import Clients, client_step
from atoll.core.random import make_key
from atoll.core.task import NODES
from atoll.core.tree import Tree, leaves, stack
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config
from atoll.experiment.rounds import Experiment
from atoll.methods import GCFL, FedATH, FedAvg, FedIIH, FedProx, FedTAD, Local
from atoll.methods.fedtad import Lesson, _share
from atoll.nn import GCN, nets_for
from atoll.nn.fedtad import (
    _half_by_row,
    _half_in_blocks,
    divergence,
    mean_cosine,
    mode_seeking,
)
from atoll.testing import CLASSES, FEATURES, check_method, double_precision, small_federation

NODE_NETS = nets_for(NODES.name)

GLOBAL = [[2.0, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 3]]
LOCAL = [[1.0, 0, 0], [0, 2, 0], [0, 1, 1], [0, 0, 1]]
LABELS = torch.tensor([0, 1, 1, 2])
SMALL = {"pseudo_nodes": 9, "iterations": 2, "distil_steps": 2}
NET = GCN(FEATURES, CLASSES, hidden=5, dropout=0.4)


@pytest.fixture(autouse=True)
def _double():
    with double_precision():
        yield


def test_shares_sum_to_one_over_clients():
    share = _share(torch.tensor([[0.573027, 1.177289], [0.5, 2.0]]))
    assert share[0].tolist() == pytest.approx([0.534028, 0.370533], abs=1e-6)
    assert share.sum(0).tolist() == pytest.approx([1, 1])


def test_a_class_that_nobody_has_counts_for_nothing():
    share = _share(torch.tensor([[0.0, 1.0, -0.5], [0.0, 3.0, 1.0]]))
    assert share.tolist() == [[0, 0.25, 0], [0, 0.75, 1]]


@pytest.mark.parametrize(
    ("reading", "reduce", "value"),
    [("l1", "mean", 0.5), ("kl", "sum", 0.197733)],
)
def test_divergence(reading, reduce, value):
    weight = torch.tensor([[0.2, 0.5, 0.3]])[:, LABELS]
    if reduce == "mean":
        weight = weight / torch.bincount(LABELS)[LABELS]
    found = divergence(torch.tensor(GLOBAL), torch.tensor([LOCAL]), weight, reading)
    assert found.item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("reduce", "value"), [("mean", 0.551107), ("sum", 0.826492)])
def test_semantic_loss(reduce, value):
    weight = torch.tensor([0.2, 0.5, 0.3])[LABELS]
    if reduce == "mean":
        weight = weight / torch.bincount(LABELS)[LABELS]
    wrong = torch.nn.functional.cross_entropy(torch.tensor(LOCAL), LABELS, reduction="none")
    assert (weight * wrong).sum().item() == pytest.approx(value, abs=1e-6)


def test_diversity():
    x = torch.tensor([[1, 0], [0.8, 0.6], [0, 1], [-1, 0.5]])
    z = torch.tensor([[0.1, 0.2], [0, -0.3], [1, 0.4], [-0.5, 0.5]])
    assert mean_cosine(x).item() == pytest.approx(0.313197, abs=1e-6)
    assert mode_seeking(z, x).item() == pytest.approx(0.733860, abs=1e-6)


def test_mode_seeking_of_many_seeds_at_once():
    draw = torch.Generator().manual_seed(1)
    z, x = torch.randn(3, 7, 4, generator=draw), torch.randn(3, 7, 5, generator=draw)
    found = torch.func.vmap(mode_seeking)(z, x)
    slopes = torch.func.vmap(torch.func.grad(mode_seeking, argnums=1))(z, x)
    for seed in range(3):
        torch.testing.assert_close(found[seed], mode_seeking(z[seed], x[seed]))
        alone = torch.func.grad(mode_seeking, argnums=1)(z[seed], x[seed])
        torch.testing.assert_close(slopes[seed], alone)


def test_mode_seeking_equals_the_plain_form_and_its_gradient():
    z, x = torch.randn(20, 6), torch.randn(20, 30, requires_grad=True)
    z_apart = torch.cdist(z, z).square() / 6
    plain = torch.exp(-(z_apart * torch.cdist(x, x, p=1.0) / 30).mean())
    fast = mode_seeking(z, x)
    assert torch.isclose(fast, plain)
    ours, theirs = (torch.autograd.grad(value, x)[0] for value in (fast, plain))
    assert torch.allclose(ours, theirs)
    weight = z_apart.contiguous()
    assert torch.allclose(_half_in_blocks(x, weight), _half_by_row(x.detach(), weight))


@pytest.mark.parametrize(("classes", "counts"), [(7, [14] * 6 + [16]), (40, [2] * 39 + [22])])
def test_pseudo_labels(classes, counts):
    lesson = Lesson(FedTAD(GCN(3, classes)), None, torch.ones(2, classes), personal=False)
    assert torch.bincount(lesson.labels).tolist() == counts


@dataclass(frozen=True)
class Ring(FedAvg):
    """A personalised method: each client gets the mean of two models, its own and a neighbour's."""

    deployed = "personalised"

    def init(self, clients: Clients) -> Tree:
        return {"models": spread(self.net.init(clients.key), clients.total), "note": torch.ones(1)}

    def round(self, server: Tree, clients: Clients) -> Tree:
        reply = clients.map(self.train, ToEach(server["models"]))
        size = len(clients)
        matrix = torch.eye(size) * 0.5 + torch.ones(size, size) * 0.5 / size
        mixed = mix(reply.model, matrix)
        return {**server, "models": put(server["models"], clients.positions, mixed)}

    def deploy(self, server: Tree) -> ToEach:
        return ToEach(server["models"])

    @client_step
    def train(self, graph, model, state, key):
        return FedAvg.train.function(self, graph, model, state, key)


BASES = {"fedprox": FedProx, "fedath": FedATH, "gcfl": GCFL, "personalised": Ring}


@pytest.mark.long
@pytest.mark.parametrize("preset", FedTAD.presets)
def test_contract_of_the_presets(preset):
    check_method(partial(FedTAD, **{**FedTAD.presets[preset], **SMALL}), rounds=2)


@pytest.mark.long
def test_contract_on_fediih():
    def make(net):
        return FedTAD(net, base=FedIIH(net), **SMALL)

    make.nets = FedIIH.nets
    check_method(make, rounds=2)


@pytest.mark.long
@pytest.mark.parametrize("base", BASES)
def test_contract_on_other_methods(base):
    check_method(lambda net: FedTAD(net, base=BASES[base](net=net), **SMALL), rounds=2)


def run(method, rounds=2, federation=None, **options):
    return Experiment(method, federation or small_federation(), rounds, **options).run()


def test_fedavg_as_the_base_is_fedtad_itself():
    plain, plugged = FedTAD(NET, **SMALL), FedTAD(NET, base=FedAvg(NET), **SMALL)
    for a, b in zip(leaves(run(plain).server), leaves(run(plugged).server), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("base", [None, FedProx(NET), Ring(NET)])
def test_without_distillation_only_the_base_is_left(base):
    method = FedTAD(NET, base=base, iterations=0)
    alone = run(base or FedAvg(NET)).server
    for a, b in zip(leaves(run(method).server.base), leaves(alone), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def pseudo_graph(lesson, generator):
    noise = lesson.noise(make_key(4))
    return lesson.pseudo_graph(lesson.method.generator(generator, noise, lesson.labels))


def test_distillation_brings_the_model_closer_to_its_teachers():
    method = FedTAD(NET, pseudo_nodes=30)
    models = [NET.init(make_key(i)) for i in range(3)]
    lesson = Lesson(method, stack(models[1:]), torch.full((2, CLASSES), 0.5), personal=False)
    generator = method.generator.init(make_key(9))
    student, moments = models[0], method.distil_optimizer.init(models[0])

    def gap(student):
        graph = pseudo_graph(lesson, generator)
        taught = lesson.answers(lesson.teachers, graph, many=True)
        said = method.predict(graph, student, None)
        return float(divergence(said, taught, lesson.weight, method.discrepancy))

    key = make_key(4)
    corrected, _ = lesson.teach(generator, student, moments, lesson.noise(key), key)
    assert gap(corrected) < gap(student)


def rates(**settings):
    method = build_method(make_config(method="fedtad", set=settings))
    return method.generator_optimizer.lr, method.distil_optimizer.lr


def test_the_servers_rates_follow_the_clients_and_absolute_ones_are_still_read():
    assert rates() == rates(lr=0.01) == (1e-3, 1e-3)
    assert rates(lr=0.001) == pytest.approx((1e-4, 1e-4))
    assert rates(lr=0.001, distil_ratio=1) == pytest.approx((1e-4, 1e-3))
    assert rates(lr=0.001, distil_lr=1e-3) == pytest.approx((1e-4, 1e-3))  # saved runs have it
    assert rates(optimizer="sgd", lr=0.5) == (1e-3, 1e-3)  # the server still steps with Adam


def test_the_reference_has_dropout_on_the_server_as_the_public_code():
    method = build_method(make_config(method="fedtad", set={"preset": "reference"}))
    assert method.server_dropout
    assert not FedTAD(NET).server_dropout


def test_the_generator_learns_nodes_that_the_teachers_recognise():
    method = FedTAD(NET, pseudo_nodes=30, generator_steps=60, lam_diverg=0, lam_div=0,
                    generator_lr=1e-2)  # fmt: skip
    model = NET.init(make_key(1))
    lesson = Lesson(method, stack([model]), torch.ones(1, CLASSES), personal=False)
    generator = method.generator.init(make_key(9))
    trained, _ = lesson.make_harder(
        generator, method.generator_optimizer.init(generator), model,
        lesson.noise(make_key(4)), make_key(4),
    )  # fmt: skip

    def hits(generator):
        graph = pseudo_graph(lesson, generator)
        return float((NET(model, graph).argmax(1) == lesson.labels).double().mean())

    assert hits(trained) > hits(generator) + 0.3


def test_on_a_personalised_base_every_participants_model_is_corrected():
    base = Ring(NET)
    method = FedTAD(NET, base=base, **SMALL)
    assert (method.scored_as(), FedTAD(NET).scored_as()) == ("personalised", "global")
    plain, corrected = (
        run(m, rounds=1, fraction=0.5, seed=3)
        for m in (FedTAD(NET, base=base, iterations=0), method)
    )
    chosen = corrected.simulation.clients(0).sample(0.5).positions.tolist()
    weights = [result.server.base["models"][0]["weight"] for result in (plain, corrected)]
    for position, (before, after) in enumerate(zip(*weights, strict=True)):
        assert torch.equal(before, after) == (position not in chosen)
    assert torch.equal(corrected.server.base["note"], torch.ones(1))


def test_a_base_that_uploads_no_model_is_refused():
    with pytest.raises(ConfigError, match="Local uploads no model"):
        run(FedTAD(NET, base=Local(NET), **SMALL))


def test_a_base_that_computes_what_it_deploys_is_refused():
    class Doubling(FedAvg):
        def deploy(self, server):
            return type(super().deploy(server))([{k: 2 * v for k, v in p.items()} for p in server])

    with pytest.raises(ConfigError, match="computes the model that it deploys"):
        run(FedTAD(NET, base=Doubling(NET), **SMALL))


def test_fewer_pseudo_nodes_than_classes_are_refused():
    with pytest.raises(ConfigError, match="pseudo_nodes is 2, fewer than the 3 classes"):
        run(FedTAD(NET, pseudo_nodes=2))


@pytest.mark.parametrize("net", NODE_NETS)
def test_every_network_can_be_distilled(net):
    made = NODE_NETS[net](FEATURES, CLASSES)
    server = run(FedTAD(made, **SMALL), rounds=1).server
    assert all(torch.isfinite(leaf).all() for leaf in leaves(server))


def awkward() -> Federation:
    """No edges, a class without training nodes, and a client without training nodes."""
    none = torch.zeros(2, 0).long()
    graphs = []
    for train in ([1, 1, 0, 0], [0, 0, 0, 0]):
        mask = torch.tensor(train)
        y = torch.tensor([0, 1, 0, 2])
        graphs.append(make_graph(torch.eye(4, FEATURES), none, y, train=mask, test=1 - mask))
    return Federation(tuple(graphs), CLASSES)


@pytest.mark.parametrize("reliability", ["topology", "nodes", "equal", "reference"])
@pytest.mark.parametrize("reading", [{}, FedTAD.presets["paper"]])
def test_awkward_federations_stay_finite(reliability, reading):
    method = FedTAD(NET, **{**reading, **SMALL, "reliability": reliability})
    server = run(method, federation=awkward()).server
    assert all(torch.isfinite(leaf).all() for leaf in leaves(server))


def test_reliabilities_of_the_ablations():
    counts = torch.stack(
        [torch.bincount(g.y[g.train > 0], minlength=CLASSES) for g in small_federation().graphs]
    )
    nodes = run(FedTAD(NET, reliability="nodes", **SMALL), rounds=1).server.phi
    assert torch.equal(nodes, counts.double())
    equal = run(FedTAD(NET, reliability="equal", **SMALL), rounds=1).server.phi
    assert torch.equal(equal, torch.ones_like(nodes))


def test_noise_on_the_reliabilities_is_relative_and_keyed():
    def phi(seed, noise):
        method = FedTAD(NET, phi_noise=noise, **SMALL)
        return run(method, rounds=1, seed=seed).server.phi

    clean = phi(0, 0.0)
    ratio = phi(0, 0.1)[clean > 0] / clean[clean > 0] - 1
    assert 0.03 < ratio.std() < 0.3
    assert torch.equal(phi(0, 0.1), phi(0, 0.1))
    assert not torch.equal(phi(0, 0.1), phi(1, 0.1))


def test_reliability_leaves_the_client_once():
    sent = run(FedTAD(NET, **SMALL), rounds=3).ledger.by_step()["assess"]
    assert sent == {"messages": 4, "down": 0, "up": 4 * CLASSES * 8}


def test_dropout_on_the_server_is_an_option():
    quiet, noisy = (run(FedTAD(NET, server_dropout=d, **SMALL)).server for d in (False, True))
    same = [torch.equal(a, b) for a, b in zip(leaves(quiet), leaves(noisy), strict=True)]
    assert not all(same)
