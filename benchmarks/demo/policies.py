"""Which length policy and threshold pays best for the demo's drafter, on held-out prompts that the demo does not show.

python benchmarks/demo/policies.py --wheels DIR --drafter DIR --json benchmarks/results/demo_policies.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch

from adaflash_hf import AdaFlashDraftModel, packed_linears
from adaflash_hf.demo.assets import PROMPTS, load_demo_target
from adaflash_hf.evaluation.compare import compare_decoding

sys.path.insert(0, str(Path(__file__).parent))
from prompts import held_out_prompts

SETTINGS = [
    {"length_policy": "fixed", "num_assistant_tokens": 2},
    {"length_policy": "fixed"},
    {"length_policy": "ratio"},
    *({"length_policy": "confidence", "confidence_threshold": t} for t in (0.05, 0.1, 0.2, 0.3, 0.45)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", required=True, type=Path)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--per-domain", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shown = {json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()}
    rows = [row for row in held_out_prompts(args.wheels) if row["prompt"] not in shown]
    random.Random(11).shuffle(rows)
    prompts = [
        row
        for domain in ("chat", "math", "code", "stories")
        for row in [r for r in rows if r["domain"] == domain][: args.per_domain]
    ]
    target, tokenizer = load_demo_target()
    drafter = AdaFlashDraftModel.from_pretrained(args.drafter, dtype=torch.float32)
    results = []
    with packed_linears(target, drafter):
        for settings in SETTINGS:
            for name in ("length_policy", "confidence_threshold", "num_assistant_tokens"):
                setattr(drafter.generation_config, name, settings.get(name))
            report = compare_decoding(target, drafter, tokenizer, prompts, max_new_tokens=args.max_new_tokens)
            results.append({**settings, **report})
            figures = {k: report[k] for k in ("mean_ratio", "min_ratio", "mean_acceptance_length", "identical")}
            print(settings, figures, flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
