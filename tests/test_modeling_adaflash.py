"""The drafter network: parity with published numerics, masks, caches, gradients, saving and loading, adapters."""

import inspect
import json
import logging
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from helpers import (
    DATA,
    HIDDEN,
    drafter_inputs,
    saved_tensors,
    tiny_drafter,
    tiny_target,
    write_checkpoint,
    zlab_config,
    zlab_tensors,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, GenerationConfig
from transformers.cache_utils import DFlashCache

from adaflash_hf import AdaFlashConfig, AdaFlashDraftModel, AdaFlashDraftOutput
from adaflash_hf.draft_settings import read_draft_settings

FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = {
    "full": {},
    "full, causal": {"causal_layers": [True, True]},
    "sliding": {"layer_types": [SLIDING] * 2, "sliding_window": 3},
    "sliding, causal": {"layer_types": [SLIDING] * 2, "sliding_window": 3, "causal_layers": [True, True]},
    "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 3, "causal_layers": [True, False]},
}
ATTENTION = ["sdpa", "eager", "flex_attention"]


def uncompiled(attention):
    """Flex attention without the minute of compiling; `-m slow` compiles it."""
    return torch.compiler.set_stance("force_eager") if attention == "flex_attention" else nullcontext()


def assert_same_state(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def every_part_drafter(**kw):
    """A drafter that has everything a checkpoint can hold, at values that tell tensors apart."""
    drafter = tiny_drafter(draft_token_ids=[5, 3, 60, 17], seed=4, **kw)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return drafter


# Parity with the published numerics


def parity(folder, attention):
    model = AdaFlashDraftModel.from_pretrained(DATA / "parity" / folder, attn_implementation=attention).eval()
    assert model.config._attn_implementation == attention
    case = load_file(DATA / "parity" / folder / "case.safetensors")
    with torch.no_grad():
        output = model(case["noise_embeds"], case["context_hidden_states"], position_ids=case["position_ids"])
    assert (output.last_hidden_state - case["expected.last_hidden_state"]).abs().max() < 1e-5
    return output, case


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_parity_with_dflash(attention):
    with uncompiled(attention):
        output, _ = parity("dflash-tiny", attention)
    assert output.length_ratio is None and output.survival_logits is None and output.cache is None


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_parity_with_adaflash_length_ratio_included(attention):
    with uncompiled(attention):
        output, case = parity("adaflash-tiny", attention)
    assert output.length_ratio.shape == (2,) and output.survival_logits is None
    assert (output.length_ratio - case["expected.length_ratio"].squeeze(-1)).abs().max() < 1e-5


@pytest.mark.slow
def test_parity_with_compiled_flex_attention():
    parity("dflash-tiny", "flex_attention")
    output, case = parity("adaflash-tiny", "flex_attention")
    assert (output.length_ratio - case["expected.length_ratio"].squeeze(-1)).abs().max() < 1e-5


@torch.no_grad()
def test_positions_are_used_and_default_to_counting():
    model = AdaFlashDraftModel.from_pretrained(DATA / "parity" / "dflash-tiny").eval()
    inputs = drafter_inputs(model)
    counted = model(**inputs).last_hidden_state
    given = model(**inputs, position_ids=torch.arange(9 + 8)[None]).last_hidden_state
    assert torch.equal(counted, given)
    # RoPE is relative: the same everywhere, but not with a gap between context and block.
    shifted = model(**inputs, position_ids=torch.arange(40, 40 + 9 + 8)[None]).last_hidden_state
    torch.testing.assert_close(shifted, counted, rtol=0, atol=1e-4)
    gap = torch.cat([torch.arange(9), torch.arange(8) + 30])[None]
    assert (model(**inputs, position_ids=gap).last_hidden_state - counted).abs().max() > 1e-3
    apart = model(**inputs, position_ids=gap[:, 9:], context_position_ids=gap[:, :9]).last_hidden_state
    assert torch.equal(apart, model(**inputs, position_ids=gap).last_hidden_state)


# Windows and causality


def moved_slots(drafter, change):
    """Slots of the output that move when `change` edits the inputs."""
    inputs = drafter_inputs(drafter, context=12)
    edited = {name: value.clone() for name, value in inputs.items()}
    change(edited)
    with torch.no_grad():
        difference = drafter(**edited).last_hidden_state - drafter(**inputs).last_hidden_state
    return (difference.abs().amax(-1)[0] > 1e-6).tolist()


def test_a_bidirectional_block_sees_its_later_slots_and_a_causal_one_does_not():
    def last_slot(inputs):
        inputs["noise_embeds"][:, 3] += 1.0

    assert moved_slots(tiny_drafter(), last_slot) == [True] * 4
    assert moved_slots(tiny_drafter(causal_layers=[True, True]), last_slot) == [False, False, False, True]
    # One bidirectional layer is enough to carry it back.
    assert moved_slots(tiny_drafter(causal_layers=[True, False]), last_slot) == [True] * 4


@pytest.mark.parametrize(
    ("causal", "position", "moved"),
    [
        # A block at positions 12…15 after 12 context tokens, one layer, window 3.
        # Causal: distance < 3, the current token counts. Bidirectional: distance <= 3.
        (True, 11, [True, True, False, False]),
        (True, 10, [True, False, False, False]),
        (True, 9, [False] * 4),
        (False, 11, [True, True, True, False]),
        (False, 9, [True, False, False, False]),
        (False, 8, [False] * 4),
    ],
)
def test_a_sliding_layer_sees_its_window_of_the_context(causal, position, moved):
    def context_token(inputs):
        inputs["context_hidden_states"][:, position] += torch.linspace(-3, 3, 96)

    drafter = tiny_drafter(
        num_hidden_layers=1, layer_types=[SLIDING], sliding_window=3, causal_layers=[causal], normalize_taps=False
    )
    assert moved_slots(drafter, context_token) == moved
    full = tiny_drafter(num_hidden_layers=1, normalize_taps=False)
    assert moved_slots(full, context_token) == [True] * 4


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_also_limits_what_slots_see_of_the_block(causal):
    drafter = tiny_drafter(
        num_hidden_layers=1, block_size=8, layer_types=[SLIDING], sliding_window=3, causal_layers=[causal]
    )

    def third_slot(inputs):
        inputs["noise_embeds"][:, 2] += torch.linspace(-3, 3, HIDDEN)

    expected = [False, False, True, True, True, False, False, False] if causal else [True] * 6 + [False] * 2
    assert moved_slots(drafter, third_slot) == expected


def test_every_kind_of_layer_gives_another_output():
    outputs = []
    for kind in LAYERS.values():
        drafter = tiny_drafter(**kind)
        with torch.no_grad():
            outputs.append(drafter(**drafter_inputs(drafter, context=12)).last_hidden_state)
    for i, first in enumerate(outputs):
        for second in outputs[:i]:
            assert (first - second).abs().max() > 1e-3


# C3: attention implementations and masks


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_attention_implementations_agree(kind, padded):
    drafter = tiny_drafter(**LAYERS[kind])
    inputs = drafter_inputs(drafter, rows=2, context=10)
    if padded:
        inputs["attention_mask"] = torch.ones(2, 14, dtype=torch.long)
        inputs["attention_mask"][0, :4] = 0
    outputs = []
    for attention in ATTENTION:
        drafter.set_attn_implementation(attention)
        with uncompiled(attention):
            outputs.append(drafter(**inputs).last_hidden_state)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_padding_is_as_if_it_were_not_there(kind, attention):
    drafter = tiny_drafter(**LAYERS[kind])
    drafter.set_attn_implementation(attention)
    short = drafter_inputs(drafter, context=6)
    alone = drafter(**short).last_hidden_state
    batch = drafter_inputs(drafter, rows=2, context=10, seed=1)
    batch["noise_embeds"][1], batch["context_hidden_states"][1, 4:] = (
        short["noise_embeds"][0],
        short["context_hidden_states"][0],
    )
    mask, positions = torch.ones(2, 14, dtype=torch.long), torch.arange(14).repeat(2, 1)
    mask[1, :4], positions[1] = 0, (torch.arange(14) - 4).clamp(0)
    output = drafter(**batch, attention_mask=mask, position_ids=positions).last_hidden_state
    torch.testing.assert_close(output[1:], alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        output[:1],
        drafter(batch["noise_embeds"][:1], batch["context_hidden_states"][:1]).last_hidden_state,
        rtol=0,
        atol=1e-5,
    )
    # A 4-D boolean mask that says the same gives the same, and is never added to the scores.
    four = mask.bool()[:, None, None, :].expand(2, 1, 4, 14)
    same = drafter(**batch, attention_mask=four, position_ids=positions).last_hidden_state
    torch.testing.assert_close(same, output, rtol=0, atol=1e-6)


def test_flash_attention_refuses_a_mask_it_cannot_follow():
    drafter = tiny_drafter()
    drafter.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError) as error:
        drafter(**drafter_inputs(drafter), attention_mask=torch.ones(1, 1, 4, 13, dtype=torch.bool))
    assert str(error.value) == (
        "attn_implementation='flash_attention_2' takes no [batch, 1, slots, keys] mask: use 'sdpa', 'eager' or "
        "'flex_attention' for several blocks a row."
    )


# C1, C2: many blocks a row


def many_blocks(drafter, anchors, context=14, seed=0):
    """Blocks opened at `anchors` (one list a row) over one context, as training runs them, and their parts."""
    rows, count, size = len(anchors), len(anchors[0]), drafter.config.block_size
    inputs = drafter_inputs(drafter, rows=rows, context=context, slots=count * size, seed=seed)
    starts = torch.tensor(anchors)
    positions = (starts[..., None] + torch.arange(size)).flatten(1)
    mask = torch.zeros(rows, 1, count * size, context + count * size, dtype=torch.bool)
    for row in range(rows):
        for block, anchor in enumerate(anchors[row]):
            slots = slice(block * size, (block + 1) * size)
            mask[row, 0, slots, :anchor] = True
            mask[row, 0, slots, context + block * size : context + (block + 1) * size] = True
    context_positions = torch.arange(context)[None]
    return {**inputs, "attention_mask": mask, "position_ids": positions, "context_position_ids": context_positions}


ANCHORS = [[2, 4, 5, 13], [1, 1, 9, 14]]  # closer together than a block is long, one of them twice


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_many_blocks_in_one_pass_equal_one_block_at_a_time(kind, attention):
    drafter = tiny_drafter(**LAYERS[kind])
    drafter.set_attn_implementation(attention)
    inputs = many_blocks(drafter, ANCHORS)
    with uncompiled(attention):
        together = drafter(**inputs)
    assert together.last_hidden_state.shape == (2, 16, HIDDEN)
    assert together.length_ratio.shape == (2, 4) and together.survival_logits.shape == (2, 4, 3)
    drafter.set_attn_implementation("sdpa")
    for row, anchors in enumerate(ANCHORS):
        for block, anchor in enumerate(anchors):
            slots = slice(4 * block, 4 * block + 4)
            alone = drafter(
                inputs["noise_embeds"][row : row + 1, slots], inputs["context_hidden_states"][row : row + 1, :anchor]
            )
            close = {"rtol": 0, "atol": 1e-5}
            torch.testing.assert_close(together.last_hidden_state[row, slots], alone.last_hidden_state[0], **close)
            torch.testing.assert_close(together.length_ratio[row, block], alone.length_ratio[0], **close)
            torch.testing.assert_close(together.survival_logits[row, block], alone.survival_logits[0], **close)


@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_a_block_never_sees_another_block(kind):
    drafter = tiny_drafter(**LAYERS[kind])
    inputs = many_blocks(drafter, ANCHORS)
    before = drafter(**inputs)
    inputs["noise_embeds"][:, 4:8] += 1.0
    after = drafter(**inputs)
    moved = (after.last_hidden_state - before.last_hidden_state).abs().amax((0, 2)).view(4, 4).amax(-1)
    assert moved[1] > 1e-2 and (moved[[0, 2, 3]] < 1e-6).all()
    ratio = (after.length_ratio - before.length_ratio).abs().amax(0)
    assert ratio[1] > 1e-4 and (ratio[[0, 2, 3]] < 1e-6).all()


@torch.no_grad()
def test_a_block_sees_only_context_before_its_anchor():
    drafter = tiny_drafter()
    inputs = many_blocks(drafter, [[2, 4, 5, 13]])
    before = drafter(**inputs).last_hidden_state
    inputs["context_hidden_states"][:, 5] += 1.0
    moved = (drafter(**inputs).last_hidden_state - before).abs().amax((0, 2)).view(4, 4).amax(-1)
    assert moved[3] > 1e-3 and (moved[:3] < 1e-6).all()


# Caches


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_transformers_cache_gives_the_same_as_the_whole_context(kind, attention):
    drafter = tiny_drafter(**LAYERS[kind])
    drafter.set_attn_implementation(attention)
    drafter.generation_config.length_policy = "fixed"
    inputs = drafter_inputs(drafter, context=14)
    cache = DFlashCache(config=drafter.config)
    cache.activate_past_recording()
    done = 0
    for new in (6, 1, 3, 4):
        cache.set_previous_accepted_tokens(new)
        if done:
            cache.crop(-4)
        context = inputs["context_hidden_states"][:, done : done + new]
        positions = torch.arange(done, done + new + 4)[None]
        name = "cache" if done else "past_key_values"  # its name before transformers 5.24
        output = drafter(inputs["noise_embeds"], context, position_ids=positions, **{name: cache})
        assert output.cache is cache
        done += new
        whole = drafter(inputs["noise_embeds"], inputs["context_hidden_states"][:, :done]).last_hidden_state
        torch.testing.assert_close(output.last_hidden_state, whole, rtol=0, atol=1e-5)


class ContextCache:
    """The least a cache of this package offers the drafter: it stores context keys and values, never the block's."""

    def __init__(self, valid=None):
        self.stored, self.positions, self.valid = {}, None, valid

    def get_seq_length(self):
        return 0 if self.positions is None else self.positions.shape[1]

    def context_positions(self, new):
        self.positions = new if self.positions is None else torch.cat([self.positions, new], dim=1)
        return self.positions, self.valid

    def update_context(self, keys, values, layer):
        if layer in self.stored:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(self.stored[layer], (keys, values), strict=True))
        self.stored[layer] = (keys, values)
        return keys, values


