"""Where `generate(assistant_model=drafter)` is led to this package.

Importing the package wraps three methods of transformers' `GenerationMixin`, once. The wrappers do nothing for any
other assistant, and nothing for `speculation_type="dflash"`, which is transformers' own loop.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from .._compat import check_seams, pop_cache
from ..draft_settings import read_draft_settings
from ..modeling_adaflash import AdaFlashDraftModel
from .assisted_loop import AssistedLoop, generator_in_use, refuse_in_assisted_loop
from .compatibility import check_drafter_fits, check_target_kind
from .packed_attention import NotPackable
from .packed_decoding import PackedDecoder
from .state_rollback import keeps_a_state

logger = logging.get_logger(__name__)

_originals: dict[str, Any] = {}
# Arguments of a text-only decoder; anything else (images, encoder outputs) belongs to a target that is not packed.
_PLAIN_ARGUMENTS = {
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "inputs_embeds",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}
# What `RaggedCache.read_prefix` can read: keys and values as they are, not compressed or swapped out.
_READABLE_LAYERS = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer}


def as_drafter(assistant: Any) -> AdaFlashDraftModel | None:
    """The AdaFlash drafter behind an assistant (a PEFT model, a compiled one), or `None` for any other."""
    for _ in range(4):
        if assistant is None or isinstance(assistant, AdaFlashDraftModel):
            return assistant
        inner = getattr(assistant, "_orig_mod", None) or getattr(assistant, "module", None)
        if inner is None and hasattr(assistant, "get_base_model"):
            inner = assistant.get_base_model()
        assistant = inner
    return None


def packing_obstacle(target: PreTrainedModel, model_kwargs: dict[str, Any], config: GenerationConfig) -> str | None:
    """Why this call cannot use packed decoding, or `None` if it can."""
    text = target.config.get_text_config()
    name = type(target).__name__
    if keeps_a_state(target):
        return f"{name} keeps a recurrent state"
    if not getattr(target, "_supports_attention_backend", False):
        return f"{name} does not use transformers' attention interface"
    if getattr(text, "num_kv_shared_layers", None):
        return f"{name} shares keys and values between layers"
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        return f"{name} has layers of the kinds {sorted(kinds)}"
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("longrope", "dynamic"):
            return f"{name}'s RoPE ({parameters['rope_type']}) depends on the longest position of a call"
        if "mrope_section" in parameters:
            return f"{name} has multi-dimensional positions"
    # A vision model gets an empty dictionary of encoder outputs where the prompt has no image.
    given = [
        name for name, value in model_kwargs.items() if not (value is None or (isinstance(value, dict) and not value))
    ]
    extra = sorted(set(given) - _PLAIN_ARGUMENTS)
    if extra:
        return f"the call has the arguments {extra}"
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "output_attentions or output_hidden_states is asked for"
    cache = pop_cache(dict(model_kwargs))
    if cache is not None and int(cache.get_seq_length()) > 0:
        kinds = {type(layer) for layer in getattr(cache, "layers", [None])}
        if not kinds <= _READABLE_LAYERS:
            return f"the cache has layers of the kinds {sorted(kind.__name__ for kind in kinds)}"
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None and (mask.ndim != 2 or bool((mask.long().diff(dim=1) < 0).any())):
        return "attention_mask is not left padding"
    if mask is not None and bool((mask.sum(1) == 0).any()):
        return "attention_mask leaves a row without tokens"
    if positions is not None:
        if positions.ndim != 2:
            return f"{name} has multi-dimensional positions"
        width = positions.shape[1]
        if mask is None:
            usual = bool((positions.diff(dim=1) == 1).all())
        else:
            counted = (mask.long().cumsum(1) - 1)[:, -width:]
            usual = bool(((positions == counted) | (mask[:, -width:] == 0)).all())
        if not usual:
            return "position_ids are not counted from the first token"
    return None


def adaflash_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decodes with a drafter and without any patch: `generate(..., custom_generate=adaflash_generate, drafter=drafter)`.

    A callable `custom_generate` gets no streamer from transformers; use `assistant_model=drafter` to stream.

    Args:
        model: The target (filled in by `generate()`, as are the next four).
        input_ids: `[rows, length]`.
        logits_processor: Prepared processors.
        stopping_criteria: Prepared criteria.
        generation_config: Prepared configuration.
        drafter: The drafter.
        model_kwargs: What the target's forward takes.

    Returns:
        What `generate()` returns.

    Raises:
        ValueError: No drafter was passed, or it does not fit.
    """
    if as_drafter(drafter) is None:
        raise ValueError(
            f"custom_generate=adaflash_generate needs drafter=<AdaFlashDraftModel>, got {type(drafter).__name__}."
        )
    for name in ("synced_gpus", "streamer", "tokenizer"):
        model_kwargs.pop(name, None)
    _refuse_mode("drafter", generation_config.get_generation_mode(), generation_config)
    return _decode(
        model, input_ids, logits_processor, stopping_criteria, generation_config, drafter, None, {}, model_kwargs
    )


