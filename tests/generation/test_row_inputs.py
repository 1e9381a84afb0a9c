"""Processors and criteria of a batch as each row alone would have them."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from adaflash_hf.generation.row_inputs import HISTORY_ONLY, LOGITS_ONLY, RowStops, logits_only, row_processors

CONFIG = GenerationConfig()


def row_of(processor, *, row=0, rows=1, padding=0, config=CONFIG):
    (result,) = row_processors(LogitsProcessorList([processor]), row, rows, padding, config)
    return result


@pytest.mark.parametrize(
    ("processor", "name", "config", "expected"),
    [
        (processors.MinNewTokensLengthLogitsProcessor(9, 2, 3), "prompt_length_to_skip", CONFIG, 5),
        (processors.SuppressTokensAtBeginLogitsProcessor([3], 9), "begin_index", CONFIG, 5),
        (processors.ExponentialDecayLengthPenalty((2, 1.5), 3, 9), "regulation_start", CONFIG, 7),
        (processors.RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=9), "prompt_ignore_length", CONFIG, 5),
        (processors.ForcedEOSTokenLogitsProcessor(20, 3), "max_length", CONFIG, 16),
        # Counted from the padded prompt only where it came from `min_new_tokens`.
        (processors.MinLengthLogitsProcessor(11, 3), "min_length", GenerationConfig(min_new_tokens=2), 7),
        (processors.MinLengthLogitsProcessor(11, 3), "min_length", CONFIG, 11),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lengths_leave_out_the_padding_and_the_callers_object_stays(processor, name, config, expected):
    before = getattr(processor, name)
    for rows in (1, 3):
        shifted = row_of(processor, rows=rows, padding=4, config=config)
        assert type(shifted) is type(processor) and getattr(shifted, name) == expected
        assert getattr(processor, name) == before
    assert getattr(row_of(processor), name) == before


def test_state_is_kept_apart_in_a_batch_and_is_the_callers_for_one_row():
    class Counting(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores

    given = Counting()
    one = row_of(given)
    assert one is given
    first, second = row_of(given, rows=2), row_of(given, row=1, rows=2)
    first(None, None)
    assert (first.calls, second.calls, given.calls) == (1, 0, 0)


def test_processors_that_read_nothing_but_logits_are_shared_and_subclasses_are_not_taken_for_them():
    warper = processors.TemperatureLogitsWarper(0.5)
    assert logits_only(warper) and row_of(warper, rows=2, padding=3) is warper

    class Remembering(processors.TemperatureLogitsWarper):
        pass

    assert not logits_only(Remembering(0.5))
    assert not set(LOGITS_ONLY) & set(HISTORY_ONLY)


@pytest.mark.parametrize(
    "processor",
    [
        processors.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None),
        processors.EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.ones(2, 4, dtype=torch.long)),
        processors.EncoderNoRepeatNGramLogitsProcessor(2, torch.ones(2, 4, dtype=torch.long)),
    ],
    ids=lambda processor: type(processor).__name__,
)
def test_what_works_on_a_batch_as_a_whole_is_refused_for_one(processor):
    assert row_of(copy.copy(processor)) is not None
    with pytest.raises(ValueError) as error:
        row_of(processor, rows=2)
    assert str(error.value) == (
        f"{type(processor).__name__} (guidance_scale or an encoder_* penalty) works on a batch as a whole: with "
        "assistant_model pass one prompt at a time instead of 2."
    )


def test_a_constraint_is_asked_with_the_rows_number_and_own_text():
    asked = []

    def allowed(row, ids):
        asked.append((row, ids.tolist()))
        return [row] if row < 5 else []

    given = processors.PrefixConstrainedLogitsProcessor(allowed, 1)
    scores = row_of(given, row=3, rows=4)(torch.tensor([[7, 8]]), torch.zeros(1, 6))
    assert asked == [(3, [7, 8])] and scores.exp()[0].tolist() == [0, 0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="returned an empty list for batch ID 5"):
        row_of(given, row=5, rows=6)(torch.tensor([[7]]), torch.zeros(1, 6))


# --- where a row ends ----------------------------------------------------------------------------------------------------


def criteria(*own, eos=None, limit=50):
    given = StoppingCriteriaList([MaxLengthCriteria(limit), *own])
    if eos is not None:
        given.append(EosTokenCriteria(torch.tensor(eos)))
    return given


IDS = torch.tensor([1, 2, 3])


def test_budget_and_eos_cut_a_block():
    stops = RowStops(criteria(eos=[7, 9]), budget=5, rows=1)
    assert stops.cut(IDS, [4, 5], 0, None) == ([4, 5], False)
    assert stops.cut(IDS, [4, 7, 5, 9], 0, None) == ([4, 7], True)
    assert stops.cut(IDS, [4, 5, 6], 3, None) == ([4, 5], True)
    assert RowStops(criteria(), budget=0, rows=1).cut(IDS, [4, 5], 0, None) == ([4], True)


def test_own_criteria_see_each_token_once_and_all_are_asked_at_the_end():
    seen = []

    class Watch:
        def __init__(self, name, stop):
            self.name, self.stop = name, stop

        def __call__(self, ids, scores, **kwargs):
            seen.append((self.name, ids[0].tolist(), scores))
            return torch.tensor([ids[0, -1].item() == self.stop])

    stops = RowStops(criteria(Watch("a", 5), Watch("b", 99), eos=[5]), budget=9, rows=1)
    assert stops.cut(IDS, [4, 5, 6], 0, None) == ([4, 5], True)
    text = [[1, 2, 3, 4], [1, 2, 3, 4, 5]]
    assert seen == [("a", text[0], None), ("b", text[0], None), ("a", text[1], None), ("b", text[1], None)]


def test_criteria_see_the_scores_up_to_their_token():
    lengths = []

    class Watch:
        def __call__(self, ids, scores, **kwargs):
            lengths.append((len(scores), [score.shape for score in scores][-1]))
            return torch.tensor([False])

    scores = [torch.zeros(6) for _ in range(5)]
    RowStops(criteria(Watch()), budget=9, rows=1).cut(IDS, [4, 5], 2, scores)
    assert lengths == [(3, (1, 6)), (4, (1, 6))]


WARPERS = {
    processors.TemperatureLogitsWarper: (0.7,),
    processors.TopKLogitsWarper: (3,),
    processors.TopPLogitsWarper: (0.6,),
    processors.TopHLogitsWarper: (0.5,),
    processors.MinPLogitsWarper: (0.2,),
    processors.TypicalLogitsWarper: (0.6,),
    processors.EpsilonLogitsWarper: (0.05,),
    processors.EtaLogitsWarper: (0.1,),
    processors.SuppressTokensLogitsProcessor: ([1, 2],),
    processors.InfNanRemoveLogitsProcessor: (),
    processors.LogitNormalization: (),
}


@pytest.mark.parametrize("warper", LOGITS_ONLY, ids=lambda warper: warper.__name__)
def test_one_call_for_all_positions_is_as_many_calls_for_one(warper):
    torch.manual_seed(0)
    processor, logits = warper(*WARPERS[warper]), torch.randn(5, 12) * 2
    together = processor(None, logits.clone())
    torch.testing.assert_close(together, torch.cat([processor(None, row[None].clone()) for row in logits]))


@pytest.mark.parametrize("warper", LOGITS_ONLY, ids=lambda warper: warper.__name__)
def test_drafts_of_a_reduced_vocabulary_pass_through_every_warper(warper):
    """The rest of the vocabulary is at minus infinity; it stays impossible, and something stays possible."""
    torch.manual_seed(0)
    processor, logits = warper(*WARPERS[warper]), torch.full((4, 12), float("-inf"))
    logits[:, [0, 3, 4, 9]] = torch.randn(4, 4)
    probs = processor(None, logits.clone()).softmax(-1)
    assert probs.isfinite().all() and probs[:, [1, 2, 5, 6, 7, 8, 10, 11]].max() < 1e-30
