"""Packed decoding beyond the plain call: caches, embeddings, drafters of other shapes, what processors and criteria see."""

from __future__ import annotations

import pytest
import torch
from decoding_helpers import (
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
from helpers import tiny_drafter
from text_helpers import character_tokenizer
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)

from adaflash_hf._compat import cache_argument, cache_output
from adaflash_hf.generation import packed_decoding

CALL = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def pair():
    return shared_target("llama"), shared_drafter("llama")


def outcomes(target, drafter, run):
    """`run(extra)` without and with the drafter."""
    return [run({}), run({"assistant_model": drafter})]


# --- caches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[6], [6, 3, 9]])
def test_a5_only_the_new_tokens_of_a_second_turn(pair, rows):
    """With a cache that holds the rest, and a mask of the whole text, as `generate()` allows."""
    target, drafter = pair
    ids, mask = prompts(rows)
    more, _ = prompts([4] * len(rows), seed=9)

    def run(extra):
        cache = DynamicCache(config=target.config)
        cached = {cache_argument(target): cache}
        first = target.generate(ids, attention_mask=mask, **cached, **CALL, **extra)
        whole = torch.cat([mask, torch.ones(len(rows), 12, dtype=torch.long)], dim=1)
        new = torch.cat([first[:, -1:], more], dim=1)  # the last token of a turn is never in its cache
        # Lengths are counted on what was passed, which has no padding.
        call = {
            **CALL,
            "repetition_penalty": 1.2,
            "min_new_tokens": 4,
            "eos_token_id": [*range(3, 40)],
            "pad_token_id": 0,
        }
        second = target.generate(new, attention_mask=whole, **cached, **call, **extra)
        return second, cache.get_seq_length()

    (expected, length), (found, ours) = outcomes(target, drafter, run)
    assert torch.equal(found, expected) and ours == length


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_a9_two_turns_on_a_static_cache(kind):
    target, drafter = shared_target(kind), shared_drafter(kind)
    ids, _ = prompts([12])

    def run(extra):
        cache = StaticCache(config=target.config, max_cache_len=60)
        cached = {cache_argument(target): cache}
        first = target.generate(ids, **cached, **CALL, **extra)
        second = target.generate(torch.cat([first, ids[:, :3]], dim=1), **cached, **CALL, **extra)
        return second, int(cache.get_seq_length())

    (expected, length), (found, ours) = outcomes(target, drafter, run)
    assert torch.equal(found, expected) and ours == length == 30


def test_a5_the_cache_in_the_output_goes_on(pair):
    target, drafter = pair
    ids, _ = prompts([7])
    (name,) = cache_output(None)

    def run(extra):
        first = target.generate(ids, return_dict_in_generate=True, **CALL, **extra)
        longer = torch.cat([first.sequences, ids[:, :2]], dim=1)
        call = {name: first[name], "attention_mask": torch.ones_like(longer), **CALL, **extra}
        return first[name].get_seq_length(), target.generate(longer, **call)

    (length, expected), (ours, found) = outcomes(target, drafter, run)
    assert length == ours == 14 and torch.equal(found, expected)


def test_a5_rows_that_ended_at_different_times_say_why_they_cannot_go_on(pair):
    """Their padding lies between two turns, which packed decoding does not know."""
    target, drafter = pair
    ids, mask = prompts([6, 6])
    new = plain(target, ids, mask, max_new_tokens=8)
    end = next(token for token in new[0] if token not in new[1])
    cache = DynamicCache(config=target.config)
    call = {**CALL, cache_argument(target): cache, "eos_token_id": end, "pad_token_id": 0, "assistant_model": drafter}
    first = target.generate(ids, attention_mask=mask, **call)
    assert (first[0] == 0).any() and cache.get_seq_length() == first.shape[1] - 1
    second = torch.cat([first, ids[:, :2]], dim=1)
    with pytest.raises(ValueError, match="attention_mask is not left padding"):
        target.generate(second, attention_mask=(second != 0).long(), **call)


