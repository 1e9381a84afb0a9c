"""Attention for packed tokens of many rows: everything else in the model sees one row of `N` tokens."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_flash_attention_utils import _flash_attention_forward, lazy_import_flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

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

    Index tensors and masks are made once and serve every layer of the forward.

    Args:
        counts: New tokens of each row, in the order they are packed.
        pasts: Tokens each row's cache already holds.
    """

    def __init__(self, counts: Sequence[int], pasts: Sequence[int]) -> None:
        self.counts, self.pasts = list(counts), list(pasts)
        self.longest_query = max(self.counts)
        self.longest_key = max(past + count for past, count in zip(self.pasts, self.counts, strict=True))
        self.rows = len(self.counts)
        self.dense = len(set(self.counts)) == 1
        self.is_prefill = max(self.pasts) == 0
        self.masked_windows: set[int | None] = set()
        self.attended = 0
        self._made: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _index(self, name: str, numbers: Callable[[], list[int]], device: torch.device) -> torch.Tensor:
        return self._once((name, device), lambda: torch.tensor(numbers(), device=device))

    def _sources(self) -> list[int]:
        """Packed token behind each of the `rows * longest_query` places; a row's last one fills its padding."""
        ends = accumulate(self.counts)
        return [
            end - count + min(place, count - 1)
            for end, count in zip(ends, self.counts, strict=True)
            for place in range(self.longest_query)
        ]

    def _places(self) -> list[int]:
        """Place among `rows * longest_query` of each packed token."""
        return [row * self.longest_query + place for row, count in enumerate(self.counts) for place in range(count)]

    def alone(self, row: int) -> PackedLayout:
        """The layout of one row."""
        return self._once(("alone", row), lambda: PackedLayout([self.counts[row]], [self.pasts[row]]))

    def unpack(self, states: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """`[1, heads, N, width]` -> `[rows, kv_heads, longest_query * groups, width]`.

        Query heads that share keys become queries of one head, so that nobody has to repeat keys.
        """
        width, tokens = states.shape[3], states.transpose(1, 2)
        if self.longest_query == 1:
            return tokens.reshape(self.rows, kv_heads, -1, width)
        if not self.dense:
            tokens = tokens.index_select(1, self._index("sources", self._sources, states.device))
        tokens = tokens.reshape(self.rows, self.longest_query, kv_heads, -1, width)
        return tokens.transpose(1, 2).reshape(self.rows, kv_heads, -1, width)

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """`[rows, kv_heads, longest_query * groups, width]` -> `[1, N, heads, width]`, contiguous as some models
        `view` it."""
        rows, kv_heads, _, width = states.shape
        if self.longest_query == 1:
            return states.reshape(1, rows, -1, width).contiguous()
        tokens = states.view(rows, kv_heads, self.longest_query, -1, width).transpose(1, 2)
        tokens = tokens.reshape(1, rows * self.longest_query, -1, width)
        if not self.dense:
            tokens = tokens.index_select(1, self._index("places", self._places, states.device))
        return tokens.contiguous()

    def window(self, module: torch.nn.Module, given: int | None) -> int | None:
        """The window of a layer. The masks that the model asked for decide: some models hand on no `sliding_window`."""
        if len(self.masked_windows) == 1:
            return next(iter(self.masked_windows))
        kinds, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
        if given is None and kinds is not None and index is not None and kinds[index] == "sliding_attention":
            return next((window for window in self.masked_windows if window is not None), given)
        return given

    def first_key(self, window: int | None) -> int:
        """Slot before which no query of a windowed layer sees anything."""
        return 0 if window is None else max(0, min(self.pasts) - window + 1)

    def visible(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Boolean `[rows, 1, longest_query, keys]`, keys from [`first_key`] on; `None` where everything is visible."""
        if min(self.pasts) + 1 == self.longest_key:
            return None
        pasts = torch.tensor(self.pasts, device=device)[:, None]
        counts = torch.tensor(self.counts, device=device)[:, None]
        places = torch.arange(self.longest_query, device=device)[None]
        # A padding query sees what its row's last token sees, so that no softmax is over nothing.
        queries = (pasts + torch.minimum(places, counts - 1))[:, :, None]
        keys = torch.arange(self.first_key(window), self.longest_key, device=device)
        mask = keys <= queries
        if window is not None:
            mask = mask & (keys > queries - window)
        return mask[:, None]

    def bias(self, window: int | None, groups: int, like: torch.Tensor) -> torch.Tensor | None:
        """[`visible`] as what is added to the scores of unpacked queries, in `like`'s dtype.

        A boolean mask would be turned into this by every layer.

        Returns:
            `[rows, 1, longest_query * groups, keys]`, or 1 for `longest_query * groups` where all queries see the same.
        """

        def make() -> torch.Tensor | None:
            mask = self.visible(window, like.device)
            if mask is None:
                return None
            if self.longest_query > 1:
                mask = mask.repeat_interleave(groups, dim=2)
            # The memory-efficient kernel copies a mask whose strides are no multiples of 8.
            width = -(-mask.shape[-1] // 8) * 8
            bias = torch.zeros(*mask.shape[:-1], width, dtype=like.dtype, device=like.device)[..., : mask.shape[-1]]
            return bias.masked_fill_(~mask, torch.finfo(like.dtype).min)

        return self._once(("bias", window, groups, like.dtype, like.device), make)

    def flash_inputs(
        self, window: int | None, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | int]]:
        """Rows and slots `[K]` of the keys that a variable-length kernel needs, and where each row's tokens begin."""

        def make() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | int]]:
            helds = [past if window is None else min(past, window - 1) for past in self.pasts]
            lengths = [held + count for held, count in zip(helds, self.counts, strict=True)]
            rows = [row for row, length in enumerate(lengths) for _ in range(length)]
            slots = [
                past - held + place
                for past, held, length in zip(self.pasts, helds, lengths, strict=True)
                for place in range(length)
            ]
            bounds = {
                "cu_seq_lens_q": torch.tensor([0, *accumulate(self.counts)], dtype=torch.int32, device=device),
                "cu_seq_lens_k": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
                "max_length_q": self.longest_query,
                "max_length_k": max(lengths),
            }
            return torch.tensor(rows, device=device), torch.tensor(slots, device=device), bounds

        return self._once(("flash", window, device), make)


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
    name = _original_name(module.config)
    window = layout.window(module, sliding_window)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _runs_flash(name, query, s_aux):
        return _flash(layout, query, key, value, name, window, scaling, softcap, s_aux), None
    if name == "sdpa":
        # Up to transformers 5.17 sdpa drops a soft cap in silence; plain decoding is the measure, so it is dropped here.
        softcap = None
    if layout.is_prefill:
        # Prefill: each row alone, so that unequal prompts cost what they are.
        pieces = [
            _attend(layout.alone(row), own, key[row : row + 1], value[row : row + 1], window, scaling, softcap, s_aux)
            for row, own in enumerate(query.split(layout.counts, dim=2))
        ]
        return torch.cat(pieces, dim=1), None
    return _attend(layout, query, key, value, window, scaling, softcap, s_aux), None


