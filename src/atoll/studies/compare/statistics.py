"""Statistical tests of methods on the same seeds and data.

A *block* is one seed on one data set. Every method ran there with the same partition, split and
noise, so we compare methods by the differences inside blocks.

- Wilcoxon: signed ranks of the non-zero differences; p is exact up to `EXACT` pairs, also with ties
- t: mean of the differences over its standard error; assumes normal differences
- Holm: k-th smallest of m p-values times (m - k + 1), never decreasing
- Friedman: mean ranks of all methods over all blocks; Iman and Davenport's F
- Nemenyi: differences of mean ranks against the studentized range, over all pairs of methods

With n pairs, no test of signs and ranks can give a two-sided p below 2^(1-n), which is 0.0625 with
5 pairs. A sign-flip permutation test has the same bound. If Wilcoxon's test cannot reach alpha even
with all differences on one side, the t-test decides, and `PairedTest.by` names it. This choice
depends on alpha and on the numbers of pairs and comparisons, never on the scores.

Demšar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 2006; Holm, Scand. J.
Statist. 1979; Iman and Davenport, Commun. Stat. 1980; Guenther, Am. Stat. 1981 (number of pairs).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from atoll.experiment.metrics import spread

DIGITS = 12  # scores are means of many numbers, so their last bits must not break ties
ALPHA = 0.05
POWER = 0.8
EXACT = 500  # maximum pairs for Wilcoxon's exact distribution; above, a normal approximation
MOST_PAIRS = 1000  # maximum number of reported pairs; above, the report is only "more than"
FLIPPED = 12  # maximum blocks whose sign patterns are all counted; above, 2^12 patterns are drawn
FEWEST_BLOCKS = 10  # with fewer blocks, the approximation of Friedman's distribution is too rough


@dataclass(frozen=True)
class PairedTest:
    """One method against the reference, block by block. P-values are Holm-corrected."""

    name: str
    against: str
    pairs: int
    difference: float  # mean of method minus reference, over the blocks that both have (`pairs`)
    std: float | None  # standard deviation of the differences; None for one pair
    low: float  # lower end of the mean's 95% interval (t), up to `high`; NaN for one pair
    high: float
    wins: int
    losses: int
    wilcoxon: float
    t: float
    by: str  # the deciding test: "wilcoxon", "t", or "nothing" with fewer than two pairs
    sign: int  # what the deciding test finds: 1 if the method is better, -1 if it is worse
    different: bool  # whether the deciding p is below alpha
    needed: int | None  # pairs for a power of 80 %, if at most MOST_PAIRS

    @property
    def p(self) -> float:
        """The deciding p-value, or NaN without a test."""
        return {"wilcoxon": self.wilcoxon, "t": self.t}.get(self.by, math.nan)


def against(
    reference: str, scores: Mapping[str, np.ndarray], alpha: float = ALPHA
) -> list[PairedTest]:
    """Test every other method against the reference, with p-values corrected over all of them.

    `scores` contains one number per block for each method, or NaN if the number is missing.
    """
    gaps = {}
    for name, values in scores.items():
        gap = values - scores[reference]
        if name != reference and not np.isnan(gap).all():
            gaps[name] = np.round(gap[~np.isnan(gap)], DIGITS)
    family = len(gaps)
    fewest = min((gap.size for gap in gaps.values()), default=0)
    by = "wilcoxon" if fewest >= least_pairs(alpha, family) else "t" if fewest > 1 else "nothing"
    ranked = holm([wilcoxon(gap) for gap in gaps.values()])
    normal = holm([paired_t(gap) for gap in gaps.values()])
    tests = []
    for (name, gap), p_ranked, p_normal in zip(gaps.items(), ranked, normal, strict=True):
        decides = {"wilcoxon": p_ranked, "t": p_normal}.get(by, 1.0)
        low, high = interval(gap)
        size = gap.size, float(gap.mean()), spread(gap), low, high
        wins, losses = int((gap > 0).sum()), int((gap < 0).sum())
        sign = int(np.sign(rank_sum(gap) if by == "wilcoxon" else gap.mean()))
        needed = pairs_needed(gap, alpha, family)
        found = PairedTest(
            *(name, reference, *size, wins, losses, p_ranked, p_normal, by),
            sign=sign,
            different=decides < alpha,
            needed=needed,
        )
        tests.append(found)
    return tests


def wilcoxon(differences: np.ndarray) -> float:
    """Return the two-sided p of Wilcoxon's signed-rank test, or 1 if all differences are zero.

    The test drops differences of zero. For at most `EXACT` others, p is exact: it counts all
    combinations of their signs. For more it uses a normal approximation.
    """
    gaps = np.round(differences, DIGITS)
    gaps = gaps[gaps != 0]
    if not gaps.size:
        return 1.0
    # Twice the rank, because ties share their mean rank, which may be a half.
    twice = np.rint(2 * stats.rankdata(np.abs(gaps))).astype(int)
    total, positive = int(twice.sum()), int(twice[gaps > 0].sum())
    least = min(positive, total - positive)
    if gaps.size > EXACT:
        deviation = math.sqrt(float((twice.astype(float) ** 2).sum()) / 4)
        return float(min(1.0, 2 * stats.norm.sf((total / 2 - least) / deviation)))
    chance = np.zeros(total + 1)
    chance[0] = 1.0
    for rank in twice:
        shifted = np.zeros_like(chance)
        shifted[rank:] = chance[:-rank]
        chance = (chance + shifted) / 2
    return float(min(1.0, 2 * chance[: least + 1].sum()))


def signed_ranks(differences: np.ndarray) -> np.ndarray:
    """Rank the absolute differences along the first axis, with their signs. Zeros stay zero."""
    gaps = np.round(differences, DIGITS)
    return np.asarray(np.sign(gaps) * stats.rankdata(np.abs(gaps), axis=0))


def rank_sum(differences: np.ndarray) -> float:
    """Return the sum of the signed ranks of non-zero differences, as in Wilcoxon's test."""
    gaps = np.round(differences, DIGITS)
    return float(signed_ranks(gaps[gaps != 0]).sum())


