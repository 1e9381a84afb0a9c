"""AdaFlashConfig: derived defaults, every refusal, and the forms it is read from and written in."""

import json
import re

import pytest
from transformers import AutoConfig, PreTrainedConfig

from adaflash_hf import AdaFlashConfig
from adaflash_hf.configuration_adaflash import default_target_layer_ids

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "block_size": 4,
    "num_target_layers": 6,
    "target_layer_ids": [1, 2, 4],
    "mask_token_id": 63,
}


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),  # Qwen3-8B
        (48, 5, [1, 12, 23, 34, 45]),  # Qwen3-Coder-30B
        (64, 5, [1, 16, 31, 46, 61]),  # Qwen3.6-27B
        (32, 5, [1, 8, 15, 22, 29]),  # Qwen3.5-9B
        (40, 8, [1, 6, 11, 16, 22, 27, 32, 37]),  # Qwen3.5-35B-A3B
        (52, 5, [1, 13, 25, 37, 49]),  # Muse Glimmer
        (36, 1, [18]),
        (6, 5, [1, 2, 3]),
        (4, 5, [1]),
        (3, 5, [0, 1]),
        (2, 5, [0, 1]),
        (1, 5, [0]),
    ],
)
def test_default_target_layer_ids_are_those_of_published_drafters(layers, taps, expected):
    assert default_target_layer_ids(layers, taps) == expected


def test_defaults_that_follow_from_other_fields():
    config = AdaFlashConfig(hidden_size=96, num_attention_heads=6, num_hidden_layers=3, num_target_layers=32)
    assert config.num_key_value_heads == 6
    assert config.head_dim == 16
    assert config.layer_types == ["full_attention"] * 3
    assert config.causal_layers == [False] * 3
    assert config.target_layer_ids == [1, 8, 15, 22, 29]
    assert config.length_heads == []
    assert config.mask_token_id is None and config.draft_vocab_size is None
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    # Two configurations never share a list.
    other = AdaFlashConfig(hidden_size=96, num_attention_heads=6, num_hidden_layers=3, num_target_layers=32)
    other.length_heads.append("ratio")
    assert config.length_heads == [] and AdaFlashConfig().length_heads == []


def test_default_is_the_shape_of_the_published_qwen3_8b_drafter():
    config = AdaFlashConfig()
    assert (config.hidden_size, config.num_hidden_layers, config.block_size) == (4096, 5, 16)
    assert config.target_layer_ids == [1, 9, 17, 25, 33]
    assert config.is_encoder_decoder is False
    assert config.get_text_config() is config  # generate() and pipelines read the vocabulary through it


FITS = {"greedy": {"scale": [1.0, 0.9, 0.8], "bias": [0.0, 0.1, 0.2]}}
REFUSALS = [
    ({"block_size": 1}, "block_size=1 is not valid: expected at least 2 (the anchor and one drafted token)."),
    ({"hidden_size": 0, "head_dim": 8}, "hidden_size=0 is not valid: expected a positive number."),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not valid: expected at least 1."),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3 is not valid: expected a divisor of num_attention_heads=4."),
    ({"num_key_value_heads": 0}, "num_key_value_heads=0 is not valid: expected a divisor of num_attention_heads=4."),
    ({"head_dim": 7}, "head_dim=7 is not valid: expected a positive even number."),
    ({"head_dim": 0}, "head_dim=0 is not valid: expected a positive even number."),
    (
        {"layer_types": ["full_attention"]},
        "layer_types=['full_attention'] is not valid: expected 2 entries.",
    ),
    ({"causal_layers": [True] * 3}, "causal_layers=[True, True, True] is not valid: expected 2 entries."),
    (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "sliding_window=None is not valid: expected a positive number, since layer_types names sliding layers.",
    ),
    (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 0},
        "sliding_window=0 is not valid: expected a positive number, since layer_types names sliding layers.",
    ),
    (
        {"mask_token_id": 64},
        "mask_token_id=64 is not valid: expected an id in [0, 63] (vocab_size=64), or None for a learned embedding.",
    ),
    (
        {"mask_token_id": -1},
        "mask_token_id=-1 is not valid: expected an id in [0, 63] (vocab_size=64), or None for a learned embedding.",
    ),
    ({"target_layer_ids": []}, "target_layer_ids=[] is not valid: expected at least one layer id."),
    (
        {"target_layer_ids": [1, 6]},
        "target_layer_ids=[1, 6] is not valid: expected ids in [0, 5] (num_target_layers=6).",
    ),
    (
        {"target_layer_ids": [-1, 2]},
        "target_layer_ids=[-1, 2] is not valid: expected ids in [0, 5] (num_target_layers=6).",
    ),
    (
        {"target_layer_ids": [-1, 2], "num_target_layers": None},
        "target_layer_ids=[-1, 2] is not valid: expected non-negative ids.",
    ),
    ({"target_layer_ids": [1, 1]}, "target_layer_ids=[1, 1] is not valid: expected distinct ids."),
    (
        {"draft_vocab_size": 0},
        "draft_vocab_size=0 is not valid: expected a number in [1, 64] (vocab_size=64), or None for all.",
    ),
    (
        {"draft_vocab_size": 65},
        "draft_vocab_size=65 is not valid: expected a number in [1, 64] (vocab_size=64), or None for all.",
    ),
    (
        {"length_heads": ["ratio", "speed"]},
        "length_heads=['ratio', 'speed'] is not valid: expected entries of ['ratio', 'survival'].",
    ),
    (
        {"survival_calibration": {"beam": FITS["greedy"]}},
        "survival_calibration='beam' is not valid: expected the keys 'greedy' and 'sampling'.",
    ),
    (
        {"survival_calibration": {"sampling": {"scale": [1.0, 1.0], "bias": [0.0] * 3}}},
        "survival_calibration['sampling']['scale']=[1.0, 1.0] is not valid: expected a list of 3 numbers, one a "
        "drafted slot.",
    ),
    (
        {"survival_calibration": {"greedy": {"scale": [1.0] * 3}}},
        "survival_calibration['greedy']={'scale': [1.0, 1.0, 1.0]} is not valid: expected a dictionary with 'scale' and "
        "'bias', and 'confidence' or not.",
    ),
    (
        {"survival_calibration": {"greedy": [1.0, 1.0, 1.0]}},
        "survival_calibration['greedy']=[1.0, 1.0, 1.0] is not valid: expected a dictionary with 'scale' and 'bias', and "
        "'confidence' or not.",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[re.sub(r"\W+", "_", str(c))[:50] for c, _ in REFUSALS])
