"""Reading the configurations and tensor names of drafters that other projects publish.

Three layouts describe the same network under different names: z-lab DFlash (`fc`, `hidden_norm`, fields nested in
`dflash_config`, `model_type: "qwen3"`), official AdaFlash (the same with `thresh_head_two_model.*`), and the assistant
that transformers ships (`encoder.fc`, flat fields). Formats that describe *another* network are refused by name.
"""

from __future__ import annotations

import re
from typing import Any

# Published tensor name -> ours; tried in order on every key of a checkpoint.
PUBLISHED_KEY_MAPPING = {
    r"^thresh_head_two_model\.": "ratio_head.",
    r"^encoder\.fc\.": "fc.",
    r"^encoder\.output_norm_enc\.": "hidden_norm.",
}

_OWN_ARCHITECTURE = "AdaFlashDraftModel"
_PLAIN_ARCHITECTURES = ("DFlashDraftModel", "MuseGlimmerAssistantModel")
_BODY_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act rms_norm_eps max_position_embeddings attention_bias attention_dropout initializer_range "
    "bos_token_id eos_token_id pad_token_id num_target_layers dtype torch_dtype transformers_version name_or_path "
    "_name_or_path final_logit_softcapping"
).split()
# dflash_config fields that mean another network or another training convention, with what they stand for.
_FOREIGN_FIELDS = {
    "conv_kernel_size": "DFlash2 (dynamic convolutions and a candidate selector)",
    "selector_rank": "DFlash2 (dynamic convolutions and a candidate selector)",
    "markov_rank": "DSpark (a Markov head over the drafts)",
    "gru_hidden_dim": "Domino (a recurrent projector over the drafts)",
    "use_prob_head": "an AdaFlash research variant (per-slot probability head)",
    "use_thresh_head_subsequent": "an AdaFlash research variant (subsequent threshold head)",
    "attention_sink_bias": "MiMo (attention sinks in the draft layers)",
    "attention_value_scale": "MiMo (scaled attention values in the draft layers)",
}


def is_published_layout(config: dict[str, Any]) -> bool:
    """Whether a `config.json` is a drafter's, in a layout other than this package's own."""
    if config.get("model_type") == "adaflash":
        return False
    architectures = " ".join(config.get("architectures") or [])
    return (
        "dflash_config" in config
        or "speculators_model_type" in config
        or re.search(r"DFlash|DSpark|Domino|MuseGlimmerAssistant", architectures) is not None
        or config.get("model_type") == "muse_glimmer_assistant"
        or {"block_size", "target_layer_ids"} <= config.keys()
    )


def layout_name(config: dict[str, Any]) -> str:
    """A readable name for the layout of a published drafter's `config.json`."""
    if config.get("model_type") == "adaflash":
        return "adaflash-hf"
    if "speculators_model_type" in config:
        return "speculators"
    if "encoder" in config or config.get("model_type") == "muse_glimmer_assistant":
        return "transformers assistant"
    if (config.get("dflash_config") or {}).get("use_thresh_head_two_model"):
        return "official AdaFlash"
    return "z-lab DFlash"


def refuse_foreign_drafters(config: dict[str, Any]) -> None:
    """Raises for a drafter that is not the DFlash network, whatever its tensors are called.

    Raises:
        ValueError: Naming the format and what it would need.
    """
    nested = config.get("dflash_config") or {}
    both = {**config, **nested}
    architectures = config.get("architectures") or []

    def refuse(what: str, needs: str) -> None:
        raise ValueError(
            f"This checkpoint is {what}, which AdaFlashDraftModel cannot run: it needs {needs}. "
            f"(architectures={architectures}; readable are z-lab DFlash, official AdaFlash and transformers' assistant "
            "layout.) Loading it as plain DFlash would give wrong drafts without any message."
        )

    for name in architectures:
        if "DFlash2" in name:
            refuse(f"a DFlash2 drafter ({name})", "dynamic convolutions and a candidate selector")
        if "DSpark" in name:
            refuse(f"a DSpark drafter ({name})", "anchor-first blocks, where slot 0 predicts the first draft")
        if "Domino" in name:
            refuse(f"a Domino drafter ({name})", "a recurrent projector over the drafts")
    for field in ("sample_from_anchor", "query_zero_predicts_next", "shift_label"):
        if both.get(field):
            refuse(f"an anchor-first drafter ({field}={both[field]!r})", "blocks whose slot 0 predicts the first draft")
    if both.get("projector_type", "dflash") != "dflash":
        refuse(f"a drafter with projector_type={both['projector_type']!r}", "that projector")
    for field, meaning in _FOREIGN_FIELDS.items():
        if both.get(field):
            refuse(f"a drafter with {field}={both[field]!r}", f"what that field stands for: {meaning}")
    if nested.get("use_thresh_head_two_model") and not nested.get("thresh_head_direct_len", False):
        refuse("an AdaFlash drafter with thresh_head_direct_len=False", "a length head that predicts a threshold")
    if "speculators_model_type" in config:
        refuse("a speculators checkpoint", "a conversion first, since its layer ids count from the embeddings")
    if config.get("quantization_config"):
        refuse("a quantised drafter (quantization_config is set)", "its quantisation's own kernels")
    for name in architectures:
        if name not in (*_PLAIN_ARCHITECTURES, _OWN_ARCHITECTURE):
            refuse(f"of the unknown architecture {name}", "a reader of its own")