def joint_flips(differences: np.ndarray) -> np.ndarray:
    """Return the corrected p, (m,), of m comparisons with `differences` on n blocks, (n, m).

    The statistic is the sum of signed ranks. Under the null hypothesis all differences of a block
    may change their signs together, so the largest statistic of the m comparisons gives the null
    distribution (Westfall and Young, 1993). It is exact up to `FLIPPED` blocks. Unlike Holm's
    correction, it can give p = 2^(1-n) for any number of comparisons.
    """
    ranked, blocks = signed_ranks(differences), len(differences)
    if blocks <= FLIPPED:
        signs = np.array([*itertools.product((1, -1), repeat=blocks)])
    else:
        drawn = np.random.default_rng(0).integers(2, size=(2**FLIPPED, blocks))
        signs = np.concatenate([np.ones((1, blocks)), 2 * drawn - 1])
    largest = np.abs(signs @ ranked).max(1)
    reached = largest[:, None] >= np.abs(ranked.sum(0)) - 1e-9
    return np.asarray(reached.mean(0))


def smallest_wilcoxon(pairs: int) -> float:
    """Return the smallest p of Wilcoxon's or a sign-flip test: all differences have one sign."""
    return min(1.0, 2.0 ** (1 - pairs))


def least_pairs(alpha: float = ALPHA, comparisons: int = 1) -> int:
    """Return the fewest pairs for which Wilcoxon's p can be below alpha after Holm's correction."""
    pairs = 1
    while smallest_wilcoxon(pairs) * max(1, comparisons) >= alpha:
        pairs += 1
    return pairs


