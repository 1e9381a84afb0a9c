"""Packed forwards give each row the logits it has alone."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from decoding_helpers import shared_target
from helpers import TARGET_KINDS, tiny_target
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from adaflash_hf._compat import cache_argument
from adaflash_hf.generation import packed_attention as packing
from adaflash_hf.generation.packed_attention import NAME, NotPackable, PackedLayout, packed_forward
from adaflash_hf.generation.ragged_cache import RaggedCache


@torch.no_grad()
def worst_difference(target, lengths=(9, 1, 23, 14), rounds=5, seed=0):
    """Runs rounds of random lengths, random acceptance and leaving rows; largest logit difference to each row alone."""
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
            alone = target(text[None, : past + n]).logits[0, past:]
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


@pytest.mark.parametrize("extra", [{}, {"softcap": 5.0}, {"s_aux": True}, {"softcap": 5.0, "s_aux": True}])
@pytest.mark.parametrize("groups", [1, 2])
def test_one_attention_against_its_formula(extra, groups):
    torch.manual_seed(0)
    rows, heads, queries, keys, width = 3, 4, 5, 11, 8
    query = torch.randn(rows, heads, queries, width)
    key, value = torch.randn(2, rows, heads // groups, keys, width)
    mask = torch.rand(rows, 1, queries, keys) < 0.6
    mask[..., 0] = True
    sinks = torch.randn(heads) if extra.get("s_aux") else None
    found = packing._attend(query, key, value, mask, 0.3, extra.get("softcap"), sinks)
    scores = query @ key.repeat_interleave(groups, 1).mT * 0.3
    if "softcap" in extra:
        scores = (scores / 5.0).tanh() * 5.0
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(rows, -1, queries, 1)], -1)
    weights = scores.softmax(-1)[..., :keys]
    torch.testing.assert_close(found, weights @ value.repeat_interleave(groups, 1))


def test_packing_and_unpacking_are_inverse():
    for counts in ([3], [2, 2, 2], [3, 1, 4]):
        layout = PackedLayout(counts, [5] * len(counts))
        states = torch.randn(1, 2, sum(counts), 4)
        unpacked = layout.unpack(states)
        assert unpacked.shape == (len(counts), 2, max(counts), 4)
        assert torch.equal(layout.pack(unpacked), states.transpose(1, 2))
        assert layout.pack(unpacked).is_contiguous()


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
