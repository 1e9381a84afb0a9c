"""Published drafters: what their configurations turn into, and which are refused (CASES.md part B)."""

import inspect
import json
import logging
import shutil

import pytest
import torch
from helpers import (
    DATA,
    HIDDEN,
    drafter_inputs,
    saved_tensors,
    tiny_drafter,
    tiny_target,
    write_checkpoint,
    zlab_config,
    zlab_tensors,
)
from transformers import AutoModel, MuseGlimmerAssistantConfig
from transformers.cache_utils import DFlashCache

from adaflash_hf import AdaFlashConfig, AdaFlashDraftModel
from adaflash_hf.published_layouts import is_published_layout, layout_name, normalize_published_config

READABLE = "readable are z-lab DFlash, official AdaFlash and transformers' assistant layout."
SILENCE = "Loading it as plain DFlash would give wrong drafts without any message."


def load(folder, config, tensors, **kw):
    return AdaFlashDraftModel.from_pretrained(write_checkpoint(folder, config, tensors), **kw).eval()


@torch.no_grad()
def run(model, **kw):
    return model(**drafter_inputs(model, **kw)).last_hidden_state


def shown(model):
    return {**model.config.to_dict(), "_name_or_path": None}


def refusal(config):
    """The whole message a published `config.json` is refused with."""
    with pytest.raises(ValueError) as error:
        AdaFlashConfig.from_dict(dict(config))
    return str(error.value)


# Recognising layouts


@pytest.mark.parametrize(
    ("config", "published", "name"),
    [
        (zlab_config(), True, "z-lab DFlash"),
        (zlab_config(drop=("architectures", "dflash_config")), False, "z-lab DFlash"),
        ({"model_type": "qwen3", "block_size": 4, "target_layer_ids": [1]}, True, "z-lab DFlash"),
        (zlab_config(nested={"use_thresh_head_two_model": True}), True, "official AdaFlash"),
        ({"model_type": "muse_glimmer_assistant"}, True, "transformers assistant"),
        ({"speculators_model_type": "dflash"}, True, "speculators"),
        ({"architectures": ["DominoDraftModel"], "model_type": "qwen3"}, True, "z-lab DFlash"),
        ({"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}, True, "z-lab DFlash"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, False, "z-lab DFlash"),
        (AdaFlashConfig(architectures=["AdaFlashDraftModel"]).to_dict(), False, "adaflash-hf"),
    ],
)
def test_layouts_are_recognised(config, published, name):
    assert is_published_layout(config) is published
    assert layout_name(config) == name


# B1: flat and nested fields, both rope dialects

FLAT = {"dflash_config": {}, "mask_token_id": 63, "target_layer_ids": [1, 2, 4]}
DIALECTS = {
    "nested, rope_theta": zlab_config(),
    "block size nested": zlab_config(nested={"block_size": 4}, drop=("block_size",)) | {},
    "flat, rope_theta": {**zlab_config(), **FLAT},
    "flat without dflash_config": {k: v for k, v in {**zlab_config(), **FLAT}.items() if k != "dflash_config"},
    "nested, rope_parameters": zlab_config(
        drop=("rope_theta", "rope_scaling"), rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}
    ),
    "rope in both dialects": zlab_config(rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
    "theta at the top beside rope_parameters": zlab_config(rope_parameters={"rope_type": "default"}),
    "no architectures": zlab_config(drop=("architectures",)),
    "layer types absent": zlab_config(drop=("layer_types",)),
}
DIALECTS["block size nested"]["dflash_config"]["block_size"] = 4


@pytest.mark.parametrize("config", DIALECTS.values(), ids=DIALECTS)
def test_every_dialect_gives_the_same_configuration_and_network(config, tmp_path):
    reference = load(tmp_path / "reference", zlab_config(), zlab_tensors())
    model = load(tmp_path / "dialect", config, zlab_tensors())
    assert shown(model) == shown(reference)
    assert torch.equal(run(model), run(reference))


def test_the_configuration_shows_one_form():
    config = AdaFlashConfig.from_dict(zlab_config())
    shown = config.to_dict()
    assert config.block_size == 4 and config.mask_token_id == 63 and config.target_layer_ids == [1, 2, 4]
    assert config.num_target_layers == 6 and config.vocab_size == 64 and config.head_dim == 8
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000.0}
    assert config.layer_types == ["full_attention"] * 2 and config.causal_layers == [False, False]
    assert config.length_heads == [] and config.normalize_taps is False
    assert (config.final_logit_softcapping, config.logit_scale) == (None, 1.0)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, None)
    assert shown["model_type"] == "adaflash" and config.architectures == ["AdaFlashDraftModel"]
    for name in ("dflash_config", "auto_map", "rope_theta", "rope_scaling", "use_sliding_window"):
        assert name not in shown


