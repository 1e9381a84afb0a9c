"""On-policy distillation of a drafter: the target answers your prompts with its help, and it learns from the answers.

    python examples/train_opd.py --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --prompts prompts.jsonl --out out

`prompts.jsonl` holds rows with `prompt` (text or messages) or `messages`, and perhaps `domain`. A share of them is held out:
acceptance on it is measured by decoding before and after. Run again with --resume after an interruption.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaflash_hf import AdaFlashDraftModel, OPDConfig, OPDTrainer


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub id of the target")
    parser.add_argument("--drafter", required=True, help="folder or Hub id of a drafter made for it")
    parser.add_argument("--prompts", required=True, type=Path, help="JSON lines")
    parser.add_argument("--out", required=True, help="folder for the trained drafter")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the prompts to measure on (0.1)")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--buffer", type=int, default=128, help="answers written at a time (128)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, device_map=device)
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")

    rows = [json.loads(line) for line in args.prompts.read_text().splitlines() if line.strip()]
    held = max(1, round(args.held_out * len(rows)))
    trainer = OPDTrainer(
        model=AdaFlashDraftModel.from_pretrained(args.drafter, dtype=torch.float32),
        target_model=target,
        args=OPDConfig(
            output_dir=f"{args.out}/training",
            max_new_tokens=args.max_new_tokens,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch,
            rollout_buffer_size=args.buffer,
            learning_rate=3e-4,
            save_steps=50,
            save_total_limit=2,
            report_to="none",
            use_cpu=device == "cpu",
        ),
        train_dataset=rows[held:],
        eval_dataset=rows[:held],
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_acceptance_length"]
    trainer.train(resume_from_checkpoint=args.resume or None)
    after = trainer.evaluate()["eval_acceptance_length"]
    trainer.save_model(args.out)
    print(f"acceptance length on held-out prompts {before:.2f} -> {after:.2f}; drafter in {args.out}")
    return before, after


if __name__ == "__main__":
    main()
