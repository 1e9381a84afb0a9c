"""Plain and assisted decoding side by side, in turns, so that a noisy machine treats both alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from transformers import PreTrainedModel

from ..modeling_adaflash import AdaFlashDraftModel


@dataclass
class DomainResult:
    """What one domain's prompts gave.

    Args:
        plain_seconds: Time of all plain runs.
        assisted_seconds: Time of all assisted runs.
        tokens: Tokens one arm wrote over all prompts and repeats.
        rounds: Target forwards of the assisted arm after prefill.
        emitted: Tokens those committed.
        drafted: Tokens drafted in them.
        identical: Whether every assisted text was the plain one.
    """

    plain_seconds: float = 0.0
    assisted_seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    identical: bool = True
    pair_ratios: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """The figures as `adaflash demo --json` writes them."""
        return {
            "plain_tokens_per_s": self.tokens / self.plain_seconds,
            "assisted_tokens_per_s": self.tokens / self.assisted_seconds,
            "ratio": self.plain_seconds / self.assisted_seconds,
            "acceptance_length": self.emitted / max(1, self.rounds),
            "mean_draft_length": self.drafted / max(1, self.rounds),
            "identical": self.identical,
        }


def compare_decoding(
    target: PreTrainedModel,
    drafter: AdaFlashDraftModel,
    tokenizer: Any,
    prompts: Iterable[dict[str, str]],
    *,
    max_new_tokens: int = 128,
    repeats: int = 1,
    on_run: Callable[[dict[str, str], str, Any], Any] | None = None,
    **generate_arguments: Any,
) -> dict[str, Any]:
    """Greedy decoding of each prompt with and without the drafter, one after the other, the order changing each time.

    Args:
        target: The target.
        drafter: The drafter.
        tokenizer: The target's, with a chat template.
        prompts: Rows with `domain` and `prompt`.
        max_new_tokens: Tokens a run.
        repeats: Runs of each arm on each prompt.
        on_run: Called as `on_run(prompt, arm, None)` before a run, where it may return a streamer, and as
            `on_run(prompt, arm, result)` after it, `result` being `{"tokens", "seconds"}`.
        generate_arguments: Passed to `generate()`.

    Returns:
        `{"domains": {name: figures}, "mean_ratio", "mean_acceptance_length", "identical", "policy"}`.
    """
    results: dict[str, DomainResult] = {}
    order = ("plain", "assisted")
    for prompt in prompts:
        found = results.setdefault(prompt["domain"], DomainResult())
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt["prompt"]}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        ).to(target.device)
        for _ in range(repeats):
            outputs: dict[str, torch.Tensor] = {}
            seconds: dict[str, float] = {}
            for arm in order:
                streamer = on_run(prompt, arm, None) if on_run is not None else None
                arguments = dict(generate_arguments, max_new_tokens=max_new_tokens, do_sample=False)
                if arm == "assisted":
                    arguments["assistant_model"] = drafter
                start = time.perf_counter()
                outputs[arm] = target.generate(**inputs, streamer=streamer, **arguments)
                seconds[arm] = time.perf_counter() - start
                tokens = outputs[arm].shape[1] - inputs["input_ids"].shape[1]
                if on_run is not None:
                    on_run(prompt, arm, {"tokens": tokens, "seconds": seconds[arm]})
            order = order[::-1]
            stats = drafter.last_draft_stats
            found.tokens += outputs["plain"].shape[1] - inputs["input_ids"].shape[1]
            found.plain_seconds += seconds["plain"]
            found.assisted_seconds += seconds["assisted"]
            found.pair_ratios.append(seconds["plain"] / seconds["assisted"])
            found.rounds += stats.rounds
            found.emitted += stats.emitted
            found.drafted += stats.drafted
            found.identical &= torch.equal(outputs["plain"], outputs["assisted"])
    domains = {name: found.summary() for name, found in results.items()}
    return {
        "domains": domains,
        "mean_ratio": mean(d["ratio"] for d in domains.values()),
        "min_ratio": min(d["ratio"] for d in domains.values()),
        "mean_acceptance_length": mean(d["acceptance_length"] for d in domains.values()),
        "identical": all(d["identical"] for d in domains.values()),
        "policy": drafter.last_draft_stats.policy,
    }
