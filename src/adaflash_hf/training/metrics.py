"""Accuracy by slot and simulated acceptance length, for logs and evaluation."""

from __future__ import annotations

from typing import Any

import torch

from ..evaluation.acceptance import domain_metrics
from .losses import accepted_lengths


def simulated_acceptance(
    anchors: torch.Tensor, matched: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walks the rounds that greedy decoding of full blocks would have made over one finished sequence.

    From the first anchor, each round accepts the leading matches and commits one more token; the next anchor is the
    last token committed. Exact where the sequence is the target's own greedy text; its last token counts as the
    target's own, as where `max_new_tokens` ends a text (where EOS does, decoding may count it as accepted).

    Args:
        anchors: `[anchors]`, every response position that can open a block, increasing, -1 for none. The response's
            first token is the first of them, since decoding gets it from the prompt's own forward.
        matched: `[anchors, slots]`, whether the draft is the target's argmax.
        counted: `[anchors, slots]`, slots inside the response.

    Returns:
        `accepted [rounds]` and `possible [rounds]`, the slots that could have been accepted.
    """
    lengths = accepted_lengths(matched & counted).tolist()
    possible = counted.sum(-1).tolist()
    last = int(anchors.max())
    rounds = walked_rounds(anchors, lengths)
    # `last` still has one token after it.
    left = [last - int(anchors[row]) for row in rounds]
    return (
        torch.tensor([min(lengths[row], room) for row, room in zip(rounds, left)], dtype=torch.long),
        torch.tensor([min(possible[row], room) for row, room in zip(rounds, left)], dtype=torch.long),
    )


def walked_rounds(anchors: torch.Tensor, lengths: list[int]) -> list[int]:
    """Which of a text's anchors open the rounds of decoding it, one after the other.

    Args:
        anchors: `[anchors]`, positions that can open a block, increasing, -1 for none.
        lengths: Accepted tokens of a block opened at each of them.
    """
    place = {position: row for row, position in enumerate(anchors.tolist()) if position >= 0}
    rounds, position = [], min(place, default=-1)
    while position in place:
        rounds.append(place[position])
        position += lengths[rounds[-1]] + 1
    return rounds


class SlotMetrics:
    """Sums over blocks (training) and over simulated rounds by domain (evaluation)."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.matched = torch.zeros(slots)
        self.reached_matched, self.reached = torch.zeros(slots), torch.zeros(slots)
        self.counted = torch.zeros(slots)
        self.steps = 0
        self.values: dict[str, float] = {}
        self.outside = 0
        self.rounds: dict[int, tuple[str, list[int], list[int]]] = {}

    def add_blocks(
        self, matched: torch.Tensor, counted: torch.Tensor, values: dict[str, torch.Tensor], outside: int
    ) -> None:
        """Adds a training batch: `matched` and `counted` `[batch, anchors, slots]`, and its share of a step's losses."""
        matched, counted = matched.flatten(0, 1).float().cpu(), counted.flatten(0, 1).float().cpu()
        reach = torch.cat([torch.ones_like(matched[:, :1]), matched[:, :-1]], 1).cumprod(1) * counted
        self.matched += (matched * counted).sum(0)
        self.counted += counted.sum(0)
        self.reached += reach.sum(0)
        self.reached_matched += (reach * matched).sum(0)
        self.outside += outside
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + float(value)

    def add_rounds(self, sample: int, domain: str, accepted: torch.Tensor, possible: torch.Tensor) -> None:
        """Adds the simulated rounds of one sequence; a sample that comes twice, as padding of a batch, counts once."""
        self.rounds[sample] = (domain, accepted.tolist(), possible.tolist())

    def result(self) -> dict[str, Any]:
        """Flat metrics: `slot_accuracy_k` (of reached slots in evaluation), `acceptance_length` and by domain."""
        result: dict[str, Any] = {name: total / max(1, self.steps) for name, total in self.values.items()}
        if self.counted.sum() > 0:
            for slot in range(self.slots):
                result[f"slot_accuracy_{slot + 1}"] = (self.matched[slot] / self.counted[slot].clamp(min=1)).item()
            survival = (self.reached_matched / self.reached.clamp(min=1)).cumprod(0)
            result["acceptance_length"] = 1.0 + survival.sum().item()
            result["outside_draft_vocabulary"] = self.outside / self.counted.sum().item()
        by_domain: dict[str, list[int]] = {}
        for domain, accepted, _ in self.rounds.values():
            by_domain.setdefault(domain, []).extend(accepted)
        lengths = [a for accepted in by_domain.values() for a in accepted]
        if lengths:
            slots = [pair for _, *pairs in self.rounds.values() for pair in zip(*pairs, strict=True)]
            for slot in range(self.slots):
                reached = [a for a, room in slots if a >= slot and room > slot]
                if reached:
                    result[f"slot_acceptance_{slot + 1}"] = sum(a > slot for a in reached) / len(reached)
            domains = {name: 1.0 + sum(found) / len(found) for name, found in by_domain.items() if found}
            result["acceptance_length"] = 1.0 + sum(lengths) / len(lengths)
            result |= domain_metrics(domains)
        return result
