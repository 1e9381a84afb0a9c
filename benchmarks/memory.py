"""Peak memory of a batch on a CPU: plain `generate()` against drafting with whole blocks and with the throughput policy.

    python benchmarks/memory.py --json benchmarks/results/memory.json

SmolLM2-135M-Instruct in float32 with packed linear layers in every arm, 32 prompts of four domains, 64 new tokens. Every
run is a process of its own, whose peak resident memory is reset once the models are loaded and packed. Said are the
whole of it and the part above the loaded target (in the drafting arms the drafter is in that part).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch

from adaflash_hf import AdaFlashDraftModel, packed_linears
from adaflash_hf.demo.assets import DRAFTER, PROMPTS, load_demo_target

ARMS = ("plain", "fixed", "throughput")


def resident(field: str) -> float:
    """`VmRSS` (now) or `VmHWM` (peak) of this process in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux.")


def run_arm(arm: str, rows: int, new: int) -> dict[str, float]:
    """One `generate()` call in this process."""
    target, tokenizer = load_demo_target(say=lambda text: print(text, file=sys.stderr))
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    domains: dict[str, list[str]] = {}
    for prompt in prompts:
        domains.setdefault(prompt["domain"], []).append(prompt["prompt"])
    mixed = [prompt for group in zip(*domains.values()) for prompt in group]
    chats = [[{"role": "user", "content": mixed[row % len(mixed)]}] for row in range(rows)]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    arguments = {"max_new_tokens": new, "do_sample": False}
    packed_linears(target)
    # One short run: what libraries set aside on first use is the loaded model's, not the loop's.
    target.generate(**{name: value[:1, -4:] for name, value in inputs.items()}, max_new_tokens=2, do_sample=False)
    loaded = resident("VmRSS")
    if arm != "plain":
        drafter = AdaFlashDraftModel.from_pretrained(DRAFTER, dtype=torch.float32)
        drafter.generation_config.length_policy = arm
        packed_linears(drafter)
        arguments["assistant_model"] = drafter
    Path("/proc/self/clear_refs").write_text("5")
    output = target.generate(**inputs, **arguments)
    peak = resident("VmHWM")
    return {"loaded": loaded, "peak": peak, "above": peak - loaded, "tokens": list(output.shape)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arm", choices=ARMS, help="run one arm in this process and print its figures as JSON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(run_arm(args.arm, args.rows, args.max_new_tokens)))
        return
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    command = [sys.executable, __file__, "--rows", str(args.rows), "--max-new-tokens", str(args.max_new_tokens)]
    for repeat in range(args.repeats):
        for arm in ARMS:
            print(f"repeat {repeat + 1} of {args.repeats}: {arm}", flush=True)
            done = subprocess.run([*command, "--arm", arm], stdout=subprocess.PIPE, text=True, check=True)
            found[arm].append(json.loads(done.stdout.splitlines()[-1]))
    arms = {
        arm: {name: median(run[name] for run in runs) for name in ("loaded", "peak", "above")}
        | {"peaks": [run["peak"] for run in runs], "shape": runs[0]["tokens"]}
        for arm, runs in found.items()
    }
    print(f"{'MB':12s}{'loaded':>9s}{'peak':>9s}{'above':>9s}{'peak/plain':>12s}{'above/plain':>13s}")
    for arm, entry in arms.items():
        for name in ("peak", "above"):
            entry[f"{name}_ratio"] = entry[name] / arms["plain"][name]
        print(
            f"{arm:12s}{entry['loaded']:9.0f}{entry['peak']:9.0f}{entry['above']:9.0f}"
            f"{entry['peak_ratio']:12.3f}{entry['above_ratio']:13.3f}"
        )
    if args.json:
        result = {
            "rows": args.rows,
            "max_new_tokens": args.max_new_tokens,
            "repeats": args.repeats,
            "unit": "MB",
            "arms": arms,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