def paired_t(differences: np.ndarray) -> float:
    """Return the two-sided p of the paired t-test, or 1 if undefined (no variance, one pair)."""
    std = spread(differences) or 0.0
    if std <= _rounding(differences):
        return 1.0
    t = abs(differences.mean()) / (std / math.sqrt(differences.size))
    return float(2 * stats.t.sf(t, differences.size - 1))


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95% interval of the mean difference (t-distribution), or NaN for one pair."""
    if differences.size < 2:
        return math.nan, math.nan
    width = stats.t.ppf((1 + 0.95) / 2, differences.size - 1) * (spread(differences) or 0.0)
    mean, half = float(differences.mean()), float(width) / math.sqrt(differences.size)
    return mean - half, mean + half


def holm(p_values: Sequence[float]) -> list[float]:
    """Apply Holm's correction, which bounds the chance of any false positive."""
    order = np.argsort(p_values, kind="stable")
    corrected, floor = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        floor = max(floor, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = floor
    return corrected


def pairs_needed(differences: np.ndarray, alpha: float = ALPHA, comparisons: int = 1) -> int | None:
    """Return the pairs that would detect the mean, or None if it is zero or needs too many pairs.

    The t-test needs Guenther's n = ((z_a + z_b) s / m)^2 + z_a^2 / 2. The differences have mean m
    and standard deviation s. z_a and z_b are the normal quantiles of alpha, divided by the number
    of comparisons, and of `POWER`. Wilcoxon's test needs pi / 3 times as many normal differences.
    """
    mean, std = abs(float(differences.mean())), spread(differences) or 0.0
    if mean <= _rounding(differences):
        return None
    tail = stats.norm.isf(alpha / max(1, comparisons) / 2)
    pairs = ((tail + stats.norm.ppf(POWER)) * std / mean) ** 2 + tail**2 / 2
    needed = max(least_pairs(alpha, comparisons), math.ceil(pairs * math.pi / 3))
    return needed if needed <= MOST_PAIRS else None


def ranks(scores: np.ndarray) -> np.ndarray:
    """Rank the scores, (blocks, methods), in each block. Rank 1 is best, and ties share ranks."""
    return np.asarray(stats.rankdata(-np.round(scores, DIGITS), axis=1))


@dataclass(frozen=True)
class RankTest:
    """A test of all methods at once."""

    blocks: int
    mean_ranks: np.ndarray  # one per method, 1 is best
    p: float  # of the hypothesis of equal ranks (Friedman, with Iman and Davenport's F)
    critical_difference: float  # mean ranks this far apart differ at alpha (Nemenyi)
    pairwise: np.ndarray  # p of each pair of methods, corrected over all pairs


def rank_test(scores: np.ndarray, alpha: float = ALPHA) -> RankTest | None:
    """Run Friedman's and Nemenyi's tests on scores, (blocks, methods).

    Return None with fewer than `FEWEST_BLOCKS` blocks, or fewer than three methods.
    """
    blocks, methods = scores.shape
    if blocks < FEWEST_BLOCKS or methods < 3:
        return None
    mean = ranks(scores).mean(0)
    unit = math.sqrt(methods * (methods + 1) / (6 * blocks))
    apart = np.abs(mean[:, None] - mean[None, :]) / unit
    pairwise = stats.studentized_range.sf(apart * math.sqrt(2), methods, np.inf)
    np.fill_diagonal(pairwise, 1.0)
    critical = stats.studentized_range.isf(alpha, methods, np.inf) / math.sqrt(2) * unit
    return RankTest(blocks, mean, friedman(scores), float(critical), np.asarray(pairwise))


def friedman(scores: np.ndarray) -> float:
    """Return Friedman's p of the hypothesis of equal ranks, from scores (blocks, methods)."""
    blocks, methods = scores.shape
    placed = ranks(scores)
    between = blocks * float(((placed.mean(0) - (methods + 1) / 2) ** 2).sum())
    within = float(((placed - placed.mean(0)) ** 2).sum())  # smaller with ties, as it should be
    if between == 0:
        return 1.0
    if within == 0:
        return 0.0
    # Iman and Davenport's F is the analysis of variance of the ranks, with equal block means.
    ratio = (blocks - 1) * between / within
    return float(stats.f.sf(ratio, methods - 1, (methods - 1) * (blocks - 1)))


def _rounding(values: np.ndarray) -> float:
    """Return the rounding error of differences of scores, which are means of many numbers."""
    return float(1e-12 * max(1.0, np.abs(values).max(initial=0.0)))
