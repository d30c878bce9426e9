"""A site accepts only messages of the forms that its method has."""

from __future__ import annotations

import pytest
import torch

from atoll.core.batching import batching_of
from atoll.core.errors import WireError
from atoll.core.federation import Federation
from atoll.core.random import make_key
from atoll.core.tree import leaves, tree_map
from atoll.deploy.forms import Form, Forms, played, short
from atoll.deploy.policy import Policy
from atoll.engines.codec import decode
from atoll.engines.fleet import Packet
from atoll.engines.serial import Serial
from atoll.experiment.build import build_method
from atoll.experiment.config import config_text, make_config
from atoll.experiment.metrics import Evaluator
from atoll.experiment.rounds import Experiment
from atoll.methods import METHODS
from atoll.methods.fedgnn import Download, Twins
from atoll.testing import small_federation
from tests.deploy.private_site import ask, make_site

SHORT = {"adafgl": {"federated_rounds": 3}, "fedsage+": {"generator_rounds": 3, "wide": 8}}


def begun(tmp_path, policy=None, **options):
    """A site that began a run without differential privacy, and its method."""
    site = make_site(tmp_path, policy or Policy())
    config = make_config(rounds=4, **options)
    packet = Packet({"do": "begin", "run": "r-0", "config": config_text(config)}, b"")
    assert site.answer(packet).head == {}
    return site, build_method(config, site.own.graph.num_features, site.own.classes)


class Checked(Serial):
    """The serial engine, which checks every message and reply."""

    def __init__(self, graphs, forms):
        super().__init__(graphs)
        self.forms = forms

    def run_one(self, step, position, message, key):
        self.forms.check(step, "message", message)
        reply = super().run_one(step, position, message, key)
        if not isinstance(step.owner, Evaluator):
            self.forms.check(step, "reply", reply)
        return reply


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", METHODS)
def test_no_honest_message_is_refused(name, fraction):
    federation = small_federation()
    config = make_config(method=name, rounds=7, set={"hidden": 4, **SHORT.get(name, {})})
    method = build_method(config, federation.features, federation.classes, "node")
    like = Federation(federation.graphs[:1], federation.classes)
    forms = Forms.of(method, like, 7, fraction, batching_of(0))

    def engine(inputs):
        return Checked(inputs.graphs(), forms)

    Experiment(method, federation, rounds=7, fraction=fraction, engine=engine).run()


def test_rounds_around_a_change_of_stage_are_played():
    method = type("Staged", (), {"stage": lambda self, round: min(round, 20)})()
    assert played(method, 100) == [0, 1, 2, 20, 21]
    assert played(method, 2) == [0, 1]
    method = type("Plain", (), {"stage": lambda self, round: None})()
    assert played(method, 100) == [0, 1]


def test_an_axis_is_free_only_if_it_differed():
    form = Form.of([torch.zeros(3, 4)])
    form.widen(Form.of([torch.zeros(5, 4)]))
    assert form.fits(Form.of([torch.zeros(9, 4)]))
    for other in (torch.zeros(9, 5), torch.zeros(9, 4).double(), torch.zeros(9)):
        assert not form.fits(Form.of([other]))
    assert not form.fits(Form.of((torch.zeros(9, 4),)))


def test_a_row_for_each_node_does_not_leave(tmp_path):
    """A bias with a row for each node came back trained: it told training nodes and labels."""
    site, method = begun(tmp_path, method="fedavg", set={"hidden": 5})
    model, nodes = method.start(make_key(0)), int(site.own.graph.size("nodes"))
    rows = [model[0], {**model[1], "bias": torch.zeros(nodes, site.own.classes)}]
    for step, owner in (("train", "method"), ("score", "evaluator")):
        assert "was refused" in ask(site, rows, step=step, owner=owner).head["reason"]
    assert ask(site, model).head == {}


def test_a_score_has_the_classes_of_the_run(tmp_path):
    """As many classes as nodes told the label and the role of each node."""
    site, method = begun(tmp_path, method="fedavg", set={"hidden": 5})
    model = method.start(make_key(0))
    many = {"weight": torch.zeros(5, 13), "bias": torch.zeros(13)}
    answer = ask(site, [model[0], many], step="score", owner="evaluator")
    assert "was refused" in answer.head["reason"]
    scores = decode(ask(site, model, step="score", owner="evaluator").body)
    assert scores.confusion.shape == (3, site.own.classes, site.own.classes)


def test_a_network_that_stays_at_a_site_does_not_leave(tmp_path):
    site, method = begun(tmp_path, method="fedath", set={"hidden": 5})
    causal = method.start(make_key(0))
    assert ask(site, causal).head == {}
    state = site.job.state.networks
    evil = {**causal, **tree_map(torch.zeros_like, state)}
    answer = ask(site, evil, round=1, state=0, key=5)
    assert "was refused" in answer.head["reason"]
    reply, _ = method.train(site.job.graph, evil, site.job.state, make_key(0))
    assert list(reply.model) == list(causal)  # nor does the method itself send it


def test_personal_layers_do_not_leave(tmp_path):
    settings = {"hidden": 5, "net": "gamlp", "optimizer_state": "reset"}
    site, method = begun(tmp_path, method="fedper", set=settings)
    base = method.start(make_key(0))
    assert ask(site, base).head == {}
    assert "was refused" in ask(site, {"layers": [], **base}, round=1, state=0).head["reason"]


