"""Calibrate the demo drafter's survival head on held-out text, and measure how reliable it is on other held-out text.

    python benchmarks/demo/rollouts.py --target DIR --wheels DIR --out GREEDY --held-out
    python benchmarks/demo/rollouts.py --target DIR --wheels DIR --out SAMPLED --held-out --temperature 1
    python benchmarks/demo/calibrate.py --target DIR --greedy GREEDY --sampled SAMPLED \
        --json benchmarks/results/survival_calibration.json --plot docs/images/survival_calibration.png

Held-out prompts are split in two by turns, the demo's own prompts going to the second half: scale and bias of each slot
come from the first, every figure from the second.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaflash_hf import AdaFlashDraftModel
from adaflash_hf.demo.assets import DRAFTER, PROMPTS
from adaflash_hf.generation.length_policy import head_survival
from adaflash_hf.training import OPDConfig, OPDTrainer
from adaflash_hf.training.calibration import SurvivalRounds, fit_calibration, reliability


def split(folder: Path) -> tuple[list[dict], list[dict]]:
    """Rows to fit on and rows to measure on."""
    rows = [json.loads(line) for path in sorted(folder.glob("held-*.jsonl")) for line in path.open()]
    shown = {json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()}
    rows.sort(key=lambda row: (row["domain"], row["source"], row["prompt"]))
    others = [row for row in rows if row["prompt"] not in shown]
    fit = others[::2]
    chosen = {row["prompt"] for row in fit}
    return fit, [row for row in rows if row["prompt"] not in chosen]


def reliability_plot(axis, rounds: SurvivalRounds, calibration, label: str, colour: str) -> None:
    """Mean outcome against mean prediction in 15 bins of equal mass, all slots."""
    survival = head_survival(rounds.logits, calibration, rounds.log_confidence)[rounds.counted]
    outcome = rounds.accepted[rounds.counted].float()
    order = survival.argsort()
    bins = [part for part in order.tensor_split(15) if len(part)]
    axis.plot(
        [float(survival[part].mean()) for part in bins],
        [float(outcome[part].mean()) for part in bins],
        marker="o",
        markersize=4,
        color=colour,
        label=label,
    )


def collect(mode: str, folder: Path, drafter, target, tokenizer) -> list[SurvivalRounds]:
    """Rounds of the text to fit on, and of the text to measure on."""
    with tempfile.TemporaryDirectory() as work:
        config = OPDConfig(
            output_dir=work,
            lmbda=0.0,
            temperature=float(mode == "sampling"),
            per_device_eval_batch_size=8,
            num_anchors=64,
            max_length=1024,
            train_sampling_strategy="group_by_length",
            use_cpu=True,
            report_to="none",
        )
        trainer = OPDTrainer(model=drafter, target_model=target, args=config, processing_class=tokenizer)
        return [trainer.survival_rounds(rows) for rows in split(folder)]


def write_rounds(path: Path, *parts: SurvivalRounds) -> None:
    """Keeps rounds on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"{place}.{name}": value for place, part in enumerate(parts) for name, value in vars(part).items()}, path
    )


def read_rounds(path: Path) -> list[SurvivalRounds]:
    """What [`write_rounds`] kept."""
    held = load_file(path)
    return [
        SurvivalRounds(**{n.split(".")[1]: v for n, v in held.items() if n.startswith(f"{place}.")}) for place in (0, 1)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--greedy", required=True, type=Path)
    parser.add_argument("--sampled", required=True, type=Path)
    parser.add_argument("--drafter", default=str(DRAFTER))
    parser.add_argument("--write", action="store_true", help="write the calibration into the drafter's config.json")
    parser.add_argument("--rounds", type=Path, help="folder that keeps the rounds, so that a second run is quick")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    drafter = AdaFlashDraftModel.from_pretrained(args.drafter, dtype=torch.float32)
    report, kept = {}, {}
    for mode, folder in (("greedy", args.greedy), ("sampling", args.sampled)):
        kept_file = args.rounds / f"{mode}.safetensors" if args.rounds else None
        if kept_file is not None and kept_file.exists():
            fitted, measured = read_rounds(kept_file)
        else:
            fitted, measured = collect(mode, folder, drafter, target, tokenizer)
            if kept_file is not None:
                write_rounds(kept_file, fitted, measured)
        calibration = fit_calibration(fitted)
        before, after = reliability(measured, None), reliability(measured, calibration)
        report[mode] = {"fit_rounds": len(fitted), "before": before, "after": after, "calibration": calibration}
        kept[mode] = (measured, calibration)
        print(mode, json.dumps(report[mode], indent=2), flush=True)
    if args.write:
        drafter.config.survival_calibration = {mode: found["calibration"] for mode, found in report.items()}
        drafter.config.dtype = torch.float16  # as the weights are stored
        drafter.config.save_pretrained(args.drafter)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), constrained_layout=True)
        for axis, (mode, (rounds, calibration)) in zip(axes, kept.items()):
            axis.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=1)
            reliability_plot(axis, rounds, None, f"as trained (ECE {report[mode]['before']['ece']:.3f})", "#ee6677")
            reliability_plot(
                axis, rounds, calibration, f"calibrated (ECE {report[mode]['after']['ece']:.3f})", "#4477aa"
            )
            axis.set(xlabel="predicted survival", ylabel="share accepted", title=f"Survival head, {mode}")
            axis.legend(frameon=False, fontsize=8)
        figure.savefig(args.plot, dpi=130)


if __name__ == "__main__":
    main()
