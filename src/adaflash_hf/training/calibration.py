"""Calibration of the survival head on held-out rounds: a scale and a bias a slot, and how reliable the result is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..generation.length_policy import confidence_logit, head_survival
from .losses import accepted_lengths


@dataclass
class SurvivalRounds:
    """What the survival head said about rounds of decoding, and what became of them.

    Args:
        logits: `[rounds, slots]`, the head's logits.
        accepted: `[rounds, slots]`, whether the drafted tokens up to each slot were all accepted.
        counted: `[rounds, slots]`, slots inside the text.
        log_confidence: `[rounds, slots]`, logarithm of the draft's largest probability at each slot.
    """

    logits: torch.Tensor
    accepted: torch.Tensor
    counted: torch.Tensor
    log_confidence: torch.Tensor

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def reached(self) -> torch.Tensor:
        """`[rounds, slots]`, slots whose predecessors were all accepted."""
        before = torch.cat([torch.ones_like(self.accepted[:, :1]), self.accepted[:, :-1]], dim=1)
        return before.bool() & self.counted

    def base_rates(self) -> torch.Tensor:
        """`[slots]`, the share of rounds in which each slot survived."""
        counted = self.counted.float()
        return (self.accepted.float() * counted).sum(0) / counted.sum(0).clamp(min=1)

    @classmethod
    def concatenate(cls, parts: list[SurvivalRounds]) -> SurvivalRounds:
        """All rounds of several."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))


def simulated_acceptances(
    matched: torch.Tensor, text_acceptance: torch.Tensor | None, generator: torch.Generator | None = None
) -> torch.Tensor:
    """`[blocks, slots]`, whether each drafted slot is accepted once it is reached.

    Args:
        matched: `[blocks, slots]`, whether the draft is the target's choice: the answer for greedy text.
        text_acceptance: `[blocks, slots]`, `min(1, q(x) / p(x))` of the text's tokens where the text was sampled: a
            token of such a text came by an accepted draft with this probability. `None` for greedy text.
        generator: Source of randomness for sampled text.
    """
    if text_acceptance is None:
        return matched
    draws = torch.rand(text_acceptance.shape, generator=generator)
    return draws.to(text_acceptance.device) < text_acceptance


def fit_calibration(rounds: SurvivalRounds, steps: int = 100) -> dict[str, list[float]]:
    """Fits [`head_survival`]'s numbers so that the survival `S_k = h_1 … h_k` is right, slot by slot from the left.

    Slot k maximises the likelihood of "accepted up to k" under `S_{k-1} h_k`, with the slots before it held as fitted,
    so that what they leave wrong together is put right too.

    Args:
        rounds: Held-out rounds.
        steps: Iterations of L-BFGS a slot.

    Returns:
        `{"scale", "confidence", "bias"}`, a number a drafted slot each, for `AdaFlashConfig.survival_calibration`.

    Raises:
        ValueError: A slot has fewer than 50 rounds.
    """
    inputs = torch.stack([rounds.logits, confidence_logit(rounds.log_confidence), torch.ones_like(rounds.logits)], -1)
    inputs, log_before = inputs.double(), torch.zeros(len(rounds), dtype=torch.double)
    fitted: dict[str, list[float]] = {"scale": [], "confidence": [], "bias": []}
    for slot in range(inputs.shape[1]):
        counted = rounds.counted[:, slot]
        if int(counted.sum()) < 50:
            raise ValueError(
                f"rounds: only {int(counted.sum())} of {len(rounds)} hold slot {slot + 1}; calibration needs at least 50. "
                "Pass more or longer held-out text."
            )
        outcome = rounds.accepted[counted, slot].double()
        weights = _fit_slot(inputs[counted, slot], log_before[counted], outcome, steps)
        for name, value in zip(fitted, weights.tolist(), strict=True):
            fitted[name].append(value)
        log_before = log_before + torch.nn.functional.logsigmoid(inputs[:, slot] @ weights)
    return fitted


def _fit_slot(inputs: torch.Tensor, log_before: torch.Tensor, outcome: torch.Tensor, steps: int) -> torch.Tensor:
    """`[features]` weights of the slot's logistic regression, given the survival before it."""
    start = torch.tensor([1.0, 0.0, 0.0], dtype=torch.double)
    weights = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([weights], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        log_survival = log_before + torch.nn.functional.logsigmoid(inputs @ weights)
        log_death = torch.log1p(-log_survival.exp().clamp(max=1 - 1e-9))
        value = -(outcome * log_survival + (1 - outcome) * log_death).mean()
        # Keeps a slot that is always (or never) accepted finite.
        value = value + 1e-6 * ((weights - start) ** 2).sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach()


def expected_calibration_error(predicted: torch.Tensor, outcome: torch.Tensor, bins: int = 15) -> float:
    """Mean distance between prediction and outcome over bins of equal mass (1706.04599 with equal-mass bins).

    Args:
        predicted: `[n]` probabilities.
        outcome: `[n]` 0 or 1.
        bins: Number of bins.
    """
    order = predicted.argsort()
    return sum(
        len(part) / len(order) * abs(float(predicted[part].double().mean() - outcome[part].double().mean()))
        for part in order.tensor_split(bins)
        if len(part)
    )


def reliability(rounds: SurvivalRounds, calibration: dict[str, list[float]] | None) -> dict[str, float]:
    """How far the survival head can be believed.

    Args:
        rounds: Held-out rounds that the calibration was not fitted on.
        calibration: From [`fit_calibration`], or `None` for the head as trained.

    Returns:
        `ece`, of S_k over all slots of all rounds, and `ece_reached`, of the conditional h_k over reached slots, 15
        bins of equal mass; `brier` of S_k, beside `brier_base_rates` (each slot's mean survival), and
        `brier_confidence` (prefix product of the largest draft probabilities); `rounds`, `acceptance_length`.
    """
    survival = head_survival(rounds.logits, calibration, rounds.log_confidence)
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], dim=1)
    conditional = survival / before.clamp(min=1e-30)
    counted, reached = rounds.counted, rounds.reached
    outcome = rounds.accepted.float()
    base = rounds.base_rates().expand_as(outcome)

    def brier(predicted: torch.Tensor) -> float:
        return float((predicted - outcome)[counted].double().square().mean())

    accepted = accepted_lengths(rounds.accepted.bool() & counted).double()
    return {
        "ece": expected_calibration_error(survival[counted], outcome[counted]),
        "ece_reached": expected_calibration_error(conditional[reached], outcome[reached]),
        "brier": brier(survival),
        "brier_base_rates": brier(base),
        "brier_confidence": brier(rounds.log_confidence.cumsum(-1).exp()),
        "rounds": len(rounds),
        "acceptance_length": 1.0 + float(accepted.mean()),
    }
