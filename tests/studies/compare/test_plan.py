"""The request of a comparison: names, settings, grids, and everything that is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import ConfigError
from atoll.studies.compare.plan import make_request, make_runs, parse_arm, split_names
from atoll.studies.study_run import StudyRun


def cells_of(*methods: str, **given: Any) -> list[StudyRun]:
    return make_runs(make_request(methods, **given), {}, {})


def test_a_grid_is_for_the_methods_that_have_it() -> None:
    cells = cells_of("fedavg", "fedprox", grid={"mu": ["0.1", "1"]}, data="lagoon", clients=[2, 3])
    assert [(c.labels["clients"], c.labels["method"], c.labels["point"]) for c in cells[:3]] == [
        (2, "fedavg", {}), (2, "fedprox", {"mu": "0.1"}), (2, "fedprox", {"mu": "1"}),
    ]  # fmt: skip
    assert len({cell.name for cell in cells}) == len(cells) == 6
    both = cells_of("fedavg", "fedprox", grid={"lr": [0.1, 0.01], "fedprox:mu": [1.0, 2.0]})
    assert len(both) == 2 + 4
    assert both[-1].config.set == {"lr": 0.01, "mu": 2.0}
    for key in ("net", "net.hidden", "epochs", "optimizer"):
        assert len(cells_of("fedavg", grid={key: ["1", "2"]})) == 2


@pytest.mark.parametrize(
    ("methods", "given", "sentence"),
    [
        (["fedavg", "fedavg"], {}, "method 'fedavg' is given twice; give each once"),
        ([], {}, "no method is given; give one or several"),
        (["fedavg"], {"data": "lagoon,lagoon"}, "data set 'lagoon' is given twice"),
        (["fedavg"], {"clients": [3, 3]}, "number of clients '3' is given twice"),
        (["fedprox:mu"], {}, "method 'fedprox:mu' cannot be read; settings follow the name as"),
        (["fedprox:mu=1,=2"], {}, "settings follow the name as fedprox:key=value,key=value"),
        (["fedprox:mu=1,mu=2"], {}, "cannot be read"),
        (["mu=1"], {}, "cannot be read"),
        (["fedprox:mu=1"], {"grid": {"mu": [1, 2]}}, "mu of fedprox:mu=1 is set to 1 and has a"),
        (["fedprox"], {"grid": {"mu": [1, 1]}}, "needs values, each once"),
        (["fedprox"], {"grid": {"fedpro:mu": [1]}}, "unknown method of a grid 'fedpro'; did you"),
    ],
)
def test_what_cannot_be_asked_for(methods: list[str], given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        cells_of(*methods, **given)


def test_methods_with_settings_and_files_of_ones_own_are_read() -> None:
    assert parse_arm("x", "fedprox:mu=0.1,lr=1e-2").settings == {"mu": "0.1", "lr": "1e-2"}
    assert parse_arm("x", "my_method.py:Mine").name == "my_method.py:Mine"
    own = parse_arm("x", "dir/my_method.py:Mine:mu=1")
    assert (own.name, own.settings) == ("dir/my_method.py:Mine", {"mu": "1"})


def test_names_with_commas_of_their_own(tmp_path: Path) -> None:
    assert split_names("cora, pubmed") == ["cora", "pubmed"]
    assert split_names("lagoon:nodes=150,homophily=0.3,cora") == [
        "lagoon:nodes=150,homophily=0.3", "cora",
    ]  # fmt: skip
    (tmp_path / "a,b").mkdir()
    assert split_names(str(tmp_path / "a,b")) == [str(tmp_path / "a,b")]


def test_cells_whose_names_look_alike_are_kept_apart() -> None:
    cells = cells_of("fedavg", "fedprox:mu=1", "fedprox:mu=1.0", data="lagoon:nodes=150")
    assert len({cell.name for cell in cells}) == 3
    long = cells_of(*(f"fedprox:mu=0.{'1' * 120}{i}" for i in range(2)))
    assert len({cell.name for cell in long}) == 2
    assert all(len(cell.name) <= 100 and "/" not in cell.name for cell in (*cells, *long))
