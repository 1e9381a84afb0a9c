"""Drafting on its own: caps, processors, reduced vocabularies, the drafter's context."""

from __future__ import annotations

import pytest
import torch
from decoding_helpers import settings, shared_drafter, shared_target
from helpers import tiny_drafter
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

from adaflash_hf import DraftSettings
from adaflash_hf.draft_settings import read_draft_settings
from adaflash_hf.generation.drafting import BlockDrafter, Draft


def features(drafter, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, drafter.fc.weight.shape[1], generator=generator)


def drafting_of(drafter, rows=1, *, do_sample=False, processors=(), starts=None, policy="fixed", tokens=7, **own):
    made = BlockDrafter(shared_target(), drafter, DraftSettings(policy, **own), rows, do_sample, starts)
    for row in range(rows):
        made.add_context(row, features(drafter, tokens, row))
    return made


def propose(made, caps, given=(), length=8):
    rows = len(caps)
    return made.propose(
        anchors=[5 + row for row in range(rows)],
        positions=[length - 1] * rows,
        caps=caps,
        processors=[LogitsProcessorList(given)] * rows,
        texts=[torch.arange(3, 3 + length)] * rows,
    )


def test_each_row_has_its_cap_and_the_call_has_one():
    drafter = shared_drafter()
    drafts = propose(drafting_of(drafter, 4), [0, 1, 3, 9])
    assert [len(draft.token_ids) for draft in drafts] == [0, 1, 3, 4]
    assert [draft.planned for draft in drafts] == [4, 4, 4, 4]
    drafts = propose(drafting_of(drafter, 2, num_assistant_tokens=2), [1, 9])
    assert [len(draft.token_ids) for draft in drafts] == [1, 2]


def test_nothing_to_draft_runs_no_network_and_keeps_the_context():
    drafter = shared_drafter()
    for made, caps in ((drafting_of(drafter), [0]), (drafting_of(drafter, num_assistant_tokens=0), [9])):
        made._forward = None
        assert propose(made, caps) == [Draft([], 0)]
        assert sum(map(len, made._pending[0])) == 7


def test_the_context_may_come_in_pieces_or_at_once():
    drafter = shared_drafter()
    whole = propose(drafting_of(drafter, tokens=7), [4])
    made = drafting_of(drafter, tokens=0)
    taps = features(drafter, 7)
    made.add_context(0, taps[:3])
    propose(made, [4], length=4)
    made.add_context(0, taps[3:5])
    made.add_context(0, taps[5:])
    assert propose(made, [4])[0].token_ids == whole[0].token_ids


def test_rows_do_not_see_each_other():
    drafter = shared_drafter()
    together = propose(drafting_of(drafter, 3), [4, 4, 4])
    for row in range(3):
        made = drafting_of(drafter, 1, tokens=0)
        made.add_context(0, features(drafter, 7, row))
        (alone,) = made.propose([5 + row], [7], [4], [LogitsProcessorList()], [torch.arange(3, 11)])
        assert alone.token_ids == together[row].token_ids
    # A row that is left behind drafts on as if the others had never been there.
    more = features(drafter, 2, 9)
    lone, crowded = drafting_of(drafter, 1, tokens=0), drafting_of(drafter, 3)
    lone.add_context(0, features(drafter, 7, 2))
    propose(crowded, [4, 4, 4])
    propose(lone, [4])
    for row in range(3):
        crowded.add_context(row, more if row == 2 else -more)
    lone.add_context(0, more)
    crowded.keep_rows([2])
    assert torch.equal(torch.cat(crowded._pending[0]), more)
    found = []
    for made in (lone, crowded):
        found += made.propose([7], [9], [4], [LogitsProcessorList()], [torch.arange(3, 13)])
    assert found[0].token_ids == found[1].token_ids


def test_drafts_are_drawn_from_the_distributions_they_come_with():
    drafter = shared_drafter()
    torch.manual_seed(0)
    for given in ((), [processors.TopKLogitsWarper(3)], [processors.RepetitionPenaltyLogitsProcessor(1.5)]):
        (draft,) = propose(drafting_of(drafter, do_sample=True), [4], given)
        assert draft.probs.shape == (4, 64)
        torch.testing.assert_close(draft.probs.sum(-1), torch.ones(4))
        assert all(draft.probs[slot, token] > 0 for slot, token in enumerate(draft.token_ids))
    assert propose(drafting_of(drafter), [4])[0].probs is None


def test_a_processor_that_reads_the_text_sees_the_drafted_tokens():
    drafter = shared_drafter()
    seen = []

    class Watch(processors.RepetitionPenaltyLogitsProcessor):
        def __call__(self, ids, scores):
            seen.append(ids[0].tolist())
            return scores

    (free,) = propose(drafting_of(drafter), [4], [Watch(1.0)])
    assert seen == []  # a subclass may keep state, so drafts do not go through it
    (draft,) = propose(drafting_of(drafter), [4], [processors.NoRepeatNGramLogitsProcessor(1)])
    text = list(range(3, 11))
    assert len({*draft.token_ids}) == 4 and not {*draft.token_ids} & {*text}
    assert len(free.token_ids) == 4


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        [processors.SuppressTokensLogitsProcessor([9, 20, 40])],
        [processors.SuppressTokensLogitsProcessor([9, 20, 40]), processors.EtaLogitsWarper(0.1)],
        [processors.SuppressTokensLogitsProcessor([9, 20, 40]), processors.TopHLogitsWarper(0.5)],
        [processors.NoBadWordsLogitsProcessor([[9], [20], [40]], None)],
        [processors.NoBadWordsLogitsProcessor([[9], [20], [40]], None), processors.EtaLogitsWarper(0.1)],
    ],
    ids=lambda given: "+".join(type(processor).__name__ for processor in given),
)
def test_where_everything_that_can_be_drafted_is_forbidden_nothing_is(given, do_sample):
    drafter = tiny_drafter(shared_target(), draft_token_ids=[9, 20, 40])
    (draft,) = propose(drafting_of(drafter, do_sample=do_sample), [3], given)
    assert draft.token_ids == []


def test_a_forbidden_slot_ends_the_draft():
    """Three tokens, each allowed once: the fourth slot has none left."""
    drafter = tiny_drafter(shared_target(), draft_token_ids=[20, 30, 40], block_size=6)
    for do_sample in (False, True):
        (draft,) = propose(drafting_of(drafter, do_sample=do_sample), [5], [processors.NoRepeatNGramLogitsProcessor(1)])
        assert sorted(draft.token_ids) == [20, 30, 40]
        assert draft.probs is None or draft.probs.shape == (3, 64)


def test_a_length_decision_does_not_depend_on_processors_or_sampled_tokens():
    drafter = shared_drafter()
    with settings(drafter, length_policy="confidence", confidence_threshold=0.01):
        own = read_draft_settings(drafter.generation_config)
    planned = set()
    for seed in range(6):
        for given in (
            (),
            [processors.TemperatureLogitsWarper(0.1)],
            [processors.RepetitionPenaltyLogitsProcessor(3.0)],
        ):
            torch.manual_seed(seed)
            made = drafting_of(
                drafter, do_sample=True, policy="confidence", confidence_threshold=own.confidence_threshold
            )
            planned.add(propose(made, [4], given)[0].planned)
    assert len(planned) == 1