@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_a_context_cache_gives_the_same_as_the_whole_context(kind):
    drafter = tiny_drafter(**LAYERS[kind])
    inputs = drafter_inputs(drafter, rows=2, context=10)
    cache, done = ContextCache(), 0
    for new in (5, 1, 4):
        context = inputs["context_hidden_states"][:, done : done + new]
        output = drafter(inputs["noise_embeds"], context, cache=cache)
        done += new
        whole = drafter(inputs["noise_embeds"], inputs["context_hidden_states"][:, :done]).last_hidden_state
        torch.testing.assert_close(output.last_hidden_state, whole, rtol=0, atol=1e-5)
        assert output.cache is cache and cache.stored[1][0].shape == (2, 2, done, 8)


@torch.no_grad()
def test_a_context_cache_says_which_keys_are_valid():
    drafter = tiny_drafter()
    inputs = drafter_inputs(drafter, rows=2, context=6)
    valid = torch.ones(2, 6, dtype=torch.bool)  # of the context; the block is always seen
    valid[1, 4:] = False
    output = drafter(**inputs, cache=ContextCache(valid), position_ids=torch.arange(10)[None]).last_hidden_state
    second = drafter(
        inputs["noise_embeds"][1:], inputs["context_hidden_states"][1:, :4], position_ids=torch.arange(8)[None]
    ).last_hidden_state
    gap = drafter(
        inputs["noise_embeds"][1:],
        inputs["context_hidden_states"][1:, :4],
        position_ids=torch.tensor([[0, 1, 2, 3, 6, 7, 8, 9]]),
    ).last_hidden_state
    torch.testing.assert_close(output[1:], gap, rtol=0, atol=1e-5)
    assert (output[1:] - second).abs().max() > 1e-4