def _attend(
    layout: PackedLayout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """`[1, heads, N, width]` over `[rows, kv_heads, at least longest_key, width]` -> `[1, N, heads, width]`."""
    kv_heads, queries = key.shape[1], layout.longest_query
    groups = query.shape[1] // kv_heads
    first, last = layout.first_key(window), layout.longest_key
    if first or last < key.shape[2]:
        key, value = key[:, :, first:last], value[:, :, first:last]
    plain = softcap is None and s_aux is None
    if plain and layout.rows == 1 and 1 < queries == last and (window is None or window >= last):
        # A prompt: kernels that are told so need no mask and skip half of the work.
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return output.transpose(1, 2).contiguous()
    grouped, bias = layout.unpack(query, kv_heads), layout.bias(window, groups, query)
    if plain:
        return layout.pack(F.scaled_dot_product_attention(grouped, key, value, attn_mask=bias, scale=scaling))
    scores = grouped @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if s_aux is None:
        weights = scores.float().softmax(-1)
    else:
        sinks = s_aux.to(scores.dtype).view(kv_heads, 1, groups).expand(layout.rows, -1, queries, -1)
        weights = torch.cat([scores, sinks.reshape(*scores.shape[:3], 1)], dim=-1).float().softmax(-1)[..., :-1]
    return layout.pack(weights.to(value.dtype) @ value)


def _runs_flash(name: str | None, query: torch.Tensor, s_aux: torch.Tensor | None) -> bool:
    """Whether the target's own attention is a flash-attention kernel that takes these inputs.

    Raises:
        NotPackable: The target was configured for a function that packed attention does not know.
    """
    if not is_flash_attention_requested(requested_attention_implementation=name):
        if name not in (None, "eager", "sdpa", "flex_attention"):
            raise NotPackable(f"attn_implementation={name!r} may be more than plain attention")
        return False
    if not _half_on_gpu(query):
        return False
    kernel = lazy_import_flash_attention(name)[0][1]
    if kernel is None:
        raise NotPackable(f"attn_implementation={name!r} has no variable-length kernel")
    # transformers leaves sinks out where a kernel has no argument for them.
    return s_aux is None or not {"s_aux", "learnable_sink"}.isdisjoint(inspect.signature(kernel).parameters)


def _half_on_gpu(states: torch.Tensor) -> bool:
    return states.is_cuda and states.dtype in (torch.float16, torch.bfloat16)


def _flash(
    layout: PackedLayout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    name: str,
    window: int | None,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """As [`_attend`], by the variable-length kernel: its causal mask ends in the lower right corner, as ours does."""
    rows, slots, bounds = layout.flash_inputs(window, query.device)
    key, value = (states.transpose(1, 2)[rows, slots][None] for states in (key, value))
    width = value.shape[-1]
    if width < query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - width))  # the kernel knows one width
    output = _flash_attention_forward(
        query.transpose(1, 2),
        key,
        value,
        attention_mask=None,
        query_length=query.shape[2],
        is_causal=True,
        softmax_scale=scaling,
        sliding_window=window,
        softcap=softcap,
        s_aux=None if s_aux is None else s_aux.to(query.dtype),
        attn_implementation=name,
        **bounds,
    )
    return output[..., :width].contiguous()


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
