"""What verifying several tokens at once costs on this CPU: linear layers as loaded, packed, and compiled with freezing.

    python benchmarks/packed_linears.py --json benchmarks/results/packed_linears.json

Forwards of SmolLM2-135M with 128 cached tokens, arms in turns, medians; ratios are to one token of the same arm. The compiled
arm is one linear layer only: compiling a whole decoding loop recompiles for its changing shapes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from adaflash_hf import packed_linears
from adaflash_hf.demo.assets import load_demo_target


@torch.no_grad()
def forward_seconds(model, tokens: int) -> float:
    cache = DynamicCache(config=model.config)
    model(torch.randint(5, 1000, (1, 128)), past_key_values=cache, logits_to_keep=1)
    ids = torch.randint(5, 1000, (1, tokens))
    start = time.perf_counter()
    model(ids, past_key_values=cache)
    return time.perf_counter() - start


def whole_model(repeats: int, sizes: list[int]) -> list[dict]:
    model, _ = load_demo_target()
    rows = []
    for tokens in sizes:
        seconds: dict[str, list[float]] = {"as loaded": [], "packed": []}
        for repeat in range(repeats + 1):
            for arm in seconds:
                pack = packed_linears(model) if arm == "packed" else None
                found = [forward_seconds(model, tokens) for _ in range(2)][-1]
                if pack is not None:
                    pack.restore()
                if repeat:
                    seconds[arm].append(found)
        rows.append({"tokens": tokens, **{arm: 1e3 * statistics.median(s) for arm, s in seconds.items()}})
        print(" ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    return rows


@torch.no_grad()
def one_layer(repeats: int) -> list[dict]:
    import torch._inductor.config as inductor

    torch.manual_seed(0)
    inductor.freezing = True
    loaded = torch.nn.Linear(576, 1536, bias=False)
    packed = torch.nn.Linear(576, 1536, bias=False)
    packed.load_state_dict(loaded.state_dict())
    packed_linears(packed)
    compiled = torch.compile(loaded, dynamic=True)
    rows = []
    for tokens in (1, 4, 8, 16):
        inputs = torch.randn(tokens, 576)
        arms = {"as loaded": loaded, "packed": packed, "compiled": compiled}
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(repeats):
            for arm, layer in arms.items():
                layer(inputs)
                start = time.perf_counter()
                for _ in range(50):
                    layer(inputs)
                seconds[arm].append((time.perf_counter() - start) / 50)
        rows.append({"tokens": tokens, **{arm: 1e6 * statistics.median(s) for arm, s in seconds.items()}})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = {
        "threads": torch.get_num_threads(),
        "model_ms": whole_model(args.repeats, [1, 2, 4, 8, 16]),
        "layer_us": one_layer(args.repeats),
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
