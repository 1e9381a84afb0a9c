"""`adaflash train`: recipes in, drafters out; what is not understood is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from helpers import tiny_drafter, tiny_target
from text_helpers import tiny_tokenizer

from adaflash_hf import AdaFlashDraftModel
from adaflash_hf.cli import main
from adaflash_hf.training.recipe import read_recipe, read_rows

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def recipe(tmp_path):
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_drafter(target, block_size=4, length_heads=[]).save_pretrained(tmp_path / "drafter")
    rows = [{"prompt": f"w{9 + i} w{30 - i}"} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "target": str(tmp_path / "target"),
        "train_file": str(tmp_path / "prompts.jsonl"),
        "output_dir": str(tmp_path / "out"),
        "new_drafter": {"num_hidden_layers": 1, "block_size": 4},
        "learning_rate": "1e-3",
        "max_steps": 1,
        "max_new_tokens": 20,
        "use_cpu": True,
        "report_to": "none",
    }

    def write(**kw):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**settings, **kw}))
        return str(tmp_path / "recipe.yaml")

    return write


def test_a_new_drafter_is_trained_and_saved(recipe, tmp_path, capsys):
    assert main(["train", "--config", recipe(), "--alpha", "0.5", f"--save_to={tmp_path / 'made'}"]) == 0
    assert f"saved to {tmp_path / 'made'}" in capsys.readouterr().out
    found = AdaFlashDraftModel.from_pretrained(tmp_path / "made")
    assert found.config.num_hidden_layers == 1 and found.config.block_size == 4


def test_heads_and_adapters(recipe, tmp_path):
    start = {"new_drafter": None, "drafter": str(tmp_path / "drafter")}
    assert main(["train", "--config", recipe(**start, add_length_heads=True, train_only="length_head")]) == 0
    assert AdaFlashDraftModel.from_pretrained(tmp_path / "out" / "drafter").config.length_heads == ["ratio", "survival"]
    assert main(["train", "--config", recipe(**start, lora={"target_modules": ["q_proj"], "r": 2})]) == 0
    assert (tmp_path / "out" / "drafter" / "adapter_config.json").exists()


def test_a_dry_run_writes_nothing(recipe, tmp_path, capsys):
    path = recipe(feature_cache=str(tmp_path / "features"), lmbda=0.0)
    assert main(["train", "--config", path, "--dry-run", "--max_steps", "7"]) == 0
    printed = capsys.readouterr().out
    assert "7 of 8 sequences" in printed and "8 training rows" in printed
    assert "disk: features" in printed and " GB" in printed
    assert main(["train", "--config", recipe(), "--dry-run", "--rollout_buffer_size", "8"]) == 0
    printed = capsys.readouterr().out
    assert "8 answers at a time, each trained on 2 times" in printed and "of kept states" in printed
    assert not (tmp_path / "features").exists() and not (tmp_path / "out" / "drafter").exists()


def test_overrides_replace_the_file(recipe):
    _, settings = read_recipe(recipe(), ["--learning_rate", "2e-4"])
    assert settings.learning_rate == 2e-4
    assert read_recipe(recipe())[1].learning_rate == 1e-3


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        ({"learning_rat": 1.0}, [], "unknown names .*: learning_rat"),
        ({}, ["--lr", "1"], "unknown names .*: lr"),
        ({}, ["stray"], "not understood on the command line: stray"),
        ({"alpha": 2.0}, [], "alpha=2.0 is not valid"),
        ({"max_steps": "many"}, [], "max_steps.*invalid int value: 'many'"),
        ({"new_drafter": "tiny"}, [], "new_drafter='tiny' is not valid: expected a mapping"),
        ({"drafter": "somewhere"}, [], "drafter and new_drafter are both given"),
        ({"train_file": "nowhere.jsonl"}, [], "train_file='nowhere.jsonl' is not valid: there is no such file"),
        ({"target": None}, [], "required: --target"),
    ],
)
def test_what_is_not_understood_is_refused(recipe, capsys, change, overrides, message):
    path = recipe(**change)
    with pytest.raises(ValueError, match=message):
        read_recipe(path, overrides)
    assert main(["train", "--config", path, *overrides]) == 1
    assert capsys.readouterr().err.startswith("adaflash train: ")


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="expected a mapping of names to values"):
        read_recipe(str(tmp_path / "list.yaml"))
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="is not valid YAML"):
        read_recipe(str(tmp_path / "broken.yaml"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n[1]\n')
    with pytest.raises(ValueError, match="line 2: expected an object, got list"):
        read_rows(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_are_understood(path, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}')
    files = [f"--train_file={tmp_path / 'rows.jsonl'}", f"--eval_file={tmp_path / 'rows.jsonl'}"]
    recipe, settings = read_recipe(str(path), [*files, "--bf16", "false", "--use_cpu", "true"])
    assert recipe.target and settings.output_dir.startswith("out/")
