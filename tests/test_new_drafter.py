"""New drafters made for a target: the configuration, the starting weights, the mask token, the refusals."""

import pytest
import torch
from helpers import HIDDEN, LAYERS, TARGET_KINDS, VOCAB, tiny_drafter, tiny_target
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from adaflash_hf import AdaFlashDraftModel
from adaflash_hf.new_drafter import find_mask_token

YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
EXPECTED = {
    # kind: (key/value heads, width of the MLP, rope, soft cap)
    "llama": (2, 64, {"rope_type": "default", "rope_theta": 10000.0}, None),
    "qwen3": (2, 64, {"rope_type": "default", "rope_theta": 10000.0}, None),
    "mistral": (2, 64, {"rope_type": "default", "rope_theta": 10000.0}, None),
    "gemma2": (2, 64, {"rope_type": "default", "rope_theta": 10000.0}, 30.0),
    # Gemma 3 has one base for each kind of layer: the full layers' is taken.
    "gemma3": (2, 64, {"rope_type": "default", "rope_theta": 1000000.0}, None),
    "gpt_oss": (2, 64, {**YARN, "original_max_position_embeddings": 4096, "rope_theta": 150000.0}, None),
    # GPT-2 names no MLP width, no key/value heads and no rope.
    "gpt2": (4, 96, {"rope_type": "default", "rope_theta": 10000.0}, None),
    "qwen3_moe": (2, 64, {"rope_type": "default", "rope_theta": 10000.0}, None),
}


def features(target, drafter, ids):
    """The context features of `ids` as the published drafters' code computes them."""
    states = target(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1)


def small(model_type, auto=AutoModelForCausalLM, **fields):
    common = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 4}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return auto.from_config(AutoConfig.for_model(model_type, **{**common, **fields}))


@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_configuration_follows_the_target(kind):
    config = tiny_drafter(tiny_target(kind)).config
    kv_heads, width, rope, soft_cap = EXPECTED[kind]
    assert (config.vocab_size, config.hidden_size, config.num_target_layers) == (VOCAB, HIDDEN, LAYERS)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, kv_heads, 8)
    assert config.intermediate_size == width
    assert config.rope_parameters == rope
    assert config.final_logit_softcapping == soft_cap and config.logit_scale == 1.0
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert config.max_position_embeddings == 256
    assert config.target_layer_ids == [1, 2, 3]
    assert config.normalize_taps is True and config.mask_token_id is None
    assert config.length_heads == ["ratio", "survival"]
    assert config.layer_types == ["full_attention"] * 2 and config.causal_layers == [False] * 2


@pytest.mark.parametrize("layers", [2, LAYERS])
@pytest.mark.parametrize("kind", TARGET_KINDS)
@torch.no_grad()
def test_a_fresh_drafter_runs_and_its_logits_have_unit_scale(kind, layers):
    target = tiny_target(kind, num_hidden_layers=layers, initializer_range=0.5)  # rows of the head far from unit length
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        drafter = AdaFlashDraftModel.from_target(target, block_size=4).eval()
    assert drafter.config.target_layer_ids == ([0, 1] if layers == 2 else [1, 2, 3])
    assert drafter.config.num_hidden_layers == min(5, layers)
    ids = torch.arange(1, 21).view(2, 10)
    anchors = target.get_input_embeddings()(ids[:, -1:])
    block = torch.cat([anchors, drafter.mask_embedding.expand(2, 3, -1)], dim=1)
    output = drafter(block, features(target, drafter, ids)[:, :-1])
    logits = target.get_output_embeddings()(output.last_hidden_state)
    assert logits.shape == (2, 4, VOCAB)
    assert 0.7 < logits.std() < 1.4
    assert torch.isfinite(output.length_ratio).all() and output.survival_logits.shape == (2, 3)
    # Not constant: the context and the slots show.
    assert (output.last_hidden_state[0, 1] - output.last_hidden_state[1, 1]).abs().max() > 1e-4


