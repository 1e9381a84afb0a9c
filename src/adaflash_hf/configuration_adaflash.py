"""Configuration of AdaFlash drafters."""

# No postponed annotations here: `strict` checks the types of fields only where it gets them as types.
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .published_layouts import is_published_layout, normalize_published_config

LENGTH_HEADS = ("ratio", "survival")
LAYER_TYPES = ("full_attention", "sliding_attention")


def default_target_layer_ids(num_target_layers: int, num_taps: int = 5) -> list[int]:
    """Spreads `num_taps` taps over a target: `round(1 + i * (N - 4) / (n - 1))`, as published DFlash drafters do.

    Args:
        num_target_layers: Number of decoder layers N of the target.
        num_taps: Number of taps n wanted.

    Returns:
        Increasing layer ids in `[0, N - 1]`; fewer than `num_taps` on a target too small for that many.
    """
    if num_taps == 1:
        return [num_target_layers // 2]
    ids = (round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    return sorted({min(max(layer_id, 0), num_target_layers - 1) for layer_id in ids})


@strict
class AdaFlashConfig(PreTrainedConfig):
    """Configuration of an [`AdaFlashDraftModel`].

    The fields are flat, as transformers' own DFlash generation wants them; the nested `dflash_config` of published
    drafters is read by `from_pretrained` and shown in this form.

    Args:
        vocab_size: Rows of the *target's* token embedding.
        hidden_size: Width of the drafter; equals the target's, whose embedding and head it shares.
        intermediate_size: Width of the MLPs.
        num_hidden_layers: Draft layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key/value heads.
        head_dim: Width of a head.
        hidden_act: Activation of the MLPs.
        rms_norm_eps: Epsilon of the norms.
        rope_parameters: The drafter's own RoPE (`{"rope_type", "rope_theta", ...}`).
        max_position_embeddings: Longest position the drafter is made for.
        attention_bias: Whether the attention projections have biases.
        attention_dropout: Dropout on attention probabilities in training.
        initializer_range: Standard deviation of fresh weights.
        layer_types: `"full_attention"` or `"sliding_attention"` for each draft layer.
        sliding_window: Window of the sliding layers, current token included.
        causal_layers: For each draft layer, whether a slot sees only the slots before it (bidirectional if `False`).
        block_size: Slots of a block: the anchor and `block_size - 1` drafted tokens.
        mask_token_id: Id of the target's vocabulary that fills the drafted slots; `None` for a learned
            `mask_embedding`.
        target_layer_ids: Layers of the target whose *outputs* are the context features.
        num_target_layers: Decoder layers of the target.
        normalize_taps: Whether each tap of each token is divided by its RMS before `fc`.
        draft_vocab_size: How many token ids the drafter predicts (`draft_token_ids` in the weights says which);
            `None` for the whole vocabulary.
        length_heads: Trained length heads the checkpoint has: any of `"ratio"` and `"survival"`.
        length_head_dim: Width of the heads' hidden layers.
        survival_calibration: `{"greedy" or "sampling": {"scale": [...], "bias": [...], "confidence": [...]}}`, one
            number a drafted slot, applied to the survival head's logits where they are read (see
            `generation.length_policy.head_survival`); `"confidence"` may be missing.
        final_logit_softcapping: Soft cap of the draft logits (`None`: none).
        logit_scale: Factor on the draft logits, before the soft cap.

    Raises:
        ValueError: A field contradicts another or lies outside its range; the message names both.
    """

    model_type = "adaflash"
    default_theta = 10000.0
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    max_position_embeddings: int = 40960
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    initializer_range: float = 0.02
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    causal_layers: list[bool] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    normalize_taps: bool = False
    draft_vocab_size: int | None = None
    length_heads: list[str] | None = None
    length_head_dim: int = 256
    survival_calibration: dict | None = None
    final_logit_softcapping: float | int | None = None
    logit_scale: float | int = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.causal_layers is None:
            self.causal_layers = [False] * self.num_hidden_layers
        if self.target_layer_ids is None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers or 36)
        if self.length_heads is None:
            self.length_heads = []
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Checks every field against the others.

        Raises:
            ValueError: With the field, its value and what is accepted.
        """
        _require(self.block_size >= 2, "block_size", self.block_size, "at least 2 (the anchor and one drafted token)")
        _require(self.hidden_size >= 1, "hidden_size", self.hidden_size, "a positive number")
        _require(self.num_hidden_layers >= 1, "num_hidden_layers", self.num_hidden_layers, "at least 1")
        _require(
            self.num_key_value_heads >= 1 and self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            self.num_key_value_heads,
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )
        _require(self.head_dim >= 2 and self.head_dim % 2 == 0, "head_dim", self.head_dim, "a positive even number")
        for name in ("layer_types", "causal_layers"):
            value = getattr(self, name)
            _require(len(value) == self.num_hidden_layers, name, value, f"{self.num_hidden_layers} entries")
        for kind in self.layer_types:
            _require(kind in LAYER_TYPES, "layer_types", self.layer_types, f"entries of {list(LAYER_TYPES)}")
        if "sliding_attention" in self.layer_types:
            _require(
                self.sliding_window is not None and self.sliding_window > 0,
                "sliding_window",
                self.sliding_window,
                "a positive number, since layer_types names sliding layers",
            )
        if self.mask_token_id is not None:
            _require(
                0 <= self.mask_token_id < self.vocab_size,
                "mask_token_id",
                self.mask_token_id,
                f"an id in [0, {self.vocab_size - 1}] (vocab_size={self.vocab_size}), or None for a learned embedding",
            )
        ids, limit = self.target_layer_ids, self.num_target_layers
        _require(len(ids) > 0, "target_layer_ids", ids, "at least one layer id")
        for layer_id in ids:
            _require(
                layer_id >= 0 and (limit is None or layer_id < limit),
                "target_layer_ids",
                ids,
                "non-negative ids" if limit is None else f"ids in [0, {limit - 1}] (num_target_layers={limit})",
            )
        _require(len(set(ids)) == len(ids), "target_layer_ids", ids, "distinct ids")
        if self.draft_vocab_size is not None:
            _require(
                0 < self.draft_vocab_size <= self.vocab_size,
                "draft_vocab_size",
                self.draft_vocab_size,
                f"a number in [1, {self.vocab_size}] (vocab_size={self.vocab_size}), or None for all",
            )
        for head in self.length_heads:
            _require(head in LENGTH_HEADS, "length_heads", self.length_heads, f"entries of {list(LENGTH_HEADS)}")
        if self.survival_calibration is not None:
            _check_calibration(self.survival_calibration, self.block_size - 1)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "AdaFlashConfig":
        """Builds the configuration from a dictionary in this package's form or in a published drafter's."""
        if is_published_layout(config_dict):
            config_dict = normalize_published_config(config_dict)
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def _get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        # Here rather than in `from_dict` alone: transformers warns about a foreign `model_type` in between.
        config_dict, kwargs = super()._get_config_dict(*args, **kwargs)
        if config_dict is not None and is_published_layout(config_dict):
            config_dict = normalize_published_config(config_dict)
        return config_dict, kwargs


def _require(condition: bool, name: str, value: Any, accepted: str) -> None:
    if not condition:
        raise ValueError(f"AdaFlashConfig: {name}={value!r} is not valid: expected {accepted}.")


def _check_calibration(calibration: dict, slots: int) -> None:
    for mode, fit in calibration.items():
        _require(mode in ("greedy", "sampling"), "survival_calibration", mode, "the keys 'greedy' and 'sampling'")
        names = {"scale", "bias", "confidence"}
        _require(
            isinstance(fit, dict) and {"scale", "bias"} <= set(fit) <= names,
            f"survival_calibration[{mode!r}]",
            fit,
            "a dictionary with 'scale' and 'bias', and 'confidence' or not",
        )
        for name, values in fit.items():
            _require(
                isinstance(values, list) and len(values) == slots,
                f"survival_calibration[{mode!r}][{name!r}]",
                values,
                f"a list of {slots} numbers, one a drafted slot",
            )
