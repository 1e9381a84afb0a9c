"""A key/value cache whose rows have lengths of their own, for packed decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache


class RaggedCache(Cache):
    """Keys and values of rows that grow at different speeds.

    Keys and values arrive packed, `[1, heads, tokens, head_dim]`, and are written to the `(row, slot)` set by
    [`write_to`]; what comes back is `[rows, heads, longest, head_dim]`. A slot is a token's absolute position (less
    the row's `start`), so sliding windows are a matter of masks. Rejected tokens cost nothing: `commit` advances each
    row's length by what was accepted, and the rest is overwritten by the next round.

    Args:
        rows: Number of rows.
        starts: Position of each row's slot 0 (where a prefix is not held), by default 0.
        limit: Slots that no row will exceed, where that is known: no more are set aside.
    """

    # transformers asks a cache this before compiling a forward around it.
    is_compileable = False

    def __init__(self, rows: int, starts: Sequence[int] | None = None, limit: int | None = None) -> None:
        super().__init__(layers=[])
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.lengths = [0] * rows
        self.starts = list(starts) if starts is not None else [0] * rows
        self.limit = limit
        self.longest = 0  # slots that the next update fills up to, over all rows
        self._counts: list[int] = []
        self._places: dict[Any, torch.Tensor] = {}

    @property
    def num_rows(self) -> int:
        """Rows still in the cache."""
        return len(self.lengths)

    def write_to(self, counts: Sequence[int]) -> None:
        """Says where the next packed tokens go: `counts[r]` of them to row r, after what it holds."""
        self._counts = list(counts)
        self.longest = max((length + count for length, count in zip(self.lengths, counts, strict=True)), default=0)
        self._places = {}

    def commit(self, accepted: Sequence[int]) -> None:
        """Advances each row by the tokens that stay."""
        self.lengths = [length + more for length, more in zip(self.lengths, accepted, strict=True)]

    def _reserve(self, states: torch.Tensor, store: dict[int, torch.Tensor], layer_idx: int) -> torch.Tensor:
        held, needed = store.get(layer_idx), self.longest
        if held is None or held.shape[2] < needed:
            # Half as much again, so that copying stays linear in the final length.
            capacity = max(needed + 64, needed * 3 // 2)
            if self.limit is not None:
                capacity = max(needed, min(capacity, self.limit))
            grown = states.new_zeros(self.num_rows, states.shape[1], capacity, states.shape[3])
            if held is not None:
                used = max(self.lengths)
                grown[:, :, :used] = held[:, :, :used]
            store[layer_idx] = held = grown
        return held

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes packed states and returns all rows' `[rows, heads, longest, head_dim]`."""
        for states, store in ((key_states, self.keys), (value_states, self.values)):
            held = self._reserve(states, store, layer_idx)
            if self.num_rows == 1:
                held.narrow(2, self.lengths[0], states.shape[2]).copy_(states)
            else:
                width = states.shape[3]
                tokens = states.transpose(1, 2).reshape(-1, width)
                held.view(-1, width).index_copy_(0, self._index(held), tokens)
        return tuple(store[layer_idx].narrow(2, 0, self.longest) for store in (self.keys, self.values))

    def _index(self, held: torch.Tensor) -> torch.Tensor:
        """`[tokens * heads]`, where the packed tokens go in a flattened store; made once for all layers."""
        _, heads, capacity, _ = held.shape
        key = held.device, heads, capacity
        if key not in self._places:
            rows = [row for row, count in enumerate(self._counts) for _ in range(count)]
            slots = [length + place for length, count in zip(self.lengths, self._counts) for place in range(count)]
            heads_of = torch.tensor(rows)[:, None] * heads + torch.arange(heads)
            self._places[key] = (heads_of * capacity + torch.tensor(slots)[:, None]).flatten().to(held.device)
        return self._places[key]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops every row that is not listed."""
        for store in (self.keys, self.values):
            for layer_idx, held in store.items():
                store[layer_idx] = held[torch.tensor(rows, device=held.device)]
        self.lengths = [self.lengths[row] for row in rows]
        self.starts = [self.starts[row] for row in rows]

    def read_prefix(self, cache: Cache, offsets: Sequence[int]) -> None:
        """Takes over what an ordinary cache holds; row r's own tokens begin at its slot `offsets[r]` (left padding).

        A sliding layer that has dropped its oldest tokens is placed at the positions it still covers.
        """
        held = int(cache.get_seq_length())
        self.lengths = [held - offset for offset in offsets]
        for layer_idx, layer in enumerate(cache.layers):
            for states, store in ((layer.keys, self.keys), (layer.values, self.values)):
                kept = min(states.shape[2], held)
                target = states.new_zeros(states.shape[0], states.shape[1], max(self.lengths) + 64, states.shape[3])
                for row, offset in enumerate(offsets):
                    first = max(held - kept, offset)
                    piece = states[row, :, first - (held - kept) : kept]
                    target[row, :, first - offset : held - offset] = piece
                store[layer_idx] = target

    def row_states(self, row: int, layer_idx: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[heads, last - first, head_dim]` of slots `[first, last)` of a row, as views."""
        return self.keys[layer_idx][row, :, first:last], self.values[layer_idx][row, :, first:last]

    def release(self) -> None:
        """Lets go of all keys and values; what [`row_states`] gave out stays valid."""
        self.keys.clear()
        self.values.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest row."""
        return max(self.lengths, default=0)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """What transformers asks while it builds masks; packed attention builds its own."""
        return self.longest, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """As [`get_mask_sizes`]."""
        return 0

    @property
    def is_initialized(self) -> bool:
        """Whether anything was written."""
        return bool(self.keys)


class DraftContextCache(RaggedCache):
    """The drafter's cache: keys and values of the context. A block's own are never stored."""

    def update_context(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`update`]; its name tells the drafter not to pass the block's states."""
        return self.update(key_states, value_states, layer_idx)

    def context_positions(self, new_positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Absolute positions `[rows, longest]` of the cached slots, and which are real (`None`: all of them)."""
        device = new_positions.device
        slots = torch.arange(self.longest, device=device)
        totals = [length + count for length, count in zip(self.lengths, self._counts, strict=True)]
        positions = slots + torch.tensor(self.starts, device=device)[:, None]
        if min(totals) == self.longest:
            return positions, None
        return positions, slots < torch.tensor(totals, device=device)[:, None]
