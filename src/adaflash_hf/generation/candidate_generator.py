"""Drafting inside transformers' own `_assisted_decoding`, for targets that cannot be packed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from .._compat import LOOP_ENDS_AT_EOS
from ..draft_settings import DraftSettings
from ..modeling_adaflash import AdaFlashDraftModel
from .drafting import BlockDrafter, Draft
from .taps import TapRecorder
from .verification import count_matches


class AdaFlashCandidateGenerator(CandidateGenerator):
    """Proposes blocks to transformers' assisted decoding of one prompt.

    The target's tapped layers are read with forward hooks, so the generator works as a context manager around the
    decoding loop.

    Args:
        target: The model that verifies.
        drafter: The draft model.
        settings: Length policy and caps.
        generation_config: The call's.
        logits_processor: The call's.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: AdaFlashDraftModel,
        settings: DraftSettings,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        held: int = 0,
    ) -> None:
        self.config, self.processors = generation_config, logits_processor
        # Left to the target where the loop would run on past an EOS in the middle of a block.
        end = None if LOOP_ENDS_AT_EOS else getattr(generation_config, "_eos_token_tensor", None)
        never = [] if end is None else end.flatten().tolist()
        self.drafting = BlockDrafter(target, drafter, settings, 1, generation_config.do_sample, [held], never)
        self.taps = TapRecorder(target, drafter.config.target_layer_ids)
        self.stats = self.drafting.new_stats()
        self.stats.anchors = [[]]
        self.frequencies = frequency_switch(target)
        self._held = held
        self._draft: Draft | None = None
        self._position = 0

    def __enter__(self) -> AdaFlashCandidateGenerator:
        self.taps.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.taps.__exit__(*error)

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """`input_ids [1, length]` with the drafted tokens appended, and their logits `[1, drafted, vocabulary]`.

        The first call comes before the target has run, and drafts nothing.
        """
        if is_first_iteration:
            return input_ids, None
        length = input_ids.shape[1]
        mask = (model_kwargs or {}).get("attention_mask")
        padding = 0 if mask is None else int(mask.shape[1] - mask.sum())
        known = self.drafting.cache.starts[0] + self.drafting.cache.lengths[0]
        known += sum(map(len, self.drafting._pending[0]))
        new = length - padding - 1 - known
        taps = self.taps.take()[0]
        # Prefill may still hold the padding in front of the prompt.
        first = taps.shape[0] - new if self._draft is None else 0
        self.drafting.add_context(0, taps[first : first + new])
        cap = self.config.max_length - length - 1
        position = self._position = length - padding - 1
        if self.frequencies is not None:
            kind, limit = self.frequencies
            if position < limit:
                cap = min(cap, limit - position - 1)
            elif kind == "dynamic":
                cap = 0  # every further position has frequencies of its own
        text = input_ids[0, padding:]
        (self._draft,) = self.drafting.propose([int(text[-1])], [position], [cap], [self.processors], [text])
        if not self._draft.token_ids:
            return input_ids, None
        candidates = torch.cat([input_ids, input_ids.new_tensor([self._draft.token_ids])], dim=1)
        return candidates, self._draft.probs.log()[None] if self._draft.probs is not None else None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Counts the round that transformers has just verified."""
        if self._draft is not None:
            # `num_matches` leaves out an accepted token that ends the text.
            emitted = int(num_matches) + 1
            self.stats.anchors[0].append(self._position)
            matches = count_matches(input_ids[0, -emitted:].tolist(), self._draft.token_ids)
            self.stats.add_round(self._draft.planned, len(self._draft.token_ids), matches, emitted)
            self.drafting.record([self._draft], [matches], self.stats)


def frequency_switch(target: PreTrainedModel) -> tuple[str, int] | None:
    """Kind of a RoPE whose frequencies depend on the longest position of a call, and how many positions share the first.

    Plain decoding meets positions one at a time, so no draft may straddle a change.
    """
    text = target.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type")
        if kind in ("longrope", "dynamic"):
            original = parameters.get("original_max_position_embeddings")
            return kind, int(original or text.max_position_embeddings)
    return None
