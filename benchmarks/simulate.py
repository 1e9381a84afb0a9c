"""SIMULATION: what each length policy would bring under other cost curves, from recorded rounds. Nothing here is timed.

    python benchmarks/simulate.py --record benchmarks/results/rounds            # once; needs the demo's model
    python benchmarks/simulate.py --rounds benchmarks/results/rounds --json benchmarks/results/simulation.json \\
        --plot docs/images/simulation.png

Recording runs the drafter at every position of the target's own greedy answers and keeps each slot's survival and
confidence, the ratio head's value and the accepted length, once for the shipped drafter (blocks of 5) and once with
oracle-noised drafts (blocks of 16, see oracles.py). A replay keeps `concurrency` rows busy: each works through a recorded
answer, a finished one is followed by the next, and a round costs what the curve says. What a replay knows nothing of:
prefill, scheduling, sampling, and a context that grows.

Cost curves, in seconds, of one verify of N tokens over the rows, and of one draft:

- `cpu`: measured on the machine that runs decoding (`--cost FILE`, written by --record).
- `h20`: Qwen3-8B on one H20, the published shape T = 3.6 + 0.29 rows + 0.1095 N ms. Its draft is assumed: 5 of 36 layers of
  the same shape at N = rows x block.
- `h100`, `h200`: rooflines of Qwen3-8B in bfloat16, assumed throughout: 8.2e9 parameters, 989 TFLOP/s dense of which 60 %
  are reached, 3.35 and 4.8 TB/s of which 80 % are, 1,024 tokens of context a row at 147 kB a token, 1 ms a forward for
  launches; the draft is 5 of 36 layers and the head, its parts added instead of overlapped.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from oracles import KnownTexts, NoisedOracle, matches, noised_drafts
from safetensors.torch import load_file, save_file

from adaflash_hf.draft_settings import DraftSettings, ratio_draft_length
from adaflash_hf.generation.drafting import BlockDrafter
from adaflash_hf.generation.length_policy import confidence_survival
from adaflash_hf.generation.throughput import ThroughputPlanner, best_lengths
from adaflash_hf.generation.verify_cost import VerifyCost

DEFAULTS = DraftSettings()
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KINDS = {"shipped": "the shipped drafter, blocks of 5", "oracle": "oracle-noised drafts, blocks of 16"}


@dataclass
class Rounds:
    """One round for every position of every recorded answer, in order.

    Args:
        answer: `[rounds]`, number of the answer.
        survival: `[rounds, slots]`, what the `"throughput"` policy takes as survival.
        confidence: `[rounds, slots]`, prefix product of the largest probabilities.
        ratio: `[rounds]`, the ratio head's value.
        accepted: `[rounds]`, how many drafted tokens of the whole block are accepted.
    """

    answer: torch.Tensor
    survival: torch.Tensor
    confidence: torch.Tensor
    ratio: torch.Tensor
    accepted: torch.Tensor

    @property
    def block_size(self) -> int:
        """Slots and the anchor."""
        return self.survival.shape[1] + 1

    def save(self, path: Path) -> None:
        """Writes half-precision values."""
        tensors = {n: v.to(torch.int16 if v.dtype == torch.int64 else torch.float16) for n, v in vars(self).items()}
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)

    @classmethod
    def load(cls, path: Path) -> Rounds:
        """Reads what [`save`] wrote."""
        held = load_file(path)
        return cls(**{n: v.long() if v.dtype == torch.int16 else v.float() for n, v in held.items()})


@contextmanager
def recording(known: KnownTexts) -> Iterator[dict[tuple[int, ...], list[tuple]]]:
    """Under the `"throughput"` policy: notes every draft, and lets none be verified."""
    answers: dict[tuple[int, ...], list[tuple]] = {}
    survival = BlockDrafter.survival

    def patched(self, output, logits, texts):
        values, confidence = survival(self, output, logits, texts), confidence_survival(logits)
        drafted = self.head.to_token_ids(logits.argmax(-1)).tolist()
        for row, text in enumerate(texts):
            held = tuple(text.tolist())
            rounds = answers.pop(held[:-1], [])
            right = sum(matches(drafted[row], known.ahead(text, len(drafted[row]))))
            rounds.append((values[row], confidence[row], output.length_ratio.view(-1)[row], right))
            answers[held] = rounds
        return torch.zeros_like(values)

    with mock.patch.object(BlockDrafter, "survival", patched):
        yield answers


def record(folder: Path, rows: int, new: int) -> None:
    """Writes `shipped.safetensors`, `oracle.safetensors` and `cost.json` into `folder`."""
    from batched import Bench

    from adaflash_hf import measure_verify_cost, packed_linears

    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        bench = Bench(argparse.Namespace(drafter=str(_drafter()), oracle_drafter=kind == "oracle", max_new_tokens=new))
        config = bench.drafter.generation_config
        with packed_linears(bench.target, bench.drafter):
            if kind == "shipped":
                print("measuring the cost curve", flush=True)
                cost = measure_verify_cost(bench.target, bench.drafter, rows=(1, 2, 4, 8, 16, 32))
                (folder / "cost.json").write_text(json.dumps(cost, indent=2) + "\n")
            # Under this curve nothing is ever paused, so every position is drafted.
            config.length_policy, config.verify_cost = "throughput", {"tokens": [1, 2], "seconds": [1, 2]}
            found = []
            for start in range(0, len(bench.prompts), rows):
                chosen = bench.prompts[start : start + rows]
                inputs = bench.tokenizer.pad({"input_ids": chosen}, return_tensors="pt", padding_side="left")
                known = KnownTexts()
                length = inputs["input_ids"].shape[1]
                # Longer than what is recorded, so that the last blocks are judged whole.
                output = bench.target.generate(
                    **inputs, max_new_tokens=new + bench.drafter.config.block_size, do_sample=False
                )
                bench.know(known, chosen, output[:, length:])
                with ExitStack() as stack:
                    if kind == "oracle":
                        stack.enter_context(noised_drafts(NoisedOracle(known, 2.0, 1.1), bench.drafter))
                    answers = stack.enter_context(recording(known))
                    bench.target.generate(**inputs, max_new_tokens=new, do_sample=False, assistant_model=bench.drafter)
                found += list(answers.values())
                print(f"{kind}: {len(found)} answers, {sum(map(len, found))} rounds", flush=True)
        values = list(zip(*(entry for rounds in found for entry in rounds)))
        numbers = torch.tensor([number for number, rounds in enumerate(found) for _ in rounds])
        rounds = Rounds(numbers, *(torch.stack(column).float() for column in values[:3]), torch.tensor(values[3]))
        rounds.save(folder / f"{kind}.safetensors")


def _drafter() -> Path:
    from adaflash_hf.demo.assets import DRAFTER

    return DRAFTER


def cost_curves(block: int, measured: Path | None) -> dict[str, VerifyCost]:
    """The curves of this file's docstring, for drafts of `block` tokens."""
    curves = {}
    if measured is not None:
        curves["cpu"] = VerifyCost.from_dict(json.loads(measured.read_text()))
    share = 5 / 36
    curves["h20"] = VerifyCost(
        (1.0, 2.0),
        (3.6e-3 + 0.1095e-3, 3.6e-3 + 0.219e-3),
        0.29e-3,
        share * 3.6e-3,
        share * (0.29e-3 + 0.1095e-3 * block),
    )
    parameters, head, compute = 8.2e9, 0.62e9, 0.6 * 989e12
    for name, bandwidth in (("h100", 0.8 * 3.35e12), ("h200", 0.8 * 4.8e12)):
        launch, weights, token = 1e-3, 2 * parameters / bandwidth, 2 * parameters / compute
        bend = weights / token  # tokens from which arithmetic takes longer than reading the weights
        drafted = share * (parameters - 2 * head) + head
        curves[name] = VerifyCost(
            (1.0, bend, 2 * bend),
            (launch + weights, launch + weights, launch + 2 * weights),
            per_row=1024 * 147e3 / bandwidth,
            draft_base=share * launch + 2 * drafted / bandwidth,
            draft_per_row=block * 2 * drafted / compute + share * 1024 * 147e3 / bandwidth,
        )
    return curves