# Transformers' own DFlash loop (the third door)


@pytest.fixture
def pair():
    target = tiny_target()
    return target, tiny_drafter(target, mask_token_id=63, block_size=6)


def drafted_lengths(target, drafter, **kw):
    """Tokens of one greedy call through transformers' own loop, and how many slots each round was given."""
    lengths = []
    handle = drafter.register_forward_hook(
        lambda module, args, output: lengths.append(output.last_hidden_state.shape[1] - 1)
    )
    ids = torch.arange(1, 8)[None]
    try:
        return target.generate(
            ids, assistant_model=drafter, speculation_type="dflash", max_new_tokens=24, do_sample=False, **kw
        ), lengths
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"length_policy": "fixed"}, {5}),
        ({"length_policy": "fixed", "num_assistant_tokens": 2}, {2}),
        ({"length_policy": "fixed", "num_assistant_tokens": 0}, {1}),  # its sampling step needs a draft
        ({"length_policy": "ratio", "length_scale": 0.0}, {1}),
        ({"length_policy": "ratio", "length_scale": 100.0}, {5}),
        ({"length_policy": "ratio", "length_scale": 100.0, "num_assistant_tokens": 3}, {3}),
    ],
)
def test_transformers_own_loop_drafts_as_many_tokens_as_the_policy_says(pair, settings, expected):
    target, drafter = pair
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    plain = target.generate(torch.arange(1, 8)[None], max_new_tokens=24, do_sample=False)
    output, lengths = drafted_lengths(target, drafter)
    assert output.tolist() == plain.tolist()
    assert set(lengths) == expected and len(lengths) > 1


