"""Attention for packed tokens of many rows: everything else in the model sees one row of `N` tokens."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "adaflash_packed"
_thread = threading.local()
_lock = threading.RLock()
_originals: dict[int, list[Any]] = {}
# Inputs of an attention that change what it attends to, and which packed attention does not have.
_NOT_UNDERSTOOD = ("position_bias", "indices", "block_indices", "sinks")


class NotPackable(Exception):
    """The target's attention does something that packed attention would leave out; the message says what."""


class PackedLayout:
    """Which token of a packed forward belongs to which row, and what each may see.

    Args:
        counts: New tokens of each row, in the order they are packed.
        pasts: Tokens each row's cache already holds.
    """

    def __init__(self, counts: Sequence[int], pasts: Sequence[int]) -> None:
        self.counts, self.pasts = list(counts), list(pasts)
        self.longest_query = max(self.counts)
        self.longest_key = max(past + count for past, count in zip(self.pasts, self.counts, strict=True))
        self.dense = len(set(self.counts)) == 1
        self.masked_windows: set[int | None] = set()
        self.attended = 0
        self._tensors: dict[Any, Any] = {}

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self.counts)

    def places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and place of each packed token, `[N]` both."""
        key = ("places", device)
        if key not in self._tensors:
            rows = torch.tensor([row for row, count in enumerate(self.counts) for _ in range(count)], device=device)
            places = torch.tensor([place for count in self.counts for place in range(count)], device=device)
            self._tensors[key] = rows, places
        return self._tensors[key]

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """`[1, heads, N, width]` -> `[rows, heads, longest_query, width]`."""
        if self.rows == 1:
            return states
        if self.dense:
            return states.view(states.shape[1], self.rows, self.longest_query, -1).transpose(0, 1)
        rows, places = self.places(states.device)
        result = states.new_zeros(self.rows, states.shape[1], self.longest_query, states.shape[3])
        result[rows, :, places] = states[0].transpose(0, 1)
        return result

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """`[rows, heads, longest_query, width]` -> `[1, N, heads, width]`, contiguous, since some models `view` it."""
        if self.rows == 1:
            return states.transpose(1, 2).contiguous()
        if self.dense:
            return states.transpose(1, 2).reshape(1, -1, states.shape[1], states.shape[3]).contiguous()
        rows, places = self.places(states.device)
        return states[rows, :, places][None].contiguous()

    def window(self, module: torch.nn.Module, given: int | None) -> int | None:
        """The window of a layer. The masks that the model asked for decide: some models hand on no `sliding_window`."""
        if len(self.masked_windows) == 1:
            return next(iter(self.masked_windows))
        kinds, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
        if given is None and kinds is not None and index is not None and kinds[index] == "sliding_attention":
            return next((window for window in self.masked_windows if window is not None), given)
        return given

    def visible(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Boolean `[rows, 1, longest_query, longest_key]`; `None` where everything is visible."""
        key = ("visible", window, device)
        if key not in self._tensors:
            pasts = torch.tensor(self.pasts, device=device)[:, None]
            counts = torch.tensor(self.counts, device=device)[:, None]
            places = torch.arange(self.longest_query, device=device)[None]
            # A padding query sees what its row's last token sees, so that no softmax is over nothing.
            queries = (pasts + torch.minimum(places, counts - 1))[:, :, None]
            keys = torch.arange(self.longest_key, device=device)[None, None]
            mask = keys <= queries
            if window is not None:
                mask = mask & (keys > queries - window)
            self._tensors[key] = None if bool(mask.all()) else mask[:, None]
        return self._tensors[key]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends row by row of a packed forward; outside of one, does what the target was configured to do.

    Args:
        module: The attention module.
        query: `[1, heads, N, head_dim]`.
        key: `[rows, kv_heads, longest, head_dim]`, from [`RaggedCache`].
        value: Likewise.
        attention_mask: `None` in a packed forward, whose masks follow from the rows' lengths.
        scaling: Factor on the scores.
        sliding_window: Tokens a query sees, itself included.
        softcap: `tanh` cap of the scores.
        s_aux: `[heads]` attention sinks.

    Returns:
        `[1, N, heads, head_dim]` and `None`.

    Raises:
        NotPackable: The layer brings a mask, a bias or keys of its own.
    """
    layout: PackedLayout | None = getattr(_thread, "layout", None)
    if layout is None:
        optional = {"softcap": softcap, "s_aux": s_aux}
        kwargs |= {name: given for name, given in optional.items() if given is not None}
        return _original_attention(module)(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    unknown = [name for name in _NOT_UNDERSTOOD if kwargs.get(name) is not None]
    if attention_mask is not None or unknown or kwargs.get("is_causal") is False:
        raise NotPackable(f"{type(module).__name__} has {unknown or 'a mask'} of its own")
    if key.shape[0] != layout.rows or key.shape[2] != layout.longest_key:
        raise NotPackable(f"{type(module).__name__} attends to keys that are not the cache's")
    layout.attended += 1
    if _original_name(module.config) == "sdpa":
        # Up to transformers 5.17 sdpa drops a soft cap in silence; plain decoding is the measure, so it is dropped here.
        softcap = None
    sliding_window = layout.window(module, sliding_window)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layout.rows > 1 and max(layout.pasts) == 0:
        # Prefill: each row alone, so that unequal prompts cost what they are.
        pieces, start = [], 0
        for row, count in enumerate(layout.counts):
            own = PackedLayout([count], [0])
            pieces.append(
                _attend(
                    query[:, :, start : start + count],
                    key[row : row + 1, :, :count],
                    value[row : row + 1, :, :count],
                    own.visible(sliding_window, query.device),
                    scaling,
                    softcap,
                    s_aux,
                ).transpose(1, 2)
            )
            start += count
        return torch.cat(pieces, dim=1), None
    output = _attend(
        layout.unpack(query), key, value, layout.visible(sliding_window, query.device), scaling, softcap, s_aux
    )
    return layout.pack(output), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """`[rows, heads, queries, width]` over `[rows, kv_heads, keys, width]`, without repeating keys for grouped heads."""
    rows, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    if softcap is None and s_aux is None:
        if groups == 1:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        grouped = query.reshape(rows, key.shape[1], groups * queries, width)
        if mask is not None:
            mask = mask.expand(-1, 1, -1, -1).repeat(1, 1, groups, 1)
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        return output.reshape(rows, heads, queries, -1)
    grouped = query.reshape(rows, key.shape[1], groups, queries, width)
    scores = torch.einsum("rhgqd,rhkd->rhgqk", grouped, key) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], torch.finfo(scores.dtype).min)
    if s_aux is None:
        weights = scores.float().softmax(-1)
    else:
        sinks = s_aux.view(1, key.shape[1], groups, 1, 1).expand(rows, -1, -1, queries, 1).to(scores.dtype)
        weights = torch.cat([scores, sinks], dim=-1).float().softmax(-1)[..., :-1]
    return torch.einsum("rhgqk,rhkd->rhgqd", weights.to(value.dtype), value).reshape(rows, heads, queries, -1)


def _original_name(config: Any) -> str:
    with _lock:
        held = _originals.get(id(config))
        return held[0] if held is not None else "sdpa"


def _original_attention(module: torch.nn.Module) -> Any:
    name = _original_name(module.config)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def _packed_mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """No mask inside a packed forward; what the target was configured for in any other thread."""
    layout: PackedLayout | None = getattr(_thread, "layout", None)
    if layout is not None:
        # Skipping is allowed for a causal mask (with or without a window) and for nothing else.
        if not kwargs.get("allow_is_causal_skip"):
            raise NotPackable(f"{type(config).__name__} asks for a mask that is more than causal")
        layout.masked_windows.add(kwargs.get("local_size"))
        return None
    original = ALL_MASK_ATTENTION_FUNCTIONS[_original_name(config)] if config is not None else None
    return None if original is None else original(*args, config=config, **kwargs)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _packed_mask)


@contextmanager
def packed_forward(target: PreTrainedModel, layout: PackedLayout) -> Iterator[None]:
    """Makes the target's forwards inside it, in this thread, packed ones; restores its attention whatever happens.

    Another thread that runs the same target at the same time gets the target's own attention: the packed function and
    its masks look at a thread-local layout and otherwise do what was configured.
    """
    config = target.config.get_text_config()
    with _lock:
        held = _originals.setdefault(id(config), ["", 0])
        if held[1] == 0:
            held[0] = config._attn_implementation
        held[1] += 1
        config._attn_implementation_internal = NAME
    outer = getattr(_thread, "layout", None)
    _thread.layout = layout
    try:
        yield
    finally:
        _thread.layout = outer
        with _lock:
            held[1] -= 1
            if held[1] == 0:
                # The name stays on record: another thread may have looked up the packed function just before.
                config._attn_implementation_internal = held[0]
