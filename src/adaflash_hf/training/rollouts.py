"""From rows of a dataset to token sequences: prompts in any of the usual forms, answers from the data or the target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging
from transformers.utils.logging import tqdm

from ..evaluation.acceptance import decode_prompts

logger = logging.get_logger(__name__)


@dataclass
class Prompt:
    """A prompt, with the answer that its dataset has for it.

    Args:
        input_ids: Token ids of the prompt.
        answer: Token ids of the answer.
        domain: Label for metrics by domain.
        anchors: Positions in prompt and answer where decoding opened its rounds, where known.
    """

    input_ids: list[int]
    answer: list[int] | None = None
    domain: str = "all"
    anchors: list[int] | None = None


@dataclass
class Rollout:
    """A prompt and the text that followed it.

    Args:
        input_ids: Prompt and response.
        prompt_length: Tokens of the prompt.
        domain: Label for metrics by domain.
        anchors: Positions where decoding opened the rounds that wrote the response, where known.
    """

    input_ids: list[int]
    prompt_length: int
    domain: str = "all"
    anchors: list[int] | None = None

    @classmethod
    def of(cls, prompt: Prompt, answer: list[int], anchors: list[int] | None, max_length: int) -> Rollout:
        """A prompt with its answer, cut at `max_length`."""
        return cls((prompt.input_ids + answer)[:max_length], len(prompt.input_ids), prompt.domain, anchors)


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


def answer_token_ids(row: dict[str, Any], tokenizer: Any, prompt_ids: list[int]) -> list[int] | None:
    """Token ids of the answer that a row holds, or `None`.

    Args:
        row: With `response_ids`; a `completion` (text, or messages) beside its `prompt`; or `messages` of which the
            assistant wrote the last.
        tokenizer: The target's.
        prompt_ids: From [`prompt_token_ids`].
    """
    if row.get("response_ids") is not None:
        return list(row["response_ids"])
    turns, completion = row.get("messages"), row.get("completion")
    if isinstance(completion, list) and isinstance(row.get("prompt"), list):
        turns = row["prompt"] + completion
    elif completion:
        return _ended(tokenizer, completion if isinstance(completion, str) else completion[-1]["content"])
    if not turns or turns[-1]["role"] != "assistant":
        return None
    if getattr(tokenizer, "chat_template", None) is not None:
        whole = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
        # Some templates write an assistant's turn otherwise than they open it.
        if whole[: len(prompt_ids)] == prompt_ids:
            return whole[len(prompt_ids) :]
    return _ended(tokenizer, turns[-1]["content"])


def _ended(tokenizer: Any, text: str) -> list[int]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tokenizer(text, add_special_tokens=False)["input_ids"] + end


def read_prompts(
    rows: Iterable[dict[str, Any]], tokenizer: Any, max_length: int, written_answers: bool = True
) -> list[Prompt]:
    """Reads a dataset; prompts of `max_length` tokens or more are dropped with a warning.

    Args:
        rows: See [`prompt_token_ids`] and [`answer_token_ids`]; optional `domain` and `anchors`.
        tokenizer: The target's.
        max_length: Longest prompt and answer together.
        written_answers: Whether answers in words count, which somebody else may have written, or `response_ids` alone.
    """
    found, dropped = [], 0
    for row in rows:
        ids = prompt_token_ids(row, tokenizer)
        if len(ids) >= max_length:
            dropped += 1
            continue
        given = row.get("response_ids")
        answer = answer_token_ids(row, tokenizer, ids) if written_answers else None if given is None else list(given)
        anchors = row.get("anchors")
        found.append(Prompt(ids, answer, str(row.get("domain") or "all"), None if anchors is None else list(anchors)))
    if dropped:
        logger.warning(f"{dropped} prompts of max_length={max_length} tokens or more were dropped.")
    return found


def answer_prompts(
    target: PreTrainedModel,
    prompts: list[Prompt],
    *,
    max_new_tokens: int,
    max_length: int,
    temperature: float = 0.0,
    drafter: Any = None,
) -> list[Rollout]:
    """One batch of prompts, answered by the target; see [`decode_prompts`]."""
    room = max_length - min(len(prompt.input_ids) for prompt in prompts)
    answers, stats = decode_prompts(
        target,
        [prompt.input_ids for prompt in prompts],
        max_new_tokens=min(max_new_tokens, room),
        temperature=temperature,
        drafter=drafter,
    )
    anchors = [None] * len(prompts) if stats is None else stats.anchors
    return [
        Rollout.of(prompt, answer, places, max_length)
        for prompt, answer, places in zip(prompts, answers, anchors, strict=True)
    ]


def collect_rollouts(
    prompts: list[Prompt],
    target: PreTrainedModel,
    *,
    max_new_tokens: int,
    max_length: int,
    batch_size: int = 32,
    temperature: float = 0.0,
) -> list[Rollout]:
    """Rollouts of prompts in their order: their own answers, and the target's where they have none.

    Args:
        prompts: From [`read_prompts`].
        target: Writes the missing answers.
        max_new_tokens: Most tokens of an answer.
        max_length: Longest sequence; answers are cut.
        batch_size: Prompts answered at once.
        temperature: Of the answers; 0 is greedy.
    """
    found = [
        None if prompt.answer is None else Rollout.of(prompt, prompt.answer, prompt.anchors, max_length)
        for prompt in prompts
    ]
    pending = sorted((n for n, known in enumerate(found) if known is None), key=lambda n: len(prompts[n].input_ids))
    for start in tqdm(range(0, len(pending), batch_size), desc="target writes rollouts", disable=not pending):
        batch = pending[start : start + batch_size]
        written = answer_prompts(
            target,
            [prompts[n] for n in batch],
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            temperature=temperature,
        )
        for n, rollout in zip(batch, written, strict=True):
            found[n] = rollout
    return found


def require_blocks(rollouts: list[Rollout], block_size: int) -> None:
    """Checks that there is something to train on.

    Raises:
        ValueError: No response is as long as one block.
    """
    if not any(len(r.input_ids) - max(r.prompt_length, 2) >= block_size - 1 for r in rollouts):
        raise ValueError(
            f"train_dataset: no response of {len(rollouts)} is as long as one block of block_size={block_size}, so there is "
            "nothing to train on. Raise max_new_tokens or max_length, or use a drafter with smaller blocks."
        )
