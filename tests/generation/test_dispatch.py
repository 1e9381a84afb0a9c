"""Which calls are led where, and what is refused before a token is decoded."""

from __future__ import annotations

import pytest
import torch
from decoding_helpers import (
    assert_rows_equal,
    lively_target,
    oracle,
    plain,
    prompts,
    shared_drafter,
    shared_target,
    texts_of,
)
from helpers import tiny_drafter, tiny_target
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DynamicCache,
    GenerationMixin,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer

import adaflash_hf
from adaflash_hf import _compat, adaflash_generate
from adaflash_hf.generation import dispatch
from adaflash_hf.generation.packed_attention import NotPackable

CALL = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def pair():
    return shared_target("llama"), shared_drafter("llama")


@pytest.fixture
def unpacked(monkeypatch):
    """Leads every call to transformers' own loop."""
    monkeypatch.setattr(dispatch, "packing_obstacle", lambda *args: "a test says so")


def refusal(target, drafter, *args, **call):
    with pytest.raises(ValueError) as error:
        target.generate(*args, assistant_model=drafter, **{**CALL, **call})
    return str(error.value)


# --- the wrapping itself ---------------------------------------------------------------------------------------------


def test_enabling_twice_wraps_once():
    before = {name: getattr(GenerationMixin, name) for name in _compat._SEAMS}
    adaflash_hf.enable()
    assert before == {name: getattr(GenerationMixin, name) for name in _compat._SEAMS}
    adaflash_hf.disable()
    try:
        assert not any(hasattr(getattr(GenerationMixin, name), "__wrapped__") for name in _compat._SEAMS)
        adaflash_hf.disable()
    finally:
        adaflash_hf.enable()


def test_a_release_that_moved_a_method_fails_with_the_versions_that_work(monkeypatch):
    monkeypatch.setattr(_compat, "_SEAMS", (*_compat._SEAMS, "_gone"))
    with pytest.raises(ImportError, match=r"supports transformers 5.17 to 5.24, and the installed .* has moved _gone"):
        _compat.check_seams()


def test_assistants_are_recognised_behind_their_wrappers(pair):
    _, drafter = pair
    assert dispatch.as_drafter(None) is None and dispatch.as_drafter(shared_target()) is None
    wrapped = nn.Module()
    wrapped.module = drafter
    assert dispatch.as_drafter(wrapped) is drafter
    wrapped = nn.Module()
    wrapped._orig_mod = drafter
    assert dispatch.as_drafter(wrapped) is drafter


def test_a_compiled_drafter_drafts(pair):
    target, drafter = pair
    compiled = torch.compile(tiny_drafter(target, block_size=4), backend="eager")
    ids, _ = prompts([5])
    found = target.generate(ids, assistant_model=compiled, **CALL)
    assert found[0, 5:].tolist() == plain(target, ids, max_new_tokens=6)[0]
    assert compiled._orig_mod.last_draft_stats.rounds > 0


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"num_beams": 2},
            "assistant_model drafts for greedy decoding and sampling only, and this call asks for beam_search "
            "(num_beams=2). Set num_beams=1 or leave out assistant_model.",
        ),
        (
            {"prompt_lookup_num_tokens": 3},
            "prompt_lookup_num_tokens is another way of drafting: leave it out, or leave out assistant_model.",
        ),
        (
            {"assistant_ensemble_weight": 0.5},
            "assistant_ensemble_weight mixes the drafter's distribution into the output, which stays the target's here: "
            "leave it out.",
        ),
        ({"num_assistant_tokens": -1}, "num_assistant_tokens=-1 is not valid: expected a number of tokens, 0 or more."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_calls_that_contradict_a_drafter(pair, call, message):
    assert refusal(*pair, prompts([5])[0], **call) == message


def test_beams_are_refused_without_the_patch_too(pair):
    message = r"drafter drafts for greedy .* asks for beam_search \(num_beams=2\). Set num_beams=1 or leave out drafter"
    with pytest.raises(ValueError, match=message):
        pair[0].generate(prompts([5])[0], custom_generate=adaflash_generate, drafter=pair[1], num_beams=2, **CALL)


_TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4}


