"""Write `src/adaflash_hf/demo/prompts.jsonl`: held-out prompts of four domains, drawn by seed.

python benchmarks/demo/demo_prompts.py --wheels DIR
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from prompts import held_out_prompts

OUT = Path(__file__).parents[2] / "src" / "adaflash_hf" / "demo" / "prompts.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", required=True, type=Path)
    parser.add_argument("--per-domain", type=int, default=12)
    args = parser.parse_args()
    rows = held_out_prompts(args.wheels)
    random.Random(7).shuffle(rows)
    lines = []
    for domain in ("chat", "math", "code", "stories"):
        chosen = [row for row in rows if row["domain"] == domain][: args.per_domain]
        lines += [json.dumps({key: row[key] for key in ("domain", "source", "prompt")}) for row in chosen]
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
