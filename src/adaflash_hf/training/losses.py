"""Losses of a drafter and of its length heads, and the position weights they share.

All are computed in float32 whatever the model runs in. The drafter's loss goes through the target's frozen head, by far
its largest part, chunk by chunk: each chunk's gradient with respect to the drafter's states is taken at once, so no
`[tokens, vocabulary]` tensor of the whole batch ever exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.nn import functional as F

from ..generation.draft_head import DraftHead
from .divergences import UNRESTRICTED, acceptance_probability, divergence, dpace_weights


def default_gamma(block_size: int) -> float:
    """Decay of the position weights for a block size: 7 / 5 / 4 for 16 / 10 / 8 (DFlash, 2602.06036), on their line."""
    return max(1.0, 4.0 + (block_size - 8) * 3.0 / 8.0)


def position_weights(block_size: int, gamma: float) -> torch.Tensor:
    """`w_k = exp(-(k - 1) / gamma)` for the drafted slots k = 1 … block_size - 1 (DFlash, 2602.06036)."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


@dataclass
class DraftTargets:
    """What the drafted slots of a batch should have said, as flat lists over the counted slots.

    Args:
        token_ids: `[slots]`, the target's argmax.
        weights: `[slots]`, position weights.
        state_index: `[slots]`, row of `states` that holds the target's final state for the slot's token.
        states: `[positions, hidden]`, the target's final (normed) states; only for a divergence or acceptances.
        log_normalizers: `[positions]`, the target's logsumexp over its whole vocabulary at those states.
        text_ids: `[slots]`, the tokens of the text itself, where their acceptance is asked for (needs the two above).
        slots: `[slots]`, place in its block, from 0; only for D-PACE. Blocks follow one another whole.
    """

    token_ids: torch.Tensor
    weights: torch.Tensor
    state_index: torch.Tensor | None = None
    states: torch.Tensor | None = None
    log_normalizers: torch.Tensor | None = None
    text_ids: torch.Tensor | None = None
    slots: torch.Tensor | None = None


@dataclass(frozen=True)
class DraftLoss:
    """The mixture `alpha * CE(argmax p_T) + (1 - alpha) * divergence` (AdaFlash, 2607.19223).

    Args:
        alpha: Share of the cross-entropy on the target's argmax.
        divergence: `"reverse_kl"`, `"forward_kl"`, `"jsd"` or `"total_variation"`.
        jsd_beta: Of `"jsd"`.
        clip: Most nats of a slot's divergence, applied before anything is normalised; `None` for no limit.
        dpace: Whether slots are weighted by D-PACE (2605.18810) within their block.
    """

    alpha: float = 1.0
    divergence: str = "reverse_kl"
    jsd_beta: float = 0.5
    clip: float | None = None
    dpace: bool = False


@dataclass
class DraftLossOutput:
    """A drafter loss and what was seen on the way, per counted slot and detached.

    Args:
        loss: Weighted sum of the per-slot losses divided by `normalizer`, with gradients to the states.
        matched: `[slots]`, whether the draft's argmax is the target's.
        acceptance: `[slots]`, `sum_v min(p_S, p_T)` (speculative sampling's acceptance probability) where the target's
            states were given.
        outside: Slots whose target token is not in the draft vocabulary, so that their cross-entropy was dropped.
        text_acceptance: `[slots]`, `min(1, p_S(x) / p_T(x))` of the text's token x, the probability that it came by
            an accepted draft where x was sampled from the target; where `text_ids` were given.
        log_confidence: `[slots]`, logarithm of the draft's largest probability; likewise.
    """

    loss: torch.Tensor
    matched: torch.Tensor
    acceptance: torch.Tensor | None = None
    outside: int = 0
    text_acceptance: torch.Tensor | None = None
    log_confidence: torch.Tensor | None = None


@dataclass
class _Parts:
    loss: float | torch.Tensor = 0.0
    matched: list[torch.Tensor] = field(default_factory=list)
    acceptance: list[torch.Tensor] = field(default_factory=list)
    outside: int = 0
    text_acceptance: list[torch.Tensor] = field(default_factory=list)
    log_confidence: list[torch.Tensor] = field(default_factory=list)


