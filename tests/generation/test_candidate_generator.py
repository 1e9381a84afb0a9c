"""Drafting inside transformers' own assisted decoding, for one prompt of a target that cannot be packed."""

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
from helpers import tiny_drafter
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from adaflash_hf._compat import LOOP_ENDS_AT_EOS
from adaflash_hf.generation import assisted_loop, candidate_generator, dispatch
from adaflash_hf.generation.drafting import BlockDrafter


@pytest.fixture
def pair():
    return shared_target("llama"), shared_drafter("llama")


@pytest.fixture
def unpacked(monkeypatch):
    """Leads every call to transformers' own loop."""
    monkeypatch.setattr(dispatch, "packing_obstacle", lambda *args: "a test says so")


def falcon():
    """A target that does not use transformers' attention interface (its attention adds biases of its own)."""
    config = AutoConfig.for_model(
        "falcon", vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, ffn_hidden_size=48,
        alibi=True, initializer_range=0.4, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    drafter = tiny_drafter(target, block_size=5)
    drafter.generation_config.length_policy = "fixed"
    return target, drafter


def test_a_target_that_cannot_be_packed():
    target, drafter = falcon()
    for length, error, policy in ((1, 0.0, "fixed"), (9, 0.3, "confidence"), (17, 0.6, "ratio"), (4, 1.0, "fixed")):
        ids, _ = prompts([length], seed=length)
        expected = plain(target, ids)
        with oracle(texts_of(ids, None, expected), error), settings(drafter, length_policy=policy):
            found = target.generate(ids, assistant_model=drafter, max_new_tokens=14, do_sample=False)
        assert_rows_equal(found, ids, expected)
        stats = drafter.last_draft_stats
        assert stats.policy == policy and stats.emitted == 13
        assert (stats.accepted > 0) == (error < 1.0)


def test_the_reason_is_said(pair, unpacked, monkeypatch):
    said = []
    monkeypatch.setattr(dispatch.logger, "warning_once", said.append)
    pair[0].generate(prompts([4])[0], assistant_model=pair[1], max_new_tokens=3, do_sample=False)
    assert said == ["Packed decoding is not used (a test says so); drafting inside transformers' own assisted loop."]


def test_left_padding(pair, unpacked):
    target, drafter = pair
    ids, mask = prompts([12, 5])
    expected = plain(target, ids, mask)
    with oracle(texts_of(ids, mask, expected), 0.3):
        found = target.generate(
            ids[1:], attention_mask=mask[1:], assistant_model=drafter, max_new_tokens=14, do_sample=False
        )
    assert_rows_equal(found, ids[1:], expected[1:])
    assert drafter.last_draft_stats.accepted > 0


class Collect:
    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("end", [None, 3, 4, 5, 6, 7, 8])
def test_the_same_rounds_statistics_and_stream_as_packed_decoding(pair, end, monkeypatch):
    target, drafter = pair
    ids, _ = prompts([6])
    full = plain(target, ids)
    call = {"max_new_tokens": 14, "do_sample": False}
    if end is not None:
        call |= {"eos_token_id": full[0][end], "pad_token_id": 0}
    outcomes = []
    for obstacle in (None, "a test says so"):
        monkeypatch.setattr(dispatch, "packing_obstacle", lambda *args, obstacle=obstacle: obstacle)
        streamer = Collect()
        with oracle(texts_of(ids, None, full), 0.25, seed=3):
            found = target.generate(ids, assistant_model=drafter, streamer=streamer, **call)
        assert streamer.tokens == found[0].tolist() and streamer.ended == 1
        outcomes.append((found.tolist(), drafter.last_draft_stats))
    assert outcomes[0][0] == outcomes[1][0]
    # Where transformers' loop runs on past an EOS, none is drafted, and a round may accept less.
    assert outcomes[0][1] == outcomes[1][1] or not (LOOP_ENDS_AT_EOS or end is None)
    assert outcomes[0][0] == target.generate(ids, **call).tolist()


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("policy", ["fixed", "ratio", "confidence"])
def test_the_drafter_sees_the_same_context_as_in_packed_decoding(kind, policy, monkeypatch):
    """The drafts of a real network agree round by round."""
    target, drafter = shared_target(kind), shared_drafter(kind)
    ids, mask = prompts([11, 7])
    propose, drafts = BlockDrafter.propose, []

    def seen(self, *args, **kwargs):
        found = propose(self, *args, **kwargs)
        drafts[-1].append(found[0].token_ids)
        return found

    monkeypatch.setattr(BlockDrafter, "propose", seen)
    for obstacle in (None, "a test says so"):
        drafts.append([])
        monkeypatch.setattr(dispatch, "packing_obstacle", lambda *args, obstacle=obstacle: obstacle)
        with settings(drafter, length_policy=policy, confidence_threshold=0.02):
            target.generate(
                ids[1:], attention_mask=mask[1:], assistant_model=drafter, max_new_tokens=12, do_sample=False
            )
    assert drafts[0] == drafts[1] and any(map(len, drafts[0]))


@pytest.mark.parametrize("call", [{"top_k": 5, "temperature": 1.3}, {"repetition_penalty": 1.5, "top_k": 0}])
@pytest.mark.parametrize("reduced", [False, True])
def test_transformers_is_told_the_distributions_that_drafts_were_drawn_from(pair, unpacked, call, reduced, monkeypatch):
    """Its own sampling step takes the softmax of what it is handed for q."""
    target, drafter = pair
    if reduced:
        drafter = tiny_drafter(target, block_size=5, draft_token_ids=list(range(5, 45)))
        drafter.generation_config.length_policy = "fixed"
    handed, drawn = [], []
    get, choose = candidate_generator.AdaFlashCandidateGenerator.get_candidates, BlockDrafter._choose

    def seen_get(self, *args, **kwargs):
        ids, logits = get(self, *args, **kwargs)
        if logits is not None:
            handed.append((ids[0, -logits.shape[1] :].tolist(), logits[0].softmax(-1)))
        return ids, logits

    def seen_choose(self, *args):
        draft = choose(self, *args)
        if draft.token_ids:
            drawn.append((draft.token_ids, draft.probs))
        return draft

    monkeypatch.setattr(candidate_generator.AdaFlashCandidateGenerator, "get_candidates", seen_get)
    monkeypatch.setattr(BlockDrafter, "_choose", seen_choose)
    torch.manual_seed(0)
    target.generate(prompts([5])[0], assistant_model=drafter, max_new_tokens=12, do_sample=True, **call)
    assert len(handed) == len(drawn) > 3
    for (ids, probs), (token_ids, expected) in zip(handed, drawn):
        assert ids == token_ids
        torch.testing.assert_close(probs, expected)
    if call.get("top_k"):
        assert all((expected > 0).sum(-1).max() <= 5 for _, expected in drawn)


def test_processors_and_budgets(pair, unpacked):
    target, drafter = pair
    ids, _ = prompts([6])
    for call in (
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": 3},
        {"bad_words_ids": [[5], [6, 7]]},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"num_assistant_tokens": 2},
        {"num_assistant_tokens": 0},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(20, 50))},
    ):
        call = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, **call}
        expected = target.generate(ids, **call)
        with oracle(texts_of(ids, None, [expected[0, 6:].tolist()]), 0.2):
            found = target.generate(ids, assistant_model=drafter, **call)
        assert torch.equal(found, expected), call
        stats = drafter.last_draft_stats
        assert stats.drafted <= stats.rounds * call.get("num_assistant_tokens", 4)


