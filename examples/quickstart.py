"""Load a target and its drafter, and decode with one more argument.

With no argument this runs on SmolLM2-135M-Instruct and the drafter shipped with the package, on the CPU and without a
hub. With your own models:

    python examples/quickstart.py --target Qwen/Qwen3-8B --drafter AdaFlash/Qwen3-8B-AdaFlash
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaflash_hf import AdaFlashDraftModel


def load(target_id: str | None, drafter_id: str | None):
    """Target, drafter and tokenizer; the demo's where none are named."""
    if target_id is None:
        from adaflash_hf.demo.assets import DRAFTER, load_demo_target

        target, tokenizer = load_demo_target()
        return target, AdaFlashDraftModel.from_pretrained(drafter_id or DRAFTER, dtype=torch.float32), tokenizer
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(target_id, dtype=dtype, device_map=device)
    drafter = AdaFlashDraftModel.from_pretrained(drafter_id, dtype=dtype, device_map=device)
    return target, drafter, AutoTokenizer.from_pretrained(target_id, padding_side="left")


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id of a causal language model")
    parser.add_argument("--drafter", help="folder or Hub id of a drafter made for it")
    parser.add_argument("--prompt", default="Explain in three sentences why the sky is blue.")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args(arguments)

    target, drafter, tokenizer = load(args.target, args.drafter)
    messages = [{"role": "user", "content": args.prompt}]
    if tokenizer.chat_template is None:
        inputs = tokenizer(args.prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    inputs = inputs.to(target.device)

    output = target.generate(
        **inputs,
        assistant_model=drafter,
        max_new_tokens=args.max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    text = tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    stats = output.draft_stats
    print(text)
    print(f"\n{stats.emitted} tokens in {stats.rounds} rounds: {stats.acceptance_length:.2f} a forward of the target")
    return text


if __name__ == "__main__":
    main()
