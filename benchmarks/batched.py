"""Batches on a CPU: plain `generate()` against every length policy, in turns on the same prompts.

    python benchmarks/batched.py --json benchmarks/results/batched.json --plot docs/images/batched.png
    python benchmarks/batched.py --oracle-drafter --json benchmarks/results/batched_oracle.json --plot docs/images/batched_oracle.png

SmolLM2-135M-Instruct in float32 with packed linear layers in every arm, greedy, prompts of four domains, rows of a batch
left padded as a tokenizer makes them. `packed` decodes packed and drafts nothing: what it gains over `plain` is padding
that is not computed, and no merit of drafts. A repeat runs all arms on the same prompts, in an order that moves on each time;
ratios are paired within a repeat, and their 95 % intervals are Student's on the logarithm. Every arm's text is compared
with plain decoding's. `--oracle-drafter` replaces the shipped drafter's guesses by ones that are right with a known
probability (blocks of 16, acceptance length about 4), so that policies are compared where drafts are good.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from statistics import mean, stdev

import torch
from oracles import KnownTexts, NoisedOracle, noised_drafts, perfect_lengths

from adaflash_hf import AdaFlashDraftModel, packed_linears
from adaflash_hf.demo.assets import DRAFTER, PROMPTS, load_demo_target
from adaflash_hf.generation.verify_cost import CostMeter

# Student's 0.975 quantile by degrees of freedom.
QUANTILES = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean of paired ratios and its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = mean(logs)
    half = QUANTILES.get(len(logs) - 1, 2.0) * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else float("inf")
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


class Arm:
    """One way of decoding, and what it did."""

    def __init__(self, name: str, drafter: AdaFlashDraftModel | None = None, **settings) -> None:
        self.name, self.drafter, self.settings = name, drafter, settings
        self.tokens_per_s: list[float] = []
        self.counts = {"rounds": 0, "planned": 0, "drafted": 0, "accepted": 0, "emitted": 0, "paused": 0, "measured": 0}
        self.identical = True
        self.pauses: dict = {}  # what this arm has learned about whether drafting pays
        self.note: str | None = None

    def configure(self) -> None:
        """Sets the drafter's generation config for this arm."""
        for name, value in {"num_assistant_tokens": None, **self.settings}.items():
            setattr(self.drafter.generation_config, name, value)

    def summary(self, rows: int, plain: Arm) -> dict:
        """The entry of the JSON file."""
        entry = {"rows": rows, "arm": self.name}
        if not self.tokens_per_s:
            return (
                entry
                | dict.fromkeys(
                    ("tokens_per_s", "ratio_to_plain", "planned", "drafted", "accepted", "acceptance_length")
                )
                | {"note": self.note}
            )
        ratio, low, high = interval([a / b for a, b in zip(self.tokens_per_s, plain.tokens_per_s)])
        rounds = self.counts["rounds"]
        each = {name: self.counts[name] / rounds if rounds else 0.0 for name in ("planned", "drafted", "accepted")}
        return entry | {
            "tokens_per_s": mean(self.tokens_per_s),
            "ratio_to_plain": ratio,
            **each,
            "acceptance_length": self.counts["emitted"] / rounds if rounds else 1.0,
            "interval": [low, high],
            "repeats": len(self.tokens_per_s),
            "identical": self.identical,
            "paused_share": self.counts["paused"] / rounds if rounds else 0.0,
            "measured_share": self.counts["measured"] / rounds if rounds else 0.0,
        }


def load_prompts(tokenizer, longest: int = 256) -> list[list[int]]:
    """Held-out prompts of four domains, in turns, as token ids; longer ones would leave the time to the prefill."""
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    domains: dict[str, list[str]] = {}
    for row in rows:
        domains.setdefault(row["domain"], []).append(row["prompt"])
    mixed = [prompt for group in zip(*domains.values()) for prompt in group]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt in mixed
    ]
    found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [ids for ids in found if len(ids) <= longest]