class Replay:
    """Rows that work through recorded answers under a cost curve."""

    def __init__(self, rounds: Rounds, concurrency: int, seed: int = 0) -> None:
        self.rounds = rounds
        starts = torch.cat([torch.tensor([True]), rounds.answer.diff() != 0]).nonzero().flatten().tolist()
        self.answers = list(zip(starts, [*starts[1:], len(rounds.answer)]))
        self.random = random.Random(seed)
        self.places, self.ends = [], []
        for _ in range(concurrency):
            first, last = self.random.choice(self.answers)
            # Rows of a running server are not at their beginning all at once.
            self.places.append(self.random.randrange(first, last))
            self.ends.append(last)

    def advance(self, committed: list[int]) -> int:
        """Moves every row on; the tokens that were really written, ends of answers considered."""
        written = 0
        for row, count in enumerate(committed):
            written += min(count, self.ends[row] - self.places[row])
            self.places[row] += count
            if self.places[row] >= self.ends[row]:
                self.places[row], self.ends[row] = self.random.choice(self.answers)
        return written


def replay(rounds: Rounds, policy: str, concurrency: int, cost: VerifyCost, count: int) -> dict[str, float]:
    """Simulated tokens a second of one policy, and what it did."""
    state, slots = Replay(rounds, concurrency), rounds.block_size - 1
    planner = ThroughputPlanner(cost) if policy in ("throughput", "oracle") else None
    written = seconds = drafted = accepted_all = 0.0
    drafting_rounds = 0
    every = torch.arange(slots)
    for _ in range(count):
        places = torch.tensor(state.places)
        left = [end - place - 1 for place, end in zip(state.places, state.ends)]
        right = rounds.accepted[places]
        survival, drafts, promised = rounds.survival[places], policy != "plain", 0.0
        if policy == "oracle":
            survival = (every[None] < right[:, None]).float()
        caps = [min(slots, max(0, more)) for more in left]
        if policy == "oracle":  # knows before it drafts what the drafts will be worth
            rate = planner._rate(concurrency, cost)
            planned, gained = best_lengths(survival, caps, cost, rate)
            step, checked = cost.verify(concurrency, concurrency), cost.verify(concurrency, concurrency + sum(planned))
            drafts = gained > rate * (checked - step + cost.draft(concurrency))
            planned = planned if drafts else [0] * concurrency
        elif planner is not None:
            drafts = planner.start(concurrency, slots)
            planned = planner.plan(survival, caps) if drafts else [0] * concurrency
        elif policy == "ratio":
            planned = ratio_draft_length(rounds.ratio[places], rounds.block_size, DEFAULTS.length_scale).tolist()
        elif policy == "confidence":
            planned = (rounds.confidence[places] >= DEFAULTS.confidence_threshold).sum(-1).tolist()
        elif policy == "plain":
            planned = [0] * concurrency
        else:
            planned = [slots if policy == "fixed" else int(policy.removeprefix("fixed-"))] * concurrency
        lengths = [min(plan, cap) for plan, cap in zip(planned, caps)]
        kept = torch.minimum(torch.tensor(lengths), right).tolist()
        seconds += cost.verify(concurrency, concurrency + sum(lengths)) + drafts * cost.draft(concurrency)
        if planner is not None:
            if drafts and policy == "throughput":
                promised = float(survival[every[None] < torch.tensor(lengths)[:, None]].sum())
            planner.drafted()
            planner.finish(lengths, kept, promised, drafted=drafts)
        drafted, accepted_all, drafting_rounds = (
            drafted + sum(lengths),
            accepted_all + sum(kept),
            drafting_rounds + drafts,
        )
        written += state.advance([1 + more for more in kept])
    row_rounds = count * concurrency
    return {
        "tokens_per_s": written / seconds,
        "drafted": drafted / row_rounds,
        "accepted": accepted_all / row_rounds,
        "drafting_share": drafting_rounds / count,
    }


