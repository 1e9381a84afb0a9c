"""Train the demo drafter on the target's text with the package's own trainer (supervised stage).

python benchmarks/demo/train.py --target DIR --rollouts DIR --out DIR [--epochs 3]
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

from adaflash_hf import AdaFlashDraftModel
from adaflash_hf.training import OPDConfig, OPDTrainer


class StopAfter(TrainerCallback):
    """Ends training (with its last evaluation and checkpoint) when the time is up."""

    def __init__(self, minutes: float) -> None:
        self.minutes, self.started = minutes, None

    def on_step_end(self, args, state, control, **kwargs):
        self.started = self.started or time.time()
        control.should_training_stop |= time.time() - self.started > 60 * self.minutes


def read(folder: Path, pattern: str) -> list[dict]:
    """Rows of all shards."""
    return [json.loads(line) for path in sorted(folder.glob(pattern)) for line in path.open()]


def draft_vocabulary(rows: list[dict], size: int) -> list[int]:
    """The `size` most frequent response tokens."""
    counts = collections.Counter(token for row in rows for token in row["response_ids"])
    ids = [token for token, _ in counts.most_common(size)]
    covered = sum(counts[token] for token in ids) / sum(counts.values())
    print(f"draft vocabulary: {len(ids)} of {len(counts)} seen tokens, {covered:.2%} of the training text")
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--rollouts", required=True, type=Path)
    parser.add_argument("--features", help="folder for the target's states (default: OUT/features)")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--resume-from", help="start from this drafter's weights")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, default=9)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--block-size", type=int, default=5)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--taps", type=int, nargs="*")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--soft", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=3.0)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--eval-rows", type=int, default=96)
    parser.add_argument("--eval-steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    # bfloat16 has a hardware path on recent CPUs; labels differ from float32's at near-ties only.
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    train, held = read(args.rollouts, "train-*.jsonl"), read(args.rollouts, "held-*.jsonl")
    held = held[:: max(1, len(held) // args.eval_rows)][: args.eval_rows]
    if args.resume_from:
        drafter = AdaFlashDraftModel.from_pretrained(args.resume_from, dtype=torch.float32)
    else:
        drafter = AdaFlashDraftModel.from_target(
            target,
            num_hidden_layers=args.layers,
            num_key_value_heads=args.kv_heads,
            intermediate_size=args.intermediate,
            block_size=args.block_size,
            draft_token_ids=draft_vocabulary(train, args.draft_vocab),
            **({"target_layer_ids": args.taps} if args.taps else {}),
        ).float()
    print(
        f"drafter: {drafter.num_parameters() / 1e6:.2f}M parameters; {len(train)} training rollouts, {len(held)} held out"
    )
    trainer = OPDTrainer(
        model=drafter,
        target_model=target,
        args=OPDConfig(
            output_dir=str(args.out / "checkpoints"),
            lmbda=0.0,
            eval_acceptance="text",
            feature_cache=args.features or str(args.out / "features"),
            max_length=640,
            learning_rate=args.lr,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch,
            per_device_eval_batch_size=16,
            train_sampling_strategy="group_by_length",
            num_anchors=args.anchors,
            gamma=args.gamma,
            alpha=1.0 - args.soft,
            divergence="forward_kl",
            warmup_steps=50,
            adam_beta2=0.98,
            weight_decay=0.01,
            bf16=True,
            use_cpu=True,
            logging_steps=50,
            eval_strategy="steps",
            eval_on_start=True,
            eval_steps=args.eval_steps,
            save_steps=args.eval_steps,
            save_total_limit=1,
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=train,
        eval_dataset=held,
        processing_class=tokenizer,
        callbacks=[StopAfter(args.minutes)],
    )
    trainer.train()
    metrics = trainer.evaluate()
    print(json.dumps(metrics, indent=2))
    trainer.save_model(str(args.out / "drafter"))
    (args.out / "metrics.json").write_text(
        json.dumps({"args": vars(args), "log": trainer.state.log_history}, default=str)
    )


if __name__ == "__main__":
    main()
