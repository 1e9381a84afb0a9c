"""What packing costs and saves on a CPU: one packed verify against dense forwards over the same cache.

    python benchmarks/packing.py --json benchmarks/results/packing.json

SmolLM2-135M-Instruct in float32 with packed linear layers in every arm, every row with 128 cached tokens. First, N tokens
that make a full rectangle: one packed `[1, N]` forward against a dense `[rows, N / rows]` one, which is the least that
verifying can cost. Then 16 rows with mixed draft lengths: packed against the rectangle padded to the longest. Medians of
interleaved pairs; the logits of both ways are compared first.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from transformers import DynamicCache

from adaflash_hf import packed_linears
from adaflash_hf.demo.assets import load_demo_target
from adaflash_hf.generation.packed_attention import PackedLayout, packed_forward
from adaflash_hf.generation.ragged_cache import RaggedCache

HELD = 128


def prompt_cache(target, rows: int) -> DynamicCache:
    """`HELD` cached tokens in each of `rows` rows."""
    ids = torch.randint(1000, 20000, (rows, HELD))
    return target(input_ids=ids, past_key_values=DynamicCache(config=target.config), use_cache=True).past_key_values


def dense_forward(target, cache: DynamicCache, tokens: torch.Tensor, counts: Sequence[int]) -> Callable:
    """A function that runs the padded rectangle; logits `[N, vocabulary]` of the real tokens."""
    rows, longest = len(counts), max(counts)
    ids, mask = torch.zeros(rows, longest, dtype=torch.long), torch.ones(rows, HELD + longest, dtype=torch.long)
    for row, part in enumerate(tokens.split(list(counts))):
        ids[row, : len(part)] = part
        mask[row, HELD + len(part) :] = 0
    positions = (HELD + torch.arange(longest)).expand(rows, -1)
    real = torch.arange(longest)[None] < torch.tensor(counts)[:, None]

    def run(select: bool = False) -> torch.Tensor:
        logits = target(
            input_ids=ids,
            # A full rectangle needs no padding mask, which is how dense decoding would run it.
            attention_mask=None if bool(real.all()) else mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).logits
        cache.crop(-longest)
        return logits[real] if select else logits

    return run


def packed_run(target, cache: DynamicCache, tokens: torch.Tensor, counts: Sequence[int]) -> Callable:
    """A function that runs the same tokens packed, exactly as the decoding loop does."""
    rows = len(counts)
    ragged = RaggedCache(rows)
    ragged.read_prefix(cache, [0] * rows)
    positions = torch.cat([torch.arange(HELD, HELD + count) for count in counts])[None]

    def run() -> torch.Tensor:
        ragged.write_to(counts)
        with packed_forward(target, PackedLayout(list(counts), list(ragged.lengths))):
            return target(
                input_ids=tokens[None], position_ids=positions, past_key_values=ragged, use_cache=True
            ).logits[0]

    return run


def pair(target, counts: Sequence[int], repeats: int) -> dict:
    """Both ways in turns."""
    cache = prompt_cache(target, len(counts))
    tokens = torch.randint(1000, 20000, (sum(counts),))
    packed, dense = packed_run(target, cache, tokens, counts), dense_forward(target, cache, tokens, counts)
    difference = float((packed() - dense(select=True)).abs().max())
    seconds: dict[str, list[float]] = {"packed": [], "dense": []}
    for repeat in range(repeats):
        order = [("packed", packed), ("dense", dense)]
        for name, run in order[:: 1 if repeat % 2 else -1]:
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    ratios = [a / b for a, b in zip(seconds["packed"], seconds["dense"])]
    return {
        "rows": len(counts),
        "packed_tokens": sum(counts),
        "dense_tokens": len(counts) * max(counts),
        "packed_ms": 1e3 * median(seconds["packed"]),
        "dense_ms": 1e3 * median(seconds["dense"]),
        "packed_over_dense": median(ratios),
        "logit_difference": difference,
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--per-row", type=int, default=4, help="tokens of each row of a full rectangle")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    target, _ = load_demo_target()
    result = {"threads": torch.get_num_threads(), "cached": HELD, "rectangles": [], "mixed": []}
    with packed_linears(target):
        print(f"{'rows':>5s}{'N':>6s}{'dense N':>9s}{'packed ms':>11s}{'dense ms':>10s}{'packed/dense':>14s}")
        for kind, cases in (
            ("rectangles", [[args.per_row] * (count // args.per_row) for count in (8, 32, 128, 256)]),
            ("mixed", [[random.randint(1, most) for _ in range(15)] + [most] for most in (5, 16)]),
        ):
            for counts in cases:
                found = pair(target, counts, args.repeats)
                if kind == "mixed":
                    # What fewer tokens save, over what they would at an equal price a token.
                    found["token_ratio"] = found["dense_tokens"] / found["packed_tokens"]
                    found["share_of_token_ratio"] = 1 / found["packed_over_dense"] / found["token_ratio"]
                result[kind].append(found)
                tail = (
                    f"   padded/packed {1 / found['packed_over_dense']:.2f}, tokens {found['token_ratio']:.2f}"
                    if kind == "mixed"
                    else ""
                )
                print(
                    f"{found['rows']:5d}{found['packed_tokens']:6d}{found['dense_tokens']:9d}{found['packed_ms']:11.1f}"
                    f"{found['dense_ms']:10.1f}{found['packed_over_dense']:14.3f}{tail}",
                    flush=True,
                )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
