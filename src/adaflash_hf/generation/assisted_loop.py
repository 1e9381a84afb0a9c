"""Decoding inside transformers' own assisted loop, one row after another, for calls that cannot be packed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .._compat import cache_argument, pop_cache
from ..draft_settings import DraftSettings
from ..modeling_adaflash import AdaFlashDraftModel
from .candidate_generator import AdaFlashCandidateGenerator, frequency_switch
from .packed_decoding import by_step
from .row_inputs import row_processors
from .state_rollback import RollbackCache, continues_with_several_tokens, holds_tokens, keeps_a_state
from .stats import DraftStats

# The generator that transformers' loop is to be given; one a thread.
generator_in_use: ContextVar[AdaFlashCandidateGenerator | None] = ContextVar(
    "adaflash_candidate_generator", default=None
)
_ROLLED_STATE = (
    processors.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    processors.SynthIDTextWatermarkLogitsProcessor,
)
# `[rows, length]`, or `[sections, rows, length]` for positions of several dimensions.
_BY_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def refuse_in_assisted_loop(
    target: PreTrainedModel,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    model_kwargs: dict[str, Any],
    config: GenerationConfig,
    obstacle: str,
) -> None:
    """Refuses what transformers' own assisted loop gets silently wrong.

    Raises:
        ValueError: Naming the argument, and why the prompt is not decoded by packed decoding.
    """

    def refuse(what: str) -> None:
        raise ValueError(
            f"{what} cannot be used with assistant_model here: {obstacle}, so the prompt is decoded by transformers' own "
            "assisted loop, which would give other tokens than plain generate(). Leave out one of the two."
        )

    for criterion in stopping_criteria:
        if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria):
            refuse(f"The stopping criterion {type(criterion).__name__}")
    for processor in logits_processor:
        if isinstance(processor, _ROLLED_STATE):
            refuse(f"The stateful logits processor {type(processor).__name__}")
    cache = pop_cache(dict(model_kwargs))
    if cache is None:
        raise ValueError(
            f"assistant_model needs a key/value cache here ({obstacle}), and this call has none: use_cache=False was "
            "passed, or the target keeps none. Leave out one of the two."
        )
    if keeps_a_state(target):
        if type(cache) is not DynamicCache:
            refuse(f"A cache of the kind {type(cache).__name__}")
        if not continues_with_several_tokens(target):
            raise ValueError(
                f"assistant_model cannot be used with target={type(target).__name__}, which keeps a recurrent state and "
                "reads several tokens at once otherwise than one by one, so that drafts cannot be checked. Leave out "
                "assistant_model."
            )
    if holds_tokens(cache):
        refuse("A cache that already holds tokens")
    if config.cache_implementation in ("static", "offloaded_static"):
        refuse(f"cache_implementation={config.cache_implementation!r}")
    if isinstance(cache, StaticCache):
        refuse("A static cache")
    if model_kwargs.get("inputs_embeds") is not None:
        refuse("inputs_embeds")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and bool((mask.sum(1) == 0).any()):
        row = int((mask.sum(1) == 0).nonzero()[0])
        raise ValueError(f"attention_mask leaves row {row} without tokens: every prompt needs at least one.")


class AssistedLoop:
    """Runs one `generate()` call through transformers' assisted loop, a row at a time; see [`decode`].

    Args:
        target: The model that verifies.
        drafter: Its drafter.
        settings: Policy and caps.
        generation_config: The call's.
        logits_processor: For the whole batch.
        stopping_criteria: For the whole batch; only EOS and a length (see [`refuse_in_assisted_loop`]).
        streamer: Gets committed tokens (one row only).
        loop: Transformers' own `_assisted_decoding`, unbound.
        loop_arguments: What else `generate()` passes it.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: AdaFlashDraftModel,
        settings: DraftSettings,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        streamer: Any,
        loop: Callable[..., Any],
        loop_arguments: dict[str, Any],
    ) -> None:
        self.target, self.drafter, self.settings, self.config = target, drafter, settings, generation_config
        self.processors, self.criteria, self.streamer = logits_processor, stopping_criteria, streamer
        self.loop, self.loop_arguments = loop, loop_arguments

    def decode(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> tuple[Any, DraftStats]:
        """Decodes every row to its end.

        Args:
            input_ids: `[rows, length]`.
            model_kwargs: As `generate()` prepared them.

        Returns:
            What `generate()` returns, and the statistics. The output for several rows holds no cache.

        Raises:
            ValueError: An argument cannot be split by row, or its result not be put together again.
        """
        rows = input_ids.shape[0]
        if rows == 1:
            return self._decode_row(
                input_ids, self.config, self.processors, self.criteria, self.loop_arguments, model_kwargs
            )
        if self.streamer is not None:
            raise ValueError(f"streamer works for one row, and the batch has {rows}.")
        if self.config.return_dict_in_generate:
            for name in ("output_attentions", "output_hidden_states"):
                if getattr(self.config, name):
                    raise ValueError(
                        f"{name}=True works for one row with assistant_model, and the batch has {rows}: pass one prompt at "
                        "a time, or leave out one of the two."
                    )
        texts, scores, logits, stats = [], [], [], None
        for row in range(rows):
            own_kwargs, padding = row_arguments(row, rows, model_kwargs)
            ids = input_ids[row : row + 1, padding:]
            config = copy.copy(self.config)
            config.max_length -= padding
            criteria = StoppingCriteriaList(
                MaxLengthCriteria(config.max_length) if type(criterion) is MaxLengthCriteria else criterion
                for criterion in self.criteria
            )
            chosen = row_processors(self.processors, row, rows, padding, self.config)
            arguments = self.loop_arguments | {"inputs_tensor": ids}
            switch = frequency_switch(self.target)
            if row and switch is not None and switch[0] == "dynamic":
                # Dynamic NTK remembers the longest position of earlier rows until it sees a short call.
                self.target(input_ids=ids[:, :1], use_cache=False)
            output, found = self._decode_row(ids, config, chosen, criteria, arguments, own_kwargs)
            texts.append(getattr(output, "sequences", output)[0, ids.shape[1] :])
            scores.append([step[0] for step in getattr(output, "scores", None) or ()])
            logits.append([step[0] for step in getattr(output, "logits", None) or ()])
            stats = found if stats is None else stats.merge(found)
        return self._together(input_ids, texts, scores, logits), stats

    def _decode_row(
        self,
        input_ids: torch.Tensor,
        config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        loop_arguments: dict[str, Any],
        model_kwargs: dict[str, Any],
    ) -> tuple[Any, DraftStats]:
        generator = AdaFlashCandidateGenerator(self.target, self.drafter, self.settings, config, logits_processor)
        token = generator_in_use.set(generator)
        with ExitStack() as stack:
            stack.callback(generator_in_use.reset, token)
            stack.enter_context(generator)
            if keeps_a_state(self.target):
                pop_cache(model_kwargs := dict(model_kwargs))
                model_kwargs[cache_argument(self.target)] = stack.enter_context(RollbackCache(self.target))
            output = self.loop(
                self.target,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=config,
                assistant_model=self.drafter,
                streamer=self.streamer,
                **loop_arguments,
                **model_kwargs,
            )
        return output, generator.stats

    def _together(
        self,
        input_ids: torch.Tensor,
        texts: list[torch.Tensor],
        scores: list[list[torch.Tensor]],
        logits: list[list[torch.Tensor]],
    ) -> Any:
        """The rows' new tokens, padded on the right, as `generate()` returns a batch."""
        longest = max(map(len, texts))
        pad = self.config._pad_token_tensor
        new = input_ids.new_full((len(texts), longest), int(pad) if pad is not None else 0)
        for row, text in enumerate(texts):
            new[row, : len(text)] = text
        sequences = torch.cat([input_ids, new], dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=by_step(scores, longest) if self.config.output_scores else None,
            logits=by_step(logits, longest) if self.config.output_logits else None,
        )


def row_arguments(row: int, rows: int, model_kwargs: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """What the target's forward takes, for one row of a batch.

    Args:
        row: Index of the row.
        rows: Rows of the batch.
        model_kwargs: As `generate()` prepared them, with an empty cache.

    Returns:
        The row's own arguments (a cache of its own), and how many padding tokens were left of its prompt and are gone. A
        mask with a hole, or with padding on the right, stays as it is.

    Raises:
        ValueError: An argument is a tensor of which it is unknown how it belongs to rows.
    """
    mask = model_kwargs.get("attention_mask")
    padding = 0
    if mask is not None:
        zeros = int(mask.shape[1] - mask[row].sum())
        padding = zeros if not bool(mask[row, :zeros].any()) else 0
    own: dict[str, Any] = {}
    for name, value in model_kwargs.items():
        if name in ("cache", "past_key_values"):
            own[name] = copy.deepcopy(value)
        elif isinstance(value, torch.Tensor) and value.ndim > 0 and name != "cache_position":
            if name not in _BY_TOKEN:
                raise ValueError(
                    f"{name} (shape {list(value.shape)}) cannot be split by row with assistant_model: pass one prompt at a "
                    f"time instead of {rows}."
                )
            shared = value.shape[-2] == 1  # positions may be given once for all rows
            own[name] = value[..., :, padding:] if shared else value[..., row : row + 1, padding:]
        else:
            own[name] = value[padding:] if name == "cache_position" and padding and value is not None else value
    return own, padding
