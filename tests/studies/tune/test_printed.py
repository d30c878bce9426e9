"""The printed tables of a tuning."""

from __future__ import annotations

import io
import re

from rich.console import Console

from atoll.present.tables import rich_table
from atoll.studies.tune.printed import final_table, trials_table
from atoll.studies.tune.result import TuningResult
from tests.studies.tune.conftest import tune


def test_the_first_trial_is_called_the_defaults_only_where_it_is(whole: TuningResult) -> None:
    assert whole.methods["fedavg"].defaults
    console = Console(width=80, record=True, file=io.StringIO())
    elsewhere = {"rounds": 1, "set": {"hidden": 8}, "search": {"lr": "0.1..0.3"}}
    found = tune(clients=2, trials=2, **elsewhere)
    assert not found.methods["fedavg"].defaults
    console.print(rich_table(trials_table(found.methods["fedavg"])))
    console.print(rich_table(final_table(found)))
    assert "(its own defaults)" not in console.export_text(clear=False)
    assert re.search(r"^fedavg +2 +– ", console.export_text(), re.MULTILINE)
