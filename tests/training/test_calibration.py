"""Calibration of the survival head: what it puts right, and how reliability is measured."""

from __future__ import annotations

import pytest
import torch
from helpers import tiny_drafter, tiny_target

from adaflash_hf.generation.length_policy import head_survival
from adaflash_hf.training import OPDConfig, OPDTrainer
from adaflash_hf.training.calibration import (
    SurvivalRounds,
    expected_calibration_error,
    fit_calibration,
    reliability,
    simulated_acceptances,
)


def made_rounds(count, seed=0, scale=0.5, bias=-0.6):
    """Rounds whose conditional acceptance is `sigmoid(scale * logit + bias)`, so the head is too sure by design."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(count, 4, generator=generator)
    log_confidence = torch.rand(count, 4, generator=generator).clamp(min=1e-3).log()
    chance = (scale * logits + bias + 0.3 * (log_confidence - torch.log1p(-log_confidence.exp()))).sigmoid()
    accepted = (torch.rand(chance.shape, generator=generator) < chance).long().cumprod(-1).bool()
    counted = torch.ones_like(accepted)
    counted[: count // 10, 2:] = False
    return SurvivalRounds(logits, accepted, counted, log_confidence)


def test_the_fit_finds_the_numbers_that_made_the_rounds():
    fit = fit_calibration(made_rounds(40_000))
    assert fit["scale"][:2] == pytest.approx([0.5, 0.5], abs=0.05)
    assert fit["bias"][:2] == pytest.approx([-0.6, -0.6], abs=0.08)
    assert fit["confidence"][:2] == pytest.approx([0.3, 0.3], abs=0.05)


def test_calibration_carries_over_to_other_rounds():
    fit = fit_calibration(made_rounds(20_000))
    other = made_rounds(20_000, seed=1)
    before, after = reliability(other, None), reliability(other, fit)
    assert before["ece"] > 0.05 and after["ece"] < 0.015
    assert before["ece_reached"] > 0.1 and after["ece_reached"] < 0.02
    assert after["brier"] < min(before["brier"], after["brier_base_rates"], after["brier_confidence"])
    assert after["rounds"] == 20_000 and 1.0 < after["acceptance_length"] < 2.0


def test_a_slot_without_rounds_is_an_error():
    rounds = made_rounds(100)
    rounds.counted[:80, 3] = False
    with pytest.raises(ValueError, match="only 20 of 100 hold slot 4"):
        fit_calibration(rounds)


def test_a_slot_that_is_always_accepted_stays_finite():
    rounds = made_rounds(400)
    rounds.accepted[:] = True
    fit = fit_calibration(rounds)
    survival = head_survival(rounds.logits, fit, rounds.log_confidence)
    assert survival.isfinite().all() and survival[:, -1].mean() > 0.98


def test_expected_calibration_error_in_bins_of_equal_mass():
    predicted = torch.cat([torch.full((30,), 0.2), torch.full((30,), 0.8)])
    outcome = torch.cat([torch.zeros(30), torch.ones(30)])
    assert expected_calibration_error(predicted, outcome, bins=2) == pytest.approx(0.2)
    assert expected_calibration_error(predicted, predicted, bins=15) == pytest.approx(0.0, abs=1e-6)


def test_reached_slots_are_those_whose_predecessors_were_accepted():
    accepted = torch.tensor([[True, True, False], [False, False, False]])
    counted = torch.tensor([[True, True, True], [True, True, False]])
    rounds = SurvivalRounds(torch.zeros(2, 3), accepted, counted, torch.zeros(2, 3))
    assert rounds.reached.tolist() == [[True, True, True], [True, False, False]]
    assert rounds.base_rates().tolist() == [0.5, 0.5, 0.0]


def test_sampled_text_is_accepted_with_the_probability_of_its_tokens():
    ratio = torch.tensor([[0.0, 1.0, 0.3]]).expand(20_000, 3)
    draws = simulated_acceptances(torch.ones(20_000, 3).bool(), ratio, torch.Generator().manual_seed(0))
    assert draws.float().mean(0).tolist() == pytest.approx([0.0, 1.0, 0.3], abs=0.01)
    matched = torch.tensor([[True, False]])
    assert torch.equal(simulated_acceptances(matched, None), matched)


def trainer_for(tmp_path, drafter, target, temperature, **own):
    config = OPDConfig(
        output_dir=str(tmp_path), temperature=temperature, per_device_eval_batch_size=3, num_anchors=16, use_cpu=True,
        report_to="none", **own,
    )  # fmt: skip
    return OPDTrainer(model=drafter, target_model=target, args=config)


def written(target, count, temperature, length=40):
    """Rows that the target wrote after random prompts."""
    torch.manual_seed(0)
    prompt = torch.randint(3, 64, (count, 5))
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = target.generate(prompt, max_new_tokens=length, eos_token_id=None, pad_token_id=0, **sampling)
    return [{"prompt_ids": row[:5], "response_ids": row[5:]} for row in output.tolist()]


def test_greedy_rounds_are_those_that_decoding_makes(tmp_path):
    target = tiny_target()
    target.generation_config.eos_token_id = None
    drafter = tiny_drafter(target, block_size=4)
    rows = written(target, 4, 0.0)
    rounds = trainer_for(tmp_path, drafter, target, 0.0).survival_rounds(rows)
    drafter.generation_config.length_policy = "fixed"
    decoded = 0
    for row in rows:
        ids = torch.tensor([row["prompt_ids"]])
        target.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)
        decoded += drafter.last_draft_stats.rounds_with_draft
    # Decoding's last round may have no room for a draft, where a token of the text is still left to guess.
    assert decoded <= len(rounds) <= decoded + len(rows)
    assert rounds.logits.isfinite().all() and (rounds.log_confidence <= 0).all()
    assert not (rounds.accepted & ~rounds.counted).any()


def test_sampled_rounds_accept_as_speculative_sampling_does(tmp_path):
    target = tiny_target()
    target.generation_config.eos_token_id = None
    drafter = tiny_drafter(target, block_size=4)
    rounds = trainer_for(tmp_path, drafter, target, 1.0).survival_rounds(written(target, 40, 1.0))
    drafter.generation_config.length_policy = "fixed"
    torch.manual_seed(1)
    prompt = torch.randint(3, 64, (60, 5))
    target.generate(prompt, assistant_model=drafter, max_new_tokens=40, do_sample=True, top_k=0, pad_token_id=0)
    stats = drafter.last_draft_stats
    mean = float(rounds.accepted.float().sum(-1).mean())
    assert mean == pytest.approx(stats.acceptance_length - 1.0, abs=0.12)


def test_the_trainer_writes_a_calibration_for_each_way_of_decoding(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=4)
    for temperature, modes in ((0.0, {"greedy"}), (1.0, {"greedy", "sampling"})):
        trainer = trainer_for(tmp_path, drafter, target, temperature)
        report = trainer.calibrate(written(target, 12, temperature))
        assert set(drafter.config.survival_calibration) == modes
        assert report["after"]["ece"] <= report["before"]["ece"] + 0.02
    drafter.save_pretrained(tmp_path / "saved")
    loaded = type(drafter).from_pretrained(tmp_path / "saved")
    assert loaded.config.survival_calibration == drafter.config.survival_calibration


def test_what_cannot_be_calibrated_is_refused(tmp_path):
    target = tiny_target()
    with pytest.raises(ValueError, match=r"length_heads=\['ratio'\]"):
        trainer_for(tmp_path, tiny_drafter(target, length_heads=["ratio"]), target, 0.0).survival_rounds([])
    with pytest.raises(ValueError, match=r"temperature=0\.7"):
        trainer_for(tmp_path, tiny_drafter(target), target, 0.7).survival_rounds([])
