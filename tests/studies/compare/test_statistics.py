"""Tests and corrections against scipy, published tables and their own definitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from atoll.studies.compare import statistics as s

RNG = np.random.default_rng(7)
scores = st.floats(0, 1, allow_nan=False).map(lambda value: round(value, 3))
gaps = hnp.arrays(float, st.integers(1, 9), elements=scores.map(lambda value: value - 0.5))
p_values = st.lists(st.floats(0, 1), min_size=1, max_size=8)
tables = hnp.arrays(float, st.tuples(st.integers(10, 14), st.integers(3, 5)), elements=scores)


@pytest.mark.parametrize("size", [3, 5, 10, 25, 50])
def test_wilcoxon_and_t_are_scipys(size: int) -> None:
    differences = RNG.normal(0.2, 1, size)
    expected = stats.wilcoxon(differences, method="exact").pvalue
    assert s.wilcoxon(differences) == pytest.approx(expected, rel=1e-9)
    assert s.paired_t(differences) == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert s.interval(differences) == pytest.approx((expected.low, expected.high))


def test_wilcoxon_of_many_pairs_is_normal() -> None:
    differences = RNG.normal(0.02, 1, s.EXACT + 1)
    expected = stats.wilcoxon(differences, correction=False).pvalue
    assert s.wilcoxon(differences) == pytest.approx(expected, rel=1e-6)
    assert s.wilcoxon(differences[:-1]) == pytest.approx(s.wilcoxon(differences), abs=0.01)


@given(gaps)
@settings(max_examples=40, deadline=None)
def test_wilcoxon_counts_every_way_to_sign_the_differences(differences: np.ndarray) -> None:
    kept = differences[differences != 0]
    sizes = stats.rankdata(np.round(np.abs(kept), 12))
    centre = sizes.sum() / 2
    signs = np.array(list(itertools.product((0, 1), repeat=kept.size)))
    extreme = np.abs(signs @ sizes - centre) >= abs(sizes[kept > 0].sum() - centre) - 1e-9
    assert s.wilcoxon(differences) == pytest.approx(extreme.mean())
    assert s.wilcoxon(differences) >= s.smallest_wilcoxon(differences.size) * (1 - 1e-12)
    assert s.wilcoxon(-differences) == s.wilcoxon(differences)
    assert s.wilcoxon(differences[::-1]) == s.wilcoxon(differences)


def test_five_pairs_cannot_reach_five_percent() -> None:
    assert s.wilcoxon(np.arange(1.0, 6.0)) == s.smallest_wilcoxon(5) == 0.0625
    assert [s.least_pairs(0.05, m) for m in (1, 2, 3, 10)] == [6, 7, 7, 9]
    found = s.against("a", {"a": np.zeros(5), "b": np.array([0.1, 0.11, 0.12, 0.1, 0.13])})[0]
    assert (found.by, found.different, found.wilcoxon) == ("t", True, 0.0625)
    found = s.against("a", {"a": np.zeros(6), "b": np.array([0.1, 0.11, 0.12, 0.1, 0.13, 0.2])})[0]
    assert (found.by, found.different, found.wilcoxon) == ("wilcoxon", True, 0.03125)


def test_one_pair_decides_nothing() -> None:
    found = s.against("a", {"a": np.array([0.1]), "b": np.array([0.9])})[0]
    assert (found.by, found.different, found.pairs) == ("nothing", False, 1)
    assert np.isnan([found.p, found.low, found.high]).all()


def test_equal_scores_are_no_difference_and_constant_gaps_no_proof() -> None:
    same = np.array([0.5, 0.6, 0.7])
    found = s.against("a", {"a": same, "b": same, "c": same + 0.1})
    assert [test.different for test in found] == [False, False]
    assert (found[0].difference, found[0].needed, found[0].wins, found[0].losses) == (0, None, 0, 0)
    # Two or three equal gaps of coarse scores have no spread to measure by.
    assert found[1].t == 1.0


def test_blocks_that_a_method_lacks_are_left_out() -> None:
    base = RNG.random(8)
    other = base + RNG.normal(0.1, 0.02, 8)
    other[3] = np.nan
    found = s.against("a", {"a": base, "b": other})[0]
    assert found.pairs == 7
    assert found.difference == pytest.approx(np.nanmean(other - base))


def test_holm_by_hand() -> None:
    assert s.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert s.holm([]) == []


@given(p_values, st.randoms(use_true_random=False))
def test_holm_keeps_the_order_and_never_helps(values: list[float], random: object) -> None:
    corrected = s.holm(values)
    assert all(p <= q <= 1 for p, q in zip(values, corrected, strict=True))
    pairs = sorted(zip(values, corrected, strict=True))
    assert all(low[1] <= high[1] for low, high in itertools.pairwise(pairs))
    order = list(range(len(values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert s.holm([values[i] for i in order]) == pytest.approx([corrected[i] for i in order])
    assert s.holm(values)[int(np.argmin(values))] == min(1, min(values) * len(values))


def test_friedman_is_scipys_chi_square_as_an_f() -> None:
    for table in (RNG.random((12, 4)), np.round(RNG.random((15, 3)), 1)):  # without and with ties
        blocks, methods = table.shape
        chi = stats.friedmanchisquare(*table.T).statistic
        ratio = (blocks - 1) * chi / (blocks * (methods - 1) - chi)
        expected = stats.f.sf(ratio, methods - 1, (methods - 1) * (blocks - 1))
        assert s.friedman(table) == pytest.approx(expected)
    assert s.friedman(np.ones((10, 3))) == 1.0
    assert s.friedman(np.tile([1.0, 2.0, 3.0], (10, 1))) == 0.0


def test_nemenyi_has_the_published_critical_values() -> None:
    published = [2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]  # Demšar, Table 5
    for methods, value in enumerate(published, start=3):
        found = s.rank_test(RNG.random((20, methods)))
        assert found is not None
        unit = np.sqrt(methods * (methods + 1) / (6 * 20))
        assert found.critical_difference / unit == pytest.approx(value, abs=0.0015)
        apart = np.abs(found.mean_ranks[:, None] - found.mean_ranks)
        assert ((apart > found.critical_difference) == (found.pairwise < 0.05)).all()


@given(tables, st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_neither_the_order_of_blocks_nor_of_methods_matters(
    table: np.ndarray, random: object
) -> None:
    columns, rows = list(range(table.shape[1])), list(range(table.shape[0]))
    random.shuffle(columns)  # type: ignore[attr-defined]
    random.shuffle(rows)  # type: ignore[attr-defined]
    whole, other = s.rank_test(table), s.rank_test(table[rows][:, columns])
    assert whole is not None
    assert other is not None
    assert other.p == pytest.approx(whole.p)
    assert other.mean_ranks == pytest.approx(whole.mean_ranks[columns])
    assert other.pairwise == pytest.approx(whole.pairwise[np.ix_(columns, columns)])
    named = {f"m{i}": table[:, i] for i in range(table.shape[1])}
    shuffled = {f"m{i}": table[rows, i] for i in columns}
    found = {test.name: test for test in s.against("m0", named)}
    for test in s.against("m0", shuffled):
        assert test.p == pytest.approx(found[test.name].p)
        assert test.different == found[test.name].different


def test_ranks_share_ties() -> None:
    table = np.array([[0.9, 0.5, 0.9], [0.1, 0.3, 0.2]])
    assert s.ranks(table).tolist() == [[1.5, 3, 1.5], [3, 1, 2]]
    assert s.rank_test(table) is None  # two blocks are too few
    assert s.rank_test(RNG.random((12, 2))) is None  # and so are two methods


@pytest.mark.parametrize(("effect", "published"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_pairs_needed_are_those_of_a_power_analysis(effect: float, published: int) -> None:
    # A paired t-test at 5% with power 0.8 takes so many; Wilcoxon's takes pi / 3 times as many.
    differences = np.array([effect - np.sqrt(0.5), effect + np.sqrt(0.5)])  # standard deviation 1
    found = s.pairs_needed(differences)
    assert found == pytest.approx(published * np.pi / 3, abs=1.1)


def test_so_many_pairs_do_find_it() -> None:
    needed = s.pairs_needed(np.array([0.6 - np.sqrt(0.5), 0.6 + np.sqrt(0.5)]))
    assert needed is not None
    rng = np.random.default_rng(1)
    found = np.mean([s.wilcoxon(rng.normal(0.6, 1, needed)) < 0.05 for _ in range(400)])
    assert 0.75 < found < 0.88


def test_no_difference_takes_more_pairs_than_anybody_has() -> None:
    assert s.pairs_needed(np.array([0.1, -0.1])) is None
    assert s.pairs_needed(np.array([1e-5, -1e-5, 0.1, -0.1])) is None
    assert s.pairs_needed(np.array([0.1, 0.1]), comparisons=3) == s.least_pairs(0.05, 3)


def test_the_last_bits_of_equal_scores_make_no_difference() -> None:
    exact, rounded = np.full(12, 0.3), np.full(12, 0.1 + 0.2)
    assert (exact != rounded).all()
    (test,) = s.against("a", {"a": exact, "b": rounded})
    assert (test.wins, test.losses, test.difference) == (0, 0, 0.0)
    assert s.ranks(np.stack([exact, rounded], axis=1)).tolist() == [[1.5, 1.5]] * 12


def test_joint_flips_count_every_pattern_of_signs() -> None:
    gaps = np.random.default_rng(1).normal(0.4, 1, size=(6, 3))
    ranked = np.stack([np.sign(g) * stats.rankdata(abs(g)) for g in gaps.T], axis=1)
    patterns = np.array(list(itertools.product((-1, 1), repeat=6)))
    largest = [max(abs((signs[:, None] * ranked).sum(0))) for signs in patterns]
    expected = [np.mean(np.array(largest) >= abs(one) - 1e-9) for one in ranked.sum(0)]
    assert s.joint_flips(gaps) == pytest.approx(expected)
    one = s.joint_flips(gaps[:, :1])
    assert one == pytest.approx([s.wilcoxon(gaps[:, 0])])  # nothing to correct for


def test_joint_flips_of_comparisons_that_agree_need_no_more_blocks() -> None:
    gaps = np.arange(1.0, 9.0)[:, None] * np.ones(20)
    assert s.joint_flips(gaps) == pytest.approx([2 / 2**8] * 20)
    assert s.holm([2 / 2**8] * 20)[0] > 0.05
    assert s.joint_flips(np.zeros((4, 2))) == pytest.approx([1, 1])
    many = np.arange(1.0, 31.0)[:, None] * np.ones(2)  # 30 blocks: patterns are drawn
    assert s.joint_flips(many) == pytest.approx([1 / 4097] * 2)


def test_joint_flips_rarely_find_a_difference_where_there_is_none() -> None:
    rng, trials = np.random.default_rng(2), 300
    false = [min(s.joint_flips(rng.normal(size=(8, 5)))) < 0.05 for _ in range(trials)]
    assert np.mean(false) < 0.09


def test_the_sign_of_a_verdict_is_that_of_the_deciding_test() -> None:
    gaps = np.array([*np.linspace(0.01, 0.02, 28), *[-0.8] * 4])
    (found,) = s.against("a", {"a": np.zeros(32), "b": gaps})
    assert (found.by, found.different) == ("wilcoxon", True)
    assert found.difference < 0
    assert found.sign == 1  # 28 wins of 32
    (few,) = s.against("a", {"a": np.zeros(3), "b": np.array([0.1, 0.2, -0.9])})
    assert (few.by, few.sign) == ("t", -1)