def _decode(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    assistant: Any,
    streamer: Any,
    loop_arguments: dict[str, Any],
    model_kwargs: dict[str, Any],
) -> Any:
    drafter = as_drafter(assistant)
    check_target_kind(target)
    check_drafter_fits(target, drafter)
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise ValueError(
            "assistant_ensemble_weight mixes the drafter's distribution into the output, which stays the target's here: "
            "leave it out."
        )
    settings = read_draft_settings(drafter.generation_config, config)
    rows = input_ids.shape[0]
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.shape[0] != rows:
        raise ValueError(
            f"attention_mask has {mask.shape[0]} rows, and the batch {rows}: pass one row for each prompt."
        )
    was_training = drafter.training
    drafter.eval()
    try:
        obstacle, output = packing_obstacle(target, model_kwargs, config), None
        if obstacle is None:
            if streamer is not None and rows > 1:
                raise ValueError(f"streamer works for one row, and the batch has {rows}.")
            decoder = PackedDecoder(target, drafter, settings, config, logits_processor, stopping_criteria, streamer)
            try:
                output, stats = decoder.decode(input_ids, dict(model_kwargs))
            except NotPackable as error:
                if decoder.begun:
                    raise RuntimeError(
                        f"{error}, which shows only after the prompt. Leave out assistant_model."
                    ) from error
                obstacle = str(error)
        if output is None:
            refuse_in_assisted_loop(target, logits_processor, stopping_criteria, model_kwargs, config, obstacle)
            logger.warning_once(
                f"Packed decoding is not used ({obstacle}); drafting inside transformers' own assisted loop"
                f"{', one row after another' if rows > 1 else ''}."
            )
            loop = _originals.get("_assisted_decoding", GenerationMixin._assisted_decoding)
            output, stats = AssistedLoop(
                target, drafter, settings, config, logits_processor, stopping_criteria, streamer, loop, loop_arguments
            ).decode(input_ids, model_kwargs)
    finally:
        drafter.train(was_training)
    drafter.last_draft_stats = stats
    if not isinstance(output, torch.Tensor):
        output.draft_stats = stats
    return output


def _refuse_mode(argument: str, mode: GenerationMode, config: GenerationConfig) -> None:
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION):
        raise ValueError(
            f"{argument} drafts for greedy decoding and sampling only, and this call asks for {mode.value} "
            f"(num_beams={config.num_beams}). Set num_beams=1 or leave out {argument}."
        )


def _refuse_in_dflash_loop(drafter: AdaFlashDraftModel) -> None:
    """Transformers' own DFlash loop applies the target's whole head and embeds a mask token id."""
    what = None
    if drafter.draft_token_ids is not None:
        what = f"draft_vocab_size={drafter.config.draft_vocab_size}, and that loop applies the target's whole head"
    elif drafter.config.mask_token_id is None:
        what = "a learned mask_embedding (mask_token_id=None), and that loop embeds a mask token id"
    if what is not None:
        raise ValueError(
            f"speculation_type='dflash' cannot run this drafter: it has {what}. Leave out speculation_type."
        )


def _wrap_validate(original: Any) -> Any:
    @functools.wraps(original)
    def validate(self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any) -> Any:
        drafter = as_drafter(generation_mode_kwargs.get("assistant_model"))
        if drafter is None:
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        if generation_config.speculation_type == "dflash":
            check_drafter_fits(self, drafter)
            _refuse_in_dflash_loop(drafter)
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        _refuse_mode("assistant_model", generation_mode, generation_config)
        for name, given in (
            ("prompt_lookup_num_tokens", generation_config.prompt_lookup_num_tokens),
            ("use_mtp", getattr(generation_config, "use_mtp", None)),
            ("assistant_early_exit", generation_config.assistant_early_exit),
            ("assistant_tokenizer", generation_mode_kwargs.get("assistant_tokenizer")),
        ):
            if given:
                raise ValueError(f"{name} is another way of drafting: leave it out, or leave out assistant_model.")
        check_target_kind(self)
        check_drafter_fits(self, drafter)
        read_draft_settings(drafter.generation_config, generation_config)
        return None

    return validate


def _wrap_assisted(original: Any) -> Any:
    @functools.wraps(original)
    def assisted(
        self: Any,
        input_ids: Any,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: Any = None,
        assistant_model: Any = None,
        assistant_tokenizer: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        loop_arguments = {"synced_gpus": synced_gpus, "inputs_tensor": inputs_tensor}
        if as_drafter(assistant_model) is None or generation_config.speculation_type == "dflash":
            return original(
                self,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=streamer,
                assistant_model=assistant_model,
                assistant_tokenizer=assistant_tokenizer,
                tokenizer=tokenizer,
                **loop_arguments,
                **model_kwargs,
            )
        return _decode(
            self, input_ids, logits_processor, stopping_criteria, generation_config, assistant_model, streamer,
            loop_arguments, model_kwargs,
        )  # fmt: skip

    return assisted


def _wrap_generator(original: Any) -> Any:
    @functools.wraps(original)
    def get_candidate_generator(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = generator_in_use.get()
        if ours is not None and kwargs.get("assistant_model") is ours.drafting.drafter:
            return ours
        return original(self, *args, **kwargs)

    return get_candidate_generator


def enable() -> None:
    """Wraps transformers' methods; done by importing the package, harmless when repeated.

    Raises:
        ImportError: The installed transformers is not supported.
    """
    if _originals:
        return
    check_seams()
    wrappers = {
        "_validate_generation_mode": _wrap_validate,
        "_assisted_decoding": _wrap_assisted,
        "_get_candidate_generator": _wrap_generator,
    }
    for name, wrap in wrappers.items():
        _originals[name] = getattr(GenerationMixin, name)
        setattr(GenerationMixin, name, wrap(_originals[name]))


def disable() -> None:
    """Restores transformers' own methods; `assistant_model=drafter` then fails as it does without this package."""
    for name, original in _originals.items():
        setattr(GenerationMixin, name, original)
    _originals.clear()
