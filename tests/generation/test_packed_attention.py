"""Packed forwards give each row the logits it has alone."""

from __future__ import annotations

import inspect
import random
import threading

import pytest
import torch
from decoding_helpers import shared_target
from helpers import TARGET_KINDS, tiny_target
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import modeling_flash_attention_utils as flash_utils

from adaflash_hf._compat import cache_argument
from adaflash_hf.generation import packed_attention as packing
from adaflash_hf.generation.packed_attention import NAME, NotPackable, PackedLayout, packed_forward
from adaflash_hf.generation.ragged_cache import RaggedCache


@torch.no_grad()
def worst_difference(target, lengths=(9, 1, 23, 14), rounds=5, seed=0, plain=None):
    """Runs rounds of random lengths, random acceptance and leaving rows; largest logit difference to each row alone
    (with `plain` where that is another model)."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    texts = [torch.randint(3, 60, (length,), generator=generator) for length in lengths]
    cache, worst, counts = RaggedCache(len(texts)), 0.0, list(lengths)
    for turn in range(rounds):
        pasts = list(cache.lengths)
        cache.write_to(counts)
        positions = torch.cat([torch.arange(past, past + n) for past, n in zip(pasts, counts)])
        with packed_forward(target, PackedLayout(counts, pasts)):
            packed = torch.cat([text[past : past + n] for text, past, n in zip(texts, pasts, counts)])[None]
            logits = target(packed, position_ids=positions[None], **{cache_argument(target): cache}).logits[0]
        for text, past, n, found in zip(texts, pasts, counts, logits.split(counts)):
            alone = (plain or target)(text[None, : past + n]).logits[0, past:]
            worst = max(worst, (found - alone).abs().max().item())
        accepted = list(counts) if turn == 0 else [chance.randint(1, n) for n in counts]
        cache.commit(accepted)
        if turn == 2 and len(texts) > 2:
            cache.keep_rows([0, 2])
            texts = [texts[0], texts[2]]
        # What was rejected is replaced by other tokens.
        counts = [chance.randint(1, 6) for _ in texts]
        texts = [
            torch.cat([text[:length], torch.randint(3, 60, (n,), generator=generator)])
            for text, length, n in zip(texts, cache.lengths, counts)
        ]
    return worst


@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_logits_of_every_row_over_rounds(kind):
    target = shared_target(kind)
    assert worst_difference(target) < 2e-4
    assert worst_difference(target, lengths=[17], rounds=3, seed=1) < 2e-4


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_whatever_attention_the_target_was_loaded_with(kind, implementation):
    target = tiny_target(kind, num_hidden_layers=2, attn_implementation=implementation)
    assert worst_difference(target, lengths=(12, 5)) < 1e-4
    assert target.config._attn_implementation == implementation


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        # These two build sliding masks and hand no window on to their attention.
        ("phimoe", {"sliding_window": 6, "num_local_experts": 4}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 4, "num_experts": 4}),
    ],
)
def test_windows_that_only_the_masks_know(kind, own):
    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, initializer_range=0.2, **own
    )  # fmt: skip
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    assert worst_difference(target) < 1e-4


def reference_attention(query, key, value, *, past, scale, window=None, softcap=None, sinks=None):
    """Causal attention of one row by its formula: queries `[n, heads, width]`, keys `[past + n, kv_heads, width]`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    places = past + torch.arange(len(query))[:, None]
    keys = torch.arange(len(key))
    hidden = keys > places
    if window is not None:
        hidden |= keys <= places - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(query), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


