"""Accuracy by slot and simulated acceptance length, for logs and evaluation."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from .losses import accepted_lengths


def simulated_acceptance(
    anchors: torch.Tensor, matched: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walks the rounds that greedy decoding of full blocks would have made over one finished sequence.

    From the first anchor, each round accepts the leading matches and commits one more token; the next anchor is the
    last token committed. Exact where the sequence is the target's own greedy text.

    Args:
        anchors: `[anchors]`, every position that can open a block, increasing, -1 for none.
        matched: `[anchors, slots]`, whether the draft is the target's argmax.
        counted: `[anchors, slots]`, slots inside the response.

    Returns:
        `accepted [rounds]` and `possible [rounds]`, the slots that could have been accepted.
    """
    lengths = accepted_lengths(matched & counted).tolist()
    possible = counted.sum(-1).tolist()
    place = {position: row for row, position in enumerate(anchors.tolist()) if position >= 0}
    accepted, room = [], []
    position = min(place, default=-1)
    while position in place:
        row = place[position]
        accepted.append(lengths[row])
        room.append(possible[row])
        position += lengths[row] + 1
    return torch.tensor(accepted, dtype=torch.long), torch.tensor(room, dtype=torch.long)


class SlotMetrics:
    """Sums over blocks (training) and over simulated rounds by domain (evaluation)."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.matched = torch.zeros(slots)
        self.reached_matched, self.reached = torch.zeros(slots), torch.zeros(slots)
        self.counted = torch.zeros(slots)
        self.values: dict[str, list[float]] = {}
        self.outside = 0
        self.rounds: dict[str, list[int]] = {}
        self.round_slots: list[tuple[int, int]] = []

    def add_blocks(
        self, matched: torch.Tensor, counted: torch.Tensor, values: dict[str, torch.Tensor], outside: int
    ) -> None:
        """Adds a training batch: `matched` and `counted` `[batch, anchors, slots]`, and its loss terms."""
        matched, counted = matched.flatten(0, 1).float().cpu(), counted.flatten(0, 1).float().cpu()
        reach = torch.cat([torch.ones_like(matched[:, :1]), matched[:, :-1]], 1).cumprod(1) * counted
        self.matched += (matched * counted).sum(0)
        self.counted += counted.sum(0)
        self.reached += reach.sum(0)
        self.reached_matched += (reach * matched).sum(0)
        self.outside += outside
        for name, value in values.items():
            self.values.setdefault(name, []).append(float(value))

    def add_rounds(self, domain: str, accepted: torch.Tensor, possible: torch.Tensor) -> None:
        """Adds the simulated rounds of one sequence."""
        self.rounds.setdefault(domain, []).extend(accepted.tolist())
        self.round_slots.extend(zip(accepted.tolist(), possible.tolist(), strict=True))

    def result(self) -> dict[str, Any]:
        """Flat metrics: `slot_accuracy_k` (of reached slots in evaluation), `acceptance_length` and by domain."""
        result: dict[str, Any] = {name: sum(found) / len(found) for name, found in self.values.items()}
        if self.counted.sum() > 0:
            for slot in range(self.slots):
                result[f"slot_accuracy_{slot + 1}"] = (self.matched[slot] / self.counted[slot].clamp(min=1)).item()
            survival = (self.reached_matched / self.reached.clamp(min=1)).cumprod(0)
            result["acceptance_length"] = 1.0 + survival.sum().item()
            result["outside_draft_vocabulary"] = self.outside / self.counted.sum().item()
        if self.round_slots:
            for slot in range(self.slots):
                reached = [a for a, room in self.round_slots if a >= slot and room > slot]
                if reached:
                    result[f"slot_acceptance_{slot + 1}"] = sum(a > slot for a in reached) / len(reached)
            domains = {name: 1.0 + sum(found) / len(found) for name, found in self.rounds.items() if found}
            result["acceptance_length"] = 1.0 + sum(a for a, _ in self.round_slots) / len(self.round_slots)
            if len(domains) > 1:
                result |= {f"acceptance_length_{name}": value for name, value in sorted(domains.items())}
                result["acceptance_length_min"] = min(domains.values())
                result["acceptance_length_std"] = statistics.pstdev(domains.values())
        return result
