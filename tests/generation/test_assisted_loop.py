"""Batches of targets that cannot be packed: rows one after another in transformers' own assisted loop."""

from __future__ import annotations

import pytest
import torch
from decoding_helpers import (
    alone,
    assert_rows_equal,
    oracle,
    plain,
    prompts,
    settings,
    shared_drafter,
    shared_target,
    texts_of,
)
from helpers import tiny_drafter
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation.streamers import BaseStreamer

from adaflash_hf import _compat
from adaflash_hf.generation import dispatch
from adaflash_hf.generation.assisted_loop import row_arguments
from adaflash_hf.generation.stats import DraftStats

LENGTHS = [4, 11, 7]


@pytest.fixture
def pair():
    return shared_target("llama"), shared_drafter("llama")


@pytest.fixture
def unpacked(monkeypatch):
    """Leads every call to transformers' own loop."""
    monkeypatch.setattr(dispatch, "packing_obstacle", lambda *args: "a test says so")


def falcon():
    """Alibi, which transformers' attention interface does not carry."""
    config = AutoConfig.for_model(
        "falcon", vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, ffn_hidden_size=48,
        alibi=True, initializer_range=0.4, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    drafter = tiny_drafter(target, block_size=5)
    drafter.generation_config.length_policy = "fixed"
    return target, drafter


@pytest.mark.parametrize("policy", ["fixed", "confidence", "throughput"])
def test_a_batch_of_a_target_that_cannot_be_packed(policy, monkeypatch):
    said = []
    monkeypatch.setattr(dispatch.logger, "warning_once", said.append)
    target, drafter = falcon()
    ids, mask = prompts(LENGTHS)
    expected = plain(target, ids, mask)
    with oracle(texts_of(ids, mask, expected), 0.2), settings(drafter, length_policy=policy):
        found = target.generate(
            ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=14, do_sample=False, pad_token_id=0
        )
    assert_rows_equal(found, ids, expected)
    stats = drafter.last_draft_stats
    assert stats.policy == policy and stats.emitted == 3 * 13
    assert policy == "throughput" or stats.accepted > 0
    assert said == [
        "Packed decoding is not used (FalconForCausalLM does not use transformers' attention interface); drafting inside "
        "transformers' own assisted loop, one row after another."
    ]


def test_rows_end_on_their_own_and_are_padded(pair, unpacked):
    target, drafter = pair
    ids, mask = prompts(LENGTHS)
    whole = plain(target, ids, mask)
    eos = next(token for token in whole[1] if token not in whole[0][:9])
    call = {"eos_token_id": eos, "pad_token_id": 0}
    expected = plain(target, ids, mask, **call)
    assert len({len(row) for row in expected}) > 1
    with oracle(texts_of(ids, mask, whole), 0.1):
        found = target.generate(
            ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=14, do_sample=False, **call
        )
    assert_rows_equal(found, ids, expected)
    for row, text in enumerate(expected):
        assert not found[row, ids.shape[1] + len(text) :].any()
    assert drafter.last_draft_stats.emitted == sum(len(text) - 1 for text in expected)


class Lengths(LogitsProcessor):
    """Notes how long the ids are that it is shown first."""

    seen: list[int] = []

    def __init__(self):
        self.started = False

    def __call__(self, input_ids, scores):
        assert len(input_ids) == 1
        if not self.started:
            self.seen.append(input_ids.shape[1])
            self.started = True
        return scores


def test_processors_see_each_row_without_padding(pair, unpacked):
    target, drafter = pair
    ids, mask = prompts(LENGTHS)
    call = {"repetition_penalty": 1.7, "min_new_tokens": 4, "eos_token_id": [5, 9], "pad_token_id": 0}
    expected = plain(target, ids, mask, **call)
    Lengths.seen.clear()
    with oracle(texts_of(ids, mask, expected), 0.3):
        found = target.generate(
            ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=14, do_sample=False,
            logits_processor=LogitsProcessorList([Lengths()]), **call,
        )  # fmt: skip
    assert_rows_equal(found, ids, expected)
    assert Lengths.seen == LENGTHS


def test_a_total_length_counts_the_padded_prompt(pair, unpacked):
    target, drafter = pair
    ids, mask = prompts(LENGTHS)
    found = target.generate(
        ids, attention_mask=mask, assistant_model=drafter, max_length=15, do_sample=False, pad_token_id=0
    )
    assert_rows_equal(found, ids, plain(target, ids, mask, max_new_tokens=4))


@pytest.mark.parametrize("holes", [[[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 1, 1], [0, 1, 1, 1]]], ids=["right", "hole"])
def test_masks_that_are_not_left_padding(pair, holes):
    target, drafter = pair
    ids, _ = prompts([4, 4])
    mask = torch.tensor(holes)
    call = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(ids, attention_mask=mask, **call)
    with oracle(expected.tolist(), 0.2):
        found = target.generate(ids, attention_mask=mask, assistant_model=drafter, **call)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("packed", [True, False])
def test_scores_and_logits_by_step(pair, packed, monkeypatch):
    target, drafter = pair
    ids, mask = prompts(LENGTHS)
    whole = plain(target, ids, mask)
    call = {
        "attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": whole[1][6],
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True, "temperature": None,
    }  # fmt: skip
    expected = target.generate(ids, **call)
    if not packed:
        monkeypatch.setattr(dispatch, "packing_obstacle", lambda *args: "a test says so")
    with oracle(texts_of(ids, mask, whole), 0.3):
        found = target.generate(ids, assistant_model=drafter, **call)
    assert torch.equal(found.sequences, expected.sequences)
    new = expected.sequences[:, ids.shape[1] :]
    for name in ("scores", "logits"):
        assert len(found[name]) == len(expected[name])
        ended = torch.zeros(len(ids), dtype=torch.bool)
        for step, (own, other) in enumerate(zip(found[name], expected[name], strict=True)):
            torch.testing.assert_close(own[~ended], other[~ended], atol=1e-4, rtol=1e-4)
            assert not own[ended].any()
            ended |= new[:, step] == whole[1][6]
    assert found.draft_stats is drafter.last_draft_stats


def test_sampling(pair, unpacked):
    """Equal rows: the share of each first two tokens against the exact probabilities."""
    target, drafter = pair
    ids, _ = prompts([5])
    torch.manual_seed(0)
    found = target.generate(
        ids.repeat(300, 1), assistant_model=drafter, max_new_tokens=3, do_sample=True, top_k=4, temperature=2.0
    )
    logits = target(ids).logits[0, -1] / 2.0
    top = logits.topk(4)
    counts = torch.tensor([(found[:, 5] == token).sum() for token in top.indices]).float()
    expected = top.values.softmax(-1) * 300
    assert counts.sum() == 300
    assert (
        float(((counts - expected) ** 2 / expected).sum().detach()) < 16.3
    )  # chi-square, 3 degrees of freedom, p = 0.001
    torch.manual_seed(0)
    again = target.generate(
        ids.repeat(300, 1), assistant_model=drafter, max_new_tokens=3, do_sample=True, top_k=4, temperature=2.0
    )
    assert torch.equal(found, again)


def test_num_return_sequences(pair, unpacked):
    target, drafter = pair
    ids, mask = prompts([4, 6])
    found = target.generate(
        ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=6, do_sample=True, num_return_sequences=3,
        pad_token_id=0,
    )  # fmt: skip
    assert found.shape == (6, 12) and torch.equal(found[:, :6], ids.repeat_interleave(3, 0))


class Silent(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"streamer": True}, "streamer works for one row, and the batch has 2."),
        (
            {"return_dict_in_generate": True, "output_hidden_states": True},
            "output_hidden_states=True works for one row with assistant_model, and the batch has 2: pass one prompt at a "
            "time, or leave out one of the two.",
        ),
    ],
)
def test_what_a_batch_cannot_have(pair, unpacked, call, message):
    if "streamer" in call:
        call = {"streamer": Silent()}
    ids, mask = prompts([4, 6])
    with pytest.raises(ValueError) as error:
        pair[0].generate(ids, attention_mask=mask, assistant_model=pair[1], max_new_tokens=3, do_sample=False, **call)
    assert str(error.value) == message


