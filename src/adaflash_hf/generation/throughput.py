"""The `"throughput"` policy: lengths that follow survival and cost, and no drafts where drafts do not pay."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from .verify_cost import CostMeter, VerifyCost, rows_class

_TRIAL, _RETRIAL = 8, 4  # drafts that are judged together, before and after a pause
_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 64


def best_lengths(survival: torch.Tensor, caps: Sequence[int], cost: VerifyCost, rate: float) -> tuple[list[int], float]:
    """Draft lengths of one round that commit the most for their time.

    A round of lengths L commits `rows + sum_r sum_{k <= L_r} S_{r,k}` tokens in `T(rows, rows + sum L)` seconds.
    Survival falls along a row, so the best choice for any number of checked tokens is the most likely ones; all
    numbers are tried, since T need not be convex, and the one with the largest `tokens - rate * seconds` is taken.

    Args:
        survival: `[rows, slots]`, probability that drafted tokens 1…k are all accepted.
        caps: Most drafted tokens of each row.
        cost: Cost curve.
        rate: Tokens a second that the time would otherwise buy.

    Returns:
        Draft length of each row, and the accepted tokens expected of them.
    """
    rows, slots = survival.shape
    allowed = torch.arange(slots)[:, None] < torch.tensor(list(caps))[None]
    # Slot by slot and stable, so that of equals the earlier slot comes first.
    values = survival.detach().cpu().double().T.masked_fill(~allowed, -1.0).flatten()
    order = values.argsort(descending=True, stable=True)[: int(allowed.sum())]
    gained = torch.cat([values.new_zeros(1), values[order].cumsum(0)])
    seconds = cost.verify_all(rows, rows + torch.arange(len(gained)))
    count = int((gained - rate * seconds).argmax())
    lengths = torch.bincount(order[:count] % rows, minlength=rows).tolist()
    return lengths, float(gained[count])


class PauseRule:
    """When drafting stops for a while: where a few drafts together cost more than they brought.

    A pause doubles while every trial after it ends the same way.
    """

    def __init__(self) -> None:
        self._worth: deque[float] = deque(maxlen=_TRIAL)
        self._needed, self._pause, self._wait = _TRIAL, 0, 0

    def skip(self) -> bool:
        """Whether the round that begins is paused."""
        paused = self._wait > 0
        self._wait -= paused
        return paused

    def judge(self, worth: float) -> None:
        """Takes in what a round's drafts were worth, in tokens, time deducted."""
        self._worth.append(worth)
        if len(self._worth) < self._needed:
            return
        if sum(self._worth) >= 0.0:
            self._needed, self._pause = _TRIAL, 0
            return
        self._wait = self._pause = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, 2 * self._pause))
        self._worth.clear()
        self._needed = _RETRIAL


class ThroughputPlanner:
    """Decides the rounds of one `generate()` call.

    Speed is counted against plain decoding of the same rows, so that it means the same while rows drop out. Where drafts
    are worth less than the time that they and their verification take, rounds become plain decoding steps (see
    [`PauseRule`]; with a measured curve the next call goes on from there).

    Args:
        cost: A saved curve, which makes every decision reproducible; `None` to measure.
        meter: Where timings are collected and taken from, without a saved curve.
    """

    def __init__(self, cost: VerifyCost | None = None, meter: CostMeter | None = None) -> None:
        self.cost, self.meter = cost, meter
        self.was_paused = False
        # Checked drafts: what their survival promised and what came, with a prior of 16 kept promises.
        self._promised = self._kept = 16.0
        # Tokens a row and plain steps' worth of time, with a prior of plain decoding, forgotten slowly.
        self._tokens = self._steps = 4.0
        self._pauses: dict[int, PauseRule] = {} if cost is not None else meter.pauses
        self._rule = PauseRule()
        self._sweep: int | None = None
        self._expected: float | None = None
        self._marks = [0.0, 0.0]

    @property
    def speed(self) -> float:
        """Tokens a second so far over plain decoding's, at least 1."""
        return max(1.0, self._tokens / self._steps)

    @property
    def reliability(self) -> float:
        """Accepted tokens over what survival promised."""
        return min(1.5, self._kept / self._promised)

    @property
    def was_measured(self) -> bool:
        """Whether the round belongs to the sweep of the meter."""
        return self._sweep is not None

    def start(self, rows: int, cap: int) -> bool:
        """Opens a round of `rows` rows that may draft up to `cap` tokens each; whether to draft at all."""
        self._marks[0] = self._marks[1] = time.perf_counter()
        self._expected, self._sweep, self.was_paused = None, None, False
        if self.cost is None:
            self._sweep = self.meter.next_length(rows, cap)
            if self._sweep is not None:
                return self._sweep > 0
        self._rule = self._pauses.setdefault(rows_class(rows), PauseRule())
        self.was_paused = self._rule.skip()
        return not self.was_paused

    def plan(self, survival: torch.Tensor, caps: Sequence[int]) -> list[int]:
        """Draft lengths, caps included. `survival` is `[rows, slots]`."""
        rows = len(caps)
        if self._sweep is not None:
            return [min(self._sweep, cap) for cap in caps]
        cost = self._curve()
        survival = (survival.float() * self.reliability).clamp(max=1.0)
        lengths, self._expected = best_lengths(survival, caps, cost, self._rate(rows, cost))
        return lengths

    def drafted(self) -> None:
        """Called when the drafts are there, which is where the verification's time begins."""
        self._marks[1] = time.perf_counter()

    def finish(self, lengths: Sequence[int], accepted: Sequence[int], promised: float, drafted: bool) -> None:
        """Closes a round.

        Args:
            lengths: Drafted tokens of each row.
            accepted: How many of them were accepted.
            promised: Sum of the survival of the drafted tokens.
            drafted: Whether the drafter ran.
        """
        now = time.perf_counter()
        rows, tokens = len(lengths), len(lengths) + sum(lengths)
        draft_seconds, verify_seconds = self._marks[1] - self._marks[0], now - self._marks[1]
        self._promised += promised
        self._kept += sum(accepted) if promised else 0.0
        if self._sweep is not None:
            self.meter.add(rows, tokens, verify_seconds, draft_seconds if drafted else None)
            return
        cost = self._curve()
        step = cost.verify(rows, rows)
        spent = cost.verify(rows, tokens) + drafted * cost.draft(rows)
        if self.cost is None:
            self.meter.observe(rows, tokens, verify_seconds, draft_seconds if drafted else None)
        if drafted and self._expected is not None:
            self._rule.judge(self._expected - self._rate(rows, cost) * (spent - step))
        self._tokens = 0.98 * self._tokens + 1.0 + sum(accepted) / rows
        self._steps = 0.98 * self._steps + spent / step

    def _curve(self) -> VerifyCost:
        return self.cost if self.cost is not None else self.meter.cost

    def _rate(self, rows: int, cost: VerifyCost) -> float:
        return self.speed * rows / cost.verify(rows, rows)