def test_transformers_own_loop_follows_the_ratio_head(pair):
    target, drafter = pair
    drafter.generation_config.length_policy = "ratio"
    with torch.no_grad():
        drafter.ratio_head.out.weight.zero_()
        drafter.ratio_head.out.bias.fill_(0.0)  # sigmoid(0) = 1/2: round(6 * 0.5 * 1.3) - 1 = 3
    assert set(drafted_lengths(target, drafter)[1]) == {3}


def test_transformers_own_loop_says_once_that_it_cannot_run_other_policies(pair, caplog):
    from transformers.utils import logging as transformers_logging

    target, drafter = pair
    drafter.generation_config.length_policy = "confidence"
    logger = transformers_logging.get_logger("adaflash_hf.modeling_adaflash")
    logging.Logger.warning_once.cache_clear()
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    try:
        _, lengths = drafted_lengths(target, drafter)
    finally:
        logger.removeHandler(handler)
    assert set(lengths) == {5} and len(lengths) > 1
    assert messages == [
        "Transformers' own DFlash loop cannot run the length policy 'confidence': drafting fixed blocks. Leave out "
        "speculation_type='dflash' to use the policy."
    ]


# Taps, heads, output


@torch.no_grad()
def test_normalize_taps_divides_each_tap_of_each_token_by_its_rms():
    normed, raw = tiny_drafter(), tiny_drafter(normalize_taps=False)
    assert_same_state(normed.state_dict(), raw.state_dict())
    inputs = drafter_inputs(normed)
    states = inputs["context_hidden_states"]
    # Each tap on its own scale, as real targets have them; and a first token a thousand times larger.
    scaled = states.clone().view(1, 9, 3, HIDDEN) * torch.tensor([1.0, 50.0, 300.0])[:, None]
    scaled[:, 0] *= 1000
    scaled = scaled.flatten(2)
    torch.testing.assert_close(normed.fuse_context(scaled), normed.fuse_context(states), rtol=0, atol=1e-4)
    assert (raw.fuse_context(scaled) - raw.fuse_context(states)).abs().max() > 0.1
    by_hand = states.view(1, 9, 3, HIDDEN)
    by_hand = by_hand / by_hand.pow(2).mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(normed.fuse_context(states), raw.fuse_context(by_hand.flatten(2)), rtol=0, atol=1e-4)
    before, after = normed(inputs["noise_embeds"], states), normed(inputs["noise_embeds"], scaled)
    torch.testing.assert_close(after.last_hidden_state, before.last_hidden_state, rtol=0, atol=1e-4)


