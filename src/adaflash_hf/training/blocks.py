"""Many blocks of one sequence in one forward: where they start, and what each slot may see (DFlash, 2602.06036)."""

from __future__ import annotations

import torch


def valid_anchors(
    response_mask: torch.Tensor, block_size: int, document_ids: torch.Tensor | None = None, partial: bool = False
) -> torch.Tensor:
    """Positions that can open a block.

    The anchor itself may be the last prompt token; the tokens it has to predict must be response text of the anchor's
    own document, and there must be a token before the anchor, since decoding never drafts without context.

    Args:
        response_mask: `[batch, length]`, true at response tokens (padding false).
        block_size: Slots of a block.
        document_ids: `[batch, length]` where several documents share a row.
        partial: Whether one response token after the anchor is enough, where otherwise the whole block must fit.

    Returns:
        `[batch, length]` boolean.
    """
    batch, length = response_mask.shape
    valid = torch.zeros_like(response_mask, dtype=torch.bool)
    last = 2 if partial else block_size
    usable = length - last + 1
    if usable <= 0:
        return valid
    good = torch.ones(batch, usable, dtype=torch.bool, device=response_mask.device)
    for slot in range(1, last):
        good &= response_mask[:, slot : slot + usable].bool()
        if document_ids is not None:
            good &= document_ids[:, slot : slot + usable] == document_ids[:, :usable]
    valid[:, :usable] = good
    valid[:, 0] = False
    if document_ids is not None:
        valid[:, 1:] &= document_ids[:, 1:] == document_ids[:, :-1]
    return valid


def sample_anchors(valid: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draws up to `num_anchors` distinct anchors a row, uniformly.

    Args:
        valid: `[batch, length]`, from [`valid_anchors`].
        num_anchors: Most anchors a row.
        generator: Source of randomness (CPU).

    Returns:
        `[batch, anchors]` increasing positions, -1 where a row has fewer than the widest one.
    """
    keys = torch.rand(valid.shape, generator=generator).to(valid.device).masked_fill(~valid, 2.0)
    count = min(num_anchors, int(valid.sum(1).max().item()) if valid.numel() else 0)
    picked = keys.topk(count, dim=1, largest=False)
    anchors = picked.indices.masked_fill(picked.values > 1.5, valid.shape[1])
    anchors = anchors.sort(dim=1).values
    return anchors.masked_fill(anchors == valid.shape[1], -1)


def block_positions(anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """`[batch, anchors]` -> positions of all slots `[batch, anchors * block_size]` (0-based where there is none)."""
    slots = torch.arange(block_size, device=anchors.device)
    return (anchors.clamp(min=0)[..., None] + slots).flatten(1)


def block_visibility(
    anchors: torch.Tensor,
    block_size: int,
    context_mask: torch.Tensor,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each slot may see: context of its document strictly before its anchor, and its own block.

    Args:
        anchors: `[batch, anchors]`, -1 for none.
        block_size: Slots of a block.
        context_mask: `[batch, length]`, true at real tokens.
        document_ids: `[batch, length]` where several documents share a row.

    Returns:
        Boolean `[batch, 1, anchors * block_size, length + anchors * block_size]`.
    """
    batch, count = anchors.shape
    length = context_mask.shape[1]
    positions = torch.arange(length, device=anchors.device)
    context = (positions < anchors[..., None]) & context_mask.bool()[:, None]
    if document_ids is not None:
        own = document_ids.gather(1, anchors.clamp(min=0))
        context &= document_ids[:, None] == own[..., None]
    context = context[:, :, None].expand(-1, -1, block_size, -1).reshape(batch, count * block_size, length)
    blocks = torch.arange(count, device=anchors.device).repeat_interleave(block_size)
    own_block = (blocks[:, None] == blocks[None]).expand(batch, -1, -1)
    return torch.cat([context, own_block], dim=-1)[:, None]


def label_positions(
    anchors: torch.Tensor,
    block_size: int,
    response_mask: torch.Tensor,
    document_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the tokens the drafted slots predict, and which of them count.

    Returns:
        `positions` and `counted`, both `[batch, anchors, block_size - 1]`; `counted` is false for missing anchors and
        for slots past the response or in another document.
    """
    length = response_mask.shape[1]
    positions = anchors[..., None] + torch.arange(1, block_size, device=anchors.device)
    inside = (anchors[..., None] >= 0) & (positions < length)
    positions = positions.clamp(0, length - 1)
    rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    counted = inside & response_mask.bool()[rows, positions]
    if document_ids is not None:
        counted &= document_ids[rows, positions] == document_ids.gather(1, anchors.clamp(min=0))[..., None]
    return positions, counted
