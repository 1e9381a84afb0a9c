"""How far a draft's distribution is from the target's, slot by slot: what the drafter's loss is mixed from.

All take log-probabilities `[slots, vocabulary]` in float32, the target's as a constant, and give `[slots]`. With a draft
vocabulary the columns are its tokens; each docstring says which normaliser the target's then need.
"""

from __future__ import annotations

import math

import torch

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd", "total_variation")
# Of these the target's probabilities are those over its whole vocabulary, of the others they are renormalised.
UNRESTRICTED = ("reverse_kl", "total_variation")


def forward_kl(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`KL(p_T || p_S)`; the target's distribution renormalised over the draft vocabulary."""
    return (target.exp() * (target - draft)).sum(-1)


def reverse_kl(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`KL(p_S || p_T)` (AdaFlash, 2607.19223); the target keeps its whole vocabulary's normaliser."""
    return (draft.exp() * (draft - target)).sum(-1)


def generalized_jsd(draft: torch.Tensor, target: torch.Tensor, beta: float) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence (GKD, 2306.13649), `beta` as in TRL: 0 is forward KL, 1 is reverse KL.

    `beta * KL(p_T || m) + (1 - beta) * KL(p_S || m)` with `m = beta * p_T + (1 - beta) * p_S`; the target's distribution
    renormalised over the draft vocabulary.
    """
    if beta == 0.0:
        return forward_kl(draft, target)
    if beta == 1.0:
        return reverse_kl(draft, target)
    mixture = torch.logaddexp(target + math.log(beta), draft + math.log1p(-beta))
    return beta * forward_kl(mixture, target) + (1.0 - beta) * forward_kl(mixture, draft)


def acceptance_probability(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`sum_v min(p_S, p_T)`, with which speculative sampling accepts the slot; the target's whole normaliser."""
    return torch.minimum(draft.exp(), target.exp()).sum(-1)


def total_variation(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`1 - sum_v min(p_S, p_T)`: the probability of a rejection; the target's whole normaliser."""
    return 1.0 - acceptance_probability(draft, target)


def divergence(name: str, draft: torch.Tensor, target: torch.Tensor, beta: float = 0.5) -> torch.Tensor:
    """One of [`DIVERGENCES`] by name.

    Raises:
        ValueError: There is none of that name.
    """
    if name == "jsd":
        return generalized_jsd(draft, target, beta)
    found = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "total_variation": total_variation}.get(name)
    if found is None:
        raise ValueError(f"divergence={name!r} is not valid: expected one of {', '.join(map(repr, DIVERGENCES))}.")
    return found(draft, target)


def dpace_weights(right: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """D-PACE position weights (2605.18810): each slot's share of the gradient of the expected accepted length.

    With `a_k` the draft's probability of the right token at slot k, the expected length is `sum_k prod_{j<=k} a_j`, and
    the gradient with respect to `log a_i` is `sum_{k>=i} prod_{j<=k} a_j`.

    Args:
        right: `[blocks, slots]`, `log a_k`; detached here.
        weights: `[blocks, slots]`, the weights that are replaced, 0 at slots that do not count.

    Returns:
        `[blocks, slots]`, each block's shares times the sum of the weights it had.
    """
    # Only ratios within a block matter; the floor stands for tokens that are never drafted.
    log_survival = right.detach().float().clamp(min=-20.0).cumsum(-1)
    survival = (log_survival - log_survival[:, :1]).exp() * (weights > 0)
    shares = survival.flip(-1).cumsum(-1).flip(-1) * (weights > 0)
    return shares / shares.sum(-1, keepdim=True).clamp(min=1e-30) * weights.sum(-1, keepdim=True)
