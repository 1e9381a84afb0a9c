"""One draft: the drafter's forward for all rows, the lengths, and the drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from ..draft_settings import DraftSettings
from ..modeling_adaflash import AdaFlashDraftModel, AdaFlashDraftOutput
from .draft_head import DraftHead, noise_embeddings
from .length_policy import confidence_survival, head_survival, plan_lengths, policy_in_force, slot_confidence
from .ragged_cache import DraftContextCache
from .row_inputs import HISTORY_ONLY, LOGITS_ONLY
from .stats import DraftStats
from .throughput import ThroughputPlanner
from .verify_cost import CostMeter, VerifyCost


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
        self.planner: ThroughputPlanner | None = None
        self.survival_source: str | None = None
        if self.policy == "throughput":
            saved = settings.verify_cost
            cost = None if saved is None else VerifyCost.from_dict(saved)
            self.planner = ThroughputPlanner(cost, CostMeter.shared(target, drafter) if cost is None else None)
            calibrations = drafter.config.survival_calibration or {}
            self._calibration = calibrations.get("sampling" if do_sample else "greedy")
            if drafter.survival_head is None:
                self.survival_source = "confidence"
            else:
                self.survival_source = "head" if self._calibration is None else "head (calibrated)"
        self._survival: torch.Tensor | None = None
        self._planning = False

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
        self._survival, self._planning = None, False
        if self.cap == 0 or max(caps, default=0) <= 0:
            return [Draft([], 0) for _ in anchors]
        if self.planner is not None:
            self._planning = True
            if not self.planner.start(len(anchors), self.cap):
                return [Draft([], 0) for _ in anchors]
        output = self._forward(anchors, positions)
        logits = self.block_logits(output, positions)
        if self._never is not None:
            logits = logits.masked_fill(self._never.to(logits.device), float("-inf"))
        caps = [max(0, min(cap, self.cap)) for cap in caps]
        if self.planner is not None:
            self._survival = self.survival(output, logits, texts)
            planned = self.planner.plan(self._survival, caps)
        else:
            planned = plan_lengths(self.policy, self.settings, output, logits, self.block_size)
        lengths = [min(plan, cap) for plan, cap in zip(planned, caps, strict=True)]
        drafts = self._choose_all(logits, lengths, planned, processors, texts)
        if self.planner is not None:
            self.planner.drafted()
        return drafts

    def new_stats(self) -> DraftStats:
        """Statistics that name what is in force."""
        return DraftStats(policy=self.policy, survival=self.survival_source)

    def record(self, drafts: Sequence[Draft], accepted: Sequence[int], stats: DraftStats) -> None:
        """Tells the `"throughput"` policy how many of the last drafts' tokens were accepted; ends the round."""
        if not self._planning:
            return
        lengths = [len(draft.token_ids) for draft in drafts]
        promised = 0.0
        if self._survival is not None:
            checked = torch.arange(self._survival.shape[1])[None] < torch.tensor(lengths)[:, None]
            promised = float(self._survival.cpu()[checked].sum())
        self.planner.finish(lengths, accepted, promised, drafted=self._survival is not None)
        stats.paused += len(drafts) * self.planner.was_paused
        stats.measured += len(drafts) * self.planner.was_measured

    def survival(
        self, output: AdaFlashDraftOutput, logits: torch.Tensor, texts: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """`[rows, block_size - 1]`, probability that the drafted tokens up to each slot are all accepted.

        From the survival head, or from the draft's own confidence where the drafter has none; never from the drafted
        tokens, which are sampled later.
        """
        if output.survival_logits is None:
            return confidence_survival(logits)
        confidence = slot_confidence(logits) if "confidence" in (self._calibration or {}) else None
        return head_survival(output.survival_logits, self._calibration, confidence)

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

    def _choose_all(
        self,
        logits: torch.Tensor,
        lengths: Sequence[int],
        planned: Sequence[int],
        processors: Sequence[LogitsProcessorList],
        texts: Sequence[torch.Tensor],
    ) -> list[Draft]:
        if not self.do_sample and not any(map(_usable, processors)):
            ids = self.head.to_token_ids(logits[:, : max(lengths)].argmax(-1)).tolist()
            return [Draft(row[:length], plan) for row, length, plan in zip(ids, lengths, planned, strict=True)]
        return [
            self._choose(logits[row, :length], processors[row], texts[row], planned[row])
            for row, length in enumerate(lengths)
        ]

    def _choose(self, logits: torch.Tensor, processors: LogitsProcessorList, text: torch.Tensor, planned: int) -> Draft:
        """Draws the tokens of one row, slot by slot where a processor reads the text."""
        if len(logits) == 0:
            return Draft([], planned)
        usable = _usable(processors)
        if not usable:
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


def _usable(processors: LogitsProcessorList) -> list[Any]:
    """The processors that a draft can go through."""
    return [p for p in processors if type(p) in LOGITS_ONLY or type(p) in HISTORY_ONLY]


def _possible(scores: torch.Tensor) -> torch.Tensor:
    """`[...]`, whether any token of `[..., vocabulary]` is left (some warpers fail where none is)."""
    return (scores > float("-inf")).any(-1)