def drafter_loss(
    states: torch.Tensor,
    head: DraftHead,
    targets: DraftTargets,
    normalizer: torch.Tensor | float,
    mixture: DraftLoss = DraftLoss(),
    chunk_size: int = 1024,
) -> DraftLossOutput:
    """The mixture of the drafted slots, position-weighted.

    With a draft vocabulary a slot whose argmax lies outside drops its hard term; `"forward_kl"` and `"jsd"` see `p_T`
    restricted to the vocabulary and renormalised, the others and the reported acceptance its whole normaliser.

    Args:
        states: `[slots, hidden]`, the drafter's final states of the counted slots.
        head: Draft logits from states; frozen.
        targets: What the slots should say.
        normalizer: Divides the weighted sum: the total weight of the whole (accumulated, all ranks') batch.
        mixture: Which loss.
        chunk_size: Slots whose logits exist at a time; peak memory is about 6 float32 copies of
            `[chunk_size, vocabulary]` (3.7 GB at 1024 and 151,936).

    Returns:
        [`DraftLossOutput`].

    Raises:
        ValueError: The mixture needs the target's states, normalisers or the slots' places, and they were not given.
    """
    if mixture.alpha < 1 and (targets.states is None or targets.log_normalizers is None):
        raise ValueError(
            f"alpha={mixture.alpha} needs the target's final states and normalisers, and they were not given."
        )
    if mixture.dpace and targets.slots is None:
        raise ValueError("dpace=True needs the slots' places in their blocks, and they were not given.")
    local_ids = _local_ids(head, targets.token_ids)
    text_ids = None if targets.text_ids is None else _local_ids(head, targets.text_ids)
    loss, parts = _ChunkedLoss.apply(states, head, targets, local_ids, text_ids, mixture, chunk_size)
    return DraftLossOutput(
        loss=loss / normalizer,
        matched=torch.cat(parts.matched) if parts.matched else targets.token_ids.new_zeros(0, dtype=torch.bool),
        acceptance=torch.cat(parts.acceptance) if parts.acceptance else None,
        outside=parts.outside,
        text_acceptance=torch.cat(parts.text_acceptance) if parts.text_acceptance else None,
        log_confidence=torch.cat(parts.log_confidence) if parts.log_confidence else None,
    )


def _chunks(count: int, size: int, slots: torch.Tensor | None) -> list[slice]:
    """Consecutive pieces of about `size` slots, at borders of blocks where places are given."""
    if slots is None:
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]
    borders = [*(slots == 0).nonzero().flatten().tolist(), count]
    pieces, start = [], 0
    for border, following in pairwise(borders):
        if following - start > size and border > start:
            pieces.append(slice(start, border))
            start = border
    return [*pieces, slice(start, count)] if count else []


def _local_ids(head: DraftHead, token_ids: torch.Tensor) -> torch.Tensor:
    """Index of each token in the draft vocabulary, -1 outside."""
    if head.token_ids is None:
        return token_ids
    lookup = torch.full((head.vocab_size,), -1, dtype=torch.long, device=token_ids.device)
    ids = head.token_ids.to(token_ids.device)
    lookup[ids] = torch.arange(len(ids), device=token_ids.device)
    return lookup[token_ids]


class _ChunkedLoss(torch.autograd.Function):
    """Weighted sum of the slot losses; keeps only the gradient of the states, not the logits."""

    @staticmethod
    def forward(ctx, states, head, targets, local_ids, text_ids, mixture, chunk_size):
        parts = _Parts()
        gradient = torch.zeros_like(states) if states.requires_grad else None
        for rows in _chunks(len(states), chunk_size, targets.slots if mixture.dpace else None):
            piece = states[rows].detach().requires_grad_(gradient is not None)
            with torch.enable_grad():
                loss = _chunk_loss(piece, head, targets, local_ids, text_ids, rows, mixture, parts)
            if gradient is not None:
                (gradient[rows],) = torch.autograd.grad(loss, piece)
            parts.loss = parts.loss + loss.detach()
        ctx.save_for_backward(gradient)
        total = torch.as_tensor(parts.loss, dtype=torch.float32, device=states.device)
        return total, parts

    @staticmethod
    def backward(ctx, upstream, _):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None, None, None, None


