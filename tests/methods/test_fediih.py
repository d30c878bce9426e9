"""FedIIH against hand-computed numbers, its gradient routing, its presets and its recipes."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import make_graph, with_views
from atoll.core.method import client_step
from atoll.core.random import fold, make_key
from atoll.core.tree import leaves, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import RECIPES, make_config, read_config, resolve
from atoll.methods.fedavg import FedAvg
from atoll.methods.fediih import Download, FedIIH, Update, separate_federation
from atoll.nn import GCN, DisenGCN
from atoll.nn.vgae import gaussian_kl, log_normal, node_normal
from atoll.testing import check_method, double_precision, small_federation

MEAN = [[0.2, -0.1], [0.3, 0.1], [-0.4, 0.5]]
LOG_VARIANCE = [[-0.2, 0.1], [0.0, 0.2], [0.3, -0.5]]
WEIGHTS = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [-1.0, 0.0, 1.0, 2.0]]
BETA = [
    [0.492517, 0.433837, 0.073646],
    [0.422174, 0.479277, 0.098549],
    [0.110342, 0.151732, 0.737926],
]
FILES = sorted((RECIPES / "fediih").glob("*.toml"))
engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True)
def _double():
    with double_precision():
        yield


@dataclass(frozen=True)
class Planted(FedIIH):
    """Clients reply with values from their features: means, log variances, weights."""

    @client_step
    def train(self, graph, received, state, key):
        mean, log_variance, weights = graph.x[0].reshape(3, 4)
        model = {
            "encoder": {"weight": weights.expand(12, 4), "bias": 2 * weights},
            "classifier": {"weight": weights.unsqueeze(-1).expand(4, 3), "bias": weights[:3]},
        }
        return Update(model, mean.reshape(2, 2), log_variance.reshape(2, 2)), state


def planted(second_means):
    """Three clients: the card's Gaussians in factor 1, others in factor 2."""
    rows = [
        torch.tensor([*m, *other, *v, 0.0, 0.0, *w])
        for m, other, v, w in zip(MEAN, second_means, LOG_VARIANCE, WEIGHTS, strict=True)
    ]
    none, y = torch.zeros(2, 0, dtype=torch.long), torch.tensor([0, 1, 2])
    graphs = [make_graph(row.expand(3, 12).clone(), none, y, train=torch.ones(3)) for row in rows]
    return Federation(tuple(graphs), classes=3)


def one_round(method, federation, engine="serial", fraction=1.0):
    simulation = Simulation(federation, method, engine=engine)
    before = method.init(simulation.clients(-1))
    clients = simulation.clients(0).sample(fraction)
    return before, method.round(before, clients), clients


@engines
def test_each_factor_has_its_own_neighbours(engine):
    """Factor 1 has the card's Gaussians. In factor 2 clients A and C are similar, and B is far."""
    method = Planted(DisenGCN(12, 3, hidden=2))
    federation = planted([[0.5, 0.5], [-3.0, 3.0], [0.5, 0.5]])
    _, server, _ = one_round(method, federation, engine)
    ab, ac, bc = 0.987314, 0.809974, 0.841827
    expected = torch.tensor([[1, ab, ac], [ab, 1, bc], [ac, bc, 1]])
    torch.testing.assert_close(server.similarity[0], expected, rtol=0, atol=1e-6)
    beta = torch.softmax(10 * server.similarity, dim=-1)
    torch.testing.assert_close(beta[0], torch.tensor(BETA), rtol=0, atol=1e-6)
    weights = torch.tensor(WEIGHTS)
    second = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    mixed = torch.cat([torch.tensor(BETA) @ weights[:, :2], second @ weights[:, 2:]], dim=1)
    encoder, classifier = server.models["encoder"], server.models["classifier"]
    for found in (encoder["weight"][:, 0], encoder["bias"] / 2, classifier["weight"][:, :, 0]):
        torch.testing.assert_close(found, mixed, rtol=0, atol=2e-5)
    assert torch.allclose(classifier["bias"], weights.mean(0)[:3])


def test_global_factors():
    _, server, _ = one_round(Planted(DisenGCN(12, 3, hidden=2)), planted([[0.5, 0.5]] * 3))
    expected = [0.030769, 0.153846, 1.5 / 3.25, 1.5 / 3.25]
    assert server.alpha.tolist() == pytest.approx(expected, abs=1e-6)


