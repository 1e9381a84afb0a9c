"""Acceptance, the residual, and the counts that come of them."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from adaflash_hf.generation.stats import DraftStats
from adaflash_hf.generation.verification import (
    accept_sampled,
    count_matches,
    residual_distribution,
    verify_greedy,
)


@pytest.mark.parametrize(
    ("target", "drafted", "committed"),
    [
        ([4], [], [4]),
        ([4, 5, 6], [4, 5], [4, 5, 6]),
        ([4, 5, 6], [4, 9], [4, 5]),
        ([4, 5, 6], [9, 5], [4]),
    ],
)
def test_greedy(target, drafted, committed):
    assert verify_greedy(torch.tensor(target), drafted) == committed


@pytest.mark.parametrize(
    ("new", "drafted", "matches"),
    [
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2], 2),
        ([1], [1, 2], 1),
        ([5], [1], 0),
        ([5], [], 0),
        ([1, 9, 3], [1, 2, 3], 1),
    ],
)
def test_matches(new, drafted, matches):
    assert count_matches(new, drafted) == matches


def test_accepting_and_drawing_again_gives_the_targets_distribution():
    target, draft = torch.tensor([0.1, 0.4, 0.0, 0.5]), torch.tensor([0.3, 0.3, 0.3, 0.1])
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    counts, accepted = torch.zeros(4), 0
    for token in torch.multinomial(draft, 4000, replacement=True, generator=generator).tolist():
        if accept_sampled(target, draft, token, generator):
            accepted += 1
        else:
            token = int(torch.multinomial(residual_distribution(target, draft), 1))
        counts[token] += 1
    assert counts[2] == 0
    assert chisquare(counts[[0, 1, 3]].tolist(), (target[[0, 1, 3]] * 4000).tolist()).pvalue > 1e-3
    # The overlap of the two distributions, sum of min(p, q) = 0.5, is what is accepted.
    assert abs(accepted / 4000 - 0.5) < 0.03


def test_certain_cases_of_acceptance():
    sure, never = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    for _ in range(20):
        assert accept_sampled(sure, torch.tensor([0.4, 0.6]), 0)
        assert not accept_sampled(never, torch.tensor([0.4, 0.6]), 0)


def test_the_residual():
    target, draft = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.5, 0.1, 0.4])
    torch.testing.assert_close(residual_distribution(target, draft), torch.tensor([0.0, 1.0, 0.0]))
    assert torch.equal(residual_distribution(target, target), target)


# --- counts ----------------------------------------------------------------------------------------------------------------


def test_counts_of_rounds():
    stats = DraftStats("fixed")
    assert (stats.acceptance_length, stats.mean_draft_length, stats.slot_acceptance) == (0.0, 0.0, [])
    stats.add_round(planned=4, drafted=3, accepted=2, emitted=3)
    stats.add_round(planned=4, drafted=4, accepted=4, emitted=5)
    stats.add_round(planned=1, drafted=0, accepted=0, emitted=1)
    stats.add_round(planned=2, drafted=2, accepted=0, emitted=1)
    assert (stats.rounds, stats.rounds_with_draft, stats.rounds_without_draft) == (4, 3, 1)
    assert (stats.planned, stats.drafted, stats.accepted, stats.emitted) == (11, 9, 6, 10)
    assert stats.acceptance_length == 2.5 and stats.mean_draft_length == 2.25
    assert stats.slot_reached == [3, 2, 2, 1] and stats.slot_accepted == [2, 2, 1, 1]
    assert stats.slot_acceptance == [2 / 3, 1.0, 0.5, 1.0]


def test_an_output_cut_short_says_nothing_about_later_slots():
    stats = DraftStats("fixed")
    stats.add_round(planned=4, drafted=4, accepted=4, emitted=2)  # the second drafted token ended the text
    assert (stats.accepted, stats.emitted) == (2, 2)
    assert stats.slot_reached == [1, 1, 0, 0] and stats.slot_accepted == [1, 1, 0, 0]
