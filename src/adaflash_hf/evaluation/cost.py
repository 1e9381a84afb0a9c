"""Measuring beforehand what verifying costs, so that runs can be repeated and a first call does not have to learn it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..draft_settings import override_draft_settings
from ..generation.verify_cost import CostMeter
from ..modeling_adaflash import AdaFlashDraftModel

logger = logging.get_logger(__name__)


def measure_verify_cost(
    target: PreTrainedModel,
    drafter: AdaFlashDraftModel,
    rows: Sequence[int] = (1, 2, 4, 8, 16),
    prompt_length: int = 128,
) -> dict[str, Any]:
    """Times rounds of real decoding on random prompts and fits the cost curve of the `"throughput"` policy.

    Keep it with the drafter:

    ```python
    drafter.generation_config.verify_cost = measure_verify_cost(target, drafter)
    drafter.save_pretrained(folder)
    ```

    Measure where the models will run: same device, dtype, attention and packing of linear layers.

    Args:
        target: The target.
        drafter: Its drafter.
        rows: Batch sizes in use; the curve is fitted to all of them.
        prompt_length: Tokens of each prompt.

    Returns:
        A dictionary that can be saved as JSON, see [`VerifyCost`].

    Raises:
        ValueError: `rows` or `prompt_length` is not positive.
    """
    if not rows or min(rows) < 1:
        raise ValueError(f"rows={list(rows)} is not valid: expected batch sizes of 1 or more.")
    if prompt_length < 1:
        raise ValueError(f"prompt_length={prompt_length} is not valid: expected 1 or more tokens.")
    meter = CostMeter.fresh(target, drafter)
    vocabulary = target.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    slots = drafter.config.block_size - 1
    with override_draft_settings(
        drafter.generation_config, length_policy="throughput", verify_cost=None, num_assistant_tokens=None
    ):
        for count in rows:
            logger.info(f"measuring {count} rows")
            while meter.next_length(count, slots) is not None:
                ids = torch.randint(0, vocabulary, (count, prompt_length), generator=generator).to(target.device)
                # Random text seldom ends, and no row may: the sweep is for `count` rows.
                target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=drafter,
                    do_sample=False,
                    max_new_tokens=16 * drafter.config.block_size,
                    eos_token_id=None,
                    pad_token_id=0,
                )
    return meter.cost.to_dict()