def test_separate_federation():
    other = [[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5]]
    weights = torch.tensor(WEIGHTS)
    models = {
        "encoder": {"weight": weights.unsqueeze(1), "bias": weights},
        "classifier": {"weight": weights.unsqueeze(-1), "bias": torch.tensor([[1.0], [2.0], [6]])},
    }
    mixed = separate_federation(models, torch.tensor([BETA, other]))
    expected = torch.tensor(
        [[2.588056, 3.588056, 3.8, 4.8], [2.720010, 3.720010, 6, 7], [0.131077, 1.131077, 3, 4]]
    )
    found = mixed["encoder"]["weight"][:, 0], mixed["encoder"]["bias"]
    for leaf in (*found, mixed["classifier"]["weight"][..., 0]):
        torch.testing.assert_close(leaf, expected, rtol=0, atol=1e-5)
    assert mixed["classifier"]["bias"].tolist() == [[3.0]] * 3


@pytest.mark.parametrize("options", [{"tau": 0.0}, {"inference": False}])
def test_without_similarity_everybody_gets_the_mean(options):
    method = FedIIH(DisenGCN(11, 3, hidden=4), **options)
    _, server, clients = one_round(method, small_federation())
    for mixed, sent in zip(
        leaves(server.models), leaves(clients.replies["train"].model), strict=True
    ):
        torch.testing.assert_close(mixed, sent.mean(0).expand_as(mixed))


def test_absent_clients_keep_their_model_and_their_similarities():
    method = FedIIH(DisenGCN(11, 3, hidden=4))
    before, server, clients = one_round(method, small_federation(), fraction=0.5)
    present = clients.positions.tolist()
    absent = [i for i in range(4) if i not in present]
    assert len(present) == 2
    for old, new in zip(leaves(before.models), leaves(server.models), strict=True):
        assert torch.equal(old[absent], new[absent])
        assert not torch.equal(old[present], new[present])
    assert server.similarity[:, absent].isnan().all(), "they have not met anybody"
    assert (server.similarity[:, present[0], present[1]] < 1).all()


def prepared(method, size=13):
    return with_views(small_federation((size,)).graphs[0], method.views)


def paper(**options):
    return FedIIH(DisenGCN(11, 3, hidden=4), **{**FedIIH.presets["paper"], **options})


def start(method):
    alpha = torch.linspace(-0.5, 0.5, method.disengcn.width)
    model = method.disengcn.init(make_key(0))
    return {"model": model, "latent": method._latent(Download(model, alpha))}, alpha / 2


def test_cross_entropy_trains_as_in_fedavg():
    """The public code's ELBO trains nothing that is used, so that its steps are FedAvg's."""
    method = FedIIH(DisenGCN(11, 3, hidden=4), epochs=2, **FedIIH.presets["reference"])
    simulation = Simulation(small_federation(), method, engine="serial")
    server = method.init(simulation.clients(-1))
    clients = simulation.clients(0)
    method.round(server, clients)
    plain = FedAvg(method.net, method.optimizer, epochs=2)
    other = Simulation(small_federation(), plain, engine="serial").clients(0)
    plain.round(tree_map(lambda leaf: leaf[0], server.models), other)
    ours, theirs = clients.replies["train"].model, other.replies["train"].model
    for one, same in zip(leaves(ours), leaves(theirs), strict=True):
        assert torch.equal(one, same)


def test_gradients_go_where_they_should():
    method = paper()
    graph, key = prepared(method), make_key(3)
    params, alpha = start(method)

    def gradient(method):
        return torch.func.grad(lambda p: method.whole_loss(alpha, p, graph, key))(params)

    elbo, both = gradient(method), gradient(paper(trains_encoder="both"))
    ce = gradient(paper(trains_encoder="ce"))
    assert not any(leaf.any() for leaf in leaves(ce["latent"]))
    for name in ("weight", "bias"):
        # The classifier only knows the cross entropy, the encoder the one, the other, or the sum.
        assert torch.allclose(elbo["model"]["classifier"][name], ce["model"]["classifier"][name])
        assert torch.allclose(both["model"]["classifier"][name], ce["model"]["classifier"][name])
        total = elbo["model"]["encoder"][name] + ce["model"]["encoder"][name]
        assert torch.allclose(both["model"]["encoder"][name], total)
        assert elbo["model"]["encoder"][name].any()
    assert all(leaf.any() for leaf in leaves(elbo["latent"]))


