"""Greedy decoding with a drafter equals plain decoding, token for token, in float32."""

from __future__ import annotations

import pytest
import torch
from decoding_helpers import (
    alone,
    assert_rows_equal,
    lively_target,
    oracle,
    plain,
    prompts,
    settings,
    shared_drafter,
    shared_target,
    texts_of,
)
from helpers import TARGET_KINDS, tiny_drafter
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from text_helpers import character_tokenizer
from transformers import DynamicCache

from adaflash_hf import adaflash_generate
from adaflash_hf._compat import cache_argument


def decode(target, drafter, ids, mask, expected, error, lengths=None, **call):
    call = {"max_new_tokens": 14, "do_sample": False, **call}
    with oracle(texts_of(ids, mask, expected), error, lengths=lengths, seed=len(ids)):
        return target.generate(ids, attention_mask=mask, assistant_model=drafter, **call)


@pytest.mark.parametrize("kind", TARGET_KINDS)
@pytest.mark.parametrize("policy", ["fixed", "ratio", "confidence"])
def test_one_prompt(kind, policy):
    target, drafter = shared_target(kind), shared_drafter(kind)
    accepted = 0
    for length, error in ((1, 0.0), (2, 0.3), (7, 0.5), (17, 0.3), (40, 1.0)):
        ids, mask = prompts([length], seed=length)
        expected = plain(target, ids, mask)
        with settings(drafter, length_policy=policy):
            output = decode(target, drafter, ids, mask, expected, error)
        assert_rows_equal(output, ids, expected)
        assert drafter.last_draft_stats.policy == policy
        accepted += drafter.last_draft_stats.accepted
    assert accepted > 10


@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_an_untrained_drafter(kind):
    target = shared_target(kind)
    drafter = tiny_drafter(target, block_size=4)
    ids, mask = prompts([9, 3])
    expected = plain(target, ids, mask)
    output = target.generate(ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=14, do_sample=False)
    assert_rows_equal(output, ids, expected)


@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_a_batch_of_unequal_prompts(kind):
    target, drafter = shared_target(kind), shared_drafter(kind)
    ids, mask = prompts([17, 1, 30, 8], seed=4)
    expected = plain(target, ids, mask)
    output = decode(target, drafter, ids, mask, expected, 0.3, lengths="random")
    assert_rows_equal(output, ids, expected)
    assert drafter.last_draft_stats.acceptance_length > 1.2


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(TARGET_KINDS),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    error=st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0),
    new=st.integers(1, 16),
    drafts=st.sampled_from(["random", 0, 2, None]),
    policy=st.sampled_from(["fixed", "ratio", "confidence", "throughput"]),
    seed=st.integers(0, 10_000),
    ends=st.booleans(),
)
def test_any_batch(kind, lengths, error, new, drafts, policy, seed, ends):
    target, drafter = shared_target(kind), shared_drafter(kind)
    ids, mask = prompts(lengths, seed=seed)
    call = {"max_new_tokens": new}
    first = plain(target, ids, mask, **call)
    if ends:
        # A token that really comes up, so that rows end at different times and inside blocks.
        call |= {"eos_token_id": first[0][len(first[0]) // 2], "pad_token_id": 0}
    expected = plain(target, ids, mask, **call)
    with settings(drafter, length_policy=policy):
        output = decode(target, drafter, ids, mask, expected if not ends else first, error, lengths=drafts, **call)
    assert_rows_equal(output, ids, expected)


@hypothesis_settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(TARGET_KINDS),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    error=st.floats(0.0, 1.0),
    place=st.integers(0, 11),
    seed=st.integers(0, 10_000),
)
def test_any_batch_with_stop_strings(kind, lengths, error, place, seed):
    """Each row ends where its own text has the string, which may lie in two blocks or anywhere in one."""
    target, drafter = shared_target(kind), shared_drafter(kind)
    ids, mask = prompts(lengths, seed=seed)
    unstopped = plain(target, ids, mask)
    tokenizer = character_tokenizer()
    stop = tokenizer.decode(unstopped[seed % len(lengths)][place : place + 2])
    call = {"stop_strings": [stop], "tokenizer": tokenizer, "pad_token_id": 0}
    expected = plain(target, ids, mask, **call)
    assert min(map(len, expected)) < 14  # a row really stops
    output = decode(target, drafter, ids, mask, unstopped, error, lengths="random", **call)
    assert_rows_equal(output, ids, expected)


@hypothesis_settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss"]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    new=st.integers(1, 12),
    more=st.integers(1, 9),
    error=st.floats(0.0, 1.0),
    seed=st.integers(0, 10_000),
)
def test_any_two_turns_on_one_cache(kind, lengths, new, more, error, seed):
    target, drafter = shared_target(kind), shared_drafter(kind)
    ids, mask = prompts(lengths, seed=seed)
    cached = {cache_argument(target): DynamicCache(config=target.config)}
    expected = plain(target, ids, mask, max_new_tokens=new)
    first = decode(target, drafter, ids, mask, expected, error, lengths="random", max_new_tokens=new, **cached)
    assert_rows_equal(first, ids, expected)
    longer = torch.cat([first, prompts([more] * len(lengths), seed=seed + 1)[0]], dim=1)
    seen = torch.cat([mask, torch.ones(len(lengths), new + more, dtype=mask.dtype)], dim=1)
    expected = plain(target, longer, seen)
    second = decode(target, drafter, longer, seen, expected, error, lengths="random", **cached)
    assert_rows_equal(second, longer, expected)