def test_the_nested_field_wins_over_the_flat_one():
    config = AdaFlashConfig.from_dict(
        zlab_config(block_size=8, mask_token_id=5, target_layer_ids=[0], nested={"block_size": 4})
    )
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (4, 63, [1, 2, 4])


def test_a_missing_block_size_means_16():
    assert AdaFlashConfig.from_dict(zlab_config(drop=("block_size",))).block_size == 16


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}}, None),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000000.0}, "rope_theta": 1.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
    ],
)
def test_scaled_rope_is_read_from_both_dialects(dialect, expected, tmp_path):
    model = load(tmp_path, zlab_config(**dialect), zlab_tensors())
    expected = expected or {"rope_type": "linear", "factor": 2.0}
    assert model.config.rope_parameters == {**expected, "rope_theta": 1000000.0}
    plain = 1000000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(model.rotary_emb.inv_freq, plain / 2)


def test_logit_scale_and_soft_cap_are_read_from_either_place():
    nested = AdaFlashConfig.from_dict(zlab_config(nested={"output_multiplier": 0.5, "final_logit_softcapping": 30}))
    flat = AdaFlashConfig.from_dict(zlab_config(output_multiplier=0.5, final_logit_softcapping=30.0))
    for config in (nested, flat):
        assert (config.logit_scale, config.final_logit_softcapping) == (0.5, 30.0)


def test_loading_a_published_configuration_is_not_met_with_a_warning_about_its_model_type(tmp_path, caplog):
    folder = write_checkpoint(tmp_path, zlab_config(), zlab_tensors())
    logging.getLogger("transformers").propagate = True
    try:
        with caplog.at_level(logging.WARNING, logger="transformers"):
            AdaFlashConfig.from_pretrained(folder)
            AdaFlashDraftModel.from_pretrained(folder)
    finally:
        logging.getLogger("transformers").propagate = False
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            zlab_config(drop=("mask_token_id",)),
            "This z-lab DFlash checkpoint has no mask_token_id, neither at the top of config.json nor in "
            "dflash_config; without it drafts would be wrong. Add the value it was trained with.",
        ),
        (
            zlab_config(drop=("target_layer_ids",), nested={"use_thresh_head_two_model": True}),
            None,
        ),
        (
            zlab_config(drop=("target_layer_ids",)),
            "This z-lab DFlash checkpoint has no target_layer_ids, neither at the top of config.json nor in "
            "dflash_config; without it drafts would be wrong. Add the value it was trained with.",
        ),
        (
            zlab_config(drop=("rope_theta",)),
            "This checkpoint's config.json has neither rope_theta nor rope_parameters['rope_theta']. The base is not "
            "guessed, since a wrong one lowers acceptance silently: add the value the drafter was trained with.",
        ),
    ],
)
def test_a_value_that_cannot_be_guessed_is_asked_for(config, message):
    if message is None:  # an official AdaFlash checkpoint is named as one
        config["dflash_config"]["thresh_head_direct_len"] = True
        assert refusal(config).startswith("This official AdaFlash checkpoint has no target_layer_ids")
    else:
        assert refusal(config) == message


# B2: strictness