@torch.no_grad()
def test_survival_head_by_hand():
    drafter = every_part_drafter()
    output = drafter(**drafter_inputs(drafter, rows=2))
    head, blocks = drafter.survival_head, output.last_hidden_state
    expected = torch.empty(2, 3)
    for slot in (1, 2, 3):
        hidden = head.down(torch.cat([blocks[:, slot], blocks.mean(1)], dim=-1)) + head.slot_bias[slot - 1]
        hidden = nn.functional.silu(hidden)
        hidden = hidden + nn.functional.silu(head.res[0](hidden))
        expected[:, slot - 1] = head.out(hidden).squeeze(-1)
    torch.testing.assert_close(output.survival_logits, expected)
    assert head.slot_bias.abs().min(0).values.max() > 0


@pytest.mark.parametrize("heads", [(), ("ratio",), ("survival",), ("ratio", "survival")])
def test_only_the_configured_length_heads_exist(heads):
    drafter = tiny_drafter(length_heads=heads)
    with torch.no_grad():
        output = drafter(**drafter_inputs(drafter, rows=3))
    assert isinstance(output, AdaFlashDraftOutput)
    assert (output.length_ratio is not None) is ("ratio" in heads)
    assert (output.survival_logits is not None) is ("survival" in heads)
    names = {name.split(".")[0] for name in drafter.state_dict()}
    assert ("ratio_head" in names) is ("ratio" in heads) and ("survival_head" in names) is ("survival" in heads)
    if output.length_ratio is not None:
        assert output.length_ratio.shape == (3,) and ((output.length_ratio > 0) & (output.length_ratio < 1)).all()


@torch.no_grad()
def test_a_block_may_be_shorter_than_block_size():
    drafter = tiny_drafter(causal_layers=[True, True])
    inputs = drafter_inputs(drafter)
    whole = drafter(**inputs)
    inputs["noise_embeds"] = inputs["noise_embeds"][:, :3]
    short = drafter(**inputs)
    assert short.survival_logits.shape == (1, 2) and short.length_ratio.shape == (1,)
    torch.testing.assert_close(short.last_hidden_state, whole.last_hidden_state[:, :3], rtol=0, atol=1e-6)


# Gradients


def noise(drafter, rows=2):
    """Blocks of an anchor and the learned mask embedding."""
    inputs = drafter_inputs(drafter, rows=rows)
    masks = drafter.mask_embedding.expand(rows, drafter.config.block_size - 1, -1)
    inputs["noise_embeds"] = torch.cat([inputs["noise_embeds"][:, :1], masks], dim=1)
    return inputs


def body_loss(output):
    """Looks at the drafted slots only, as training does."""
    weights = torch.linspace(-1, 1, output.last_hidden_state[:, 1:].numel())
    return (output.last_hidden_state[:, 1:].flatten() * weights).sum()


def head_loss(output):
    return output.length_ratio.sum() + output.survival_logits.square().sum()