def test_each_invalid_field_is_refused_with_its_value_and_what_is_accepted(change, message):
    with pytest.raises(ValueError) as error:
        AdaFlashConfig(**{**SMALL, **change})
    assert str(error.value) == f"AdaFlashConfig: {message}"


def test_unknown_layer_type_is_refused():
    with pytest.raises(ValueError, match=r"layer_types|layer type"):
        AdaFlashConfig(**{**SMALL, "layer_types": ["full_attention", "linear_attention"]})


@pytest.mark.parametrize("change", [{"block_size": "4"}, {"target_layer_ids": "1,2"}, {"normalize_taps": "yes"}])
def test_fields_of_the_wrong_type_are_refused_by_name(change):
    with pytest.raises(Exception, match=next(iter(change))):
        AdaFlashConfig(**{**SMALL, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 2},
        {"mask_token_id": 0},
        {"mask_token_id": 63},
        {"target_layer_ids": [0, 5]},
        {"num_target_layers": None, "target_layer_ids": [99]},
        {"draft_vocab_size": 1},
        {"draft_vocab_size": 64},
        {"num_key_value_heads": 1},
        {"survival_calibration": FITS},
        {"survival_calibration": {}},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 1},
    ],
)
def test_the_edges_of_what_is_accepted_are_accepted(change):
    config = AdaFlashConfig(**{**SMALL, **change})
    for name, value in change.items():
        assert getattr(config, name) == value


FULL = {
    **SMALL,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "layer_types": ["sliding_attention", "full_attention"],
    "causal_layers": [True, False],
    "sliding_window": 7,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64},
    "normalize_taps": True,
    "draft_vocab_size": 9,
    "length_heads": ["ratio", "survival"],
    "length_head_dim": 8,
    "survival_calibration": FITS,
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.25,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "max_position_embeddings": 256,
}


def fields(config):
    return {name: getattr(config, name) for name in FULL}


def test_every_field_survives_saving_and_loading(tmp_path):
    config = AdaFlashConfig(**FULL)
    assert fields(config) == {**FULL, "rope_parameters": config.rope_parameters}
    assert config.rope_parameters["rope_theta"] == 5e5 and config.rope_parameters["factor"] == 4.0
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "adaflash" and "dflash_config" not in written
    assert {name: written[name] for name in FULL} == fields(config)
    loaded = AdaFlashConfig.from_pretrained(tmp_path)
    assert fields(loaded) == fields(config)
    assert loaded.to_dict() == {**config.to_dict(), "transformers_version": loaded.to_dict()["transformers_version"]}
    assert fields(AdaFlashConfig.from_dict(config.to_dict())) == fields(config)


def test_auto_config_gives_this_class(tmp_path):
    AdaFlashConfig(**FULL).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is AdaFlashConfig and isinstance(config, PreTrainedConfig)
    assert config.block_size == 4 and config.head_dim == 10
    assert type(AutoConfig.for_model("adaflash", **SMALL)) is AdaFlashConfig


def test_fields_can_be_overridden_when_loading(tmp_path):
    AdaFlashConfig(**SMALL).save_pretrained(tmp_path)
    assert AdaFlashConfig.from_pretrained(tmp_path, logit_scale=0.5).logit_scale == 0.5


def test_an_invalid_saved_field_is_refused_when_loading(tmp_path):
    AdaFlashConfig(**SMALL).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "target_layer_ids": [1, 2, 40]}))
    with pytest.raises(ValueError, match=r"target_layer_ids=\[1, 2, 40\] is not valid: expected ids in \[0, 5\]"):
        AdaFlashConfig.from_pretrained(tmp_path)
