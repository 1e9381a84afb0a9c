"""The throughput policy: the best lengths of a round, pauses, and the same decisions from the same curve."""

from __future__ import annotations

import itertools

import pytest
import torch
from decoding_helpers import oracle, plain, prompts, settings, shared_drafter, shared_target, texts_of
from helpers import tiny_drafter
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from adaflash_hf.generation import throughput
from adaflash_hf.generation.throughput import PauseRule, ThroughputPlanner, best_lengths
from adaflash_hf.generation.verify_cost import CostMeter, VerifyCost

FREE = VerifyCost((1, 100), (1.0, 1.0 + 1e-9))
STEEP = VerifyCost((0, 100), (0.0, 100.0))
KINKED = VerifyCost((1, 4, 5, 8, 9, 60), (1.0, 1.0, 2.0, 2.0, 5.0, 60.0))


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
    st.sampled_from([FREE, STEEP, KINKED]),
    st.floats(0, 3),
)
@hypothesis_settings(max_examples=80)
def test_no_other_lengths_are_worth_more(conditional, caps, cost, rate):
    survival = torch.tensor(conditional).cumprod(-1)
    rows, slots = survival.shape
    caps = caps[:rows]
    lengths, expected = best_lengths(survival, caps, cost, rate)

    def worth(choice):
        gained = sum(float(survival[row, :length].double().sum()) for row, length in enumerate(choice))
        return gained - rate * cost.verify(rows, rows + sum(choice))

    assert all(0 <= length <= min(cap, slots) for length, cap in zip(lengths, caps, strict=True))
    best = max(worth(choice) for choice in itertools.product(*(range(min(cap, slots) + 1) for cap in caps)))
    assert worth(lengths) == pytest.approx(best, abs=1e-6)
    assert expected == pytest.approx(
        sum(float(survival[r, :n].double().sum()) for r, n in enumerate(lengths)), abs=1e-6
    )


def test_one_budget_serves_the_batch():
    survival = torch.tensor([[0.9, 0.8, 0.7], [0.3, 0.1, 0.0]])
    # A token costs half an accepted one: the sure row gets all of its slots and the unsure one none.
    assert best_lengths(survival, [3, 3], VerifyCost((0, 100), (1.0, 51.0)), 1.0)[0] == [3, 0]
    assert best_lengths(survival, [1, 3], VerifyCost((0, 100), (1.0, 21.0)), 1.0)[0] == [1, 1]
    assert best_lengths(survival, [3, 3], STEEP, 1.0)[0] == [0, 0]
    assert best_lengths(survival, [3, 3], FREE, 1.0)[0][0] == 3


def rounds(planner, survival, caps, accepted_share, count):
    """Runs rounds in which `accepted_share` of the promised tokens come; the lengths of each, `None` where paused."""
    result = []
    for _ in range(count):
        if not planner.start(len(caps), max(caps)):
            planner.finish([0] * len(caps), [0] * len(caps), 0.0, drafted=False)
            result.append(None)
            continue
        lengths = planner.plan(survival, caps)
        planner.drafted()
        promised = sum(float(survival[row, :length].sum()) for row, length in enumerate(lengths))
        planner.finish(lengths, [accepted_share * promised / len(caps)] * len(caps), promised, drafted=True)
        result.append(lengths)
    return result


def test_what_never_pays_is_tried_ever_more_rarely():
    cost = VerifyCost((0, 100), (1.0, 101.0), draft_base=1.0)
    found = rounds(ThroughputPlanner(cost), torch.full((2, 3), 0.05), [3, 3], 1.0, 200)
    tried = [place for place, lengths in enumerate(found) if lengths is not None]
    gaps = [b - a - 1 for a, b in itertools.pairwise(tried)]
    trial, again = [0] * 7, [0] * 3
    assert gaps == [*trial, 8, *again, 16, *again, 32, *again, 64, *again] and all(found[p] == [0, 0] for p in tried)


def test_one_bad_draft_stops_nothing():
    rule = PauseRule()
    for worth in (-1.0, *[0.5] * 20, -3.0, 0.5):
        assert not rule.skip()
        rule.judge(worth)
    assert not rule.skip()
    rule.judge(-5.0)
    assert [rule.skip() for _ in range(9)] == [True] * 8 + [False]
    for _ in range(4):  # a trial that pays ends it
        rule.judge(0.1)
    assert not rule.skip()


def test_what_pays_is_never_paused():
    cost = VerifyCost((0, 100), (1.0, 2.0), draft_base=0.05)
    planner = ThroughputPlanner(cost)
    found = rounds(planner, torch.tensor([[0.8, 0.6, 0.4]]), [3], 1.0, 60)
    assert None not in found and all(lengths[0] >= 2 for lengths in found)
    assert planner.speed > 1.5


