"""Drafters whose quality is chosen (oracles), targets whose text varies, and plain decoding to compare with."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from helpers import VOCAB, tiny_drafter, tiny_target
from transformers import PreTrainedModel

from adaflash_hf import AdaFlashDraftModel
from adaflash_hf.generation import drafting
from adaflash_hf.generation.drafting import BlockDrafter

NEW = 14  # new tokens where a test does not say otherwise


def lively_target(kind: str = "llama", *, seed: int = 1, scale: float = 2.0, **kw: Any) -> PreTrainedModel:
    """A [`tiny_target`] of four layers with weights so large that greedy text varies and logits are not near-tied."""
    target = tiny_target(kind, seed=seed, **{"num_hidden_layers": 4, "tie_word_embeddings": False, **kw})
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    target.generation_config.eos_token_id = None  # tests that want an end say so
    return target


@cache
def shared_target(kind: str = "llama") -> PreTrainedModel:
    """One [`lively_target`] for all tests that leave it as it is."""
    return lively_target(kind)


@cache
def shared_drafter(kind: str = "llama", block_size: int = 5) -> AdaFlashDraftModel:
    """A drafter for [`shared_target`], drafting whole blocks unless a test sets another policy (see `settings`)."""
    drafter = tiny_drafter(shared_target(kind), block_size=block_size)
    drafter.generation_config.length_policy = "fixed"
    return drafter


@contextmanager
def settings(drafter: AdaFlashDraftModel, **values: Any) -> Iterator[AdaFlashDraftModel]:
    """Draft settings of a shared drafter, for as long as the block runs."""
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(drafter.generation_config, name, value, create=True))
        yield drafter


def prompts(lengths: Sequence[int], *, vocabulary: int = VOCAB, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of these lengths, left padded with id 0: `input_ids` and `attention_mask`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, vocabulary, (len(lengths), width), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : width - length] = 0
        mask[row, : width - length] = 0
    return ids, mask


def alone(ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Each prompt `[1, length]` without its padding."""
    return [ids[row : row + 1, mask[row].argmax() :] for row in range(len(ids))]


def plain(target: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None, **call: Any) -> list[list[int]]:
    """What plain greedy decoding adds to each prompt on its own."""
    call = {"max_new_tokens": NEW, "do_sample": False, **call}
    rows = alone(ids, torch.ones_like(ids) if mask is None else mask)
    return [
        target.generate(own, attention_mask=torch.ones_like(own), **call)[0, own.shape[1] :].tolist() for own in rows
    ]


def texts_of(ids: torch.Tensor, mask: torch.Tensor | None, new: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts without padding, each followed by its continuation."""
    rows = alone(ids, torch.ones_like(ids) if mask is None else mask)
    return [own[0].tolist() + list(more) for own, more in zip(rows, new, strict=True)]


class Oracle:
    """Draft logits that name the right next tokens of known texts, each slot wrong with a chosen probability.

    Args:
        texts: Whole texts (prompt and continuation, no padding). A row is recognised by what it holds so far; where no
            text continues it, the tokens are random.
        error: Probability that a slot names another token.
        strength: Smallest and largest logit of the named token, drawn for each slot (the rest is 0), which makes the
            `"confidence"` policy choose varied lengths.
        right: For each slot, whether it is right; overrules `error`.
        seed: Of everything random.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        error: float = 0.3,
        *,
        strength: tuple[float, float] = (3.0, 12.0),
        right: Sequence[bool] | None = None,
        seed: int = 0,
    ) -> None:
        self.texts, self.error, self.strength, self.right = [list(text) for text in texts], error, strength, right
        self.random = random.Random(seed)

    def logits(self, texts: Sequence[torch.Tensor], slots: int, vocabulary: int) -> torch.Tensor:
        """`[rows, slots, vocabulary]`."""
        result = torch.zeros(len(texts), slots, vocabulary)
        for row, text in enumerate(texts):
            known = text.tolist()
            ahead = next((full[len(known) :] for full in self.texts if full[: len(known)] == known), [])
            for slot in range(slots):
                token = ahead[slot] if slot < len(ahead) else self.random.randrange(vocabulary)
                wrong = self.random.random() < self.error if self.right is None else not self.right[slot]
                if wrong:
                    token = (token + 1 + self.random.randrange(vocabulary - 1)) % vocabulary
                result[row, slot, token] = self.random.uniform(*self.strength)
        return result


@contextmanager
def oracle(
    texts: Sequence[Sequence[int]], error: float = 0.3, *, lengths: Any = None, **options: Any
) -> Iterator[Oracle]:
    """Makes every drafter draft by an [`Oracle`] (the drafter's network still runs).

    Args:
        texts: See [`Oracle`].
        error: See [`Oracle`].
        lengths: `"random"` for a random draft length for each row and round, a number for that one, `None` for what
            the length policy says.
        options: More of [`Oracle`].
    """
    guide = Oracle(texts, error, **options)
    propose, block_logits = BlockDrafter.propose, BlockDrafter.block_logits

    def patched_propose(self: Any, anchors: Any, positions: Any, caps: Any, processors: Any, texts: Any) -> Any:
        self._oracle_texts = texts
        return propose(self, anchors, positions, caps, processors, texts)

    def patched_logits(self: Any, output: Any, positions: Any) -> torch.Tensor:
        real = block_logits(self, output, positions)
        assert real.isfinite().all()
        logits = guide.logits(self._oracle_texts, real.shape[1], self.head.vocab_size)
        return logits if self.head.token_ids is None else logits[..., self.head.token_ids]

    def patched_lengths(policy: Any, settings: Any, output: Any, logits: torch.Tensor, block_size: int) -> list[int]:
        rows, slots = logits.shape[:2]
        return [guide.random.randint(0, slots) if lengths == "random" else lengths for _ in range(rows)]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(BlockDrafter, "propose", patched_propose))
        stack.enter_context(mock.patch.object(BlockDrafter, "block_logits", patched_logits))
        if lengths is not None:
            stack.enter_context(mock.patch.object(drafting, "plan_lengths", patched_lengths))
        yield guide


def assert_rows_equal(output: torch.Tensor, ids: torch.Tensor, expected: Sequence[Sequence[int]], pad: int = 0) -> None:
    """Each row of `output` is its prompt, the expected new tokens, and padding."""
    width = ids.shape[1]
    assert torch.equal(output[:, :width], ids)
    longest = max(map(len, expected))
    assert output[:, width:].tolist() == [list(new) + [pad] * (longest - len(new)) for new in expected]