def test_a_message_does_not_widen_the_network(tmp_path):
    policy = Policy(width=8, parameters=200, layers=2)
    site, method = begun(tmp_path, policy, method="fedavg", set={"hidden": 5})
    model = method.start(make_key(0))
    wide = [
        {"weight": torch.zeros(site.own.graph.num_features, 900), "bias": torch.zeros(900)},
        {"weight": torch.zeros(900, site.own.classes), "bias": model[1]["bias"]},
    ]
    deep = [model[0], {"weight": torch.zeros(5, 5), "bias": torch.zeros(5)}, model[1]]
    for message in (wide, deep):
        assert "was refused" in ask(site, message).head["reason"]


def test_no_step_of_fedgnn_runs_without_its_disclosures(tmp_path):
    """With `note` and `train` only, a server got the label and the role of each node."""
    site, method = begun(tmp_path, method="fedgnn", set={"hidden": 5})
    twins = Twins(torch.full((1, 5), 1e6), torch.ones(1))
    model = method.net.init(make_key(0))
    for step, message in (("note", torch.tensor([3])), ("train", Download(model, twins))):
        answer = ask(site, message, step=step)
        assert "does not allow step 'announce' to disclose 'keys'" in answer.head["reason"]
    allowed = Policy(disclose="declared")
    site, _ = begun(tmp_path / "other", allowed, method="fedgnn", set={"hidden": 5})
    assert ask(site, torch.tensor([3]), step="note").head == {}


def test_a_large_blank_is_refused_before_it_costs_memory(tmp_path):
    site, _ = begun(tmp_path, method="fedgnn", set={"hidden": 5})
    answer = ask(site, torch.zeros(100_000_000, 0), step="announce")
    assert "to disclose 'keys'" in answer.head["reason"]


def test_training_that_diverges_on_synthetic_clients_refuses_no_run(tmp_path):
    settings = {"hidden": 5, "net": "gin", "optimizer": "sgd", "lr": 1e5}
    for name in ("fedavg", "scaffold", "moon", "fedproto", "fedtad"):
        begun(tmp_path / name, method=name, set=settings, epochs=5)


def test_rows_of_nodes_may_be_any_number():
    """FedSage+'s `answer` gets a row for each generated slot, whose number depends on the data."""
    federation = small_federation()
    settings = {"hidden": 5, "generator_rounds": 2, "wide": 8}
    config = make_config(method="fedsage+", rounds=4, set=settings)
    method = build_method(config, federation.features, federation.classes, "node")
    forms = Forms.of(method, federation, 4, 1.0, batching_of(0))
    (form,) = forms.known[type(method), "answer", "message"]
    assert all(axes[0] is None for axes, _ in form.tensors)


def test_a_play_repeats_nothing():
    settings = {"iterations": 10_000, "base": "fedprox"}
    config = make_config(method="fedtad", rounds=4, set=settings, epochs=9)
    method = short(build_method(config, 5, 3))
    assert (method.iterations, method.epochs, method.base.epochs) == (1, 1, 1)


def test_a_site_checks_its_reply(tmp_path, monkeypatch):
    site, method = begun(tmp_path, method="fedavg", set={"hidden": 5})
    honest = site.job._run

    def wide(*given):
        reply, state = honest(*given)
        return tree_map(lambda leaf: leaf.unsqueeze(0), reply), state

    monkeypatch.setattr(site.job, "_run", wide)
    answer = ask(site, method.start(make_key(0)))
    assert "a reply of step 'train' was refused" in answer.head["reason"]


def test_a_reply_of_another_form_is_refused(tmp_path):
    site, method = begun(tmp_path, method="fedavg", set={"hidden": 5})
    step, model = method.train, method.start(make_key(0))
    reply, _ = step(site.job.graph, model, None, make_key(0))
    site.job.forms.check(step, "reply", reply)
    with pytest.raises(WireError, match="a reply of step 'train' was refused"):
        site.job.forms.check(step, "reply", tree_map(lambda leaf: leaf.unsqueeze(0), reply))
    assert all(leaf.isfinite().all() for leaf in leaves(reply))


@pytest.mark.parametrize("name", METHODS)
def test_more_repetitions_change_no_form(name):
    """A site plays each method with one repetition (`Method.repeats`)."""
    federation = small_federation()
    options = {"hidden": 4, **SHORT.get(name, {})}
    options |= {field: 3 for field in METHODS[name].repeats if field != "epochs"}
    config = make_config(method=name, rounds=7, epochs=3, set=options)
    method = build_method(config, federation.features, federation.classes, "node")
    like = Federation(federation.graphs[:1], federation.classes)
    brief, long = Forms.of(method, like, 7, 1.0, batching_of(0)), Forms()
    long.play(Experiment(method, federation, 7, engine=long.engine, batching=batching_of(0)))
    for case, forms in long.known.items():
        for form in forms:
            assert any(known.fits(form) for known in brief.known[case]), case


def test_a_field_that_only_looks_like_a_repetition_keeps_its_value(tmp_path):
    site, method = begun(tmp_path, method="fedgta", set={"hidden": 4, "moments_of": "all"})
    assert short(method).steps == method.steps > 1
    answer = ask(site, method.net.init(make_key(0)))
    assert answer.head == {}


def test_the_seeds_of_a_run_are_played_once(tmp_path, monkeypatch):
    site, made = make_site(tmp_path, Policy()), []
    of = Forms.of
    monkeypatch.setattr(Forms, "of", lambda *given: made.append(given) or of(*given))
    for run, options in (("r-0", {}), ("r-1", {}), ("q-0", {"set": {"hidden": 5}})):
        config = config_text(make_config(rounds=2, seeds=2, **options))
        packet = Packet({"do": "begin", "run": run, "config": config}, b"")
        assert site.answer(packet).head == {}
    assert len(made) == 2