def test_many_rounds_stay_equal():
    target, drafter = shared_target("llama"), shared_drafter("llama")
    ids, mask = prompts([5, 11, 2])
    expected = plain(target, ids, mask, max_new_tokens=160)
    output = decode(target, drafter, ids, mask, expected, 0.25, max_new_tokens=160)
    assert_rows_equal(output, ids, expected)


def test_without_any_patch():
    target, drafter = shared_target("qwen3"), shared_drafter("qwen3")
    ids, mask = prompts([6, 13])
    expected = plain(target, ids, mask)
    with oracle(texts_of(ids, mask, expected), 0.3):
        output = target.generate(
            ids,
            attention_mask=mask,
            custom_generate=adaflash_generate,
            drafter=drafter,
            max_new_tokens=14,
            do_sample=False,
        )
    assert_rows_equal(output, ids, expected)
    assert drafter.last_draft_stats.accepted > 0


def test_custom_generate_without_a_drafter_says_so():
    ids, _ = prompts([4])
    with pytest.raises(ValueError, match="needs drafter=<AdaFlashDraftModel>, got NoneType"):
        shared_target().generate(ids, custom_generate=adaflash_generate, max_new_tokens=2)


@pytest.mark.parametrize("which", ["target", "drafter", "both"])
def test_peft_models(which):
    target = lively_target("llama")
    drafter = tiny_drafter(target, block_size=4)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    drafter.generation_config.length_policy = "fixed"
    if which != "drafter":
        target = get_peft_model(target, config)
    assistant = get_peft_model(drafter, config) if which != "target" else drafter
    ids, mask = prompts([7])
    expected = plain(target, input_ids := ids, mask) if which == "drafter" else _peft_plain(target, input_ids := ids)
    with oracle(texts_of(ids, mask, expected), 0.2):
        output = target.generate(input_ids=input_ids, assistant_model=assistant, max_new_tokens=14, do_sample=False)
    assert_rows_equal(output, ids, expected)
    assert drafter.last_draft_stats.accepted > 0


def _peft_plain(target, ids):
    output = target.generate(input_ids=ids, max_new_tokens=14, do_sample=False)
    return [output[0, ids.shape[1] :].tolist()]


def test_drafter_and_target_in_other_dtypes():
    target = shared_target("llama")
    ids, mask = prompts([8])
    expected = plain(target, ids, mask)
    drafter = tiny_drafter(target, block_size=4).to(torch.bfloat16)
    output = target.generate(ids, assistant_model=drafter, max_new_tokens=14, do_sample=False)
    assert_rows_equal(output, ids, expected)
    half = lively_target("llama").to(torch.bfloat16)
    reverse = tiny_drafter(half, block_size=4).float()
    output = half.generate(ids, assistant_model=reverse, max_new_tokens=6, do_sample=False)
    assert output.shape == (1, 14)


def test_training_mode_of_the_drafter_is_restored():
    target, drafter = shared_target("llama"), tiny_drafter(shared_target("llama"))
    drafter.train()
    target.generate(alone(*prompts([4]))[0], assistant_model=drafter, max_new_tokens=3, do_sample=False)
    assert drafter.training
