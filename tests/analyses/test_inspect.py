import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from atoll.analyses.inspect import (
    inspection_files,
    inspection_numbers,
    inspection_tables,
    label_chart,
)
from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph
from atoll.data.divide import federate
from atoll.data.measure.heterogeneity import describe
from atoll.data.public.registry import load_dataset
from atoll.data.source import Source
from atoll.present.chart import MAX_ROWS
from atoll.present.files import write_all
from atoll.present.tables import Table
from atoll.present.terminal import noted_table

PLOTS = ["labels.png", "sizes.png", "divergence.png", "homophily.png"]


def cycle(size: int, shift: int = 0, classes: int = 3) -> Graph:
    at = torch.arange(size)
    edges = torch.stack([at, (at + 1) % size])
    return make_graph(
        torch.eye(12)[(at + shift) % 12],
        torch.cat([edges, edges.flip(0)], dim=1),
        (at + shift) % classes,
        train=torch.ones(size),
        ids=at.to(torch.int32) + 1000 * shift,
    )


def federation(clients: int = 3, classes: int = 3) -> Federation:
    graphs = tuple(cycle(5 + k % 7, k, classes) for k in range(clients))
    total = sum(graph.edges.shape[1] for graph in graphs) + 4
    about = {"partition": "by hand", "edges_total": total}
    return Federation(graphs, classes, name="rings", about=about)


def text_of(tables: list[Table]) -> str:
    console = Console(width=140, file=io.StringIO())
    console.print(*map(noted_table, tables))
    return console.file.getvalue()


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


def test_tables_say_what_was_measured() -> None:
    text = text_of(inspection_tables(describe(federation())))
    for expected in (
        "Clients of rings",
        "2 of 20 edges (10.0%) connect two clients and are lost",
        "Nodes per class",
        "Jensen-Shannon",
        "structure (anonymous walks)",
        "clustering coefficient",
    ):
        assert expected in text


def test_clients_and_classes_have_their_names() -> None:
    names = {"client_names": ["north", "south", "west"], "class_names": ["late", "paid", "lost"]}
    found = describe(replace(federation(), about=names), random_graphs=0)
    text = text_of(inspection_tables(found))
    for expected in ("north", "class late", "class lost", "north and"):
        assert expected in text
    ((chart,),) = label_chart(found, "").rows
    assert [word for _, word in chart.y.ticks] == names["client_names"]
    assert [word for _, word in chart.x.ticks] == names["class_names"]


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = describe(federation())
    inspection_tables(found)
    write_all(tmp_path, inspection_files(found, federation()))
    assert capsys.readouterr() == ("", "")


def test_plots_and_numbers_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder [1]"  # brackets, which rich would read as markup
    write_all(out, inspection_files(describe(federation()), federation()))
    assert sorted(path.name for path in out.iterdir()) == sorted([*PLOTS, "heterogeneity.json"])
    assert all(is_png(out / name) for name in PLOTS)


def test_numbers_are_json_with_null_for_undefined(tmp_path: Path) -> None:
    found = describe(federation(), random_graphs=2)
    about = {"partition": "by hand", "hash": Path("x")}
    (path,) = write_all(tmp_path, {"numbers.json": inspection_numbers(found, about)})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    numbers = json.loads(path.read_text(), parse_constant=refuse)
    assert numbers["nodes"] == [5, 6, 7]
    assert numbers["edges_lost"] == 2
    assert numbers["about"] == {"partition": "by hand", "hash": "x"}
    assert numbers["shape"]["real"][0][0] is None  # a ring has one degree only: no kurtosis
    assert len(numbers["walk_patterns"]) == len(numbers["walks"][0]) == 52
    np.testing.assert_allclose(numbers["label_divergence"], found.label_divergence)


def test_one_client_many_clients_and_many_classes_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for clients, classes in ((1, 2), (MAX_ROWS + 5, 3), (2, 40)):
        divided = federation(clients, classes)
        found = describe(divided, random_graphs=0, walks=10)
        paths = write_all(tmp_path, inspection_files(found, divided))[1:]
        assert [path.name for path in paths] == PLOTS
        assert all(is_png(path) for path in paths)
        text = text_of(inspection_tables(found))
        assert ("first 40 of 45 clients" in text) == (clients > MAX_ROWS)
        assert ("Nodes per class" in text) == (classes <= 12)


def test_unknown_lost_edges_and_clients_without_edges_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lonely = make_graph(torch.zeros(2, 12), torch.zeros(2, 0).long(), torch.tensor([0, 1]))
    odd = Federation((cycle(5), lonely), classes=3)
    found = describe(odd, random_graphs=2)
    assert all(is_png(path) for path in write_all(tmp_path, inspection_files(found, odd))[1:])
    assert "unknown" in text_of(inspection_tables(found)[:1])


def test_drawing_needs_no_screen_and_no_pyplot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code = (
        "import sys, atoll.analyses.inspect as i\n"
        "assert not {'matplotlib', 'rich', 'ot'} & set(sys.modules)\n"
        "import torch; from atoll.core.federation import Federation\n"
        "from atoll.core.graph import make_graph\n"
        "g = make_graph(torch.eye(3), torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 1, 1]))\n"
        "from atoll.data.measure.heterogeneity import describe\n"
        "from atoll.present.files import write_all\n"
        "f = Federation((g, g), 2)\n"
        f"write_all({str(tmp_path)!r}, i.inspection_files(describe(f), f))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "MPLBACKEND": "TkAgg"}
    )


@pytest.mark.data
def test_cora_among_ten_clients_in_time(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source = load_dataset("cora", real_data("cora"))
    assert isinstance(source, Source)
    divided = federate(source, clients=10, partition="louvain")
    start = time.perf_counter()
    found = describe(divided)
    text = text_of(inspection_tables(found))
    write_all(tmp_path, inspection_files(found, divided))
    assert time.perf_counter() - start < 30
    assert "of 5,278 edges" in text
    assert all(is_png(tmp_path / name) for name in PLOTS)
