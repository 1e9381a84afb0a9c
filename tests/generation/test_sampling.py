"""Sampled text has the target's distribution: joint outcomes of three tokens by chi-square."""

from __future__ import annotations

import itertools

import pytest
import torch
from decoding_helpers import lively_target, settings
from helpers import tiny_drafter
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from adaflash_hf.generation import packed_decoding
from adaflash_hf.generation.drafting import BlockDrafter

VOCAB, SAMPLES, CHUNK = 6, 2400, 400
CALLS = {
    "temperature": {"temperature": 1.4, "top_k": 0},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "top_k": {"top_k": 4},
    "repetition_penalty": {"repetition_penalty": 1.5, "top_k": 0, "temperature": 1.2},
}


@pytest.fixture(scope="module")
def target():
    # Logits small enough that every token has its chance.
    return lively_target("llama", vocab_size=VOCAB, scale=0.7, bos_token_id=None, eos_token_id=None, pad_token_id=None)


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target, block_size=4)


def processors(call):
    made = LogitsProcessorList()
    if "repetition_penalty" in call:
        made.append(RepetitionPenaltyLogitsProcessor(call["repetition_penalty"]))
    made.append(TemperatureLogitsWarper(call.get("temperature", 1.0)))
    if call.get("top_k", 0):
        made.append(TopKLogitsWarper(call["top_k"]))
    if "top_p" in call:
        made.append(TopPLogitsWarper(call["top_p"]))
    return made


@torch.no_grad()
def exact_distribution(target, prompt, call):
    """Probability of each of the VOCAB ** 3 continuations, from forwards over every one of them."""
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=3)))
    ids = torch.cat([prompt.expand(len(texts), -1), texts], dim=1)
    logits = target(ids).logits.double()
    length, warp = prompt.shape[1], processors(call)
    total = torch.ones(len(texts), dtype=torch.double)
    for place in range(3):
        end = length + place
        scores = warp(ids[:, :end], logits[:, end - 1])
        total *= scores.softmax(-1).gather(1, ids[:, end : end + 1])[:, 0]
    return total


def noisy_block_logits(target, level):
    """Draft logits near the target's marginals but clearly not equal to them, so that rounds accept and reject."""

    def block_logits(self, output, positions):
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(self.block_size - 1, VOCAB, generator=generator) * level
        base = self._marginal[None] + noise[None]
        base = base.expand(len(positions), -1, -1).clone()
        # Rows and rounds differ in how sure they look, so that lengths vary with the policy.
        base *= 1.0 + 0.5 * torch.sin(torch.tensor(positions, dtype=torch.float32))[:, None, None]
        return base if self.head.token_ids is None else base[..., self.head.token_ids]

    return block_logits