def make_arms(drafter: AdaFlashDraftModel, wide: AdaFlashDraftModel | None, rows: int, oracle: bool) -> list[Arm]:
    """All arms of one number of rows."""
    slots = drafter.config.block_size - 1
    steps = range(1, slots) if slots <= 6 else (1, 2, 3, 4, 6, 10)
    arms = [
        Arm("plain"),
        Arm("transformers-dflash", drafter, length_policy="fixed"),
        Arm("packed", drafter, length_policy="fixed", num_assistant_tokens=0),
        Arm("fixed", drafter, length_policy="fixed"),
    ]
    arms += [Arm(f"fixed-{k}", drafter, length_policy="fixed", num_assistant_tokens=k) for k in steps]
    arms += [
        Arm("ratio", drafter, length_policy="ratio"),
        Arm("confidence", drafter, length_policy="confidence"),
        Arm("throughput", drafter, length_policy="throughput"),
        Arm("oracle", drafter, length_policy="throughput"),
    ]
    if wide is not None and rows in (16, 32):
        arms.append(Arm("fixed-block-16", wide, length_policy="fixed"))
    dflash = arms[1]
    if rows > 1:
        dflash.note = "transformers' DFlash generation decodes one row"
    elif drafter.config.draft_vocab_size is not None or drafter.config.mask_token_id is None:
        dflash.note = (
            "the drafter has a draft vocabulary and a learned mask embedding, which transformers' loop cannot use"
        )
    elif oracle:
        dflash.note = "not run with replaced drafts"
    return arms


