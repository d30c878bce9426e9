"""Keyed noise: it repeats, it follows keys and ids, it looks random, and it never changes."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from atoll.core import random
from atoll.core.random import dropout, fold, make_key, normal, random_bits, uniform

KEY = make_key(7)
IDS = torch.arange(64, dtype=torch.int32)
MANY = 1 << 16


def number(key: Tensor) -> int:
    assert key.dtype == torch.int64
    assert key.shape == ()
    return int(key)


# The same definitions in plain Python numbers, where nothing can overflow silently.


def signed(value: int, bits: int) -> int:
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def plain_mix64(z: int) -> int:
    z %= 1 << 64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return z ^ (z >> 31)


def plain_fold(key: int, *parts: int | str | Tensor) -> int:
    fixed = 0
    for part in parts:
        value = zlib.crc32(part.encode()) + (1 << 33) if isinstance(part, str) else int(part)
        moved = value * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15
        if isinstance(part, Tensor):
            key, fixed = plain_mix64((key ^ fixed) * 0x94D049BB133111EB + moved), 0
        else:
            fixed = plain_mix64(fixed * 0x94D049BB133111EB + moved)
    if not (parts and isinstance(parts[-1], Tensor)):
        key = plain_mix64(((key ^ fixed) % (1 << 64)) * 0x94D049BB133111EB)
    return signed(key, 64)


def plain_mix32(z: int) -> int:
    z %= 1 << 32
    z = (z ^ (z >> 16)) * 0x7FEB352D % (1 << 32)
    z = (z ^ (z >> 15)) * 0x846CA68B % (1 << 32)
    return z ^ (z >> 16)


def plain_bits(key: int, row: int, column: int) -> int:
    low, high = key % (1 << 32), (key >> 32) % (1 << 32)
    mixed = plain_mix32(plain_mix32((row % (1 << 32)) ^ low) + plain_mix32(column + high))
    return signed(mixed, 32)


int64 = st.integers(-(2**63), 2**63 - 1)
parts = st.one_of(st.integers(-(2**40), 2**40), st.text(max_size=5), int64.map(torch.tensor))


@given(int64, st.lists(parts, max_size=4))
@example(0, [])
@example(-(2**63), [torch.tensor(2**63 - 1), 2**63, "x"])
@settings(max_examples=50, deadline=None)
def test_fold_wraps_as_64_bit_numbers_do(key, given_parts):
    assert number(fold(torch.tensor(key), *given_parts)) == plain_fold(key, *given_parts)


@given(int64, st.integers(-(2**31), 2**31 - 1), st.integers(1, 3))
@example(2**63 - 1, 2**31 - 1, 2)
@example(-1, -1, 2)
@settings(max_examples=50, deadline=None)
def test_bits_wrap_as_32_bit_numbers_do(key, row, width):
    out = random_bits(torch.tensor(key), torch.tensor([row], dtype=torch.int32), width)
    assert out.dtype == torch.int32
    assert out.tolist() == [[plain_bits(key, row, column) for column in range(width)]]


def test_noise_is_what_it_always_was():
    """If this fails, every published number changes: docs/results must be run again first."""
    keys = [number(make_key(seed)) for seed in (0, 1, -1, 2**31 - 1, 2**63)]
    assert keys == [
        6032000706306467898,
        -1497528238197106799,
        1322407492873980310,
        1918749529891747158,
        6830727353576342185,
    ]
    assert number(KEY) == number(make_key(7))
    assert number(fold(KEY, "dropout", 1)) == 3779190050859210814
    assert number(fold(KEY, torch.tensor(3), "x")) == -7078284659080173397
    batch = fold(KEY, "step", torch.tensor([0, 1]))
    assert batch.tolist() == [3449566375600433819, 6872821348347886505]
    rows = torch.tensor([0, 5, 2**31 - 1], dtype=torch.int32)
    assert random_bits(KEY, rows, 3).tolist() == [
        [-1868854761, 831360588, 1376979308],
        [-1239816938, -1089857630, 1471434691],
        [515624132, 1733374120, -566458896],
    ]
    assert uniform(KEY, (4,)).tolist() == pytest.approx(
        [0.06487336754798889, 0.6935662031173706, 0.8206030130386353, 0.1941259205341339], abs=0
    )
    assert normal(KEY, (3,), torch.float64).tolist() == pytest.approx(
        [0.9049554135644787, 1.5220211175518676, -1.4259709218985241], rel=1e-14
    )
    kept = dropout(torch.ones(3, 8), KEY, torch.arange(3), 0.5)
    assert kept.tolist() == [
        [0, 0, 0, 2, 2, 2, 2, 0],
        [0, 0, 0, 2, 0, 0, 2, 2],
        [0, 0, 0, 2, 0, 2, 0, 2],
    ]


def test_the_same_key_gives_the_same_noise():
    first, second = (fold(make_key(3), "step", "train", 4, torch.tensor(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(uniform(first, (5, 3)), uniform(second, (5, 3)))
    assert torch.equal(normal(first, (5, 3)), normal(second, (5, 3)))
    assert torch.equal(random_bits(first, IDS, 3), random_bits(second, IDS, 3))


def test_every_part_of_a_key_matters():
    keys = [
        fold(make_key(seed), name, round, torch.tensor(client))
        for seed, name, round, client in itertools.product(
            range(3), ["train", "score"], [-1, 0, 1], range(4)
        )
    ]
    assert len({int(key) for key in keys}) == len(keys)
    drawn = torch.stack([uniform(key, (8,)) for key in keys])
    assert len(torch.unique(drawn, dim=0)) == len(keys)


def test_the_order_and_the_kind_of_parts_matter():
    different = [
        fold(KEY),
        fold(KEY, 1),
        fold(KEY, 2),
        fold(KEY, 1, 2),
        fold(KEY, 2, 1),
        fold(KEY, "1", 2),
        fold(KEY, "12"),
        fold(KEY, 12),
        fold(KEY, 0, 1),
        fold(fold(KEY, 1), 2),  # parts in one call are not nested calls
    ]
    assert len({int(key) for key in different}) == len(different)


def test_a_tensor_part_is_another_key_than_the_same_number():
    # Known parts are mixed in Python before the key is touched, so the two never meet.
    assert int(fold(KEY, torch.tensor(2))) != int(fold(KEY, 2))
    # The integer type of a tensor does not matter, and a batch is a loop.
    whole = fold(KEY, "step", torch.arange(4))
    assert torch.equal(whole, fold(KEY, "step", torch.arange(4, dtype=torch.int32)))
    each = [int(fold(KEY, "step", torch.tensor(k))) for k in range(4)]
    assert whole.tolist() == each


def test_parts_after_a_tensor_still_count():
    keys = fold(KEY, torch.arange(3), "epoch", 1), fold(KEY, torch.arange(3), "epoch", 2)
    assert not set(keys[0].tolist()) & set(keys[1].tolist())
    assert len(set(keys[0].tolist())) == 3


def test_a_seed_is_a_64_bit_number():
    assert int(make_key(2**64 + 5)) == int(make_key(5))
    assert int(make_key(-1)) == int(make_key(2**64 - 1))
    assert int(make_key(2**32)) != int(make_key(0))


@given(st.permutations(range(9)), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_rows_follow_their_ids(order, seed):
    key = make_key(seed)
    moved = torch.tensor(order, dtype=torch.int32)
    assert torch.equal(random_bits(key, moved, 4), random_bits(key, IDS[:9], 4)[moved.long()])
    h = torch.ones(9, 4)
    out = dropout(h, key, moved, 0.5)
    assert torch.equal(out, dropout(h, key, IDS[:9], 0.5)[moved.long()])


def test_padded_rows_and_wider_layers_do_not_change_the_noise_of_the_others():
    short = random_bits(KEY, IDS[:5], 3)
    assert torch.equal(random_bits(KEY, IDS, 3)[:5], short)
    assert torch.equal(random_bits(KEY, IDS, 9)[:5, :3], short)
    padded = torch.cat([IDS[:5], torch.zeros(7, dtype=torch.int32)])
    assert torch.equal(random_bits(KEY, padded, 3)[:5], short)


@pytest.mark.parametrize("over", [(0, 0), (0, None), (None, 0), (0, 1)])
def test_a_batch_of_clients_equals_the_loop(over):
    keys = fold(KEY, torch.arange(4))
    rows = torch.stack([IDS[:6] + 10 * k for k in range(4)])
    stored = rows.T.contiguous() if over[1] == 1 else rows
    given_keys = KEY if over[0] is None else keys
    given_rows = IDS[:6] if over[1] is None else stored
    h = torch.ones(6, 3)

    bits = vmap(lambda k, r: random_bits(k, r, 3), in_dims=over)(given_keys, given_rows)
    drops = vmap(lambda k, r: dropout(h, k, r, 0.4), in_dims=over)(given_keys, given_rows)
    for k in range(4):
        key = KEY if over[0] is None else keys[k]
        row = IDS[:6] if over[1] is None else rows[k]
        assert torch.equal(bits[k], random_bits(key, row, 3))
        assert torch.equal(drops[k], dropout(h, key, row, 0.4))


def test_keys_uniforms_and_normals_under_vmap_equal_the_loop():
    keys = fold(KEY, torch.arange(4))
    for draw in (uniform, normal):
        together = vmap(lambda k, draw=draw: draw(fold(k, "x", 2), (3, 2)))(keys)
        for k in range(4):
            assert torch.equal(together[k], draw(fold(keys[k], "x", 2), (3, 2)))


def test_nested_batches_equal_the_loop():
    keys = fold(fold(KEY, torch.arange(2)).unsqueeze(1), torch.arange(3))
    together = vmap(vmap(lambda k: random_bits(k, IDS[:4], 2)))(keys)
    for i, j in itertools.product(range(2), range(3)):
        assert torch.equal(together[i, j], random_bits(keys[i, j], IDS[:4], 2))


def test_uniform_numbers_have_the_asked_shape_and_type_and_stay_inside():
    for shape in [(), (3,), (2, 3), (2, 3, 4), (0,), (0, 3), (3, 0)]:
        for dtype in (torch.float32, torch.float64):
            out = uniform(KEY, shape, dtype)
            assert (out.shape, out.dtype) == (shape, dtype)
    out = uniform(KEY, (MANY,))
    assert 0 < out.min() < 1e-3
    assert 1 - 1e-3 < out.max() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_outermost_bits_give_neither_zero_nor_one(dtype, monkeypatch):
    ends = torch.tensor([[-(2**31), 2**31 - 1]], dtype=torch.int32)
    monkeypatch.setattr(random, "random_bits", lambda *_: ends)
    low, high = uniform(KEY, (2,), dtype).tolist()
    assert 0 < low < high < 1
    assert torch.isfinite(normal(KEY, (2,), dtype)).all()


def test_uniform_numbers_fill_their_bins_evenly():
    counts = torch.histc(uniform(KEY, (MANY,)), bins=64, min=0, max=1)
    expected = MANY / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 63 - 5 * 126**0.5 < chi_square < 63 + 5 * 126**0.5


def test_every_bit_is_set_half_of_the_time():
    bits = random_bits(KEY, torch.arange(1024, dtype=torch.int32), 64).flatten()
    ones = torch.stack([((bits >> place) & 1).sum() for place in range(32)])
    assert (ones - MANY / 2).abs().max() < 5 * (MANY / 4) ** 0.5


def test_normal_numbers_have_the_moments_of_a_normal():
    z = normal(KEY, (MANY,), torch.float64)
    bound = 5 / MANY**0.5
    assert abs(float(z.mean())) < bound
    assert abs(float(z.var()) - 1) < bound * 2**0.5
    assert abs(float((z**3).mean())) < bound * 15**0.5
    assert abs(float((z**4).mean()) - 3) < bound * 96**0.5


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


NEIGHBOURS = {
    "seeds": (make_key(1), make_key(2)),
    "numbers": (fold(KEY, 0), fold(KEY, 1)),
    "clients": tuple(fold(KEY, torch.arange(2))),
    "names": (fold(KEY, "a"), fold(KEY, "b")),
    "order": (fold(KEY, 1, 2), fold(KEY, 2, 1)),
}


@pytest.mark.parametrize("pair", list(NEIGHBOURS.values()), ids=list(NEIGHBOURS))
def test_noise_of_neighbouring_keys_is_uncorrelated(pair):
    one, other = (uniform(key, (256, 256)) for key in pair)
    assert abs(correlation(one, other)) < 5 / MANY**0.5
    same_side = ((one > 0.5) == (other > 0.5)).float().mean()
    assert abs(float(same_side) - 0.5) < 5 * 0.5 / MANY**0.5


@pytest.mark.parametrize("lag", [(1, 0), (0, 1), (1, 1), (2, 0), (16, 0), (0, 16)])
def test_neighbouring_rows_and_columns_are_uncorrelated(lag):
    down, right = lag
    noise = uniform(KEY, (256, 256))
    moved = noise[down:, right:]
    still = noise[: 256 - down, : 256 - right]
    assert abs(correlation(still, moved)) < 5 / MANY**0.5


def test_no_dropout_without_a_key_or_a_rate():
    h = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert dropout(h, None, IDS[:4], 0.5) is h
    assert dropout(h, KEY, IDS[:4], 0.0) is h


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_keeps_the_expectation(rate, dtype):
    out = dropout(torch.full((256, 256), 3.0, dtype=dtype), KEY, torch.arange(256), rate)
    assert out.dtype == dtype
    kept = out != 0
    dropped = round(rate * 2**16) / 2**16  # rates are multiples of 2^-16
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 3 / (1 - dropped)))
    assert abs(float(kept.double().mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / MANY) ** 0.5
    assert abs(float(out.mean()) - 3) < 15 * (rate / (1 - rate) / MANY) ** 0.5


@pytest.mark.parametrize("rate", [0.3, 0.5])
@pytest.mark.parametrize("lag", [(0, 1), (0, 2), (1, 0), (1, 1), (16, 0)])
def test_neighbouring_entries_are_dropped_independently(lag, rate):
    """Entries that share one hash must be independent."""
    down, right = lag
    kept = (dropout(torch.ones(256, 256), KEY, torch.arange(256), rate) != 0).float()
    # Every other column begins a hash: the pair inside of one, and the pair across two.
    for first in (0, 1):
        still = kept[: 256 - down, first : 256 - right : 2]
        moved = kept[down:, first + right :: 2][:, : still.shape[1]]
        assert abs(correlation(still, moved)) < 5 / still.numel() ** 0.5


def test_dropout_drops_the_same_entries_in_every_precision():
    single = dropout(torch.ones(8, 8), KEY, IDS[:8], 0.3)
    double = dropout(torch.ones(8, 8, dtype=torch.float64), KEY, IDS[:8], 0.3)
    assert torch.equal(single != 0, double != 0)


def test_the_gradient_of_dropout_is_its_mask_alone_and_under_vmap():
    keys = fold(KEY, torch.arange(3))
    h = torch.rand(3, 5, 4, generator=torch.Generator().manual_seed(0))
    slope = grad(lambda x, k: dropout(x, k, IDS[:5], 0.5).sum())
    together = vmap(slope)(h, keys)
    for k in range(3):
        mask = dropout(torch.ones(5, 4), keys[k], IDS[:5], 0.5)
        assert torch.equal(slope(h[k], keys[k]), mask)
        assert torch.equal(together[k], mask)


def test_shapes_are_known_without_numbers():
    assert uniform(make_key(0).to("meta"), (3, 4), torch.float32).shape == (3, 4)
