import json
import runpy
from pathlib import Path

import torch
from helpers import tiny_drafter, tiny_target
from peft import PeftModel
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


def test_an_adapter_for_one_domain(tmp_path, capsys):
    """Saved, loaded and merged, the adapter drafts the same; what was trained is a small part of the drafter."""
    target = tiny_target("llama")
    target.generation_config.eos_token_id = None  # answers long enough for blocks
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_drafter(target, block_size=4).save_pretrained(tmp_path / "drafter")
    prompts = [{"prompt": f"w{9 + i} w{30 - i}"} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    main = runpy.run_path(str(EXAMPLES / "lora_domain.py"))["main"]
    folders = [f"--{name}={tmp_path / name}" for name in ("target", "drafter", "out")]
    share = main([*folders, f"--prompts={tmp_path / 'prompts.jsonl'}", "--max-new-tokens=12", "--epochs=6", "--rank=1"])
    assert "merged drafter" in capsys.readouterr().out
    assert 0 < share < 0.05
    plain = AdaFlashDraftModel.from_pretrained(tmp_path / "drafter")
    adapted = PeftModel.from_pretrained(AdaFlashDraftModel.from_pretrained(tmp_path / "drafter"), tmp_path / "out")
    merged = AdaFlashDraftModel.from_pretrained(tmp_path / "out" / "merged")
    torch.manual_seed(0)
    hidden, taps = merged.config.hidden_size, len(merged.config.target_layer_ids)
    inputs = {"noise_embeds": torch.randn(1, 4, hidden), "context_hidden_states": torch.randn(1, 6, taps * hidden)}
    states = [model.eval()(**inputs).last_hidden_state for model in (plain, adapted, merged)]
    torch.testing.assert_close(states[1], states[2], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(states[0], states[1], atol=1e-5)


def test_on_policy_distillation(tmp_path, capsys):
    target = tiny_target("llama")
    target.generation_config.eos_token_id = None
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    first = tiny_drafter(target, block_size=4)
    first.save_pretrained(tmp_path / "drafter")
    prompts = [{"prompt": f"w{9 + i} w{30 - i}", "domain": "ab"[i % 2]} for i in range(10)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    main = runpy.run_path(str(EXAMPLES / "train_opd.py"))["main"]
    folders = [f"--{name}={tmp_path / name}" for name in ("target", "drafter", "out")]
    before, after = main([*folders, f"--prompts={tmp_path / 'prompts.jsonl'}", "--max-new-tokens=16", "--held-out=0.2"])
    assert before >= 1 and after >= 1
    assert "acceptance length on held-out prompts" in capsys.readouterr().out
    found = AdaFlashDraftModel.from_pretrained(tmp_path / "out")
    assert any(not torch.equal(value, found.state_dict()[name]) for name, value in first.state_dict().items())
