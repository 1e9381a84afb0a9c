"""How many drafted tokens of each row are worth verifying this round.

A policy reads only what is fixed before the drafted tokens are sampled (hidden states, whole distributions), and the
logits before any history-dependent processor, so that the output distribution stays the target's.
"""

from __future__ import annotations

import torch
from transformers.utils import logging

from ..draft_settings import DraftSettings, ratio_draft_length
from ..modeling_adaflash import AdaFlashDraftModel, AdaFlashDraftOutput

logger = logging.get_logger(__name__)


def confidence_survival(logits: torch.Tensor) -> torch.Tensor:
    """Prefix product of the largest probability of each slot (D-Cut, 2607.14647).

    Args:
        logits: `[rows, slots, vocabulary]` of the drafted slots.

    Returns:
        `[rows, slots]`, falling along the slots.
    """
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).cumsum(-1).exp()


def policy_in_force(settings: DraftSettings, drafter: AdaFlashDraftModel) -> str:
    """The policy that will run; a missing length head is said once, never silently replaced."""
    if settings.length_policy == "ratio" and drafter.ratio_head is None:
        logger.warning_once(
            "length_policy='ratio' needs a drafter with a ratio head, and this one has "
            f"length_heads={drafter.config.length_heads}: drafting fixed blocks."
        )
        return "fixed"
    return settings.length_policy


def plan_lengths(
    policy: str, settings: DraftSettings, output: AdaFlashDraftOutput, logits: torch.Tensor, block_size: int
) -> list[int]:
    """Draft length of each row, before caps.

    Args:
        policy: From [`policy_in_force`].
        settings: Scale and threshold.
        output: What the drafter returned.
        logits: `[rows, slots, vocabulary]`, draft logits of the drafted slots, before any processor.
        block_size: Slots of a block.
    """
    rows, slots = logits.shape[:2]
    if policy == "ratio":
        return ratio_draft_length(output.length_ratio.view(-1), block_size, settings.length_scale).tolist()
    if policy == "confidence":
        return (confidence_survival(logits) >= settings.confidence_threshold).sum(-1).tolist()
    return [slots] * rows
