"""The AdaFlash drafter: a DFlash block-diffusion network (arXiv 2602.06036) and its length heads (arXiv 2607.19223)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import ModelOutput, logging

from .configuration_adaflash import AdaFlashConfig
from .draft_settings import default_generation_config, load_generation_config, ratio_draft_length, read_draft_settings
from .new_drafter import build_config, initialize_from_target
from .published_layouts import PUBLISHED_KEY_MAPPING, layout_name

logger = logging.get_logger(__name__)


@dataclass
class AdaFlashDraftOutput(ModelOutput):
    """What [`AdaFlashDraftModel`] returns.

    Args:
        last_hidden_state: `[batch, slots, hidden]`, the final normed states; slot k predicts the token *at* slot k.
        length_ratio: `[batch]` (`[batch, blocks]` for many blocks), the ratio head's
            (accepted + 1) / block_size; `None` without that head.
        survival_logits: `[batch, block_size - 1]` (`[batch, blocks, block_size - 1]`), the survival head's logits of
            P(slot k accepted | the slots before it accepted), uncalibrated; `None` without that head.
        cache: The cache that was passed, holding the new context.
    """

    last_hidden_state: torch.FloatTensor | None = None
    length_ratio: torch.FloatTensor | None = None
    survival_logits: torch.FloatTensor | None = None
    cache: Any | None = None


def _rotate(states: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = embeddings
    return states * cos.unsqueeze(1) + rotate_half(states) * sin.unsqueeze(1)


class AdaFlashAttention(nn.Module):
    """Attention whose queries come from the block and whose keys and values come from context and block."""

    def __init__(self, config: AdaFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = config.causal_layers[layer_idx]
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _keys_values(self, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        shape = (*states.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(states).view(shape)).transpose(1, 2)
        return _rotate(keys, rotary), self.v_proj(states).view(shape).transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        block_rotary: tuple[torch.Tensor, torch.Tensor],
        context_rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[batch, slots, hidden]` and context `[batch, new, hidden]` -> `[batch, slots, hidden]`, weights."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries = _rotate(self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2), block_rotary)
        block_keys, block_values = self._keys_values(hidden_states, block_rotary)
        keys, values = self._keys_values(context, context_rotary)
        if hasattr(cache, "update_context"):
            keys, values = cache.update_context(keys, values, self.layer_idx)
        keys, values = torch.cat([keys, block_keys], dim=2), torch.cat([values, block_values], dim=2)
        if isinstance(cache, Cache) and not hasattr(cache, "update_context"):
            keys, values = cache.update(keys, values, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


class AdaFlashDecoderLayer(GradientCheckpointingLayer):
    """A pre-norm layer over the block; the context enters its attention as it is, without norm or MLP."""

    def __init__(self, config: AdaFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = AdaFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`[batch, slots, hidden]` -> the same shape; the other arguments are [`AdaFlashAttention`]'s."""
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), *args, **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class RatioHead(nn.Module):
    """AdaFlash's length head: mean and last slot of a block -> expected (accepted + 1) / block_size."""

    def __init__(self, config: AdaFlashConfig) -> None:
        super().__init__()
        self.down = nn.Linear(2 * config.hidden_size, config.length_head_dim)
        self.res = nn.ModuleList([nn.Linear(config.length_head_dim, config.length_head_dim)])
        self.out = nn.Linear(config.length_head_dim, 1)

    def forward(self, blocks: torch.Tensor) -> torch.Tensor:
        """`[..., slots, hidden]` -> `[...]` in (0, 1)."""
        hidden = nn.functional.silu(self.down(torch.cat([blocks.mean(-2), blocks[..., -1, :]], dim=-1)))
        for layer in self.res:
            hidden = hidden + nn.functional.silu(layer(hidden))
        return self.out(hidden).squeeze(-1).sigmoid()


