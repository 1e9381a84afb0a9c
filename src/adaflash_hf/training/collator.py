"""Padding rollouts and their features into batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from .features import FeatureStore
from .rollouts import Rollout


class RolloutDataset(Dataset):
    """Rollouts as a map-style dataset, with the target's features where a store has them."""

    def __init__(self, rollouts: Sequence[Rollout], store: FeatureStore | None = None) -> None:
        self.rollouts, self.store = list(rollouts), store

    def __len__(self) -> int:
        return len(self.rollouts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rollout = self.rollouts[index]
        item: dict[str, Any] = {"rollout": rollout, "sample": index}
        if self.store is not None:
            item["features"] = self.store[index]
        return item

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rollout."""
        return [len(rollout.input_ids) for rollout in self.rollouts]


class RolloutCollator:
    """Right-pads rollouts: `input_ids`, `attention_mask`, `response_mask` `[batch, length]`, features if present.

    With them `placed` `[batch, length]`, where decoding opened its rounds, if any rollout knows.
    """

    def __init__(self, pad_token_id: int = 0) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Items of a [`RolloutDataset`] -> one padded batch."""
        rollouts = [item["rollout"] for item in items]
        longest = max(len(rollout.input_ids) for rollout in rollouts)
        batch: dict[str, Any] = {
            "input_ids": torch.full((len(items), longest), self.pad_token_id, dtype=torch.long),
            "attention_mask": torch.zeros(len(items), longest, dtype=torch.long),
            "response_mask": torch.zeros(len(items), longest, dtype=torch.bool),
            "domains": [rollout.domain for rollout in rollouts],
            "samples": [item["sample"] for item in items],
        }
        for row, rollout in enumerate(rollouts):
            length = len(rollout.input_ids)
            batch["input_ids"][row, :length] = torch.tensor(rollout.input_ids)
            batch["attention_mask"][row, :length] = 1
            batch["response_mask"][row, rollout.prompt_length : length] = True
        if any(rollout.anchors is not None for rollout in rollouts):
            # Anywhere, where it is not known.
            placed = torch.tensor([[rollout.anchors is None] for rollout in rollouts]).repeat(1, longest)
            for row, rollout in enumerate(rollouts):
                placed[row, [place for place in rollout.anchors or () if place < longest]] = True
            batch["placed"] = placed
        for name in items[0].get("features", {}):
            values = [item["features"][name] for item in items]
            padded = values[0].new_zeros((len(items), longest, *values[0].shape[1:]))
            for row, value in enumerate(values):
                padded[row, : len(value)] = value
            batch[name] = padded
        return batch
