"""A printed command gives the same configuration again, whatever its options are."""

import shlex
from unittest import mock

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cli.app import main
from atoll.core.errors import ConfigError
from atoll.experiment import run as run_module
from atoll.experiment.command import option_words, run_command
from atoll.experiment.config import RunConfig, make_config
from atoll.experiment.privacy import PrivacyConfig
from atoll.studies.tune import tuning
from atoll.studies.tune.tuning import TuningRequest, tune_command

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
    "compat": st.lists(NAME, max_size=2).map(tuple),
    "evaluate": st.none() | NAME,
    "allow": st.lists(NAME, max_size=2).map(tuple),
    "batch_size": st.none() | st.integers(0, 99),
    "data_root": st.none() | NAME,
    "schema": st.none() | NAME,
    "own": PAIRS,
    "dp": st.none()
    | st.builds(
        PrivacyConfig,
        clip=SHARE,
        noise=SHARE,
        delta=st.floats(1e-9, 0.5),
        scores=st.sampled_from(["kept", "told"]),
        randomness=st.sampled_from(["site", "seed"]),
    ),
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
    config = msgspec.structs.replace(config, seeds=trial_seeds)
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
