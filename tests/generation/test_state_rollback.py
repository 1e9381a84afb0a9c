"""Targets with a recurrent state: rejected drafts are taken back by going back and running the kept tokens again."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from decoding_helpers import assert_rows_equal, oracle, plain, prompts, settings, shared_target, texts_of
from helpers import tiny_drafter
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from adaflash_hf import _compat, adaflash_generate
from adaflash_hf.generation import dispatch
from adaflash_hf.generation.state_rollback import RollbackCache, continues_with_several_tokens, holds_tokens

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 4}
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
KINDS = {
    "qwen3_next": {
        **_ATTENTION, **_LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": {**_ATTENTION, **_LINEAR},
    "falcon_h1": {**_ATTENTION, **_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_ATTENTION, **_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "mamba2": {"state_size": 4, "expand": 2, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "mamba": {"state_size": 4, "expand": 2},
}  # fmt: skip


@cache
def stateful(kind):
    config = AutoConfig.for_model(kind, vocab_size=64, hidden_size=32, num_hidden_layers=4, **KINDS[kind])
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    target.generation_config.eos_token_id = None
    drafter = tiny_drafter(shared_target("llama"), block_size=5)
    drafter.generation_config.length_policy = "fixed"
    return target, drafter


@pytest.fixture
def said(monkeypatch):
    said = []
    monkeypatch.setattr(dispatch.logger, "warning_once", said.append)
    return said


@pytest.mark.parametrize("error", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mamba"])
def test_greedy_equals_plain(kind, error, said):
    target, drafter = stateful(kind)
    if not continues_with_several_tokens(target):
        pytest.skip("the oldest supported transformers reads several tokens at once from an empty state here")
    ids, mask = prompts([1, 9, 4])
    expected = plain(target, ids, mask)
    with oracle(texts_of(ids, mask, expected), error):
        found = target.generate(
            ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=14, do_sample=False, pad_token_id=0
        )
    assert_rows_equal(found, ids, expected)
    stats = drafter.last_draft_stats
    assert stats.emitted == 3 * 13 and (stats.accepted > 0) == (error < 1.0)
    assert said == [
        f"Packed decoding is not used ({type(target).__name__} keeps a recurrent state); drafting inside transformers' own "
        "assisted loop, one row after another."
    ]
    assert not target._forward_pre_hooks


@pytest.mark.parametrize("policy", ["ratio", "confidence", "throughput"])
def test_every_policy(policy, said):
    target, drafter = stateful("qwen3_next")
    ids, _ = prompts([6])
    expected = plain(target, ids)
    with oracle(texts_of(ids, None, expected), 0.3), settings(drafter, length_policy=policy):
        found = target.generate(
            ids, custom_generate=adaflash_generate, drafter=drafter, max_new_tokens=14, do_sample=False
        )
    assert_rows_equal(found, ids, expected)


def test_sampling(said):
    target, drafter = stateful("qwen3_next")
    ids, _ = prompts([5])
    torch.manual_seed(0)
    with torch.no_grad():
        found = target.generate(
            ids.repeat(200, 1), assistant_model=drafter, max_new_tokens=2, do_sample=True, top_k=3, temperature=2.0
        )
        top = (target(ids).logits[0, -1] / 2.0).topk(3)
    counts = torch.tensor([(found[:, 5] == token).sum() for token in top.indices]).float()
    expected = top.values.softmax(-1) * 200
    assert counts.sum() == 200
    assert float(((counts - expected) ** 2 / expected).sum()) < 13.8  # chi-square, 2 degrees of freedom, p = 0.001


def test_a_target_that_forgets_its_state_is_refused():
    target, drafter = stateful("mamba")
    with pytest.raises(ValueError) as error:
        target.generate(prompts([4])[0], assistant_model=drafter, max_new_tokens=2, do_sample=False)
    if _compat.cache_argument(target) != "cache":  # there its state is no cache of transformers' usual kind
        assert "MambaForCausalLM keeps a recurrent state), and this call has none" in str(error.value)
        return
    assert str(error.value) == (
        "assistant_model cannot be used with target=MambaForCausalLM, which keeps a recurrent state and reads several "
        "tokens at once otherwise than one by one, so that drafts cannot be checked. Leave out assistant_model."
    )


def test_a_cache_that_holds_tokens_is_refused():
    target, drafter = stateful("qwen3_next")
    ids, _ = prompts([6])
    given = DynamicCache(config=target.config)
    assert not holds_tokens(given)
    name = _compat.cache_argument(target)
    with torch.no_grad():
        target(ids[:, :4], use_cache=True, **{name: given})
    assert holds_tokens(given)
    with pytest.raises(ValueError, match="A cache that already holds tokens cannot be used with assistant_model here"):
        target.generate(ids, assistant_model=drafter, max_new_tokens=2, do_sample=False, **{name: given})


@torch.no_grad()
def test_going_back():
    """After a crop everything is as if the removed tokens had never been read."""
    target, _ = stateful("qwen3_next")
    name = _compat.cache_argument(target)
    ids, _ = prompts([12])
    wanted = target(ids[:, :8], use_cache=True).logits[:, -1]
    with RollbackCache(target) as held:
        target(input_ids=ids[:, :5], use_cache=True, **{name: held})
        target(input_ids=torch.cat([ids[:, 5:7], ids[:, :3]], dim=1), use_cache=True, **{name: held})
        assert held.is_croppable
        held.crop(-3)
        assert held.get_seq_length() == 7
        found = target(input_ids=ids[:, 7:8], use_cache=True, **{name: held}).logits[:, -1]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        held.crop(0)
        assert held.get_seq_length() == 8
        for wrong in (-1, -5):
            with pytest.raises(ValueError, match=f"tokens_to_remove={wrong} is not valid"):
                held.crop(wrong)
    assert not target._forward_pre_hooks


@torch.no_grad()
def test_a_target_that_reads_several_tokens_wrongly_is_found_out():
    assert continues_with_several_tokens(shared_target("llama"))
    assert not continues_with_several_tokens(stateful("mamba")[0])