@pytest.mark.parametrize("elbo_sums", ["sum", "mean"])
@pytest.mark.parametrize("prior", ["paper", "code"])
def test_elbo_equals_the_dense_formula(prior, elbo_sums):
    method = paper(prior=prior, elbo_sums=elbo_sums)
    graph, key = prepared(method), make_key(3)
    params, alpha = start(method)
    net, own = method.disengcn, params["latent"]["alpha"]
    h = net.embed(params["model"], graph, key)
    mean, log_variance = method.posterior(params["latent"], h, graph, key)
    noise = node_normal(fold(key, "z"), graph.ids, net.width, torch.float64)
    z = mean + noise * torch.exp(0.5 * log_variance)
    edges = graph.views["neighbours"].to_dense()
    error = functional.binary_cross_entropy_with_logits(z @ z.T, edges)
    gap = gaussian_kl(mean, log_variance, own, math.log(0.25))
    sign = 1 if prior == "code" else -1
    wide = math.log(0.25) if prior == "code" else 0.0
    tie = gaussian_kl(own, torch.full_like(own, math.log(0.25)), alpha, wide)
    if prior == "code":
        assert torch.allclose(tie, 2 * (own - alpha) ** 2)
    rest = tie + sign * log_normal(own)
    if elbo_sums == "sum":
        expected = error + (gap.sum() + rest.sum()) / len(z) ** 2
    else:
        expected = error + sum(
            g.mean() + r.mean() for g, r in zip(gap.chunk(2, dim=1), rest.chunk(2), strict=True)
        )
    found = method.negative_elbo(params["latent"], alpha, h, graph, key)
    assert torch.isclose(found, expected, rtol=0, atol=1e-12)


def test_sampled_pairs_change_little():
    graph, key = prepared(paper(), 40), make_key(3)
    params, alpha = start(paper())
    exact = paper().whole_loss(alpha, params, graph, key)
    some = paper(pairs=8).whole_loss(alpha, params, graph, key)
    assert torch.allclose(some, exact, rtol=0.3)
    assert not torch.equal(some, exact)


@pytest.mark.parametrize(("epochs", "same"), [(1, False), (2, True)])
def test_the_codes_statistics_have_dropout_in_one_epoch_alone(epochs, same):
    reading = FedIIH.presets["reference"]
    _, _, clients = one_round(
        FedIIH(DisenGCN(11, 3, hidden=4), epochs=epochs, **reading), small_federation()
    )
    reply = clients.replies["train"]
    assert reply.mean.shape == (4, 2, 4)
    assert torch.equal(reply.mean, reply.log_variance) == same


def test_separate_heads_start_as_the_shared_one_and_depart():
    method = paper(epochs=3)
    _, _, clients = one_round(method, small_federation())
    reply = clients.replies["train"]
    assert not torch.allclose(reply.mean, reply.log_variance)
    graph, (params, _) = prepared(method), start(method)
    h = method.disengcn.embed(params["model"], graph)
    mean, log_variance = method.posterior(params["latent"], h, graph, None)
    assert torch.equal(mean, log_variance)


def test_a_second_encoder_makes_only_the_variances_and_stays_at_home():
    method = paper(heads="two-encoders", trains_encoder="both")
    graph, (params, alpha) = prepared(method), start(method)
    latent = params["latent"]
    h = method.disengcn.embed(params["model"], graph)
    first = method.posterior(latent, h, graph, None)
    assert torch.equal(*first)  # it starts as a copy of the encoder that the server sent
    moved = {**latent, "encoder": tree_map(lambda leaf: leaf + 0.1, latent["encoder"])}
    mean, log_variance = method.posterior(moved, h, graph, None)
    assert torch.equal(mean, first[0])
    own = method.disengcn.embed(moved, graph)
    assert torch.equal(log_variance, method.disengcn.head(own, graph, None, "log-variance"))
    slope = torch.func.grad(lambda p: method.whole_loss(alpha, p, graph, make_key(3)))(params)
    assert all(leaf.any() for leaf in leaves(slope["latent"]["encoder"]))
    simulation = Simulation(small_federation(), method, engine="wire")
    server = method.round(method.init(simulation.clients(-1)), simulation.clients(0))
    (state, *_) = simulation.engine.export_states()
    assert set(state.latent) == {"alpha", "encoder"}
    assert set(server.models) == {"encoder", "classifier"}


@pytest.mark.parametrize("settings", [{}, {"trains_encoder": "both", "elbo_weight": 0.1}])
def test_without_the_hierarchical_model_only_the_elbo_differs(settings):
    """Table 5, w/o HM: no difference where cross entropy trains everything (the public code)."""
    net = DisenGCN(11, 3, hidden=4)
    pair = [
        one_round(FedIIH(net, hierarchy=hierarchy, **settings), small_federation())[1].models
        for hierarchy in (True, False)
    ]
    same = all(map(torch.equal, leaves(pair[0]), leaves(pair[1])))
    assert same == (not settings)


