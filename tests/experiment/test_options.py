"""The types of the keyword options: a signature names every option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import get_args, get_type_hints

import pytest

import atoll
from atoll.experiment.config import RunConfig
from atoll.studies.advise import advise

WIDER = {"ratios", "set", "compat", "allow", "own", "dp"}  # `make_config` also reads other types


@pytest.mark.parametrize("function", [atoll.run, atoll.compare, atoll.tune, advise])
def test_the_signatures_name_every_option_with_its_type(function: Callable[..., object]) -> None:
    parameters = inspect.signature(inspect.unwrap(function), eval_str=True).parameters
    (options,) = get_args(parameters["options"].annotation)
    known, fields = get_type_hints(options), get_type_hints(RunConfig)
    assert not set(known) & set(parameters)
    assert set(fields) - {"method", "objects", "engine"} <= set(known) | set(parameters)
    assert {k: v for k, v in known.items() if k not in WIDER} == {
        k: v for k, v in fields.items() if k in known and k not in WIDER
    }
