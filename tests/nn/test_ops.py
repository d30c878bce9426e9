"""Sparse operations against dense matrices, with and without `vmap`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vjp, vmap

from atoll.core.graph import Sparse, sparse_matrix
from atoll.core.tree import take
from atoll.engines.stacking import stack_sparse
from atoll.nn import ops
from atoll.nn.ops import (
    at_columns,
    at_rows,
    edge_softmax,
    matmul,
    row_max,
    row_sum,
    row_top,
    with_values,
)

WIDTH = 3


@pytest.fixture(autouse=True, scope="module")
def _float64() -> Iterator[None]:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    """An op, what it should compute, and what the first axis of each argument counts."""

    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    args: tuple[str, ...]
    out: str


def places(m: Sparse) -> tuple[Tensor, Tensor]:
    return m.rows.long(), m.columns.long()


def spread(m: Sparse, values: Tensor) -> Tensor:
    return torch.zeros(m.shape).index_put(places(m), values, accumulate=True)


def plain_softmax(m: Sparse, scores: Tensor) -> Tensor:
    raised = torch.exp(scores) * (m.values != 0).unsqueeze(-1)
    total = torch.zeros(m.shape[0], scores.shape[1]).index_add(0, m.rows, raised)
    return raised / (total + (total == 0))[m.rows.long()]


def plain_max(m: Sparse, entries: Tensor) -> Tensor:
    """The maximum by `amax`, which shares the gradient among equals. Empty rows are zero."""
    real = (m.values != 0).unsqueeze(-1)
    seen = torch.where(real, entries, torch.full_like(entries, -1e30))
    index = m.rows.long().unsqueeze(-1).expand_as(seen)
    start = torch.full((m.shape[0], entries.shape[1]), -1e30)
    highest = start.scatter_reduce(0, index, seen, "amax")
    return torch.where(highest > -1e29, highest, torch.zeros_like(highest))


CASES = {
    "matmul": Case(matmul, lambda m, h: spread(m, m.values) @ h, ("columns",), "rows"),
    "with_values": Case(
        lambda m, v, h: matmul(with_values(m, v[:, 0]), h),
        lambda m, v, h: spread(m, v[:, 0] * (m.values != 0)) @ h,
        ("entries", "columns"),
        "rows",
    ),
    "at_rows": Case(at_rows, lambda m, h: h[m.rows.long()], ("rows",), "entries"),
    "at_columns": Case(at_columns, lambda m, h: h[m.columns.long()], ("columns",), "entries"),
    "row_sum": Case(
        row_sum,
        lambda m, e: torch.zeros(m.shape[0], e.shape[1]).index_add(0, m.rows, e),
        ("entries",),
        "rows",
    ),
    "row_max": Case(row_max, plain_max, ("entries",), "rows"),
    "edge_softmax": Case(edge_softmax, plain_softmax, ("entries",), "entries"),
}
cases = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))


def random_matrix(seed: int, rows: int, columns: int, entries: int, *, square: bool) -> Sparse:
    """Entries anywhere: rows stay empty, places repeat, one value in five is zero."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(entries, generator=g) * (torch.rand(entries, generator=g) > 0.2)
    at = (
        torch.randint(rows, (entries,), generator=g),
        torch.randint(columns, (entries,), generator=g),
    )
    return sparse_matrix(*at, values, (rows, columns), square=square)


def size(m: Sparse, axis: str) -> int:
    return {"rows": m.shape[0], "columns": m.shape[1], "entries": m.values.shape[-1]}[axis]


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments(case: Case, m: Sparse, seed: int) -> list[Tensor]:
    return [noise(seed + i, size(m, axis), WIDTH) for i, axis in enumerate(case.args)]