@pytest.mark.parametrize("factors", [1, 2, 6])
def test_the_width_of_a_factor_is_fixed_and_the_whole_grows(factors):
    """Fig. 4 as in the code: a fixed total is `hidden` divided by the factors."""
    net = DisenGCN(11, 3, hidden=4, factors=factors)
    assert net.init(make_key(0))["encoder"]["weight"].shape == (11, 4 * factors)


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_only_what_is_declared_crosses(preset):
    method = FedIIH(DisenGCN(11, 3, hidden=4), **FedIIH.presets[preset])
    simulation = Simulation(small_federation(), method, engine="wire")
    server = method.init(simulation.clients(-1))
    clients = simulation.clients(0)
    method.round(server, clients)
    reply = clients.replies["train"]
    size = sum(leaf[0].numel() for leaf in leaves(server.models))
    assert sum(leaf[0].numel() for leaf in leaves(reply)) == size + 2 * 8
    (state, *_) = simulation.engine.export_states()
    assert set(state.latent) == ({"alpha", "scale", "shift"} if preset == "paper" else set())


def test_ablations():
    no_hierarchy = paper(hierarchy=False)
    assert set(start(no_hierarchy)[0]["latent"]) == {"scale", "shift"}
    graph, key = prepared(no_hierarchy), make_key(3)
    params, alpha = start(no_hierarchy)
    h = no_hierarchy.disengcn.embed(params["model"], graph, key)
    values = [
        no_hierarchy.negative_elbo(params["latent"], a, h, graph, key) for a in (alpha, alpha + 1)
    ]
    assert torch.equal(*values)  # there is no α to be near to
    no_inference = paper(inference=False)
    _, _, clients = one_round(no_inference, small_federation())
    assert clients.replies["train"].mean is None
    one_factor = FedIIH(DisenGCN(11, 3, hidden=4, factors=3), disentangle=False)
    assert (one_factor.disengcn.factors, one_factor.disengcn.width) == (1, 12)
    _, server, _ = one_round(one_factor, small_federation())
    assert server.similarity.shape == (1, 4, 4)


@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("edges", [[], [[0, 1]]])
def test_graphs_with_almost_no_edges(edges, preset):
    method = FedIIH(DisenGCN(4, 2, hidden=3), epochs=2, **FedIIH.presets[preset])
    index = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).T
    graph = make_graph(torch.rand(3, 4), index, torch.tensor([0, 1, 0]), train=torch.ones(3))
    _, server, clients = one_round(method, Federation((graph, graph), 2))
    assert all(torch.isfinite(leaf).all() for leaf in leaves((server, clients.replies["train"])))


def variant(**options):
    def make(net):
        return FedIIH(net, **options)

    make.nets = FedIIH.nets
    return make


@pytest.mark.long
@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_contract_of_the_presets(preset):
    check_method(variant(**FedIIH.presets[preset]), rounds=2)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {**FedIIH.presets["paper"], "pairs": 3, "epochs": 2, "trains_encoder": "both"},
        {**FedIIH.presets["paper"], "heads": "two-encoders"},
        {"inference": False},
        {"trains_encoder": "both", "hierarchy": False, "disentangle": False},
    ],
    ids=["sampled pairs", "two encoders", "no inference", "one factor, no hierarchy"],
)
def test_contract_of_the_variants(options):
    check_method(variant(**options), rounds=2)


def test_another_network_is_refused():
    with pytest.raises(ConfigError, match="net=disengcn"):
        FedIIH(GCN(11, 3))


@pytest.mark.parametrize(
    ("name", "value"),
    [("samples", 0), ("factor_variance", 0.0), ("alpha_variance", -1.0), ("pairs", -1)],
)
def test_impossible_numbers_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        FedIIH(DisenGCN(11, 3), **{name: value})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recipes_can_be_run(path):
    config, rules = resolve(make_config(**read_config(path)))
    method = build_method(config, features=10, classes=5)
    given = read_config(path)["set"]
    assert isinstance(method, FedIIH)
    assert (method.net.hidden, method.net.factors) == (given["hidden"], given["factors"])
    assert method.optimizer.lr == given["lr"]
    assert method.epochs == config.epochs
    assert rules.name == "fediih"
    overlapping = path.stem.endswith("-overlapping")
    assert config.partition == ("metis-overlap" if overlapping else "metis")
    assert config.split == f"global:draw={0 if overlapping else 1}"


def test_every_table_of_the_paper_has_its_recipes():
    assert len(FILES) == 2 * 11