def test_defaults_and_overrides():
    target = tiny_target(num_hidden_layers=9)
    drafter = AdaFlashDraftModel.from_target(target)
    assert drafter.config.block_size == 16 and drafter.config.num_hidden_layers == 5
    assert drafter.config.target_layer_ids == [1, 2, 4, 5, 6]
    other = AdaFlashDraftModel.from_target(
        target,
        num_hidden_layers=1,
        block_size=8,
        length_heads=(),
        target_layer_ids=[0, 8],
        normalize_taps=False,
        mask_token_id=7,
        layer_types=["sliding_attention"],
        sliding_window=6,
        causal_layers=[True],
        intermediate_size=40,
    )
    assert other.config.block_size == 8 and len(other.layers) == 1
    assert other.ratio_head is None and other.survival_head is None and other.config.length_heads == []
    assert other.config.target_layer_ids == [0, 8] and other.fc.in_features == 2 * HIDDEN
    assert other.config.normalize_taps is False and other.mask_embedding is None
    assert other.layers[0].self_attn.sliding_window == 6 and other.layers[0].self_attn.is_causal
    assert other.layers[0].mlp.gate_proj.out_features == 40


def test_the_same_seed_gives_the_same_drafter():
    first, second, third = tiny_drafter(), tiny_drafter(), tiny_drafter(seed=1)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert not torch.equal(first.fc.weight, third.fc.weight)


def test_a_new_drafter_has_the_targets_dtype_and_the_target_is_left_alone():
    target = tiny_target(dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    drafter = tiny_drafter(target, draft_token_ids=[3, 1])
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    assert drafter.config.dtype == torch.bfloat16
    assert drafter.draft_token_ids.dtype == torch.int64
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert all(not p.is_set_to(q) for p in drafter.parameters() for q in target.parameters())


@pytest.mark.parametrize("kind", ["llama", "gemma3"])  # Gemma 3's embedding module scales by sqrt(hidden)
def test_the_mask_embedding_starts_near_the_mean_embedding(kind):
    target = tiny_target(kind)
    target.get_input_embeddings().weight.data += 1.0
    drafter = tiny_drafter(target)
    with torch.no_grad():
        table = target.get_input_embeddings()(torch.arange(VOCAB))
    distance = (drafter.mask_embedding.detach() - table.mean(0)) / table.std()
    assert 0.05 < distance.std() < 0.2 and abs(distance.mean()) < 0.1


# Draft vocabulary


@pytest.mark.parametrize("ids", [[5, 3, 60], (5, 3, 60), torch.tensor([5, 3, 60]), torch.tensor([5, 3, 60]).int()])
def test_the_token_list_keeps_its_order(ids):
    drafter = tiny_drafter(draft_token_ids=ids)
    assert drafter.config.draft_vocab_size == 3
    assert drafter.draft_token_ids.tolist() == [5, 3, 60] and drafter.draft_token_ids.dtype == torch.int64


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 1], "draft_token_ids holds an id more than once."),
        ([1, 64], "draft_token_ids must hold ids in [0, 63], got 1 to 64."),
        ([-1, 4], "draft_token_ids must hold ids in [0, 63], got -1 to 4."),
        (
            [],
            "AdaFlashConfig: draft_vocab_size=0 is not valid: expected a number in [1, 64] (vocab_size=64), or None "
            "for all.",
        ),
    ],
)
def test_an_impossible_token_list_is_refused(ids, message):
    with pytest.raises(ValueError) as error:
        tiny_drafter(draft_token_ids=ids)
    assert str(error.value) == message


# Mask token