def scored(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A scalar whose gradient tells every entry of the op's output apart."""
    return lambda weight, m, *args: (op(m, *args) * weight).sum()


def grads(op: Callable[..., Tensor], weight: Tensor, m: Sparse, args: list[Tensor]) -> list[Tensor]:
    wanted = tuple(range(2, 2 + len(args)))
    return list(grad(scored(op), argnums=wanted)(weight, m, *args))


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    for left, right in zip(ours, plain, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


sizes = st.tuples(st.integers(0, 2**20), st.integers(1, 6), st.integers(1, 6), st.integers(0, 14))


@cases
@given(sizes)
@example((0, 3, 2, 0))
@example((1, 1, 1, 9))
@settings(max_examples=15, deadline=None)
def test_value_and_gradient_equal_the_dense_computation(case, shape):
    seed, rows, columns, entries = shape
    m = random_matrix(seed, rows, columns, entries, square=False)
    args = arguments(case, m, seed)
    weight = noise(seed + 9, size(m, case.out), WIDTH)
    assert_same([case.ours(m, *args)], [case.plain(m, *args)])
    assert_same(grads(case.ours, weight, m, args), grads(case.plain, weight, m, args))


def pad(leaf: Tensor, length: int, seed: int) -> Tensor:
    """Lengthen with noise, which no result may depend on."""
    return torch.cat([leaf, noise(seed, length - leaf.shape[0], WIDTH)])


def stacked(
    shapes: list[tuple[int, int, int, int]], *, square: bool
) -> tuple[list[Sparse], Sparse]:
    width = shapes[0][2]
    parts = [
        random_matrix(seed, rows, rows if square else width, entries, square=square)
        for seed, rows, _, entries in shapes
    ]
    return parts, stack_sparse(parts, max(part.shape[0] for part in parts) + 1)


@cases
@given(st.lists(sizes, min_size=1, max_size=4), st.booleans())
@example([(0, 3, 2, 0), (1, 4, 2, 0)], True)
@example([(0, 3, 2, 0), (1, 4, 2, 5)], False)
@settings(max_examples=12, deadline=None)
def test_stacked_matrices_under_vmap_equal_the_loop(case, shapes, square):
    parts, whole = stacked(shapes, square=square)
    one = take(whole, 0)
    args = [arguments(case, part, 7 * k) for k, part in enumerate(parts)]
    weights = [noise(100 + k, size(part, case.out), WIDTH) for k, part in enumerate(parts)]
    many = [
        torch.stack([pad(of[i], size(one, axis), k) for k, of in enumerate(args)])
        for i, axis in enumerate(case.args)
    ]
    real = [torch.cat([w, w.new_zeros(size(one, case.out) - len(w), WIDTH)]) for w in weights]

    out = vmap(case.ours)(whole, *many)
    slopes = vmap(lambda w, m, *a: grads(case.ours, w, m, list(a)))(torch.stack(real), whole, *many)
    for k, part in enumerate(parts):
        assert_same([out[k][: len(weights[k])]], [case.ours(part, *args[k])])
        cut = [slope[k][: len(arg)] for slope, arg in zip(slopes, args[k], strict=True)]
        assert_same(cut, grads(case.ours, weights[k], part, args[k]))
        rest = [slope[k][len(arg) :] for slope, arg in zip(slopes, args[k], strict=True)]
        assert_same(rest, [torch.zeros_like(tail) for tail in rest])


SHAPES = [(1, 5, 4, 9), (2, 2, 4, 3), (3, 4, 4, 0), (4, 5, 4, 12)]


@cases
@pytest.mark.parametrize("square", [True, False])
def test_arguments_that_all_clients_share_under_vmap(case, square):
    _, whole = stacked(SHAPES, square=square)
    ms = [block(whole, k) for k in range(len(SHAPES))]
    args = arguments(case, ms[0], 5)
    weight = noise(6, size(ms[0], case.out), WIDTH)
    over = (0, *[None] * len(args))

    out = vmap(case.ours, in_dims=over)(whole, *args)
    slopes = vmap(lambda m, *a: grads(case.ours, weight, m, list(a)), in_dims=over)(whole, *args)
    total = grad(
        lambda *a: (vmap(case.ours, in_dims=over)(whole, *a) * weight).sum(),
        argnums=tuple(range(len(args))),
    )(*args)
    for k, m in enumerate(ms):
        assert_same([out[k]], [case.plain(m, *args)])
        assert_same([slope[k] for slope in slopes], grads(case.plain, weight, m, args))
    assert_same(list(total), [slope.sum(0) for slope in slopes])


def block(whole: Sparse, k: int) -> Sparse:
    """The k-th matrix of a stack, with its padding, numbered on its own."""
    rows, columns = whole.shape
    one = take(whole, k)
    return sparse_matrix(
        one.rows.long() - k * rows,
        one.columns.long() - k * columns,
        one.values,
        (rows, columns),
        square=whole.square,
    )


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("name", ["matmul", "at_rows", "at_columns", "row_sum", "edge_softmax"])
def test_one_matrix_with_stacked_arguments(name, where):
    case = CASES[name]
    m = random_matrix(1, 5, 4, 9, square=False)
    many = [torch.stack([arguments(case, m, s)[0] for s in (1, 20, 30)], dim=where)]
    weight = noise(6, size(m, case.out), WIDTH)
    over = (None, where)

    out = vmap(case.ours, in_dims=over)(m, *many)
    (slopes,) = vmap(lambda m, *a: grads(case.ours, weight, m, list(a)), in_dims=over)(m, *many)
    for k in range(3):
        args = [arg.select(where, k) for arg in many]
        assert_same([out[k]], [case.plain(m, *args)])
        assert_same([slopes[k]], grads(case.plain, weight, m, args))


def test_a_half_stacked_matrix_is_refused():
    m = random_matrix(1, 5, 4, 9, square=False)
    with pytest.raises(RuntimeError, match="stacked whole"):
        vmap(lambda v, h: matmul(with_values(m, v), h))(noise(1, 2, 9), noise(2, 2, 4, WIDTH))


@cases
def test_a_gradient_that_all_clients_share(case):
    # It comes into the backward pass without a client axis, while the matrix has one.
    _, whole = stacked(SHAPES, square=True)
    ms = [block(whole, k) for k in range(len(SHAPES))]
    args = [arguments(case, m, 3 * k) for k, m in enumerate(ms)]
    many = [torch.stack(of) for of in zip(*args, strict=True)]
    weight = noise(6, size(ms[0], case.out), WIDTH)
    slopes = vmap(lambda m, *a: vjp(lambda *b: case.ours(m, *b), *a)[1](weight))(whole, *many)
    for k, m in enumerate(ms):
        assert_same([slope[k] for slope in slopes], grads(case.plain, weight, m, args[k]))


@pytest.mark.parametrize("name", ["matmul", "at_rows", "at_columns", "row_sum", "edge_softmax"])
def test_second_derivatives_by_dense_arguments(name):
    case, m = CASES[name], random_matrix(2, 4, 3, 7, square=False)
    (arg,) = arguments(case, m, 1)

    def slope_size(op: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda a: grad(lambda b: (op(m, b) ** 3).sum())(a).square().sum()

    assert_same([grad(slope_size(case.ours))(arg)], [grad(slope_size(case.plain))(arg)])


def test_second_derivatives_by_values_raise_instead_of_being_wrong():
    m = random_matrix(2, 4, 3, 7, square=False)
    values, h = noise(1, 7), noise(2, 3, WIDTH)

    def by_dense(v: Tensor) -> Tensor:
        return grad(lambda d: (matmul(with_values(m, v), d) ** 2).sum())(h).sum()

    def by_values(d: Tensor) -> Tensor:
        return grad(lambda v: (matmul(with_values(m, v), d) ** 2).sum())(values).sum()

    for second, at in ((by_dense, values), (by_values, h)):
        with pytest.raises(RuntimeError, match="second derivatives by the values"):
            grad(second)(at)


@given(sizes)
@settings(max_examples=15, deadline=None)
def test_softmax_of_each_row_sums_to_one_where_a_row_has_entries(shape):
    seed, rows, columns, entries = shape
    m = random_matrix(seed, rows, columns, entries, square=False)
    total = row_sum(m, edge_softmax(m, 1e3 * noise(seed, entries, WIDTH)))
    filled = spread(m, (m.values != 0).to(torch.float64)).sum(1, keepdim=True) > 0
    assert_same([total], [filled.expand(-1, WIDTH).to(torch.float64)])


def test_the_top_of_each_row_is_its_maximum():
    matrices = [random_matrix(seed, 7, 5, 11, square=False) for seed in range(3)]
    # Nothing on padding: it counts here, as the least.
    entries = [noise(5, 11, 2).abs() * (m.values != 0).unsqueeze(-1) for m in matrices]
    expected = [row_max(m, e) for m, e in zip(matrices, entries, strict=True)]
    assert_same([row_top(m, e) for m, e in zip(matrices, entries, strict=True)], expected)
    together = vmap(row_top)(stack_sparse(matrices, 8), torch.stack(entries))
    assert_same(list(together[:, :7]), expected)
    assert not together[:, 7].any()  # a row without entries


def test_a_dense_matrix_is_multiplied_as_it_is():
    m = random_matrix(3, 4, 5, 9, square=False)
    h = noise(1, 5, WIDTH)
    assert_same([matmul(m.to_dense(), h)], [matmul(m, h)])


@pytest.mark.parametrize("weighted", [True, False])
def test_compressed_rows_give_the_same_sums(weighted):
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)  # the second bag is empty
    index = torch.tensor([1, 0, 3, 3, 2, 1], dtype=torch.int32)
    weight = torch.tensor([0.5, 0.0, 2.0, -1.0, 1.0, 3.0]) if weighted else None
    dense = torch.arange(12.0).reshape(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ops._csr_bags(dense, index, offsets, weight)
    assert torch.allclose(found, ops.bags(dense, index, offsets, weight))


def _chosen(scores: Tensor, values: Tensor, dense: Tensor) -> Tensor:
    """A product with a matrix that is made on the way: in each row the two largest scores."""
    rows = torch.arange(len(scores)).repeat_interleave(2)
    columns = scores.topk(2, dim=1).indices.sort(1).values.flatten()
    made = sparse_matrix(rows, columns, values, tuple(scores.shape), square=False)
    heard = matmul(made, dense)
    weights = edge_softmax(made, at_columns(made, dense) * at_rows(made, heard))
    return row_sum(made, weights * at_columns(made, dense)) + heard


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("shared", ["nothing", "scores", "values", "dense"])
def test_a_matrix_made_under_vmap_is_the_one_made_in_a_loop(levels: int, shared: str) -> None:
    draw = torch.Generator().manual_seed(levels)
    axes = (2, 3, 2)[:levels]
    shapes = {"scores": (4, 5), "values": (8,), "dense": (5, WIDTH)}
    given = {
        name: torch.randn(*(() if name == shared else axes), *shape, generator=draw)
        for name, shape in shapes.items()
    }
    dims = tuple(None if name == shared else 0 for name in given)
    at_once, slope = _chosen, grad(lambda *args: _chosen(*args).sin().sum(), argnums=(1, 2))
    for _ in axes:
        at_once, slope = vmap(at_once, in_dims=dims), vmap(slope, in_dims=dims)
    found, slopes = at_once(*given.values()), slope(*given.values())
    for place in itertools.product(*map(range, axes)):
        one = [leaf if name == shared else leaf[place] for name, leaf in given.items()]
        torch.testing.assert_close(found[place], _chosen(*one))
        alone = grad(lambda *args: _chosen(*args).sin().sum(), argnums=(1, 2))(*one)
        for ours, expected in zip(slopes, alone, strict=True):
            torch.testing.assert_close(ours[place], expected)


@pytest.mark.parametrize("rows", [7, 12, 13])
def test_a_product_of_many_rows_in_parts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "PART", 3)  # a GPU takes larger parts
    clients, h, weight = 2, torch.randn(2, rows, 4), torch.randn(2, 4, 5)
    by = torch.randn(clients, rows, 5)

    def slopes(product: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        value = lambda h, w, by: (vmap(product)(h, w) * by).sum()  # noqa: E731
        return [*grad(value, argnums=(0, 1))(h, weight, by), vmap(product)(h, weight)]

    ours = slopes(lambda h, w: ops._call(ops._Tall, h, w))
    for found, wanted in zip(ours, slopes(torch.matmul), strict=True):
        torch.testing.assert_close(found, wanted)
    shared = vmap(lambda h: ops._call(ops._Tall, h, weight[0]))(h)
    torch.testing.assert_close(shared, h @ weight[0])