def test_promises_that_are_not_kept_are_believed_less():
    cost = VerifyCost((0, 100), (1.0, 21.0), draft_base=0.01)
    kept, broken = ThroughputPlanner(cost), ThroughputPlanner(cost)
    survival = torch.tensor([[0.9, 0.8, 0.7, 0.6]])
    good, bad = rounds(kept, survival, [4], 1.0, 40), rounds(broken, survival, [4], 0.1, 40)
    assert kept.reliability == pytest.approx(1.0, abs=0.01) and broken.reliability < 0.6
    assert sum(sum(lengths or [0]) for lengths in bad[-10:]) < 0.6 * sum(sum(lengths or [0]) for lengths in good[-10:])


def test_without_a_curve_it_sweeps_first_and_then_follows_what_it_saw(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock[0])
    planner, survival, sent = ThroughputPlanner(meter=CostMeter()), torch.tensor([[0.9, 0.8, 0.1, 0.05]]), []
    for _ in range(30):
        drafts = planner.start(1, 4)
        lengths = planner.plan(survival, [4]) if drafts else [0]
        clock[0] += 0.1 * drafts
        planner.drafted()
        clock[0] += 1.0 + 0.3 * sum(lengths)  # a verify
        sent.append((planner.was_measured, lengths[0]))
        planner.finish(lengths, [min(lengths[0], 2)], float(survival[0, : lengths[0]].sum()), drafts)
    assert [measured for measured, _ in sent] == [True] * 12 + [False] * 18
    assert sorted(length for measured, length in sent if measured) == sorted([0, 1, 2, 4] * 3)
    assert {length for measured, length in sent if not measured} == {2}
    assert planner.meter.cost.verify(1, 3) == pytest.approx(1.6, rel=0.02)
    assert planner.meter.cost.draft(1) == pytest.approx(0.1, rel=0.02)


SAVED = VerifyCost((1, 40), (1.0, 6.0), per_row=0.05, draft_base=0.1).to_dict()


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_saved_curve_makes_a_run_reproducible(do_sample):
    target, drafter = shared_target(), shared_drafter()
    ids, mask = prompts([9, 4, 7])
    call = {"attention_mask": mask, "assistant_model": drafter, "max_new_tokens": 20, "pad_token_id": 0}
    found = []
    with settings(drafter, length_policy="throughput", verify_cost=SAVED):
        for _ in range(2):
            torch.manual_seed(5)
            with oracle(texts_of(ids, mask, plain(target, ids, mask, max_new_tokens=20)), 0.3, seed=2):
                output = target.generate(ids, do_sample=do_sample, **call)
            found.append((output.tolist(), drafter.last_draft_stats))
    assert found[0] == found[1]
    assert found[0][1].measured == 0 and found[0][1].drafted > 0 and found[0][1].policy == "throughput"


def test_the_first_call_measures_and_says_so_and_the_text_stays():
    target, drafter = shared_target(), tiny_drafter(shared_target(), block_size=5)
    ids, mask = prompts([9, 4, 7, 2])
    expected = plain(target, ids, mask, max_new_tokens=20)
    drafter.generation_config.length_policy = "throughput"
    measured = []
    for _ in range(2):
        with oracle(texts_of(ids, mask, expected), 0.2):
            output = target.generate(
                ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=20, do_sample=False, pad_token_id=0
            )
        assert output[:, ids.shape[1] :].tolist() == expected
        measured.append(drafter.last_draft_stats.measured)
    assert measured[0] > 0 and measured[1] < measured[0]
    assert drafter.last_draft_stats.survival == "head"


def test_a_bad_curve_is_refused_before_decoding():
    target, drafter = shared_target(), shared_drafter()
    ids, _ = prompts([5])
    with (
        settings(drafter, length_policy="throughput", verify_cost={"tokens": [1]}),
        pytest.raises(ValueError, match="verify_cost"),
    ):
        target.generate(ids, assistant_model=drafter, max_new_tokens=4)


def test_the_survival_in_force_is_named():
    target = shared_target()
    ids, _ = prompts([5])
    fit = {"scale": [1.0] * 3, "bias": [0.0] * 3}
    for heads, calibration, name in (
        (["ratio"], None, "confidence"),
        (["survival"], None, "head"),
        (["survival"], {"greedy": fit}, "head (calibrated)"),
        (["survival"], {"sampling": fit}, "head"),
    ):
        drafter = tiny_drafter(target, length_heads=heads, survival_calibration=calibration)
        target.generate(ids, assistant_model=drafter, max_new_tokens=4, do_sample=False)
        assert drafter.last_draft_stats.survival == name
