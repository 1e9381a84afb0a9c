"""Logits processors and stopping criteria as each row of a batch would see them alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Depend on the logits alone: one call does for all positions, and a draft can go through them too.
LOGITS_ONLY = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.TopHLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.SuppressTokensLogitsProcessor,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
)
# Depend on the text as well, but keep nothing between calls: safe to run on drafts that may be rejected.
HISTORY_ONLY = (
    processors.RepetitionPenaltyLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor,
)
_BATCHED_STATE = (
    processors.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    processors.EncoderRepetitionPenaltyLogitsProcessor,
    processors.EncoderNoRepeatNGramLogitsProcessor,
)


def logits_only(processor: Any) -> bool:
    """Whether a processor reads nothing but the logits (an exact type: a subclass may do more)."""
    return type(processor) in LOGITS_ONLY


class _RowPrefixConstraint:
    """Calls a prefix-constrained processor with the row's index in the user's batch."""

    def __init__(self, processor: Any, row: int) -> None:
        self.function, self.row = processor._prefix_allowed_tokens_fn, row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = self.function(self.row, input_ids[0])
        if len(allowed) == 0:
            raise ValueError(
                f"`prefix_allowed_tokens_fn` returned an empty list for batch ID {self.row}: the constraint is "
                "unsatisfiable."
            )
        mask = torch.full_like(scores, float("-inf"))
        mask[:, allowed] = 0
        return scores + mask


def row_processors(
    given: LogitsProcessorList, row: int, rows: int, padding: int, config: GenerationConfig
) -> LogitsProcessorList:
    """The processors for one row, which is handed its own ids without padding.

    Args:
        given: Processors made for the whole left-padded batch.
        row: Index of the row.
        rows: Rows of the batch.
        padding: Padding tokens left of this row, by which lengths counted on the padded batch shrink.
        config: The call's generation config.

    Raises:
        ValueError: A processor keeps state for the batch as a whole and cannot be split by row.
    """
    result = LogitsProcessorList()
    for processor in given:
        if rows > 1 and isinstance(processor, _BATCHED_STATE):
            raise ValueError(
                f"{type(processor).__name__} (guidance_scale or an encoder_* penalty) works on a batch as a whole: "
                f"with assistant_model pass one prompt at a time instead of {rows}."
            )
        if isinstance(processor, processors.PrefixConstrainedLogitsProcessor):
            result.append(_RowPrefixConstraint(processor, row))
            continue
        if rows > 1 and not logits_only(processor):
            processor = copy.deepcopy(processor)
        result.append(_shift(processor, row, padding, config))
    return result


def _shift(processor: Any, row: int, padding: int, config: GenerationConfig) -> Any:
    """The processor with lengths that leave out the padding; a copy, since the given one may be the user's."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor):  # one number a row, which counts the padding
        processor = copy.copy(processor)
        processor.prompt_ignore_length = int(ignored[row])
    names = ["prompt_length_to_skip", "begin_index", "regulation_start", "prompt_ignore_length"]
    if isinstance(processor, processors.MinLengthLogitsProcessor) and config.min_new_tokens is not None:
        names.append("min_length")
    if isinstance(processor, processors.ForcedEOSTokenLogitsProcessor):
        names.append("max_length")
    lengths = {name: getattr(processor, name, None) for name in names}
    lengths = {name: value - padding for name, value in lengths.items() if isinstance(value, int)}
    if lengths and padding:
        processor = copy.copy(processor)
        vars(processor).update(lengths)
    return processor


class RowStops:
    """When a row ends: its budget of tokens, EOS, and every other criterion, asked after each committed token."""

    def __init__(self, given: StoppingCriteriaList, budget: int, rows: int) -> None:
        self.budget = max(1, budget)
        self.eos: set[int] = set()
        self.others = StoppingCriteriaList()
        for criterion in given:
            if type(criterion) is EosTokenCriteria:
                self.eos.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self.others.append(criterion)
        self.rows = rows

    def cut(self, ids: torch.Tensor, new: list[int], emitted: int, scores: Any) -> tuple[list[int], bool]:
        """The part of `new` that is emitted, and whether the row ends with it.

        Args:
            ids: `[length]`, what the row holds before `new`.
            new: Tokens about to be committed.
            emitted: New tokens the row has already.
            scores: The row's scores so far and those of `new`, for criteria that read them; `None` if not kept.
        """
        kept = ids
        for place, token in enumerate(new):
            done = token in self.eos or emitted + place + 1 >= self.budget
            if self.others:
                kept = torch.cat([kept, kept.new_tensor([token])])
                # All are asked, as transformers does: a criterion may count its calls.
                seen = None if scores is None else tuple(score[None] for score in scores[: emitted + place + 1])
                done |= bool(self.others(kept[None], seen)[0])
            if done:
                return new[: place + 1], True
        return new, False