@pytest.mark.parametrize("way", ["nobody", "caller", "output"])
def test_states_are_kept_only_where_somebody_sees_them(pair, way, monkeypatch):
    target, drafter = pair
    ids, mask = prompts([7, 4])
    kept = []
    row_states = packed_decoding.RaggedCache.row_states
    monkeypatch.setattr(
        packed_decoding.RaggedCache, "row_states", lambda *given: kept.append(given[1]) or row_states(*given)
    )
    cache = DynamicCache(config=target.config)
    call = {"caller": {cache_argument(target): cache}, "output": {"return_dict_in_generate": True}}.get(way, {})
    target.generate(ids, attention_mask=mask, assistant_model=drafter, **CALL, **call)
    assert bool(kept) == (way != "nobody")
    assert cache.get_seq_length() == (7 + 8 - 1 if way == "caller" else 0)


def test_no_more_is_set_aside_than_the_longest_row_can_fill(pair, monkeypatch):
    target, drafter = pair
    ids, mask = prompts([30, 4])
    sizes = []
    update = packed_decoding.RaggedCache.update

    def noted(self, keys, values, layer, *args, **kwargs):
        result = update(self, keys, values, layer, *args, **kwargs)
        if type(self) is packed_decoding.RaggedCache:
            sizes.append(self.keys[layer].shape[2])
        return result

    monkeypatch.setattr(packed_decoding.RaggedCache, "update", noted)
    target.generate(ids, attention_mask=mask, assistant_model=drafter, **CALL)
    assert set(sizes) == {30 + 8}


def test_without_a_cache(pair):
    target, drafter = pair
    ids, _ = prompts([7])
    call = {**CALL, "use_cache": False, "return_dict_in_generate": True}
    expected, found = outcomes(target, drafter, lambda extra: target.generate(ids, **call, **extra))
    assert torch.equal(found.sequences, expected.sequences)
    (name,) = cache_output(None)
    assert found.get(name) is None


# --- embeddings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_ids", [False, True])
def test_a11_a_padded_batch_of_embeddings(pair, with_ids):
    target, drafter = pair
    ids, mask = prompts([9, 4])
    expected = plain(target, ids, mask, **CALL)
    call = {"inputs_embeds": target.get_input_embeddings()(ids), "attention_mask": mask, **CALL}
    with oracle([new for new in expected] if not with_ids else texts_of(ids, mask, expected), 0.2):
        found = target.generate(*[ids] * with_ids, assistant_model=drafter, **call)
    assert found[:, 9 * with_ids :].tolist() == expected
    assert drafter.last_draft_stats.accepted > 0


def test_a11_two_turns_of_embeddings(pair):
    target, drafter = pair
    ids, mask = prompts([9, 4])
    embed = target.get_input_embeddings()

    def run(extra):
        cached = {cache_argument(target): DynamicCache(config=target.config)}
        first = target.generate(inputs_embeds=embed(ids), attention_mask=mask, **cached, **CALL, **extra)
        longer = torch.cat([embed(ids), embed(first), embed(ids[:, -2:])], dim=1)
        whole = torch.cat([mask, torch.ones(2, 10, dtype=torch.long)], dim=1)
        return target.generate(inputs_embeds=longer, attention_mask=whole, **cached, **CALL, **extra)

    expected, found = outcomes(target, drafter, run)
    assert torch.equal(found, expected)


# --- drafters ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"draft_token_ids": list(range(10, 50))},
        {"mask_token_id": 7},
        {"normalize_taps": False},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
        {"causal_layers": [True, False]},
        {"block_size": 2},
        {"block_size": 30},
        {"target_layer_ids": [3]},
        {"length_heads": []},
        {"attn_implementation": "eager"},
    ],
    ids=lambda fields: next(iter(fields)) + str(next(iter(fields.values())))[:4],
)
def test_drafters_of_every_shape(pair, fields):
    target, _ = pair
    fields = dict(fields)
    attention = fields.pop("attn_implementation", None)
    drafter = tiny_drafter(target, **fields)
    if attention:
        drafter.set_attn_implementation(attention)
    drafter.generation_config.length_policy = "fixed"
    ids, mask = prompts([8, 3, 12])
    expected = plain(target, ids, mask)
    with oracle(texts_of(ids, mask, expected), 0.2):
        found = target.generate(ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=14, do_sample=False)
    assert_rows_equal(found, ids, expected)
    assert drafter.last_draft_stats.accepted > 0


