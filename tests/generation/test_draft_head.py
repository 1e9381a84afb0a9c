"""Draft logits and noise embeddings, made of the target's own embedding and head (case A19 among them)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import HIDDEN, tiny_drafter, tiny_target
from torch import nn
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from adaflash_hf.generation.draft_head import DraftHead, embed_tokens, noise_embeddings


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3", "gpt2"])
def test_a19_noise_embeddings_are_those_of_transformers_own_dflash(kind):
    target = tiny_target(kind)
    drafter = tiny_drafter(target, block_size=4, mask_token_id=7)
    anchors = torch.tensor([5, 9])
    ids = torch.tensor([[5, 7, 7, 7], [9, 7, 7, 7]])
    theirs = SimpleNamespace(main_model_input_embeddings=target.get_input_embeddings())
    expected = DFlashTokenCandidateGenerator._get_noise_embeds(theirs, ids)
    torch.testing.assert_close(noise_embeddings(target, drafter, anchors, 4), expected)
    if kind == "gemma3":  # its embedding module scales; the raw table is not what a drafter saw
        assert not torch.allclose(expected, target.get_input_embeddings().weight[ids])


def test_a19_a_norm_inside_the_embedding_is_left_out_and_put_back():
    class Normed(nn.Embedding):
        def forward(self, ids):
            return self.embed_norm(super().forward(ids))

    target = tiny_target("llama")
    embedding = Normed(64, HIDDEN)
    embedding.embed_norm = norm = nn.LayerNorm(HIDDEN)
    target.set_input_embeddings(embedding)
    assert torch.equal(embed_tokens(target, torch.tensor([3])), embedding.weight[[3]])
    assert embedding.embed_norm is norm
    with pytest.raises(IndexError):
        embed_tokens(target, torch.tensor([640]))
    assert embedding.embed_norm is norm


def test_a19_logits_have_the_targets_scale_and_soft_cap():
    target = tiny_target("gemma2", final_logit_softcapping=3.0)
    drafter = tiny_drafter(target, logit_scale=0.5)
    assert drafter.config.final_logit_softcapping == 3.0
    states = torch.randn(2, 3, HIDDEN) * 9
    raw = target.get_output_embeddings()(states) * 0.5
    found = DraftHead(target, drafter)(states)
    torch.testing.assert_close(found, (raw / 3).tanh() * 3)
    assert found.abs().max() <= 3 < raw.abs().max()


def test_a_learned_mask_embedding():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, mask_token_id=None)
    found = noise_embeddings(target, drafter, torch.tensor([5]), 4)
    assert torch.equal(found[0, 0], target.get_input_embeddings().weight[5])
    assert torch.equal(found[0, 1:], drafter.mask_embedding.detach().expand(3, -1))


def test_embeddings_come_in_the_drafters_dtype():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, mask_token_id=7).bfloat16()
    assert noise_embeddings(target, drafter, torch.tensor([5]), 4).dtype == torch.bfloat16
    assert DraftHead(target, drafter)(torch.zeros(1, HIDDEN, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_reduced_vocabulary_gathers_rows_and_maps_back():
    target = tiny_target("llama")
    ids = [9, 3, 40]
    head = DraftHead(target, tiny_drafter(target, draft_token_ids=ids))
    states = torch.randn(2, HIDDEN)
    logits = head(states)
    torch.testing.assert_close(logits, target.get_output_embeddings()(states)[:, ids])
    assert head.to_token_ids(torch.tensor([2, 0])).tolist() == [40, 9]
    full = head.expand(logits)
    assert full.shape == (2, 64) and torch.equal(full[:, ids], logits)
    assert full.isfinite().sum() == 6
    whole = DraftHead(target, tiny_drafter(target))
    assert whole.expand(full) is full and whole.to_token_ids(logits) is logits


def test_the_gathered_rows_are_kept_until_head_or_list_change():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_token_ids=[9, 3, 40])
    first = DraftHead.shared(target, drafter)
    assert DraftHead.shared(target, drafter) is first
    with torch.no_grad():
        target.get_output_embeddings().weight.add_(1.0)
    second = DraftHead.shared(target, drafter)
    assert second is not first
    assert torch.equal(second.head.weight, target.get_output_embeddings().weight[[9, 3, 40]])
    drafter.draft_token_ids[0] = 11
    assert DraftHead.shared(target, drafter).token_ids[0] == 11
    other = tiny_target("llama", seed=3)
    assert torch.equal(DraftHead.shared(other, drafter).head.weight, other.get_output_embeddings().weight[[11, 3, 40]])


def test_a_head_with_a_bias():
    target = tiny_target("llama")
    target.set_output_embeddings(nn.Linear(HIDDEN, 64, bias=True))
    ids = [1, 5]
    states = torch.randn(2, HIDDEN)
    head = DraftHead(target, tiny_drafter(target, draft_token_ids=ids))
    torch.testing.assert_close(head(states), target.get_output_embeddings()(states)[:, ids])
