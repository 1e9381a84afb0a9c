import json
import runpy
from pathlib import Path

import torch
from helpers import tiny_drafter, tiny_target
from text_helpers import tiny_tokenizer

from adaflash_hf import AdaFlashDraftModel

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_quickstart_with_named_models(tmp_path, capsys):
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    main = runpy.run_path(str(EXAMPLES / "quickstart.py"))["main"]
    arguments = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    text = main([*arguments, "--prompt", "w9 w10", "--max-new-tokens", "8"])
    printed = capsys.readouterr().out
    assert text in printed
    assert "a forward of the target" in printed


def test_upgrading_a_published_drafter(tmp_path, capsys):
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    published = tiny_drafter(target, block_size=4, length_heads=[])
    published.save_pretrained(tmp_path / "drafter")
    prompts = [{"prompt": f"w{9 + i} w{30 - i} w{11 + i}"} for i in range(16)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    main = runpy.run_path(str(EXAMPLES / "upgrade_dflash.py"))["main"]
    folders = [f"--{name}={tmp_path / name}" for name in ("target", "drafter", "out")]
    main([*folders, f"--prompts={tmp_path / 'prompts.jsonl'}", "--max-new-tokens=24", "--held-out=0.5", "--epochs=1"])
    assert "upgraded drafter" in capsys.readouterr().out
    found = AdaFlashDraftModel.from_pretrained(tmp_path / "out")
    assert found.config.length_heads == ["ratio", "survival"] and "greedy" in found.config.survival_calibration
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in published.state_dict().items())
    assert found.generation_config.length_policy == "throughput"
