"""Tiny models made on the spot: targets of eight architectures, drafters for them, and published checkpoint layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from adaflash_hf import AdaFlashDraftModel

DATA = Path(__file__).parent / "data"
HIDDEN, VOCAB, LAYERS = 32, 64, 6
TARGET_KINDS = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2", "qwen3_moe")

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "gemma2": ("gemma2", {"sliding_window": 8, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("gpt2", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}
_GPT2_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def tiny_target(
    kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **kw: Any
) -> PreTrainedModel:
    """A random causal LM of one of `TARGET_KINDS` (hidden 32, vocabulary 64, 6 layers); a seed fixes the weights.

    Args:
        kind: The architecture.
        seed: Seed of the weights; the global generator is left as it was.
        dtype: Of the weights.
        kw: Fields of the config that differ, by their usual names (`num_hidden_layers=2`, ...).
    """
    model_type, own = _KINDS[kind]
    fields = {**_COMMON, **own, **kw}
    if kind == "gpt2":
        fields = {_GPT2_NAMES.get(name, name): value for name, value in fields.items()}
        fields["n_positions"] = fields.pop("max_position_embeddings")
        for name in ("intermediate_size", "num_key_value_heads", "head_dim"):
            fields.pop(name)
    config = AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def tiny_drafter(target: PreTrainedModel | None = None, *, seed: int = 0, **kw: Any) -> AdaFlashDraftModel:
    """An untrained drafter for `target` (default: the Llama one) of two layers and blocks of four, ready to be run.

    The weights are larger than a fresh drafter's, so that every part of the network shows in the output.
    """
    target = tiny_target() if target is None else target
    fields = {"num_hidden_layers": 2, "block_size": 4, "length_head_dim": 8, "initializer_range": 0.2, **kw}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AdaFlashDraftModel.from_target(target, **fields).eval()


def zlab_config(*, nested: dict[str, Any] | None = None, drop: tuple[str, ...] = (), **top: Any) -> dict[str, Any]:
    """The `config.json` of a tiny drafter as z-lab publishes it, for the sizes of `tiny_target("llama")`.

    Args:
        nested: Fields of `dflash_config` that differ.
        drop: Names left out, at the top and in `dflash_config`.
        top: Fields at the top that differ.
    """
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 4,
        "num_target_layers": LAYERS,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "layer_types": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
        "initializer_range": 0.02,
        "max_position_embeddings": 256,
        "max_window_layers": 28,
        "tie_word_embeddings": False,
        "use_cache": True,
        **top,
    }
    config["dflash_config"] = {"mask_token_id": 63, "target_layer_ids": [1, 2, 4], **(nested or {})}
    if config["layer_types"] is None:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    for name in drop:
        config.pop(name, None)
        config.get("dflash_config", {}).pop(name, None)
    return config


def zlab_tensors(
    *, taps: int = 3, layers: int = 2, block_head: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random tensors under the published names, for the sizes of `zlab_config`.

    Args:
        taps: Tapped target layers.
        layers: Draft layers.
        block_head: Bottleneck of AdaFlash's length head, where the checkpoint has one.
        dtype: Of the tensors.
        seed: Seed of the values.
    """
    shapes = {"fc.weight": (HIDDEN, taps * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(layers):
        layer = f"layers.{i}."
        for name, shape in {"q": (32, HIDDEN), "k": (16, HIDDEN), "v": (16, HIDDEN), "o": (HIDDEN, 32)}.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = shape
        for name in ("q_norm", "k_norm"):
            shapes[f"{layer}self_attn.{name}.weight"] = (8,)
        for name, shape in {"gate": (48, HIDDEN), "up": (48, HIDDEN), "down": (HIDDEN, 48)}.items():
            shapes[f"{layer}mlp.{name}_proj.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (HIDDEN,)
    if block_head is not None:
        head = "thresh_head_two_model."
        shapes |= {f"{head}down.weight": (block_head, 2 * HIDDEN), f"{head}down.bias": (block_head,)}
        shapes |= {f"{head}res.0.weight": (block_head, block_head), f"{head}res.0.bias": (block_head,)}
        shapes |= {f"{head}out.weight": (1, block_head), f"{head}out.bias": (1,)}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2 + name.endswith("norm.weight")).to(dtype)
        for name, shape in shapes.items()
    }


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Writes `config.json` and `model.safetensors`, as a download would leave them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def drafter_inputs(
    drafter: AdaFlashDraftModel, *, rows: int = 1, context: int = 9, slots: int | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random `noise_embeds` and `context_hidden_states` for `drafter`."""
    config, generator = drafter.config, torch.Generator().manual_seed(seed)
    features = len(config.target_layer_ids) * config.hidden_size
    return {
        "noise_embeds": torch.randn(rows, slots or config.block_size, config.hidden_size, generator=generator),
        "context_hidden_states": torch.randn(rows, context, features, generator=generator),
    }


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the safetensors files in a folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