class SurvivalHead(nn.Module):
    """One logit a drafted slot: P(slot k accepted | the slots before it accepted)."""

    def __init__(self, config: AdaFlashConfig) -> None:
        super().__init__()
        self.down = nn.Linear(2 * config.hidden_size, config.length_head_dim)
        self.slot_bias = nn.Parameter(torch.zeros(config.block_size - 1, config.length_head_dim))
        self.res = nn.ModuleList([nn.Linear(config.length_head_dim, config.length_head_dim)])
        self.out = nn.Linear(config.length_head_dim, 1)

    def forward(self, blocks: torch.Tensor) -> torch.Tensor:
        """`[..., slots, hidden]` -> `[..., slots - 1]` logits."""
        drafted = blocks[..., 1:, :]
        inputs = torch.cat([drafted, blocks.mean(-2, keepdim=True).expand_as(drafted)], dim=-1)
        hidden = nn.functional.silu(self.down(inputs) + self.slot_bias[: drafted.shape[-2]])
        for layer in self.res:
            hidden = hidden + nn.functional.silu(layer(hidden))
        return self.out(hidden).squeeze(-1)


class AdaFlashPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by AdaFlash models."""

    config_class = AdaFlashConfig
    config: AdaFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AdaFlashDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": AdaFlashDecoderLayer, "attentions": AdaFlashAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SurvivalHead):
            init.zeros_(module.slot_bias)
        elif isinstance(module, AdaFlashDraftModel):
            if module.mask_embedding is not None:
                init.normal_(module.mask_embedding, mean=0.0, std=self.config.initializer_range)
            if module.draft_token_ids is not None:
                init.copy_(module.draft_token_ids, torch.arange(self.config.draft_vocab_size))

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *model_args: Any,
        output_loading_info: bool = False,
        key_mapping: dict[str, str] | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Loads a drafter of this package, or a published one (z-lab DFlash, official AdaFlash, transformers').

        Args:
            pretrained_model_name_or_path: A folder or Hub id.
            output_loading_info: Also returns transformers' dictionary of loading information.
            key_mapping: Regular expressions that rename tensors, tried after the published layouts' names.
            generation_config: Used instead of the repository's `generation_config.json`.
            kwargs: As for `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: The checkpoint is another kind of drafter, or its tensors do not fit the network: missing,
                unexpected or wrongly shaped ones are listed. Nothing is ever left at random values.
        """
        model, info = super().from_pretrained(
            pretrained_model_name_or_path,
            *model_args,
            output_loading_info=True,
            key_mapping={**PUBLISHED_KEY_MAPPING, **(key_mapping or {})},
            ignore_mismatched_sizes=True,
            **kwargs,
        )
        download = {k: v for k, v in kwargs.items() if k in _DOWNLOAD_ARGUMENTS and v is not None}
        _refuse_unfit_tensors(pretrained_model_name_or_path, model.config, info, download)
        # Kept by transformers to write the names back as they were read; what we save has our names.
        model._weight_conversions = None
        model.generation_config = generation_config or load_generation_config(pretrained_model_name_or_path, **download)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Writes weights, configuration and, unlike transformers for non-generating models, the generation config."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True) and self.generation_config is not None:
            self.generation_config.save_pretrained(save_directory)


_DOWNLOAD_ARGUMENTS = "cache_dir force_download proxies local_files_only token revision subfolder _commit_hash".split()


