"""Give a published DFlash drafter AdaFlash's length heads: only they are trained, so its drafts stay what they were.

    python examples/upgrade_dflash.py --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --prompts prompts.jsonl \
        --out Qwen3-8B-AdaFlash

`prompts.jsonl` holds rows with `prompt` (text or messages) or `messages`, and perhaps `domain`. The target answers them
greedily; a share of the answers is held out, and the survival head is calibrated on it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaflash_hf import AdaFlashDraftModel, OPDConfig, OPDTrainer


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub id of the target")
    parser.add_argument("--drafter", required=True, help="folder or Hub id of a DFlash drafter made for it")
    parser.add_argument("--prompts", required=True, type=Path, help="JSON lines")
    parser.add_argument("--out", required=True, help="folder for the upgraded drafter")
    parser.add_argument("--held-out", type=float, default=0.2, help="share of the prompts to calibrate on (0.2)")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, device_map=device)
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
    drafter = AdaFlashDraftModel.from_pretrained(args.drafter, dtype=torch.float32)
    drafter.add_length_heads()

    rows = [json.loads(line) for line in args.prompts.read_text().splitlines() if line.strip()]
    held = max(1, round(args.held_out * len(rows)))
    trainer = OPDTrainer(
        model=drafter,
        target_model=target,
        args=OPDConfig(
            output_dir=f"{args.out}/training",
            train_only="length_head",
            calibrate_at_end=True,
            max_new_tokens=args.max_new_tokens,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch,
            save_strategy="no",
            report_to="none",
            use_cpu=device == "cpu",
        ),
        train_dataset=rows[held:],
        eval_dataset=rows[:held],
        processing_class=tokenizer,
    )
    trainer.train()
    drafter.generation_config.length_policy = "throughput"
    trainer.save_model(args.out)
    metrics = trainer.evaluate()
    print(
        f"upgraded drafter in {args.out}: acceptance length {metrics['eval_acceptance_length']:.2f} on held-out prompts"
    )
    return metrics


if __name__ == "__main__":
    main()
