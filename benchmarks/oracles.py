"""What the batch benchmarks know beforehand: the texts that plain decoding writes.

`perfect_lengths` lets the `"throughput"` policy see which drafts will be accepted (the "oracle" arm: the best lengths for the
drafts that there are). `noised_drafts` replaces a drafter's guesses by right ones, each with an error probability that its
logits state truthfully, so that policies can be compared where drafts are good; the drafter's network still runs and costs
what it costs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from adaflash_hf.generation.draft_head import DraftHead
from adaflash_hf.generation.drafting import BlockDrafter
from adaflash_hf.modeling_adaflash import AdaFlashDraftModel


class KnownTexts:
    """Finds how a row goes on from what it holds so far."""

    def __init__(self) -> None:
        self._texts: dict[int, list[tuple[list[int], list[int]]]] = {}

    def add(self, prompt: Sequence[int], text: Sequence[int]) -> None:
        """Adds one row: its prompt without padding, and the prompt with everything plain decoding wrote after it."""
        self._texts.setdefault(len(prompt), []).append((list(prompt), list(text)))

    def ahead(self, ids: torch.Tensor, count: int) -> list[int]:
        """The next `count` tokens of the row `ids` (fewer at its end)."""
        held = ids.tolist()
        for length, texts in self._texts.items():
            for prompt, text in texts:
                if held[:length] == prompt and text[: len(held)] == held:
                    return text[len(held) : len(held) + count]
        return []


def matches(drafted: Sequence[int], ahead: Sequence[int]) -> list[bool]:
    """For each slot, whether it and all before it are right."""
    good, result = True, []
    for place, token in enumerate(drafted):
        good = good and place < len(ahead) and token == ahead[place]
        result.append(good)
    return result


@contextmanager
def perfect_lengths(known: KnownTexts) -> Iterator[None]:
    """Survival that is 1 for drafts that will be accepted and 0 for the others."""

    def survival(self, output, logits, texts):
        drafted = self.head.to_token_ids(logits.argmax(-1)).tolist()
        return torch.tensor(
            [matches(row, known.ahead(text, len(row))) for row, text in zip(drafted, texts)], dtype=torch.float32
        )

    with mock.patch.object(BlockDrafter, "survival", survival):
        yield


class NoisedOracle:
    """Acceptance probability of each slot of each position, the same for every arm.

    A position's difficulty is drawn once (Beta), its slots scatter around it, and each slot is right with the probability
    that its logits show. Since a draft vocabulary lacks tokens, which would break that promise, every slot of every row
    gets a place of it for the token that is drafted there.
    """

    def __init__(self, known: KnownTexts, alpha: float, beta: float, seed: int = 0) -> None:
        self.known, self.alpha, self.beta, self.seed = known, alpha, beta, seed
        self.tokens: torch.Tensor | None = None  # of the places

    def probabilities(self, text: Sequence[int], slots: int) -> tuple[list[float], list[bool]]:
        """`[slots]` probabilities of being right, and which are."""
        key = hashlib.blake2b(repr((self.seed, list(text)[-12:], len(text))).encode(), digest_size=8).digest()
        rng = random.Random(key)
        base = rng.betavariate(self.alpha, self.beta)
        chances = [min(0.99, max(0.02, base + rng.uniform(-0.1, 0.1))) for _ in range(slots)]
        return chances, [rng.random() < chance for chance in chances]

    def logits(self, texts: Sequence[torch.Tensor], real: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Logits like `real`, `[rows, slots, draft vocabulary]`; `vocabulary` is the target's."""
        rows, slots, places = real.shape
        tokens, strength = torch.zeros(rows, slots, dtype=torch.long), torch.zeros(rows, slots)
        for row, text in enumerate(texts):
            ahead = self.known.ahead(text, slots)
            chances, right = self.probabilities(text.tolist(), slots)
            for slot, (chance, good) in enumerate(zip(chances, right)):
                token = ahead[slot] if slot < len(ahead) else 0
                tokens[row, slot] = token if good else (token + 1 + slot) % vocabulary
                strength[row, slot] = torch.logit(torch.tensor(chance)) + torch.tensor(float(places - 1)).log()
        self.tokens = tokens.flatten()
        ids = torch.arange(rows * slots).view(rows, slots, 1)
        return torch.zeros_like(real).scatter_(2, ids.to(real.device), strength[..., None].to(real))


@contextmanager
def noised_drafts(oracle: NoisedOracle, drafter: AdaFlashDraftModel) -> Iterator[None]:
    """Drafts of `drafter` come from `oracle`; a ratio head that was trained perfectly on them is put in its place."""
    propose, forward, block_logits = BlockDrafter.propose, BlockDrafter._forward, BlockDrafter.block_logits
    to_token_ids = DraftHead.to_token_ids

    def patched_propose(self, anchors, positions, caps, processors, texts):
        self._texts = texts
        return propose(self, anchors, positions, caps, processors, texts)

    def patched_forward(self, anchors, positions):
        output = forward(self, anchors, positions)
        slots = self.block_size - 1
        chances = torch.tensor([oracle.probabilities(text.tolist(), slots)[0] for text in self._texts])
        output.length_ratio = (1.0 + chances.cumprod(-1).sum(-1)) / self.block_size
        output.survival_logits = None
        return output

    def patched_logits(self, output, positions):
        return oracle.logits(self._texts, block_logits(self, output, positions), self.target.config.vocab_size)

    def patched_ids(self, ids):
        return to_token_ids(self, ids) if oracle.tokens is None else oracle.tokens.to(ids.device)[ids]

    with ExitStack() as stack:
        for owner, name, patch in (
            (BlockDrafter, "propose", patched_propose),
            (BlockDrafter, "_forward", patched_forward),
            (BlockDrafter, "block_logits", patched_logits),
            (DraftHead, "to_token_ids", patched_ids),
        ):
            stack.enter_context(mock.patch.object(owner, name, patch))
        yield
