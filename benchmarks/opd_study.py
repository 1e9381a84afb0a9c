"""Which loss makes a supervised drafter better on text its target has just written (SmolLM2-135M, the shipped drafter).

    python benchmarks/demo/rollouts.py --target DIR --wheels DIR --out TEXT --held-out --rows 256
    python benchmarks/demo/rollouts.py --target DIR --wheels DIR --out TEXT --tokens 130000
    python benchmarks/demo/rollouts.py --target DIR --wheels DIR --out TEXT --first-shard 8 --tokens 130000
    python benchmarks/opd_study.py --target DIR --text TEXT --json benchmarks/results/opd_study.json

Greedy decoding is lossless, so what rollouts with the drafter's help would give is the target's own greedy text: all arms but
`ce-old` and `start` (not trained on) learn from the same fresh prompts and answers, which the first shards of the supervised
stage do not hold. Arms that are in the JSON already, with the same settings, are not run again. Acceptance lengths are those of
whole blocks, walked over held-out greedy text, which is what decoding it does.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from adaflash_hf import AdaFlashDraftModel
from adaflash_hf.demo.assets import DRAFTER
from adaflash_hf.training import OPDConfig, OPDTrainer
from adaflash_hf.training.metrics import SlotMetrics

FIRST_FRESH_SHARD = 8
# Name: (text, arguments of the loss); `None` is not trained.
ARMS = {
    "start": (None, {}),
    "ce-old": ("old", {"alpha": 1.0}),
    "ce-fresh": ("fresh", {"alpha": 1.0}),
    "forward-kl": ("fresh", {"alpha": 0.0, "divergence": "forward_kl"}),
    "mixture": ("fresh", {"alpha": 0.8}),
    "mixture-dpace": ("fresh", {"alpha": 0.8, "position_weighting": "dpace"}),
    "rkl": ("fresh", {"alpha": 0.0}),
    "mixture-decoding-anchors": ("fresh", {"alpha": 0.8, "anchor_sampling": "decoding"}),
}


def read(folder: Path, old: bool) -> list[dict]:
    """Training rows of the supervised stage's first shards, or of later ones."""
    paths = [p for p in sorted(folder.glob("train-*.jsonl")) if (int(p.stem[6:]) < FIRST_FRESH_SHARD) == old]
    return [json.loads(line) for path in paths for line in path.open()]


def place_anchors(rows: list[dict], args: argparse.Namespace, target) -> None:
    """Adds to each row where decoding its text with the shipped drafter opens its rounds: whole blocks, greedy."""
    settings = OPDConfig(
        output_dir=str(args.text / "runs"),
        feature_cache=str(args.text / "features" / "fresh"),
        lmbda=0.0,
        max_length=640,
        per_device_eval_batch_size=16,
        train_sampling_strategy="group_by_length",
        num_anchors=64,
        bf16=True,
        use_cpu=True,
        report_to="none",
    )
    drafter = AdaFlashDraftModel.from_pretrained(DRAFTER, dtype=torch.float32)
    trainer = OPDTrainer(model=drafter, target_model=target, args=settings, train_dataset=rows)
    trainer._evaluated = SlotMetrics(trainer.block_size - 1)
    for batch in tqdm(trainer.get_eval_dataloader(trainer.train_dataset), desc="where decoding opens its rounds"):
        trainer.prediction_step(trainer.model.eval(), batch, True)
    for sample, (_, accepted, _) in trainer._evaluated.rounds.items():
        place, places = trainer.train_dataset.rollouts[sample].prompt_length, []
        for count in accepted:
            places.append(place)
            place += count + 1
        rows[sample]["anchors"] = places


def run(name: str, seed: int, args: argparse.Namespace, target, tokenizer, texts: dict[str, list[dict]]) -> dict:
    """One arm: a copy of the shipped drafter trained and measured."""
    text, loss = ARMS[name]
    set_seed(seed)
    settings = OPDConfig(
        output_dir=str(args.text / "runs"),
        feature_cache=str(args.text / "features" / (text or "fresh")),
        lmbda=0.0,
        eval_acceptance="text",
        max_length=640,
        learning_rate=args.lr,
        head_learning_rate=args.lr,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        train_sampling_strategy="group_by_length",
        num_anchors=64,
        gamma=2.5,
        warmup_steps=20,
        bf16=True,
        use_cpu=True,
        save_strategy="no",
        logging_steps=25,
        report_to="none",
        seed=seed,
        **loss,
    )
    trainer = OPDTrainer(
        model=AdaFlashDraftModel.from_pretrained(DRAFTER, dtype=torch.float32),
        target_model=target,
        args=settings,
        train_dataset=texts[text] if text else None,
        eval_dataset=texts["held"],
        processing_class=tokenizer,
    )
    started = time.time()
    if text:
        trainer.train()
    seconds = time.time() - started
    metrics = trainer.evaluate()
    prefix = "eval_acceptance_length"
    domains = {key[len(prefix) + 1 :]: value for key, value in metrics.items() if key.startswith(prefix + "_")}
    return {
        "name": name,
        "seed": seed,
        "acceptance_length": metrics[prefix],
        "domain_std": domains.pop("std"),
        "domain_min": domains.pop("min"),
        "by_domain": domains,
        "per_slot": [metrics[f"eval_slot_acceptance_{k}"] for k in range(1, trainer.block_size)],
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--text", required=True, type=Path, help="folder that demo/rollouts.py wrote")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--eval-rows", type=int, default=160)
    parser.add_argument("--json", required=True, type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    held = [json.loads(line) for path in sorted(args.text.glob("held-*.jsonl")) for line in path.open()]
    texts = {"old": read(args.text, True), "fresh": read(args.text, False), "held": held}
    # The same number of sequences, and nearly of tokens, on both sides.
    count = min(len(texts["old"]), len(texts["fresh"]))
    texts |= {name: texts[name][:count] for name in ("old", "fresh")}
    texts["held"] = held[:: max(1, len(held) // args.eval_rows)][: args.eval_rows]
    tokens = {name: sum(len(row["response_ids"]) for row in rows) for name, rows in texts.items()}
    settings = {"epochs": args.epochs, "lr": args.lr, "sequences": count, "tokens": tokens, "held": len(texts["held"])}
    report = json.loads(args.json.read_text()) if args.json.exists() else {"settings": settings, "arms": []}
    if report["settings"] != settings:
        raise SystemExit(f"{args.json} holds arms with other settings ({report['settings']}): give another file.")
    done = {(arm["name"], arm["seed"]) for arm in report["arms"]}
    print(f"{count} sequences a side, response tokens {tokens}", flush=True)
    if any((name, seed) not in done for name in args.arms if "decoding-anchors" in name for seed in args.seeds):
        place_anchors(texts["fresh"], args, target)
    for seed in args.seeds:
        for name in args.arms:
            if (name, seed) in done:
                continue
            arm = run(name, seed, args, target, tokenizer, texts)
            report["arms"].append(arm)
            temporary = args.json.with_suffix(".tmp")
            temporary.write_text(json.dumps(report, indent=1) + "\n")
            os.replace(temporary, args.json)
            by_domain = ", ".join(f"{domain} {value:.2f}" for domain, value in sorted(arm["by_domain"].items()))
            print(
                f"{name} (seed {seed}): {arm['acceptance_length']:.3f}, spread {arm['domain_std']:.3f}; {by_domain}; "
                f"{arm['seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