def test_a8_twenty_tokens_are_no_cap_that_nobody_set(pair):
    """Transformers fills in `num_assistant_tokens=20` where a call says nothing."""
    target, _ = pair
    drafter = tiny_drafter(target, block_size=30)
    drafter.generation_config.length_policy = "fixed"
    ids, _ = prompts([5])
    expected = plain(target, ids, max_new_tokens=40)
    with oracle(texts_of(ids, None, expected), 0.0):
        target.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)
    # One token from the prompt, then 29 drafts and the target's own, then 9.
    assert (drafter.last_draft_stats.rounds, drafter.last_draft_stats.drafted) == (2, 29 + 8)


def test_a20_head_rows_other_than_the_tokenizers():
    target = lively_target("llama")
    target.resize_token_embeddings(70)
    drafter = tiny_drafter(target, block_size=5)
    drafter.generation_config.length_policy = "fixed"
    assert drafter.config.vocab_size == 70
    ids, mask = prompts([6, 9])
    expected = plain(target, ids, mask)
    with oracle(texts_of(ids, mask, expected), 0.2):
        found = target.generate(ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=14, do_sample=False)
    assert_rows_equal(found, ids, expected)


def test_text_prompts_of_a_vision_model_are_packed():
    """And prompts with an image are not, since their encoder's output goes with them."""
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "initializer_range": 0.4}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlavaConfig(
        text_config=LlamaConfig(**text),
        vision_config=CLIPVisionConfig(**vision, image_size=28, patch_size=14),
        image_token_index=63,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    target = LlavaForConditionalGeneration(config).eval()
    drafter = tiny_drafter(target, block_size=5)
    drafter.generation_config.length_policy = "fixed"
    ids, mask = prompts([9, 5], vocabulary=60)
    expected = plain(target, ids, mask, pad_token_id=0)
    call = {"assistant_model": drafter, "max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    with oracle(texts_of(ids, mask, expected), 0.2):
        found = target.generate(ids, attention_mask=mask, **call)
    assert_rows_equal(found, ids, expected)
    ids = torch.tensor([[5, 6, 63, 63, 63, 63, 7, 8]])
    picture = torch.randn(1, 3, 28, 28)
    expected = target.generate(ids, pixel_values=picture, **{**call, "assistant_model": None})
    assert not torch.equal(expected, target.generate(ids, pixel_values=-picture, **{**call, "assistant_model": None}))
    with oracle(expected.tolist(), 0.2):
        assert torch.equal(target.generate(ids, pixel_values=picture, **call), expected)
    assert drafter.last_draft_stats.accepted > 0


def test_a_text_generation_pipeline(pair):
    target, drafter = pair
    tokenizer = character_tokenizer()
    call = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    expected = pipeline("text-generation", target, tokenizer=tokenizer)("hello", **call)
    found = pipeline("text-generation", target, tokenizer=tokenizer)("hello", assistant_model=drafter, **call)
    assert found == expected and drafter.last_draft_stats.rounds > 0


# --- what processors and criteria see --------------------------------------------------------------------------------------


class Watch(LogitsProcessor):
    """Notes every text it is asked about."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        return scores


def test_a6_a_processor_gets_the_calls_of_plain_decoding_and_no_others_up_to_the_end(pair):
    target, drafter = pair
    ids, _ = prompts([5])
    full = plain(target, ids)
    for end in range(2, 8):
        call = {**CALL, "max_new_tokens": 14, "eos_token_id": full[0][end], "pad_token_id": 0}
        reference, ours = Watch(), Watch()
        target.generate(ids, logits_processor=LogitsProcessorList([reference]), **call)
        with oracle(texts_of(ids, None, full), right=[True, True, False, True]):
            target.generate(ids, logits_processor=LogitsProcessorList([ours]), assistant_model=drafter, **call)
        assert ours.seen == reference.seen


def test_criteria_see_the_scores_that_plain_decoding_shows_them(pair):
    target, drafter = pair
    ids, _ = prompts([5])

    class Count(StoppingCriteria):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores, **kwargs):
            self.seen.append((input_ids.shape[1], len(scores), round(scores[-1].max().item(), 3)))
            return torch.tensor([False])

    def run(extra):
        count = Count()
        target.generate(
            ids, stopping_criteria=StoppingCriteriaList([count]), return_dict_in_generate=True, output_scores=True,
            **CALL, **extra,
        )  # fmt: skip
        return count.seen

    with oracle(texts_of(ids, None, plain(target, ids)), 0.3):
        expected, found = outcomes(target, drafter, run)
    assert found == expected and len(found) == 8


def test_an_own_processor_is_left_as_it_was(pair):
    """One padded row: lengths are counted without the padding, on a copy."""
    from transformers import MinNewTokensLengthLogitsProcessor

    target, drafter = pair
    ids, mask = prompts([9, 4])
    own = MinNewTokensLengthLogitsProcessor(9, 6, 3)
    for _ in range(2):
        target.generate(
            ids[1:],
            attention_mask=mask[1:],
            assistant_model=drafter,
            logits_processor=LogitsProcessorList([own]),
            **CALL,
        )
        assert own.prompt_length_to_skip == 9


# --- statistics ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True])
def test_a15_an_accepted_end_counts_as_accepted(pair, do_sample):
    target, drafter = pair
    ids, _ = prompts([5])
    full = plain(target, ids)
    call = {**CALL, "max_new_tokens": 14, "eos_token_id": full[0][3], "pad_token_id": 0}
    if do_sample:  # so cold that it is greedy
        call |= {"do_sample": True, "temperature": 1e-4, "top_k": 0}
    with oracle(texts_of(ids, None, full), 0.0, strength=(30.0, 30.0)):
        found = target.generate(ids, assistant_model=drafter, **call)
    assert found[0, 5:].tolist() == full[0][:4]
    stats = drafter.last_draft_stats
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted) == (1, 4, 3, 3)
    assert stats.slot_reached == [1, 1, 1, 0] and stats.slot_accepted == [1, 1, 1, 0]


def test_statistics_of_a_batch_add_up_over_its_rows(pair):
    target, drafter = pair
    ids, mask = prompts([8, 3, 11])
    expected = plain(target, ids, mask)
    with oracle(texts_of(ids, mask, expected), right=[True, False, True, True]):
        out = target.generate(
            ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=14, do_sample=False,
            return_dict_in_generate=True,
        )  # fmt: skip
    stats = out.draft_stats
    # Each row: 13 tokens after the prompt's own in rounds of 2 (the last of 1, without a draft).
    assert (stats.rounds, stats.rounds_without_draft, stats.emitted, stats.accepted) == (21, 3, 39, 18)
    assert stats.slot_reached == [18, 18, 0, 0] and stats.slot_accepted == [18, 0, 0, 0]
    assert stats.acceptance_length == 39 / 21


def test_a_policy_may_draft_nothing(pair):
    target, drafter = pair
    ids, _ = prompts([5])
    with settings(drafter, length_policy="confidence", confidence_threshold=1.5):
        found = target.generate(ids, assistant_model=drafter, **CALL)
    assert found[0, 5:].tolist() == plain(target, ids, **CALL)[0]
    stats = drafter.last_draft_stats
    assert (stats.rounds, stats.rounds_with_draft, stats.drafted, stats.planned) == (7, 0, 0, 0)


def test_packing_is_what_runs(pair, monkeypatch):
    """One forward of the target a round, of as many tokens as there are anchors and drafts."""
    target, drafter = pair
    ids, mask = prompts([8, 3])
    expected = plain(target, ids, mask)
    sizes, forward = [], packed_decoding.PackedDecoder._forward

    def seen(self, inputs, counts, keep=None):
        sizes.append((tuple(inputs["input_ids"].shape), sum(counts)))
        return forward(self, inputs, counts, keep)

    monkeypatch.setattr(packed_decoding.PackedDecoder, "_forward", seen)
    with oracle(texts_of(ids, mask, expected), 0.3, lengths="random"):
        target.generate(ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=14, do_sample=False)
    stats = drafter.last_draft_stats
    assert sizes[0] == ((1, 11), 11) and all(shape == (1, tokens) for shape, tokens in sizes)
    assert sum(tokens for _, tokens in sizes[1:]) == stats.rounds + stats.drafted