def _chunk_loss(
    states: torch.Tensor,
    head: DraftHead,
    targets: DraftTargets,
    local_ids: torch.Tensor,
    text_ids: torch.Tensor | None,
    rows: slice,
    mixture: DraftLoss,
    parts: _Parts,
) -> torch.Tensor:
    logits = head(states).float().to(states.device)
    log_probs = logits.log_softmax(-1)
    ids, weights = local_ids[rows], targets.weights[rows].float()
    inside = ids >= 0
    parts.outside += int((~inside).sum())
    parts.matched.append((logits.detach().argmax(-1) == ids) & inside)
    right = log_probs.gather(1, ids.clamp(min=0)[:, None]).squeeze(1)
    loss = mixture.alpha * (-right * inside)
    if targets.states is not None and targets.log_normalizers is not None:
        with torch.no_grad():
            # Blocks overlap, so a position's distribution is computed once for all the slots that predict it.
            index, inverse = targets.state_index[rows].unique(return_inverse=True)
            target_logits = head(targets.states[index]).float().to(states.device)
            full = (target_logits - targets.log_normalizers[index].to(states.device)[:, None])[inverse]
            parts.acceptance.append(acceptance_probability(log_probs, full))
            if text_ids is not None:
                own = text_ids[rows].clamp(min=0)[:, None]
                ratio = (log_probs.gather(1, own) - full.gather(1, own)).squeeze(1).exp()
                parts.text_acceptance.append(ratio.clamp(max=1.0) * (text_ids[rows] >= 0))
                parts.log_confidence.append(log_probs.amax(-1))
        if mixture.alpha < 1:
            teacher = full if mixture.divergence in UNRESTRICTED else full.log_softmax(-1)
            distance = divergence(mixture.divergence, log_probs, teacher, mixture.jsd_beta)
            if mixture.clip is not None:
                distance = distance.clamp(max=mixture.clip)
            loss = loss + (1.0 - mixture.alpha) * distance
    if mixture.dpace:
        weights = _by_block(right.masked_fill(~inside, -torch.inf), weights, targets.slots[rows])
    return (loss * weights).sum()


def _by_block(right: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[`dpace_weights`] of a flat list of slots whose blocks follow one another."""
    block = (slots == 0).cumsum(0) - 1
    shape = (int(block[-1]) + 1, int(slots.max()) + 1)
    spread = lambda values: values.new_zeros(shape).index_put((block, slots), values)
    return dpace_weights(spread(right.detach()), spread(weights))[block, slots]


def reach_probabilities(acceptance: torch.Tensor) -> torch.Tensor:
    """P(slot k is reached) = product of the acceptances of the slots before it.

    Args:
        acceptance: `[..., slots]`, P(slot accepted | reached), or hard matches.

    Returns:
        `[..., slots]`, 1 at the first slot.
    """
    ones = torch.ones_like(acceptance[..., :1])
    return torch.cat([ones, acceptance[..., :-1]], dim=-1).cumprod(-1)


def ratio_head_loss(
    ratio: torch.Tensor, accepted: torch.Tensor, counted: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Squared error of the ratio head against (accepted + 1) / block_size (AdaFlash, 2607.19223), summed over blocks.

    Args:
        ratio: `[batch, blocks]`.
        accepted: `[batch, blocks]`, drafted tokens accepted in a row from the first slot.
        counted: `[batch, blocks]`, blocks that count.
        block_size: Slots of a block.
    """
    wanted = (accepted.float() + 1.0) / block_size
    return ((ratio.float() - wanted).square() * counted).sum()


def survival_head_loss(
    logits: torch.Tensor, labels: torch.Tensor, reach: torch.Tensor, counted: torch.Tensor
) -> torch.Tensor:
    """Binary cross-entropy of the survival head, each slot weighted by the probability that it is reached, summed.

    Args:
        logits: `[batch, blocks, slots]`.
        labels: Same shape: hard matches (greedy), or acceptance probabilities (sampling).
        reach: Same shape, from [`reach_probabilities`].
        counted: Same shape, slots that count.
    """
    loss = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
    return (loss * reach * counted).sum()


def accepted_lengths(matched: torch.Tensor) -> torch.Tensor:
    """`[..., slots]` matches -> `[...]` number of leading ones."""
    return matched.long().cumprod(-1).sum(-1)
