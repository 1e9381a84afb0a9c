"""The cost curve: what it says, how it is fitted, saved and refused, and the sweep that measures it."""

from __future__ import annotations

import json
import random

import pytest
import torch
from decoding_helpers import shared_drafter, shared_target
from hypothesis import given
from hypothesis import strategies as st

from adaflash_hf import packed_linears
from adaflash_hf.generation.verify_cost import CostMeter, VerifyCost

H20 = VerifyCost(tokens=(0, 1000), seconds=(3.6e-3, 3.6e-3 + 0.1095), per_row=0.29e-3, draft_base=1e-3)


def test_the_curve_is_linear_between_knots_and_goes_on_with_its_last_slope():
    cost = VerifyCost((1, 5, 9), (1.0, 1.0, 3.0), per_row=0.5, draft_base=0.25, draft_per_row=0.125)
    values = cost.verify_all(2, torch.tensor([1, 3, 5, 7, 9, 11]))
    assert values.tolist() == [2.0, 2.0, 2.0, 3.0, 4.0, 5.0]
    assert cost.verify(2, 7) == 3.0 and cost.draft(4) == 0.75
    # Below the first knot too, and never under nothing.
    assert VerifyCost((4, 8), (1.0, 3.0)).verify(1, 1) == 0.0
    assert VerifyCost((4,), (1.0,)).verify(3, 17) == 1.0


def test_a_published_shape_is_found_again_from_its_timings():
    observed = [(rows, rows * each, H20.verify(rows, rows * each)) for rows in (1, 8, 64) for each in (1, 2, 5, 16)]
    fitted = VerifyCost.fit(observed, [(1, 0.002), (8, 0.009)])
    for rows, tokens, seconds in observed:
        assert fitted.verify(rows, tokens) == pytest.approx(seconds, rel=0.01)
    assert fitted.draft(4) == pytest.approx(0.005, rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 15), st.floats(1e-4, 10.0)), min_size=1, max_size=40))
def test_any_timings_give_a_curve_that_never_falls(timings):
    cost = VerifyCost.fit([(rows, rows * (1 + each), seconds) for rows, each, seconds in timings])
    for rows in (1, 7, 40):
        values = cost.verify_all(rows, torch.arange(rows, 700))
        assert (values.diff() >= -1e-12).all() and values[-1] > 0


def test_one_slow_timing_of_three_is_left_out():
    timings = [(4, tokens, tokens * 0.01) for tokens in (4, 8, 20) for _ in range(2)] + [(4, 8, 9.0)]
    assert VerifyCost.fit(timings).verify(4, 8) == pytest.approx(0.08, rel=1e-3)


def test_rows_are_told_from_tokens_only_where_they_differ():
    alone = VerifyCost.fit([(4, 4, 0.1), (4, 8, 0.2), (3, 3, 0.09)])
    assert alone.per_row == 0.0
    both = VerifyCost.fit([(rows, tokens, 0.01 * rows + 0.02) for rows in (2, 8) for tokens in (8, 16)])
    assert both.per_row == pytest.approx(0.01, rel=1e-3)


def test_it_is_saved_as_plain_json_and_read_back():
    saved = json.loads(json.dumps(H20.to_dict()))
    assert VerifyCost.from_dict(saved) == H20 and VerifyCost.from_dict(H20) is H20


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        ([1, 2], "verify_cost="),
        ({"tokens": [1]}, "verify_cost="),
        ({"tokens": [1], "seconds": [1], "per_token": 2}, "verify_cost="),
        ({"tokens": [], "seconds": []}, "'tokens'"),
        ({"tokens": [1, "2"], "seconds": [1, 2]}, "'tokens'"),
        ({"tokens": [2, 1], "seconds": [1, 2]}, "increasing"),
        ({"tokens": [1, 2], "seconds": [1]}, "'tokens'"),
        ({"tokens": [1, 2], "seconds": [2, 1]}, "never fall"),
        ({"tokens": [1, 2], "seconds": [0, 0]}, "'seconds'"),
        ({"tokens": [1], "seconds": [1], "per_row": -1}, "'per_row'"),
        ({"tokens": [1], "seconds": [float("nan")]}, "'seconds'"),
    ],
)
def test_what_is_no_curve_is_refused_by_name(saved, named):
    with pytest.raises(ValueError, match=named.replace("[", r"\[")):
        VerifyCost.from_dict(saved)


def test_nothing_to_fit_is_an_error():
    with pytest.raises(ValueError, match="at least one timing"):
        VerifyCost.fit([])


def sweep(meter, rows, cap):
    lengths = []
    while (length := meter.next_length(rows, cap)) is not None:
        lengths.append(length)
        meter.add(rows, rows * (1 + length), 0.01 * rows * (1 + length), 0.002 if length else None)
    return lengths


def test_a_sweep_tries_every_length_in_random_order_once_for_a_power_of_two_of_rows():
    meter = CostMeter()
    lengths = sweep(meter, 8, 15)
    assert sorted(lengths) == sorted([0, 1, 2, 4, 8, 15] * 3)
    assert lengths != sorted(lengths) and lengths != sorted(lengths, reverse=True)
    # Other rows add the plain step, and numbers of tokens that no sweep has come near.
    assert sweep(meter, 5, 15) == [] and sweep(meter, 9, 15) == [0, 0]
    assert sorted(sweep(meter, 2, 15)) == [0, 0, 1, 1, 2, 2]
    assert meter.cost.verify(8, 24) == pytest.approx(0.24, rel=0.02)
    assert meter.cost.draft(8) == pytest.approx(0.002, rel=0.01)
    # Python's own generator is left as it was.
    state = random.getstate()
    sweep(CostMeter(), 2, 4)
    assert random.getstate() == state


def test_later_rounds_correct_the_curve_and_cheap_lengths_are_visited_again():
    meter = CostMeter()
    sweep(meter, 1, 4)
    assert meter.cost.verify(1, 3) == pytest.approx(0.03, rel=0.02)
    for seen in range(1, 64):  # from now on a token more costs nothing
        meter.observe(1, 3, 0.01, 0.001)
        assert meter.next_length(1, 4) is None
        if seen == 3:
            assert meter.cost.verify(1, 3) == pytest.approx(0.03, rel=0.02)  # the next fit is not due yet
    meter.observe(1, 3, 0.01, 0.001)
    assert meter.cost.verify(1, 3) == pytest.approx(0.01, rel=0.15)
    assert meter.cost.draft(1) == pytest.approx(0.001, rel=0.02)
    again = meter.next_length(1, 4)
    assert again in (0, 1, 2)  # four drafts cost five times a step and are not tried
    meter.add(1, 1 + again, 0.01, 0.001)
    assert meter.next_length(1, 4) is None


def test_a_pair_has_one_meter_until_the_target_changes():
    target, drafter = shared_target(), shared_drafter()
    meter = CostMeter.shared(target, drafter)
    assert CostMeter.shared(target, drafter) is meter
    with packed_linears(target):
        other = CostMeter.shared(target, drafter)
        assert other is not meter and CostMeter.shared(target, drafter) is other
    assert CostMeter.shared(target, drafter) is not other
