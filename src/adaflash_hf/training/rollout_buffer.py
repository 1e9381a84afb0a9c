"""On-policy text: a buffer of rollouts, trained on a few times and then written anew with the drafter as it is by then.

What is answered when and trained on in which order follows from the seed alone, on every rank and when a run is taken up
again: a place of the plan is a number, and the buffer is filled when a place of the next filling comes up.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import Dataset, Sampler
from transformers.utils.logging import tqdm

from .rollouts import Prompt, Rollout

ROLLOUTS_NAME = "rollouts.json"


class RolloutPlan(Dataset):
    """Places of training: an epoch is a number of fillings, each of `buffer_size` rollouts seen `passes` times.

    Args:
        prompts: Number of prompts.
        buffer_size: Rollouts of a filling, at most all prompts, rounded up to whole optimizer steps.
        passes: How often each is trained on (`rollout_epochs`).
        step_size: Sequences of an optimizer step, over all ranks.
        seed: Of every order.
        shuffle: Whether prompts and rollouts are shuffled.
    """

    def __init__(
        self, prompts: int, buffer_size: int, passes: int, step_size: int, seed: int, shuffle: bool = True
    ) -> None:
        self.prompts, self.passes, self.seed, self.shuffle = prompts, passes, seed, shuffle
        self.buffer_size = math.ceil(min(buffer_size, prompts) / step_size) * step_size
        self.fillings = math.ceil(prompts / self.buffer_size)

    def __len__(self) -> int:
        return self.fillings * self.buffer_size * self.passes

    def __getitem__(self, place: int) -> int:
        return place

    def filling_of(self, place: int) -> int:
        """Number of the filling that a place belongs to, counted on from epoch to epoch."""
        return place // (self.buffer_size * self.passes)

    def prompts_of(self, filling: int) -> list[int]:
        """Indices of the prompts of a filling; the last of an epoch is completed from the epoch's first."""
        epoch, part = divmod(filling, self.fillings)
        order = self._order(self.prompts, 0, epoch)
        first = part * self.buffer_size
        return [order[(first + n) % self.prompts] for n in range(self.buffer_size)]

    def slots_of(self, places: list[int]) -> list[int]:
        """Which rollouts of the buffer are trained on at these places."""
        orders: dict[int, list[int]] = {}
        found = []
        for place in places:
            once, n = divmod(place, self.buffer_size)
            if once not in orders:
                orders[once] = self._order(self.buffer_size, 1, once)
            found.append(orders[once][n])
        return found

    def _order(self, count: int, kind: int, number: int) -> list[int]:
        if not self.shuffle:
            return list(range(count))
        return torch.randperm(count, generator=_generator(self.seed, kind, number)).tolist()

    def describe(self) -> dict[str, Any]:
        """What has to be the same for a filling to be the same."""
        return {name: getattr(self, name) for name in ("prompts", "buffer_size", "passes", "seed", "shuffle")}


class PlanSampler(Sampler):
    """The places of one epoch, in order."""

    def __init__(self, plan: RolloutPlan) -> None:
        self.plan, self.epoch = plan, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch * len(self.plan), (self.epoch + 1) * len(self.plan)))


class RolloutBuffer:
    """The rollouts of one filling, the same on every rank; each rank writes its share of the batches.

    Args:
        prompts: All prompts.
        plan: Who comes when.
        lmbda: Share of the rollouts that the target writes; the others are the dataset's answers, where it has one.
        batch_size: Most prompts answered at once.
        max_length: Where a dataset's answers are cut.
        rank: Of this process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        plan: RolloutPlan,
        *,
        lmbda: float = 1.0,
        batch_size: int = 32,
        max_length: int = 2048,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.prompts, self.plan, self.lmbda = prompts, plan, lmbda
        self.batch_size, self.max_length, self.rank, self.world_size = batch_size, max_length, rank, world_size
        self.filling: int | None = None
        self.rollouts: list[Rollout] = []
        self.samples: list[int] = []

    def fill(self, filling: int, write: Callable[[list[Prompt]], list[Rollout]]) -> None:
        """Writes the rollouts of a filling.

        Args:
            filling: Its number.
            write: Answers a batch of prompts, with this thread's generators seeded for it.
        """
        samples = self.plan.prompts_of(filling)
        draws = torch.rand(len(samples), generator=_generator(self.plan.seed, 2, filling)).tolist()
        prompts = [self.prompts[sample] for sample in samples]
        found: dict[int, Rollout] = {
            slot: Rollout.of(prompt, prompt.answer, prompt.anchors, self.max_length)
            for slot, prompt in enumerate(prompts)
            if prompt.answer is not None and draws[slot] >= self.lmbda
        }
        missing = [slot for slot in range(len(samples)) if slot not in found]
        missing.sort(key=lambda slot: len(prompts[slot].input_ids))
        size = max(1, min(self.batch_size, math.ceil(len(missing) / self.world_size)))
        batches = [missing[start : start + size] for start in range(0, len(missing), size)]
        written: list[tuple[int, Rollout]] = []
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        own = range(self.rank, len(batches), self.world_size)
        for number in tqdm(own, desc="target writes rollouts", leave=False, disable=self.rank > 0 or not own):
            with torch.random.fork_rng(devices):
                # Of the batch, whichever rank writes it.
                torch.manual_seed(_mix(self.plan.seed, 3 + number, filling))
                answers = write([prompts[slot] for slot in batches[number]])
            written += zip(batches[number], answers, strict=True)
        found.update(gather_object(written))
        self.rollouts = [found[slot] for slot in range(len(samples))]
        self.samples, self.filling = samples, filling

    def save(self, folder: str | os.PathLike, **extra: Any) -> None:
        """Writes the buffer into a checkpoint."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        state = {
            "plan": self.plan.describe(),
            "filling": self.filling,
            "samples": self.samples,
            "rollouts": [dataclasses.asdict(rollout) for rollout in self.rollouts],
            **extra,
        }
        path = Path(folder) / ROLLOUTS_NAME
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        os.replace(temporary, path)

    def load(self, folder: str | os.PathLike) -> dict[str, Any]:
        """Reads what [`save`] wrote, and returns it.

        Raises:
            ValueError: There is nothing, or it was written for other prompts or another order.
        """
        path = Path(folder) / ROLLOUTS_NAME
        if not path.exists():
            raise ValueError(
                f"resume_from_checkpoint={str(folder)!r} holds no {ROLLOUTS_NAME}: it was not written by an on-policy run "
                "(lmbda > 0)."
            )
        state = json.loads(path.read_text())
        here = self.plan.describe()
        there = state["plan"]
        different = [
            f"{name}: {there.get(name)} there, {value} here" for name, value in here.items() if there.get(name) != value
        ]
        if different:
            raise ValueError(
                f"resume_from_checkpoint={str(folder)!r} belongs to a run with other rollouts ({'; '.join(different)})."
            )
        self.filling, self.samples = state["filling"], state["samples"]
        self.rollouts = [Rollout(**rollout) for rollout in state["rollouts"]]
        return state


def last_whole_checkpoint(folder: str | os.PathLike) -> str | None:
    """The newest checkpoint of a run that was written to its end: a killed run may leave half a one.

    The trainer's state is what `Trainer` writes last.
    """
    found = []
    for path in Path(folder).glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        if number.isdigit():
            found.append((int(number), str(path)))
    return max(found)[1] if found else None


def _mix(seed: int, kind: int, number: int) -> int:
    return ((seed * 1_000_003 + kind) * 1_000_003 + number) % (1 << 62)


def _generator(seed: int, kind: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(_mix(seed, kind, number))
