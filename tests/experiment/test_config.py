"""Configuration: every option is saved, printed and read back, and mistakes are refused."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cli.app import main
from atoll.core.errors import AtollError, ConfigError
from atoll.core.task import NODES
from atoll.data.public.registry import task_of_data
from atoll.experiment import run as run_module
from atoll.experiment.build import build_method
from atoll.experiment.config import (
    RunConfig,
    config_text,
    make_config,
    option_words,
    read_config,
    resolve,
    run_command,
)
from atoll.experiment.privacy import PrivacyConfig
from atoll.experiment.protocols import PROTOCOLS
from atoll.nn import GraphGIN, nets_for
from atoll.studies.tune import tuning
from atoll.studies.tune.tuning import TuningRequest, tune_command

NODE_NETS = nets_for(NODES.name)


def refusal(**options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(make_config(**options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


DATA = ("lagoon:nodes=300", "cora", "some/folder", "PROTEINS", "tu:X")


@pytest.mark.parametrize(
    ("protocol", "data"),
    [
        (name, d)
        for name, rules in PROTOCOLS.items()
        for d in DATA
        if task_of_data(d) in rules.tasks
    ],
)
def test_a_resolved_configuration_names_every_choice_and_resolves_to_itself(
    protocol: str, data: str
) -> None:
    config, rules = resolve(make_config(protocol=protocol, data=data))
    for name in ("clients", "partition", "split", "rounds", "epochs", "evaluate"):
        assert getattr(config, name) is not None
    assert rules is PROTOCOLS[protocol]
    assert resolve(config)[0] == config
    assert make_config(**tomllib.loads(config_text(config))) == config


def test_the_command_line_wins_over_the_protocol_and_the_protocol_over_the_method() -> None:
    config, _ = resolve(make_config(protocol="fedath", set={"dropout": 0.1}))
    method = build_method(config, 7, 3)
    assert (method.optimizer.lr, method.net.dropout, method.net.hidden) == (1e-3, 0.1, 64)
    config, _ = resolve(make_config(protocol="fedath", epochs=7, set={"lr": 0.5}, rounds=2))
    method = build_method(config, 7, 3)
    assert (method.optimizer.lr, method.epochs, config.rounds) == (0.5, 7, 2)


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)


@given(
    config=st.builds(
        RunConfig,
        method=names,
        data=names,
        clients=st.none() | st.integers(1, 99),
        split=st.none() | names,
        ratios=st.none() | st.just((0.2, 0.3, 0.5)),
        fraction=st.floats(0.01, 1),
        set=st.dictionaries(
            names, st.booleans() | st.integers(-(2**63), 2**63 - 1) | names | st.floats(0, 1e9)
        ),
        compat=st.lists(names, max_size=2).map(tuple),
        own=st.dictionaries(names, names, max_size=2),
    )
)
def test_any_configuration_survives_its_file(config: RunConfig) -> None:
    assert make_config(**tomllib.loads(config_text(config))) == config


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clients": 0}, "clients is 0; give a whole number of at least 1"),
        ({"rounds": -3}, "rounds is -3; give a whole number of at least 1"),
        ({"epochs": 0}, "epochs is 0; give a whole number of at least 1"),
        ({"seeds": 0}, "seeds is 0; give a whole number of at least 1"),
        ({"seeds": 2**31}, "seeds is 2147483648; give a number below 2147483648"),
        ({"seed": -1}, "seed is -1; give a whole number from 0 to 2147483647"),
        ({"seed": 2**31}, f"seed is {2**31}; give a whole number from 0 to 2147483647"),
        ({"fraction": 0.0}, "fraction is 0.0; give a number above 0 and up to 1"),
        ({"fraction": 1.5}, "fraction is 1.5; give a number above 0 and up to 1"),
        ({"fraction": float("nan")}, "fraction is nan; give a number above 0 and up to 1"),
        ({"chunk": -1}, "chunk is -1; give 0 (choose) or a number of clients"),
        ({"rounds": "many"}, "rounds cannot be 'many'; it takes a whole number"),
        ({"rounds": 1.5}, "rounds cannot be 1.5; it takes a whole number"),
        ({"fraction": "half"}, "fraction cannot be 'half'; it takes a number"),
        ({"data": 3}, "data cannot be 3; it takes a text"),
        ({"set": 3}, "set cannot be 3; it takes a table of keys and values"),
        ({"compat": "x"}, "compat cannot be 'x'; it takes a list"),
        ({"round": 3}, "unknown option 'round'; did you mean 'rounds'?"),
        ({"method": "fedporx"}, "unknown method 'fedporx'; did you mean 'fedprox'?"),
        ({"protocol": "strikt"}, "unknown protocol 'strikt'; did you mean 'strict'?"),
        ({"partition": "luvain"}, "unknown partition 'luvain'; did you mean 'louvain'?"),
        ({"split": "stratifed"}, "unknown split 'stratifed'; did you mean 'stratified'?"),
        ({"split": "80/10/10"}, "split cannot be '80/10/10'; give shares as --ratios 0.8/0.1/0.1"),
        ({"split": "stratifed:a=1"}, "unknown split 'stratifed'; did you mean 'stratified'?"),
        ({"evaluate": "globl"}, "unknown value of --evaluate 'globl'; did you mean 'local'?"),
        (
            {"compat": ["dropout"]},
            "unknown compat switch 'dropout'; did you mean 'dropout-at-eval'?",
        ),
        (
            {"allow": ["no-edges"]},
            "unknown value of --allow 'no-edges'; did you mean 'no-edge'?",
        ),
        ({"set": {"net": "gatt"}}, "unknown net 'gatt'; did you mean 'gat'?"),
        ({"set": {"optimizer": "adm"}}, "unknown optimizer 'adm'; did you mean 'adam'?"),
        (
            {"set": {"hiden": 8}},
            "unknown hyper-parameter of fedavg 'hiden'; did you mean 'hidden'?",
        ),
        (
            {"set": {"net.hiden": 8}},
            "unknown hyper-parameter of fedavg 'net.hiden'; did you mean 'hidden'?",
        ),
        ({"set": {"hidden": "wide"}}, "hidden cannot be 'wide'; it takes a whole number"),
        ({"set": {"hidden": "1.5"}}, "hidden cannot be '1.5'; it takes a whole number"),
        ({"set": {"lr": "fast"}}, "lr cannot be 'fast'; it takes a number"),
        (
            {"set": {"weight_by": "size"}},
            "weight_by cannot be 'size'; it takes nodes or train or uniform",
        ),
        ({"set": {"hidden": 0}}, "hidden is 0; give at least 1 (width of the hidden layers)"),
        ({"set": {"dropout": 1}}, "dropout is 1.0; give a number from 0 up to, not including, 1 "
            "(share of a layer's inputs that training drops)"),
        ({"set": {"lr": -1}}, "lr is -1.0; give a learning rate between 0 and a million "
            "(size of a step)"),
        ({"set": {"lr": "nan"}}, "lr is nan; give a learning rate between 0 and a million "
            "(size of a step)"),
        ({"set": {"beta1": 1}}, "beta1 is 1.0; give a number from 0 up to, not including, 1 "
            "(decay of the running mean of the gradient)"),
        (
            {"method": "fedprox", "set": {"mu": "inf"}},
            "mu is inf; give a finite number that is not negative (μ: weight of the pull towards "
            "the received model)",
        ),
        ({"set": {"epochs": 0}}, "epochs is 0; give a whole number of at least 1"),
        ({"set": {"epochs": "1.5"}}, "epochs is 1.5; give a whole number of at least 1"),
        (
            {"set": {"epochs": 2}, "epochs": 3},
            "epochs is 3 by --epochs and 2 by --set; give one of the two",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(options: dict[str, object], sentence: str) -> None:
    assert refusal(**options) == sentence


def test_sets_of_graphs_have_defaults_of_their_own() -> None:
    config, _ = resolve(make_config(method="fedavg", data="molecules", protocol="gcfl"))
    assert (config.batch_size, config.set) == (128, {"lr": 1e-3, "weight_by": "train"})
    method = build_method(config, 5, 3, "graph")
    assert isinstance(method.net, GraphGIN)
    assert method.weight_by == "train"
    # Local has no weights: the protocol's word on them is not for it.
    assert resolve(make_config(method="local", data="NCI1", protocol="gcfl"))[0].set == {"lr": 1e-3}
    # Nor have other methods GCFL's thresholds, which depend on the data; NCI1 has thirty clients.
    nci1, _ = resolve(make_config(method="gcfl", data="NCI1:features=degree", protocol="gcfl"))
    assert (nci1.clients, nci1.set["eps1"], nci1.set["eps2"]) == (30, 0.04, 0.08)
    wished, _ = resolve(
        make_config(method="gcfl", data="NCI1", protocol="gcfl", clients=3, set={"eps1": 1})
    )
    assert (wished.clients, wished.set["eps1"], wished.set["eps2"]) == (3, 1, 0.08)
    strict, _ = resolve(make_config(data="tu:Mutagenicity:features=degree", batch_size=0))
    assert (strict.partition, strict.batch_size) == ("gcfl-oneds", 0)
    assert resolve(make_config(data="cora"))[0].batch_size is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"method": "fedath", "data": "NCI1"}, "fedath classifies nodes, but 'NCI1' has graphs to "
         "classify; methods for that: local, fedavg, fedprox, "),
        ({"data": "NCI1", "set": {"net": "gcn"}}, "net=gcn does not classify graphs, as 'NCI1' "
         "needs; use --set net=gin-graph"),
        ({"set": {"net": "gin-graph"}}, "net=gin-graph does not classify nodes, as 'lagoon' needs; "
         "use --set net=gcn or sage or gat or gin or sgc or mlp or residual or duo or gamlp or "
         "chebnet or disengcn"),
        ({"data": "NCI1", "protocol": "fedtad"}, "protocol 'fedtad' is for one graph, but 'NCI1' "
         "is a set of graphs; use --protocol strict or gcfl"),
        ({"task": "graph"}, "task is graph, but 'lagoon' has nodes to classify; remove --task"),
        ({"task": "node", "data": "NCI1"}, "task is node, but 'NCI1' has graphs to classify"),
        ({"task": "edge"}, "unknown task 'edge'"),
        ({"batch_size": 5}, "batch_size is for sets of graphs, but 'lagoon' is one graph; remove "
         "it"),
        ({"batch_size": -1, "data": "NCI1"}, "batch_size is -1; give 0 (all at once) or a number "
         "of graphs"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_task_is_refused(options: dict, problem: str) -> None:
    assert refusal(**options).startswith(problem)


def test_epochs_by_set_is_the_same_as_by_option() -> None:
    by_option, _ = resolve(make_config(epochs=5))
    by_set, _ = resolve(make_config(set={"epochs": "5"}))
    assert by_option == by_set
    assert build_method(by_set, 5, 3).epochs == 5


def test_the_column_of_the_owner_is_no_feature_of_own_data() -> None:
    assert resolve(make_config(data="a/b", partition="column:bank"))[0].own == {"owner": "bank"}
    # These are found without being named; a folder per client has no such column at all.
    assert resolve(make_config(data="a/b", partition="column:client"))[0].own == {}
    assert resolve(make_config(data="ogbn-arxiv", partition="column:year"))[0].own == {}
    assert resolve(make_config(data="lagoon", partition="column:owner"))[0].own == {}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_files_give_what_they_say(tmp_path: Path) -> None:
    text = 'method = "fedprox"\nrounds = 3\ncompat = ["dropout-at-eval"]\n[set]\nmu = 0.5\n'
    raw = read_config(write(tmp_path / "c.toml", text))
    assert make_config(**raw) == make_config(
        method="fedprox", rounds=3, compat=["dropout-at-eval"], set={"mu": 0.5}
    )


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("roundz = 3", ("unknown key in", "c.toml 'roundz'", "did you mean 'rounds'?")),
        ("rounds = 'x'", ("c.toml", "rounds cannot be 'x'; it takes a whole number")),
        ("rounds = 0", ("c.toml", "rounds is 0; give a whole number of at least 1")),
        ("rounds = \n", ("c.toml is not valid TOML", "line 1", "correct it")),
        (b"\xff\xfe", ("c.toml cannot be read",)),
        ("[set]\nlr = [1]", ("c.toml", "set cannot be")),
    ],
)
def test_broken_files_are_one_sentence(
    tmp_path: Path, content: str | bytes, parts: tuple[str, ...]
) -> None:
    with pytest.raises(AtollError) as caught:
        read_config(write(tmp_path / "c.toml", content))
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absent_files_and_folders_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"configuration file .*none.toml does not exist"):
        read_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot be read: .*directory"):
        read_config(tmp_path)


def test_configurations_are_frozen() -> None:
    with pytest.raises(AttributeError):
        make_config().rounds = 3  # type: ignore[misc]
    assert msgspec.structs.replace(make_config(), rounds=3).rounds == 3


@pytest.mark.parametrize(
    ("partition", "clients", "expected"),
    [
        (None, 10, ("metis", "global:draw=1")),
        ("metis", 7, ("metis", "global")),
        ("metis-overlap", 10, ("metis-overlap", "global:draw=0")),
        ("metis-overlap", 30, ("metis-overlap:after=10", "global:draw=1")),
        ("metis-overlap", 50, ("metis-overlap:after=10/30", "global:draw=2")),
        ("metis-overlap:per_community=2", 50, ("metis-overlap:per_community=2", "global:draw=2")),
        ("louvain", 10, ("louvain", "global")),
    ],
)
def test_fedpubs_settings_follow_each_other_in_one_stream(partition, clients, expected) -> None:
    given = {"data": "cora", "partition": partition, "clients": clients}
    config, _ = resolve(make_config(protocol="fediih", **given))
    assert (config.partition, config.split) == expected


def test_recipes_are_found_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_config(Path("recipes/gcfl/proteins.toml"))["data"] == "PROTEINS"
    with pytest.raises(ConfigError, match="does not exist"):
        read_config(Path("recipes/gcfl/none.toml"))


WORD = st.text("abcXYZ019 _-.:/'\"$*é", min_size=1).map(str.strip).filter(bool)
NAME = WORD.filter(lambda text: not text.startswith("-"))
SHARE = st.floats(1e-6, 1, allow_nan=False)
PAIRS = st.dictionaries(st.text("abc_.", min_size=1).filter(str.strip), WORD, max_size=3)
COUNT = st.none() | st.integers(1, 10**6)
VALUES = {
    "method": NAME,
    "data": NAME,
    "clients": COUNT,
    "partition": st.none() | NAME,
    "split": st.none() | NAME,
    "ratios": st.none() | st.tuples(SHARE, SHARE, SHARE),
    "protocol": NAME,
    "task": st.none() | NAME,
    "rounds": COUNT,
    "epochs": COUNT,
    "fraction": SHARE,
    "seeds": st.integers(1, 99),
    "seed": st.integers(0, 2**31 - 1),
    "engine": NAME,
    "device": NAME,
    "chunk": st.integers(0, 99),
    "set": PAIRS,
    "data_seed": st.none() | st.integers(0, 99),
    "compat": st.lists(NAME, max_size=2).map(tuple),
    "evaluate": st.none() | NAME,
    "metric": st.none() | NAME,
    "positive": st.none() | NAME,
    "threshold": st.none() | NAME,
    "class_weights": st.none() | NAME,
    "loss": st.none() | NAME,
    "allow": st.lists(NAME, max_size=2).map(tuple),
    "batch_size": st.none() | st.integers(0, 99),
    "data_root": st.none() | NAME,
    "schema": st.none() | NAME,
    "own": PAIRS,
    "encoder": st.none() | NAME,
    "dp": st.none()
    | st.builds(
        PrivacyConfig,
        clip=SHARE,
        noise=SHARE,
        delta=st.floats(1e-9, 0.5),
        scores=st.sampled_from(["kept", "told"]),
        randomness=st.sampled_from(["site", "seed"]),
    ),
    "from_run": st.none() | NAME.map(lambda name: str(Path("/runs", name))),
    "held_out_client": st.none() | NAME,
    "objects": st.just(()),
}
CONFIGS = st.builds(RunConfig, **VALUES)


def test_every_field_of_a_configuration_is_tried():
    assert set(VALUES) == set(RunConfig.__struct_fields__)


def caught(module, name, words):
    """The arguments with which a command calls a function."""
    found = []

    def note(*args, **options):
        found.append(args)
        raise KeyboardInterrupt

    with mock.patch.object(module, name, note):
        done = CliRunner().invoke(main, [*words, "--quiet"])
    assert found, done.output
    return found[0]


@given(config=CONFIGS)
@settings(max_examples=80, deadline=None)
def test_a_printed_run_gives_the_same_configuration(config):
    words = shlex.split(run_command(config))
    assert words[:2] == ["atoll", "run"]
    again, *_ = caught(run_module, "RunPlan", words[1:])
    assert again == config


@given(config=CONFIGS, trial_seeds=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_a_printed_tuning_gives_the_same_request(config, trial_seeds, tmp_path_factory):
    config = msgspec.structs.replace(config, seeds=trial_seeds, from_run=None, held_out_client=None)
    budget = {"trials": 3, "seeds": 0, "search": {"lr": "1,2"}}
    asked = TuningRequest(methods=(config.method,), config=config, **budget)
    words = shlex.split(tune_command(asked, tmp_path_factory.getbasetemp()))
    assert words[:2] == ["atoll", "tune"]
    again, _ = caught(tuning, "run_tuning", words[1:])
    assert again == asked


def test_private_runs_and_ratios_are_printed():
    config = make_config(dp="clip=1,noise=1.1", ratios="0.2/0.4/0.4", rounds=7)
    assert run_command(config) == (
        "atoll run fedavg --data lagoon --ratios 0.2/0.4/0.4 --rounds 7 --dp "
        "clip=1.0,noise=1.1,delta=1e-05,scores=kept,randomness=site"
    )


def test_wrong_ratios_get_a_sentence():
    with pytest.raises(ConfigError, match="ratios cannot be 'half'; give three shares"):
        make_config(ratios="half")
    with pytest.raises(ConfigError, match="ratios"):
        make_config(ratios="0.5/0.5")


def test_words_of_options():
    assert option_words({"both": True, "metric": None, "quiet": False, "data_root": "a b"}) == [
        "--both",
        "--data-root",
        "a b",
    ]
