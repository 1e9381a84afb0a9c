"""From rows of a dataset to token sequences: prompts in any of the usual forms, answers from the data or the target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging
from transformers.utils.logging import tqdm

logger = logging.get_logger(__name__)


@dataclass
class Rollout:
    """A prompt and the text that followed it.

    Args:
        input_ids: Prompt and response.
        prompt_length: Tokens of the prompt.
        domain: Label for metrics by domain.
    """

    input_ids: list[int]
    prompt_length: int
    domain: str = "all"


def prompt_token_ids(row: dict[str, Any], tokenizer: Any) -> list[int]:
    """Token ids of a row's prompt.

    Args:
        row: With `prompt_ids`; or a `prompt` that is text or a list of messages; or `messages`, whose last turn is left
            out when the assistant wrote it.
        tokenizer: The target's. Without a chat template, messages are joined as plain text.

    Raises:
        ValueError: The row has none of these, or there is no tokenizer to read text with.
    """
    if row.get("prompt_ids") is not None:
        return list(row["prompt_ids"])
    prompt = row.get("prompt") or row.get("messages")
    if not prompt:
        raise ValueError(f"A row needs 'prompt', 'messages' or 'prompt_ids', and this one has {sorted(row)}.")
    if tokenizer is None:
        raise ValueError("processing_class (the target's tokenizer) is needed to read prompts that are text.")
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer("\n".join(message["content"] for message in prompt))["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]


def collect_rollouts(
    rows: Iterable[dict[str, Any]],
    target: PreTrainedModel,
    tokenizer: Any,
    *,
    max_new_tokens: int,
    max_length: int,
    batch_size: int = 32,
    temperature: float = 0.0,
) -> list[Rollout]:
    """Turns rows into rollouts; rows without `response_ids` are answered by the target.

    Args:
        rows: See [`prompt_token_ids`]; optional `response_ids` and `domain`.
        target: Writes the missing answers.
        tokenizer: Reads text prompts.
        max_new_tokens: Most tokens of an answer.
        max_length: Longest sequence: answers are cut, prompts that leave no room for one are dropped with a warning.
        batch_size: Prompts answered at once.
        temperature: Of the answers; 0 is greedy.

    Returns:
        Rollouts in the order of the rows.
    """
    found: list[tuple[int, Rollout]] = []
    pending: list[tuple[int, Rollout]] = []
    dropped = 0
    for order, row in enumerate(rows):
        ids = prompt_token_ids(row, tokenizer)
        rollout = Rollout(ids, len(ids), str(row.get("domain") or "all"))
        if len(ids) >= max_length:
            dropped += 1
        elif row.get("response_ids") is not None:
            rollout.input_ids = (ids + list(row["response_ids"]))[:max_length]
            found.append((order, rollout))
        else:
            pending.append((order, rollout))
    if dropped:
        logger.warning(f"{dropped} prompts of max_length={max_length} tokens or more were dropped.")
    pending.sort(key=lambda item: len(item[1].input_ids))
    starts = range(0, len(pending), batch_size)
    for start in tqdm(starts, desc="target writes rollouts", disable=not pending):
        batch = pending[start : start + batch_size]
        prompts = [rollout.input_ids for _, rollout in batch]
        answers = _answer(target, prompts, max_new_tokens, temperature)
        for (order, rollout), answer in zip(batch, answers, strict=True):
            rollout.input_ids = (rollout.input_ids + answer)[:max_length]
            found.append((order, rollout))
    return [rollout for _, rollout in sorted(found, key=lambda item: item[0])]


@torch.no_grad()
def _answer(
    target: PreTrainedModel, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float
) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    sampling = dict(do_sample=True, temperature=temperature, top_k=0) if temperature > 0 else dict(do_sample=False)
    output = target.generate(
        input_ids=ids.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=max_new_tokens,
        **sampling,
    )
    stop = target.generation_config.eos_token_id
    stops = set(stop if isinstance(stop, list) else [stop])
    answers = []
    for row in output[:, longest:].tolist():
        end = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
        answers.append(row[:end])
    return answers
