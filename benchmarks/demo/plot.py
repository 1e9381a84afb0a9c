"""Plot what the demo drafter's training run logged and what the demo measured.

python benchmarks/demo/plot.py --run DIR --demo-json benchmarks/results/demo.json --out docs/images/demo.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from adaflash_hf.training.callbacks import draw_acceptance

COLOURS = {"chat": "#4477aa", "math": "#ee6677", "code": "#228833", "stories": "#aa8800"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path)
    parser.add_argument("--demo-json", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    log = json.loads((args.run / "metrics.json").read_text())["log"]
    demo = json.loads(args.demo_json.read_text())
    left, right = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)[1]
    draw_acceptance(left, log)
    left.set_title("Supervised training of the demo drafter")
    names = list(demo["domains"])
    ratios = [demo["domains"][name]["ratio"] for name in names]
    bars = right.bar(names, ratios, color=[COLOURS[name] for name in names], width=0.6)
    right.bar_label(bars, fmt="%.2f")
    right.axhline(1.0, color="black", linewidth=0.8)
    right.set_xlabel("line at 1: plain generate()", fontsize=9)
    right.set(ylabel="tokens/s, ratio to plain", title="Demo: same text, greedy, two CPU threads")
    right.spines[["top", "right"]].set_visible(False)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(args.out, dpi=130)


if __name__ == "__main__":
    main()