def test_masks_that_are_refused(pair):
    target, drafter = pair
    ids, _ = prompts([4, 4])
    call = {"assistant_model": drafter, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(
        ValueError, match="attention_mask leaves row 1 without tokens: every prompt needs at least one."
    ):
        target.generate(ids, attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]), **call)
    with pytest.raises(ValueError, match="attention_mask has 1 rows, and the batch 2: pass one row for each prompt."):
        target.generate(ids, attention_mask=torch.tensor([[0, 1, 1, 1]]), **call)


def test_arguments_of_one_row(pair):
    cache = DynamicCache(config=pair[0].config)
    given = {
        _compat.cache_argument(pair[0]): cache,
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]]),
        "position_ids": torch.arange(24).view(2, 3, 4),
        "use_cache": True,
        "cache_position": torch.arange(4),
        "nothing": {},
    }
    own, padding = row_arguments(0, 3, given)
    assert padding == 2 and own["attention_mask"].tolist() == [[1, 1]]
    assert own["position_ids"].tolist() == [[[2, 3]], [[14, 15]]]
    assert own["cache_position"].tolist() == [2, 3] and own["use_cache"] is True and own["nothing"] == {}
    assert own[_compat.cache_argument(pair[0])] is not cache
    own, padding = row_arguments(2, 3, given)
    assert padding == 0 and own["attention_mask"].tolist() == [[1, 0, 1, 1]]
    with pytest.raises(ValueError) as error:
        row_arguments(0, 3, {"pixel_values": torch.zeros(3, 2)})
    assert str(error.value) == (
        "pixel_values (shape [3, 2]) cannot be split by row with assistant_model: pass one prompt at a time instead of 3."
    )


def test_statistics_of_rows_are_added():
    one, two = DraftStats("fixed"), DraftStats("fixed")
    one.add_round(3, 3, 2, 3)
    two.add_round(4, 4, 4, 5)
    two.add_round(0, 0, 0, 1)
    both = one.merge(two)
    assert both is one
    assert (both.rounds, both.rounds_with_draft, both.planned, both.drafted) == (3, 2, 7, 7)
    assert (both.accepted, both.emitted) == (6, 9)
    assert both.slot_reached == [2, 2, 2, 1] and both.slot_accepted == [2, 2, 1, 1]


def test_helper_strips_padding():
    assert [own.shape[1] for own in alone(*prompts(LENGTHS))] == LENGTHS
