"""Shaping a new drafter for a target: the configuration, and the starting values of its weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .configuration_adaflash import AdaFlashConfig, default_target_layer_ids

if TYPE_CHECKING:
    from .modeling_adaflash import AdaFlashDraftModel

logger = logging.get_logger(__name__)

# Names of vocabulary entries that models reserve and never train on as text.
_UNUSED_TOKEN = re.compile(r"(unused|reserved|extra_\d|<\|?mask)", re.IGNORECASE)


def find_mask_token(tokenizer: Any, rows: int) -> int | None:
    """An id no text uses: the tokenizer's mask token, a reserved special token, or an embedding row beyond the tokens.

    Args:
        tokenizer: The target's tokenizer.
        rows: Rows of the target's embedding.

    Returns:
        The id, or `None` where the vocabulary has no unused entry.
    """
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is not None and mask < rows:
        return mask
    added = tokenizer.get_added_vocab()
    unused = sorted(index for token, index in added.items() if _UNUSED_TOKEN.search(token) and index < rows)
    if unused:
        return unused[0]
    return len(tokenizer) if len(tokenizer) < rows else None


def _draft_rope(text_config: Any) -> dict[str, Any]:
    """The target's RoPE base, with its scaling where the frequencies do not depend on the call's longest position."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type", "default")
    theta = rope.get("rope_theta") or getattr(text_config, "rope_theta", None) or 10000.0
    if kind in ("linear", "llama3", "yarn"):
        return {**rope, "rope_theta": theta}
    return {"rope_type": "default", "rope_theta": theta}


def _field(config: Any, name: str) -> Any:
    """A field of the target's config, `None` where it is missing or differs between layers."""
    try:
        return getattr(config, name, None)
    except Exception:  # heterogeneous configs refuse to answer for all layers at once
        return None


def build_config(
    target: PreTrainedModel,
    *,
    tokenizer: Any,
    num_hidden_layers: int | None,
    block_size: int,
    draft_token_ids: Sequence[int] | torch.Tensor | None,
    length_heads: Sequence[str],
    **overrides: Any,
) -> AdaFlashConfig:
    """The configuration behind [`AdaFlashDraftModel.from_target`]."""
    text = target.config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    if getattr(target.config, "is_encoder_decoder", False) or target.get_input_embeddings() is None:
        raise ValueError(f"target={type(target).__name__} is not a decoder-only language model.")
    if not isinstance(layers, int) or layers < 2:
        raise ValueError(f"target={type(target).__name__} has {layers} decoder layers: at least 2 are needed.")
    rows, hidden = target.get_input_embeddings().weight.shape
    heads = text.num_attention_heads
    head_dim = _field(text, "head_dim") or hidden // heads
    intermediate = _field(text, "intermediate_size")
    if not isinstance(intermediate, int):
        intermediate = 3 * hidden
    # MoE targets name the width of one expert; a drafter that narrow learns little.
    intermediate = max(intermediate, 2 * hidden)
    fields: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": min(5, layers) if num_hidden_layers is None else num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _field(text, "num_key_value_heads") or heads,
        "head_dim": head_dim + head_dim % 2,
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
        "rope_parameters": _draft_rope(text),
        "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 40960,
        "block_size": block_size,
        "target_layer_ids": default_target_layer_ids(layers),
        "num_target_layers": layers,
        "normalize_taps": True,
        "length_heads": list(length_heads),
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
        "logit_scale": _logit_scale(text),
        "dtype": target.dtype,
    }
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields[name] = getattr(text, name, None)
    if draft_token_ids is not None:
        fields["draft_vocab_size"] = len(draft_token_ids)
    if tokenizer is not None and "mask_token_id" not in overrides:
        fields["mask_token_id"] = find_mask_token(tokenizer, rows)
        if fields["mask_token_id"] is None:
            logger.info("The target's vocabulary has no unused token: the drafter learns a mask embedding.")
    unknown = sorted(overrides.keys() - set(AdaFlashConfig.__dataclass_fields__))
    if unknown:
        raise ValueError(f"from_target: {unknown} are not fields of AdaFlashConfig.")
    return AdaFlashConfig(**{**fields, **overrides})


def _logit_scale(text_config: Any) -> float:
    if getattr(text_config, "logits_scaling", None):
        return 1.0 / text_config.logits_scaling  # Granite divides
    return float(getattr(text_config, "logit_scale", None) or 1.0)  # Cohere multiplies


@torch.no_grad()
def initialize_from_target(
    model: AdaFlashDraftModel, target: PreTrainedModel, draft_token_ids: Sequence[int] | torch.Tensor | None
) -> None:
    """Starting values that depend on the target: token list, mask embedding, and the scale of the final norm.

    A fresh drafter's logits should have unit scale; with the target's own final norm they start tens of nats too
    confident.
    """
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    if draft_token_ids is not None:
        ids = torch.as_tensor(draft_token_ids, dtype=torch.long).flatten().cpu()
        if ids.unique().numel() != ids.numel():
            raise ValueError("draft_token_ids holds an id more than once.")
        if ids.numel() == 0 or ids.min() < 0 or ids.max() >= model.config.vocab_size:
            raise ValueError(
                f"draft_token_ids must hold ids in [0, {model.config.vocab_size - 1}], got "
                f"{'none' if ids.numel() == 0 else f'{ids.min()} to {ids.max()}'}."
            )
        model.draft_token_ids.copy_(ids)
    if embedding.weight.is_meta:
        return  # nothing to read values from: only the drafter's shapes are wanted
    sample = torch.arange(0, model.config.vocab_size, max(1, model.config.vocab_size // 4096))
    if model.mask_embedding is not None:
        embedded = embedding(sample.to(embedding.weight.device)).float().cpu()
        model.mask_embedding.copy_(embedded.mean(0) + embedded.std() * torch.randn(embedded.shape[-1]) * 0.1)
    if head is not None:
        norms = head.weight[sample.to(head.weight.device)].float().norm(dim=-1).mean() * abs(model.config.logit_scale)
        model.norm.weight.fill_(1.0 / max(norms.item(), 1e-3))
    model.to(dtype=target.dtype, device=target.get_input_embeddings().weight.device)