def gradients(drafter, loss, inputs=None):
    drafter.zero_grad()
    loss(drafter(**(inputs or noise(drafter)))).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in drafter.named_parameters()}


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_reach_every_trainable_tensor(kind):
    drafter = tiny_drafter(**LAYERS[kind]).train()
    found = gradients(drafter, lambda output: body_loss(output) + head_loss(output))
    assert {name for name, p in drafter.named_parameters() if p.requires_grad} == found.keys()
    for name, gradient in found.items():
        assert gradient is not None and torch.isfinite(gradient).all() and gradient.abs().max() > 1e-9, name
    assert found["survival_head.slot_bias"].abs().amax(-1).min() > 0  # each slot's
    # Every saved tensor learns, except the token list.
    saved = tiny_drafter(draft_token_ids=[1, 2]).state_dict().keys()
    assert saved - found.keys() == {"draft_token_ids"}


def test_length_heads_learn_from_the_body_and_never_move_it():
    drafter = tiny_drafter().train()
    found = gradients(drafter, head_loss)
    heads = {name for name in found if name.startswith(("ratio_head.", "survival_head."))}
    assert len(heads) == 13
    for name, gradient in found.items():
        if name in heads:
            assert gradient.abs().max() > 0, name
        else:
            assert gradient is None, name
    body = gradients(drafter, body_loss)
    assert all(body[name] is None for name in heads)
    assert all(gradient is not None for name, gradient in body.items() if name not in heads)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # renamed in transformers 5.24
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant):
    drafter = tiny_drafter(**LAYERS["mixed"]).train()

    def loss(output):
        return body_loss(output) + head_loss(output)

    expected = gradients(drafter, loss)
    calls = []
    drafter.layers[0].self_attn.register_forward_hook(lambda *args: calls.append(1))
    drafter.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert drafter.is_gradient_checkpointing
    found = gradients(drafter, loss)
    assert len(calls) == 2  # forward, and again in the backward
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_dropout_acts_in_training_only():
    drafter = tiny_drafter(attention_dropout=0.5)
    inputs = drafter_inputs(drafter)
    with torch.no_grad():
        assert torch.equal(drafter(**inputs).last_hidden_state, drafter(**inputs).last_hidden_state)
        drafter.train()
        assert not torch.equal(drafter(**inputs).last_hidden_state, drafter(**inputs).last_hidden_state)