def packed_inputs(counts, pasts, heads=4, groups=2, width=8, value_width=6):
    """Packed queries and the keys and values of a cache in which what no query sees is large."""
    torch.manual_seed(0)
    longest = max(past + count for past, count in zip(pasts, counts))
    query = torch.randn(1, sum(counts), heads, width).transpose(1, 2)
    key = torch.randn(len(counts), heads // groups, longest, width)
    value = torch.randn(len(counts), heads // groups, longest, value_width)
    for row, (past, count) in enumerate(zip(pasts, counts)):
        key[row, :, past + count :] = value[row, :, past + count :] = 50.0
    return query, key, value


def by_rows(counts, pasts, query, key, value, **arguments):
    """[`reference_attention`] of every row, `[1, N, heads, width]`."""
    pieces = [
        reference_attention(
            own[0].transpose(0, 1),
            key[row, :, : past + len(own[0, 0])].transpose(0, 1),
            value[row, :, : past + len(own[0, 0])].transpose(0, 1),
            past=past,
            **arguments,
        )
        for row, (own, past) in enumerate(zip(query.split(counts, dim=2), pasts))
    ]
    return torch.cat(pieces)[None]


LAYOUTS = [([1], [6]), ([4], [6]), ([1, 1, 1], [6, 6, 6]), ([1, 1], [2, 9]), ([3, 3], [7, 4]), ([3, 1, 5], [4, 11, 0])]


@pytest.mark.parametrize("extra", [{}, {"softcap": 5.0}, {"sinks": True}, {"softcap": 5.0, "sinks": True}])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("counts", "pasts"), LAYOUTS)
def test_attention_against_its_formula(counts, pasts, groups, window, extra):
    query, key, value = packed_inputs(counts, pasts, groups=groups)
    sinks, softcap = torch.randn(4) if extra.get("sinks") else None, extra.get("softcap")
    layout = PackedLayout(counts, pasts)
    found = packing._attend(layout, query, key, value, window, 0.3, softcap, sinks)
    assert found.is_contiguous()
    expected = by_rows(counts, pasts, query, key, value, scale=0.3, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(found, expected)


def test_packing_and_unpacking_are_inverse():
    for counts in ([3], [1, 1], [2, 2, 2], [3, 1, 4]):
        for kv_heads in (2, 4):
            layout = PackedLayout(counts, [5] * len(counts))
            states = torch.randn(1, 4, sum(counts), 6)
            unpacked = layout.unpack(states, kv_heads)
            assert unpacked.shape == (len(counts), kv_heads, max(counts) * 4 // kv_heads, 6)
            assert torch.equal(layout.pack(unpacked), states.transpose(1, 2))
            assert layout.pack(unpacked).is_contiguous()


def test_masks_and_indices_are_made_once_a_forward(monkeypatch):
    """Layers share them, also where a prompt's window makes each row need a mask of its own."""
    made, visible = [], PackedLayout.visible

    def counted(self, *arguments):
        made.append(arguments)
        return visible(self, *arguments)

    monkeypatch.setattr(PackedLayout, "visible", counted)
    target = shared_target("mistral")
    cache = RaggedCache(2)
    for counts, masks in (([12, 20], 2), ([2, 3], 1)):
        made.clear()
        pasts = list(cache.lengths)
        cache.write_to(counts)
        with torch.no_grad(), packed_forward(target, PackedLayout(counts, pasts)):
            positions = torch.cat([torch.arange(past, past + n) for past, n in zip(pasts, counts)])[None]
            target(torch.full_like(positions, 7), position_ids=positions, **{cache_argument(target): cache})
        cache.commit(counts)
        assert len(made) == masks


def test_what_a_query_sees():
    layout = PackedLayout([2, 1], [1, 3])
    # Row 0 holds 1 and adds 2; row 1 holds 3 and adds 1, and its second query is padding.
    assert layout.visible(None, torch.device("cpu"))[:, 0].int().tolist() == [
        [[1, 1, 0, 0], [1, 1, 1, 0]],
        [[1, 1, 1, 1], [1, 1, 1, 1]],
    ]
    assert layout.visible(2, torch.device("cpu"))[:, 0].int().tolist() == [
        [[1, 1, 0, 0], [0, 1, 1, 0]],
        [[0, 0, 1, 1], [0, 0, 1, 1]],
    ]
    assert PackedLayout([1, 1], [4, 4]).visible(None, torch.device("cpu")) is None
    assert PackedLayout([1, 1], [4, 4]).visible(3, torch.device("cpu")) is None
    # Keys that no window reaches are not read: slots 0 and 1 here.
    layout = PackedLayout([1, 2], [5, 3])
    assert layout.first_key(2) == 2
    assert layout.visible(2, torch.device("cpu"))[:, 0].int().tolist() == [
        [[0, 0, 1, 1], [0, 0, 1, 1]],
        [[1, 1, 0, 0], [0, 1, 1, 0]],
    ]


def test_what_is_added_to_the_scores():
    like = torch.zeros(1, dtype=torch.bfloat16)
    layout = PackedLayout([2, 1], [1, 3])
    bias = layout.bias(None, 3, like)
    assert bias.shape == (2, 1, 6, 4) and bias.dtype == like.dtype
    assert all(stride % 8 == 0 for stride in bias.stride()[:-1])
    assert torch.equal(bias == 0, layout.visible(None, like.device).repeat_interleave(3, 2))
    assert layout.bias(None, 3, like) is bias
    # One for all query heads where each row has one token, and none where everything is visible.
    assert PackedLayout([1, 1], [1, 3]).bias(None, 3, like).shape == (2, 1, 1, 4)
    assert PackedLayout([1, 1], [3, 3]).bias(None, 3, like) is None


def test_masks_that_are_more_than_causal_are_not_followed():
    target = tiny_target("llama", num_hidden_layers=2)
    with packed_forward(target, PackedLayout([2], [0])):
        for arguments in ({"allow_is_causal_skip": False}, {}):
            with pytest.raises(NotPackable, match="LlamaConfig asks for a mask that is more than causal"):
                packing._packed_mask(config=target.config, **arguments)
    states = torch.randn(1, 4, 2, 8)
    module = target.model.layers[0].self_attn
    for arguments, reason in (
        ({"attention_mask": torch.zeros(1)}, "LlamaAttention has a mask of its own"),
        (
            {"attention_mask": None, "position_bias": torch.zeros(1)},
            r"LlamaAttention has \['position_bias'\] of its own",
        ),
        ({"attention_mask": None, "is_causal": False}, "LlamaAttention has a mask of its own"),
    ):
        with packed_forward(target, PackedLayout([2], [0])), pytest.raises(NotPackable, match=reason):
            packing.packed_attention(module, states, states, states, **arguments)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_thread_keeps_the_targets_own_attention(implementation):
    """A plain forward with padding in another thread, while this one is inside a packed forward."""
    target = tiny_target("mistral", num_hidden_layers=2, attn_implementation=implementation)
    ids, mask = torch.arange(3, 27).view(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    expected, found = target(ids, attention_mask=mask).logits, []
    with packed_forward(target, PackedLayout([3], [0])):
        assert target.config._attn_implementation == NAME
        thread = threading.Thread(target=lambda: found.append(run()))

        def run():
            with torch.no_grad():
                return target(ids, attention_mask=mask).logits

        thread.start()
        thread.join()
    torch.testing.assert_close(found[0][mask.bool()], expected[mask.bool()])
    assert target.config._attn_implementation == implementation


def test_two_packed_forwards_at_once_restore_once():
    target = tiny_target("llama", num_hidden_layers=2)
    inside, leave = threading.Event(), threading.Event()

    def other():
        with packed_forward(target, PackedLayout([1], [0])):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with pytest.raises(KeyError), packed_forward(target, PackedLayout([1], [0])):
        raise KeyError
    assert target.config._attn_implementation == NAME
    leave.set()
    thread.join()
    assert target.config._attn_implementation == "sdpa"
    # A thread that looked up the packed function a moment ago still finds what the target was configured for.
    assert packing._original_name(target.config) == "sdpa"


def test_the_attention_may_be_changed_between_calls():
    target = tiny_target("llama", num_hidden_layers=2)
    for implementation in ("eager", "sdpa", "eager"):
        target.set_attn_implementation(implementation)
        with packed_forward(target, PackedLayout([1], [0])):
            assert packing._original_name(target.config) == implementation
        assert target.config._attn_implementation == implementation


def test_soft_caps_follow_what_plain_decoding_does():
    """Eager attention has soft caps, sdpa has none (old releases drop it in silence, newer ones never get here)."""
    torch.manual_seed(0)
    states = torch.randn(1, 2, 3, 8) * 4
    target = tiny_target("gemma2", num_hidden_layers=2, attn_implementation="eager")
    module = target.model.layers[0].self_attn
    plain = F.scaled_dot_product_attention(states, states, states, is_causal=True).transpose(1, 2)
    for implementation in ("eager", "sdpa"):
        target.config._attn_implementation_internal = implementation
        with packed_forward(target, PackedLayout([3], [0])):
            found, _ = packing.packed_attention(module, states, states, states, None, softcap=0.5)
        assert torch.allclose(found, plain, atol=1e-5) == (implementation == "sdpa")


def flash_kernel(calls, *, sinks=False):
    """A variable-length kernel in torch: causal from the lower right corner, `window_size` inclusive on both sides."""

    def kernel(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, s_aux=None,
    ):  # fmt: skip
        calls.append(window_size)
        assert causal and q.shape[2] == k.shape[2] == v.shape[2] and window_size[0] == window_size[1]
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert (max(queries), max(keys)) == (max_seqlen_q, max_seqlen_k)
        window = None if window_size == (-1, -1) else window_size[0] + 1
        pieces = [
            reference_attention(
                *own, past=len(own[1]) - len(own[0]), scale=softmax_scale, window=window, softcap=softcap or None,
                sinks=s_aux,
            )
            for own in zip(q.split(queries), k.split(keys), v.split(keys))
        ]  # fmt: skip
        return torch.cat(pieces)

    if not sinks:
        parameters = inspect.signature(kernel).parameters
        kernel.__signature__ = inspect.Signature([parameters[name] for name in parameters if name != "s_aux"])
    return kernel


@pytest.fixture
def install_flash(monkeypatch):
    """Puts a kernel where transformers would find flash-attention, on a GPU that is not there."""

    def install(kernel, gpu=True):
        monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *a, **k: (None, kernel, None, None, None))
        if gpu:
            monkeypatch.setattr(packing, "_half_on_gpu", lambda states: True)

    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"):
        monkeypatch.setattr(flash_utils, name, None)
    for name in ("_pad_fn", "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):
        monkeypatch.setattr(flash_utils, name, None, raising=False)
    return install


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"])
def test_flash_kernels_serve_the_rows(kind, install_flash):
    """Every layer of every packed forward goes through the kernel and gives what eager attention gives row by row."""
    calls = []
    install_flash(flash_kernel(calls, sinks=kind == "gpt_oss"))
    plain = tiny_target(kind, attn_implementation="eager")
    flash = tiny_target(kind, attn_implementation="eager")
    flash.config._attn_implementation_internal = "flash_attention_2"
    assert worst_difference(flash, rounds=5, plain=plain) < 2e-4
    assert len(calls) == 5 * plain.config.num_hidden_layers
    assert flash.config._attn_implementation == "flash_attention_2"
    # transformers counts a window without the query itself.
    windows = {"llama": {(-1, -1)}, "gpt2": {(-1, -1)}, "mistral": {(5, 5)}}
    assert set(calls) == windows.get(kind, {(-1, -1), (7, 7)})


def test_a_flash_kernel_without_sinks_is_not_asked_for_them(install_flash):
    calls = []
    install_flash(flash_kernel(calls))
    plain = tiny_target("gpt_oss", attn_implementation="eager")
    flash = tiny_target("gpt_oss", attn_implementation="eager")
    flash.config._attn_implementation_internal = "flash_attention_2"
    assert worst_difference(flash, plain=plain) < 2e-4
    assert not calls


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("counts", "pasts"), LAYOUTS)
def test_flash_and_own_path_agree(counts, pasts, window, softcap, install_flash):
    install_flash(flash_kernel([]))
    query, key, value = packed_inputs(counts, pasts)
    layout = PackedLayout(counts, pasts)
    arguments = (window, 0.3, softcap, None)
    found = packing._flash(layout, query, key, value, "flash_attention_2", *arguments)
    torch.testing.assert_close(found, packing._attend(layout, query, key, value, *arguments))
    assert found.is_contiguous()


def test_flash_without_a_gpu_takes_the_own_path(install_flash):
    calls = []
    install_flash(flash_kernel(calls), gpu=False)
    target = tiny_target("llama", num_hidden_layers=2)
    target.config._attn_implementation_internal = "flash_attention_2"
    with packed_forward(target, PackedLayout([3], [0])):
        states = torch.randn(1, 4, 3, 8)
        found, _ = packing.packed_attention(target.model.layers[0].self_attn, states, states, states, None)
    expected = F.scaled_dot_product_attention(states, states, states, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    assert not calls


def test_attention_of_unknown_kinds_is_not_replaced(install_flash):
    """A function that the user registered, or a kernel of another kind, may do anything."""
    target = tiny_target("llama", num_hidden_layers=2)
    module, states = target.model.layers[0].self_attn, torch.randn(1, 4, 2, 8)
    install_flash(None)
    for name, reason in (
        ("my_attention", "attn_implementation='my_attention' may be more than plain attention"),
        ("someone/sparse-flash", "attn_implementation='someone/sparse-flash' has no variable-length kernel"),
    ):
        target.config._attn_implementation_internal = name
        with packed_forward(target, PackedLayout([2], [0])), pytest.raises(NotPackable, match=reason):
            packing.packed_attention(module, states, states, states, None)
