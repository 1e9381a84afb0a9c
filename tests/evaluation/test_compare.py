import pytest
import torch
from helpers import tiny_drafter, tiny_target
from text_helpers import tiny_tokenizer

from adaflash_hf.evaluation.compare import DomainResult, compare_decoding


@pytest.fixture(scope="module")
def models():
    target = tiny_target("llama")
    target.generation_config.eos_token_id = None
    return target, tiny_drafter(target)


def test_every_prompt_is_run_by_both_arms_in_turns(models):
    runs = []

    def on_run(prompt, arm, result):
        if result is not None:
            runs.append((prompt["domain"], arm, result["tokens"]))

    prompts = [{"domain": name, "prompt": "w10 w11"} for name in ("a", "b", "a")]
    report = compare_decoding(*models, tiny_tokenizer(), prompts, max_new_tokens=5, repeats=2, on_run=on_run)
    assert [arm for _, arm, _ in runs] == ["plain", "assisted", "assisted", "plain"] * 3
    assert {tokens for *_, tokens in runs} == {5}
    assert set(report["domains"]) == {"a", "b"}
    for figures in report["domains"].values():
        assert figures["identical"] is True
        assert figures["ratio"] == pytest.approx(figures["assisted_tokens_per_s"] / figures["plain_tokens_per_s"])
        assert 1.0 <= figures["acceptance_length"] <= 5.0
    ratios = [figures["ratio"] for figures in report["domains"].values()]
    assert report["mean_ratio"] == pytest.approx(sum(ratios) / 2)
    assert report["min_ratio"] == min(ratios)
    assert report["identical"] is True


def test_a_different_text_is_reported(models, monkeypatch):
    target, drafter = models
    plain = type(target).generate

    def wrong(self, *args, assistant_model=None, **kwargs):
        output = plain(self, *args, assistant_model=assistant_model, **kwargs)
        if assistant_model is not None:
            output[0, -1] = (output[0, -1] + 1) % 64
        return output

    monkeypatch.setattr(type(target), "generate", wrong)
    prompts = [{"domain": "a", "prompt": "w10"}]
    report = compare_decoding(target, drafter, tiny_tokenizer(), prompts, max_new_tokens=4)
    assert report["identical"] is False
    assert report["domains"]["a"]["identical"] is False


def test_summary_of_a_domain():
    found = DomainResult(plain_seconds=4.0, assisted_seconds=2.0, tokens=40, rounds=10, emitted=25, drafted=30)
    assert found.summary() == {
        "plain_tokens_per_s": 10.0,
        "assisted_tokens_per_s": 20.0,
        "ratio": 2.0,
        "acceptance_length": 2.5,
        "mean_draft_length": 3.0,
        "identical": True,
    }


def test_a_streamer_from_on_run_gets_the_text(models):
    class Streamer:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    made = {}

    def on_run(prompt, arm, result):
        if result is None:
            made[arm] = Streamer()
            return made[arm]
        return None

    compare_decoding(*models, tiny_tokenizer(), [{"domain": "a", "prompt": "w9"}], max_new_tokens=6, on_run=on_run)
    assert made["plain"].tokens == made["assisted"].tokens
    assert made["assisted"].ended
    assert torch.tensor(made["plain"].tokens).numel() > 6