# B8: saving and loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_survives_saving_and_loading(dtype, tmp_path):
    drafter = every_part_drafter().to(dtype)
    drafter.save_pretrained(tmp_path)
    stored = saved_tensors(tmp_path)
    assert_same_state(stored, dict(drafter.state_dict()))
    assert {"mask_embedding", "draft_token_ids", "survival_head.slot_bias", "ratio_head.res.0.bias"} <= stored.keys()
    assert not [name for name in stored if "embed_tokens" in name or "lm_head" in name or "inv_freq" in name]
    for load in (AdaFlashDraftModel, AutoModel):
        for wanted in (dtype, "auto"):
            loaded = load.from_pretrained(tmp_path, dtype=wanted)
            assert type(loaded) is AdaFlashDraftModel and not loaded.training
            assert_same_state(dict(loaded.state_dict()), dict(drafter.state_dict()))
            assert loaded.draft_token_ids.tolist() == [5, 3, 60, 17]
            torch.testing.assert_close(loaded.rotary_emb.inv_freq, 10000.0 ** -(torch.arange(0, 8, 2) / 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_in_another_dtype_casts_floats_and_keeps_the_token_list(dtype, tmp_path):
    drafter = every_part_drafter()
    drafter.save_pretrained(tmp_path)
    loaded = AdaFlashDraftModel.from_pretrained(tmp_path, dtype=dtype)
    for name, tensor in drafter.state_dict().items():
        expected = tensor if name == "draft_token_ids" else tensor.to(dtype)
        assert loaded.state_dict()[name].dtype == expected.dtype and torch.equal(loaded.state_dict()[name], expected)
    assert loaded.draft_token_ids.dtype == torch.int64
    assert loaded.to(torch.float16).draft_token_ids.dtype == torch.int64
    inputs = {name: value.to(dtype) for name, value in drafter_inputs(drafter).items()}
    with torch.no_grad():
        output = loaded.to(dtype)(**inputs)
    assert output.last_hidden_state.dtype == dtype and torch.isfinite(output.last_hidden_state).all()


def test_loaded_values_are_the_files_and_not_fresh_ones(tmp_path):
    # Some transformers 5.x re-initialised loaded weights of outside classes.
    tensors = zlab_tensors(dtype=torch.bfloat16, seed=5)
    folder = write_checkpoint(tmp_path, zlab_config(dtype="bfloat16"), tensors)
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = AdaFlashDraftModel.from_pretrained(folder, dtype="auto")
        assert_same_state(dict(model.state_dict()), tensors)


@torch.no_grad()
def test_a_loaded_drafter_gives_the_same_output(tmp_path):
    drafter = every_part_drafter(**LAYERS["mixed"])
    drafter.config.survival_calibration = {"greedy": {"scale": [1.0, 2.0, 3.0], "bias": [0.1, 0.2, 0.3]}}
    drafter.save_pretrained(tmp_path)
    loaded = AdaFlashDraftModel.from_pretrained(tmp_path)
    inputs = drafter_inputs(drafter, rows=2)
    expected, found = drafter(**inputs), loaded(**inputs)
    for name in ("last_hidden_state", "length_ratio", "survival_logits"):
        assert torch.equal(found[name], expected[name])
    assert loaded.config.survival_calibration == drafter.config.survival_calibration
    assert loaded.config.draft_vocab_size == 4 and loaded.config.normalize_taps is True


def test_sharded_saving(tmp_path):
    drafter = every_part_drafter()
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 3
    assert index["weight_map"].keys() == drafter.state_dict().keys()
    assert not (tmp_path / "model.safetensors").exists()
    for load in (AdaFlashDraftModel, AutoModel):
        assert_same_state(dict(load.from_pretrained(tmp_path).state_dict()), dict(drafter.state_dict()))
    # A shard that went missing is not silence either.
    shard = next(iter(index["weight_map"].values()))
    (tmp_path / shard).unlink()
    with pytest.raises(Exception, match=shard):
        AdaFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("lost", "reported"),
    [
        ("draft_token_ids", "missing: ['draft_token_ids']"),
        ("mask_embedding", "missing: ['mask_embedding']"),
        ("survival_head.slot_bias", "missing: ['survival_head.slot_bias']"),
        ("layers.0.self_attn.q_norm.weight", "missing: ['layers.0.self_attn.q_norm.weight']"),
    ],
)
def test_a_lost_tensor_of_our_own_layout_is_an_error(lost, reported, tmp_path):
    drafter = every_part_drafter()
    drafter.save_pretrained(tmp_path)
    tensors = saved_tensors(tmp_path)
    del tensors[lost]
    write_checkpoint(tmp_path, json.loads((tmp_path / "config.json").read_text()), tensors)
    for load in (AdaFlashDraftModel, AutoModel):
        with pytest.raises(ValueError) as error:
            load.from_pretrained(tmp_path)
        assert reported in str(error.value) and "adaflash-hf layout" in str(error.value)
        assert "unexpected: none" in str(error.value) and "wrong shape: none" in str(error.value)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"block_size": 5}, "['survival_head.slot_bias: the checkpoint has (3, 8), the configuration wants (4, 8)']"),
        ({"draft_vocab_size": 5}, "['draft_token_ids: the checkpoint has (4,), the configuration wants (5,)']"),
        ({"mask_token_id": 3}, "unexpected: ['mask_embedding']"),
        ({"draft_vocab_size": None}, "unexpected: ['draft_token_ids']"),
        ({"num_hidden_layers": 1, "layer_types": [FULL], "causal_layers": [False]}, "'layers.1.mlp.up_proj.weight'"),
    ],
)
def test_a_configuration_that_does_not_fit_its_tensors_is_an_error(change, reported, tmp_path):
    every_part_drafter().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match="do not fit its configuration") as error:
        AdaFlashDraftModel.from_pretrained(tmp_path)
    assert reported in str(error.value)


