"""`adaflash demo`: watch a real model write the same text faster."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TextStreamer

from .. import AdaFlashDraftModel, __version__
from ..evaluation.compare import compare_decoding
from ..linear_packing import packed_linears
from .assets import DRAFTER, PROMPTS, load_demo_target


class _Stream(TextStreamer):
    """Prints text as it comes, indented under its arm."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Writes the finished part of the text."""
        print(text.replace("\n", "\n    "), end="" if not stream_end else "\n", flush=True)


class _Show:
    """Streams the first prompt of each domain, and reports a line for every other."""

    def __init__(self, tokenizer: Any, stream: str) -> None:
        self.tokenizer, self.stream, self.seen = tokenizer, stream, {}
        self.tty = sys.stdout.isatty()

    def __call__(self, prompt: dict[str, str], arm: str, result: Any) -> Any:
        """Before a run: perhaps a streamer. After it: its figures."""
        domain = prompt["domain"]
        first = self.seen.setdefault(domain, prompt["prompt"]) == prompt["prompt"]
        shown = self.stream == "all" or (self.stream == "first" and first)
        if result is None:
            if not shown:
                return None
            if (domain, prompt["prompt"]) not in self.seen:
                self.seen[(domain, prompt["prompt"])] = True
                asked = " ".join(prompt["prompt"].split())
                print(f"\n{self._bold(domain)}: {asked[:150]}{'…' if len(asked) > 150 else ''}")
            print(f"  {self._bold(arm)}\n    ", end="", flush=True)
            return _Stream(self.tokenizer)
        speed = f"{result['tokens'] / result['seconds']:6.1f} tokens/s"
        print(f"  {'└' if shown else '·'} {domain:8s} {arm:9s} {result['tokens']:4d} tokens  {speed}", flush=True)
        return None

    def _bold(self, text: str) -> str:
        return f"\033[1m{text}\033[0m" if self.tty else text


def format_table(report: dict[str, Any]) -> str:
    """The demo's closing table."""
    lines = [
        "domain     plain tok/s  assisted tok/s  ratio  acceptance length  draft length  identical",
        "─" * 90,
    ]
    for name, row in report["domains"].items():
        lines.append(
            f"{name:9s} {row['plain_tokens_per_s']:12.1f} {row['assisted_tokens_per_s']:15.1f} {row['ratio']:6.2f} "
            f"{row['acceptance_length']:18.2f} {row['mean_draft_length']:13.2f}  {'yes' if row['identical'] else 'NO'}"
        )
    lines += [
        "─" * 90,
        f"{'mean':9s} {'':12s} {'':15s} {report['mean_ratio']:6.2f} {report['mean_acceptance_length']:18.2f}",
    ]
    return "\n".join(lines)


def run_demo(
    *,
    drafter: str | None = None,
    cache_dir: str | None = None,
    max_new_tokens: int = 128,
    prompts_per_domain: int = 4,
    stream: str = "first",
    threads: int | None = None,
    json_file: str | None = None,
) -> dict[str, Any]:
    """Runs the demo and prints as it goes.

    Args:
        drafter: Folder or Hub id of another drafter for the demo's target.
        cache_dir: Where the converted target is kept.
        max_new_tokens: Tokens of each run.
        prompts_per_domain: Prompts of each domain.
        stream: `"first"`, `"all"` or `"none"`: which prompts' texts are shown.
        threads: CPU threads; torch's own choice by default.
        json_file: Where the figures are written.

    Returns:
        The report that `json_file` gets.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    target, tokenizer = load_demo_target(Path(cache_dir) if cache_dir else None)
    model = AdaFlashDraftModel.from_pretrained(drafter or DRAFTER, dtype=torch.float32)
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    chosen: dict[str, list[dict[str, str]]] = {}
    for prompt in prompts:
        chosen.setdefault(prompt["domain"], []).append(prompt)
    rows = [prompt for group in chosen.values() for prompt in group[:prompts_per_domain]]
    print(
        f"target SmolLM2-135M-Instruct (float32), drafter {model.num_parameters() / 1e6:.1f}M parameters, "
        f"{torch.get_num_threads()} threads, greedy, both arms with packed linear layers"
    )
    started = time.perf_counter()
    with packed_linears(target, model):
        # Kernels, caches and thread pools are set up on a prompt that is not measured.
        warm_up = [{"domain": "warm-up", "prompt": "Hello!"}]
        compare_decoding(target, model, tokenizer, warm_up, max_new_tokens=16)
        report = compare_decoding(
            target, model, tokenizer, rows, max_new_tokens=max_new_tokens, on_run=_Show(tokenizer, stream)
        )
    report |= {
        "seconds": time.perf_counter() - started,
        "max_new_tokens": max_new_tokens,
        "prompts_per_domain": prompts_per_domain,
        "threads": torch.get_num_threads(),
        "versions": {"adaflash_hf": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "processor": platform.processor() or platform.machine(),
    }
    print(f"\n{format_table(report)}\n")
    print(
        "Ratio: time of plain generate() over time with the drafter, runs taken in turns. Acceptance length: tokens "
        "committed\nper forward of the target after the prompt. Identical: every text equal to plain generate(), token "
        "for token."
    )
    if json_file is not None:
        temporary = f"{json_file}.tmp"
        Path(temporary).write_text(json.dumps(report, indent=2) + "\n")
        os.replace(temporary, json_file)
    return report
