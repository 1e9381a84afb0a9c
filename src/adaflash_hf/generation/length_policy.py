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


def slot_confidence(logits: torch.Tensor) -> torch.Tensor:
    """Logarithm of the largest probability of each slot.

    Args:
        logits: `[rows, slots, vocabulary]` of the drafted slots.

    Returns:
        `[rows, slots]`, at most 0.
    """
    logits = logits.float()
    return logits.amax(-1) - logits.logsumexp(-1)


def confidence_survival(logits: torch.Tensor) -> torch.Tensor:
    """Prefix product of the largest probability of each slot (D-Cut, 2607.14647).

    Args:
        logits: `[rows, slots, vocabulary]` of the drafted slots.

    Returns:
        `[rows, slots]`, falling along the slots.
    """
    return slot_confidence(logits).cumsum(-1).exp()


def head_survival(
    logits: torch.Tensor,
    calibration: dict[str, list[float]] | None = None,
    log_confidence: torch.Tensor | None = None,
) -> torch.Tensor:
    """Prefix product of the survival head's conditional probabilities, calibrated.

    `h_k = sigmoid(scale_k * logit_k + confidence_k * logit(c_k) + bias_k)`, c_k the draft's largest probability at the
    slot, which knows something about the draft that the head's input does not show.

    Args:
        logits: `[rows, slots]`, the head's logits.
        calibration: `{"scale", "bias"}` and perhaps `"confidence"`, a number a slot.
        log_confidence: `[rows, slots]`, from [`slot_confidence`]; needed where the calibration has `"confidence"`.

    Returns:
        `[rows, slots]`, falling along the slots.
    """
    logits = logits.float()
    if calibration is not None:
        slots = logits.shape[-1]
        weights = {name: logits.new_tensor(values[:slots]) for name, values in calibration.items()}
        logits = logits * weights["scale"] + weights["bias"]
        if "confidence" in weights:
            logits = logits + weights["confidence"] * confidence_logit(log_confidence)
    return torch.nn.functional.logsigmoid(logits).cumsum(-1).exp()


def confidence_logit(log_confidence: torch.Tensor) -> torch.Tensor:
    """`log(c / (1 - c))` from `log c`, held within 12 of 0 so that a certain draft stays finite."""
    log_confidence = log_confidence.float().clamp(max=-6e-6)
    return (log_confidence - torch.log(-torch.expm1(log_confidence))).clamp(-12.0, 12.0)


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
    """Draft length of each row, before caps, where each row is decided for itself.

    Args:
        policy: From [`policy_in_force`]; `"throughput"` looks at the batch and is decided in [`throughput`].
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