def test_loading_information_is_given_when_asked_for(tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    model, info = AdaFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is AdaFlashDraftModel
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
def test_loading_with_a_device_map(device_map, tmp_path):
    drafter = every_part_drafter()
    drafter.save_pretrained(tmp_path)
    loaded = AdaFlashDraftModel.from_pretrained(tmp_path, device_map=device_map)
    assert_same_state(dict(loaded.state_dict()), dict(drafter.state_dict()))


def test_auto_classes(tmp_path):
    drafter = tiny_drafter()
    drafter.save_pretrained(tmp_path)
    assert type(AutoModel.from_pretrained(tmp_path)) is AdaFlashDraftModel
    assert type(AutoModel.from_config(drafter.config)) is AdaFlashDraftModel
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["AdaFlashDraftModel"]
    published = AdaFlashConfig.from_pretrained(DATA / "parity" / "dflash-tiny")
    assert type(AutoModel.from_config(published)) is AdaFlashDraftModel


def test_generation_config_is_saved_and_loaded(tmp_path):
    drafter = tiny_drafter()
    config = drafter.generation_config
    config.length_policy, config.num_assistant_tokens, config.confidence_threshold = "ratio", 2, 0.5
    drafter.save_pretrained(tmp_path)
    assert (tmp_path / "generation_config.json").is_file()
    expected = read_draft_settings(config)
    assert expected.length_policy == "ratio" and expected.num_assistant_tokens == 2
    for load in (AdaFlashDraftModel, AutoModel):
        assert read_draft_settings(load.from_pretrained(tmp_path).generation_config) == expected
    given = GenerationConfig(length_policy="fixed")
    assert AdaFlashDraftModel.from_pretrained(tmp_path, generation_config=given).generation_config is given
    # Without the file: the default.
    (tmp_path / "generation_config.json").unlink()
    settings = read_draft_settings(AdaFlashDraftModel.from_pretrained(tmp_path).generation_config)
    assert settings == read_draft_settings(tiny_drafter().generation_config) != expected
    # An invalid one is refused.
    (tmp_path / "generation_config.json").write_text('{"length_policy": "quick"}')
    with pytest.raises(ValueError, match="length_policy='quick' is not known"):
        AdaFlashDraftModel.from_pretrained(tmp_path)


def test_a_published_drafter_has_the_default_generation_config(tmp_path):
    shutil.copytree(DATA / "parity" / "adaflash-tiny", tmp_path / "copy")
    model = AdaFlashDraftModel.from_pretrained(tmp_path / "copy")
    assert read_draft_settings(model.generation_config) == read_draft_settings(tiny_drafter().generation_config)


def test_only_the_main_process_writes(tmp_path):
    tiny_drafter().save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "generation_config.json").exists() and not (tmp_path / "config.json").exists()


# PEFT


def adapted(drafter):
    torch.manual_seed(0)
    return get_peft_model(drafter, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]))


@torch.no_grad()
def outputs(model, inputs):
    model.eval()
    output = model(**inputs)
    return torch.cat([output.last_hidden_state.flatten(), output.length_ratio, output.survival_logits.flatten()])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers by an old name
def test_a_lora_adapter_trains_saves_loads_and_merges(tmp_path):
    tiny_drafter().save_pretrained(tmp_path / "base")
    drafter = AdaFlashDraftModel.from_pretrained(tmp_path / "base")
    inputs = drafter_inputs(drafter, rows=2)
    model = adapted(drafter)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 2 * 2 and all(".lora_" in name for name in trainable)
    before = outputs(model, inputs)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    goal = drafter_inputs(drafter, rows=2, seed=9)["noise_embeds"]
    optimizer, losses = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05), []
    model.train()
    for _ in range(12):
        optimizer.zero_grad()
        loss = (model(**inputs).last_hidden_state - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    trained = outputs(model, inputs)
    assert (trained - before).abs().max() > 1e-2

    model.save_pretrained(tmp_path / "adapter")
    assert len(saved_tensors(tmp_path / "adapter")) == 8
    base = AdaFlashDraftModel.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(outputs(loaded, inputs), trained, rtol=0, atol=1e-6)
    by_folder = AutoModel.from_pretrained(tmp_path / "adapter")  # base and adapter in one call
    torch.testing.assert_close(outputs(by_folder, inputs), trained, rtol=0, atol=1e-6)
    merged = loaded.merge_and_unload()
    assert type(merged) is AdaFlashDraftModel
    torch.testing.assert_close(outputs(merged, inputs), trained, rtol=0, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    again = AdaFlashDraftModel.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(outputs(again, inputs), trained, rtol=0, atol=1e-5)


# Importing


IMPORT = """
import json, sys, time
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PreTrainedModel
from transformers.models.llama import modeling_llama
start = time.perf_counter()
import adaflash_hf
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules)}))
"""


def test_importing_the_package_is_quick_and_brings_in_nothing_that_only_training_or_plots_need():
    quickest = float("inf")
    for _ in range(4):
        run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        found = json.loads(run.stdout.splitlines()[-1])
        assert "adaflash_hf" in found["modules"]
        for module in ("adaflash_hf.training", "adaflash_hf.cli", "datasets", "matplotlib", "gguf"):
            assert not [name for name in found["modules"] if name == module or name.startswith(f"{module}.")]
        quickest = min(quickest, found["seconds"])
        if quickest < 0.5:
            break
    assert quickest < 0.5


def test_forward_arguments_are_what_transformers_own_generation_passes():
    parameters = inspect.signature(AdaFlashDraftModel.forward).parameters
    assert {"noise_embeds", "context_hidden_states", "position_ids", "attention_mask", "cache"} <= parameters.keys()
    assert "past_key_values" in parameters  # before transformers 5.24
    config = tiny_drafter().config
    for name in ("target_layer_ids", "block_size", "mask_token_id", "vocab_size", "eos_token_id"):
        assert hasattr(config, name)
