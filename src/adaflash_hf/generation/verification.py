"""Which drafted tokens the target accepts, and the token that follows them."""

from __future__ import annotations

import torch


def count_matches(new: list[int], drafted: list[int]) -> int:
    """How many of the first tokens agree."""
    return next(
        (place for place, pair in enumerate(zip(new, drafted)) if pair[0] != pair[1]), min(len(new), len(drafted))
    )


def verify_greedy(target_ids: torch.Tensor, drafted: list[int]) -> list[int]:
    """Tokens to commit: the target's choices up to and including the first that differs from the draft.

    Args:
        target_ids: `[len(drafted) + 1]`, the target's argmax at each position.
        drafted: Drafted token ids.
    """
    chosen = target_ids.tolist()
    return chosen[: count_matches(chosen, drafted) + 1]


def accept_sampled(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, token: int, generator: torch.Generator | None = None
) -> bool:
    """Speculative sampling's test for one drafted token: accepted with probability `min(1, p / q)` (2211.17192).

    Args:
        target_probs: `[vocabulary]`, p.
        draft_probs: `[vocabulary]`, the distribution q that the token was drawn from.
        token: The drafted token.
        generator: Source of randomness.
    """
    uniform = torch.rand((), generator=generator, device=target_probs.device, dtype=target_probs.dtype)
    return bool(uniform * draft_probs[token] < target_probs[token])


def residual_distribution(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """`norm(max(p - q, 0))`, what is drawn from after a rejection (2211.17192).

    Where rounding leaves nothing (p equal to q to the last bit), p itself.
    """
    residual = (target_probs - draft_probs).clamp(min=0)
    total = residual.sum()
    return residual / total if total > 0 else target_probs
