"""How many drafted tokens each policy wants verified."""

from __future__ import annotations

import pytest
import torch
from helpers import tiny_drafter

from adaflash_hf import AdaFlashDraftOutput, DraftSettings
from adaflash_hf.generation import length_policy
from adaflash_hf.generation.length_policy import confidence_survival, plan_lengths, policy_in_force

# Largest probabilities 0.9, 0.5, 0.8 and 0.2 (of five tokens) in the four slots of a block.
LARGEST = torch.tensor([[0.9, 0.5, 0.8, 0.2], [0.2, 0.9, 0.9, 0.9]])


def logits_with(largest):
    rest = ((1 - largest) / 4)[..., None].expand(*largest.shape, 4)
    return torch.cat([rest[..., :2], largest[..., None], rest[..., 2:]], dim=-1).log()


def test_survival_is_the_prefix_product_of_the_largest_probabilities():
    torch.testing.assert_close(confidence_survival(logits_with(LARGEST)), LARGEST.cumprod(-1))
    shifted = logits_with(LARGEST) + 7.0  # logits, not log-probabilities
    torch.testing.assert_close(confidence_survival(shifted.bfloat16()), LARGEST.cumprod(-1), atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("threshold", "lengths"), [(0.0, [4, 4]), (0.1, [3, 4]), (0.4, [2, 0]), (0.5, [1, 0]), (1.0, [0, 0])]
)
def test_confidence_drafts_while_survival_is_worth_it(threshold, lengths):
    settings = DraftSettings("confidence", confidence_threshold=threshold)
    assert plan_lengths("confidence", settings, AdaFlashDraftOutput(), logits_with(LARGEST), 5) == lengths


def test_ratio_reads_the_length_head_and_fixed_reads_nothing():
    output = AdaFlashDraftOutput(length_ratio=torch.tensor([0.0, 0.5]))
    # round(5 * 0.5 * 1.3) = 3 slots, the anchor among them.
    assert plan_lengths("ratio", DraftSettings("ratio"), output, logits_with(LARGEST), 5) == [0, 2]
    assert plan_lengths("fixed", DraftSettings("fixed"), AdaFlashDraftOutput(), logits_with(LARGEST), 5) == [4, 4]


def test_a_missing_ratio_head_is_said_and_not_passed_over(monkeypatch):
    said = []
    monkeypatch.setattr(length_policy.logger, "warning_once", said.append)
    drafter = tiny_drafter(length_heads=["survival"])
    assert policy_in_force(DraftSettings("ratio"), drafter) == "fixed"
    assert said == [
        "length_policy='ratio' needs a drafter with a ratio head, and this one has length_heads=['survival']: drafting "
        "fixed blocks."
    ]
    assert policy_in_force(DraftSettings("ratio"), tiny_drafter()) == "ratio"
    assert policy_in_force(DraftSettings("confidence"), drafter) == "confidence"
    assert len(said) == 1
