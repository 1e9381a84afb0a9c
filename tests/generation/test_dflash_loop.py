"""Transformers' own DFlash loop with our drafter: the fixed-block baseline on the same weights."""

from __future__ import annotations

import logging as python_logging

import pytest
import torch
from decoding_helpers import prompts, settings, shared_target
from helpers import tiny_drafter
from transformers.utils import logging

from adaflash_hf.generation.draft_head import DraftHead
from adaflash_hf.generation.drafting import BlockDrafter


@pytest.fixture
def pair():
    target = shared_target("qwen3")
    drafter = tiny_drafter(target, block_size=4, mask_token_id=7)
    drafter.generation_config.length_policy = "fixed"
    return target, drafter


def drafts_of_both(target, drafter, ids, monkeypatch, **call):
    """Drafted tokens of every round, through our loop and through transformers' own."""
    ours, theirs = [], []
    propose, forward = BlockDrafter.propose, type(drafter).forward

    def seen_propose(self, **arguments):
        drafts = propose(self, **arguments)
        ours.append(drafts[0].token_ids)
        return drafts

    def seen_forward(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        theirs.append(DraftHead(target, drafter)(output.last_hidden_state[0, 1:]).argmax(-1).tolist())
        return output

    monkeypatch.setattr(BlockDrafter, "propose", seen_propose)
    first = target.generate(ids, assistant_model=drafter, do_sample=False, **call)
    monkeypatch.setattr(type(drafter), "forward", seen_forward)
    second = target.generate(ids, assistant_model=drafter, do_sample=False, speculation_type="dflash", **call)
    return first, second, ours, theirs


def test_same_drafts_and_same_text(pair, monkeypatch):
    target, drafter = pair
    ids, _ = prompts([9])
    first, second, ours, theirs = drafts_of_both(target, drafter, ids, monkeypatch, max_new_tokens=24)
    assert torch.equal(first, second)
    whole = [(a, b) for a, b in zip(ours, theirs) if len(a) == 3]
    assert len(whole) > 10
    assert all(a == b for a, b in whole)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("sliding", [False, True])
def test_same_drafts_for_every_target(kind, sliding, monkeypatch):
    target = shared_target(kind)
    own = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5} if sliding else {}
    drafter = tiny_drafter(target, block_size=4, mask_token_id=7, **own)
    drafter.generation_config.length_policy = "fixed"
    ids, _ = prompts([13])
    first, second, ours, theirs = drafts_of_both(target, drafter, ids, monkeypatch, max_new_tokens=16)
    assert torch.equal(first, second)
    whole = [(a, b) for a, b in zip(ours, theirs) if len(a) == 3]
    assert len(whole) > 5 and all(a == b for a, b in whole)


@pytest.mark.parametrize("scale", [0.0, 0.8, 3.0])
def test_the_ratio_policy_cuts_blocks_there(pair, scale, monkeypatch):
    target, drafter = pair
    ids, _ = prompts([9])
    plain = target.generate(ids, do_sample=False, max_new_tokens=12)
    with settings(drafter, length_policy="ratio", length_scale=scale):
        _, second, _, theirs = drafts_of_both(target, drafter, ids, monkeypatch, max_new_tokens=12)
    assert torch.equal(second, plain)
    # At least one token, since transformers' sampling step cannot take an empty draft.
    assert {len(draft) for draft in theirs} <= {1, 2, 3} and (scale > 0 or all(len(draft) == 1 for draft in theirs))


def test_other_policies_run_fixed_blocks_and_say_so_once(pair, monkeypatch):
    target, drafter = pair
    messages = []
    handler = python_logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.get_logger("adaflash_hf.modeling_adaflash")
    logger.addHandler(handler)
    ids, _ = prompts([5])
    logging.warning_once.cache_clear()
    try:
        with settings(drafter, length_policy="confidence"):
            target.generate(ids, assistant_model=drafter, speculation_type="dflash", max_new_tokens=8, do_sample=False)
            target.generate(ids, assistant_model=drafter, speculation_type="dflash", max_new_tokens=8, do_sample=False)
    finally:
        logger.removeHandler(handler)
    assert sum("cannot run the length policy 'confidence'" in message for message in messages) == 1


def test_drafters_that_loop_cannot_run_are_refused_by_name():
    target = shared_target("qwen3")
    ids, _ = prompts([5])
    learned = tiny_drafter(target, block_size=4, mask_token_id=None)
    with pytest.raises(ValueError, match="it has a learned mask_embedding .mask_token_id=None."):
        target.generate(ids, assistant_model=learned, speculation_type="dflash", max_new_tokens=4)
    reduced = tiny_drafter(target, block_size=4, mask_token_id=7, draft_token_ids=[3, 4, 5, 6])
    with pytest.raises(ValueError, match="it has draft_vocab_size=4, and that loop applies the target's whole head"):
        target.generate(ids, assistant_model=reduced, speculation_type="dflash", max_new_tokens=4)


def test_sampling_there_runs(pair):
    target, drafter = pair
    ids, _ = prompts([5])
    found = target.generate(ids, assistant_model=drafter, speculation_type="dflash", max_new_tokens=8, do_sample=True)
    assert found.shape[1] == 13