def normalize_published_config(config: dict[str, Any]) -> dict[str, Any]:
    """Turns the `config.json` of a published drafter into the fields of [`AdaFlashConfig`].

    Args:
        config: The file's content, in any of the three readable layouts.

    Returns:
        Keyword arguments for `AdaFlashConfig`.

    Raises:
        ValueError: The checkpoint is another kind of drafter, or a field that has no default is missing.
    """
    refuse_foreign_drafters(config)
    nested = config.get("dflash_config") or {}

    def either(name: str, *aliases: str, default: Any = None) -> Any:
        # The nested field is the newer place and wins, as in SGLang.
        for place in (nested, config):
            for key in (name, *aliases):
                if place.get(key) is not None:
                    return place[key]
        return default

    result = {name: config[name] for name in _BODY_FIELDS if config.get(name) is not None}
    if config.get("model_type") == "muse_glimmer_assistant":
        result.setdefault("vocab_size", 202048)  # its config has no such field; this is its target's (Muse Glimmer)
    layers = config.get("num_hidden_layers", 5)
    result["block_size"] = either("block_size", default=16)
    result["num_target_layers"] = either("num_target_layers")
    result["target_layer_ids"] = either("target_layer_ids")
    result["mask_token_id"] = either("mask_token_id")
    for name in ("target_layer_ids", "mask_token_id"):
        if result[name] is None:
            raise ValueError(
                f"This {layout_name(config)} checkpoint has no {name}, neither at the top of config.json nor in "
                "dflash_config; without it drafts would be wrong. Add the value it was trained with."
            )
    result["rope_parameters"] = _rope_parameters(config)
    result |= _windows_and_causality(config, nested, layers)
    result["length_heads"] = ["ratio"] if nested.get("use_thresh_head_two_model") else []
    result["length_head_dim"] = nested.get("thresh_head_bottleneck_dim", 256)
    result["final_logit_softcapping"] = either("final_logit_softcapping")
    result["logit_scale"] = either("output_multiplier", default=1.0)
    result["architectures"] = [_OWN_ARCHITECTURE]
    result["model_type"] = "adaflash"
    return result


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """One form out of both dialects: `rope_parameters`, or `rope_theta` + `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        if config.get("model_type") == "muse_glimmer_assistant":
            theta = 500000.0  # that model's own default (transformers, configuration_muse_glimmer_assistant.py)
        else:
            raise ValueError(
                "This checkpoint's config.json has neither rope_theta nor rope_parameters['rope_theta']. The base is "
                "not guessed, since a wrong one lowers acceptance silently: add the value the drafter was trained with."
            )
    rope["rope_theta"] = theta
    return rope


def _windows_and_causality(config: dict[str, Any], nested: dict[str, Any], layers: int) -> dict[str, Any]:
    """Window and causality of each draft layer.

    `use_swa` turns every layer sliding whatever `layer_types` says (ModelOpt writes it so). Causality: `is_causal`,
    else `dflash_config.causal`, else sliding layers are causal and full ones bidirectional, which is how vLLM
    (`qwen3_dflash.py`) and SGLang (`dflash.py`) serve checkpoints that do not say. Transformers' own assistant is
    bidirectional throughout.
    """
    assistant = config.get("model_type") == "muse_glimmer_assistant"
    kinds = config.get("layer_types") or (["sliding_attention" if assistant else "full_attention"] * layers)
    window = config.get("sliding_window")
    if nested.get("use_swa", config.get("use_swa")):
        kinds = ["sliding_attention"] * layers
        window = nested.get("swa_window_size", config.get("swa_window_size")) or window
    causal = config.get("is_causal")
    if causal is None:
        causal = False if assistant else nested.get("causal")
    return {
        "layer_types": list(kinds),
        "sliding_window": window if "sliding_attention" in kinds else None,
        "causal_layers": [kind == "sliding_attention" if causal is None else bool(causal) for kind in kinds],
    }
