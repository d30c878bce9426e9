"""Bins of scores: every score is in the bin whose edges enclose it, at every counter."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.score_bins import BINS, bin_of, binned, log_odds, lower_edges


@given(st.lists(st.floats(-1e4, 1e4, allow_nan=False), min_size=1, max_size=50))
def test_a_score_lies_between_the_edges_of_its_bin(scores: list[float]) -> None:
    z = torch.tensor(scores, dtype=torch.float64)
    edges, place = lower_edges().numpy(), bin_of(z).numpy()
    chance = z.sigmoid().numpy()
    assert (edges[place] <= chance + 1e-9).all()
    assert (chance <= edges[place + 1] + 1e-9).all()
    assert edges[0] == 0
    assert edges[-1] == 1
    assert (np.diff(edges) >= 0).all()


def test_a_bin_near_one_percent_spans_four_percent_of_the_odds() -> None:
    edges = lower_edges().numpy()
    first = int(np.searchsorted(edges, 0.01)) - 1
    odds = edges[first : first + 2] / (1 - edges[first : first + 2])
    assert odds[1] / odds[0] < 1.04


def test_log_odds_are_of_one_class_against_the_others() -> None:
    logits = torch.randn(20, 4, dtype=torch.float64)
    chance = logits.softmax(-1)[:, 2]
    torch.testing.assert_close(log_odds(logits, 2), (chance / (1 - chance)).log())
    two = torch.randn(20, 2)
    assert torch.equal(log_odds(two, 1), two[:, 1] - two[:, 0])


def test_counts_are_by_mask_truth_and_bin_and_the_same_under_vmap() -> None:
    z, truth = torch.randn(3, 40), torch.randint(0, 2, (3, 40)).float()
    masks = (torch.rand(3, 2, 40) < 0.5).float()
    stacked = torch.func.vmap(binned)(z, truth, masks)
    assert stacked.shape == (3, 2, 2, BINS)
    for client in range(3):
        alone = binned(z[client], truth[client], masks[client])
        assert torch.equal(stacked[client], alone)
        for row, mask in zip(alone, masks[client], strict=True):
            for label in (0, 1):
                chosen = (mask > 0) & (truth[client] == label)
                wanted = np.bincount(bin_of(z[client])[chosen].numpy(), minlength=BINS)
                assert row[label].tolist() == wanted.tolist()