def _refuse_unfit_tensors(
    source: str | os.PathLike, config: AdaFlashConfig, info: dict[str, Any], download: dict[str, Any]
) -> None:
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    mismatched = [
        f"{name}: the checkpoint has {tuple(found)}, the configuration wants {tuple(wanted)}"
        for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    if missing or unexpected or mismatched:
        layout = layout_name(PreTrainedConfig.get_config_dict(source, **download)[0])
        raise ValueError(
            f"The tensors of {source} do not fit its configuration ({layout} layout, {config.num_hidden_layers} draft "
            f"layers, hidden {config.hidden_size}, {len(config.target_layer_ids)} taps, length heads "
            f"{config.length_heads}), so nothing was loaded.\n  missing: {missing or 'none'}\n  unexpected: "
            f"{unexpected or 'none'}\n  wrong shape: {mismatched or 'none'}"
        )


class AdaFlashDraftModel(AdaFlashPreTrainedModel):
    """A block-diffusion drafter for one target.

    One forward reads the target's context features of newly committed tokens and a block (the anchor token's embedding
    followed by mask embeddings) and returns, at slot k, the state that predicts the token at slot k. Embedding and
    head are the target's and are never part of this model.

    Use it as `target.generate(**inputs, assistant_model=drafter)`.
    """

    def __init__(self, config: AdaFlashConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([AdaFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.ratio_head = RatioHead(config) if "ratio" in config.length_heads else None
        self.survival_head = SurvivalHead(config) if "survival" in config.length_heads else None
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size)) if config.mask_token_id is None else None
        token_ids = torch.arange(config.draft_vocab_size) if config.draft_vocab_size is not None else None
        self.register_buffer("draft_token_ids", token_ids, persistent=True)
        self.gradient_checkpointing = False
        self.generation_config = default_generation_config()
        self.last_draft_stats: Any = None
        self.post_init()

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        tokenizer: Any = None,
        num_hidden_layers: int | None = None,
        block_size: int = 16,
        draft_token_ids: Sequence[int] | torch.Tensor | None = None,
        length_heads: Sequence[str] = ("ratio", "survival"),
        **overrides: Any,
    ) -> AdaFlashDraftModel:
        """Makes a new, untrained drafter shaped for `target`, in the target's dtype and on its device.

        Args:
            target: A decoder with at least two layers.
            tokenizer: The target's tokenizer; with it an unused token of the vocabulary becomes the mask token where
                there is one. Without it, or where there is none, a `mask_embedding` is learned.
            num_hidden_layers: Draft layers, by default 5 or as many as the target has, if fewer.
            block_size: Slots of a block, the anchor included.
            draft_token_ids: Token ids the drafter may predict, most frequent first (default: the whole vocabulary).
            length_heads: Length heads to create.
            overrides: Any other field of [`AdaFlashConfig`].

        Raises:
            ValueError: The target is not a decoder of two layers or more, or an override is not valid.
        """
        config = build_config(
            target,
            tokenizer=tokenizer,
            num_hidden_layers=num_hidden_layers,
            block_size=block_size,
            draft_token_ids=draft_token_ids,
            length_heads=length_heads,
            **overrides,
        )
        model = cls(config)
        initialize_from_target(model, target, draft_token_ids)
        return model

    def add_length_heads(self, names: Sequence[str] = ("ratio", "survival")) -> None:
        """Gives a drafter that was published without them new, untrained length heads; those it has stay as they are.

        Train them with `OPDConfig(train_only="length_head")` before a policy relies on them.

        Args:
            names: Any of `"ratio"` (AdaFlash, 2607.19223) and `"survival"`.

        Raises:
            ValueError: There is no such head.
        """
        classes = {"ratio": RatioHead, "survival": SurvivalHead}
        unknown = [name for name in names if name not in classes]
        if unknown:
            raise ValueError(f"names={list(names)} is not valid: expected any of {list(classes)}.")
        for name in names:
            if name not in self.config.length_heads:
                head = classes[name](self.config).to(device=self.device, dtype=self.dtype)
                head.apply(self._init_weights)
                setattr(self, f"{name}_head", head.train(self.training))
        self.config.length_heads = [name for name in classes if name in {*self.config.length_heads, *names}]

    def fuse_context(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """Target states `[..., taps * hidden]` -> the fused context `[..., hidden]` every draft layer reads."""
        if self.config.normalize_taps:
            taps = context_hidden_states.unflatten(-1, (len(self.config.target_layer_ids), self.config.hidden_size))
            scale = taps.float().pow(2).mean(-1, keepdim=True).add(self.config.rms_norm_eps).rsqrt()
            context_hidden_states = (taps * scale.to(taps.dtype)).flatten(-2)
        return self.hidden_norm(self.fc(context_hidden_states))

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        context_position_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> AdaFlashDraftOutput:
        """Denoises one block a row (or, in training, several blocks a row) in one pass.

        Args:
            noise_embeds: `[batch, slots, hidden]`, the anchor's embedding and the mask embeddings. `slots` is one
                block (at most `block_size`), or a multiple of `block_size` for several blocks.
            context_hidden_states: `[batch, new, taps * hidden]`, the target's states at `target_layer_ids` of the
                tokens committed since the last call, without the anchor.
            attention_mask: `[batch, keys]` with 0 for padding, `keys` counting cached, new context and block; or a
                boolean `[batch, 1, slots, keys]` saying which slot may see which key. Windows and causality of the
                draft layers are added to it.
            position_ids: `[batch, new + slots]` (or `[batch, slots]` beside `context_position_ids`); by default
                counted from the cache's length.
            cache: A `DFlashCache` of transformers, which receives context and block as its contract says; or a cache
                with `update_context` (this package's), which receives the context only. `past_key_values` is its
                name before transformers 5.24.
            context_position_ids: `[batch or 1, new]` positions of the context, where `position_ids` has the block's.

        Returns:
            [`AdaFlashDraftOutput`]. Under transformers' own DFlash generation with the `"ratio"` policy the block is
            cut to the slots worth verifying.
        """
        cache = past_key_values if cache is None else cache
        slots, new = noise_embeds.shape[1], context_hidden_states.shape[1]
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past, past + new + slots, device=noise_embeds.device)[None]
        if context_position_ids is None:
            context_position_ids, position_ids = position_ids[:, :new], position_ids[:, new:]
        context = self.fuse_context(context_hidden_states)
        block_rotary = self.rotary_emb(noise_embeds, position_ids)
        context_rotary = self.rotary_emb(noise_embeds, context_position_ids)
        masks = self._attention_masks(noise_embeds, attention_mask, context_position_ids, position_ids, cache)

        hidden_states = noise_embeds
        for layer, kind in zip(self.layers, self._layer_kinds(), strict=True):
            hidden_states = layer(
                hidden_states, context, block_rotary, context_rotary, attention_mask=masks[kind], cache=cache, **kwargs
            )
        hidden_states = self.norm(hidden_states)
        # Detached: a length head learns from the drafter and never moves it.
        blocks = hidden_states.detach()
        if slots > self.config.block_size:
            blocks = blocks.unflatten(1, (-1, self.config.block_size))
        ratio = self.ratio_head(blocks) if self.ratio_head is not None else None
        survival = self.survival_head(blocks) if self.survival_head is not None else None
        if type(cache).__name__ == "DFlashCache":
            hidden_states = self._cut_to_length(hidden_states, ratio)
        return AdaFlashDraftOutput(
            last_hidden_state=hidden_states, length_ratio=ratio, survival_logits=survival, cache=cache
        )

    def _cut_to_length(self, hidden_states: torch.Tensor, ratio: torch.Tensor | None) -> torch.Tensor:
        """Transformers' own loop drafts one token for every slot it is given after the first."""
        settings = read_draft_settings(self.generation_config)
        length = self.config.block_size - 1
        if settings.length_policy == "ratio" and ratio is not None:
            length = int(ratio_draft_length(ratio, self.config.block_size, settings.length_scale)[0])
        elif settings.length_policy != "fixed":
            logger.warning_once(
                f"Transformers' own DFlash loop cannot run the length policy {settings.length_policy!r}: drafting fixed "
                "blocks. Leave out speculation_type='dflash' to use the policy."
            )
        # Its sampling step cannot handle an empty draft, hence at least one token.
        return hidden_states[:, : 1 + max(1, min(length, settings.cap(self.config.block_size)))]

    def _layer_kinds(self) -> list[tuple[str, bool]]:
        return list(zip(self.config.layer_types, self.config.causal_layers, strict=True))

    def _attention_masks(
        self,
        noise_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        context_positions: torch.Tensor,
        block_positions: torch.Tensor,
        cache: Any,
    ) -> dict[tuple[str, bool], Any]:
        """One mask for each kind of draft layer, in the form the attention implementation wants."""
        if isinstance(cache, Cache) and not hasattr(cache, "update_context"):
            # Sliding layers of this cache drop old keys; transformers' own functions know which are left.
            makers = {
                ("full_attention", False): create_bidirectional_mask,
                ("full_attention", True): create_causal_mask,
                ("sliding_attention", False): create_bidirectional_sliding_window_mask,
                ("sliding_attention", True): create_sliding_window_causal_mask,
            }
            name = _cache_argument()
            arguments = dict(config=self.config, inputs_embeds=noise_embeds, attention_mask=attention_mask)
            return {kind: makers[kind](**arguments, **{name: cache}) for kind in set(self._layer_kinds())}
        if hasattr(cache, "context_positions"):
            context_positions, valid = cache.context_positions(context_positions)
            if valid is not None:
                valid = torch.cat([valid, valid.new_ones(valid.shape[0], block_positions.shape[1])], dim=1)
        else:
            valid = None
        implementation = self.config._attn_implementation or "eager"
        if "flash" in implementation:
            if attention_mask is not None and attention_mask.ndim != 2:
                raise ValueError(
                    f"attn_implementation={implementation!r} takes no [batch, 1, slots, keys] mask: use 'sdpa', 'eager' "
                    "or 'flex_attention' for several blocks a row."
                )
            return dict.fromkeys(self._layer_kinds(), attention_mask if valid is None else valid)
        base = attention_mask if valid is None else valid
        if base is not None:
            base = (base if base.ndim == 4 else base[:, None, None, :]).bool()
        rows = max(context_positions.shape[0], block_positions.shape[0])
        keys = torch.cat([context_positions.expand(rows, -1), block_positions.expand(rows, -1)], dim=1)
        return {
            kind: _format_mask(self._visible(base, block_positions, keys, *kind), implementation, noise_embeds)
            for kind in set(self._layer_kinds())
        }

    def _visible(
        self, base: torch.Tensor | None, queries: torch.Tensor, keys: torch.Tensor, kind: str, causal: bool
    ) -> torch.Tensor | None:
        """Adds window and causality, by absolute position, to what `base` allows; `None` allows everything.

        The window follows transformers' masks: the current token counts in a causal layer (distance < window), and
        distances up to the window itself are seen in a bidirectional one.
        """
        if kind == "full_attention" and not causal:
            return base
        distance = queries[:, None, :, None] - keys[:, None, None, :]
        visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if kind == "sliding_attention":
            window = self.config.sliding_window
            visible = visible & (distance < window if causal else distance.abs() <= window)
        return visible if base is None else base & visible


def _format_mask(visible: torch.Tensor | None, implementation: str, like: torch.Tensor) -> Any:
    """A boolean mask as `implementation` wants it; eager attention *adds* its mask, so a boolean never reaches it."""
    if visible is None or implementation == "sdpa":
        return visible
    if implementation == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        # The attention asks for every row and slot by its number, also where one serves them all.
        visible = visible.expand(like.shape[0], -1, like.shape[1], -1)
        rows, _, queries, keys = visible.shape
        return create_block_mask(
            lambda row, _, query, key: visible[row, 0, query, key], rows, None, queries, keys, device=like.device
        )
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill(
        ~visible, torch.finfo(like.dtype).min
    )


def _cache_argument() -> str:
    """`cache` from transformers 5.24, `past_key_values` before."""
    code = create_causal_mask.__wrapped__.__code__ if hasattr(create_causal_mask, "__wrapped__") else None
    names = (code or create_causal_mask.__code__).co_varnames
    return "cache" if "cache" in names else "past_key_values"
