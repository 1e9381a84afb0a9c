"""What on-policy training adds to the trainer: rollouts written with the drafter's help, and what the target says of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PreTrainedModel
from transformers.utils import logging

from ..draft_settings import override_draft_settings, read_draft_settings
from ..evaluation.cost import measure_verify_cost
from ..generation.length_policy import policy_in_force
from ..modeling_adaflash import AdaFlashDraftModel
from .collator import RolloutCollator
from .features import target_features
from .opd_config import OPDConfig
from .rollout_buffer import PlanSampler, RolloutBuffer, RolloutPlan
from .rollouts import Prompt, Rollout, answer_prompts, require_blocks

logger = logging.get_logger(__name__)


class OnPolicyText:
    """The text of an on-policy run, batch by batch.

    Args:
        prompts: The training prompts.
        target: Writes, and is asked for its states.
        drafter: Gives the drafter to write with, as it is now.
        args: The run's arguments.
        block_size: Slots of the drafter's blocks.
        layer_ids: Tapped layers.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        target: PreTrainedModel,
        drafter: Callable[[], AdaFlashDraftModel],
        args: OPDConfig,
        block_size: int,
        layer_ids: list[int],
    ) -> None:
        self.target, self.drafter, self.args = target, drafter, args
        self.block_size, self.layer_ids = block_size, layer_ids
        self.plan = RolloutPlan(
            len(prompts),
            args.rollout_buffer_size,
            args.rollout_epochs,
            args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            args.data_seed if args.data_seed is not None else args.seed,
            shuffle=args.train_sampling_strategy != "sequential",
        )
        self.buffer = RolloutBuffer(
            prompts,
            self.plan,
            lmbda=args.lmbda,
            batch_size=args.rollout_batch_size,
            max_length=args.max_length,
            rank=args.process_index,
            world_size=args.world_size,
        )
        self.collate = RolloutCollator()
        self.seen: dict[str, float] = {}
        self._features: dict[int, dict[str, torch.Tensor]] = {}
        self._verify_cost: dict[str, Any] | None = None

    def sampler(self) -> PlanSampler:
        """Places of an epoch."""
        return PlanSampler(self.plan)

    def batch(self, places: list[int]) -> dict[str, Any]:
        """The batch at these places of the plan, its rollouts written where they are not there yet.

        Raises:
            ValueError: None of a filling's answers is as long as one block.
        """
        filling = self.plan.filling_of(places[0])
        if filling != self.buffer.filling:
            self._fill(filling)
        slots = self.plan.slots_of(places)
        items = [{"rollout": self.buffer.rollouts[slot], "sample": self.buffer.samples[slot]} for slot in slots]
        return {**self.collate(items), "slots": slots}

    def _fill(self, filling: int) -> None:
        self._freeze_cost()
        started, tallies = time.perf_counter(), []

        def write(prompts: list[Prompt]) -> list[Rollout]:
            drafter = self.drafter()
            with override_draft_settings(drafter.generation_config, verify_cost=self._verify_cost):
                rollouts = answer_prompts(
                    self.target,
                    prompts,
                    max_new_tokens=self.args.max_new_tokens,
                    max_length=self.args.max_length,
                    temperature=self.args.temperature,
                    drafter=drafter,
                )
                stats = drafter.last_draft_stats
            tallies.append((stats.emitted, stats.rounds, sum(len(r.input_ids) - r.prompt_length for r in rollouts)))
            return rollouts

        self.buffer.fill(filling, write)
        self._features.clear()
        require_blocks(self.buffer.rollouts, self.block_size)
        emitted, rounds, tokens = (sum(column) for column in zip(*gather_object(tallies) or [(0, 0, 0)]))
        seconds = time.perf_counter() - started
        self.seen = {"rollout_filling": filling, "rollout_tokens": tokens, "rollout_seconds": round(seconds, 3)}
        if rounds:
            self.seen["rollout_tokens_per_round"] = emitted / rounds

    def _freeze_cost(self) -> None:
        """Draft lengths must not follow the clock: sampled text would differ when a run is taken up again."""
        drafter = self.drafter()
        settings = read_draft_settings(drafter.generation_config)
        if self._verify_cost is None and settings.verify_cost is not None:
            self._verify_cost = settings.verify_cost
        if self._verify_cost is None and policy_in_force(settings, drafter) == "throughput":
            largest = min(self.args.rollout_batch_size, self.plan.buffer_size)
            # One curve for all ranks.
            found = [None]
            if self.args.process_index == 0:
                logger.info("measuring what verifying costs, once, for the rollouts")
                rows = sorted({1, max(1, largest // 4), largest})
                found = [measure_verify_cost(self.target, drafter, rows, prompt_length=32)]
            self._verify_cost = broadcast_object_list(found)[0]

    def features(self, slots: list[int], length: int) -> dict[str, torch.Tensor]:
        """The target's states of some rollouts, right padded to `length`; see [`target_features`].

        Each sequence has a forward of its own, so that its states do not depend on what it is batched with.
        """
        found = []
        for slot in slots:
            if slot in self._features:
                found.append(self._features[slot])
                continue
            ids = torch.tensor([self.buffer.rollouts[slot].input_ids], device=self.target.device)
            features = {
                name: value[0] for name, value in target_features(self.target, ids, None, self.layer_ids).items()
            }
            if self.args.keep_features and self.args.rollout_epochs > 1:
                features = {name: value.cpu() for name, value in features.items()}
                self._features[slot] = features
            found.append(features)
        padded = {}
        for name, first in found[0].items():
            whole = first.new_zeros((len(slots), length, *first.shape[1:]))
            for row, features in enumerate(found):
                whole[row, : len(features[name])] = features[name]
            padded[name] = whole.to(self.target.device)
        return padded

    def save(self, folder: str | os.PathLike) -> None:
        """Writes buffer and cost curve into a checkpoint."""
        self.buffer.save(folder, verify_cost=self._verify_cost)

    def load(self, folder: str | os.PathLike) -> None:
        """Goes on from a checkpoint."""
        self._verify_cost = self.buffer.load(folder)["verify_cost"]
        self._features.clear()