@pytest.mark.parametrize("patched", [True, False])
def test_targets_that_cannot_take_tokens_back(patched):
    kind = "attends to later tokens (is_decoder=False)"
    target = AutoModelForCausalLM.from_config(BertConfig(**_TINY, num_attention_heads=4, intermediate_size=48))
    drafter = tiny_drafter(shared_target("llama"))
    ours = {"assistant_model": drafter} if patched else {"custom_generate": adaflash_generate, "drafter": drafter}
    with pytest.raises(ValueError) as error:
        target.generate(prompts([4])[0], **CALL, **ours)
    assert str(error.value) == (
        f"assistant_model cannot be used with target={type(target).__name__}, which {kind}: rejected drafts cannot be "
        "taken back. Leave out assistant_model."
    )


def test_encoder_decoders_are_refused():
    target = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    )
    drafter = tiny_drafter(shared_target("llama"))
    message = refusal(target, drafter, prompts([4])[0])
    assert "target=T5ForConditionalGeneration, which is an encoder-decoder" in message


def test_a_cache_that_holds_the_whole_prompt(pair):
    target, _ = pair
    ids, _ = prompts([6])
    cache = DynamicCache(config=target.config)
    target(ids, **{_compat.cache_argument(target): cache})
    message = refusal(*pair, ids, **{_compat.cache_argument(target): cache})
    assert message == (
        "The cache already holds all 6 tokens of the prompt: pass at least one token that it does not hold."
    )


def test_a_cache_of_compressed_layers_is_not_read_as_if_it_were_plain(pair):
    class Compressed(DynamicLayer):
        """Stands for transformers' quantized layers, whose `keys` are only the newest tokens."""

    target, drafter = pair
    ids, _ = prompts([6])
    cache = DynamicCache(config=target.config)
    target(ids[:, :4], **{_compat.cache_argument(target): cache})
    for layer in cache.layers:
        layer.__class__ = Compressed
    message = refusal(target, drafter, ids, **{_compat.cache_argument(target): cache})
    assert message.startswith(
        "A cache that already holds tokens cannot be used with assistant_model here: the cache has layers of the kinds "
        "['Compressed']"
    )


# --- what transformers' own loop would get wrong ------------------------------------------------------------------------


