"""Graphs and sparse matrices: defaults, sizes, and the entries of a matrix in every order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.core.errors import ConfigError
from atoll.core.graph import (
    SMALL,
    Graph,
    Sparse,
    cast,
    make_graph,
    moved,
    sparse_matrix,
    with_views,
)
from atoll.core.tree import leaves

entries = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.floats(-9, 9).filter(bool)), max_size=12
)


def matrix(places: list[tuple[int, int, float]], *, square: bool = False) -> Sparse:
    rows, columns, values = zip(*places, strict=True) if places else ([], [], [])
    return sparse_matrix(
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(columns, dtype=torch.int64),
        torch.tensor(values, dtype=torch.float64),
        (4, 5),
        square=square,
    )


@given(entries)
@example([])
@example([(3, 4, 1.0)])
@example([(1, 1, 1.0), (1, 1, 2.0), (0, 0, 3.0)])
@settings(max_examples=50, deadline=None)
def test_a_sparse_matrix_and_its_transpose_hold_every_entry(places):
    m = matrix(places)
    dense = torch.zeros(4, 5, dtype=torch.float64)
    for row, column, value in places:
        dense[row, column] += value
    torch.testing.assert_close(m.to_dense(), dense)
    assert m.shape == (4, 5)
    assert m.values.shape == (len(places),)  # entries at one place stay separate
    # Rows in order, columns in order within a row; offsets say where each row starts.
    keys = (m.rows.long() * 5 + m.columns).tolist()
    assert keys == sorted(keys)
    assert m.offsets.tolist() == [sum(place[0] < row for place in places) for row in range(4)]
    assert m.t_offsets.tolist() == [sum(place[1] < col for place in places) for col in range(5)]
    # The transpose lists the same entries by column.
    order = m.t_order.long()
    assert sorted(order.tolist()) == list(range(len(places)))
    assert torch.equal(m.t_values, m.values[order])
    assert torch.equal(m.t_columns, m.rows[order])
    by_column = m.columns[order].tolist()
    assert by_column == sorted(by_column)


def test_index_tensors_are_32_bit():
    m = matrix([(0, 1, 1.0)])
    for name in ("offsets", "columns", "rows", "t_offsets", "t_columns", "t_order"):
        assert getattr(m, name).dtype == torch.int32, name


def small(**more: Any) -> Graph:
    edges = torch.tensor([[0, 1, 2], [1, 0, 1]])
    return make_graph(torch.ones(3, 2), edges, torch.tensor([1, -1, 0]), **more)


def test_a_graph_has_the_usual_defaults():
    graph = small()
    assert (graph.num_nodes, graph.num_features) == (3, 2)
    assert graph.edge_weight.tolist() == [1, 1, 1]
    assert graph.y.tolist() == [1, 0, 0]  # an unknown label is zero, and no mask selects it
    assert graph.real.tolist() == [1, 1, 1]
    assert graph.ids.tolist() == [0, 1, 2]
    assert graph.ids.dtype == torch.int32
    assert not any(getattr(graph, name).any() for name in ("train", "val", "test"))
    assert graph.views == {}


def test_masks_may_be_boolean_and_become_numbers_of_the_features_type():
    graph = small(train=torch.tensor([True, False, True]), edge_weight=torch.tensor([1, 2, 3]))
    assert graph.train.tolist() == [1.0, 0.0, 1.0]
    assert graph.train.dtype == graph.edge_weight.dtype == torch.float32


def test_given_ids_are_kept():
    ids = torch.tensor([7, 3, 9], dtype=torch.int32)
    assert small(ids=ids).ids.tolist() == [7, 3, 9]


def test_sparse_features_give_the_width_and_the_type():
    x = matrix([(0, 1, 2.0), (2, 4, 1.0)])
    graph = make_graph(x, torch.zeros(2, 0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    assert graph.num_features == 5
    assert graph.real.dtype == torch.float64
    assert graph.edge_weight.shape == (0,)


def test_views_are_evaluated_once_by_name():
    calls = []
    graph = small(views={"twice": lambda g: (calls.append(1), g.x * 2)[1]})
    assert torch.equal(graph.views["twice"], graph.x * 2)
    assert len(calls) == 1
    replaced = with_views(graph, {"sum": lambda g: g.x.sum(1)})
    assert list(replaced.views) == ["sum"]
    assert list(graph.views) == ["twice"]


def test_sizes_for_averages():
    graph = small(train=torch.tensor([True, False, True]))
    assert [float(graph.size(by)) for by in ("nodes", "train", "uniform")] == [3, 2, 1]


def test_padding_does_not_count_in_sizes():
    padded = make_graph(torch.ones(3, 2), torch.zeros(2, 0, dtype=torch.int64), torch.zeros(3))
    padded = cast(padded, dtype=torch.float64, device="cpu")
    padded.real[1:] = 0
    assert float(padded.size("nodes")) == 1
    assert float(padded.size("uniform")) == 1


def test_an_unknown_weight_is_refused_rather_than_taken_for_nodes():
    with pytest.raises(ConfigError, match=r"unknown weight 'trian'; did you mean 'train'\?"):
        small().size("trian")


def test_small_tensors_travel_together_and_arrive_as_they_were():
    graphs = (small(views={"x": lambda g: g.x}), small())
    large = torch.arange(SMALL + 1)
    there, big, none = moved((graphs, large, torch.zeros(0, 3)), "cpu")
    assert big is large  # where it was
    assert none.shape == (0, 3)
    for graph, copy in zip(graphs, there, strict=True):
        assert copy.y.data_ptr() != graph.y.data_ptr()
        for one, other in zip(leaves(graph), leaves(copy), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    assert there[0].y.untyped_storage().data_ptr() == there[1].y.untyped_storage().data_ptr()


def test_cast_changes_floating_point_tensors_alone():
    graph = cast(small(views={"x": lambda g: g.x}), dtype=torch.float64, device="cpu")
    assert graph.x.dtype == graph.train.dtype == graph.views["x"].dtype == torch.float64
    assert (graph.y.dtype, graph.edges.dtype, graph.ids.dtype) == (
        torch.int64,
        torch.int64,
        torch.int32,
    )
