"""How a drafter decides draft lengths: the fields it keeps in its `generation_config`, and the paper's length rule."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

LENGTH_POLICIES = ("fixed", "ratio", "confidence", "throughput")
DEFAULT_POLICY = "throughput"
_FILLED_IN = GenerationConfig._get_default_generation_params().get("num_assistant_tokens")


@dataclass(frozen=True)
class DraftSettings:
    """The settings in force for one call of `generate()`.

    Args:
        length_policy: `"fixed"` (whole blocks, DFlash), `"ratio"` (AdaFlash's length head), `"confidence"` (prefix
            product of the largest draft probabilities against `confidence_threshold`, D-Cut) or `"throughput"` (what
            the survival of the drafts is worth at the measured cost of verifying them).
        num_assistant_tokens: Most drafted tokens a round; `None` for the whole block.
        length_scale: Factor on the ratio head's answer (1.3 in the paper).
        confidence_threshold: The `"confidence"` policy drafts slot k while the product of the largest draft
            probabilities of slots 1…k is at least this.
        verify_cost: Cost curve of the `"throughput"` policy, as `measure_verify_cost` returns it; `None` to measure
            while decoding.
    """

    length_policy: str = DEFAULT_POLICY
    num_assistant_tokens: int | None = None
    length_scale: float = 1.3
    confidence_threshold: float = 0.25
    verify_cost: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.length_policy not in LENGTH_POLICIES:
            raise ValueError(
                f"length_policy={self.length_policy!r} is not known: expected one of {list(LENGTH_POLICIES)}."
            )
        tokens = self.num_assistant_tokens
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
            raise ValueError(f"num_assistant_tokens={tokens!r} is not valid: expected a number of tokens, 0 or more.")
        for name in ("length_scale", "confidence_threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value!r} is not valid: expected a number, 0 or more.")

    def cap(self, block_size: int) -> int:
        """Most drafted tokens a round for blocks of `block_size` slots."""
        limit = block_size - 1
        return limit if self.num_assistant_tokens is None else min(limit, self.num_assistant_tokens)


def read_draft_settings(
    generation_config: GenerationConfig | None, call_config: GenerationConfig | None = None
) -> DraftSettings:
    """Reads the drafter's settings, the call's own `num_assistant_tokens` winning over the drafter's.

    `generate()` fills in 20 where the call says nothing, so 20 in the call counts as nothing said.

    Raises:
        ValueError: A field has a value that is not accepted; the message names it.
    """
    values: dict[str, Any] = {}
    for name in DraftSettings.__dataclass_fields__:
        value = getattr(generation_config, name, None)
        if name == "num_assistant_tokens":
            own = getattr(call_config, name, None)
            value = value if own is None or own == _FILLED_IN else own
        if value is not None:
            values[name] = value
    return DraftSettings(**values)


@contextmanager
def override_draft_settings(generation_config: GenerationConfig, **values: Any) -> Iterator[None]:
    """Sets fields of a drafter's `generation_config` while the context lasts."""
    kept = {name: getattr(generation_config, name, None) for name in values}
    try:
        for name, value in values.items():
            setattr(generation_config, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(generation_config, name, value)


def default_generation_config() -> GenerationConfig:
    """The generation config of a drafter that came without one."""
    config = GenerationConfig(length_policy=DEFAULT_POLICY, length_scale=1.3)
    config.num_assistant_tokens = None
    return config


def load_generation_config(source: str | os.PathLike, **download: Any) -> GenerationConfig:
    """Reads a drafter's `generation_config.json`, or makes the default where the repository has none."""
    try:
        config = GenerationConfig.from_pretrained(source, **download)
    except OSError:
        if os.path.isfile(os.path.join(source, download.get("subfolder", ""), "generation_config.json")):
            raise  # it is there and cannot be read
        return default_generation_config()
    read_draft_settings(config)
    return config


def ratio_draft_length(ratio: torch.Tensor, block_size: int, scale: float) -> torch.Tensor:
    """AdaFlash's rule: slots to verify = round(block_size * ratio * scale) in [1, block_size], anchor included.

    Args:
        ratio: `[rows]`, the ratio head's output.
        block_size: Slots of a block.
        scale: The paper's 1.3.

    Returns:
        `[rows]` long, drafted tokens (without the anchor) to verify.
    """
    return (ratio.float() * block_size * scale).round().clamp(1, block_size).long() - 1