def test_scores_and_logits(pair, unpacked):
    target, drafter = pair
    ids, _ = prompts([6])
    call = dict(
        max_new_tokens=10, do_sample=False, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    expected = target.generate(ids, repetition_penalty=1.3, **call)
    with oracle(texts_of(ids, None, [expected.sequences[0, 6:].tolist()]), 0.3):
        found = target.generate(ids, assistant_model=drafter, repetition_penalty=1.3, **call)
    for name in ("scores", "logits"):
        assert len(found[name]) == 10
        torch.testing.assert_close(torch.cat(found[name]), torch.cat(expected[name]), atol=1e-4, rtol=1e-4)
    assert found.draft_stats is drafter.last_draft_stats


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_behind(pair, unpacked, kind):
    target, drafter = pair

    class Fail(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 5:
                raise kind("stop")
            return scores

    with pytest.raises(kind):
        target.generate(
            prompts([4])[0], assistant_model=drafter, max_new_tokens=9, logits_processor=LogitsProcessorList([Fail()])
        )
    assert not any(module._forward_hooks for module in target.modules())
    assert assisted_loop.generator_in_use.get() is None
    assert not drafter.training
    small = lively_target("llama", seed=5)
    ids, _ = prompts([5])
    found = target.generate(ids, assistant_model=small, max_new_tokens=6, do_sample=False)
    assert found[0, 5:].tolist() == plain(target, ids, max_new_tokens=6)[0]


def test_where_frequencies_change():
    def kind(**rope):
        config = shared_target("llama").config.to_dict() | {"rope_parameters": {"rope_theta": 1e4, **rope}}
        return candidate_generator.frequency_switch(lively_target("llama").__class__(type(config_of())(**config)))

    def config_of():
        return shared_target("llama").config

    assert candidate_generator.frequency_switch(shared_target("llama")) is None
    assert kind(rope_type="dynamic", factor=2.0) == ("dynamic", 256)
    longrope = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
    assert kind(rope_type="longrope", original_max_position_embeddings=16, **longrope) == ("longrope", 16)


def test_alone_helper_strips_padding():
    assert [own.shape[1] for own in alone(*prompts([3, 5]))] == [3, 5]
