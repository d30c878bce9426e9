"""GCFL's Tables 1 and 2 from sets of graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.analyses.graph_sets import (
    STEPS,
    distances,
    embedding,
    enough_walks,
    gcfl_table,
    plain_graphs,
    printed_rows,
    properties,
)
from atoll.core.errors import ConfigError, DataError
from atoll.data.measure.heterogeneity import PlainGraph
from atoll.data.measure.structure import walk_patterns
from atoll.data.public.registry import load_dataset
from tests.data.public.layouts import write_raw

STAR = PlainGraph(5, np.array([[0, 0, 0, 0], [1, 2, 3, 4]]), np.eye(5), np.zeros(5))
TRIANGLE = PlainGraph(3, np.array([[0, 0, 1], [1, 2, 2]]), np.eye(3), np.zeros(3))


def test_properties_of_stars() -> None:
    found = properties([STAR, STAR, TRIANGLE])
    # A star: degrees 4, 1, 1, 1, 1 have kurtosis 3.25, its mean path is 1.6; a triangle's is 0.
    np.testing.assert_allclose(found.real, [2 * 3.25 / 3, (2 * 1.6 + 1) / 3, 1.0, 1 / 3])
    assert ((found.p >= 0) & (found.p <= 1)).all()
    same = properties([TRIANGLE, TRIANGLE])  # density 1: the random graphs are triangles, too
    np.testing.assert_array_equal(same.real, same.random)
    np.testing.assert_array_equal(same.p, 1.0)


def test_embeddings_join_walks_of_three_to_seven_steps() -> None:
    rng = np.random.default_rng(0)
    found = embedding(STAR, rng, 100)
    assert found.shape == (sum(len(walk_patterns(n)) for n in STEPS),) == (1152,)
    assert found.sum() == pytest.approx(1.0)
    assert [enough_walks(n) for n in STEPS] == [1615, 3001, 8130, 29063, 122500]
    # Few walks differ by chance, even of one and the same graph.
    few, many = (
        distances(*(np.stack([embedding(STAR, rng, n) for _ in range(4)]),) * 2, same=True).mean()
        for n in (20, 5000)
    )
    assert many < few / 3


def test_distances_of_pairs() -> None:
    rows = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    inside = distances(rows, rows, same=True)
    assert inside.size == 3
    assert inside[0] == pytest.approx(np.sqrt(np.log(2)))
    assert distances(rows, rows[:2], same=False).size == 6
    assert distances(rows, np.full((1, 2), np.nan), same=False).size == 0


def test_graphs_of_a_set(tmp_path: Path) -> None:
    write_raw("ENZYMES", tmp_path)
    source = load_dataset("enzymes", tmp_path)
    every = plain_graphs(source)
    assert len(every) == source.num_graphs
    assert {(graph.nodes, graph.pairs.shape[1]) for graph in every} == {(9, 10)}
    assert len(plain_graphs(source, 5)) == 5


def test_both_tables_beside_their_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.analyses.graph_sets.enough_walks", lambda steps: 300)
    for name in ("MSRC_21", "COX2", "PTC_MR"):
        write_raw(name, tmp_path)
    first = gcfl_table("1", str(tmp_path))
    rows = {(row[0].plain, row[1].plain): [c.plain for c in row] for row in first.tables[0].rows}
    assert len(rows) == 16
    assert rows["MSRC_21", "largest component"][2:4] == ["1.0", "1.0000"]
    assert rows["ENZYMES", "largest component"][3] == "–"
    second = gcfl_table("2", str(tmp_path))
    cells = [[cell.plain for cell in row] for row in second.tables[0].rows]
    assert cells[4][0] == "COX2 – PTC_MR"
    assert cells[4][2] == "0.3689 ± 0.0540"
    assert cells[4][3] != "–"
    assert cells[0][3] == "–"  # IMDB-BINARY
    assert "ENZYMES is missing; get it with: atoll data fetch ENZYMES" in second.sentences


def test_without_any_set_or_such_a_table(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"are missing: PTC_MR, .*; get them with"):
        gcfl_table("1", str(tmp_path))
    with pytest.raises(ConfigError, match="table of gcfl"):
        gcfl_table("3", str(tmp_path))
    assert len(printed_rows("1")) == 16
    assert len(printed_rows("2")) == 10


@pytest.mark.data
def test_real_columns_of_table_1(real_data) -> None:
    found = properties(plain_graphs(load_dataset("PTC_MR", real_data("PTC_MR"))))
    np.testing.assert_allclose(found.real, [2.1535, 3.36, 1.0, 0.0095], atol=5e-3)
    np.testing.assert_allclose(found.random, [2.4424, 2.42, 0.8268, 0.1201], atol=0.06)
    assert found.p[0] > 0.999
    assert (found.p[1:] < 1e-4).all()
