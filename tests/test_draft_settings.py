"""Draft settings: where they are read from, what is refused, and the paper's length rule."""

import json

import pytest
import torch
from transformers import GenerationConfig

from adaflash_hf.draft_settings import (
    DEFAULT_POLICY,
    LENGTH_POLICIES,
    DraftSettings,
    default_generation_config,
    load_generation_config,
    ratio_draft_length,
    read_draft_settings,
)


def test_defaults():
    settings = DraftSettings()
    assert settings.length_policy == DEFAULT_POLICY and DEFAULT_POLICY in LENGTH_POLICIES
    assert settings.num_assistant_tokens is None
    assert settings.length_scale == 1.3
    assert settings.confidence_threshold == 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"length_policy": "quick"},
            f"length_policy='quick' is not known: expected one of {list(LENGTH_POLICIES)}.",
        ),
        (
            {"num_assistant_tokens": -1},
            "num_assistant_tokens=-1 is not valid: expected a number of tokens, 0 or more.",
        ),
        (
            {"num_assistant_tokens": True},
            "num_assistant_tokens=True is not valid: expected a number of tokens, 0 or more.",
        ),
        (
            {"num_assistant_tokens": 2.0},
            "num_assistant_tokens=2.0 is not valid: expected a number of tokens, 0 or more.",
        ),
        ({"length_scale": -0.1}, "length_scale=-0.1 is not valid: expected a number, 0 or more."),
        ({"length_scale": float("inf")}, "length_scale=inf is not valid: expected a number, 0 or more."),
        ({"length_scale": float("nan")}, "length_scale=nan is not valid: expected a number, 0 or more."),
        ({"length_scale": "1.3"}, "length_scale='1.3' is not valid: expected a number, 0 or more."),
        ({"confidence_threshold": False}, "confidence_threshold=False is not valid: expected a number, 0 or more."),
        ({"confidence_threshold": -1}, "confidence_threshold=-1 is not valid: expected a number, 0 or more."),
    ],
)
def test_each_invalid_setting_is_refused_by_name(change, message):
    with pytest.raises(ValueError) as error:
        DraftSettings(**change)
    assert str(error.value) == message


@pytest.mark.parametrize(("tokens", "cap"), [(None, 15), (0, 0), (1, 1), (7, 7), (15, 15), (40, 15)])
def test_cap_is_the_smaller_of_block_and_num_assistant_tokens(tokens, cap):
    assert DraftSettings(num_assistant_tokens=tokens).cap(16) == cap


def test_settings_are_read_from_the_drafters_generation_config():
    config = GenerationConfig(length_policy="ratio", length_scale=2.0, confidence_threshold=0.5, num_assistant_tokens=6)
    assert read_draft_settings(config) == DraftSettings("ratio", 6, 2.0, 0.5)
    assert read_draft_settings(None) == DraftSettings()
    assert read_draft_settings(GenerationConfig()) == DraftSettings()


def test_the_calls_num_assistant_tokens_wins_and_only_that_is_read_from_it():
    drafter = GenerationConfig(length_policy="ratio", num_assistant_tokens=6)
    call = GenerationConfig(num_assistant_tokens=0, length_policy="fixed", length_scale=9.0)
    assert read_draft_settings(drafter, call) == DraftSettings("ratio", 0)
    assert read_draft_settings(drafter, GenerationConfig()).num_assistant_tokens == 6
    assert read_draft_settings(None, call) == DraftSettings(num_assistant_tokens=0)


def test_default_generation_config_names_its_policy_and_does_not_cap_the_block():
    config = default_generation_config()
    assert config.length_policy == DEFAULT_POLICY and config.length_scale == 1.3
    assert read_draft_settings(config).cap(64) == 63


def test_default_generation_config_survives_saving(tmp_path):
    default_generation_config().save_pretrained(tmp_path)
    loaded = load_generation_config(tmp_path)
    assert read_draft_settings(loaded) == DraftSettings()
    assert read_draft_settings(loaded).cap(64) == 63


def test_every_setting_survives_saving(tmp_path):
    config = default_generation_config()
    config.length_policy, config.num_assistant_tokens = "fixed", 3
    config.length_scale, config.confidence_threshold = 0.9, 0.0
    config.save_pretrained(tmp_path)
    assert read_draft_settings(load_generation_config(str(tmp_path))) == DraftSettings("fixed", 3, 0.9, 0.0)


def test_a_folder_without_the_file_gets_the_default(tmp_path):
    assert read_draft_settings(load_generation_config(tmp_path)) == DraftSettings()
    assert load_generation_config(tmp_path).to_dict() == default_generation_config().to_dict()


def test_a_file_with_an_invalid_setting_is_refused(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"length_policy": "quick"}))
    with pytest.raises(ValueError, match="length_policy='quick' is not known"):
        load_generation_config(tmp_path)


def test_a_file_that_cannot_be_read_is_an_error_and_not_the_default(tmp_path):
    (tmp_path / "generation_config.json").write_text("{broken")
    with pytest.raises(OSError, match="not a valid JSON"):
        load_generation_config(tmp_path)


def test_the_file_is_found_in_a_subfolder(tmp_path):
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "generation_config.json").write_text(json.dumps({"length_policy": "fixed"}))
    assert load_generation_config(tmp_path, subfolder="drafter").length_policy == "fixed"
    assert load_generation_config(tmp_path).length_policy == DEFAULT_POLICY


@pytest.mark.parametrize(
    ("ratio", "block", "scale", "drafts"),
    [
        (0.0, 16, 1.3, 0),  # never fewer slots than the anchor
        (1 / 16, 16, 1.3, 0),  # 1.3 slots
        (2 / 16, 16, 1.3, 2),  # 2.6 -> 3 slots
        (0.5, 16, 1.3, 9),  # 10.4 -> 10 slots
        (0.5, 16, 1.0, 7),
        (12 / 16, 16, 1.3, 15),  # 15.6 -> the whole block
        (1.0, 16, 1.3, 15),  # never more slots than the block has
        (0.5, 8, 1.3, 4),  # 5.2 -> 5 slots
        (0.5, 8, 0.0, 0),
    ],
)
def test_ratio_draft_length_is_the_papers_rule(ratio, block, scale, drafts):
    lengths = ratio_draft_length(torch.tensor([ratio]), block, scale)
    assert lengths.tolist() == [drafts] and lengths.dtype == torch.long


def test_ratio_draft_length_treats_rows_apart_and_computes_in_float32():
    ratios = torch.tensor([0.0, 0.25, 0.5, 1.0])
    assert ratio_draft_length(ratios, 16, 1.3).tolist() == [0, 4, 9, 15]
    # 8.53 slots, which bfloat16 arithmetic rounds to 8.5 and then to 8.
    assert ratio_draft_length(torch.tensor([0.41015625]).bfloat16(), 16, 1.3).tolist() == [8]
