"""Speculative decoding of one or many rows, each round's tokens packed into one row of the target.

Rows accept different numbers of tokens, so their lengths drift apart. A round sends `[1, N]` tokens, N = sum of
(draft length + 1) over the rows, with their own positions; only attention looks at rows. What is verified costs N
tokens in every linear layer, expert and head, whatever the longest draft.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .._compat import cache_argument, cache_output, pop_cache
from ..draft_settings import DraftSettings
from ..modeling_adaflash import AdaFlashDraftModel
from .drafting import BlockDrafter, Draft
from .packed_attention import NotPackable, PackedLayout, packed_forward
from .ragged_cache import RaggedCache
from .row_inputs import RowStops, logits_only, row_processors
from .stats import DraftStats
from .taps import TapRecorder
from .verification import accept_sampled, count_matches, residual_distribution, verify_greedy


@dataclass
class Row:
    """One sequence being decoded.

    Args:
        index: Its place in the user's batch.
        padding: Padding tokens left of it.
        text: Ids as processors and criteria see them (no prompt ids where the prompt was embeddings, and only what was
            passed where the rest of it is in the cache).
        length: Tokens including the whole prompt; the last one, the anchor, is not in the cache yet.
        processors: Its logits processors.
        emitted: New tokens so far.
        scores: Processed scores `[vocabulary]` of each new token, where asked for.
        logits: Raw logits of each new token, where asked for.
    """

    index: int
    padding: int
    text: torch.Tensor
    length: int
    processors: LogitsProcessorList
    emitted: int = 0
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


class PackedDecoder:
    """Runs one `generate()` call; see [`decode`].

    Args:
        target: A plain decoder (see [`dispatch.packing_obstacle`]).
        drafter: Its drafter.
        settings: Policy and caps.
        generation_config: The call's.
        logits_processor: For the whole batch.
        stopping_criteria: For the whole batch.
        streamer: Gets committed tokens (one row only).
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: AdaFlashDraftModel,
        settings: DraftSettings,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        streamer: Any = None,
    ) -> None:
        self.target, self.drafter, self.settings, self.config = target, drafter, settings, generation_config
        self.given_processors, self.given_criteria, self.streamer = logits_processor, stopping_criteria, streamer
        self.keep_scores = generation_config.return_dict_in_generate and generation_config.output_scores
        self.keep_logits = generation_config.return_dict_in_generate and generation_config.output_logits
        self.do_sample = generation_config.do_sample
        self.begun = False  # whether any token has been committed

    def decode(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> tuple[Any, DraftStats]:
        """Decodes every row to its end.

        Args:
            input_ids: `[rows, length]`, left padded.
            model_kwargs: As `generate()` prepared them.

        Returns:
            What `generate()` returns, and the statistics.

        Raises:
            NotPackable: The target's attention cannot be packed; while not `begun`, the call can go another way.
        """
        given_cache = pop_cache(model_kwargs)
        # generate() marks a cache that its caller passed; nobody gets to see any other without an output object.
        self.returns_cache = given_cache is not None and (
            self.config.return_dict_in_generate or getattr(given_cache, "_is_user_defined", False)
        )
        embeds = model_kwargs.get("inputs_embeds")
        mask = model_kwargs.get("attention_mask")
        if embeds is not None:
            prompt_length = embeds.shape[1]
        elif mask is not None:
            prompt_length = mask.shape[1]  # more than `input_ids` where those are only what the cache does not hold
        else:
            prompt_length = getattr(self.config, "_mask_length", input_ids.shape[1])
        whole = prompt_length == input_ids.shape[1]
        count = input_ids.shape[0]
        paddings = [0] * count if mask is None else (mask.shape[1] - mask.sum(1)).tolist()
        held = int(given_cache.get_seq_length()) if given_cache is not None else 0
        rows = [
            Row(
                index=index,
                padding=padding,
                text=input_ids[index, padding if whole else 0 :],
                length=prompt_length - padding,
                processors=row_processors(self.given_processors, index, count, padding if whole else 0, self.config),
            )
            for index, padding in enumerate(paddings)
        ]
        self.stops = RowStops(self.given_criteria, self.config.max_length - input_ids.shape[1], count)
        self.cache = RaggedCache(count, limit=max(row.length for row in rows) + self.stops.budget)
        if held:
            self.cache.read_prefix(given_cache, paddings)
        starts = list(self.cache.lengths)
        self.drafting = BlockDrafter(self.target, self.drafter, self.settings, count, self.do_sample, starts)
        self.stats = self.drafting.new_stats()
        self.stats.anchors = [[] for _ in rows]
        with TapRecorder(self.target, self.drafter.config.target_layer_ids) as self.taps:
            active = self._prefill(rows, embeds, starts)
            self.begun = True
            kept_prefix = {row.index: start for row, start in zip(rows, starts, strict=True)}
            ended: dict[int, Any] = {}
            active = self._retire(rows, active, ended, kept_prefix)
            while active:
                active = self._retire(active, self._round(active), ended, kept_prefix)
        if self.streamer is not None:
            self.streamer.end()
        return self._result(rows, input_ids, given_cache, ended, kept_prefix, held), self.stats

    def _prefill(self, rows: list[Row], embeds: torch.Tensor | None, starts: list[int]) -> list[Row]:
        counts = [row.length - start for row, start in zip(rows, starts, strict=True)]
        if min(counts) <= 0:
            raise ValueError(
                f"The cache already holds all {rows[0].length} tokens of the prompt: pass at least one token that it does "
                "not hold."
            )
        if embeds is None:
            tokens = torch.cat([row.text[-count:] for row, count in zip(rows, counts, strict=True)])[None]
            inputs = {"input_ids": tokens}
        else:
            pieces = [embeds[row.index, row.padding + start :] for row, start in zip(rows, starts, strict=True)]
            inputs = {"inputs_embeds": torch.cat(pieces)[None]}
        ends = torch.tensor(counts).cumsum(0) - 1
        logits = self._forward(inputs, counts, keep=ends)
        taps = self.taps.take()
        self.cache.commit(counts)
        running, first = [], 0
        verified = self._verify_all(rows, [Draft([], 0)] * len(rows), logits, [1] * len(rows))
        for place, (row, new) in enumerate(zip(rows, verified, strict=True)):
            self.drafting.add_context(place, taps[0, first : first + counts[place]])
            first += counts[place]
            kept, done = self.stops.cut(row.text, new, row.emitted, row.scores if self.keep_scores else None)
            self._commit(row, kept)
            if not done:
                running.append(row)
        return running

    def _forward(self, inputs: dict[str, Any], counts: list[int], keep: torch.Tensor | None = None) -> torch.Tensor:
        """One packed target forward; logits `[N, vocabulary]`, or only those at `keep`, in float32."""
        self.cache.write_to(counts)
        pasts = list(self.cache.lengths)
        device = next(iter(inputs.values())).device
        positions = torch.cat([torch.arange(past, past + n) for past, n in zip(pasts, counts, strict=True)])
        inputs = dict(inputs, position_ids=positions[None].to(device), use_cache=True)
        inputs[cache_argument(self.target)] = self.cache
        narrow = keep is not None and self.target._supports_logits_to_keep()
        if narrow:
            inputs["logits_to_keep"] = keep.to(device)
        layout = PackedLayout(counts, pasts)
        with packed_forward(self.target, layout):
            logits = self.target(**inputs).logits[0]
        if layout.attended < len(self.cache.keys):
            raise NotPackable(f"{type(self.target).__name__} has layers with another attention than configured")
        if keep is not None and not narrow:
            logits = logits[keep.to(logits.device)]
        return logits.to(device=device, dtype=torch.float32)

    def _round(self, rows: list[Row]) -> list[Row]:
        """Draft, verify, commit; returns the rows that go on."""
        drafts = self.drafting.propose(
            anchors=[int(row.text[-1]) for row in rows],
            positions=[row.length - 1 for row in rows],
            # One token of the budget is the target's own.
            caps=[self.stops.budget - row.emitted - 1 for row in rows],
            processors=[row.processors for row in rows],
            texts=[row.text for row in rows],
        )
        counts = [1 + len(draft.token_ids) for draft in drafts]
        packed = [
            torch.cat([row.text[-1:], row.text.new_tensor(draft.token_ids)])
            for row, draft in zip(rows, drafts, strict=True)
        ]
        logits = self._forward({"input_ids": torch.cat(packed)[None]}, counts)
        taps = self.taps.take()
        verified = self._verify_all(rows, drafts, logits, counts)
        running, kept_counts, matches, first = [], [], [], 0
        for place, (row, draft, new) in enumerate(zip(rows, drafts, verified, strict=True)):
            kept, done = self.stops.cut(row.text, new, row.emitted, row.scores if self.keep_scores else None)
            del row.scores[row.emitted + len(kept) :], row.logits[row.emitted + len(kept) :]
            self.drafting.add_context(place, taps[0, first : first + len(kept)])
            first += counts[place]
            kept_counts.append(len(kept))
            self.stats.anchors[row.index].append(row.length - 1)
            self._commit(row, kept)
            matches.append(count_matches(new, draft.token_ids))
            self.stats.add_round(draft.planned, len(draft.token_ids), matches[-1], len(kept))
            if not done:
                running.append(row)
        self.cache.commit(kept_counts)
        self.drafting.record(drafts, matches, self.stats)
        return running

    def _verify_all(
        self, rows: list[Row], drafts: list[Draft], logits: torch.Tensor, counts: list[int]
    ) -> list[list[int]]:
        """Tokens that each row commits, stops aside. `logits` is `[N, vocabulary]`, before processors."""
        pieces = logits.split(counts)
        if self.keep_logits:
            for row, piece in zip(rows, pieces, strict=True):
                row.logits += [*piece.clone()]
        if not all(logits_only(processor) for row in rows for processor in row.processors):
            return [self._verify(row, draft, piece) for row, draft, piece in zip(rows, drafts, pieces, strict=True)]
        # What looks at the logits alone is the same object for every row: one call serves all positions.
        scores = logits
        for processor in rows[0].processors:
            scores = processor(rows[0].text[None], scores)
        if self.keep_scores:
            for row, piece in zip(rows, scores.split(counts), strict=True):
                row.scores += [*piece]
        if not self.do_sample:
            chosen = scores.argmax(-1).split(counts)
            return [verify_greedy(ids, draft.token_ids) for ids, draft in zip(chosen, drafts, strict=True)]
        probs = scores.softmax(-1).split(counts)
        return [
            self._sample(lambda place, _, own=own: own[place], draft) for own, draft in zip(probs, drafts, strict=True)
        ]

    def _verify(self, row: Row, draft: Draft, logits: torch.Tensor) -> list[int]:
        """As [`_verify_all`] for one row, position by position: the calls that plain decoding would make, since a
        processor may keep state. `logits` is `[1 + drafted, vocabulary]`."""
        drafted = draft.token_ids

        def scores_at(place: int, new: list[int]) -> torch.Tensor:
            ids = torch.cat([row.text, row.text.new_tensor(new)]) if new else row.text
            scores = row.processors(ids[None], logits[place : place + 1].clone())[0]
            if self.keep_scores:
                row.scores.append(scores)
            return scores

        if self.do_sample:
            return self._sample(lambda place, new: scores_at(place, new).softmax(-1), draft)
        new: list[int] = []
        for place in range(len(drafted) + 1):
            new.append(int(scores_at(place, new).argmax(-1)))
            if place == len(drafted) or new[-1] != drafted[place] or new[-1] in self.stops.eos:
                break
        return new

    def _sample(self, target_probs: Any, draft: Draft) -> list[int]:
        new: list[int] = []
        for place, token in enumerate(draft.token_ids):
            probs = target_probs(place, new)
            if not accept_sampled(probs, draft.probs[place], token):
                left = residual_distribution(probs, draft.probs[place])
                return [*new, int(torch.multinomial(left, 1))]
            new.append(token)
            if token in self.stops.eos:
                return new  # the text ends here; nothing is drawn after it
        return [*new, int(torch.multinomial(target_probs(len(new), new), 1))]

    def _commit(self, row: Row, new: list[int]) -> None:
        row.text = torch.cat([row.text, row.text.new_tensor(new)])
        row.length += len(new)
        row.emitted += len(new)
        if self.streamer is not None and new:
            self.streamer.put(row.text[-len(new) :].cpu())

    def _retire(
        self, rows: list[Row], running: list[Row], ended: dict[int, Any], kept_prefix: dict[int, int]
    ) -> list[Row]:
        """Takes rows that ended out of the caches, keeping what a returned cache needs of them."""
        if len(running) == len(rows):
            return running
        alive = {row.index for row in running}
        for place, row in enumerate(rows):
            if self.returns_cache and row.index not in alive:
                first, last = kept_prefix[row.index], row.length - 1
                # Views keep a whole layer of all rows alive, which is right only for the last rows.
                ended[row.index] = {
                    layer: tuple(
                        part.clone() if running else part for part in self.cache.row_states(place, layer, first, last)
                    )
                    for layer in self.cache.keys
                }
        if not running:
            self.cache.release()
        else:
            places = [place for place, row in enumerate(rows) if row.index in alive]
            self.cache.keep_rows(places)
            self.drafting.keep_rows(places)
        return running

    def _result(
        self,
        rows: list[Row],
        input_ids: torch.Tensor,
        given_cache: Any,
        ended: dict[int, Any],
        kept_prefix: dict[int, int],
        held: int,
    ) -> Any:
        longest = max(row.emitted for row in rows)
        pad = self.config._pad_token_tensor
        new = input_ids.new_full((len(rows), longest), int(pad) if pad is not None else 0)
        for row in rows:
            new[row.index, : row.emitted] = row.text[len(row.text) - row.emitted :]
        sequences = torch.cat([input_ids, new], dim=1)
        if self.returns_cache:
            self._write_back(given_cache, rows, ended, kept_prefix, held)
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=by_step([row.scores for row in rows], longest) if self.keep_scores else None,
            logits=by_step([row.logits for row in rows], longest) if self.keep_logits else None,
            **cache_output(given_cache),
        )

    def _write_back(
        self, cache: Any, rows: list[Row], ended: dict[int, Any], kept_prefix: dict[int, int], held: int
    ) -> None:
        """Appends to the caller's cache what plain decoding would have: every token but the last."""
        total = max(row.padding + row.length for row in rows) - 1
        for layer in sorted(next(iter(ended.values()))):
            example = ended[rows[0].index][layer][0]
            keys = example.new_zeros(len(rows), example.shape[0], total - held, example.shape[2])
            values = keys.new_zeros(*keys.shape[:3], ended[rows[0].index][layer][1].shape[2])
            for row in rows:
                first = row.padding + kept_prefix[row.index] - held
                # Freed as it goes, so that the states are never held twice over.
                for store, part in zip((keys, values), ended[row.index].pop(layer), strict=True):
                    store[row.index, :, first : first + part.shape[1]] = part
            cache.update(keys, values, layer)


def by_step(values: list[list[torch.Tensor]], steps: int) -> tuple[torch.Tensor, ...]:
    """One `[rows, vocabulary]` a step, zeros for rows that have ended, from the `[vocabulary]` of each row's steps."""
    zero = torch.zeros_like(values[0][0])
    return tuple(torch.stack([row[step] if step < len(row) else zero for row in values]) for step in range(steps))
