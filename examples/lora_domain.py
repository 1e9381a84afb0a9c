"""Adapt a drafter to one domain with a LoRA adapter, and merge it.

    python examples/lora_domain.py --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --prompts law.jsonl --out out

`law.jsonl` holds rows with `prompt` (text or messages) or `messages`. The target answers them; the adapter is saved in `OUT`,
and the drafter with the adapter merged into it in `OUT/merged`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaflash_hf import AdaFlashDraftModel, OPDConfig, OPDTrainer


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub id of the target")
    parser.add_argument("--drafter", required=True, help="folder or Hub id of a drafter made for it")
    parser.add_argument("--prompts", required=True, type=Path, help="JSON lines")
    parser.add_argument("--out", required=True, help="folder for the adapter")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--epochs", type=float, default=3.0)
    args = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, device_map=device)
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
    drafter = AdaFlashDraftModel.from_pretrained(args.drafter, dtype=torch.float32)
    total = drafter.num_parameters()

    trainer = OPDTrainer(
        model=drafter,
        target_model=target,
        args=OPDConfig(
            output_dir=f"{args.out}/training",
            max_new_tokens=args.max_new_tokens,
            num_train_epochs=args.epochs,
            save_strategy="no",
            report_to="none",
            use_cpu=device == "cpu",
        ),
        train_dataset=[json.loads(line) for line in args.prompts.read_text().splitlines() if line.strip()],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    trainer.save_model(args.out)
    share = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad) / total
    trainer.model.merge_and_unload().save_pretrained(f"{args.out}/merged")
    print(f"adapter in {args.out} ({share:.1%} of the drafter's parameters), merged drafter in {args.out}/merged")
    return share


if __name__ == "__main__":
    main()
