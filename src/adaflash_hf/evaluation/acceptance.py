"""How many drafted tokens a target accepts, by domain: decode prompts and count."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..draft_settings import override_draft_settings
from ..generation.stats import DraftStats
from ..modeling_adaflash import AdaFlashDraftModel


@torch.no_grad()
def decode_prompts(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    drafter: AdaFlashDraftModel | None = None,
) -> tuple[list[list[int]], DraftStats | None]:
    """Answers a batch of prompts of different lengths.

    Args:
        target: Writes the answers.
        prompts: Token ids of each prompt.
        max_new_tokens: Most tokens of an answer.
        temperature: 0 is greedy; otherwise the target's own distribution at this temperature, not truncated.
        drafter: Helps, with the settings of its own `generation_config`.

    Returns:
        Answers with their EOS, and the drafter's statistics.
    """
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    arguments: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        arguments = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if drafter is not None:
        arguments["assistant_model"] = drafter
    output = target.generate(
        input_ids=ids.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=max_new_tokens,
        **arguments,
    )
    stop = target.generation_config.eos_token_id
    stops = set(stop if isinstance(stop, list) else [stop])
    answers = []
    for row in output[:, longest:].tolist():
        end = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
        answers.append(row[:end])
    return answers, None if drafter is None else drafter.last_draft_stats


def measure_acceptance(
    target: PreTrainedModel,
    drafter: AdaFlashDraftModel,
    prompts: Sequence[tuple[Sequence[int], str]],
    *,
    max_new_tokens: int,
    batch_size: int = 16,
    temperature: float = 0.0,
    seed: int = 0,
    part: tuple[int, int] = (0, 1),
) -> dict[str, DraftStats]:
    """Decodes prompts with whole blocks and counts what the target accepts.

    Args:
        target: The target.
        drafter: Its drafter.
        prompts: Token ids and domain of each prompt.
        max_new_tokens: Most tokens of an answer.
        batch_size: Prompts of one domain decoded together.
        temperature: 0 is greedy.
        seed: Of sampling; the global generators are left as they were.
        part: `(rank, world size)`: which share of the batches is decoded here.

    Returns:
        Statistics of each domain seen here; see [`acceptance_metrics`].
    """
    found: dict[str, DraftStats] = {}
    batches = []
    for domain in sorted({domain for _, domain in prompts}):
        own = sorted((list(ids) for ids, label in prompts if label == domain), key=len)
        batches += [(domain, own[start : start + batch_size]) for start in range(0, len(own), batch_size)]
    devices = [target.device] if target.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        override_draft_settings(drafter.generation_config, length_policy="fixed", num_assistant_tokens=None),
    ):
        for number, (domain, own) in list(enumerate(batches))[part[0] :: part[1]]:
            torch.manual_seed(seed + number)
            _, stats = decode_prompts(
                target, own, max_new_tokens=max_new_tokens, temperature=temperature, drafter=drafter
            )
            found[domain] = found[domain].merge(stats) if domain in found else stats
    return found


def acceptance_metrics(found: dict[str, DraftStats]) -> dict[str, float]:
    """Flat metrics of [`measure_acceptance`].

    Returns:
        `acceptance_length`, `slot_acceptance_k`; of several domains `acceptance_length_<domain>`, their `_min` and `_std`.
    """
    every = DraftStats("fixed")
    for stats in found.values():
        every.merge(stats)
    if not every.rounds:
        return {}
    metrics = {f"slot_acceptance_{slot + 1}": share for slot, share in enumerate(every.slot_acceptance)}
    metrics["acceptance_length"] = every.acceptance_length
    return metrics | domain_metrics({name: stats.acceptance_length for name, stats in found.items() if stats.rounds})


def domain_metrics(lengths: dict[str, float]) -> dict[str, float]:
    """Acceptance lengths by domain as flat metrics, with their minimum and standard deviation; empty for one domain."""
    if len(lengths) < 2:
        return {}
    metrics = {f"acceptance_length_{name}": value for name, value in sorted(lengths.items())}
    metrics["acceptance_length_min"] = min(lengths.values())
    metrics["acceptance_length_std"] = statistics.pstdev(lengths.values())
    return metrics