def sample(target, drafter, prompt, call, monkeypatch, level=0.7):
    with torch.no_grad():
        marginal = target(prompt).logits[0, -1]
    monkeypatch.setattr(BlockDrafter, "_marginal", marginal, raising=False)
    monkeypatch.setattr(BlockDrafter, "block_logits", noisy_block_logits(target, level))
    counts = torch.zeros(VOCAB**3)
    accepted = drafted = 0
    torch.manual_seed(1234)
    for _ in range(SAMPLES // CHUNK):
        found = target.generate(
            prompt,
            assistant_model=drafter,
            do_sample=True,
            num_return_sequences=CHUNK,
            max_new_tokens=4,
            pad_token_id=0,
            **call,
        )[:, prompt.shape[1] : prompt.shape[1] + 3]
        counts += torch.bincount(found @ torch.tensor([VOCAB**2, VOCAB, 1]), minlength=VOCAB**3)
        accepted += drafter.last_draft_stats.accepted
        drafted += drafter.last_draft_stats.drafted
    return counts, accepted, drafted


def p_value(counts, probabilities):
    """Chi-square over outcomes expected at least five times, the rest taken together."""
    expected = probabilities * counts.sum()
    often = expected >= 5
    assert counts[probabilities == 0].sum() == 0, "something the target never says was said"
    observed = [*counts[often].tolist(), counts[~often].sum().item()]
    wanted = [*expected[often].tolist(), expected[~often].sum().item()]
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
        scale = sum(observed) / sum(wanted)
        wanted = [value * scale for value in wanted]
    return chisquare(observed, wanted).pvalue


CASES = [
    pytest.param(name, policy, marks=() if policy == "fixed" or name == "repetition_penalty" else pytest.mark.slow)
    for name in CALLS
    for policy in ("fixed", "ratio", "confidence")
]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_joint_distribution_of_three_tokens(target, drafter, name, policy, monkeypatch):
    prompt, call = torch.tensor([[3, 1, 4, 1, 5]]), CALLS[name]
    threshold = 0.05 if policy == "confidence" else 0.25
    with settings(drafter, length_policy=policy, confidence_threshold=threshold, length_scale=2.0):
        counts, accepted, drafted = sample(target, drafter, prompt, call, monkeypatch)
    assert 0.1 * drafted < accepted < 0.95 * drafted
    assert p_value(counts, exact_distribution(target, prompt, call)) > 1e-3


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty"])
def test_a_reduced_draft_vocabulary(target, name, monkeypatch):
    drafter = tiny_drafter(target, block_size=4, draft_token_ids=[1, 3, 4])
    drafter.generation_config.length_policy = "fixed"
    prompt, call = torch.tensor([[3, 1, 4, 1, 5]]), CALLS[name]
    counts, accepted, drafted = sample(target, drafter, prompt, call, monkeypatch)
    assert 0.05 * drafted < accepted < drafted
    assert p_value(counts, exact_distribution(target, prompt, call)) > 1e-3


def test_a_biased_rule_is_found(target, drafter, monkeypatch):
    """Accepting every draft must fail the test above, or it could not fail at all."""
    monkeypatch.setattr(packed_decoding, "accept_sampled", lambda *args: True)
    prompt, call = torch.tensor([[3, 1, 4, 1, 5]]), CALLS["temperature"]
    with settings(drafter, length_policy="fixed"):
        counts, _, _ = sample(target, drafter, prompt, call, monkeypatch)
    assert p_value(counts, exact_distribution(target, prompt, call)) < 1e-6


def test_a_cut_by_sampled_confidence_is_found(target, drafter, monkeypatch):
    """A length decision that looks at the sampled tokens is biased, and the test sees it."""
    propose = BlockDrafter.propose

    def cut(self, **arguments):
        drafts = propose(self, **arguments)
        for draft in drafts:
            if draft.token_ids and draft.probs[0][draft.token_ids[0]] < draft.probs[0].max():
                draft.token_ids, draft.probs = [], None
        return drafts

    monkeypatch.setattr(BlockDrafter, "propose", cut)
    prompt, call = torch.tensor([[3, 1, 4, 1, 5]]), CALLS["temperature"]
    with settings(drafter, length_policy="fixed"):
        counts, _, _ = sample(target, drafter, prompt, call, monkeypatch)
    assert p_value(counts, exact_distribution(target, prompt, call)) < 1e-3


@pytest.mark.parametrize("name", ["temperature", pytest.param("repetition_penalty", marks=pytest.mark.slow)])
def test_inside_transformers_own_loop(target, name, monkeypatch):
    """One prompt at a time through the candidate generator (asked for by a reason not to pack)."""
    from adaflash_hf.generation import dispatch

    monkeypatch.setattr(dispatch, "packing_obstacle", lambda *args: "a test says so")
    drafter = tiny_drafter(target, block_size=4)
    drafter.generation_config.length_policy = "fixed"
    prompt, call = torch.tensor([[3, 1, 4, 1, 5]]), CALLS[name]
    with torch.no_grad():
        monkeypatch.setattr(BlockDrafter, "_marginal", target(prompt).logits[0, -1], raising=False)
    monkeypatch.setattr(BlockDrafter, "block_logits", noisy_block_logits(target, 0.7))
    torch.manual_seed(3)
    counts = torch.zeros(VOCAB**2)
    for _ in range(400):
        found = target.generate(
            prompt, assistant_model=drafter, do_sample=True, max_new_tokens=3, pad_token_id=0, **call
        )
        counts[found[0, 5] * VOCAB + found[0, 6]] += 1
    pairs = exact_distribution(target, prompt, call).view(VOCAB**2, VOCAB).sum(1)
    assert p_value(counts, pairs) > 1e-3


def test_texts_that_end(target, drafter, monkeypatch):
    """An end token inside a block: nothing is drawn after it, and nothing before it is more or less likely."""
    prompt, call, end = torch.tensor([[3, 1, 4, 1, 5]]), {"temperature": 1.4, "top_k": 0}, 2
    with settings(drafter, length_policy="fixed"):
        counts, accepted, drafted = sample(target, drafter, prompt, {**call, "eos_token_id": end}, monkeypatch)
    exact = torch.zeros(VOCAB**3, dtype=torch.double)
    for text, probability in zip(
        itertools.product(range(VOCAB), repeat=3), exact_distribution(target, prompt, call), strict=True
    ):
        shown = [*text[: text.index(end) + 1], 0, 0][:3] if end in text else text  # what follows an end is padding
        exact[shown[0] * VOCAB**2 + shown[1] * VOCAB + shown[2]] += probability
    assert 0.1 * drafted < accepted < 0.95 * drafted
    assert p_value(counts, exact) > 1e-3


def test_a_batch_of_unequal_prompts(target, drafter, monkeypatch):
    """Two prompts, each row's three tokens against its own prompt's distribution."""
    long, short, call = torch.tensor([[3, 1, 4, 1, 5, 0, 2]]), torch.tensor([[5, 4]]), CALLS["top_p"]
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), short], dim=1)
    ids = torch.cat([long, padded])
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        marginal = target(long).logits[0, -1]
    monkeypatch.setattr(BlockDrafter, "_marginal", marginal, raising=False)
    monkeypatch.setattr(BlockDrafter, "block_logits", noisy_block_logits(target, 0.7))
    torch.manual_seed(4)
    with settings(drafter, length_policy="confidence", confidence_threshold=0.05):
        found = torch.cat([
            target.generate(
                ids, attention_mask=mask, assistant_model=drafter, do_sample=True, num_return_sequences=CHUNK,
                max_new_tokens=4, pad_token_id=0, **call,
            )[:, 7:10].view(2, CHUNK, 3)
            for _ in range(SAMPLES // CHUNK // 2)
        ], dim=1)  # fmt: skip
    for row, prompt in enumerate((long, short)):
        counts = torch.bincount(found[row] @ torch.tensor([VOCAB**2, VOCAB, 1]), minlength=VOCAB**3).float()
        assert p_value(counts, exact_distribution(target, prompt, call)) > 1e-3