def test_what_transformers_own_loop_gets_wrong_is_refused_there(pair, unpacked):
    target, drafter = pair
    ids, mask = prompts([6])
    name = _compat.cache_argument(target)
    cache = DynamicCache(config=target.config)
    target(ids[:, :4], **{name: cache})
    static = StaticCache(config=target.config, max_cache_len=40)
    tail = (
        " cannot be used with assistant_model here: a test says so, so the prompt is decoded by transformers' own assisted "
        "loop, which would give other tokens than plain generate(). Leave out one of the two."
    )
    for call, what in (
        ({"max_time": 100.0}, "The stopping criterion MaxTimeCriteria"),
        ({"guidance_scale": 1.5}, "The stateful logits processor UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        ({name: cache}, "A cache that already holds tokens"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({name: static}, "A static cache"),
    ):
        assert refusal(target, drafter, ids, attention_mask=mask, **call) == what + tail
    with pytest.raises(ValueError) as error:
        target.generate(inputs_embeds=target.get_input_embeddings()(ids), assistant_model=drafter, **CALL)
    assert str(error.value) == "inputs_embeds" + tail
    assert refusal(target, drafter, ids, use_cache=False) == (
        "assistant_model needs a key/value cache here (a test says so), and this call has none: use_cache=False was "
        "passed, or the target keeps none. Leave out one of the two."
    )


# --- reasons not to pack -------------------------------------------------------------------------------------------------


def test_obstacles_are_named(pair):
    target, _ = pair
    config = target.generation_config

    def obstacle(model=target, **kwargs):
        return dispatch.packing_obstacle(model, kwargs, config)

    assert obstacle(attention_mask=torch.tensor([[0, 1, 1]])) is None
    assert obstacle(position_ids=torch.tensor([[0, 1, 2]])) is None
    assert obstacle(position_ids=torch.tensor([[0, 0, 1]]), attention_mask=torch.tensor([[0, 1, 1]])) is None
    assert "position_ids" in obstacle(position_ids=torch.tensor([[0, 2, 1]]))
    assert "multi-dimensional" in obstacle(position_ids=torch.zeros(3, 1, 3))
    assert "['pixel_values']" in obstacle(pixel_values=torch.zeros(1))
    kinds = tiny_target("llama")
    kinds.config.layer_types = ["full_attention", "chunked_attention"]
    assert "layers of the kinds ['chunked_attention', 'full_attention']" in obstacle(kinds)
    rope = tiny_target("llama")
    rope.config.rope_parameters = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    assert "multi-dimensional positions" in obstacle(rope)


def test_a_target_with_a_mask_of_its_own_is_decoded_in_transformers_loop():
    """Met only in the forward over the prompt, before anything was decoded."""
    target = lively_target("llama")
    attention = target.model.layers[2].self_attn
    forward = attention.forward

    def biased(*args, **kwargs):
        if kwargs.get("attention_mask") is None and target.config._attn_implementation == "adaflash_packed":
            kwargs["attention_mask"] = torch.zeros(1)
        return forward(*args, **kwargs)

    attention.forward = biased
    drafter = tiny_drafter(target, block_size=4)
    drafter.generation_config.length_policy = "fixed"
    ids, mask = prompts([7])
    expected = plain(target, ids)
    with oracle(texts_of(ids, None, expected), 0.3):
        found = target.generate(ids, assistant_model=drafter, max_new_tokens=14, do_sample=False)
    assert_rows_equal(found, ids, expected)
    assert drafter.last_draft_stats.accepted > 0
    found = target.generate(ids.repeat(2, 1), assistant_model=drafter, max_new_tokens=14, do_sample=False)
    assert_rows_equal(found, ids.repeat(2, 1), expected * 2)
    assert target.config._attn_implementation == "sdpa"


def test_layers_with_another_attention_than_configured_are_noticed(monkeypatch):
    """Their keys go into the packed cache, but their attention would not know of rows."""
    target = lively_target("llama")
    own = target.model.layers[1].self_attn
    own.config = type(own.config)(**own.config.to_dict())
    own.config._attn_implementation = "sdpa"
    drafter = tiny_drafter(target, block_size=4)
    ids, _ = prompts([7])
    reasons = []
    monkeypatch.setattr(dispatch.logger, "warning_once", reasons.append)
    expected = plain(target, ids, max_new_tokens=6)
    found = target.generate(ids, assistant_model=drafter, **CALL)
    assert_rows_equal(found, ids, expected)
    assert reasons == [
        "Packed decoding is not used (LlamaForCausalLM has layers with another attention than configured); drafting inside "
        "transformers' own assisted loop."
    ]


def test_a_mask_that_appears_only_later_is_an_error_and_not_a_second_start():
    """By then tokens may have been streamed."""
    target = lively_target("llama")
    attention, calls = target.model.layers[2].self_attn, []
    forward = attention.forward

    def biased(*args, **kwargs):
        calls.append(1)
        return forward(*args, **{**kwargs, "attention_mask": torch.zeros(1) if len(calls) > 2 else None})

    attention.forward = biased
    with pytest.raises(RuntimeError) as error:
        target.generate(prompts([4])[0], assistant_model=tiny_drafter(target), **CALL)
    assert str(error.value) == (
        "LlamaAttention has a mask of its own, which shows only after the prompt. Leave out assistant_model."
    )
    assert target.config._attn_implementation == "sdpa"


def test_keys_that_are_not_the_caches_are_noticed(monkeypatch):
    """Layers that attend to keys kept elsewhere (loops, sharing) cannot be packed."""
    target = lively_target("llama")
    attention = target.model.layers[2].self_attn
    forward, name = attention.forward, _compat.cache_argument(attention)

    def without_cache(*args, **kwargs):
        packed = target.config._attn_implementation == "adaflash_packed"
        return forward(*args, **{**kwargs, name: None} if packed else kwargs)

    attention.forward = without_cache
    said = []
    monkeypatch.setattr(dispatch.logger, "warning_once", said.append)
    ids, _ = prompts([4, 4])
    expected = plain(target, ids, max_new_tokens=6)
    assert_rows_equal(target.generate(ids, assistant_model=tiny_drafter(target), **CALL), ids, expected)
    assert len(said) == 1 and "LlamaAttention attends to keys that are not the cache's" in said[0]


def test_not_packable_is_no_value_error():
    # Nothing between the attention and the dispatcher may take it for a mistake of the caller.
    assert not issubclass(NotPackable, ValueError)