class Tokenizer:
    """As much of a tokenizer as choosing a mask token reads."""

    def __init__(self, length, added=(), mask_token_id=None):
        self.length, self.added, self.mask_token_id = length, dict(added), mask_token_id

    def __len__(self):
        return self.length

    def get_added_vocab(self):
        return self.added


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (Tokenizer(64, mask_token_id=9), 9),
        (Tokenizer(64, {"<|mask|>": 60, "<unused1>": 8}), 8),  # the lowest unused one
        (Tokenizer(64, {"<|reserved_special_token_0|>": 61}), 61),
        (Tokenizer(64, {"<extra_0>": 62}), 62),
        (Tokenizer(64, {"<|im_start|>": 50, "<|im_end|>": 51}), None),
        (Tokenizer(60, {"<|im_start|>": 50}), 60),  # an embedding row beyond the tokens
        (Tokenizer(64, {"<unused99>": 99}), None),  # no row for it
        (Tokenizer(66, {"<unused99>": 99, "<unused1>": 63}), 63),
        (Tokenizer(65, mask_token_id=64), None),
        (Tokenizer(65, {"<unused0>": 4}, mask_token_id=64), 4),
    ],
)
def test_mask_token_is_an_unused_row_of_the_embedding(tokenizer, expected):
    assert find_mask_token(tokenizer, VOCAB) == expected
    drafter = tiny_drafter(tokenizer=tokenizer)
    assert drafter.config.mask_token_id == expected
    assert (drafter.mask_embedding is None) is (expected is not None)
    assert ("mask_embedding" in drafter.state_dict()) is (expected is None)


def test_a_given_mask_token_wins_over_the_tokenizers():
    tokenizer = Tokenizer(64, mask_token_id=9)
    assert tiny_drafter(tokenizer=tokenizer, mask_token_id=11).config.mask_token_id == 11
    assert tiny_drafter(tokenizer=tokenizer, mask_token_id=None).mask_embedding is not None


# RoPE and logits of special targets


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        ),
        # Its frequencies depend on the longest position of a call, which differs between drafting and training.
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
    ],
)
def test_rope_base_and_scaling_come_from_the_target(rope, expected):
    assert tiny_drafter(tiny_target(rope_parameters=rope)).config.rope_parameters == expected


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [("granite", {"logits_scaling": 8.0}, 0.125), ("cohere", {"logit_scale": 0.0625}, 0.0625)],
)
def test_logit_scale_of_the_target_is_kept_and_the_norm_makes_up_for_it(model_type, fields, expected):
    target = small(model_type, **fields)
    drafter = tiny_drafter(target)
    assert drafter.config.logit_scale == expected
    rows = target.get_output_embeddings().weight.norm(dim=-1).mean()
    torch.testing.assert_close(drafter.norm.weight, torch.full((HIDDEN,), 1.0 / (rows.item() * expected)))


def test_odd_head_widths_are_rounded_up():
    target = tiny_target("gpt2", hidden_size=36, num_attention_heads=4)  # 9 a head
    drafter = tiny_drafter(target)
    assert drafter.config.head_dim == 10 and drafter.layers[0].self_attn.q_proj.out_features == 40


# Refusals


def test_a_target_of_one_layer_is_refused():
    with pytest.raises(ValueError) as error:
        tiny_drafter(tiny_target(num_hidden_layers=1))
    assert str(error.value) == "target=LlamaForCausalLM has 1 decoder layers: at least 2 are needed."


def test_an_encoder_decoder_is_refused():
    config = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    target = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", vocab_size=VOCAB, **config))
    with pytest.raises(ValueError) as error:
        tiny_drafter(target)
    assert str(error.value) == "target=T5ForConditionalGeneration is not a decoder-only language model."


def test_an_unknown_override_is_refused():
    with pytest.raises(ValueError) as error:
        tiny_drafter(blocksize=8, depth=2)
    assert str(error.value) == "from_target: ['blocksize', 'depth'] are not fields of AdaFlashConfig."


@pytest.mark.parametrize("override", [{"target_layer_ids": [6]}, {"block_size": 1}, {"length_heads": ("speed",)}])
def test_an_override_that_does_not_fit_is_refused(override):
    with pytest.raises(ValueError, match=f"AdaFlashConfig: {next(iter(override))}="):
        tiny_drafter(**override)