def simulate(rounds: Rounds, curves: dict[str, VerifyCost], count: int) -> list[dict]:
    """All policies under all curves."""
    slots = rounds.block_size - 1
    steps = range(1, slots) if slots <= 6 else (1, 2, 3, 4, 6, 10)
    policies = ["plain", "fixed", *(f"fixed-{k}" for k in steps), "ratio", "confidence", "throughput", "oracle"]
    entries = []
    for curve, cost in curves.items():
        for concurrency in CONCURRENCY:
            # Few rows need more rounds for the same number of tokens.
            found = {p: replay(rounds, p, concurrency, cost, max(count, 4096 // concurrency)) for p in policies}
            plain = found["plain"]["tokens_per_s"]
            entries += [
                {
                    "curve": curve,
                    "concurrency": concurrency,
                    "policy": policy,
                    "ratio_to_plain": f["tokens_per_s"] / plain,
                }
                | f
                for policy, f in found.items()
            ]
    return entries


def table(entries: list[dict], curve: str) -> str:
    """Ratios to plain decoding."""
    names = list(dict.fromkeys(entry["policy"] for entry in entries))
    lines = [f"{'SIMULATED ' + curve:18s}" + "".join(f"{count:8d}" for count in CONCURRENCY)]
    for name in names:
        cells = [e["ratio_to_plain"] for e in entries if e["policy"] == name and e["curve"] == curve]
        lines.append(f"{name:18s}" + "".join(f"{cell:8.2f}" for cell in cells))
    return "\n".join(lines)


def plot(results: dict[str, list[dict]], path: Path) -> None:
    """A panel for each drafter and curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = {
        "fixed": ("#ee6677", "-", "whole blocks"),
        "fixed-2": ("#ccbb44", ":", "two drafts"),
        "ratio": ("#aa3377", "-", "ratio head"),
        "confidence": ("#66ccee", "-", "confidence"),
        "throughput": ("#222222", "-", "throughput"),
        "oracle": ("#228833", "--", "oracle lengths"),
    }
    curves = list(dict.fromkeys(entry["curve"] for entry in next(iter(results.values()))))
    figure, axes = plt.subplots(
        len(results), len(curves), figsize=(3.4 * len(curves), 3.1 * len(results)), sharex=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    figure.suptitle("Simulation from recorded rounds (SmolLM2-135M): not measured on these devices")
    for line, (kind, entries) in zip(axes, results.items()):
        for axis, curve in zip(line, curves):
            axis.axhline(1.0, color="#bbbbbb", linewidth=1)
            for policy, (colour, style, label) in styles.items():
                points = [e["ratio_to_plain"] for e in entries if e["policy"] == policy and e["curve"] == curve]
                width = 2.4 if policy == "throughput" else 1.4
                axis.plot(CONCURRENCY, points, color=colour, linestyle=style, linewidth=width, label=label)
            axis.set_xscale("log", base=2)
            axis.set_xticks(CONCURRENCY[::2])
            axis.get_xaxis().set_major_formatter(lambda value, _: f"{int(value)}")
            axis.set_title(f"{curve.upper()} curve, {KINDS[kind]}", fontsize=9)
        line[0].set_ylabel("simulated tokens/s over plain")
    for axis in axes[-1]:
        axis.set_xlabel("concurrent rows")
    axes[0][-1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="folder to record rounds and the cost curve into")
    parser.add_argument("--rounds", type=Path, help="folder to replay from")
    parser.add_argument("--rows", type=int, default=16, help="rows recorded at once")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=300, help="rounds of each replay")
    parser.add_argument("--cost", type=Path, help="another measured cost curve (JSON of measure_verify_cost)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.record is None and args.rounds is None:
        parser.error("give --record FOLDER, or --rounds FOLDER to replay from")
    if args.record is not None:
        record(args.record, args.rows, args.max_new_tokens)
    if args.rounds is None:
        return
    results = {}
    for kind in KINDS:
        rounds = Rounds.load(args.rounds / f"{kind}.safetensors")
        curves = cost_curves(rounds.block_size, args.cost or args.rounds / "cost.json")
        length = 1 + float(rounds.accepted.float().mean())
        print(f"\n{KINDS[kind]}: {len(rounds.answer)} rounds, whole blocks commit {length:.2f} tokens", flush=True)
        results[kind] = simulate(rounds, curves, args.steps)
        for curve in curves:
            print(table(results[kind], curve), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"simulation": True, **results}, indent=1) + "\n")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