class Bench:
    """Target, drafter and prompts, and one batch at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.target, self.tokenizer = load_demo_target()
        self.drafter = AdaFlashDraftModel.from_pretrained(args.drafter, dtype=torch.float32)
        self.wide = None
        if args.oracle_drafter:
            self.drafter = widened(self.drafter, 16)
        elif self.drafter.config.block_size < 16:
            self.wide = widened(self.drafter, 16)
        self.prompts = load_prompts(self.tokenizer)
        self.pad = self.tokenizer.pad_token_id

    def batch(self, rows: int, repeat: int) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
        """Left-padded inputs of `rows` prompts, others in every repeat."""
        start = repeat * rows
        chosen = [self.prompts[(start + place) % len(self.prompts)] for place in range(rows)]
        longest = max(map(len, chosen))
        ids = torch.full((rows, longest), self.pad)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(chosen):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        return {"input_ids": ids, "attention_mask": mask}, chosen

    def run(self, arm: Arm, inputs: dict[str, torch.Tensor], known: KnownTexts, count: bool) -> torch.Tensor:
        """One `generate()`; new tokens `[rows, new]`."""
        arguments = {"max_new_tokens": self.args.max_new_tokens, "do_sample": False}
        with ExitStack() as stack:
            if arm.drafter is not None:
                arm.configure()
                CostMeter.shared(self.target, arm.drafter).pauses = arm.pauses
                arguments["assistant_model"] = arm.drafter
                if arm.name == "transformers-dflash":
                    arguments["speculation_type"] = "dflash"
                if self.args.oracle_drafter:
                    oracle = NoisedOracle(known, *self.args.beta)
                    stack.enter_context(noised_drafts(oracle, arm.drafter))
                stack.enter_context(perfect_lengths(known) if arm.name == "oracle" else nullcontext())
            started = time.perf_counter()
            output = self.target.generate(**inputs, **arguments)
            seconds = time.perf_counter() - started
        new = output[:, inputs["input_ids"].shape[1] :]
        if count:
            ends = (new == self.tokenizer.eos_token_id).long().argmax(1)
            ended = (new == self.tokenizer.eos_token_id).any(1)
            tokens = int(torch.where(ended, ends + 1, new.shape[1]).sum())
            arm.tokens_per_s.append(tokens / seconds)
            if arm.drafter is not None and arm.name != "transformers-dflash":
                for name in arm.counts:
                    arm.counts[name] += getattr(arm.drafter.last_draft_stats, name)
        return new

    def measure(self, rows: int, seconds: float) -> list[Arm]:
        """All arms on one number of rows, repeated until the time is up (three times at least)."""
        arms = make_arms(self.drafter, self.wide, rows, self.args.oracle_drafter)
        if self.args.arms:
            arms = [arm for arm in arms if arm.name in {"plain", *self.args.arms}]
        running = [arm for arm in arms if arm.note is None]
        plain = running[0]
        started, repeat = time.time(), 0
        while repeat < self.args.min_repeats or time.time() - started < seconds * repeat / (repeat + 1):
            inputs, chosen = self.batch(rows, repeat)
            known = KnownTexts()
            if repeat == 0 or self.args.oracle_drafter:
                # The drafts of an oracle need the text beforehand; otherwise this warms up.
                self.know(known, chosen, self.run(plain, inputs, known, count=False))
            if repeat == 0:
                for arm in running:
                    if arm.name == "throughput":  # its sweep over draft lengths is made once for a number of rows
                        self.run(arm, inputs, known, count=False)
            # Plain first: it tells the oracle arm what is right.
            order = running[1:]
            order = order[repeat % len(order) :] + order[: repeat % len(order)]
            base = self.run(plain, inputs, known, count=True)
            if not self.args.oracle_drafter:
                self.know(known, chosen, base)
            for arm in order:
                new = self.run(arm, inputs, known, count=True)
                arm.identical &= torch.equal(new, base)
            repeat += 1
            ratios = ", ".join(f"{a.name} {a.tokens_per_s[-1] / plain.tokens_per_s[-1]:.2f}" for a in running[1:])
            print(f"  rows {rows}, repeat {repeat}: plain {plain.tokens_per_s[-1]:.1f} tokens/s; {ratios}", flush=True)
        return arms

    def know(self, known: KnownTexts, chosen: list[list[int]], new: torch.Tensor) -> None:
        """Adds the finished texts."""
        for prompt, row in zip(chosen, new.tolist()):
            end = row.index(self.tokenizer.eos_token_id) + 1 if self.tokenizer.eos_token_id in row else len(row)
            known.add(prompt, prompt + row[:end])


def widened(drafter: AdaFlashDraftModel, block_size: int) -> AdaFlashDraftModel:
    """The drafter with larger blocks and no survival head (which is made for one block size)."""
    config = type(drafter.config)(**{
        **drafter.config.to_dict(), "block_size": block_size, "length_heads": ["ratio"], "survival_calibration": None
    })  # fmt: skip
    wide = AdaFlashDraftModel(config)
    state = {name: value for name, value in drafter.state_dict().items() if not name.startswith("survival_head.")}
    wide.load_state_dict(state)
    return wide.eval()


def comparisons(rows: int, arms: list[Arm]) -> dict:
    """The throughput policy against the other arms, paired."""
    found = {arm.name: arm for arm in arms if arm.tokens_per_s}
    ours = found["throughput"]
    simple = [
        arm for name, arm in found.items() if name == "plain" or (name.startswith("fixed") and "block" not in name)
    ]
    best = max(simple, key=lambda arm: mean(arm.tokens_per_s))
    result = {"rows": rows, "best_simple": best.name}
    for label, arm in {
        "vs_best_simple": best,
        **{
            f"vs_{name}": found[name]
            for name in ("packed", "ratio", "confidence", "fixed", "oracle", "fixed-block-16")
            if name in found
        },
    }.items():
        ratio, low, high = interval([a / b for a, b in zip(ours.tokens_per_s, arm.tokens_per_s)])
        result[label] = {"ratio": ratio, "interval": [low, high]}
    return result


def table(entries: list[dict]) -> str:
    """Ratios to plain by rows and arm."""
    rows = sorted({entry["rows"] for entry in entries})
    names = list(dict.fromkeys(entry["arm"] for entry in entries))
    found = {(entry["rows"], entry["arm"]): entry for entry in entries}
    lines = [f"{'tokens/s over plain':20s}" + "".join(f"{n:>20d}" for n in rows)]
    for name in names:
        cells = []
        for n in rows:
            entry = found.get((n, name))
            if entry is None or entry["ratio_to_plain"] is None:
                cells.append(f"{'-':>20s}")
            else:
                low, high = entry["interval"]
                cells.append(f"{entry['ratio_to_plain']:6.2f} [{low:.2f}, {high:.2f}]".rjust(20))
        lines.append(f"{name:20s}" + "".join(cells))
    if "fixed" in names:
        lines.append(
            f"{'acceptance length':20s}" + "".join(f"{found[(n, 'fixed')]['acceptance_length']:20.2f}" for n in rows)
        )
    lines.append(f"{'plain tokens/s':20s}" + "".join(f"{found[(n, 'plain')]['tokens_per_s']:20.1f}" for n in rows))
    return "\n".join(lines)


def plot(entries: list[dict], path: Path, title: str) -> None:
    """Ratio to plain against rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = {
        "packed": ("#999999", "--", "packed, no drafts"),
        "fixed": ("#ee6677", "-", "whole blocks"),
        "fixed-1": ("#ccbb44", "--", "one draft"),
        "fixed-2": ("#ccbb44", ":", "two drafts"),
        "ratio": ("#aa3377", "-", "ratio head (AdaFlash)"),
        "confidence": ("#66ccee", "-", "confidence (D-Cut)"),
        "throughput": ("#222222", "-", "throughput"),
        "oracle": ("#228833", "--", "oracle lengths"),
        "fixed-block-16": ("#ee6677", ":", "whole blocks of 16"),
    }
    figure, axis = plt.subplots(figsize=(7.5, 4.5), constrained_layout=True)
    axis.axhline(1.0, color="#bbbbbb", linewidth=1)
    for name, (colour, line, label) in styles.items():
        points = [entry for entry in entries if entry["arm"] == name and entry["ratio_to_plain"] is not None]
        if not points:
            continue
        x = [entry["rows"] for entry in points]
        y = [entry["ratio_to_plain"] for entry in points]
        wide = 2.5 if name == "throughput" else 1.5
        axis.plot(x, y, color=colour, linestyle=line, marker="o", markersize=4, linewidth=wide, label=label)
        if name == "throughput":
            axis.fill_between(
                x, [e["interval"][0] for e in points], [e["interval"][1] for e in points], color=colour, alpha=0.12
            )
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({entry["rows"] for entry in entries}))
    axis.get_xaxis().set_major_formatter(lambda value, _: f"{int(value)}")
    axis.set(xlabel="rows of the batch", ylabel="tokens/s over plain generate()", title=title)
    axis.legend(frameon=False, fontsize=8, ncol=2)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default=str(DRAFTER))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--arms", nargs="*", help="only these and plain; without throughput nothing is compared with it"
    )
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument(
        "--minutes", type=float, default=18.0, help="for all rows together; three repeats are always made"
    )
    parser.add_argument("--min-repeats", type=int, default=3)
    parser.add_argument("--oracle-drafter", action="store_true")
    parser.add_argument(
        "--beta", type=float, nargs=2, default=[2.0, 1.1], help="difficulty of the oracle drafter's blocks"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    random.seed(0)
    bench = Bench(args)
    entries, compared = [], []
    # A repeat of 32 rows takes about ten times one of a single row, which in turn says little.
    weights = {rows: 1.6 + rows / 6 for rows in args.rows}
    with packed_linears(bench.target, bench.drafter, *([bench.wide] if bench.wide is not None else [])):
        for rows in args.rows:
            arms = bench.measure(rows, 60 * args.minutes * weights[rows] / sum(weights.values()))
            entries += [arm.summary(rows, arms[0]) for arm in arms]
            if any(arm.name == "throughput" for arm in arms):
                compared.append(comparisons(rows, arms))
            if args.json:  # kept as it grows
                args.json.parent.mkdir(parents=True, exist_ok=True)
                temporary = args.json.with_suffix(".tmp")
                temporary.write_text(json.dumps(entries, indent=1) + "\n")
                temporary.replace(args.json)
    print(table(entries))
    for found in compared:
        parts = [
            f"{name} {value['ratio']:.3f} [{value['interval'][0]:.3f}, {value['interval'][1]:.3f}]"
            for name, value in found.items()
            if isinstance(value, dict)
        ]
        print(f"throughput, {found['rows']} rows (best simple arm: {found['best_simple']}): {', '.join(parts)}")
    if args.json:
        args.json.with_suffix(".comparisons.json").write_text(json.dumps(compared, indent=1) + "\n")
    if args.plot:
        kind = "oracle-noised drafts, blocks of 16" if args.oracle_drafter else "the shipped drafter, blocks of 5"
        plot(entries, args.plot, f"SmolLM2-135M on {torch.get_num_threads()} CPU threads, {kind}")


if __name__ == "__main__":
    main()