CHANGES = {
    "missing": lambda t: t.pop("layers.1.mlp.up_proj.weight"),
    "missing norm": lambda t: t.pop("hidden_norm.weight"),
    "renamed": lambda t: t.update({"layers.0.self_attn.query.weight": t.pop("layers.0.self_attn.q_proj.weight")}),
    "prefixed": lambda t: t.update({"drafter.fc.weight": t.pop("fc.weight")}),
    "extra head": lambda t: t.update({"lm_head.weight": torch.zeros(64, HIDDEN)}),
    "extra embedding": lambda t: t.update({"embed_tokens.weight": torch.zeros(64, HIDDEN)}),
    "extra layer": lambda t: t.update({"layers.2.input_layernorm.weight": torch.ones(HIDDEN)}),
    "length head not configured": lambda t: t.update({"thresh_head_two_model.out.bias": torch.zeros(1)}),
    "wrong shape": lambda t: t.update({"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}),
    "transposed": lambda t: t.update(
        {"layers.0.mlp.down_proj.weight": t["layers.0.mlp.down_proj.weight"].T.contiguous()}
    ),
}
REPORTED = {
    "missing": ("['layers.1.mlp.up_proj.weight']", "none", "none"),
    "missing norm": ("['hidden_norm.weight']", "none", "none"),
    "renamed": ("['layers.0.self_attn.q_proj.weight']", "['layers.0.self_attn.query.weight']", "none"),
    "prefixed": ("['fc.weight']", "['drafter.fc.weight']", "none"),
    "extra head": ("none", "['lm_head.weight']", "none"),
    "extra embedding": ("none", "['embed_tokens.weight']", "none"),
    "extra layer": ("none", "['layers.2.input_layernorm.weight']", "none"),
    "length head not configured": ("none", "['ratio_head.out.bias']", "none"),
    "wrong shape": (
        "none",
        "none",
        "['fc.weight: the checkpoint has (32, 64), the configuration wants (32, 96)']",
    ),
    "transposed": (
        "none",
        "none",
        "['layers.0.mlp.down_proj.weight: the checkpoint has (48, 32), the configuration wants (32, 48)']",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_do_not_fit_are_listed(change, tmp_path):
    tensors = zlab_tensors()
    CHANGES[change](tensors)
    missing, unexpected, shape = REPORTED[change]
    with pytest.raises(ValueError) as error:
        load(tmp_path, zlab_config(), tensors)
    assert str(error.value) == (
        f"The tensors of {tmp_path} do not fit its configuration (z-lab DFlash layout, 2 draft layers, hidden 32, 3 "
        f"taps, length heads []), so nothing was loaded.\n  missing: {missing}\n  unexpected: {unexpected}\n"
        f"  wrong shape: {shape}"
    )


def test_a_configured_length_head_without_tensors_is_an_error(tmp_path):
    nested = {"use_thresh_head_two_model": True, "thresh_head_direct_len": True, "thresh_head_bottleneck_dim": 8}
    tensors = zlab_tensors(block_head=8)
    del tensors["thresh_head_two_model.res.0.bias"]
    with pytest.raises(ValueError) as error:
        load(tmp_path, zlab_config(nested=nested), tensors)
    assert "official AdaFlash layout" in str(error.value)
    assert "length heads ['ratio']" in str(error.value)
    assert "missing: ['ratio_head.res.0.bias']\n" in str(error.value)


def test_more_taps_than_the_weights_were_made_for(tmp_path):
    with pytest.raises(ValueError, match=r"4 taps.*\n.*\n.*\n.*fc.weight: the checkpoint has \(32, 96\)") as error:
        load(tmp_path, zlab_config(nested={"target_layer_ids": [1, 2, 3, 4]}), zlab_tensors())
    assert "the configuration wants (32, 128)" in str(error.value)


def test_a_users_key_mapping_is_tried_after_the_published_names(tmp_path):
    reference = load(tmp_path / "reference", zlab_config(), zlab_tensors())
    tensors = {f"draft.{name}": tensor for name, tensor in zlab_tensors().items()}
    with pytest.raises(ValueError, match="do not fit"):
        load(tmp_path / "prefixed", zlab_config(), tensors)
    model = AdaFlashDraftModel.from_pretrained(tmp_path / "prefixed", key_mapping={r"^draft\.": ""}).eval()
    assert torch.equal(run(model), run(reference))


# B3: other networks are refused by name

FOREIGN = {
    "DFlash2": (
        zlab_config(architectures=["DFlash2DraftModel"], nested={"conv_kernel_size": 2, "selector_rank": 256}),
        "a DFlash2 drafter (DFlash2DraftModel)",
        "dynamic convolutions and a candidate selector",
    ),
    "DSpark": (
        zlab_config(architectures=["Qwen3DSparkModel"], markov_rank=0),
        "a DSpark drafter (Qwen3DSparkModel)",
        "anchor-first blocks, where slot 0 predicts the first draft",
    ),
    "Domino": (
        zlab_config(architectures=["DominoDraftModel"], nested={"projector_type": "domino"}),
        "a Domino drafter (DominoDraftModel)",
        "a recurrent projector over the drafts",
    ),
    "anchor-first, speculators' name": (
        zlab_config(sample_from_anchor=True),
        "an anchor-first drafter (sample_from_anchor=True)",
        "blocks whose slot 0 predicts the first draft",
    ),
    "anchor-first, DeepSpec's name": (
        zlab_config(nested={"query_zero_predicts_next": True}),
        "an anchor-first drafter (query_zero_predicts_next=True)",
        "blocks whose slot 0 predicts the first draft",
    ),
    "anchor-first, SpecForge's name": (
        zlab_config(nested={"shift_label": True}),
        "an anchor-first drafter (shift_label=True)",
        "blocks whose slot 0 predicts the first draft",
    ),
    "Domino by projector": (
        zlab_config(nested={"projector_type": "domino"}),
        "a drafter with projector_type='domino'",
        "that projector",
    ),
    "DSpark by projector": (
        zlab_config(projector_type="dspark"),
        "a drafter with projector_type='dspark'",
        "that projector",
    ),
    "DFlash2 by convolutions": (
        zlab_config(nested={"conv_kernel_size": 2}),
        "a drafter with conv_kernel_size=2",
        "what that field stands for: DFlash2 (dynamic convolutions and a candidate selector)",
    ),
    "DFlash2 by selector, flat": (
        zlab_config(selector_rank=256),
        "a drafter with selector_rank=256",
        "what that field stands for: DFlash2 (dynamic convolutions and a candidate selector)",
    ),
    "DSpark by Markov head": (
        zlab_config(nested={"markov_rank": 64}),
        "a drafter with markov_rank=64",
        "what that field stands for: DSpark (a Markov head over the drafts)",
    ),
    "Domino by GRU": (
        zlab_config(nested={"gru_hidden_dim": 64}),
        "a drafter with gru_hidden_dim=64",
        "what that field stands for: Domino (a recurrent projector over the drafts)",
    ),
    "AdaFlash per-slot head": (
        zlab_config(nested={"use_prob_head": True}),
        "a drafter with use_prob_head=True",
        "what that field stands for: an AdaFlash research variant (per-slot probability head)",
    ),
    "AdaFlash subsequent head": (
        zlab_config(nested={"use_thresh_head_subsequent": True}),
        "a drafter with use_thresh_head_subsequent=True",
        "what that field stands for: an AdaFlash research variant (subsequent threshold head)",
    ),
    "AdaFlash threshold head": (
        zlab_config(nested={"use_thresh_head_two_model": True, "thresh_head_direct_len": False}),
        "an AdaFlash drafter with thresh_head_direct_len=False",
        "a length head that predicts a threshold",
    ),
    "MiMo sinks": (
        zlab_config(attention_sink_bias=True),
        "a drafter with attention_sink_bias=True",
        "what that field stands for: MiMo (attention sinks in the draft layers)",
    ),
    "MiMo values": (
        zlab_config(attention_value_scale=0.5),
        "a drafter with attention_value_scale=0.5",
        "what that field stands for: MiMo (scaled attention values in the draft layers)",
    ),
    "speculators": (
        zlab_config(speculators_model_type="dflash", sample_from_anchor=False),
        "a speculators checkpoint",
        "a conversion first, since its layer ids count from the embeddings",
    ),
    "quantised": (
        zlab_config(quantization_config={"quant_method": "modelopt"}),
        "a quantised drafter (quantization_config is set)",
        "its quantisation's own kernels",
    ),
    "Laguna": (
        zlab_config(architectures=["DFlashLagunaForCausalLM"]),
        "of the unknown architecture DFlashLagunaForCausalLM",
        "a reader of its own",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_networks_are_refused_by_name_and_never_loaded_as_plain_dflash(name, tmp_path):
    config, what, needs = FOREIGN[name]
    message = (
        f"This checkpoint is {what}, which AdaFlashDraftModel cannot run: it needs {needs}. "
        f"(architectures={config['architectures']}; {READABLE}) {SILENCE}"
    )
    assert refusal(config) == message
    # The tensors alone would fit the plain network: the configuration has to be what refuses.
    with pytest.raises(ValueError) as error:
        load(tmp_path, config, zlab_tensors())
    assert str(error.value) == message


@pytest.mark.parametrize(
    "harmless",
    [
        {"nested": {"projector_type": "dflash"}},
        {"markov_rank": 0},
        {"sample_from_anchor": False},
        {"nested": {"shift_label": False, "use_prob_head": False}},
        {"quantization_config": None},
        {"attention_sink_bias": False},
    ],
)
def test_the_same_fields_switched_off_are_plain_dflash(harmless, tmp_path):
    reference = load(tmp_path / "reference", zlab_config(), zlab_tensors())
    assert torch.equal(run(load(tmp_path / "same", zlab_config(**harmless), zlab_tensors())), run(reference))


def test_the_tensors_alone_are_enough_to_refuse_another_network(tmp_path):
    # DFlash2 whose configuration says nothing about it.
    tensors = zlab_tensors()
    tensors["layers.0.attention_conv.base_kernel"] = torch.zeros(2, 2)
    tensors["candidate_selector.hidden_projection.weight"] = torch.zeros(4, HIDDEN)
    with pytest.raises(ValueError) as error:
        load(tmp_path, zlab_config(), tensors)
    reported = "['candidate_selector.hidden_projection.weight', 'layers.0.attention_conv.base_kernel']"
    assert f"unexpected: {reported}" in str(error.value)


# B4


def test_eight_draft_layers_with_five_layer_ids(tmp_path):
    config = zlab_config(num_hidden_layers=8, num_target_layers=48, nested={"target_layer_ids": [1, 12, 23, 34, 45]})
    model = load(tmp_path, config, zlab_tensors(taps=5, layers=8))
    assert len(model.layers) == 8 and model.fc.in_features == 5 * HIDDEN
    assert run(model).shape == (1, 4, HIDDEN)


# B5: what a layer id means (speculators' other convention is refused above)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_a_layer_id_means_the_output_of_that_layer_and_the_last_one_after_the_final_norm(kind):
    from adaflash_hf.generation import taps

    target = tiny_target(kind)
    ids = torch.arange(1, 11)[None]
    with torch.no_grad(), taps.TapRecorder(target, [0, 2, 5]) as recorder:
        states = target(ids, output_hidden_states=True).hidden_states
        features = recorder.take()
    torch.testing.assert_close(features, torch.cat([states[1], states[3], states[6]], dim=-1), rtol=0, atol=0)
    # The golden values themselves: embeddings are entry 0, and the last entry is normed.
    outputs = {}
    layers = taps.decoder_layers(target)
    for index in (0, 2, 5):
        layers[index].register_forward_hook(
            lambda module, args, out, index=index: outputs.update({index: out[0] if isinstance(out, tuple) else out})
        )
    with torch.no_grad():
        target(ids)
    assert torch.equal(features[..., :HIDDEN], outputs[0])
    assert torch.equal(features[..., HIDDEN : 2 * HIDDEN], outputs[2])
    assert not torch.allclose(features[..., 2 * HIDDEN :], outputs[5])


def test_the_order_of_layer_ids_is_the_order_of_the_taps(tmp_path):
    model = load(tmp_path, zlab_config(nested={"target_layer_ids": [4, 1, 2]}), zlab_tensors())
    assert model.config.target_layer_ids == [4, 1, 2]


# B6: windows and causality

SLIDING = ["sliding_attention", "full_attention"]
WINDOWS = [
    # (fields, nested, layer types, window, causal)
    ({}, {}, ["full_attention"] * 2, None, [False, False]),
    ({"sliding_window": 5, "use_sliding_window": False}, {}, ["full_attention"] * 2, None, [False, False]),
    # Where nothing is said: sliding layers causal, full ones bidirectional, as the servers run them.
    ({"layer_types": SLIDING, "sliding_window": 5, "use_sliding_window": True}, {}, SLIDING, 5, [True, False]),
    ({"layer_types": SLIDING, "sliding_window": 5, "is_causal": False}, {}, SLIDING, 5, [False, False]),
    ({"layer_types": SLIDING, "sliding_window": 5, "is_causal": True}, {}, SLIDING, 5, [True, True]),
    ({"layer_types": SLIDING, "sliding_window": 5}, {"causal": False}, SLIDING, 5, [False, False]),
    ({"layer_types": SLIDING, "sliding_window": 5}, {"causal": True}, SLIDING, 5, [True, True]),
    ({"layer_types": SLIDING, "sliding_window": 5, "is_causal": None}, {"causal": False}, SLIDING, 5, [False, False]),
    ({"layer_types": SLIDING, "sliding_window": 5, "is_causal": True}, {"causal": False}, SLIDING, 5, [True, True]),
    ({"is_causal": True}, {}, ["full_attention"] * 2, None, [True, True]),
    # ModelOpt: every layer slides, whatever layer_types says.
    (
        {"sliding_window": 9},
        {"use_swa": True, "swa_window_size": 5, "causal": False},
        ["sliding_attention"] * 2,
        5,
        [False, False],
    ),
    ({"sliding_window": 9}, {"use_swa": True}, ["sliding_attention"] * 2, 9, [True, True]),
    ({"use_swa": True, "swa_window_size": 5}, {}, ["sliding_attention"] * 2, 5, [True, True]),
    ({"sliding_window": 9}, {"use_swa": False, "swa_window_size": 5}, ["full_attention"] * 2, None, [False, False]),
]


@pytest.mark.parametrize(("fields", "nested", "kinds", "window", "causal"), WINDOWS)
def test_windows_and_causality_are_read_and_change_the_output(fields, nested, kinds, window, causal, tmp_path):
    plain = load(tmp_path / "plain", zlab_config(), zlab_tensors())
    model = load(tmp_path / "flags", zlab_config(nested=nested, **fields), zlab_tensors())
    config = model.config
    assert (config.layer_types, config.sliding_window, config.causal_layers) == (kinds, window, causal)
    same = torch.allclose(run(model, context=12), run(plain, context=12), atol=1e-4)
    assert same is (window is None and not any(causal))


def test_a_sliding_layer_without_a_window_is_an_error():
    assert refusal(zlab_config(layer_types=SLIDING)) == (
        "AdaFlashConfig: sliding_window=None is not valid: expected a positive number, since layer_types names sliding "
        "layers."
    )


# B7


def test_a_mask_token_outside_the_embedding_table_is_an_error():
    assert refusal(zlab_config(nested={"mask_token_id": 64})) == (
        "AdaFlashConfig: mask_token_id=64 is not valid: expected an id in [0, 63] (vocab_size=64), or None for a "
        "learned embedding."
    )


def test_a_layer_id_outside_the_target_is_an_error():
    assert refusal(zlab_config(nested={"target_layer_ids": [1, 2, 6]})) == (
        "AdaFlashConfig: target_layer_ids=[1, 2, 6] is not valid: expected ids in [0, 5] (num_target_layers=6)."
    )


def test_the_drafters_own_rope_base_is_used(tmp_path):
    # tiny_target("llama") has base 10,000; these drafters have their own, in either dialect.
    models = {
        theta: load(tmp_path / str(theta), zlab_config(rope_theta=theta), zlab_tensors()) for theta in (1e4, 1e6, 1e7)
    }
    for theta, model in models.items():
        torch.testing.assert_close(model.rotary_emb.inv_freq, theta ** -(torch.arange(0, 8, 2) / 8))
    assert not torch.allclose(run(models[1e4]), run(models[1e6]), atol=1e-4)
    rope = zlab_config(drop=("rope_theta", "rope_scaling"), rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    assert torch.equal(run(load(tmp_path / "parameters", rope, zlab_tensors())), run(models[1e7]))
    models[1e6].save_pretrained(tmp_path / "saved")
    assert torch.equal(run(AdaFlashDraftModel.from_pretrained(tmp_path / "saved")), run(models[1e6]))


# Layouts: official AdaFlash, and transformers' own assistant


def test_official_adaflash_checkpoint_loads_with_its_length_head(tmp_path):
    nested = {"use_thresh_head_two_model": True, "thresh_head_direct_len": True, "thresh_head_bottleneck_dim": 8}
    tensors = zlab_tensors(block_head=8)
    model = load(tmp_path / "official", zlab_config(nested=nested), tensors)
    assert model.config.length_heads == ["ratio"] and model.config.length_head_dim == 8
    assert model.survival_head is None
    state = model.state_dict()
    assert len(state) == len(tensors) and all(
        torch.equal(state[name.replace("thresh_head_two_model.", "ratio_head.")], value)
        for name, value in tensors.items()
    )
    with torch.no_grad():
        inputs = drafter_inputs(model, rows=3)
        output = model(**inputs)
        blocks = output.last_hidden_state
        head = {name.removeprefix("thresh_head_two_model."): t for name, t in tensors.items() if "thresh" in name}
        hidden = torch.cat([blocks.mean(1), blocks[:, -1]], dim=-1) @ head["down.weight"].T + head["down.bias"]
        hidden = torch.nn.functional.silu(hidden)
        hidden = hidden + torch.nn.functional.silu(hidden @ head["res.0.weight"].T + head["res.0.bias"])
        expected = torch.sigmoid(hidden @ head["out.weight"].T + head["out.bias"]).squeeze(-1)
    torch.testing.assert_close(output.length_ratio, expected)
    assert output.length_ratio.std() > 1e-3  # rows differ


def muse_assistant(seed=0, **fields):
    config = MuseGlimmerAssistantConfig(
        **{
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 4,
            "block_size": 6,
            "mask_token_id": 63,
            "target_layer_ids": [1, 3, 4],
            **fields,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModel.from_config(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("layer_types", [None, ["full_attention"] * 3, ["sliding_attention"] * 2 + ["full_attention"]])
def test_transformers_own_assistant_gives_the_same_states(layer_types, tmp_path):
    reference = muse_assistant(layer_types=layer_types)
    reference.save_pretrained(tmp_path)
    assert "encoder.fc.weight" in saved_tensors(tmp_path)
    model = AdaFlashDraftModel.from_pretrained(tmp_path).eval()
    kinds = layer_types or ["sliding_attention"] * 3
    assert model.config.layer_types == kinds and model.config.causal_layers == [False] * 3
    assert model.config.rope_parameters["rope_theta"] == 500000.0
    cache_name = "cache" if "cache" in inspect.signature(reference.forward).parameters else "past_key_values"
    for attention in ("sdpa", "eager"):
        for each in (reference, model):
            each.set_attn_implementation(attention)
        caches = [DFlashCache(config=each.config) for each in (reference, model)]
        inputs = drafter_inputs(model, context=14)
        done = 0
        for new in (9, 1, 4):  # rounds of one generation, by transformers' contract
            outputs = []
            for each, cache in zip((reference, model), caches, strict=True):
                cache.activate_past_recording()
                cache.set_previous_accepted_tokens(new)
                if done:
                    cache.crop(-6)
                context = inputs["context_hidden_states"][:, done : done + new]
                positions = torch.arange(done, done + new + 6)[None]
                with torch.no_grad():
                    outputs.append(
                        each(
                            noise_embeds=inputs["noise_embeds"],
                            context_hidden_states=context,
                            position_ids=positions,
                            **{cache_name: cache},
                        ).last_hidden_state
                    )
            done += new
            torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5)
            with torch.no_grad():
                fresh = model(inputs["noise_embeds"], inputs["context_hidden_states"][:, :done]).last_hidden_state
            torch.testing.assert_close(fresh, outputs[0], rtol=0, atol=1e-5)
    assert outputs[0].abs().mean() > 0.1


def test_the_published_assistant_of_muse_glimmer_names_a_mask_token_inside_its_targets_vocabulary():
    # Its config has no vocab_size; the mask token of the published drafter is 201818.
    config = AdaFlashConfig.from_dict(MuseGlimmerAssistantConfig(architectures=["MuseGlimmerAssistantModel"]).to_dict())
    assert config.mask_token_id == 201818 and config.vocab_size == 202048
    assert config.target_layer_ids == [1, 13, 25, 37, 49] and config.block_size == 16
    assert config.rms_norm_eps == 1e-5 and config.hidden_size == 6656 and config.sliding_window == 2048


@pytest.mark.parametrize("layout", ["z-lab", "official", "assistant"])
def test_a_published_drafter_saved_again_has_our_names_and_the_same_values(layout, tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    if layout == "assistant":
        muse_assistant().save_pretrained(source)
    else:
        folder = {"z-lab": "dflash-tiny", "official": "adaflash-tiny"}[layout]
        shutil.copytree(DATA / "parity" / folder, source)
    model = AdaFlashDraftModel.from_pretrained(source).eval()
    model.save_pretrained(saved)
    names = saved_tensors(saved).keys()
    assert names == model.state_dict().keys()
    assert not [name for name in names if name.startswith(("encoder", "thresh_head"))]
    written = json.loads((saved / "config.json").read_text())
    assert written["model_type"] == "adaflash" and "dflash_config" not in written and "auto_map" not in written
    again = AdaFlashDraftModel.from_pretrained(saved).eval()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert torch.equal(run(again, rows=2), run(model, rows=2))
    assert shown(again) == shown(model)


def test_normalising_leaves_the_given_dictionary_as_it_was():
    config = zlab_config(rope_scaling={"type": "linear", "factor": 2.0})
    before = json.dumps(config)
    normalize_published_config(config)
    assert json.dumps(config) == before


def test_a_target_given_as_a_drafter_is_an_error(tmp_path):
    tiny_target("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="do not fit"):
        AdaFlashDraftModel.from_pretrained(tmp_path)


def test_a_drafter_of_ours_still_loads_with_the_published_names_known(tmp_path):
    drafter = tiny_drafter()
    drafter.save_pretrained(tmp_path)
    assert torch.equal(run(AdaFlashDraftModel.from_pretrained(tmp_path).eval()), run(drafter))


# Upgrading


def test_a_zlab_drafter_gets_length_heads_and_keeps_its_drafts(tmp_path):
    published = load(tmp_path / "zlab", zlab_config(), zlab_tensors())
    before = run(published)
    published.add_length_heads()
    assert published.config.length_heads == ["ratio", "survival"]
    published.save_pretrained(tmp_path / "upgraded")
    upgraded = AdaFlashDraftModel.from_pretrained(tmp_path / "upgraded").eval()
    torch.testing.assert_close(run(upgraded), before)
    with torch.no_grad():
        output = upgraded(**drafter_inputs(upgraded))
    assert output.length_ratio is not None and output.survival_logits is not None
