"""One draft: the drafter's forward for all rows, the lengths, and the drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from ..draft_settings import DraftSettings
from ..modeling_adaflash import AdaFlashDraftModel, AdaFlashDraftOutput
from .draft_head import DraftHead, noise_embeddings
from .length_policy import plan_lengths, policy_in_force
from .ragged_cache import DraftContextCache
from .row_inputs import HISTORY_ONLY, LOGITS_ONLY


@dataclass
class Draft:
    """One row's draft.

    Args:
        token_ids: Drafted tokens.
        planned: What the length policy wanted, before caps.
        probs: `[tokens, vocabulary]` the distributions the tokens were drawn from; `None` when greedy.
    """

    token_ids: list[int]
    planned: int
    probs: torch.Tensor | None = None


class BlockDrafter:
    """Drafts for the rows of one `generate()` call, keeping the drafter's context cache.

    Args:
        target: Lends embedding and head.
        drafter: The draft model.
        settings: Policy and caps.
        rows: Number of rows.
        do_sample: Whether drafted tokens are sampled.
        starts: Position of each row's first context token (where a cached prefix has no context features).
        never: Token ids that are never drafted. Taken out of the distribution before anything is drawn, so that sampling
            stays exact.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: AdaFlashDraftModel,
        settings: DraftSettings,
        rows: int,
        do_sample: bool,
        starts: Sequence[int] | None = None,
        never: Sequence[int] = (),
    ) -> None:
        self.target, self.drafter, self.settings, self.do_sample = target, drafter, settings, do_sample
        self.block_size = drafter.config.block_size
        self.policy = policy_in_force(settings, drafter)
        self.cap = settings.cap(self.block_size)
        self.head = DraftHead.shared(target, drafter)
        ids = self.head.to_token_ids(torch.arange(len(self.head.head.weight), device=self.head.device))
        self._never = torch.isin(ids, ids.new_tensor(list(never))) if never else None
        self.cache = DraftContextCache(rows, starts)
        self._pending: list[list[torch.Tensor]] = [[] for _ in range(rows)]

    def add_context(self, row: int, taps: torch.Tensor) -> None:
        """Queues context features `[tokens, taps * hidden]` of a row's newly committed tokens."""
        if len(taps):
            self._pending[row].append(taps)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops finished rows."""
        self.cache.keep_rows(rows)
        self._pending = [self._pending[row] for row in rows]

    @torch.no_grad()
    def propose(
        self,
        anchors: Sequence[int],
        positions: Sequence[int],
        caps: Sequence[int],
        processors: Sequence[LogitsProcessorList],
        texts: Sequence[torch.Tensor],
    ) -> list[Draft]:
        """Drafts one block for every row.

        Args:
            anchors: Last committed token of each row.
            positions: Its position.
            caps: Most tokens worth drafting for the row (what is left of its budget).
            processors: The row's logits processors.
            texts: `[length]` ids of each row, the anchor included.

        Returns:
            A [`Draft`] a row, empty where its cap is 0.
        """
        if self.cap == 0 or max(caps, default=0) <= 0:
            return [Draft([], 0) for _ in anchors]
        output = self._forward(anchors, positions)
        logits = self.block_logits(output, positions)
        if self._never is not None:
            logits = logits.masked_fill(self._never.to(logits.device), float("-inf"))
        planned = plan_lengths(self.policy, self.settings, output, logits, self.block_size)
        lengths = [max(0, min(plan, cap, self.cap)) for plan, cap in zip(planned, caps, strict=True)]
        return [
            self._choose(logits[row, :length], processors[row], texts[row], planned[row])
            for row, length in enumerate(lengths)
        ]

    def _forward(self, anchors: Sequence[int], positions: Sequence[int]) -> AdaFlashDraftOutput:
        device = self.drafter.fc.weight.device
        counts = [sum(map(len, pending)) for pending in self._pending]
        self.cache.write_to(counts)
        places = [
            self.cache.starts[row] + self.cache.lengths[row] + place
            for row, count in enumerate(counts)
            for place in range(count)
        ]
        taps = [piece.to(device=device, dtype=self.drafter.fc.weight.dtype) for row in self._pending for piece in row]
        slots = torch.arange(self.block_size, device=device)
        output = self.drafter(
            noise_embeds=noise_embeddings(
                self.target, self.drafter, torch.tensor(anchors, device=device), self.block_size
            ),
            context_hidden_states=torch.cat(taps)[None],  # every round has committed something
            position_ids=torch.tensor(positions, device=device)[:, None] + slots,
            context_position_ids=torch.tensor(places, device=device, dtype=torch.long)[None],
            cache=self.cache,
        )
        self.cache.commit(counts)
        self._pending = [[] for _ in self._pending]
        return output

    def block_logits(self, output: AdaFlashDraftOutput, positions: Sequence[int]) -> torch.Tensor:
        """`[rows, block_size - 1, draft vocabulary]` logits of the drafted slots, before any processor."""
        return self.head(output.last_hidden_state[:, 1:]).float()

    def _choose(self, logits: torch.Tensor, processors: LogitsProcessorList, text: torch.Tensor, planned: int) -> Draft:
        """Draws the tokens of one row, slot by slot where a processor reads the text."""
        if len(logits) == 0:
            return Draft([], planned)
        usable = [p for p in processors if type(p) in LOGITS_ONLY or type(p) in HISTORY_ONLY]
        if not usable:
            if not self.do_sample:
                return Draft(self.head.to_token_ids(logits.argmax(-1)).tolist(), planned)
            probs = logits.softmax(-1)
            picked = self.head.to_token_ids(torch.multinomial(probs, 1).squeeze(1))
            return Draft(picked.tolist(), planned, self._spread(probs, text.device))
        # Processors speak of the target's vocabulary.
        full = self.head.expand(logits).to(text.device)
        if all(type(p) in LOGITS_ONLY for p in usable):
            for processor in usable:
                full = processor(text[None], full)
                # Slots after one where everything that could be drafted is forbidden cannot be reached.
                full = full[: int(_possible(full).long().cumprod(0).sum())]
                if len(full) == 0:
                    return Draft([], planned)
            if not self.do_sample:
                return Draft(full.argmax(-1).tolist(), planned)
            probs = full.softmax(-1)
            return Draft(torch.multinomial(probs, 1).squeeze(1).tolist(), planned, probs)
        chosen, kept = [], []
        ids = text[None]
        for scores in full.unbind(0):
            scores = scores[None]
            for processor in usable:
                scores = processor(ids, scores) if _possible(scores) else scores
            if not _possible(scores):
                break  # everything that could be drafted is forbidden here
            probs = scores.softmax(-1)
            token = torch.multinomial(probs, 1) if self.do_sample else scores.argmax(-1, keepdim=True)
            chosen.append(int(token))
            kept.append(probs[0])
            ids = torch.cat([ids, token.to(ids.dtype)], dim=1)
        return Draft(chosen, planned, torch.stack(kept) if self.do_sample and kept else None)

    def _spread(self, probs: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self.head.token_ids is None:
            return probs.to(device)
        full = probs.new_zeros(len(probs), self.head.vocab_size)
        return full.index_copy_(-1, self.head.token_ids.to(probs.device), probs).to(device)


def _possible(scores: torch.Tensor) -> torch.Tensor:
    """`[...]`, whether any token of `[..., vocabulary]` is left (some warpers fail where none is)."""
    return (scores > float("-inf")).any(-1)
