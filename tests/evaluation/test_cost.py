"""Measuring a cost curve beforehand."""

from __future__ import annotations

import json

import pytest
from decoding_helpers import prompts, shared_target
from helpers import tiny_drafter

from adaflash_hf import AdaFlashDraftModel, measure_verify_cost
from adaflash_hf.generation.verify_cost import VerifyCost


def test_a_measured_curve_travels_with_the_drafter(tmp_path):
    target = shared_target()
    drafter = tiny_drafter(target, block_size=4)
    drafter.generation_config.length_policy = "fixed"
    cost = measure_verify_cost(target, drafter, rows=[1, 4], prompt_length=6)
    assert json.loads(json.dumps(cost)) == cost and VerifyCost.from_dict(cost).verify(4, 8) > 0
    assert drafter.generation_config.length_policy == "fixed" and drafter.generation_config.verify_cost is None
    drafter.generation_config.length_policy = "throughput"
    drafter.generation_config.verify_cost = cost
    drafter.save_pretrained(tmp_path)
    loaded = AdaFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.generation_config.verify_cost == cost
    ids, mask = prompts([5, 9])
    target.generate(ids, attention_mask=mask, assistant_model=loaded, max_new_tokens=20, do_sample=False)
    stats = loaded.last_draft_stats
    assert stats.policy == "throughput" and stats.measured == 0


def test_the_sweep_covers_every_length_of_the_block():
    target = shared_target()
    drafter = tiny_drafter(target, block_size=4)
    cost = VerifyCost.from_dict(measure_verify_cost(target, drafter, rows=[2], prompt_length=3))
    assert {2.0, 4.0, 6.0, 8.0} <= set(cost.tokens) and cost.draft(2) > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"rows": []}, "rows="), ({"rows": [0]}, "rows="), ({"prompt_length": 0}, "prompt_length=0")],
)
def test_bad_arguments_are_refused(arguments, named):
    target = shared_target()
    with pytest.raises(ValueError, match=named):
        measure_verify_cost(target, tiny_drafter(target), **arguments)
